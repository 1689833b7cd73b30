"""Which (shape, batch size) points tell the floor, the linear and the quadratic part of the cost apart?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from ..errors import UserError
from .shapes import LatentShape, TokenGeometry

_LEAST_SPAN = 16  # longest over shortest sequence
_WIDEST_GAP = 5  # between neighbouring lengths


@dataclass(frozen=True)
class Point:
    """One (shape, batch size) to time. `tokens` is the sequence length of one sample."""

    shape: LatentShape
    tokens: int
    batch_size: int

    @property
    def all_tokens(self) -> int:
        return self.batch_size * self.tokens

    @property
    def work(self) -> float:
        return work_of(self.tokens, self.batch_size)


def work_of(tokens: int, batch_size: int) -> float:
    """A guess of what a step costs before any is timed: as if linear and quadratic work were equal at S = 20,000."""
    return batch_size * tokens * (1 + tokens / 20_000)


def choose_points(
    shapes: Iterable[LatentShape] | Mapping[LatentShape, int],
    geometry: TokenGeometry,
    *,
    max_points: int = 12,
    max_tokens: int | None = None,
    least_work: float = 0.0,
    measured: Iterable[Point] = (),
) -> list[Point]:
    """Spreads points so that the floor, the linear and the quadratic part of the cost are all seen.

    Candidates are the data's sequence lengths S with B = 1, 2, 3, 4, 6, ... up to `max_tokens`, but no more work than
    the shortest samples of so many tokens or two of the longest ones. The corners (shortest
    at B = 1 and at the largest B, longest at B = 1) come first, then, one by one, the candidate that lies farthest
    from those chosen in the plane of log(B * S) and log S. Small B * S shows the floor, short S at large B the linear
    part, long S the quadratic one. Data whose lengths do not span a factor of 16, or that leave a gap of more than a
    factor of 5 (a range of two shapes does), is completed with shapes cut from its own.

    Args:
        shapes: the shapes of the data, e.g. `shape_counts(index)`; a smallest and a largest one are enough.
        geometry: shape to tokens.
        max_points: at most this many points, at least 4.
        max_tokens: the largest B * S to try; None is twice the longest sample.
        least_work: (`work_of`) below which steps are known to be on the floor, so that the corners tell enough of it.
        measured: points that are among the chosen ones in any case.

    Returns:
        Points by growing B * S, so that an out-of-memory error comes last and stops nothing else.

    Raises:
        UserError: no shape, or `max_points` below 4.
    """
    if max_points < 4:
        raise UserError(
            f"max_points must be at least 4 (floor, fixed, linear and quadratic part), but it is {max_points}."
        )
    shape_of = {geometry.tokens(shape): shape for shape in sorted(shapes, reverse=True)}
    if not shape_of:
        raise UserError("at least one shape is needed to choose points, but there is none. Is the dataset empty?")
    _add_smaller_shapes(shape_of, geometry)
    _fill_gaps(shape_of, geometry)
    measured = {(point.tokens, point.batch_size): point for point in measured}
    lengths = sorted(shape_of)
    max_tokens = max(max_tokens or 2 * lengths[-1], lengths[-1])
    corners = [(lengths[0], 1), (lengths[-1], 1), (lengths[0], max_tokens // lengths[0])]
    most_work = max(work_of(*corners[2]), work_of(lengths[-1], 2))
    candidates = [
        (tokens, batch)
        for tokens in lengths
        for batch in _batch_ladder(max_tokens // tokens)
        if least_work <= work_of(tokens, batch) <= most_work
    ]
    chosen = list(dict.fromkeys([*measured, *corners]))[:max_points]
    place = {(tokens, batch): (math.log(tokens * batch), math.log(tokens)) for tokens, batch in [*candidates, *chosen]}
    while len(chosen) < min(max_points, len(place)):
        chosen.append(max(candidates, key=lambda c: min(math.dist(place[c], place[other]) for other in chosen)))
    points = [measured.get((tokens, batch)) or Point(shape_of[tokens], tokens, batch) for tokens, batch in chosen]
    return sorted(points, key=lambda point: (point.all_tokens, point.tokens))


def _add_smaller_shapes(shape_of: dict[int, LatentShape], geometry: TokenGeometry) -> None:
    """Halves the shortest shape until the lengths span a factor of 16, or text makes up most of them."""
    while min(shape_of) * _LEAST_SPAN > max(shape_of):
        smaller = _halve(shape_of[min(shape_of)], geometry)
        if geometry.tokens(smaller) > 0.8 * min(shape_of):
            return
        shape_of[geometry.tokens(smaller)] = smaller


def _fill_gaps(shape_of: dict[int, LatentShape], geometry: TokenGeometry) -> None:
    """Halves the shape above each gap of more than a factor of 5, until it is closed."""
    for shorter, longer in pairwise(sorted(shape_of)):
        while longer > _WIDEST_GAP * shorter:
            smaller = _halve(shape_of[longer], geometry)
            longer = geometry.tokens(smaller)
            shape_of.setdefault(longer, smaller)


def _halve(shape: LatentShape, geometry: TokenGeometry) -> LatentShape:
    """Half of the longest side, patches kept whole; a shape of one patch stays."""
    sizes = (shape.frames, shape.height, shape.width)
    patches = [size // patch for size, patch in zip(sizes, geometry.patch_size)]
    longest = patches.index(max(patches))
    patches[longest] = max(1, patches[longest] // 2)
    return LatentShape(*(count * patch for count, patch in zip(patches, geometry.patch_size)))


def _batch_ladder(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 11, ...: steps of sqrt(2), ending with `most`."""
    batches = [1]
    while batches[-1] < most:
        batches.append(min(most, max(batches[-1] + 1, round(batches[-1] * 2**0.5))))
    return batches
