"""How does an unmodified model get its rewritten forwards, and lose them again?"""

import contextlib
import inspect
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch
from diffusers import ModelMixin
from torch import nn

from ..errors import UserError
from . import attention, families, more_families  # noqa: F401  both register the adapters
from .adapters import adapter_of
from .first_call import Verdict
from .forwards import (
    MARK,
    RewrittenForward,
    decided_of,
    forward_called_by,
    norms_of,
    rewritten_behind,
    rewritten_forward,
)
from .ops import OPS, extension_missing_reason, kernel_backend
from .patch_report import PatchReport
from .registry import has_triton

__all__ = ["PatchReport", "patch_model", "patched", "unpatch_model"]

_BACKENDS = ("auto", "cuda", "triton", "reference")
_CHECKS = ("auto", "always", "never")
_TOP_LEVEL = "a model's top-level forward is rewritten only if the tests cover its source"


def patch_model(
    model: nn.Module, *, backend: str = "auto", ops: str | Collection[str] = "all", verify: str = "auto"
) -> PatchReport:
    """Run the adaptive layer norms and gated residuals of a diffusers model as fused ops.

    In the source of each block's forward, and of the model's own, `norm(x) * (1 + scale) + shift` and `x + gate * y`
    are replaced where that is proven safe. The result becomes the forward of the instance, below any hook. The
    attention processors of Wan, SD3, Flux and HunyuanVideo are wrapped (`AdaptiveLoadAttnProcessor`). Weights, their
    names and the class do not change. What is not proven stays eager and is listed. Patching again replaces an earlier
    patch.

    Args:
        model: an nn.Module, before or after hooks, PEFT, FSDP2 and DDP; or a pipeline, whose `transformer*` and
            `controlnet*` components are patched.
        backend: "auto" (on a GPU the CUDA kernels if they are built, else Triton, else the reference), "cuda",
            "triton" or "reference". With "cuda" and "triton" tensors on other devices run as written.
        ops: "all", or the names of the ops to use.
        verify: whether the first call of a class is compared with its original forward: "auto" (unless the tests cover
            its source), "always" or "never". Compiled code cannot be compared and stays eager until it was.

    Returns:
        PatchReport: `print` it.

    Raises:
        UserError: an argument is not one of these, the backend cannot run here, or nothing could be patched.
    """
    models = _models_of(model)
    names = _checked_ops(ops)
    _check_choice("backend", backend, _BACKENDS)
    _check_choice("verify", verify, _CHECKS)
    _check_backend_runs(backend)
    report = PatchReport(
        {name: _shown_backend(backend, models) for name in OPS if name in names},
        extension_missing=extension_missing_reason() if backend == "auto" else None,
    )
    unpatch_model(model)
    try:
        for module in (module for model in models for module in model.modules()):
            _patch(module, report, names, backend, verify)
        if not report.instances_patched:
            raise UserError(_nothing_patched(report, models))
    except UserError:
        unpatch_model(model)  # all of it, or nothing
        raise
    return report


def unpatch_model(model: nn.Module) -> None:
    """Restore the original forward and attention processor of every module of a model (or pipeline).

    What was never patched does not change, including an `AdaptiveLoadAttnProcessor` that the caller set.
    """
    for module in (module for model in _models_of(model) for module in model.modules()):
        attention.uninstall(module)
        for holder, name in _slots(module):
            rewritten = rewritten_behind(_function_of(getattr(holder, name), module))
            if rewritten is not None and holder is module and name == "forward":
                del module.forward
            elif rewritten is not None:
                setattr(holder, name, types.MethodType(rewritten.original, module))
        vars(module).pop(MARK, None)


@contextlib.contextmanager
def patched(model: nn.Module, **options: Any) -> Iterator[PatchReport]:
    """Patch a model for the length of a `with` block, which gets the report.

    Args:
        model, options: those of `patch_model`.

    Raises:
        UserError: as `patch_model` does; or the model is patched already, which the end of the block would undo.
    """
    if any(MARK in vars(module) for each in _models_of(model) for module in each.modules()):
        raise UserError("patched() found a model that is patched already. Run the block without it, or unpatch first.")
    report = patch_model(model, **options)
    try:
        yield report
    finally:
        unpatch_model(model)


# ------------------------------------------------------------------------------------------- installing


def _patch(module: nn.Module, report: PatchReport, names: frozenset[str], backend: str, verify: str) -> None:
    """Give one module its rewritten forward and attention processor, where there are any, and report both."""
    owner = _owner(module)
    if owner is not None:
        adapter, version = adapter_of(module, owner)
        facts = norms_of(module, owner), decided_of(module, owner)
        rewritten = rewritten_forward(owner, *facts, names, backend, verify, adapter)
        report.add(rewritten, _install(module, owner, rewritten), note=version)
        if (base := forward_called_by(owner)) is not None:
            facts = norms_of(module, base), decided_of(module, base)
            called = rewritten_forward(base, *facts, names, backend, verify)
            report.add(called, f"the forward of {owner.__name__} calls it, and the class's own answers")
    if attention.op_of(module) in names:
        report.add_attention(module, owner, attention.install(module, backend))


