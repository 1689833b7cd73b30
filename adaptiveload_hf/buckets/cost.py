"""How many seconds does a micro-batch take, and how much memory? The measurements, and the laws fitted to them."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..errors import UserError
from .shapes import LatentShape

_LARGEST = 1e12  # of what is measured
_SHORTEST = 1e-15  # seconds of a step; ratios of shorter ones would leave the range of float64
_MOST_SAMPLES = (1 << 31) - 1  # of a micro-batch, also in a bucket config
_MOST_TOKENS = 1 << 53  # where memory does not grow; whole in float64


@dataclass(frozen=True)
class Measurement:
    """One timed (shape, B), the same on all ranks.

    Args:
        shape: latent shape, `21x60x104`.
        tokens: S of one sample.
        batch_size: B.
        seconds: median seconds of a training step with this micro-batch.
        peak_gib: most that the CUDA allocator had handed out on the fullest rank, in GiB; 0 if it cannot be read. For
            an `oom` it is what was reached before.
        rank_seconds: the same time for each rank.
        oom: the step did not fit, or only by freeing cached memory in every step; then `seconds` is meaningless.
        reserved_gib: what the allocator had reserved: the peak and what fragmentation wastes; 0: not read.
    """

    shape: str
    tokens: int
    batch_size: int
    seconds: float
    peak_gib: float
    rank_seconds: tuple[float, ...] = ()
    oom: bool = False
    reserved_gib: float = 0.0

    def to_json(self) -> str:
        """One line of measurements.jsonl."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Measurement:
        """Reads one line of measurements.jsonl.

        Raises:
            UserError: broken JSON, a missing or unknown key, or a number that cannot be one.
        """
        try:
            values = json.loads(line)
            measurement = cls(**{**values, "rank_seconds": tuple(values.get("rank_seconds", ()))})
            LatentShape.parse(measurement.shape)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"not a measurement: {error}") from None
        counts = measurement.tokens, measurement.batch_size
        numbers = (measurement.seconds, measurement.peak_gib, measurement.reserved_gib, *measurement.rank_seconds)
        wrong_type = [n for n in counts if type(n) is not int] + [n for n in numbers if type(n) not in (int, float)]
        if wrong_type or type(measurement.oom) is not bool:
            raise UserError(
                "tokens and batch_size must be whole numbers, seconds, GiB and rank_seconds numbers, oom true or "
                f"false, but found {values}"
            )
        possible = all(1 <= n < 1 << 31 for n in counts) and all(0 <= n <= _LARGEST for n in numbers)  # NaN is neither
        if not possible or (measurement.seconds <= 0 and not measurement.oom):
            raise UserError(
                "tokens and batch_size must be at least 1, seconds above 0, peak_gib and reserved_gib at least 0, "
                f"but found {values}"
            )
        return measurement


def read_measurements(path: str | Path) -> tuple[list[Measurement], list[str]]:
    """Reads a measurements.jsonl, keeping every good line.

    Returns:
        The measurements, and one sentence for each line that is broken (a run that was cut off leaves half a line).

    Raises:
        UserError: no such file.
    """
    if not Path(path).is_file():
        raise UserError(
            f"Expected a measurements.jsonl, but {path} is no file. Measure first (recipes/benchmark_shapes.py), or "
            "name the file in a config's folder."
        )
    measurements, problems = [], []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            measurements.append(Measurement.from_json(line))
        except UserError as error:
            problems.append(f"{path}, line {number}: {error}")
    return measurements, problems


