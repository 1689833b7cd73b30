"""What each of 2 ranks does in test_composition_distributed.py: train patched and unpatched models that are spread."""

import os
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointError, checkpoint

from adaptiveload_hf import make_accelerator, patch_model, unpatch_model
from adaptiveload_hf.distributed import model_input_dtype

from .accelerators import FSDP2, forget_run
from .compositions import composed, fused_ops, largest_error, plain_name
from .tiny_models import relative_error, tiny_inputs, tiny_model


def train_all(path: str) -> dict:
    """{"row, family, order": what `compare` found}; `path` holds a patched Wan that another process saved."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    found = {"loaded": loaded_error(path), "compared": compared_and_unpatched(), "met": met_in_first_call()}
    for row, spread in ROWS.items():
        for family in FAMILIES:
            unpatched = one_step(*spread(family, None), family)
            for patch_first in (True, False):
                found[f"{row} {family} {patch_first}"] = compare(
                    unpatched, one_step(*spread(family, patch_first), family)
                )
    return found


def compare(unpatched, patched) -> dict:
    """{"raised": by both}, or errors of all gradients and of one, fused ops of the forward, how many ran again."""
    (truth, no_ops, _), (gradients, ops, again) = unpatched, patched
    if isinstance(truth, str) or isinstance(gradients, str):
        return {"raised": [found if isinstance(found, str) else "" for found in (truth, gradients)]}
    assert not no_ops
    flat, patched_flat = (torch.cat([found[name].flatten() for name in truth]) for found in (truth, gradients))
    errors = {"error": relative_error(patched_flat, flat), "largest": largest_error(gradients, truth)}
    return {**errors, "ops": ops, "again": again}


def one_step(model: torch.nn.Module, dtype: torch.dtype, family: str) -> tuple[dict | str, dict, int]:
    """(gradients of this rank's sample, or the error of checkpointing; fused ops; how many the backward ran again)."""
    rank = dist.get_rank()
    inputs = {name: value[rank : rank + 1] for name, value in tiny_inputs(family).items()}
    inputs = {name: v.to(dtype) if v.is_floating_point() else v for name, v in inputs.items()}
    (output,), ops = fused_ops(model, **inputs, return_dict=False)
    try:
        _, backward_ops = fused_ops(output.float().square().mean().backward)
    except CheckpointError as error:
        return str(error), ops, 0
    gradients = {plain_name(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = {name: getattr(g, "full_tensor", g.clone)().float() for name, g in gradients.items()}
    return gradients, ops, sum(n for op, n in backward_ops.items() if not op.endswith("_backward"))


def checkpointed(model) -> None:
    model.enable_gradient_checkpointing(lambda f, *args: checkpoint(f, *args, use_reentrant=False))


def blocks_of(model) -> torch.nn.ModuleList:
    return model.blocks if hasattr(model, "blocks") else model.transformer_blocks


def sharded_by_fsdp1(model):
    checkpointed(model)
    policy = ModuleWrapPolicy({type(block) for block in blocks_of(model)})
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)


def sharded(model, adapt=None):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if adapt is not None:
        adapt(model)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def add_lora(model) -> None:
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v", "proj"], init_lora_weights=False))


def in_float32(spread):
    return lambda family, order: (composed(family, spread, order), torch.float32)


def by_accelerate(*, cast_inputs: bool = False, by_plugin: bool = False):
    """FSDP2 in bfloat16 as `accelerator.prepare` shards it, with one of the two ways of checkpointing."""

    def spread(family, order):
        forget_run()
        os.environ.update(FSDP2, FSDP_ACTIVATION_CHECKPOINTING=str(by_plugin).lower())
        options = {"mixed_precision": "bf16"}
        if cast_inputs:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
        accelerator = make_accelerator(**options)

        def prepare(model):
            if not by_plugin:
                checkpointed(model)
            return accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0]

        return composed(family, prepare, order), torch.float32 if cast_inputs else model_input_dtype(accelerator)

    return spread


def compared_and_unpatched() -> list:
    """What the report says when the first call was on shards; the class after unpatching, and its fused ops."""
    model = tiny_model("wan")
    report = patch_model(model, verify="always")
    one_step(sharded(model), torch.float32, "wan")
    unpatch_model(model)
    return [str(report), type(model).__name__, one_step(model, torch.float32, "wan")[1]]


class Untested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(8, elementwise_affine=False), torch.nn.Linear(8, 8)

    def forward(self, x, scale, shift):
        return self.linear(self.norm(x) * (1 + scale) + shift)


class Summed(torch.nn.Linear):
    """Sums over ranks, as an attention whose keys lie on several does."""

    def __init__(self):
        super().__init__(8, 8)
        self.processor = SimpleNamespace(_parallel_config=object())

    def forward(self, x):
        return functional_collectives.all_reduce(super().forward(x), "sum", dist.group.WORLD)


def met_in_first_call() -> list[str]:
    """The reports of first calls in which ranks wait for each other, of a class that the first rank alone has called
    before; and the last one alone has a NaN."""
    reports = []
    for verify in ("auto", "always"):  # not known to each other
        block, inputs = Untested(), (torch.randn(2, 5, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8))
        report = patch_model(block, verify=verify)
        if dist.get_rank() == 0:
            block(*inputs)
        else:
            inputs[0][0] = torch.nan
        if verify == "auto":
            fully_shard(block.linear)
            fully_shard(block)
        else:
            block.linear = Summed()
        block(*inputs).sum().backward()
        reports.append(str(report))
    return reports


def loaded_error(path: str) -> float:
    """The error of a model that this process loaded with its patch."""
    model = torch.load(path, weights_only=False)
    assert hasattr(model.blocks[0].forward, "rewritten")
    inputs = tiny_inputs("wan")
    with torch.no_grad():
        return relative_error(model(**inputs)[0], tiny_model("wan")(**inputs)[0])


FAMILIES = ("wan", "sd35")
# How a model is spread: (family, patched first, last or not at all) -> (model, dtype of its inputs).
ROWS = {
    "DDP": in_float32(DistributedDataParallel),
    "FSDP1, gradient checkpointing": in_float32(sharded_by_fsdp1),
    "FSDP2": in_float32(sharded),
    "FSDP2, gradient checkpointing": in_float32(lambda model: sharded(model, checkpointed)),
    "FSDP2, LoRA": in_float32(lambda model: sharded(model, add_lora)),
    "FSDP2 bf16 by make_accelerator, gradient checkpointing": by_accelerate(),
    "FSDP2 bf16 by make_accelerator, accelerate's activation checkpointing": by_accelerate(by_plugin=True),
    "FSDP2 bf16 that casts inputs, gradient checkpointing": by_accelerate(cast_inputs=True),
}
