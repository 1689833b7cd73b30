"""Which data rank is this process, and do all processes and accelerate agree with the schedule?"""

from __future__ import annotations

import sys
import threading

from accelerate.state import AcceleratorState, GradientState, is_initialized
from accelerate.utils import gather_object
from torch.utils.data import IterableDataset

from ..errors import UserError, first_of
from .plan import PlanOptions
from .schedule import EpochSchedule

_LONG_WAIT_SECONDS = 60
_WAITING = (
    "adaptiveload: a rank waits for the others where a loader is made or an epoch begins. Every rank must come there: "
    "make and iterate each BucketDataLoader on all ranks, one for validation too."
)


def data_rank_and_size(accelerator) -> tuple[int, int]:
    """This process's data rank and the number of data ranks, dp_replicate * dp_shard.

    Tensor, context and sequence parallel peers share a data rank: they work on the same batch.
    """
    parallelism = accelerator.parallelism_config
    peers = 1 if parallelism is None else parallelism.non_data_parallel_size
    # accelerate orders its mesh dp_replicate, dp_shard, cp, sp, tp: peers are neighbours.
    return accelerator.process_index // peers, accelerator.num_processes // peers


def check_arguments(dataset, config, accelerator, shapes, collate_fn, plan_options) -> None:
    """
    Raises:
        UserError: an argument of a loader is of another kind, such as the path of a config, or one of torch's loader.
    """
    known = PlanOptions.__annotations__
    if unknown := [name for name in plan_options if name not in known]:
        raise UserError(
            f"BucketDataLoader does not take {', '.join(unknown)}. The plan sets the batch sizes, which "
            "batch_sizes={shape: B} replaces, and the schedule the order; options of the plan are "
            f"{', '.join(known)}."
        )
    rows = "rows by index; of a streaming dataset prepare or download the rows first"
    for name, value, attribute, words in (
        ("dataset", dataset, "__len__", rows),
        ("dataset", dataset, "__getitem__", rows),
        ("config", config, "plan", "a BucketConfig, such as BucketConfig.from_pretrained(FOLDER)"),
        ("accelerator", accelerator, "gradient_state", "the run's Accelerator, such as make_accelerator()"),
        ("shapes", shapes, "bucket_of_sample", "a BucketIndex, such as index_shapes(sizes)"),
        ("collate_fn", collate_fn, "__call__", "a function of a list of rows that returns a dict"),
    ):
        # One of torch's streaming datasets may have a length, and always has a __getitem__ that raises.
        has = hasattr(value, attribute) and not isinstance(value, IterableDataset)
        if not has and not (name in ("shapes", "collate_fn") and value is None):
            raise UserError(f"{name} must be {words}, but it is {type(value).__name__} {str(value)[:80]!r}.")
    formatted = getattr(dataset, "format", None)
    kind = formatted.get("type") if isinstance(formatted, dict) else None
    if collate_fn is None and kind not in (None, "custom"):  # custom is a transform
        raise UserError(
            f"The dataset has set_format({kind!r}), which cuts zeros off the end of stored bytes. Give it as it was "
            "loaded, or your own collate_fn."
        )


def check_run(schedule: EpochSchedule, accelerator=None) -> None:
    """Compares W and K of a schedule with those that accelerate deals and accumulates by.

    Without the check, accelerate would deal the micro-batches to other ranks or group them into other optimizer steps
    than they were matched and weighted for, and training would go on.

    Args:
        accelerator: of the run; without it, whatever Accelerator this process has made, if any.

    Raises:
        UserError: they differ.
    """
    if accelerator is not None:
        found = (data_rank_and_size(accelerator)[1], accelerator.gradient_accumulation_steps)
    elif is_initialized():
        found = (data_rank_and_size(AcceleratorState())[1], GradientState().num_steps)
    else:
        return
    wanted = (schedule.world_size, schedule.gradient_accumulation_steps)
    if found != wanted:
        raise UserError(
            f"The schedule was made for {wanted[0]} data ranks and {wanted[1]} gradient_accumulation_steps, "
            f"but accelerate runs {found[0]} data ranks and accumulates {found[1]} micro-steps. Make it with "
            f"world_size={found[0]}, gradient_accumulation_steps={found[1]}, after the Accelerator."
        )


def check_scheduler(accelerator, processes: int) -> None:
    """Refuses to go on with a learning-rate schedule that accelerate counted by another number of processes.

    Args:
        processes: of the run that wrote the checkpoint.

    Raises:
        UserError: a prepared scheduler is stepped once a process, and there are other processes now.
    """
    now = accelerator.num_processes
    by_processes = [s for s in accelerator._schedulers if s.step_with_optimizer and not s.split_batches]
    if by_processes and processes != now:
        raise UserError(
            f"accelerate stepped the learning-rate schedule {processes} times an optimizer step (once a process), and "
            f"would go on with {now} times. Resume on {processes} processes; or leave the scheduler out of "
            "accelerator.prepare and step it once an optimizer step, beginning at loader.global_step."
        )


def compare_ranks(mine: dict) -> None:
    """Raises on all ranks if the fields of any differ from those of rank 0. A collective: call it on all ranks.

    Raises:
        UserError: they differ; names the rank, the field and both values.
    """
    waiting = threading.Timer(_LONG_WAIT_SECONDS, print, [_WAITING], {"file": sys.stderr, "flush": True})
    waiting.daemon = True
    waiting.start()
    try:
        everyone = gather_object([mine])
    finally:
        waiting.cancel()
    for rank, other in enumerate(everyone):
        for field, value in everyone[0].items():
            if (found := other.get(field)) != value:
                remedy = "Start all ranks with the same data, config and arguments."
                if field == "plan":
                    remedy += " Where GPUs differ in memory, give memory_limit_gib."
                if isinstance(found, dict) and isinstance(value, dict):
                    apart = [name for name in {**value, **found} if value.get(name) != found.get(name)]
                    found, value = (first_of(f"{name}: {each.get(name)}" for name in apart) for each in (found, value))
                raise UserError(
                    f"All ranks must train alike, but the {field} of rank {rank} is {found} and "
                    f"that of rank 0 is {value}. {remedy}"
                )
