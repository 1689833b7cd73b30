"""How long would ranks take, when each of their micro-batches was timed on one GPU?"""

import time

import numpy as np
from random_training import RandomTraining

from adaptiveload_hf import LatentShape
from adaptiveload_hf.buckets.plan import BucketPlan
from adaptiveload_hf.buckets.schedule import EpochSchedule
from adaptiveload_hf.device_memory import read_device_memory, wait_for_device


def time_sizes(training: RandomTraining, name: str, sizes: list[tuple[LatentShape, int]]) -> dict:
    """Seconds of a whole training step of each (shape, B), optimizer included.

    The largest comes first, and once more before it: what the allocator takes from the driver is in no number.

    Args:
        name: of the kernels in use.
        sizes: the fewest tokens first.

    Returns:
        (shape, B) -> seconds.
    """
    training.warm_up(name, sizes)
    device, seconds = training.accelerator.device, {}
    for shape, size in (sizes[-1], *reversed(sizes)):
        wait_for_device(device)
        start = time.perf_counter()
        training.whole_step(shape, size)
        wait_for_device(device)
        seconds[shape, size] = time.perf_counter() - start
    return seconds


def replayed_ranks(
    training: RandomTraining, plan: BucketPlan, schedule: EpochSchedule, timed: dict, counted: dict
) -> list[dict]:
    """What each rank of the schedule would have measured, each micro-step as long as its slowest rank, no more.

    Args:
        timed: of `time_sizes`.
        counted: of `counted_since`, while the sizes were timed.
    """
    shapes = [plan.buckets[bucket].shape for bucket in schedule.bucket]
    seconds = np.array([timed[size] for size in zip(shapes, schedule.sizes.tolist())])
    by_step = seconds.reshape(-1, schedule.world_size)
    starts = np.concatenate([[0.0], np.cumsum(by_step.max(axis=1))])
    memory = read_device_memory(training.accelerator.device)
    return [
        {
            "seconds": float(starts[-1]),
            "block_seconds": by_step[:, rank].tolist(),
            "starts": starts.tolist(),
            "reserved_gib": [memory.reserved_gib],
            "peak_gib": memory.peak_gib,
            **counted,
        }
        for rank in range(schedule.world_size)
    ]
