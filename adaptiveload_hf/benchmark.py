"""How long does a training step take over (shape, batch size), measured inside the live distributed run?"""

import contextlib
import functools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from tqdm.auto import tqdm

from .buckets.cost import Measurement, MemoryModel, read_measurements
from .buckets.memory import fit_memory_model
from .buckets.points import Point, choose_points, work_of
from .buckets.shapes import LatentShape, TokenGeometry
from .device_memory import (
    available_gib,
    empty_device_cache,
    read_device_memory,
    reset_peak_memory,
    wait_for_device,
)
from .distributed import all_ranks_fail_together
from .environment import MEMORY_RESERVE
from .errors import UserError
from .restart import all_ranks_restart_together

WARM_UP_STEPS = 2
LONG_STEP_SECONDS = 2.0  # one such step warms up enough
LEAST_REPEATS, MOST_REPEATS = 3, 6
KNOWN_TO = 0.02  # relative standard error of the median at which a point is done
ENOUGH_SECONDS = 5.0  # of timed steps: where they are long, or a shared machine is noisy, two repeats do
OFF_THE_FLOOR = 3  # the largest point must take so many times the smallest, or only the floor is seen
MOST_CLIMBS = 6  # each by a factor of 4
LONGEST_CLIMB_SECONDS = 60.0  # of the steps at a point that only memory needs


def measure_shapes(
    accelerator: Accelerator,
    run_step: Callable[[LatentShape, int], None],
    shapes: Iterable[LatentShape] | Mapping[LatentShape, int],
    geometry: TokenGeometry,
    *,
    max_points: int = 12,
    freed_gib: float = 0.0,
    output_path: str | os.PathLike,
) -> list[Measurement]:
    """Chooses points for these shapes and times them; from nothing to what `BucketConfig.from_measurements` takes.

    First the batch of the shortest shape climbs, four times at once, until a step takes 3 times as long as the
    shortest one or no longer fits: below that only the floor would be seen, where larger batches are free. Then the
    points of `choose_points` within that many tokens are timed. `max_points` counts the climb's too.

    The batch climbs on, within the memory that is surely enough, until it is known how memory grows above its floor.

    Args:
        accelerator, run_step: as in `measure_steps`.
        shapes: those of the data; a smallest and a largest one are enough.
        geometry: shape to tokens.
        max_points: at most this many points, at least 4.
        freed_gib: as in `fit_memory_model`.
        output_path: JSON lines, appended point by point; points found in it are not measured again.

    Returns:
        All measurements, the same on every rank.

    Raises:
        UserError: no shape, `max_points` below 4, or as in `measure_steps`.
    """
    shapes = broadcast_object_list([list(shapes)])[0]  # ranks that see other data would wait for each other
    max_tokens, least_work, climbed, measured = None, 0.0, {}, []
    for _ in range(min(MOST_CLIMBS, max_points - 3)):
        points = choose_points(shapes, geometry, max_points=max_points, max_tokens=max_tokens)
        first = points[0]
        last = max((p for p in points if p.tokens == first.tokens), key=lambda point: point.batch_size)
        measured = measure_steps(accelerator, run_step, [first, last], output_path=output_path)
        climbed |= dict.fromkeys([first, last])
        seconds = {(m.shape, m.batch_size): m.seconds for m in measured if not m.oom}
        reached = seconds.get((str(last.shape), last.batch_size))
        if reached is None:
            break
        floor = seconds[str(first.shape), first.batch_size]
        if reached >= OFF_THE_FLOOR * floor:
            least_work = last.work * floor / reached / 2
            break
        max_tokens = 4 * last.all_tokens
    while len(climbed) < max_points - 2:
        names = {(str(point.shape), point.batch_size) for point in climbed}
        last = _next_memory_point(accelerator, [m for m in measured if (m.shape, m.batch_size) in names], freed_gib)
        if last is None or last in climbed:  # in it, but left out: larger than what ran out of memory
            break
        measured = measure_steps(accelerator, run_step, [last], output_path=output_path)
        climbed[last] = None
    limits = {"max_points": max_points, "max_tokens": max_tokens, "least_work": least_work}
    points = choose_points(shapes, geometry, **limits, measured=climbed)
    return measure_steps(accelerator, run_step, points, output_path=output_path)


