"""How are projections with LoRA computed and differentiated in few passes over their input and output?

y = x W' + b + s (x A') B'. PEFT multiplies by s and adds up in a kernel each over all of y, and autograd adds up what
every product that read x has as its gradient. Here each of these sums is the accumulating form of the matrix product
itself.
"""

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import keep, kept
from .runtime import is_transformed, no_hooks_on
from .source import LeftEager, running_source

# Digests of the forward of PEFT's LoRA linear that the tests compare with.
TESTED_LORA = {"ec0a80f5c5ce05f5"}


_LINEAR_FORWARD, _LINEAR = nn.Linear.forward, F.linear  # another library may put its own in place of them later
_OWN = {"weight", "bias"}  # the parameters of a linear, unless something keeps them elsewhere


class _Projection(NamedTuple):
    """Weight [N, D], bias [N]; LoRA's A [r, D] and B [N, r], and its scaling."""

    weight: Tensor
    bias: Tensor | None
    down: Tensor | None = None
    up: Tensor | None = None
    scaling: float = 1.0


def project(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """linear(x) for each of them, up to rounding.

    Linears with LoRA, and plain ones beside them, are one operation. All else is called: plain linears alone (by
    themselves they do not gain from it: measured on an H200), subclasses, quantized ones, those with hooks, DoRA,
    dropout, more than one adapter. So is everything while torch.compile traces, which fuses these sums by
    itself, and under torch.func.

    Args:
        x: [..., D].
    """
    called = all(type(linear) is nn.Linear for linear in linears) or not is_plain(x)
    found = [None] if called else [projection_of(linear, x) for linear in linears]
    if None in found:
        return tuple(linear(x) for linear in linears)
    tensors = [tensor for projection in found for tensor in projection[:4]]
    return _applied(False, tuple(projection.scaling for projection in found), tensors, x)


def project_heads(x: Tensor, linear: nn.Module) -> Tensor:
    """linear of all heads of a token together, as `project`, for x [B, heads, S, D / heads]: [B, S, N]."""
    found = projection_of(linear, x) if type(linear) is not nn.Linear and is_plain(x) else None
    if found is None:
        return linear(x.transpose(1, 2).flatten(2))
    return _applied(True, found[4:], found[:4], x)[0]


def _applied(heads_first: bool, scalings: Sequence[float], tensors: Sequence[Tensor | None], x: Tensor):
    needs = needs_of(tensors)
    return _apply(heads_first, scalings, needs, tensors, x, *itertools.compress(tensors, needs))


class _Project(torch.autograd.Function):
    """With g the gradient of y and h = x A': dW = g' x, db = sum g, dB = s g' h, dA = s (g B)' x,
    dx = g W + s (g B) A, summed over the projections.

    The last arguments are those of `tensors` that are trained: with LoRA most are not, and the way of each through
    `apply` costs the host time."""

    @staticmethod
    def forward(ctx, heads_first, scalings, needs, tensors, x, *_):
        stream = x.transpose(1, 2).flatten(2) if heads_first else x
        rows, ys, hs = stream.flatten(0, -2), [], []
        for scaling, projection in zip(scalings, in_fours(tensors)):
            y, h = projected(rows, *projection, scaling)
            ys.append(y.view(*stream.shape[:-1], y.shape[-1]))
            hs.append(h)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *hs)
        keep(ctx, *tensors)
        ctx.heads_first, ctx.scalings, ctx.needs = heads_first, scalings, needs
        return tuple(ys)

    @staticmethod
    def backward(ctx, *grads):
        (x, *hs), tensors = ctx.saved_tensors, in_fours(kept(ctx))
        needs_dx, needs = ctx.needs_input_grad[4], ctx.needs
        of = x.transpose(1, 2) if ctx.heads_first else x
        rows = (of.flatten(2) if ctx.heads_first else of).flatten(0, -2)
        dx, found = differentiated(rows, grads, ctx.scalings, tensors, hs, in_fours(needs), needs_dx)
        if dx is not None:
            dx = dx.view(of.shape)
            dx = dx.transpose(1, 2) if ctx.heads_first else dx
        return None, None, None, None, dx, *itertools.compress(found, needs)


# Function.apply looks at every argument for what torch.func leaves behind, which `is_plain` has excluded.
_apply = super(torch.autograd.Function, _Project).apply
# What autograd calls first: two functions of torch would only find `backward` by it.
_Project._backward_cls.apply = _Project.backward


def projected(
    rows: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor | None]:
    """(y, h) of rows [n, D]; h is None without LoRA."""
    y = F.linear(rows, weight, bias)
    if down is None:
        return y, None
    h = F.linear(rows, down)
    return _accumulated(y, h, up.t(), scaling, _may_edit()), h


