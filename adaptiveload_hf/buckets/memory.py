"""How does the peak memory of a step follow from its micro-batch?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import UserError
from .cost import Measurement, MemoryModel

# Peaks up to this many times the lowest do not rise: those of Wan 1.3B on an H200 differ by 0.5%.
ON_FLOOR = 1.02
# Nearer points differ by what B*S does not tell, such as the prompt's tokens of each sample.
KNOWN_SPAN = 2
_SAMPLE_SPAN = 4
_ALIKE = 1e-3  # of the peaks, on average: divisions into floor and line that explain them equally well
_MOST_DIVISIONS = 40  # to try; a long run's log has hundreds of points
_LEAST_FREED = 0.05  # of the floor: gradients that take less change no plan


class _Peaks(NamedTuple):
    """By growing B*S; float64 arrays of one length."""

    work: np.ndarray  # B*S
    batch: np.ndarray
    gib: np.ndarray


class _Law(NamedTuple):
    excess: float  # mean of predicted / measured - 1
    on_floor: int  # so many points, the smallest
    floor: float
    floor_slope: float
    base: float
    slope: float
    by_sample: float


def has_peak(measurement: Measurement) -> bool:
    return measurement.peak_gib > 0 and not measurement.oom


def fit_memory_model(
    measurements: Sequence[Measurement], gpu_memory_gib: float | None = None, freed_gib: float = 0.0
) -> MemoryModel:
    """The tightest highest of two lines, floor and line proper, that lies on or above every measured peak.

    Half of a mean law's predictions would be too low, and each of those is a crash. Small points lie on the floor, the
    peak at a step's end, and say nothing about the line, the peak when backward begins; the division that follows the
    peaks best is taken. The line is known if the points on it span a factor of 2 in B*S, and if it begins below the
    floor by half of the gradients or more: they are not there yet when backward begins. Else it goes through the last
    point on the floor, and beyond the largest point memory is bounded (`known_tokens`). A sample's fixed part is
    fitted if three points on the line span a factor of 4 in S; else it counts as tokens. Of repeated points the
    highest counts. A point that ran out of memory needs more than its own peak, more than any peak that fitted, and at
    least the GPU's memory.

    Args:
        measurements: points with their peaks, in GiB.
        gpu_memory_gib: memory of the GPU that they were measured on, if known.
        freed_gib: gradients of a rank that a step frees at its end, as with one micro-step a step; 0: none, or
            not known.

    Returns:
        MemoryModel: `gib(B, S)` predicts a peak, `max_tokens(limit_gib, S)` the largest B*S within a limit.

    Raises:
        UserError: no peak was measured, or at one B*S only.

    Source: the paper has a limit M_mem in tokens and no law of memory; this one is ours.
    """
    highest: dict[tuple[int, int], float] = {}
    for m in filter(has_peak, measurements):
        place = m.batch_size * m.tokens, m.batch_size
        highest[place] = max(highest.get(place, 0.0), m.peak_gib)
    if len({work for work, _ in highest}) < 2:
        found = sorted((work, gib) for (work, _), gib in highest.items())
        raise UserError(
            f"A memory model needs peak_gib at two or more different B*S, but found {found} as "
            "(B*S, GiB). Measure on the device that you will train on, a small and a large point."
        )
    peaks = _Peaks(*np.array([(*place, gib) for place, gib in sorted(highest.items())], dtype=np.float64).T)
    bound = max(1.001 * peaks.gib.max(), gpu_memory_gib or 0.0)
    failed = _Peaks(*np.array(sorted(
        (m.batch_size * m.tokens, m.batch_size, max(bound, 1.001 * m.peak_gib)) for m in measurements if m.oom
    ), dtype=np.float64).reshape(-1, 3).T)  # fmt: skip

    flat, count = 1 + np.flatnonzero(peaks.gib <= ON_FLOOR * peaks.gib.min())[-1], len(peaks.work)
    divisions = np.unique(np.linspace(flat, count, _MOST_DIVISIONS).astype(int))
    laws = [_divide(peaks, failed, int(on_floor)) for on_floor in divisions]
    least = min(law.excess for law in laws)
    alike = [law for law in laws if law.excess <= least + _ALIKE]
    # The line of the largest points is the surest to be that of larger ones.
    for law in reversed(alike):
        if _is_known(law, peaks, freed_gib):
            slope = max(law.slope, _smallest_slope(peaks))
            return MemoryModel(law.base, slope, law.floor, None, law.by_sample, law.floor_slope)
    return _unknown(peaks, failed, alike[0])


def _is_known(law: _Law, peaks: _Peaks, freed_gib: float) -> bool:
    rising = peaks.work[law.on_floor :]
    freed_gib = freed_gib if freed_gib >= _LEAST_FREED * law.floor else 0.0
    spans = len(rising) > 0 and rising[-1] >= KNOWN_SPAN * rising[0]
    return spans and law.base <= law.floor - freed_gib / 2


def _unknown(peaks: _Peaks, failed: _Peaks, law: _Law) -> MemoryModel:
    """Where the points do not tell the line, it begins at the floor's last one, and holds up to the largest."""
    from scipy.optimize import linprog

    last = law.on_floor - 1
    floor = law.floor + law.floor_slope * peaks.work[last]
    work = np.concatenate([peaks.work[last:], failed.work])
    gib = np.concatenate([[max(floor, peaks.gib[last])], peaks.gib[last + 1 :], failed.gib])
    lines = np.stack([np.ones_like(work), work / work.max()], axis=1)
    base, slope = linprog(lines.sum(axis=0), A_ub=-lines, b_ub=-gib).x
    slope = max(slope / work.max(), _smallest_slope(peaks))
    return MemoryModel(float(base), float(slope), law.floor, int(peaks.work[-1]), 0.0, law.floor_slope)


