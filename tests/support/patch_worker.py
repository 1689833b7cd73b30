"""Run on 2 ranks by test_patch_distributed.py: gradients of patched, sharded models against one unpatched process.

Arguments: a patched model saved by another process, and its inputs and output. Rank 0 prints one JSON line:
{case: largest relative error of a gradient}.
"""

import json
import sys

import torch
import torch.distributed as dist
from support.tiny_models import relative_error, tiny_inputs, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from adaptiveload_hf import patch_model, unpatch_model


def gradients(model, inputs) -> dict[str, torch.Tensor]:
    model(**inputs, return_dict=False)[0].square().mean().backward()
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {name: getattr(g, "full_tensor", g.clone)() for name, g in found.items()}


def own_sample(inputs) -> dict:
    rank = dist.get_rank()
    return {name: value[rank : rank + 1] for name, value in inputs.items()}


def sharded(model, mesh):
    blocks = model.blocks if hasattr(model, "blocks") else model.transformer_blocks
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def largest_error(found, truth) -> float:
    assert found.keys() == truth.keys()
    return max(relative_error(found[name], truth[name]) for name in truth)


def fsdp_errors(family: str, mesh, *, patch_first: bool, checkpointing: bool) -> dict[str, float]:
    inputs = tiny_inputs(family)
    truth = gradients(tiny_model(family), inputs)
    model = tiny_model(family)
    if checkpointing:
        model.enable_gradient_checkpointing(lambda f, *args: checkpoint(f, *args, use_reentrant=False))
    if patch_first:
        patch_model(model, verify="always")  # the comparison, too, runs on sharded weights
    sharded(model, mesh)
    if not patch_first:
        patch_model(model)
    assert sum(hasattr(module.forward, "rewritten") for module in model.modules()) >= 2
    name = f"{family} fsdp2 {'patch first' if patch_first else 'patch last'} {'checkpointing' * checkpointing}".strip()
    errors = {name: largest_error(gradients(model, own_sample(inputs)), truth)}
    unpatch_model(model)
    assert type(model).__name__.startswith("FSDP")
    return errors | {f"{name}, unpatched": largest_error(gradients(model, own_sample(inputs)), truth)}


def ddp_error() -> float:
    model, inputs = tiny_model("wan"), tiny_inputs("wan")
    truth = gradients(model, inputs)
    patch_model(model)
    return largest_error(gradients(DistributedDataParallel(model), own_sample(inputs)), truth)


def loaded_error(path: str, case: str) -> float:
    model = torch.load(path, weights_only=False)
    inputs, expected = torch.load(case)
    assert hasattr(model.blocks[0].forward, "rewritten")
    with torch.no_grad():
        return relative_error(model(**inputs, return_dict=False)[0], expected)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    errors = {"loaded": loaded_error(*sys.argv[1:]), "ddp": ddp_error()}
    for family in ("wan", "sd35"):
        for patch_first, checkpointing in ((True, False), (False, False), (True, True)):
            errors |= fsdp_errors(family, mesh, patch_first=patch_first, checkpointing=checkpointing)
    if dist.get_rank() == 0:
        print(json.dumps(errors))
    dist.destroy_process_group()


main()