class CostModel:
    """Seconds of a micro-batch: a part that does not grow with B, and B times a part that grows with S."""

    kind: ClassVar[str]
    unit: ClassVar[str] = "seconds"

    @property
    def parameters(self) -> dict[str, float]:
        """Name -> value, as saved in a bucket config."""
        return asdict(self)

    def seconds_per_sample(self, tokens):
        """Seconds that one more sample of S tokens adds. tokens: int or array; returns float64 of its shape."""
        raise NotImplementedError

    def seconds(self, batch_size, tokens):
        """Predicted seconds. batch_size, tokens: ints or arrays that broadcast; returns float64."""
        return self._fixed_seconds() + np.asarray(batch_size) * self.seconds_per_sample(tokens)

    def largest_batch(self, tokens, seconds: float) -> np.ndarray:
        """The largest B with seconds(B, S) <= seconds; 0 if even one sample takes longer.

        Args:
            tokens: S, an int or an array.

        Returns:
            int64 of the shape of tokens.
        """
        per_sample = np.asarray(self.seconds_per_sample(tokens), dtype=np.float64)
        one_fits = self.seconds(1, tokens) <= seconds
        if np.any(one_fits & (per_sample <= 0)) or not np.isfinite(seconds):
            raise UserError(
                f"The cost of S = {tokens} does not grow with the batch size ({self}), so no largest batch exists. "
                "Measure this shape at a larger batch size, or give a memory limit."
            )
        # By halving: dividing lands far off where one sample is lost in the rounding of the fixed part.
        fixed, low, high = self._fixed_seconds(), one_fits.astype(np.int64), np.where(one_fits, _MOST_SAMPLES, 0)
        while np.any(low < high):
            middle = (low + high + 1) // 2
            fits = fixed + middle * per_sample <= seconds
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        return low

    def _fixed_seconds(self) -> float:
        return 0.0


@dataclass(frozen=True)
class PowerLaw(CostModel):
    """a + b * B * S**p. Source: AdaptiveLoad (arXiv 2605.17923), its step-time law."""

    kind: ClassVar[str] = "power_law"
    a: float
    b: float
    p: float

    def seconds_per_sample(self, tokens):
        return self.b * np.asarray(tokens, dtype=np.float64) ** self.p

    def _fixed_seconds(self) -> float:
        return self.a


@dataclass(frozen=True)
class Additive(CostModel):
    """a + c0*B + c1*B*S + c2*B*S**2: optimizer, per-sample, matrix and attention work, one after the other."""

    kind: ClassVar[str] = "additive"
    a: float
    c0: float
    c1: float
    c2: float

    def seconds_per_sample(self, tokens):
        tokens = np.asarray(tokens, dtype=np.float64)
        return self.c0 + tokens * (self.c1 + self.c2 * tokens)

    def _fixed_seconds(self) -> float:
        return self.a


@dataclass(frozen=True)
class Roofline(CostModel):
    """max(floor, a + c0*B + c1*B*S + c2*B*S**2): below the floor the host launches slower than the GPU computes.

    `a` is the optimizer's and the communication's share, which no sample adds to. Without it the shortest steps above
    the floor are missed by 3-5% (tests/data), with it by 1%.
    """

    kind: ClassVar[str] = "roofline"
    floor: float
    c0: float
    c1: float
    c2: float
    a: float = 0.0

    seconds_per_sample = Additive.seconds_per_sample

    def seconds(self, batch_size, tokens):
        return np.maximum(self.floor, self.a + np.asarray(batch_size) * self.seconds_per_sample(tokens))

    def _fixed_seconds(self) -> float:
        return self.a


@dataclass(frozen=True)
class FlopCount(Additive):
    """Additive, but counted from a model's config (buckets/flops.py) instead of fitted: right in proportion only."""

    kind: ClassVar[str] = "flops"
    unit: ClassVar[str] = "relative cost"


_KINDS: dict[str, type[CostModel]] = {model.kind: model for model in (PowerLaw, Additive, Roofline, FlopCount)}