def _smallest_slope(peaks: _Peaks) -> float:
    return 1e-9 * float(peaks.gib.max() / peaks.work.max())


def _divide(peaks: _Peaks, failed: _Peaks, on_floor: int) -> _Law:
    """The law with the least excess whose floor covers the first points and whose line covers the others."""
    from scipy.optimize import linprog

    count, most_work, most_batch = len(peaks.work), peaks.work.max(), peaks.batch.max()
    tokens = peaks.work[on_floor:] / peaks.batch[on_floor:]
    by_sample = len(tokens) > 2 and tokens.max() >= _SAMPLE_SPAN * tokens.min()

    def floor_at(points):  # [points, floor and its slope, base, slope, by_sample]
        zero = np.zeros_like(points.work)
        return np.stack([zero + 1, points.work / most_work, zero, zero, zero], axis=1)

    def line_at(points):
        zero = np.zeros_like(points.work)
        return np.stack([zero, zero, zero + 1, points.work / most_work, points.batch / most_batch], axis=1)

    # The highest of both is at most gib * (1 + excess); each covers its own points; the line is the steeper one and
    # begins no higher.
    above, floor, line = -np.diag(peaks.gib), floor_at(peaks), line_at(peaks)
    cover = -np.concatenate([floor[:on_floor], line[on_floor:], line_at(failed)])
    order = np.array([[0, 1, 0, -1, 0], [-1, 0, 1, 0, 0]], dtype=np.float64)
    left = np.concatenate([floor, line, cover, order])
    excess = np.concatenate([above, above, np.zeros((len(cover) + 2, count))])
    right = np.concatenate([peaks.gib, peaks.gib, -peaks.gib, -failed.gib, [0, 0]])
    lowest = (float(peaks.gib.min()), None)  # nothing less was seen, so nor is expected at fewer tokens
    bounds = [lowest] + [(0, None)] * 3 + [(0, None if by_sample else 0)] + [(0, None)] * count
    found = linprog(
        np.concatenate([np.zeros(5), np.ones(count)]), A_ub=np.hstack([left, excess]), b_ub=right, bounds=bounds
    ).x
    values = (found[:5] / [1, most_work, 1, most_work, most_batch]).tolist()
    return _Law(float(found[5:].mean()), on_floor, *values)
