"""How many seconds does a micro-batch take, and how much memory? Fitted to measured steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..errors import UserError

# S is divided by this while fitting, so that all coefficients are of the same order.
_TOKEN_SCALE = 1e4
# Compute-bound steps repeat within about 2% (NVIDIA H200, tests/data); launch-bound ones stray by 20% and more.
_LEAST_RESIDUAL_SCALE = 0.02


@dataclass(frozen=True)
class Measurement:
    """One timed (shape, B), the same on all ranks.

    Args:
        shape: latent shape, `21x60x104`.
        tokens: S of one sample.
        batch_size: B.
        seconds: median seconds of a training step with this micro-batch.
        peak_gib: peak memory of a rank in GiB; 0 where it cannot be read. Of an `oom` it is what was reached before.
        rank_seconds: the same time rank by rank.
        oom: the step did not fit; `seconds` means nothing then.
    """

    shape: str
    tokens: int
    batch_size: int
    seconds: float
    peak_gib: float
    rank_seconds: tuple[float, ...] = ()
    oom: bool = False

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
            values["rank_seconds"] = tuple(values.get("rank_seconds", ()))
            measurement = cls(**values)
            numbers = (measurement.tokens, measurement.batch_size, measurement.seconds, measurement.peak_gib)
            possible = np.isfinite(numbers).all() and min(numbers[:2]) >= 1 and measurement.peak_gib >= 0
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"not a measurement: {error}") from None
        if not possible or (measurement.seconds <= 0 and not measurement.oom):
            raise UserError(
                "tokens and batch_size must be at least 1, seconds above 0 and peak_gib at least 0, "
                f"but found {numbers}"
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
        raise UserError(f"Expected measurements in {path}, but there is no such file. Run benchmark_shapes.py first.")
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

    def largest_batch(self, tokens: int, seconds: float) -> int:
        """The largest B with seconds(B, S) <= seconds; 0 if even one sample takes longer."""
        if self.seconds(1, tokens) > seconds:
            return 0
        per_sample = float(self.seconds_per_sample(tokens))
        if per_sample <= 0 or not np.isfinite(seconds):
            raise UserError(
                f"The cost of S = {tokens} does not grow with the batch size ({self}), so no largest batch exists. "
                "Measure this shape at a larger batch size, or give a memory limit."
            )
        batch = max(1, int((seconds - self._fixed_seconds()) / per_sample))
        # The division may land one off where seconds is exactly the cost of a whole number of samples.
        while self.seconds(batch + 1, tokens) <= seconds:
            batch += 1
        while batch > 1 and self.seconds(batch, tokens) > seconds:
            batch -= 1
        return batch

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
    """max(floor, c0*B + c1*B*S + c2*B*S**2): below the floor the host launches slower than the GPU computes."""

    kind: ClassVar[str] = "roofline"
    floor: float
    c0: float
    c1: float
    c2: float

    seconds_per_sample = Additive.seconds_per_sample

    def seconds(self, batch_size, tokens):
        return np.maximum(self.floor, np.asarray(batch_size) * self.seconds_per_sample(tokens))


@dataclass(frozen=True)
class FlopCount(Additive):
    """Additive, but counted from a model's config (buckets/flops.py) instead of fitted: right in proportion only."""

    kind: ClassVar[str] = "flops"
    unit: ClassVar[str] = "relative cost"


_FITTED = (PowerLaw.kind, Additive.kind, Roofline.kind)
_KINDS: dict[str, type[CostModel]] = {model.kind: model for model in (PowerLaw, Additive, Roofline, FlopCount)}


def cost_model_from_dict(saved: dict) -> CostModel:
    """The cost model of `{"kind": ..., "parameters": {...}}`.

    Raises:
        UserError: an unknown kind, or parameters that are not non-negative numbers with that kind's names, or all 0.
    """
    model = _KINDS.get(saved.get("kind"))
    if model is None:
        raise UserError(f"Expected a cost model of kind {sorted(_KINDS)}, but found {saved.get('kind')!r}.")
    expected, found = {field.name for field in fields(model)}, saved.get("parameters", {})
    if set(found) != expected or not all(isinstance(v, (int, float)) and 0 <= v < np.inf for v in found.values()):
        raise UserError(
            f"A {model.kind} cost model has the non-negative parameters {sorted(expected)}, but found {found}."
        )
    loaded = model(**{name: float(value) for name, value in found.items()})
    if loaded.seconds(1, 1) <= 0:
        raise UserError(f"A cost model must make a step take time, but {found} makes it take none. Fit it again.")
    return loaded


