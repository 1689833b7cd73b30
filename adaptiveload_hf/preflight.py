"""Will this run last? The worst bucket, every other bucket and a checkpoint are tried before its first step."""

import copy
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch.distributed import DistError
from torch.distributed.checkpoint.api import CheckpointException

from .buckets.plan import Bucket, BucketPlan
from .buckets.shapes import LatentShape
from .device_memory import empty_device_cache, read_device_memory, reset_peak_memory, wait_for_device
from .distributed import all_ranks_fail_together
from .errors import UserError

# What the writers of checkpoints raise on a full disk: each has its own.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError, CheckpointException)
_NOT_THE_WRITERS = (DistError, torch.OutOfMemoryError, torch.AcceleratorError)  # RuntimeErrors, too
_GLOO = "gloo/transport"  # in its own errors, plain RuntimeErrors, say of a rank that was killed
_ABOVE_PREDICTED = 1.05  # of the planned GiB


@dataclass(frozen=True)
class TriedBucket:
    """What one bucket's micro-batches took. Seconds are those of a first time, with what compiles or tunes in it.

    peak_gib, allocator_retries: of the fullest rank; 0 without a GPU. graphs: that torch.compile made for it.
    """

    bucket: Bucket
    micro_steps: int
    seconds: float
    peak_gib: float
    allocator_retries: int
    graphs: int


@dataclass(frozen=True)
class PreflightReport:
    """What was tried, worst first, and what the user should know. checkpoint_seconds: None if none was saved."""

    tried: tuple[TriedBucket, ...]
    checkpoint_seconds: float | None
    seconds: float
    findings: tuple[str, ...]

    def __str__(self):
        worst = self.tried[0]
        micro_steps = f"{worst.micro_steps} micro-step" + ("s" if worst.micro_steps > 1 else "")
        retries = sum(t.allocator_retries for t in self.tried)
        memory = f"peak {worst.peak_gib:.1f} GiB, {retries} allocator retries"
        lines = [
            f"preflight: {len(self.tried)} buckets, the worst ({_name(worst.bucket)}) with {micro_steps}; "
            f"{memory if worst.peak_gib else 'memory not measured'}; "
            f"{sum(t.graphs for t in self.tried)} graphs compiled; {self.seconds:.0f} s",
        ]
        if self.checkpoint_seconds is not None:
            lines.append(f"preflight: a checkpoint was saved and loaded in {self.checkpoint_seconds:.0f} s")
        return "\n".join([*lines, *(f"preflight: {finding}" for finding in self.findings)])


def preflight(
    accelerator: Accelerator,
    run_micro_step: Callable[[LatentShape, int], torch.Tensor],
    plan: BucketPlan,
    *,
    model: torch.nn.Module,
    optimizer: Any,
    scheduler: Any,
    checkpoint: Path | None = None,
) -> PreflightReport:
    """Tries what may end a run hours later, in its first minute, and leaves no trace of it.

    The bucket with the highest predicted memory (or, without a memory model, the most tokens) comes first, with a
    whole optimizer step of K micro-steps; then a checkpoint is saved; then every other bucket has one micro-step, all
    ranks the same bucket; then the checkpoint is loaded and must bring the saved weights back. At the end parameters,
    buffers, optimizer, scheduler, gradient scaler, random numbers and accelerate's counters are as they were, bit by
    bit, and gradients are None. (Over 3 and more ranks DDP, which sorts its gradients anew after a first backward, may
    then add them in another order.) Meanwhile a copy of this rank's parameters and optimizer state is in CPU memory.

    Args:
        accelerator: the run's, between two optimizer steps.
        run_micro_step: one micro-step on any micro-batch of this shape and batch size, every K-th call with the
            optimizer's step; returns the loss.
        plan: the loader's.
        model, optimizer, scheduler: as `accelerator.prepare` returned them.
        checkpoint: folder to save to, and to remove again; None saves nothing.

    Raises:
        UserError: a bucket that does not fit or has no finite loss, or a checkpoint that cannot be written or does not
            bring back what was saved. On several ranks it ends all of them.
    """
    start, accumulation = time.perf_counter(), accelerator.gradient_accumulation_steps
    worst, *others = sorted(plan.buckets, key=_memory_of, reverse=True)
    with all_ranks_fail_together(accelerator):
        restore = _remember(accelerator, model, optimizer, scheduler)
        tried = [_try(accelerator, run_micro_step, worst, accumulation)]
        saved = None if checkpoint is None else _save(accelerator, model, Path(checkpoint))
        tried += [_try(accelerator, run_micro_step, bucket, 1) for bucket in others]
        for _ in range(-len(others) % accumulation):  # to the end of an optimizer step
            run_micro_step(worst.shape, 1)
        checkpoint_seconds = None if saved is None else _load(accelerator, model, Path(checkpoint), *saved)
        restore()
    findings = tuple(finding for t in tried for finding in _findings(t))
    return PreflightReport(tuple(tried), checkpoint_seconds, time.perf_counter() - start, findings)


def _memory_of(bucket: Bucket) -> float:
    return bucket.gib if bucket.gib is not None else bucket.batch_size * bucket.tokens


def _name(bucket: Bucket) -> str:
    return f"{bucket.shape} at batch size {bucket.batch_size}"


