"""Which forward runs on a patched instance, and does the first call of an untested class agree with the original?

`forward_of` makes the forward that `patch` installs. torch.compile traces it, so nothing counts, logs or caches along
the way, apart from that one comparison.
"""

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

# Relative L2 difference allowed between a rewritten and an original forward: a few roundings of each dtype.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class Verdict(Enum):
    """What is known of a rewritten forward."""

    TESTED = "tested source"
    UNCHECKED = "not compared yet"
    TRUSTED = "not compared, as asked"
    EQUAL = "first call was equal"
    DIFFERS = "first call differed"
    UNKNOWN = "first call could not be compared"
    SPREAD = "not compared: ranks meet inside"


LEFT_ALONE = (Verdict.DIFFERS, Verdict.UNKNOWN, Verdict.SPREAD)  # the original runs
_FINDINGS = {
    Verdict.DIFFERS: "differs from the original, which runs instead. Please report this class.",
    Verdict.UNKNOWN: (
        "could not be compared with the original, which runs instead: the first call gave no finite numbers, or no "
        "plain tensors. patch_model(model, verify='never') runs it all the same."
    ),
    Verdict.SPREAD: (
        "was not compared with the original, which runs instead: ranks wait for each other inside it (submodules are "
        "sharded, or attention is parallel), and a comparison could make some wait more often than others. Call the "
        "model once on each rank before it is spread, or patch_model(model, verify='never')."
    ),
}


def forward_of(rewritten) -> types.FunctionType:
    """The function that stands in for a class's forward, to be bound to its instances.

    Args:
        rewritten: `forwards.RewrittenForward`: `function`, `original`, the `verdict` on both, `stands_for(module)`.
            The result carries it as an attribute.
    """

    @functools.wraps(rewritten.original)
    def forward(self, *args, **kwargs):
        if not rewritten.stands_for(self):
            return type(self).forward(self, *args, **kwargs)
        if rewritten.verdict in (Verdict.UNCHECKED, *LEFT_ALONE):
            return _run_checked(self, rewritten, args, kwargs)
        return rewritten.function(self, *args, **kwargs)

    forward.rewritten = rewritten
    return forward


def _run_checked(module: nn.Module, rewritten, args: tuple, kwargs: dict):
    # A comparison cannot be traced: until one eager call was compared, compiled code is the original.
    if rewritten.verdict is Verdict.UNCHECKED and not torch.compiler.is_compiling():
        rewritten.verdict = _compare(module, rewritten, args, kwargs)
        if found := _FINDINGS.get(rewritten.verdict):
            warnings.warn(f"The rewritten forward of {rewritten.name} {found}", stacklevel=4)
    if rewritten.verdict is Verdict.EQUAL:
        return rewritten.function(module, *args, **kwargs)
    return rewritten.original(module, *args, **kwargs)


@torch.no_grad()
def _compare(module: nn.Module, rewritten, args: tuple, kwargs: dict) -> Verdict:
    """Run both forwards on copies of the inputs, with the same random numbers and the same state."""
    if _ranks_meet_in(module):  # one of them may have settled this class before, alone, and runs it once
        return Verdict.SPREAD
    original = _run_aside(rewritten.original, module, args, kwargs)
    fused = _run_aside(rewritten.function, module, args, kwargs)
    if any(t.is_meta for t in original):
        return Verdict.UNCHECKED
    if not all(type(t) in (Tensor, nn.Parameter) for t in (*original, *fused)):
        return Verdict.UNKNOWN
    if len(fused) != len(original) or not all(map(_close, fused, original)):
        return Verdict.DIFFERS
    known = any(t.is_floating_point() and bool(t.isfinite().any()) for t in original)
    return Verdict.EQUAL if known else Verdict.UNKNOWN


def _ranks_meet_in(module: nn.Module) -> bool:
    """Whether ranks wait for each other inside a module's forward: for its submodules' shards, numbers or tokens."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    _, *inner = module.modules()
    return any(
        isinstance(each, (FSDPModule, FullyShardedDataParallel, nn.SyncBatchNorm))
        or getattr(getattr(each, "processor", None), "_parallel_config", None) is not None
        for each in inner
    ) or any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in module.parameters())  # DeepSpeed's shards


def _run_aside(forward: Callable, module: nn.Module, args: tuple, kwargs: dict) -> list[Tensor]:
    put_back = list(_state(module, args, kwargs))
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
    devices = {leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_cuda}
    try:
        with torch.random.fork_rng(devices=devices):
            output = forward(module, *args, **kwargs)
    finally:
        for restore in put_back:
            restore()
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]  # of DTensor


def _state(module: nn.Module, args: tuple, kwargs: dict) -> Iterator[Callable[[], None]]:
    """What puts back what a forward may leave behind: attributes and buffers of its modules, what their attention
    processors and the caches among its arguments hold. (Not what hooks hold: FSDP's and offload's must go on.)"""
    modules = list(module.modules())
    others = [*pytree.tree_leaves((args, kwargs)), *(vars(m).get("processor") for m in modules)]
    others = [other for other in others if hasattr(other, "__dict__") and not isinstance(other, (Tensor, *_CODE))]
    for holder in (*modules, *others):
        yield _as_it_is(vars(holder))
        for name, value in vars(holder).items():
            if name == "_buffers":
                yield from map(_as_it_is, value.values())
            elif not (name.startswith("_") and isinstance(holder, nn.Module)):
                yield _as_it_is(value)


def _as_it_is(value: object) -> Callable[[], None]:
    """What gives a tensor its numbers and a container its items back, if they have changed."""
    if isinstance(value, dict):
        return functools.partial(_refill, value, dict(value))
    if isinstance(value, list):
        return functools.partial(value.__setitem__, slice(None), list(value))
    if isinstance(value, Tensor) and not (isinstance(value, nn.Parameter) or value.is_meta):
        return functools.partial(_rewrite, value, value.clone())
    return lambda: None


def _refill(container: dict, items: dict) -> None:
    if [*map(id, container.values())] != [*map(id, items.values())] or [*container] != [*items]:
        container.clear()
        container.update(items)


def _rewrite(tensor: Tensor, numbers: Tensor) -> None:
    if not torch.equal(tensor, numbers):  # its version does not tell: batch norms edit their statistics past it
        tensor.copy_(numbers)


def _close(fused: Tensor, original: Tensor) -> bool:
    if fused.shape != original.shape or not original.is_floating_point():
        return fused.shape == original.shape and torch.equal(fused, original)
    lowered = torch.is_autocast_enabled("cuda") and fused.dtype == torch.get_autocast_dtype("cuda")
    if fused.dtype != original.dtype and not lowered:
        return False
    tolerance = _TOLERANCES.get(fused.dtype, 1e-6)
    dtype = torch.promote_types(original.dtype, torch.float32)
    fused, original = fused.to(dtype), original.to(dtype)
    finite = original.isfinite()
    if not bool((finite | torch.isclose(fused, original, rtol=0, atol=0, equal_nan=True)).all()):
        return False
    error, size = (torch.linalg.vector_norm(t.where(finite, 0)) for t in (fused - original, original))
    return bool(error <= tolerance * size)
