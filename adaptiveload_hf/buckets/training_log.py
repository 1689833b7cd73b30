"""What do the steps of a real training run tell about the cost of a micro-batch? Read from its metrics.jsonl."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ..errors import UserError
from .cost import CostModel, Measurement
from .fit import CostFit, TimedSteps, find_outliers, fit_steps, sensitivity
from .shapes import LatentShape, TokenGeometry

_WARM_UP_STEPS = 2
LARGEST_WAIT = 0.05  # of a step; the GPU may or may not have worked meanwhile, so a longer wait makes the step unsure
_LONGEST = 1e12  # seconds
_MOST_PROBLEMS = 3  # named; of the rest their number is
_FEWEST_STEPS = 12
_MOST_STEPS = 400  # more make a fit slower, not better
_HELD_OUT_GROUPS = 5
_LARGEST_ERROR = 0.15


@dataclass(frozen=True)
class TrainingLog:
    """The optimizer steps of a log that can be fitted.

    Args:
        steps: one for each optimizer step.
        shapes: of each micro-batch, str [steps, K, W].
        left_out: one sentence for each reason for which lines were left out.
        says_tokens: whether its lines say how many tokens a sample has; the geometry then agrees with them.
    """

    steps: TimedSteps
    shapes: np.ndarray
    left_out: tuple[str, ...]
    says_tokens: bool


@dataclass(frozen=True)
class _Line:
    step: int
    seconds: float
    waited: float
    shapes: np.ndarray
    batch_size: np.ndarray
    tokens: dict[str, int]  # of those shapes of which it says them


def read_training_log(path: str | Path, geometry: TokenGeometry) -> TrainingLog:
    """Reads the metrics.jsonl of a training run.

    Left out are the first two lines, each line with a shape that no line before had (a first time compiles, tunes or
    allocates), steps that waited over 5% of their time for data, and lines of another K or W than the last. The wait
    is subtracted from the others.

    Args:
        path: one JSON object a line, with `step`, `seconds`, `micro_batches` (per micro-step and rank, shape, batch
            size and maybe tokens) and maybe `data_wait_seconds`, as recipes/train_wan.py writes them.
        geometry: of the model.

    Raises:
        UserError: no such file, fewer than 12 lines that can be fitted, or a line with other tokens of a shape than
            the geometry's.
    """
    lines, problems = _read_lines(Path(path))
    reasons: Counter[str] = Counter()
    seen: set[str] = set()
    kept = []
    for index, line in enumerate(lines):
        new = set(line.shapes.flat) - seen
        seen |= new
        if index < _WARM_UP_STEPS:
            reasons[f"the first {_WARM_UP_STEPS}"] += 1
        elif new:
            reasons["a shape came for the first time"] += 1
        elif line.waited > LARGEST_WAIT * line.seconds:
            reasons[f"waited over {LARGEST_WAIT:.0%} of their time for data"] += 1
        elif line.shapes.shape != lines[-1].shapes.shape:
            reasons["other ranks or accumulation than the last step"] += 1
        else:
            kept.append(line)
    left_out = (*problems, *(f"{count} steps are left out: {reason}." for reason, count in reasons.items()))
    if len(kept) < _FEWEST_STEPS:
        raise UserError(
            f"A cost model needs at least {_FEWEST_STEPS} usable optimizer steps, but {path} has {len(kept)}. "
            + " ".join(left_out)
            + " Train longer (with more --dataloader_num_workers where steps waited for data)."
        )
    if len(kept) > _MOST_STEPS:
        kept = [kept[i] for i in np.linspace(0, len(kept) - 1, _MOST_STEPS).astype(int)]
    shapes = np.stack([line.shapes for line in kept])
    tokens = {shape: geometry.tokens(LatentShape.parse(shape)) for shape in np.unique(shapes).tolist()}
    for line in kept:
        _check_tokens(line, tokens, geometry)
    steps = TimedSteps(
        batch_size=np.stack([line.batch_size for line in kept]),
        tokens=np.vectorize(tokens.get, otypes=[np.float64])(shapes),
        seconds=np.array([line.seconds - line.waited for line in kept]),
        names=tuple(f"step {line.step}" for line in kept),
    )
    return TrainingLog(steps, shapes, left_out, all(line.tokens for line in kept))


def _check_tokens(line: _Line, tokens: dict[str, int], geometry: TokenGeometry) -> None:
    for shape, found in line.tokens.items():
        if found != tokens[shape]:
            raise UserError(
                f"A sample of {shape} had {found} tokens in step {line.step} of the log, but {geometry} make "
                f"{tokens[shape]}. Give patch size and text tokens of the model that was trained."
            )


def fit_training_log(log: TrainingLog) -> CostFit:
    """Fits seconds(B, S) to steps that are the sum over micro-steps of the maximum over ranks.

    Raises:
        UserError: the steps do not tell the cost of half and of a whole batch of each shape to 15% of a micro-step.
    """
    tokens = np.unique(log.steps.tokens)
    if len(tokens) < 2:
        raise UserError(
            f"A cost model needs at least two shapes with different numbers of tokens, but the log has "
            f"{np.unique(log.shapes).tolist()} only. Train on your smallest and your largest shape too, or measure "
            "with recipes/benchmark_shapes.py."
        )
    groups = np.arange(len(log.steps.seconds)) % _HELD_OUT_GROUPS
    fit = fit_steps(log.steps, [[np.flatnonzero(groups == group)] for group in range(_HELD_OUT_GROUPS)])
    _check_identified(fit, log)
    return fit


def apportion_seconds(log: TrainingLog, fit: CostFit) -> list[Measurement]:
    """Each (shape, B) of the log with its share of the steps' seconds, so that a bucket config can be made of it.

    The share is the law's prediction, times the median of measured / predicted over the steps, strays apart, in
    which this micro-batch was the slowest of its micro-step. Memory is in no log: `peak_gib` is 0.
    """
    steps, model = log.steps, fit.model
    ratio = steps.seconds / steps.predict(model)
    slowest = model.seconds(steps.batch_size, steps.tokens).argmax(axis=2)
    strays = {outlier.name for outlier in find_outliers(fit)}
    ratios: dict[tuple[int, str, int], list[float]] = {}
    for step, micro_step, rank in np.ndindex(log.shapes.shape):
        at = step, micro_step, rank
        key = (int(steps.tokens[at]), str(log.shapes[at]), int(steps.batch_size[at]))
        told = rank == slowest[step, micro_step] and steps.names[step] not in strays
        ratios.setdefault(key, []).extend([ratio[step]] if told else [])
    return [
        Measurement(shape, tokens, batch, float(model.seconds(batch, tokens) * np.median(found or [1.0])), 0.0)
        for (tokens, shape, batch), found in sorted(ratios.items())
    ]


def _read_lines(path: Path) -> tuple[list[_Line], list[str]]:
    if not path.is_file():
        raise UserError(f"Expected the metrics.jsonl of a training run in {path}, but there is no such file.")
    lines, problems = [], []
    with open(path, encoding="utf-8", errors="replace") as texts:
        for number, text in enumerate(texts, start=1):
            if not text.strip():
                continue
            try:
                lines.append(_read_line(text))
            except UserError as error:
                problems.append(f"{path.name} line {number} is left out: {error}")
    if len(problems) > _MOST_PROBLEMS:
        problems[_MOST_PROBLEMS:] = [f"So are {len(problems) - _MOST_PROBLEMS} more lines."]
    return lines, problems


def _read_line(text: str) -> _Line:
    """Raises a UserError that says what is wrong with it."""
    try:
        record = json.loads(text)
        step, seconds = int(record["step"]), float(record["seconds"])
        waited = float(record.get("data_wait_seconds", 0.0))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"it must be JSON with the numbers step and seconds, but: {error}.") from None
    if not (0 <= waited <= seconds <= _LONGEST and seconds > 0):
        raise UserError(f"seconds is {seconds} and data_wait_seconds {waited}.")
    try:
        micro_batches = record["micro_batches"]
        shapes = np.array([[_shape(m["shape"]) for m in row] for row in micro_batches], dtype=object)
        batch_size = np.array([[m["batch_size"] for m in row] for row in micro_batches], dtype=np.float64)
        tokens = {_shape(m["shape"]): m["tokens"] for row in micro_batches for m in row if "tokens" in m}
    except (ValueError, TypeError, KeyError, OverflowError):
        batch_size = np.empty(0)
    if batch_size.ndim != 2 or not batch_size.size or not 1 <= batch_size.min() <= batch_size.max() < 1 << 31:
        raise UserError("micro_batches must list shape and batch_size of each rank, for each micro-step.")
    return _Line(step, seconds, waited, shapes, batch_size, tokens)


@cache
def _shape(text: str) -> str:
    """The same object each time: a long run's log names few shapes, millions of times."""
    return str(LatentShape.parse(text))