def cost_model_from_dict(saved: dict) -> CostModel:
    """The cost model of `{"kind": ..., "parameters": {...}}`.

    Raises:
        UserError: an unknown kind, or parameters that are not non-negative numbers with that kind's names, or make a
            step take no time.
    """
    model = _KINDS.get(saved.get("kind"))
    if model is None:
        raise UserError(f"Expected a cost model of kind {sorted(_KINDS)}, but found {saved.get('kind')!r}.")
    expected, found = {field.name for field in fields(model)}, saved.get("parameters", {})
    required = {field.name for field in fields(model) if field.default is MISSING}
    if not required <= set(found) <= expected or not all(
        isinstance(v, (int, float)) and 0 <= v < np.inf for v in found.values()
    ):
        raise UserError(
            f"The {model.kind} cost model has the non-negative parameters {sorted(expected)}, but found {found}."
        )
    loaded = model(**{name: float(value) for name, value in found.items()})
    check_cost(loaded, 1)
    return loaded


def check_cost(cost: CostModel, tokens) -> None:
    """
    Args:
        tokens: S of one sample, or of each bucket.

    Raises:
        UserError: a step would take no time, less than none with more samples, or more than any number.
    """
    one, more = cost.seconds(1, tokens), cost.seconds_per_sample(tokens)
    if not (np.all(one >= _SHORTEST) and np.all(more >= 0) and np.all(np.isfinite(one))):
        raise UserError(
            f"A cost model must make a step take time, and more samples no less, but by {cost} one of S = {tokens} "
            f"takes {one} and each further one {more}. Fit it again."
        )


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory of a rank in GiB: the floor, floor_gib + floor_gib_per_token * B * S, or if it is higher the line,
    base_gib + B * (gib_per_sample + gib_per_token * S).

    The line is the peak when backward begins: every checkpoint is there, no gradient yet. The floor is the peak at a
    step's end: all gradients, but the activations of one block only, or what the optimizer needs for itself. Where the
    line is not known, memory beyond the largest measured B*S is bounded by a proportion: max(floor, line, c * B * S).
    Peaks are the highest of lines, and a line that holds something before any sample grows by less than that.

    Args:
        base_gib, gib_per_token: the line.
        floor_gib, floor_gib_per_token: the floor. 0: none, and flat (as in configs of before there were these).
        known_tokens: B*S beyond which c * B * S counts, c such that it meets the law there; None: the slope is known.
        gib_per_sample: what each sample takes whatever its shape, such as its prompt.
    """

    base_gib: float
    gib_per_token: float
    floor_gib: float = 0.0
    known_tokens: int | None = None
    gib_per_sample: float = 0.0
    floor_gib_per_token: float = 0.0

    def gib(self, batch_size, tokens):
        """Predicted GiB. batch_size, tokens: ints or arrays that broadcast."""
        batch_size = np.asarray(batch_size, dtype=np.float64)
        work = batch_size * np.asarray(tokens)
        known = self._known_gib(work, batch_size * self.gib_per_sample)
        return np.maximum(known, self._bound_gib_per_token() * work)

    def max_tokens(self, limit_gib: float, tokens):
        """The paper's M_mem: the largest B*S of samples of S tokens that fits into limit_gib; 0 if nothing does.

        tokens: S, int or array; returns int64 of its shape.
        """
        tokens = np.asarray(tokens)
        if limit_gib < max(self.floor_gib, self.base_gib):
            return np.zeros_like(tokens)
        found = (limit_gib - self.base_gib) / (self.gib_per_token + self.gib_per_sample / tokens)
        bound, most = self._bound_gib_per_token(), float(_MOST_TOKENS)
        if self.floor_gib_per_token:
            most = min(most, (limit_gib - self.floor_gib) / self.floor_gib_per_token)
        if bound:
            most = min(most, limit_gib / bound)
        return np.minimum(found, most).astype(np.int64)

    def _known_gib(self, work, of_samples_gib=0.0):
        floor = self.floor_gib + self.floor_gib_per_token * work
        return np.maximum(floor, self.base_gib + of_samples_gib + self.gib_per_token * work)

    def _bound_gib_per_token(self) -> float:
        if self.known_tokens is None:
            return 0.0
        return float(self._known_gib(self.known_tokens)) / self.known_tokens
