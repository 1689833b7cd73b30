"""Which law do timed steps follow, how sure are its parameters, and which steps stray from it?"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import UserError
from .cost import CostModel, Measurement, PowerLaw
from .memory import KNOWN_SPAN, ON_FLOOR, fit_memory_model, has_peak
from .search import FORMS, LEAST_RESIDUAL_SCALE, TimedSteps, fit_form, minimise, model_of, relative_errors, vector_of

# Steps shorter than this many times the shortest one may still be on the floor.
_ABOVE_FLOOR = 1.5
_LEAST_STRAY = 0.1
_FRAGMENTED = 1.1  # held over used, at large steps; plans keep 10% of the GPU free for it
_MOST_GROUPS = 8  # of an outer shape's points, that are left out one after the other
_ALIKE = 1.25  # times the least error on shapes left out, which is a median and misses the few steps on the floor
SURE_POINTS = 9  # over two for each part of a law: floor, fixed, linear and quadratic


@dataclass(frozen=True)
class CandidateFit:
    """One form, fitted to all steps. Errors are |predicted / measured - 1|.

    median_error, max_error: over the fitted steps.
    leave_one_out_error: mean over shapes of the median error on those of its steps that a fit did not see.
    """

    model: CostModel
    median_error: float
    max_error: float
    leave_one_out_error: float


@dataclass(frozen=True)
class CostFit:
    """The chosen form, every form that was tried, and the steps they were fitted to."""

    model: CostModel
    candidates: dict[str, CandidateFit]
    power_law: PowerLaw
    steps: TimedSteps = field(repr=False)


@dataclass(frozen=True)
class Outlier:
    """A step that the law misses by far more than the others."""

    name: str
    seconds: float
    predicted_seconds: float

    def __str__(self):
        off = self.seconds / self.predicted_seconds - 1
        return (
            f"{self.name} took {self.seconds:.4g} s, {abs(off):.0%} {'more' if off > 0 else 'less'} than the law's "
            f"{self.predicted_seconds:.4g} s."
        )


def fit_cost_model(measurements: Sequence[Measurement], kinds: str | Sequence[str] = "all") -> CostFit:
    """Fits seconds(B, S) and chooses the form that best predicts shapes it has not seen.

    Minimises the robust (Cauchy) loss of predicted / measured - 1 with non-negative parameters. The form with the
    smallest error on shapes left out wins, or one within a quarter of it whose largest error on all steps is below
    half of its. Deterministic, and independent of the order of the measurements.

    Args:
        measurements: timed points; those marked `oom` are left out.
        kinds: "all", or some of "power_law", "additive", "roofline"; the power law is always fitted too.

    Returns:
        CostFit: `model` is the chosen law, `candidates` has each form's law and errors, `power_law` is the paper's.

    Raises:
        UserError: an unknown kind, or too few points to tell the parameters apart.

    Source: the paper fits a + b*B*S**p only; the other forms and the choice between them are ours.
    """
    wanted = list(FORMS) if kinds == "all" else list(kinds)
    if not wanted or not set(wanted) <= set(FORMS):
        raise UserError(f"kinds must be 'all' or some of {sorted(FORMS)}, but found {kinds!r}.")
    timed = sorted((m for m in measurements if not m.oom), key=lambda m: (m.batch_size, m.tokens, m.seconds, m.shape))
    _check_points(timed)
    batch, tokens, seconds = np.array([(m.batch_size, m.tokens, m.seconds) for m in timed], dtype=np.float64).T
    steps = TimedSteps(batch[:, None, None], tokens[:, None, None], seconds, tuple(map(_name, timed)))
    return fit_steps(steps, _left_out(tokens), wanted)


def _left_out(tokens: np.ndarray) -> list[list[np.ndarray]]:
    """For each shape, which points are left out together: all of a shape between others; those of an outer one singly,
    or where they are many, in _MOST_GROUPS groups, since each group takes another fit.

    Without an outer shape the others would have to be extrapolated, which no plan does.
    """
    rounds, outer = [], (tokens.min(), tokens.max())
    for one in np.unique(tokens):
        points = np.flatnonzero(tokens == one)
        if one not in outer:
            rounds.append([points])
        elif len(points) > 1:
            groups = min(len(points), _MOST_GROUPS)
            rounds.append([points[first::groups] for first in range(groups)])
    return rounds


def fit_steps(
    steps: TimedSteps, left_out: Sequence[Sequence[np.ndarray]], kinds: Sequence[str] = tuple(FORMS)
) -> CostFit:
    """`fit_cost_model` for steps that may mix micro-batches; whether they tell enough is the caller's to check.

    left_out: rounds, each of groups of steps (indices) that are left out together.
    """
    candidates = {}
    for kind in dict.fromkeys([*kinds, PowerLaw.kind]):
        model = fit_form(kind, steps)
        errors = relative_errors(model, steps)
        unseen = [[_unseen_errors(kind, steps, out) for out in groups] for groups in left_out]
        unseen_error = float(np.mean([np.median(np.concatenate(found)) for found in unseen]))
        candidates[kind] = CandidateFit(model, float(np.median(errors)), float(errors.max()), unseen_error)
    best = min((candidates[kind] for kind in kinds), key=lambda fit: fit.leave_one_out_error)
    alike = [fit for fit in map(candidates.get, kinds) if fit.leave_one_out_error <= _ALIKE * best.leave_one_out_error]
    surest = min(alike, key=lambda fit: fit.max_error)
    best = surest if surest.max_error < best.max_error / 2 else best
    return CostFit(best.model, candidates, candidates[PowerLaw.kind].model, steps)


def _unseen_errors(kind: str, steps: TimedSteps, out: np.ndarray) -> np.ndarray:
    """Errors on steps that a fit has not seen."""
    kept = np.setdiff1d(np.arange(len(steps.seconds)), out)
    return relative_errors(fit_form(kind, steps.take(kept)), steps.take(out))


def parameter_confidence(fit: CostFit, draws: int = 100) -> dict[str, tuple[float, float]]:
    """Between which values each parameter of the chosen law lies in 90% of repeated measurements.

    Bootstrap of the residuals: every step gets the relative error of a step drawn at random, and the law is fitted
    again. The points stay as they are, so a parameter that they tell little about gets a wide interval.

    Returns: parameter -> (5%, 95%) quantiles.
    """
    kind, steps, predicted = fit.model.kind, fit.steps, fit.steps.predict(fit.model)
    errors = steps.seconds / predicted - 1
    parameters = len(fit.model.parameters)
    # A fit comes nearer to its own points than the law does.
    errors = errors * np.sqrt(len(errors) / max(1, len(errors) - parameters))
    scale = max(LEAST_RESIDUAL_SCALE, float(np.median(np.abs(errors))))
    random, start, found = np.random.default_rng(0), vector_of(fit.model), []
    for _ in range(draws):
        drawn = predicted * np.maximum(0.1, 1 + random.choice(errors, len(errors)))
        again = replace(steps, seconds=drawn)
        found.append(list(model_of(kind, minimise(kind, again, start, scale).x).parameters.values()))
    low, high = np.quantile(found, [0.05, 0.95], axis=0)
    return {name: (float(a), float(b)) for name, a, b in zip(fit.model.parameters, low, high)}


def sensitivity(model: CostModel, predict: Callable[[CostModel], np.ndarray]) -> np.ndarray:
    """What predict(model) gains for each parameter that is moved by its own size; float64 [predictions, parameters].

    A parameter of 0 is moved by 1% of a second for each sample, or for 10,000 tokens.
    """
    start, before, columns = vector_of(model), predict(model), []
    for index, value in enumerate(start):
        size, moved = max(value, 0.01), start.copy()
        moved[index] += 1e-6 * size
        columns.append((predict(model_of(model.kind, moved)) - before) / 1e-6)
    return np.stack(columns, axis=1)


def find_outliers(fit: CostFit) -> list[Outlier]:
    """The steps that miss the law by over 10% and over five standard deviations of the others, worst first."""
    predicted = fit.steps.predict(fit.model)
    off = np.abs(fit.steps.seconds / predicted - 1)
    # 1.4826 * median is the standard deviation of normal errors, whatever a few strays do.
    limit = max(_LEAST_STRAY, 5 * 1.4826 * float(np.median(off)))
    worst = [i for i in np.argsort(-off, kind="stable") if off[i] > limit]
    return [Outlier(fit.steps.names[i], float(fit.steps.seconds[i]), float(predicted[i])) for i in worst]


def describe_measurements(measurements: Sequence[Measurement], freed_gib: float = 0.0) -> list[str]:
    """What a user should know of measurements that can be fitted, one sentence each.

    Repeats that disagree in memory, points that ran out of memory below one that fitted, memory lost to fragmentation,
    parts of the cost that the points leave to the form of the law, and a slope of memory that they do
    not tell, with the point to add; and fewer points than SURE_POINTS.

    freed_gib: as in `fit_memory_model`.
    """
    slope = functools.partial(_unknown_slope, freed_gib=freed_gib)
    parts = (_repeats, _contradictions, _fragmentation, _weak_parts, slope, _few_points)
    return [sentence for part in parts for sentence in part(measurements)]


def _repeats(measurements):
    peaks: dict[tuple[int, str, int], list[float]] = {}
    for m in filter(has_peak, measurements):
        peaks.setdefault((m.tokens, m.shape, m.batch_size), []).append(m.peak_gib)
    return [
        f"{shape} at batch size {batch} was measured at {min(gib):.2f} to {max(gib):.2f} GiB; the higher is used."
        for (_, shape, batch), gib in sorted(peaks.items())
        if max(gib) > 1.01 * min(gib)
    ]


def _contradictions(measurements):
    fitted = [m for m in measurements if not m.oom]
    failed = sorted((m for m in measurements if m.oom), key=lambda m: (m.batch_size * m.tokens, m.shape))
    largest = max(fitted, key=lambda m: (m.batch_size * m.tokens, m.shape), default=None)
    return [
        f"{_name(m)} ran out of memory, though {_name(largest)}, which is larger, did not; the failure is believed."
        for m in failed
        if largest and m.batch_size * m.tokens <= largest.batch_size * largest.tokens
    ]


def _fragmentation(measurements):
    highest = max((m.peak_gib for m in measurements if not m.oom), default=0.0)
    held = [m for m in measurements if not m.oom and m.peak_gib > highest / 2 and m.reserved_gib > 0]
    worst = max(held, key=lambda m: m.reserved_gib / m.peak_gib, default=None)
    if worst is None or worst.reserved_gib <= _FRAGMENTED * worst.peak_gib:
        return []
    return [
        f"At {_name(worst)} the allocator held {worst.reserved_gib:.1f} GiB for a peak of {worst.peak_gib:.1f}: more "
        "than plans keep free. Set PYTORCH_ALLOC_CONF=expandable_segments:True, or plan with a smaller memory limit."
    ]


def _weak_parts(measurements):
    timed = [m for m in measurements if not m.oom]
    floor = min(m.seconds for m in timed)
    above = sorted(
        (m for m in timed if m.seconds > _ABOVE_FLOOR * floor), key=lambda m: (m.tokens, m.batch_size, m.shape)
    )
    found = []
    if above and len({m.batch_size for m in above}) == 1:
        found.append(
            f"All steps well above the shortest ({floor:.4g} s) have batch size {above[0].batch_size}, so what a "
            f"second sample costs there is assumed. Add {above[0].shape} at batch size {2 * above[0].batch_size}."
        )
    if above and len({m.tokens for m in above}) == 1:
        found.append(
            f"All steps well above the shortest ({floor:.4g} s) have the shape {above[0].shape}, so linear and "
            "quadratic work cannot be told apart. Add another shape at a batch size with as many tokens."
        )
    return found


def _unknown_slope(measurements, freed_gib):
    peaks = list(filter(has_peak, measurements))
    if len({m.batch_size * m.tokens for m in peaks}) < 2:
        return []
    memory = fit_memory_model(measurements, freed_gib=freed_gib)
    if memory.known_tokens is None:
        return []
    shortest = min(peaks, key=lambda m: m.tokens)
    highest = max(m.peak_gib for m in peaks)
    floor = memory.floor_gib + memory.floor_gib_per_token * memory.known_tokens
    rise = "No point rises" if highest <= ON_FLOOR * floor else "Too few points rise"
    return [
        f"{rise} above the floor of {floor:.1f} GiB, so how memory grows beyond B*S = "
        f"{memory.known_tokens} is not known; plans take it as proportional to B*S, the most it can be. Add "
        f"{shortest.shape} at batch size {math.ceil(KNOWN_SPAN * memory.known_tokens / shortest.tokens)}."
    ]


def _few_points(measurements):
    points = {(m.tokens, m.batch_size) for m in measurements if not m.oom}
    if len(points) >= SURE_POINTS:
        return []
    return [
        f"The law is a guess: it follows {len(points)} points (shape and batch size) of {len({t for t, _ in points})} "
        f"shapes, not {SURE_POINTS} or more. Add {SURE_POINTS - len(points)}: recipes/benchmark_shapes.py goes on in "
        "the same --output_dir, with a larger --max_points."
    ]


def _name(measurement: Measurement) -> str:
    return f"{measurement.shape} at batch size {measurement.batch_size}"


def _check_points(timed: Sequence[Measurement]) -> None:
    if not timed:
        raise UserError(
            "A cost model needs measurements that fitted into memory, but there are none. Measure with "
            "recipes/benchmark_shapes.py, smaller shapes first."
        )
    if len({m.tokens for m in timed}) < 2:
        raise UserError(
            f"A cost model needs at least two shapes with different numbers of tokens, but the measurements have "
            f"{sorted({m.tokens for m in timed})}. Add your smallest and your largest shape."
        )
    points = sorted({(m.tokens, m.batch_size) for m in timed})
    if len(points) < 4:
        raise UserError(
            f"A cost model needs at least 4 different (shape, batch size) points, but found {points} as (tokens, "
            "batch size). Add more shapes, or the same shapes at twice the batch size."
        )
    work, batches = [tokens * batch for tokens, batch in points], sorted({batch for _, batch in points})
    smallest = min(timed, key=lambda m: (m.tokens, m.batch_size))
    largest = max(timed, key=lambda m: (m.batch_size * m.tokens, m.tokens))
    if len(batches) < 2 or max(work) < 2 * min(work):
        raise UserError(
            f"All measurements have batch size {batches} and B*S between {min(work)} and {max(work)}, so the part of "
            "the cost that grows with B cannot be told from the rest. Add the smallest shape at a larger batch size: "
            f"{smallest.shape} at batch size {4 * smallest.batch_size}."
        )
    # Not the longest step, which may be a stray: one step above the floor tells nothing anyway.
    shortest, long = np.quantile([m.seconds for m in timed], [0.0, 0.9])
    if long < _ABOVE_FLOOR * shortest:
        raise UserError(
            f"Nearly all steps take {shortest:.4g} to {long:.4g} s, though B*S goes from {min(work)} to {max(work)}: "
            "only the floor (launching, communication) was measured, not what work costs. Add "
            f"{largest.shape} at batch size {4 * largest.batch_size}, and larger ones until a step takes 3 times as "
            "long."
        )
