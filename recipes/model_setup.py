"""How does a transformer become the patched, sharded model of a run, and how does it come out again?"""

import hashlib
import inspect
import json
import sys
import warnings
from pathlib import Path

import torch
import xxhash
from accelerate import Accelerator, init_empty_weights
from accelerate.utils import DistributedType, DynamoBackend
from checkpoints import named_if_not_written
from diffusers import DiffusionPipeline
from diffusers.optimization import get_scheduler
from lora import add_lora, leave_frozen_out, save_lora
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from training_arguments import adam_options
from wrapped_model import unwrapped, whole_state_dict

from adaptiveload_hf import UserError, patch_model
from adaptiveload_hf.buckets.ranks import compare_ranks
from adaptiveload_hf.config import current_environment
from adaptiveload_hf.distributed import data_rank_and_size, strategy_of


def load_index(args, kind: str) -> dict:
    """The pipeline's model_index.json.

    Args:
        kind: of the pipeline expected, for the message: "a Wan pipeline".

    Raises:
        UserError: there is no such pipeline.
    """
    name = args.pretrained_model_name_or_path
    try:
        return DiffusionPipeline.load_config(name, revision=args.revision)
    except OSError as error:
        raise UserError(f"expected {kind} (folder or Hub id) with model_index.json, but {name!r}: {error}") from None


def load_part(part_class, args, subfolder: str) -> dict:
    """The configuration of one part of the pipeline, as it is stored.

    Raises:
        UserError: there is no such pipeline, or it has no such part.
    """
    try:
        return part_class.load_config(args.pretrained_model_name_or_path, subfolder=subfolder, revision=args.revision)
    except OSError as error:
        raise UserError(
            f"expected a pipeline (folder or Hub id) with the folder {subfolder!r}, but "
            f"{args.pretrained_model_name_or_path!r}: {error}"
        ) from None


def load_model_config(model_class, args, subfolder: str = "transformer") -> dict:
    """A model's configuration, defaults filled in; cheap, so that mistakes show before weights are read.

    Raises:
        UserError: it is one of another class.
    """
    config = load_part(model_class, args, subfolder)
    found = config.get("_class_name", model_class.__name__)
    if found != model_class.__name__:
        raise UserError(
            f"expected a pipeline whose {subfolder} is a {model_class.__name__}, but that of "
            f"{args.pretrained_model_name_or_path} is a {found}. train_wan.py trains Wan, train_sd3.py SD3 and SD3.5."
        )
    parameters = inspect.signature(model_class.__init__).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    return {**defaults, **{name: value for name, value in config.items() if name in defaults}}


def load_transformer(accelerator: Accelerator, model_class, args, subfolder: str = "transformer"):
    """The transformer, ready for `prepare_training`.

    In float32: master weights; half precision is the policy's or autocast's business. With --rank its weights are
    frozen, need no master copy, and are loaded in the run's own precision.
    """
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = torch.float32 if args.rank is None else half.get(accelerator.mixed_precision, torch.float32)
    if args.from_scratch:
        transformer = model_class.from_config(load_model_config(model_class, args, subfolder))
        return transformer if dtype == torch.float32 else transformer.to(dtype)  # diffusers warns of any cast
    return model_class.from_pretrained(
        args.pretrained_model_name_or_path, subfolder=subfolder, revision=args.revision, dtype=dtype
    )


def prepare_training(accelerator: Accelerator, args, transformer, num_training_steps: int | None = None):
    """The patched transformer, AdamW and the learning rate's scheduler, sharded as the launch configuration says.

    With --rank an adapter is added, and it alone is trained and in the checkpoints.

    Args:
        accelerator: from `make_accelerator`.
        args: of `add_model_arguments`; with a scheduler, also of `add_scheduler_arguments`.
        transformer: from `load_transformer`.
        num_training_steps: optimizer steps in the whole run; None keeps the learning rate constant.

    Returns:
        model, optimizer, scheduler; the scheduler is stepped once an optimizer step.

    Raises:
        UserError: ranks have loaded different weights.
    """
    # Only in-place edits of the model's output would be wrong; FlowMatching makes none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    transformer.train().requires_grad_(True)
    if args.rank is not None:
        add_lora(transformer, args)
    if args.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if not args.no_patch:
        report = patch_model(transformer)
        if accelerator.is_main_process:
            print(report, file=sys.stderr)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in transformer.parameters() if parameter.requires_grad],
        **adam_options(args),
        fused=True,  # torch's default needs memory for a copy of all weights (docs/training.md)
    )
    scheduler = get_scheduler("constant", optimizer)
    if num_training_steps is not None:
        scheduler = get_scheduler(
            args.lr_scheduler,
            optimizer,
            num_warmup_steps=args.lr_warmup_steps,
            num_training_steps=num_training_steps,
            num_cycles=args.lr_num_cycles,
            power=args.lr_power,
        )
    # Machines may read it from disks of their own, and FSDP2 would make one model of pieces of two.
    compare_ranks({"transformer": _digest(transformer.named_parameters())})
    frozen = [(name, weight) for name, weight in transformer.named_parameters() if not weight.requires_grad]
    transformer.base_digest = _digest(frozen) if frozen else None  # for checkpoints, which leave the base out
    model, optimizer, scheduler = accelerator.prepare(transformer, optimizer, scheduler)
    if args.rank is not None:
        leave_frozen_out(unwrapped(accelerator, model))
    return model, optimizer, scheduler