def differentiated(
    rows: Tensor, grads, scalings, projections: list, hs: list, needs: list, needs_dx: bool
) -> tuple[Tensor | None, list]:
    """The gradient of rows, and those of (weight, bias, down, up) of every projection of them, one after the other.

    Args:
        rows: [n, D]. grads: of each y, of any shape with its columns last, or None.
        projections: (weight, bias, down, up) of each, hs: as `projected` gave them, needs: who needs gradients.
    """
    dx, found, in_place = None, [], _may_edit()
    for grad, scaling, (weight, _, down, up), h, (weight_needs, bias_needs, down_needs, up_needs) in zip(
        grads, scalings, projections, hs, needs
    ):
        if grad is None:
            found += [None] * 4
            continue
        grad = grad.reshape(-1, weight.shape[0])
        found += [torch.mm(grad.t(), rows) if weight_needs else None, grad.sum(0) if bias_needs else None]
        if needs_dx:
            dx = torch.mm(grad, weight) if dx is None else _accumulated(dx, grad, weight, 1.0, in_place)
        if down is None:
            found += [None, None]
            continue
        if torch.is_grad_enabled():
            h = F.linear(rows, down)
        grad_h = torch.mm(grad, up)
        found.append(_scaled_product(grad_h.t(), rows, scaling, down) if down_needs else None)
        found.append(_scaled_product(grad.t(), h, scaling, up) if up_needs else None)
        if needs_dx:
            dx = _accumulated(dx, grad_h, down, scaling, in_place)
    return dx, found


def _may_edit() -> bool:
    """Whether a sum may be made in place: not if autograd looks on or somebody else may keep it, a dispatch mode as
    selective checkpointing is. What is saved for backward must not depend on such a mode."""
    return not torch.is_grad_enabled() and torch._C._len_torch_dispatch_stack() == 0


def _accumulated(total: Tensor, left: Tensor, right: Tensor, factor: float, in_place: bool) -> Tensor:
    """total + factor * left @ right. Not in place where only some are lowered: autocast may be on for the backward of
    a forward without it."""
    if in_place and total.dtype == left.dtype == right.dtype:
        return total.addmm_(left, right, alpha=factor)
    return total.addmm(left, right, alpha=factor)


def _scaled_product(left: Tensor, right: Tensor, factor: float, like: Tensor) -> Tensor:
    """factor * left @ right, in one kernel. `like`: of the result's shape; nothing of it is read."""
    if factor == 1:
        return torch.mm(left, right)  # which takes the host less
    return torch.addmm(like, left, right, beta=0, alpha=factor)


def needs_of(tensors: Sequence[Tensor | None]) -> list[bool]:
    """Which of them need a gradient."""
    return [tensor is not None and tensor.requires_grad for tensor in tensors]


def in_fours(values) -> list:
    """Cut into (weight, bias, down, up), or what there is of each of them."""
    return [values[i : i + 4] for i in range(0, len(values), 4)]


def is_plain(x: Tensor) -> bool:
    """Whether linears of x do no more than eager PyTorch's do, and x is an ordinary tensor of a dtype that stays."""
    if (
        type(x) is not Tensor
        or x.is_meta
        or x.ndim < 2
        or nn.Linear.forward is not _LINEAR_FORWARD
        or torch.compiler.is_compiling()
        or F.linear is not _LINEAR
        or is_transformed()
    ):
        return False
    device = "cuda" if x.is_cuda else x.device.type
    cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype
    return not cast


def projection_of(linear: nn.Module, x: Tensor) -> _Projection | None:
    """What a linear, or one with LoRA, does to x, which `is_plain`; None if it does anything else. At every call: no
    attribute of a module that it has to look for, no check in a function of its own."""
    if type(linear) is nn.Linear:
        own = linear._parameters
        found = _Projection(own["weight"], own["bias"]) if no_hooks_on(linear) and own.keys() == _OWN else None
    else:
        kind = type(linear)
        found = _lora_of(linear, x) if _is_tested_lora(kind, kind.forward) else None
    if found is None:
        return None
    dtype, device = x.dtype, x.device
    for parameter in found[:4]:  # no DTensor, not quantized
        if parameter is not None and (
            (type(parameter) is not nn.Parameter and type(parameter) is not Tensor)
            or parameter.dtype != dtype
            or parameter.device != device
        ):
            return None
    return found


def _lora_of(linear: nn.Module, x: Tensor) -> _Projection | None:
    if linear.disable_adapters or linear.merged or linear.lora_variant:
        return None
    children = linear._modules
    downs = children["lora_A"]._modules
    names = [name for name in linear.active_adapters if name in downs]
    if len(names) != 1:
        return None
    dropout, scaling = children["lora_dropout"]._modules[names[0]], linear.scaling[names[0]]
    base, down, up = children["base_layer"], downs[names[0]], children["lora_B"]._modules[names[0]]
    if not (type(base) is type(down) is type(up) is nn.Linear and no_hooks_on(linear, base, down, up, dropout)):
        return None
    own, of_down, of_up = base._parameters, down._parameters, up._parameters
    if type(dropout) is not nn.Identity or not own.keys() == of_down.keys() == of_up.keys() == _OWN:
        return None
    if of_down["bias"] is not None or of_up["bias"] is not None:
        return None
    if not isinstance(scaling, int | float):  # PEFT makes a tensor of it for adapters that are swapped when compiled
        return None
    weights = of_down["weight"], of_up["weight"]
    if torch.is_autocast_enabled("cuda" if x.is_cuda else x.device.type):  # adapters are often in float32 then
        weights = [weight.to(x.dtype) for weight in weights]
    return _Projection(own["weight"], own["bias"], *weights, scaling)


@functools.cache
def _is_tested_lora(cls: type, forward: object) -> bool:
    layer = sys.modules.get("peft.tuners.lora.layer")
    if layer is None or cls is not layer.Linear:
        return False
    try:
        return running_source(forward).digest in TESTED_LORA
    except LeftEager:
        return False
