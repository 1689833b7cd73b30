"""How does a run get an Accelerator that trains one model over all its ranks, and how do its ranks end together?"""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    parse_flag_from_env,
)
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.fsdp import MixedPrecisionPolicy

from .buckets.ranks import data_rank_and_size
from .errors import UserError, mistake_in

__all__ = ["all_ranks_fail_together", "data_rank_and_size", "make_accelerator", "model_input_dtype", "strategy_of"]

_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_accelerator(
    *, gradient_accumulation_steps: int = 1, mixed_precision: str | None = None, **kwargs: Any
) -> Accelerator:
    """Builds the `Accelerator` for the launch configuration, or refuses one that would not train one shared model.

    What it sets, and why:
    - FSDP2 in half precision: parameters are gathered in half, gradients reduced in float32, and forward inputs are
      left alone (`cast_forward_inputs=False`). accelerate's own policy casts them: a timestep of 997.3 would reach
      the model as 996.0, and the rotary tables would be rounded too. The caller passes hidden states in
      `model_input_dtype(accelerator)`.
    - FSDP2 accumulates with `sync_each_batch=True`; otherwise every rank holds the whole gradient between micro-steps.
    - The scheduler is stepped by the training loop, once an optimizer step: accelerate's default steps it once a rank.
    - FSDP2 without a GPU runs on CPU over gloo, which accelerate alone would turn into unconnected copies.

    Args:
        gradient_accumulation_steps: K, micro-steps in an optimizer step.
        mixed_precision: "no", "bf16" or "fp16"; None takes the launch configuration's.
        **kwargs: passed to `Accelerator`.

    Returns:
        The accelerator. Under FSDP, `accelerator.is_fsdp2` is true.

    Raises:
        UserError: K is no number; an option is given that is set here; DeepSpeed or Megatron-LM is asked for; FSDP
            is asked for but not active, or is FSDP1; the launcher started another number of processes than the
            accelerator joins, or more than there are GPUs; or accelerate would split or dispatch batches.
    """
    if not isinstance(gradient_accumulation_steps, int) or gradient_accumulation_steps < 1:
        raise UserError(
            f"gradient_accumulation_steps is a whole number from 1 on, but found {gradient_accumulation_steps!r}."
        )
    _check_options(kwargs)
    _check_engine()
    _check_gpus(kwargs)
    fsdp_asked = parse_flag_from_env("ACCELERATE_USE_FSDP") or kwargs.get("fsdp_plugin") is not None
    if fsdp_asked:
        _check_fsdp_version(kwargs.get("fsdp_plugin"))
        _enter_cpu_fsdp()
        if kwargs.get("fsdp_plugin") is None:
            precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
            policy = _exact_input_policy(precision)
            kwargs["fsdp_plugin"] = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=gradient_accumulation_steps, sync_each_batch=fsdp_asked
        ),
        step_scheduler_with_optimizer=False,
        **kwargs,
    )
    _check_one_model(accelerator, fsdp_asked)
    return accelerator


def model_input_dtype(accelerator: Accelerator) -> torch.dtype:
    """The dtype in which to give a model its hidden states and text embeddings.

    Args:
        accelerator: from `make_accelerator`.

    Returns:
        The parameters' compute dtype under FSDP2 (nothing casts there), else float32, which autocast takes from.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        policy = accelerator.state.fsdp_plugin.mixed_precision_policy
        if policy is not None and policy.param_dtype is not None:
            return policy.param_dtype
    return torch.float32


def strategy_of(accelerator: Accelerator) -> str:
    """Names how the model is spread: "single", "ddp", "fsdp2" or "hsdp"."""
    if accelerator.distributed_type == DistributedType.FSDP:
        parallelism = accelerator.parallelism_config
        return "hsdp" if parallelism is not None and parallelism.dp_replicate_enabled else "fsdp2"
    return "single" if accelerator.num_processes == 1 else "ddp"


@contextlib.contextmanager
def all_ranks_fail_together(accelerator: Accelerator) -> Iterator[None]:
    """Ends the whole run when one rank raises inside: prints the reason and leaves at once, so that no rank waits.

    The other ranks stand in a collective that will never come, and so would this one in the process group's
    destructor; leaving without it lets the launcher (torchrun, accelerate) see the exit code and stop them. The
    reason is on stderr and in the launcher's last words. With one process the exception simply passes through.

    Args:
        accelerator: says how many processes there are and which one this is.
    """
    finished = False
    try:
        yield
        finished = True
    finally:
        if not finished and accelerator.num_processes > 1:
            _leave(accelerator, sys.exc_info()[1])


def _leave(accelerator: Accelerator, error: BaseException) -> None:
    """Prints why this rank ends and exits with 1, without waiting for any other rank."""
    if isinstance(error, SystemExit) and not error.code:
        return
    # All ranks often meet the same mistake: the main process says it first. Any other error may be the echo of a
    # rank that is already gone ("connection closed by peer"), so the rank with the true reason gets time to speak.
    mistake = mistake_in(error)
    if mistake is None:
        time.sleep(3)
    elif not accelerator.is_main_process:
        time.sleep(1)
    get_error_handler().record_exception(error)
    reason = f"error: {mistake}" if mistake is not None else "".join(traceback.format_exception(error))
    print(
        f"adaptiveload: rank {accelerator.process_index} of {accelerator.num_processes}: {reason}",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(1)


def _enter_cpu_fsdp() -> None:
    """Lets accelerate's FSDP branch run on CPU: it is entered only for what calls itself MULTI_GPU."""
    cpu_wanted = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if cpu_wanted and "LOCAL_RANK" in os.environ:
        state = PartialState(cpu=True)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU


def _exact_input_policy(precision: str) -> MixedPrecisionPolicy | None:
    """Half-precision parameters, float32 reduction, inputs left as they are; None where nothing is halved."""
    if precision not in _HALF_DTYPES:
        return None
    return MixedPrecisionPolicy(
        param_dtype=_HALF_DTYPES[precision], reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _check_options(kwargs: dict) -> None:
    """Refuses what is set here, and the DataLoader options under which accelerate cuts or re-deals micro-batches."""
    for name in ("gradient_accumulation_plugin", "step_scheduler_with_optimizer"):
        if name in kwargs:
            raise UserError(
                f"make_accelerator sets {name} itself, but it is given: K is gradient_accumulation_steps, and the "
                f"loop steps the learning-rate schedule, once an optimizer step. Leave {name} out."
            )
    options = kwargs.get("dataloader_config")
    for name in ("split_batches", "dispatch_batches"):
        if getattr(options, name, None) or kwargs.get(name):
            raise UserError(
                f"micro-batches of different shapes need {name}=False, but it is True: accelerate would cut them or "
                f"send them from the main process, and ranks would lose samples or hang. Leave {name} out."
            )


def _check_engine() -> None:
    """Refuses engines that have a loop, an optimizer and checkpoints of their own."""
    for engine in ("DeepSpeed", "Megatron_LM"):
        if parse_flag_from_env(f"ACCELERATE_USE_{engine.upper()}"):
            raise UserError(
                f"the launch configuration asks for {engine.replace('_', '-')}, which is not supported: accumulation "
                "and checkpoints are made for FSDP2 and DDP. Use accelerate_configs/fsdp2.yaml; it shards like ZeRO-3."
            )


def _check_gpus(kwargs: dict) -> None:
    """Refuses more processes than GPUs: accelerate puts two on one, and NCCL fails deep in the first collective."""
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        return  # as `srun --gpus-per-task=1` does, which shows each process its own
    if 0 < gpus < processes and not (kwargs.get("cpu") or parse_flag_from_env("ACCELERATE_USE_CPU")):
        raise UserError(
            f"the launcher started {processes} processes on this machine, but it has {gpus} GPU{'s' * (gpus > 1)}. "
            "Start one for each GPU: `accelerate launch --num_processes N` (of all machines together)."
        )


def _check_fsdp_version(plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Refuses FSDP1. Without a plugin the launcher's word counts: FSDP1 would refuse our policy with other words."""
    version = int(os.environ.get("FSDP_VERSION", "1")) if plugin is None else plugin.fsdp_version
    if version != 2:
        raise UserError(
            f"FSDP needs fsdp_version 2, but the launch configuration says {version}, whose checkpoints do not load "
            "on every device. Launch with --config_file accelerate_configs/fsdp2.yaml, or a file of your own with "
            "`fsdp_version: 2`: without --config_file accelerate takes what `accelerate config` once wrote."
        )


def _check_one_model(accelerator: Accelerator, fsdp_asked: bool) -> None:
    """Refuses set-ups in which every process would train its own copy, unconnected and without a word."""
    found = accelerator.distributed_type
    if fsdp_asked and found != DistributedType.FSDP:
        raise UserError(
            f"the launch configuration asks for FSDP, but accelerate found {found.value}: every process would train a "
            "model of its own. Start with `accelerate launch --config_file accelerate_configs/fsdp2.yaml` (cpu.yaml "
            "without a GPU), not with python alone."
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise UserError(
            f"the launcher started {launched} processes (WORLD_SIZE), but accelerate joins "
            f"{accelerator.num_processes}: they would train {launched} separate models. Without a GPU set "
            "ACCELERATE_USE_CPU=true, or use accelerate_configs/cpu.yaml."
        )
    # accelerate's launcher exports MASTER_ADDR when several processes were asked for. For distributed_type MULTI_CPU
    # it then starts a single one unless MPI is there.
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        raise UserError(
            "the launch configuration asks for several processes, but 1 was started: accelerate runs "
            "`distributed_type: MULTI_CPU` in one process. Use accelerate_configs/cpu.yaml (FSDP2 on CPU)."
        )