def _digest(named_weights) -> str:
    """Of every weight's name, size and first values, which differ between two models and two versions of one."""
    digest = xxhash.xxh3_64()
    for name, weight in named_weights:
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().flatten()[:256].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def save_result(accelerator: Accelerator, args, model, pipeline_class, subfolder: str) -> None:
    """The whole transformer into this folder of --output_dir, or with --rank the LoRA.

    Raises:
        UserError: it could not be written.
    """
    output_dir = Path(args.output_dir)
    with named_if_not_written("the result", output_dir, output_dir):
        if args.rank is not None:
            save_lora(accelerator, model, pipeline_class, output_dir)
        else:
            save_transformer(accelerator, model, output_dir / subfolder)


def save_transformer(accelerator: Accelerator, model, folder: Path) -> None:
    """Saves the whole transformer in float32, as `from_pretrained(folder)` of its class loads it."""
    state_dict = whole_state_dict(accelerator, model)
    if accelerator.is_main_process:
        trained = unwrapped(accelerator, model)
        # FSDP2 gives the model a class of its own, made of the original one.
        model_class = next(c for c in type(trained).__mro__ if c.__module__.startswith("diffusers."))
        with init_empty_weights():
            transformer = model_class.from_config(trained.config)
        transformer.load_state_dict(state_dict, assign=True)
        transformer.save_pretrained(folder)
        print(f"the trained transformer is in {folder}", file=sys.stderr, flush=True)


def describe_run(accelerator: Accelerator, args, model_class, transformer_config: dict) -> tuple[dict, dict]:
    """The bucket config's `model` and `environment`: what the measured seconds and GiB hold for."""
    text, parallelism = json.dumps(transformer_config, sort_keys=True), accelerator.parallelism_config
    model = {
        "class": model_class.__name__,
        "config_hash": hashlib.sha256(text.encode()).hexdigest()[:16],
        "base_model": args.pretrained_model_name_or_path,
    }
    environment = {
        **current_environment(),
        "world_size": accelerator.num_processes,
        "strategy": strategy_of(accelerator),
        **({"dp_shard_size": parallelism.dp_shard_size} if strategy_of(accelerator) == "hsdp" else {}),
        "dtype": {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}[accelerator.mixed_precision],
        "activation_checkpointing": args.gradient_checkpointing or _fsdp_checkpoints(accelerator),
        "patched": not args.no_patch,
        "compiled": accelerator.state.dynamo_plugin.backend != DynamoBackend.NO,
        "lora": args.rank is not None,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
    }
    return model, environment


def gradient_gib(model: torch.nn.Module) -> float:
    """Of this rank's gradients: each is as its parameter, sharded like it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in trained) / 2**30


def refuse_unsafe_sharding(accelerator: Accelerator, gradient_checkpointing: bool, lora: bool = False) -> None:
    """Names the settings that fail deep inside the first step, or do the same work twice.

    Raises:
        UserError: naming the setting and the one to use.
    """
    _, ranks = data_rank_and_size(accelerator)
    if ranks != accelerator.num_processes:
        raise UserError(
            f"the launch configuration's cp_size, sp_size and tp_size make {ranks} data ranks of "
            f"{accelerator.num_processes} processes, but this recipe splits no sample: the others would do the same "
            "work again. Set them to 1, or write a loop of your own (docs/loop.md)."
        )
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    plugin, dynamo = accelerator.state.fsdp_plugin, accelerator.state.dynamo_plugin
    if lora and dynamo.backend != DynamoBackend.NO and not dynamo.use_regional_compilation:
        raise UserError(
            "a LoRA under FSDP2 with a dynamo_backend for the whole model could not go on from its checkpoints, in "
            "which torch then wants the frozen base. Add dynamo_use_regional_compilation: true to the `dynamo_config` "
            "(--dynamo_use_regional_compilation)."
        )
    if plugin.cpu_ram_efficient_loading:
        raise UserError(
            "the launch configuration has fsdp_cpu_ram_efficient_loading: true (accelerate's default), which cannot "
            "load a parameter outside any submodule, such as Wan's `scale_shift_table`. Set it to false in the "
            "`fsdp_config`."
        )
    if plugin.auto_wrap_policy is None:
        raise UserError(
            "the launch configuration has no fsdp_auto_wrap_policy: every rank would gather the whole transformer at "
            "once. Set it to TRANSFORMER_BASED_WRAP in the `fsdp_config`."
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy) and accelerator.device.type == "cpu":
        raise UserError("the launch configuration has fsdp_offload_params: true, which needs a GPU. Set it to false.")
    if gradient_checkpointing and plugin.activation_checkpointing:
        raise UserError(
            "activations are to be checkpointed twice: --gradient_checkpointing and fsdp_activation_checkpointing: "
            "true in the launch configuration. Leave --gradient_checkpointing out."
        )
    policy = plugin.mixed_precision_policy
    if gradient_checkpointing and policy is not None and policy.param_dtype is not None and policy.cast_forward_inputs:
        raise UserError(
            "--gradient_checkpointing does not go with cast_forward_inputs=True of FSDP2: timesteps and rotary tables "
            f"lose precision to {policy.param_dtype}, and torch 2.11 fails when it recomputes a block, since it casts "
            "them in forward only. Set fsdp_activation_checkpointing: true in the launch configuration instead."
        )


def _fsdp_checkpoints(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.FSDP and bool(
        accelerator.state.fsdp_plugin.activation_checkpointing
    )
