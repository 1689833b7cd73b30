"""How long does a training step take over (shape, batch size), measured inside the live distributed run?"""

import gc
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from tqdm.auto import tqdm

from .buckets.cost import Measurement, read_measurements
from .buckets.shapes import LatentShape, TokenGeometry
from .distributed import all_ranks_fail_together
from .errors import UserError

WARM_UP_STEPS = 2
LEAST_REPEATS, MOST_REPEATS = 3, 6
KNOWN_TO = 0.02  # relative standard error of the median at which a point is done
ENOUGH_SECONDS = 5.0  # of timed steps: where they are long, or a shared machine is noisy, the least repeats do
OFF_THE_FLOOR = 3  # the largest point must take so many times the smallest, or only the floor is seen
MOST_CLIMBS = 6  # each by a factor of 4


@dataclass(frozen=True)
class Point:
    """One (shape, batch size) to time. `tokens` is the sequence length of one sample."""

    shape: LatentShape
    tokens: int
    batch_size: int

    @property
    def all_tokens(self) -> int:
        return self.batch_size * self.tokens


def choose_points(
    shapes: Iterable[LatentShape] | Mapping[LatentShape, int],
    geometry: TokenGeometry,
    *,
    max_points: int = 12,
    max_tokens: int | None = None,
) -> list[Point]:
    """Spreads points so that the floor, the linear and the quadratic part of the cost are all seen.

    Candidates are the data's sequence lengths S with B = 1, 2, 3, 4, 6, ... up to `max_tokens`. The corners (shortest
    at B = 1 and at the largest B, longest at B = 1) come first, then, one by one, the candidate that lies farthest
    from those chosen in the plane of log(B * S) and log S. Small B * S shows the floor, short S at large B the linear
    part, long S the quadratic one. Data whose lengths do not span a factor of 16 is completed downwards with shapes
    cut from its own.

    Args:
        shapes: the shapes of the data, e.g. `shape_counts(index)`.
        geometry: shape to tokens.
        max_points: at most this many points, at least 3.
        max_tokens: the largest B * S to try; None is twice the longest sample.

    Returns:
        Points by growing B * S, so that an out-of-memory error comes last and stops nothing else.

    Raises:
        UserError: no shape, or `max_points` below 3.
    """
    if max_points < 3:
        raise UserError(f"max_points must be at least 3 (floor, linear and quadratic part), but it is {max_points}.")
    shape_of = {geometry.tokens(shape): shape for shape in sorted(shapes, reverse=True)}
    if not shape_of:
        raise UserError("at least one shape is needed to choose points, but there is none. Is the dataset empty?")
    _add_smaller_shapes(shape_of, geometry)
    lengths = sorted(shape_of)
    max_tokens = max(max_tokens or 2 * lengths[-1], lengths[-1])
    candidates = [(tokens, batch) for tokens in lengths for batch in _batch_ladder(max_tokens // tokens)]
    place = {(tokens, batch): (math.log(tokens * batch), math.log(tokens)) for tokens, batch in candidates}
    chosen = list(dict.fromkeys([(lengths[0], 1), (lengths[-1], 1), (lengths[0], max_tokens // lengths[0])]))
    while len(chosen) < min(max_points, len(candidates)):
        chosen.append(max(candidates, key=lambda c: min(math.dist(place[c], place[other]) for other in chosen)))
    points = [Point(shape_of[tokens], tokens, batch) for tokens, batch in chosen]
    return sorted(points, key=lambda point: (point.all_tokens, point.tokens))


def measure_shapes(
    accelerator: Accelerator,
    run_step: Callable[[LatentShape, int], None],
    shapes: Iterable[LatentShape] | Mapping[LatentShape, int],
    geometry: TokenGeometry,
    *,
    max_points: int = 12,
    output_path: str | os.PathLike,
) -> list[Measurement]:
    """Chooses points for these shapes and times them; from nothing to what `BucketConfig.from_measurements` takes.

    First the batch of the shortest shape climbs, four times at once, until a step takes 3 times as long as the
    shortest one or no longer fits: below that only the floor would be seen, where larger batches are free. Then the
    points of `choose_points` within that many tokens are timed.

    Args: as in `choose_points` and `measure_steps`; the climb may add a few points to `max_points`.

    Returns:
        All measurements, the same on every rank.
    """
    max_tokens = None
    for _ in range(MOST_CLIMBS):
        points = choose_points(shapes, geometry, max_points=max_points, max_tokens=max_tokens)
        first = points[0]
        last = max((p for p in points if p.tokens == first.tokens), key=lambda point: point.batch_size)
        measured = measure_steps(accelerator, run_step, [first, last], output_path=output_path)
        seconds = {(m.shape, m.batch_size): m.seconds for m in measured if not m.oom}
        reached = seconds.get((str(last.shape), last.batch_size))
        if reached is None or reached >= OFF_THE_FLOOR * seconds[str(first.shape), first.batch_size]:
            break
        max_tokens = 4 * last.all_tokens
    return measure_steps(accelerator, run_step, points, output_path=output_path)


def measure_steps(
    accelerator: Accelerator,
    run_step: Callable[[LatentShape, int], None],
    points: Iterable[Point],
    *,
    output_path: str | os.PathLike | None = None,
) -> list[Measurement]:
    """Times `run_step` at each point, the same point on all ranks at a time.

    Seconds are those of one micro-step: an optimizer step's wall time divided by K, median over repeats (until its
    standard error is 2% or they took 5 s; 3 to 6 of them, after 2 warm-up steps), of the slowest rank. Peak memory is
    what the CUDA allocator handed out at most, on the fullest rank; on CPU it is 0.0, "not measured".

    An out-of-memory error becomes a measurement with `oom=True`, a bound, and larger points are skipped. With one
    unsharded process the benchmark goes on. Otherwise ranks that stand in a collective cannot be brought back: the
    bound is written, all ranks end, and the same command continues. (Not `--max_restarts`: the
    restart failed on GPUs under NCCL; most likely it finds the first start's entries in the rendezvous store.)

    Args:
        accelerator: the run's; its `gradient_accumulation_steps` is K.
        run_step: does one optimizer step of K micro-steps on micro-batches of this shape and batch size; begins by
            zeroing the gradients, so that a step that died of memory leaves nothing behind.
        points: e.g. from `choose_points`.
        output_path: JSON lines, appended point by point and kept through a crash. Points found in it are not
            measured again. On several nodes it must be on shared storage.

    Returns:
        All measurements, those found in `output_path` first. The same on every rank.

    Raises:
        UserError: nothing could be measured, not even the smallest point.
    """
    measurements = _read_earlier(accelerator, output_path)
    done = {(str(m.shape), m.batch_size) for m in measurements}
    bound = min((m.batch_size * m.tokens for m in measurements if m.oom), default=sys.maxsize)
    bar = tqdm(list(points), desc="measuring", unit="point", disable=not accelerator.is_main_process)
    with all_ranks_fail_together(accelerator), bar:
        for point in bar:
            if (str(point.shape), point.batch_size) in done or point.all_tokens >= bound:
                continue
            bar.set_postfix_str(f"{point.shape} B={point.batch_size}")
            measurement = _measure(accelerator, run_step, point, output_path)
            if measurement.oom:
                bound = min(bound, point.all_tokens)
            measurements.append(measurement)
            if output_path is not None and accelerator.is_main_process:
                append_line(output_path, measurement.to_json())
            accelerator.wait_for_everyone()  # a rank that dies at the next point must not take this line with it
        if all(measurement.oom for measurement in measurements):
            raise UserError(
                "at least one step must fit into memory, but none did. Use more GPUs, activation checkpointing or "
                "smaller shapes."
            )
    return measurements


def append_line(path: str | os.PathLike, line: str) -> None:
    """Appends one line so that it survives a crash, on a line of its own even after one that was cut short.

    Args:
        path: file, made with its folder if missing.
        line: without a line end.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        cut_short = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
        file.write(b"\n" * cut_short + line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _measure(accelerator, run_step, point: Point, output_path) -> Measurement:
    try:
        rank_seconds, peak_gib = _time_point(accelerator, run_step, point)
    except torch.OutOfMemoryError:
        reached = torch.cuda.max_memory_allocated() / 2**30 if accelerator.device.type == "cuda" else 0.0
        oom = Measurement(str(point.shape), point.tokens, point.batch_size, 0.0, reached, (), oom=True)
        if accelerator.num_processes == 1 and accelerator.distributed_type != DistributedType.FSDP:
            accelerator.step = 0  # the step died between two micro-steps
            gc.collect()
            torch.cuda.empty_cache()
            return oom
        if output_path is not None:
            append_line(output_path, oom.to_json())
        kept = f"It is noted in {output_path}" if output_path is not None else "No output_path was given to note it"
        raise UserError(
            f"{point.shape} with batch size {point.batch_size} needs more memory than this rank has. {kept}; start "
            "the same command again and it goes on with the other points."
        ) from None
    return Measurement(
        str(point.shape), point.tokens, point.batch_size, max(rank_seconds), peak_gib, tuple(rank_seconds)
    )


def _time_point(accelerator, run_step, point: Point) -> tuple[list[float], float]:
    """Median seconds of a micro-step on each rank, and the highest peak in GiB."""
    for _ in range(WARM_UP_STEPS):
        run_step(point.shape, point.batch_size)
    on_gpu = accelerator.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    repeats = []  # [repeat][rank]; equal on all ranks, so all stop together
    while len(repeats) < MOST_REPEATS and not _is_known([max(ranks) for ranks in repeats], accelerator):
        accelerator.wait_for_everyone()
        _wait_for_device(accelerator)
        start = time.perf_counter()
        run_step(point.shape, point.batch_size)
        _wait_for_device(accelerator)
        seconds = (time.perf_counter() - start) / accelerator.gradient_accumulation_steps
        repeats.append(_gather(accelerator, seconds))
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return [statistics.median(rank) for rank in zip(*repeats)], max(_gather(accelerator, peak_gib))


def _is_known(seconds: list[float], accelerator) -> bool:
    """Whether the standard error of the median, 1.25 * std / sqrt(n), is within KNOWN_TO of it, or time is up."""
    if len(seconds) < LEAST_REPEATS:
        return False
    if sum(seconds) * accelerator.gradient_accumulation_steps > ENOUGH_SECONDS:
        return True
    error = 1.25 * statistics.stdev(seconds) / len(seconds) ** 0.5
    return error <= KNOWN_TO * statistics.median(seconds)


def _gather(accelerator, value: float) -> list[float]:
    return accelerator.gather(torch.tensor([value], dtype=torch.float64, device=accelerator.device)).tolist()


def _wait_for_device(accelerator) -> None:
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize()


def _read_earlier(accelerator, output_path) -> list[Measurement]:
    """What an interrupted benchmark left; the main process reads, all get the same."""
    found = [[]]
    if output_path is not None and accelerator.is_main_process and Path(output_path).exists():
        earlier, problems = read_measurements(output_path)
        for problem in problems:
            warnings.warn(f"{problem}; the other lines are kept", stacklevel=3)
        found = [earlier]
    return broadcast_object_list(found)[0]


def _add_smaller_shapes(shape_of: dict[int, LatentShape], geometry: TokenGeometry) -> None:
    """Halves the longest side of the shortest shape, patches kept whole, until the lengths span a factor of 16."""
    while min(shape_of) * 16 > max(shape_of):
        shape = shape_of[min(shape_of)]
        sizes = (shape.frames, shape.height, shape.width)
        patches = [size // patch for size, patch in zip(sizes, geometry.patch_size)]
        longest = patches.index(max(patches))
        if patches[longest] == 1:
            return
        patches[longest] //= 2
        smaller = LatentShape(*(count * patch for count, patch in zip(patches, geometry.patch_size)))
        shape_of[geometry.tokens(smaller)] = smaller


def _batch_ladder(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 11, ...: steps of sqrt(2), ending with `most`."""
    batches = [1]
    while batches[-1] < most:
        batches.append(min(most, max(batches[-1] + 1, round(batches[-1] * 2**0.5))))
    return batches