@dataclass(frozen=True)
class CandidateFit:
    """One form, fitted to all points. Errors are |predicted / measured - 1|.

    median_error, max_error: over the fitted points.
    leave_one_out_error: mean over the shapes of the median error on a shape that the fit did not see.
    """

    model: CostModel
    median_error: float
    max_error: float
    leave_one_out_error: float


@dataclass(frozen=True)
class CostFit:
    """What `fit_cost_model` chose, and every form that it tried."""

    model: CostModel
    candidates: dict[str, CandidateFit]
    power_law: PowerLaw


def fit_cost_model(measurements: Sequence[Measurement], kinds: str | Sequence[str] = "all") -> CostFit:
    """Fits seconds(B, S) and chooses the form that best predicts shapes it has not seen.

    Minimises the robust (Cauchy) loss of predicted / measured - 1 with non-negative parameters. The form with the
    smallest leave-one-shape-out error wins. Deterministic, and independent of the order of the measurements.

    Args:
        measurements: timed points; those marked `oom` are left out.
        kinds: "all", or some of "power_law", "additive", "roofline"; the power law is always fitted as well.

    Raises:
        UserError: an unknown kind, or too few points to tell the parameters apart.

    Source: the paper fits a + b*B*S**p only; the other forms and the choice between them are ours.
    """
    wanted = list(_FITTED) if kinds == "all" else list(kinds)
    if not wanted or not set(wanted) <= set(_FITTED):
        raise UserError(f"kinds must be 'all' or some of {sorted(_FITTED)}, but found {kinds!r}.")
    points = _points(measurements)
    held_out = points[:, 1] if len(np.unique(points[:, 1])) > 2 else np.arange(len(points))
    candidates = {}
    for kind in dict.fromkeys([*wanted, "power_law"]):
        model = _fit(kind, points)
        errors = _relative_errors(model, points)
        unseen = [
            np.median(_relative_errors(_fit(kind, points[held_out != group]), points[held_out == group]))
            for group in np.unique(held_out)
        ]
        candidates[kind] = CandidateFit(model, float(np.median(errors)), float(errors.max()), float(np.mean(unseen)))
    best = min(wanted, key=lambda kind: candidates[kind].leave_one_out_error)
    return CostFit(candidates[best].model, candidates, candidates["power_law"].model)


def _points(measurements: Sequence[Measurement]) -> np.ndarray:
    """float64 [points, 3], (B, S, seconds), sorted so that the order of the lines does not matter."""
    rows = sorted((m.batch_size, m.tokens, m.seconds) for m in measurements if not m.oom)
    points = np.array(rows, dtype=np.float64).reshape(-1, 3)
    if len(np.unique(points[:, 1])) < 2:
        raise UserError(
            f"A cost model needs at least two shapes with different numbers of tokens, but the measurements have "
            f"{sorted(set(points[:, 1].astype(int).tolist()))}. Add your smallest and your largest shape."
        )
    if len(np.unique(points[:, :2], axis=0)) < 4:
        raise UserError(
            f"A cost model needs at least 4 different (shape, batch size) points, but found "
            f"{sorted({(int(s), int(b)) for b, s, _ in points})} as (tokens, batch size). "
            "Add more shapes, or the same shapes at twice the batch size."
        )
    work = points[:, 0] * points[:, 1]
    if len(np.unique(points[:, 0])) < 2 or work.max() < 2 * work.min():
        raise UserError(
            f"All measurements have batch size {sorted(set(points[:, 0].astype(int).tolist()))} and B*S between "
            f"{work.min():.0f} and {work.max():.0f}, so the part of the cost that grows with B cannot be told from "
            "the rest. Add the smallest shape at a larger batch size."
        )
    return points


def _relative_errors(model: CostModel, points: np.ndarray) -> np.ndarray:
    return np.abs(model.seconds(points[:, 0], points[:, 1]) / points[:, 2] - 1)


def _model(kind: str, x: np.ndarray) -> CostModel:
    if kind == "power_law":
        return PowerLaw(float(x[0]), float(x[1] / _TOKEN_SCALE ** x[2]), float(x[2]))
    return _KINDS[kind](float(x[0]), float(x[1]), float(x[2] / _TOKEN_SCALE), float(x[3] / _TOKEN_SCALE**2))