def _check_identified(fit: CostFit, log: TrainingLog) -> None:
    """Refuses a log that leaves open what a plan would ask for.

    Batch sizes of equal cost make all steps take the same time, so that what is fixed and what grows with B look
    alike. Each form that predicts nearly as well as the best must be sure of itself, and agree with the chosen one.
    """
    probes = _probes(log)
    batch, tokens = np.array([probe[1:] for probe in probes], dtype=np.float64).T
    usual = float(np.median(log.steps.seconds)) / log.shapes.shape[1]
    chosen = fit.model.seconds(batch, tokens)
    best = min(candidate.leave_one_out_error for candidate in fit.candidates.values())
    unsure = np.zeros(len(probes))
    for candidate in fit.candidates.values():
        if candidate.leave_one_out_error <= 1.5 * best + 1e-3:
            apart = np.abs(candidate.model.seconds(batch, tokens) - chosen)
            unsure = np.maximum(unsure, np.maximum(apart, _standard_errors(candidate.model, log, batch, tokens)))
    unsure /= np.maximum(usual, chosen)
    worst = [i for i in np.argsort(-unsure, kind="stable") if unsure[i] > _LARGEST_ERROR][:4]
    if worst:
        listed = ", ".join(f"{probes[i][0]} at batch size {probes[i][1]:.0f} ({unsure[i]:.0%})" for i in worst)
        raise UserError(
            f"The log leaves the cost of {listed} open by more than {_LARGEST_ERROR:.0%} of a micro-step: its "
            f"{len(log.steps.seconds)} usable steps are too alike, too noisy or too few. Train some steps with other "
            "batch sizes (`batch_sizes=` of BucketDataLoader), or measure with recipes/benchmark_shapes.py."
        )


def _probes(log: TrainingLog) -> list[tuple[str, float, float]]:
    """(shape, B, S) of half and of the whole batch of each shape."""
    largest: dict[tuple[float, str], float] = {}
    for shape, s, b in set(zip(log.shapes.flat, log.steps.tokens.flat, log.steps.batch_size.flat)):
        largest[s, shape] = max(b, largest.get((s, shape), 1.0))
    return [(shape, b, s) for (s, shape), most in sorted(largest.items()) for b in sorted({most // 2 or 1.0, most})]


def _standard_errors(model: CostModel, log: TrainingLog, batch: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Standard error of seconds(B, S), by the model's slope at the fitted parameters."""
    steps = log.steps
    noise = max(0.01, 1.4826 * float(np.median(np.abs(steps.predict(model) / steps.seconds - 1))))
    slope = sensitivity(model, steps.predict) / steps.seconds[:, None] / noise
    # Before any step is seen, a parameter is unsure by its own size; a floor that no step reached stays so.
    covariance = np.linalg.inv(slope.T @ slope + np.eye(slope.shape[1]))
    probed = sensitivity(model, lambda law: law.seconds(batch, tokens))
    return np.sqrt(np.einsum("ij,jk,ik->i", probed, covariance, probed))