def _owner(module: nn.Module) -> type | None:
    """The class whose forward a module runs, if it is not torch's own."""
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return None if owner.__module__.split(".")[0] == "torch" else owner


def _slots(module: nn.Module) -> Iterator[tuple[object, str]]:
    """Where the innermost forward may be held, from the inside: (object, attribute)."""
    registry = vars(module).get("_diffusers_hook")
    if registry is not None and registry._fn_refs:
        innermost = registry._fn_refs[0]
        yield innermost, "forward" if innermost.original_forward is None else "original_forward"
    if "_hf_hook" in vars(module) and "_old_forward" in vars(module):
        yield module, "_old_forward"
    yield module, "forward"


def _function_of(forward: object, module: nn.Module) -> object | None:
    """The function of a bound method of this very module; None for all else, such as a hook's `functools.partial`."""
    return forward.__func__ if inspect.ismethod(forward) and forward.__self__ is module else None


def _install(module: nn.Module, owner: type, rewritten: RewrittenForward) -> str | None:
    """Put a rewritten forward into the innermost slot, or say why not."""
    if not rewritten.text:
        return rewritten.reason
    if isinstance(module, ModelMixin) and rewritten.verdict is Verdict.UNCHECKED:
        return (
            _TOP_LEVEL  # a comparison would run the whole model, with what its blocks' hooks and caches hold, thrice
        )
    for holder, name in _slots(module):
        if _function_of(getattr(holder, name), module) is rewritten.original:
            setattr(holder, name, rewritten.bind(module))
            vars(module)[MARK] = True
            return None
    found = getattr(module.forward, "__qualname__", type(module.forward).__name__)
    return f"its forward on the instance is not the class's own but {found}"


# --------------------------------------------------------------------------------------------- arguments


def _models_of(model: object) -> list[nn.Module]:
    components = getattr(model, "components", None)
    if isinstance(components, dict) and not isinstance(model, nn.Module):
        wanted = {name: c for name, c in components.items() if name.startswith(("transformer", "controlnet"))}
        models = list(dict.fromkeys(c for c in wanted.values() if isinstance(c, nn.Module)))
        if not models:
            raise UserError(
                f"expected a pipeline with a transformer, but {type(model).__name__} has {', '.join(components)}. "
                "Pass the model to patch."
            )
        return models
    if isinstance(model, nn.DataParallel):
        raise UserError(
            "expected a model for one process per GPU, found nn.DataParallel, whose replicas share one forward. "
            "Use DistributedDataParallel (accelerate launch)."
        )
    if not isinstance(model, nn.Module):
        raise UserError(f"expected an nn.Module or a diffusers pipeline, found {type(model).__name__}.")
    return [model]


def _check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}, but it is {value!r}.")


def _checked_ops(ops: str | Collection[str]) -> frozenset[str]:
    names = OPS if ops == "all" else {ops} if isinstance(ops, str) or not isinstance(ops, Collection) else ops
    unknown = sorted(map(str, set(names) - set(OPS)))
    if unknown or not names:
        found = ", ".join(unknown) or "nothing"
        raise UserError(f'ops must be "all" or some of {", ".join(OPS)}, but it names {found}.')
    if "gate_residual_layer_norm_modulate" in names and not {"layer_norm_modulate", "gate_residual"} <= set(names):
        raise UserError(
            "ops names gate_residual_layer_norm_modulate, which needs layer_norm_modulate and gate_residual beside "
            "it: they run where both in one do not apply. Name all three."
        )
    return frozenset(names)


def _check_backend_runs(backend: str) -> None:
    if backend not in ("cuda", "triton"):
        return
    if not torch.cuda.is_available():
        raise UserError(f'backend="{backend}" needs a GPU, and torch sees none here. Use backend="auto".')
    if backend == "triton":
        if not has_triton:
            raise UserError('backend="triton" needs Triton, which is not installed. `pip install triton`.')
        return
    if reason := extension_missing_reason():
        raise UserError(f'backend="cuda" needs the CUDA extension, which is missing: {reason}. Or use backend="auto".')


def _shown_backend(backend: str, models: list[nn.Module]) -> str:
    """Per device that the model may run on: what an op runs there."""
    if backend != "auto":
        return backend
    devices = {parameter.device.type for model in models for parameter in model.parameters()}
    devices |= {"cuda"} if torch.cuda.is_available() else set()
    shown = [f"{kernel_backend(device)} on {device}" for device in sorted(devices)]
    return ", ".join(shown).replace("reference on cuda", "reference on cuda (Triton is not installed)")


def _nothing_patched(report: PatchReport, models: list[nn.Module]) -> str:
    seen = "; ".join(
        f"{row['class']}: {', '.join(row['left_eager']) or 'no site'}" for row in report.to_dict()["classes"]
    )
    if not seen:
        owners = sorted({owner.__name__ for m in models for module in m.modules() if (owner := _owner(module))})
        seen = f"no adaptive layer norm or gated residual in {', '.join(owners) or 'torch modules alone'}"
    return (
        "expected a model with adaptive layer norms or gated residuals that can be rewritten, found nothing to patch "
        f"in {', '.join(type(model).__name__ for model in models)} ({seen})."
    )