def _starts(kind: str, points: np.ndarray) -> list[np.ndarray]:
    """Where the search begins: linear non-negative least squares with the form's kink or exponent held fixed."""
    from scipy.optimize import nnls

    batch, tokens, seconds = points[:, 0], points[:, 1] / _TOKEN_SCALE, points[:, 2]
    ones = np.ones_like(batch)

    def solve(*columns, rows=slice(None)):
        # Divided by seconds, so that the residual is the relative error.
        matrix = np.stack(columns, axis=1)[rows] / seconds[rows, None]
        return nnls(matrix, np.ones(len(matrix)))[0]

    if kind == "power_law":
        return [np.append(solve(ones, batch * tokens**p), p) for p in (1.0, 1.5, 2.0)]
    columns = (batch, batch * tokens, batch * tokens**2)
    if kind == "additive":
        return [solve(ones, *columns)]
    floors = np.quantile(seconds, [0.0, 0.1, 0.25, 0.5])
    return [np.append(floor, solve(*columns, rows=seconds >= floor)) for floor in floors]


def _fit(kind: str, points: np.ndarray) -> CostModel:
    from scipy.optimize import least_squares

    def residuals(x):
        return _model(kind, x).seconds(points[:, 0], points[:, 1]) / points[:, 2] - 1

    starts, loss, scale = _starts(kind, points), "soft_l1", _LEAST_RESIDUAL_SCALE
    # First absolute errors, then a loss that grows only with the logarithm beyond the errors that are usual here: so
    # strays do not bend the slope, and a form that fits nowhere is not fitted to a few points alone.
    for _ in range(3):
        fits = [least_squares(residuals, x, bounds=(0, np.inf), loss=loss, f_scale=scale) for x in starts]
        best = min(fits, key=lambda fit: fit.cost)
        starts, loss = [*starts, best.x], "cauchy"
        scale = max(_LEAST_RESIDUAL_SCALE, float(np.median(np.abs(residuals(best.x)))))
    return _model(kind, best.x)


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory of a rank: base_gib + gib_per_token * B * S, in GiB."""

    base_gib: float
    gib_per_token: float

    def gib(self, batch_size, tokens):
        """Predicted GiB. batch_size, tokens: ints or arrays that broadcast."""
        return self.base_gib + self.gib_per_token * np.asarray(batch_size, dtype=np.float64) * tokens

    def max_tokens(self, limit_gib: float) -> int:
        """The paper's M_mem: the largest B*S that fits into limit_gib; 0 if nothing does."""
        if limit_gib < self.base_gib:
            return 0
        return int((limit_gib - self.base_gib) / self.gib_per_token)


def fit_memory_model(measurements: Sequence[Measurement]) -> MemoryModel:
    """The tightest line in B*S that lies on or above every measured peak.

    Not a mean line: half of its predictions would be too low, and each of those is a crash. Of repeated points the
    highest counts. A point that ran out of memory needs more than its own peak and than any peak that fitted.

    Raises:
        UserError: no peak was measured, or at one B*S only.
    """
    from scipy.optimize import linprog

    fitted = [(m.batch_size * m.tokens, m.peak_gib) for m in measurements if not m.oom and m.peak_gib > 0]
    if len({work for work, _ in fitted}) < 2:
        raise UserError(
            f"A memory model needs peak_gib at two or more different B*S, but found {sorted(set(fitted))} as "
            "(B*S, GiB). Measure on the device that you will train on, a small and a large point."
        )
    highest = max(gib for _, gib in fitted)
    failed = [(m.batch_size * m.tokens, 1.001 * max(highest, m.peak_gib)) for m in measurements if m.oom]
    work, gib = np.array(sorted(fitted) + sorted(failed)).T
    scale = work.max()
    lines = np.stack([np.ones_like(work), work / scale], axis=1)
    base, slope = linprog(lines.sum(axis=0), A_ub=-lines, b_ub=-gib, bounds=(0, None)).x
    return MemoryModel(float(base), float(max(slope, 1e-9 * highest) / scale))


def repeated_measurements(measurements: Sequence[Measurement]) -> list[str]:
    """One sentence for each (shape, B) whose repeats disagree in memory: the plan uses the highest."""
    peaks: dict[tuple[int, str, int], list[float]] = {}
    for m in measurements:
        if not m.oom:
            peaks.setdefault((m.tokens, m.shape, m.batch_size), []).append(m.peak_gib)
    return [
        f"{shape} at batch size {batch} was measured at {min(gib):.2f} to {max(gib):.2f} GiB; the higher is used."
        for (_, shape, batch), gib in sorted(peaks.items())
        if max(gib) > 1.01 * min(gib)
    ]