def _try(accelerator: Accelerator, run_micro_step, bucket: Bucket, micro_steps: int) -> TriedBucket:
    device = accelerator.device
    empty_device_cache(device)
    reset_peak_memory(device)
    before, graphs, start = read_device_memory(device), _compiled_graphs(), time.perf_counter()
    try:
        losses = [run_micro_step(bucket.shape, bucket.batch_size) for _ in range(micro_steps)]
        wait_for_device(device)
    except torch.OutOfMemoryError:
        planned = "" if bucket.gib is None else f" ({bucket.gib:.1f} GiB were planned)"
        reached = read_device_memory(device).peak_gib
        raise UserError(
            f"{_name(bucket)} does not fit: out of memory after {reached:.1f} GiB{planned}. Give a smaller batch size "
            f"for this shape or a smaller memory_limit_gib, or measure again in this run's set-up."
        ) from None
    if not all(torch.isfinite(loss).all() for loss in losses):
        raise UserError(
            f"{_name(bucket)} has a loss that is not finite ({losses[-1].item()}) on random latents. Check the "
            "weights, and the precision that the model runs in."
        )
    after = read_device_memory(device)
    counted = [time.perf_counter() - start, after.peak_gib, after.retries - before.retries]
    gathered = accelerator.gather(torch.tensor([counted], dtype=torch.float64, device=device))
    seconds, peak_gib, retries = gathered.max(dim=0).values.tolist()
    return TriedBucket(bucket, micro_steps, seconds, peak_gib, int(retries), _compiled_graphs() - graphs)


def _findings(tried: TriedBucket):
    bucket = tried.bucket
    if tried.allocator_retries:
        yield (
            f"{_name(bucket)}: the allocator had to free its cache {tried.allocator_retries} times, which is slow and "
            "near the end of memory. Give a smaller batch size for this shape, or a smaller memory_limit_gib."
        )
    if bucket.gib is not None and tried.peak_gib > _ABOVE_PREDICTED * bucket.gib:
        yield (
            f"{_name(bucket)}: took {tried.peak_gib:.1f} GiB, {tried.peak_gib / bucket.gib - 1:.0%} more than planned "
            f"({bucket.gib:.1f}). Measure again in this run's set-up."
        )


def _compiled_graphs() -> int:
    compiler = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else compiler.counters["stats"]["unique_graphs"]


def write_problem(error: BaseException) -> str | None:
    """One of WRITE_ERRORS in a line; None for an error of ranks that are gone, or of the GPU."""
    failures = {}
    if isinstance(error, CheckpointException):  # its own words are tracebacks
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    if any(isinstance(each, _NOT_THE_WRITERS) or _GLOO in str(each) for each in (error, *failures.values())):
        return None
    return "; ".join(f"rank {rank}: {failure!r}" for rank, failure in failures.items()) or str(error)


def _save(accelerator: Accelerator, model, checkpoint: Path) -> tuple[list[float], float]:
    """What the weights were when they were saved, and the seconds it took."""
    start = time.perf_counter()
    accelerator.wait_for_everyone()
    try:
        accelerator.save_state(str(checkpoint))
    except WRITE_ERRORS as error:
        if (problem := write_problem(error)) is None:
            raise
        free = shutil.disk_usage(next(filter(Path.exists, checkpoint.parents))).free / 2**30
        raise UserError(
            f"a checkpoint could not be written to {checkpoint}, where {free:.2f} GiB are free: {problem}. Make room, "
            "or save to another disk."
        ) from error
    accelerator.wait_for_everyone()
    return _sums(model), time.perf_counter() - start


def _load(accelerator: Accelerator, model, checkpoint: Path, saved: list[float], save_seconds: float) -> float:
    """Seconds of saving and loading."""
    start = time.perf_counter()
    accelerator.load_state(str(checkpoint))
    accelerator.wait_for_everyone()
    seconds = save_seconds + time.perf_counter() - start
    if _sums(model) != saved:
        raise UserError(
            f"the checkpoint in {checkpoint} does not bring back the weights that were saved in it: no run could go "
            "on from one. It is left there to look at."
        )
    if accelerator.is_local_main_process:  # of each machine: where they share the folder, others remove it meanwhile
        shutil.rmtree(checkpoint, ignore_errors=True)
    accelerator.wait_for_everyone()
    return seconds


def _sums(model) -> list[float]:
    return [_local(p).sum(dtype=torch.float64).item() for p in model.parameters() if p.requires_grad]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def _remember(accelerator: Accelerator, model, optimizer, scheduler) -> Callable[[], None]:
    """What brings everything that training changes back to where it is now."""
    tensors = [(t, _local(t).to("cpu", copy=True)) for t in (*model.parameters(), *model.buffers())]
    states = {
        parameter: {name: _copy(value) for name, value in state.items()}
        for parameter, state in optimizer.state.items()
    }
    groups = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    schedule = copy.deepcopy(scheduler.state_dict())
    scaler = None if accelerator.scaler is None else accelerator.scaler.state_dict()
    counters = accelerator.step, accelerator.gradient_state.sync_gradients
    random_state = _random_state(accelerator.device)

    def restore():
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for tensor, before in tensors:
                _local(tensor).copy_(before)
        for parameter in list(optimizer.state):
            if parameter not in states:
                del optimizer.state[parameter]
        for parameter, state in states.items():
            for name, before in state.items():
                if isinstance(before, torch.Tensor):
                    _local(optimizer.state[parameter][name]).copy_(before)
                else:
                    optimizer.state[parameter][name] = before
        for group, before in zip(optimizer.param_groups, groups):
            group.update(before)
        scheduler.load_state_dict(schedule)
        if scaler is not None:
            accelerator.scaler.load_state_dict(scaler)
        accelerator.step = counters[0]
        accelerator.gradient_state.sync_gradients = counters[1]
        empty_device_cache(accelerator.device)
        reset_peak_memory(accelerator.device)
        _set_random_state(accelerator.device, random_state)

    return restore


def _copy(value):
    return _local(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _random_state(device: torch.device) -> tuple:
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device


def _set_random_state(device: torch.device, state: tuple) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[3], device)