def _next_memory_point(accelerator: Accelerator, climbed: list[Measurement], freed_gib: float) -> Point | None:
    """The shortest shape at a batch that shows more of how memory grows; None if that is known, or cannot be had."""
    law = _memory_law(climbed, freed_gib)
    if law is None or law.known_tokens is None or any(m.oom for m in climbed):
        return None
    last = max(climbed, key=lambda m: m.batch_size)
    limit_gib = (1 - MEMORY_RESERVE) * _memory_limit(accelerator)
    factor = 2 if law.gib(1, law.known_tokens) > law.floor_gib else 4
    batch = min(factor * last.batch_size, int(law.max_tokens(limit_gib, last.tokens)) // last.tokens)
    seconds = 3 * accelerator.gradient_accumulation_steps * last.seconds * batch / last.batch_size
    if batch < 1.2 * last.batch_size or seconds > LONGEST_CLIMB_SECONDS:
        return None
    return Point(LatentShape.parse(last.shape), last.tokens, batch)


def measure_steps(
    accelerator: Accelerator,
    run_step: Callable[[LatentShape, int], None],
    points: Iterable[Point],
    *,
    output_path: str | os.PathLike | None = None,
) -> list[Measurement]:
    """Times `run_step` at each point, the same point on all ranks at a time.

    Seconds are those of one micro-step: an optimizer step's wall time divided by K, median over 3 to 6 repeats (until
    its standard error is 2%, or 2 of them took 5 s) after 2 warm-up steps (1 where a step takes 2 s), of the slowest
    rank. Repeats in which a rank's allocator had to free cached memory and try again are dropped. Memory is that of
    the fullest rank; on CPU it is 0.0, "not measured".

    Before each point its memory is predicted from those already measured; points that would not fit are left out. If
    one runs out of memory all the same, or its allocator tries again in every step, it becomes a bound, a measurement
    with `oom=True`, and larger points are skipped. One unsharded process goes on by itself. Otherwise ranks that wait
    in a collective cannot be brought back: the bound is written, and all ranks start the same command again, which
    goes on after it.

    Args:
        accelerator: the run's; its `gradient_accumulation_steps` is K.
        run_step: does one optimizer step of K micro-steps on micro-batches of this shape and batch size. It begins by
            zeroing the gradients, so that a step that ran out of memory leaves nothing behind.
        points: as from `buckets.points.choose_points`, by growing `all_tokens`; those of the main process count.
        output_path: JSON lines, appended point by point and kept through a crash. Points found in it are not
            measured again.

    Returns:
        All measurements, those found in `output_path` first. The same on every rank.

    Raises:
        UserError: nothing could be measured, not even the smallest point; or, with several ranks, memory ran out and
            there is no `output_path` to go on from.
    """
    points = broadcast_object_list([list(points)])[0]
    measurements = _read_earlier(accelerator, output_path)
    done = {(str(m.shape), m.batch_size) for m in measurements}
    bound = min((m.batch_size * m.tokens for m in measurements if m.oom), default=sys.maxsize)
    limit_gib = _memory_limit(accelerator)
    bar = tqdm(points, desc="measuring", unit="point", disable=not accelerator.is_main_process)
    with all_ranks_fail_together(accelerator), _out_of_memory(accelerator, output_path) as out_of_memory, bar:
        for index, point in enumerate(bar):
            if (str(point.shape), point.batch_size) in done or point.all_tokens >= bound:
                continue
            left = _remaining_seconds(accelerator, points[index:], measurements)
            bar.set_postfix_str(f"{point.shape} B={point.batch_size}" + (f", about {left:.0f} s left" if left else ""))
            if (needed := _predicted_gib(point, measurements)) > limit_gib:
                bar.write(f"{_name(point)} is left out: it would need {needed:.0f} GiB of {limit_gib:.0f}", sys.stderr)
                continue
            try:
                measurement = _measure(accelerator, run_step, point)
            except torch.OutOfMemoryError:
                measurement = None
            # Only out of the handler is the memory of the failed step's frames given back.
            if measurement is None:
                measurement = out_of_memory(point)
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


@contextlib.contextmanager
def _out_of_memory(accelerator: Accelerator, output_path):
    """Yields what to call when a point did not fit: it returns the bound where the ranks can go on, or ends them."""

    def bound(point: Point) -> Measurement:
        reached = read_device_memory(accelerator.device).peak_gib
        return Measurement(str(point.shape), point.tokens, point.batch_size, 0.0, reached, oom=True)

    def go_on(point: Point) -> Measurement:
        accelerator.step = 0  # the step died between two micro-steps
        return bound(point)

    def give_up(point: Point):
        raise UserError(
            f"{_name(point)} needs more memory than this rank has, and the others wait for it. Pass an output_path, "
            "from which all ranks can start again, or leave this point out."
        )

    if accelerator.num_processes == 1 and accelerator.distributed_type != DistributedType.FSDP:
        yield go_on
    elif output_path is None:
        yield give_up
    else:
        with all_ranks_restart_together(accelerator, functools.partial(append_line, output_path)) as restart:
            yield lambda point: restart(bound(point).to_json())


def _measure(accelerator: Accelerator, run_step, point: Point) -> Measurement:
    empty_device_cache(accelerator.device)  # so that what is reserved is for this point
    for _ in range(WARM_UP_STEPS):
        seconds, _ = _time_step(accelerator, run_step, point)
        if seconds[0] >= LONG_STEP_SECONDS:
            break
    reset_peak_memory(accelerator.device)
    repeats = []  # [repeat][rank]; equal on all ranks, so all stop together
    for _ in range(2 * MOST_REPEATS):
        if len(repeats) == MOST_REPEATS or _is_known([max(ranks) for ranks in repeats], accelerator):
            break
        seconds, retried = _time_step(accelerator, run_step, point)
        repeats += [] if retried else [seconds]
    memory = read_device_memory(accelerator.device)
    peak_gib, reserved_gib = (max(_gather(accelerator, gib)) for gib in (memory.peak_gib, memory.reserved_gib))
    rank_seconds = tuple(statistics.median(rank) for rank in zip(*repeats))
    return Measurement(
        str(point.shape),
        point.tokens,
        point.batch_size,
        max(rank_seconds, default=0.0),
        peak_gib,
        rank_seconds,
        oom=len(repeats) < 2,
        reserved_gib=reserved_gib,
    )


def _time_step(accelerator: Accelerator, run_step, point: Point) -> tuple[list[float], bool]:
    """Seconds of a micro-step on each rank, and whether any rank's allocator had to try again."""
    retries = read_device_memory(accelerator.device).retries
    accelerator.wait_for_everyone()
    wait_for_device(accelerator.device)
    start = time.perf_counter()
    run_step(point.shape, point.batch_size)
    wait_for_device(accelerator.device)
    seconds = (time.perf_counter() - start) / accelerator.gradient_accumulation_steps
    retries = read_device_memory(accelerator.device).retries - retries
    return _gather(accelerator, seconds), max(_gather(accelerator, float(retries))) > 0


def _is_known(seconds: list[float], accelerator: Accelerator) -> bool:
    """Whether the standard error of the median, 1.25 * std / sqrt(n), is within KNOWN_TO of it, or time is up."""
    if len(seconds) < 2:
        return False
    if sum(seconds) * accelerator.gradient_accumulation_steps > ENOUGH_SECONDS:
        return True
    error = 1.25 * statistics.stdev(seconds) / len(seconds) ** 0.5
    return len(seconds) >= LEAST_REPEATS and error <= KNOWN_TO * statistics.median(seconds)


def _predicted_gib(point: Point, measurements: list[Measurement]) -> float:
    """The least it can be after what was measured; 0 where that tells nothing. What may fit is to be tried."""
    law = _memory_law(measurements)
    return 0.0 if law is None else float(replace(law, known_tokens=None).gib(point.batch_size, point.tokens))


def _memory_law(measurements: list[Measurement], freed_gib: float = 0.0) -> MemoryModel | None:
    fitted = [m for m in measurements if m.peak_gib > 0 and not m.oom]
    return (
        fit_memory_model(fitted, freed_gib=freed_gib) if len({m.batch_size * m.tokens for m in fitted}) > 1 else None
    )


def _remaining_seconds(accelerator: Accelerator, points: list[Point], measurements: list[Measurement]) -> float | None:
    """Guessed from the step with the most work so far."""
    timed = [(work_of(m.tokens, m.batch_size), m.seconds) for m in measurements if not m.oom]
    if not timed:
        return None
    work, longest = max(timed)
    shortest = min(seconds for _, seconds in timed)
    seconds = [max(shortest, longest * point.work / work) for point in points]
    steps = [3 if s >= LONG_STEP_SECONDS else WARM_UP_STEPS + LEAST_REPEATS for s in seconds]
    return sum(s * n for s, n in zip(seconds, steps)) * accelerator.gradient_accumulation_steps


def _memory_limit(accelerator: Accelerator) -> float:
    return min(_gather(accelerator, available_gib(accelerator.device)))


def _gather(accelerator: Accelerator, value: float) -> list[float]:
    return accelerator.gather(torch.tensor([value], dtype=torch.float64, device=accelerator.device)).tolist()


def _read_earlier(accelerator: Accelerator, output_path) -> list[Measurement]:
    """What an interrupted benchmark left; the main process reads, all get the same."""
    found = [[]]
    if output_path is not None and accelerator.is_main_process and Path(output_path).exists():
        earlier, problems = read_measurements(output_path)
        for problem in problems:
            warnings.warn(f"{problem}; the other lines are kept", stacklevel=3)
        found = [earlier]
    return broadcast_object_list(found)[0]


def _name(point: Point) -> str:
    return f"{point.shape} with batch size {point.batch_size}"
