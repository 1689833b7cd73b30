"""Which buckets are there: those of the command line, checked, or few that fit the data?"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from adaptiveload_hf.errors import UserError

# What automatic buckets keep of all frames and of all picture areas, at least: fewer buckets would keep less.
KEPT_FRAMES, KEPT_AREA = 0.9, 0.9


@dataclass(frozen=True)
class Footage:
    """What media.look found in a file. `source_frames[k]` is the index of the decoded frame shown at time k / fps."""

    source_frames: tuple[int, ...]
    shown_height: int
    shown_width: int
    moving: bool


class Bucket(NamedTuple):
    """Size of the samples of one bucket in frames and pixels, before the VAE."""

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


class Grid(NamedTuple):
    """The sizes that a model takes: frame_step * n + 1 frames (0: stills only), pixels in multiples of pixel_step."""

    frame_step: int
    pixel_step: int

    def nearest(self, bucket: Bucket) -> Bucket:
        steps = max(round((bucket.frames - 1) / self.frame_step), 0) if self.frame_step else 0
        height, width = (max(round(n / self.pixel_step), 1) * self.pixel_step for n in (bucket.height, bucket.width))
        return Bucket(steps * self.frame_step + 1, height, width)

    def __str__(self) -> str:
        frames = f"{self.frame_step}n+1 frames" if self.frame_step else "1 frame"
        return f"{frames}, and multiples of {self.pixel_step} pixels as height and width"


def parse_buckets(words: list[str], grid: Grid) -> list[Bucket] | None:
    """Reads buckets like 81x480x832, in frames and pixels.

    Args:
        words: as given on the command line.
        grid: of the model.

    Returns:
        The buckets, each once; None for the one word `auto`.

    Raises:
        UserError: all illegal ones, each with the nearest legal one.
    """
    if words == ["auto"]:
        return None
    buckets, illegal = [], []
    for word in words:
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", word)
        if not match:
            hint = f", as 1x{word} for stills" if re.fullmatch(r"\d+x\d+", word) else ", as 81x480x832, or is auto"
            raise UserError(f"A bucket is written frames x height x width in pixels{hint}, but it is {word!r}.")
        bucket = Bucket(*map(int, match.groups()))
        if bucket != grid.nearest(bucket):
            illegal.append(f"{bucket} (nearest: {grid.nearest(bucket)})")
        buckets.append(bucket)
    if illegal:
        raise UserError(
            f"A bucket is frames x height x width, and this model needs {grid}. These are not: {', '.join(illegal)}."
        )
    return list(dict.fromkeys(buckets))


def automatic_buckets(footage: Iterable[Footage], grid: Grid, largest: Bucket) -> list[Bucket]:
    """Few buckets that lose little of these files, all of about the area of `largest` and no longer than it.

    As many lengths as keep KEPT_FRAMES of the clips' frames (up to the largest), and, for clips and for stills each,
    as many aspect ratios as keep KEPT_AREA of the pictures. A clip too short for frame_step + 1 frames fits none.

    Args:
        footage: of every file.
        grid: of the model.
        largest: its height x width is the area that no bucket exceeds.

    Returns:
        The buckets, sorted; some combinations of length and size may stay empty.
    """
    stills, clips = Counter(), Counter()
    lengths = Counter()
    for seen in footage:
        frames = min(len(seen.source_frames), largest.frames)
        length = (frames - 1) // grid.frame_step * grid.frame_step + 1 if grid.frame_step else 1
        if not seen.moving:
            stills[seen.shown_height, seen.shown_width] += 1
        elif length > 1:
            lengths[length] += 1
            clips[seen.shown_height, seen.shown_width] += 1
    buckets = [Bucket(1, *size) for size in choose_sizes(stills, grid, largest)]
    sizes = choose_sizes(clips, grid, largest)
    return sorted(buckets + [Bucket(length, *size) for length in choose_lengths(lengths) for size in sizes])


def choose_lengths(counts: Counter) -> list[int]:
    """The fewest of these lengths that keep KEPT_FRAMES of all frames; each clip is cut to the next lower one."""
    values = sorted(counts)
    if not values:
        return []
    count = np.array([counts[value] for value in values])
    # loss[i, j]: frames that the clips i..j lose when cut to length i; the shortest one is always there.
    frames = np.array(values)
    loss = np.array(
        [
            [(count[i : j + 1] * (frames[i : j + 1] - frames[i])).sum() for j in range(len(values))]
            for i in range(len(values))
        ]
    )
    allowed = (1 - KEPT_FRAMES) * (count * frames).sum()
    return [values[first] for first, _ in fewest_groups(loss, allowed)]


def choose_sizes(counts: Counter, grid: Grid, largest: Bucket) -> list[tuple[int, int]]:
    """The fewest sizes (height, width) that keep KEPT_AREA of these pictures, each cut to the size nearest to it."""
    if not counts:
        return []
    legal = legal_sizes(grid, largest)
    ratios = np.log([width / height for height, width in legal])
    pictures = sorted((math.log(width / height), count) for (height, width), count in counts.items())
    aspect, count = np.array([a for a, _ in pictures]), np.array([c for _, c in pictures])
    # Pictures of one nearest size are one; what is cut away of a picture is 1 - exp(-|difference of the logarithms|).
    nearest = np.abs(aspect[:, None] - ratios[None]).argmin(axis=1)
    kinds = np.unique(nearest)
    lost = 1 - np.exp(-np.abs(aspect[:, None] - ratios[None]))  # [pictures, sizes]
    lost = np.stack([(lost * count[:, None])[nearest == kind].sum(axis=0) for kind in kinds])  # [kinds, sizes]
    spans = [[lost[i : j + 1].sum(axis=0) for j in range(len(kinds))] for i in range(len(kinds))]
    loss = np.array([[span.min() if len(span) else 0.0 for span in row] for row in spans])
    allowed = max((1 - KEPT_AREA) * count.sum(), lost.min(axis=1).sum())
    return [legal[int(spans[i][j].argmin())] for i, j in fewest_groups(loss, allowed)]


def legal_sizes(grid: Grid, largest: Bucket) -> list[tuple[int, int]]:
    """For every legal height the largest legal width within the area of `largest`, by aspect ratio, up to 4 : 1."""
    step, area = grid.pixel_step, largest.height * largest.width
    sizes = []
    for height in range(step, 2 * math.isqrt(area) + 1, step):
        width = area // height // step * step
        if width and height / 4 <= width <= 4 * height:
            sizes.append((height, width))
    if not sizes:
        raise UserError(
            f"--height {largest.height} and --width {largest.width} leave no size: this model needs multiples of "
            f"{step} pixels. Give larger ones."
        )
    return sorted(sizes, key=lambda size: size[1] / size[0])


def fewest_groups(loss: np.ndarray, allowed: float) -> list[tuple[int, int]]:
    """Cuts 0..n-1 into the fewest runs (first, last) whose losses add up to `allowed` at most, and those lose least.

    Args:
        loss: [n, n], of the run from row to column.
        allowed: at least the loss of n runs of one.
    """
    n = len(loss)
    best = [loss[0].copy()]  # best[k][j]: least loss of 0..j in k + 1 runs
    cuts = [np.zeros(n, int)]
    while best[-1][-1] > allowed * (1 + 1e-9) and len(best) < n:
        before = np.concatenate([[np.inf], best[-1][:-1]])  # before[i]: of 0..i-1
        total = np.where(np.tri(n, dtype=bool).T, before[:, None] + loss, np.inf)  # [first of the last run, j]
        cuts.append(total.argmin(axis=0))
        best.append(total.min(axis=0))
    groups, last = [], n - 1
    for firsts in reversed(cuts):
        groups.append((int(firsts[last]), last))
        last = int(firsts[last]) - 1
    return groups[::-1]
