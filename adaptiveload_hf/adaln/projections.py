"""How are projections with LoRA computed and differentiated in few passes over their input and output?

y = x W' + b + s (x A') B'. PEFT multiplies by s and adds up in a kernel each over all of y, and autograd adds up what
every product that read x has as its gradient. Here each of these sums is the accumulating form of the matrix product
itself.
"""

import functools
import itertools
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .onlookers import is_transformed, no_hooks_on
from .registry import keep, kept
from .runtime import affine_of
from .source import LeftEager, running_source

# Digests of the forward of PEFT's LoRA linear that the tests compare with, and of the properties by which it asks for
# its state: `_lora_of` reads what they read.
_STATE = ("disable_adapters", "merged", "active_adapters", "active_adapter")
TESTED_LORA = {("ec0a80f5c5ce05f5", "1e37574f0bcd7c69", "7646cb080720ea51", "75ce6bda4e092973", "f20df3ae27de105b")}

# A function's result that is a view may not be edited in place, as a hook on the attention does. This makes none.
_reshaped = torch.ops.aten._unsafe_view.default._op
_LINEAR_FORWARD, _LINEAR = nn.Linear.forward, F.linear  # another library may put its own in place of them later
_OWN = {"weight", "bias"}  # the parameters of a linear, unless something keeps them elsewhere, as FSDP 1 does
# Weight [N, D], bias [N]; LoRA's A [r, D] and B [N, r], and its scaling.
_Projection = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, float]


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
    return _applied(False, tuple(projection[4] for projection in found), tensors, x)


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
        rows, shape, in_place = _rows_of(x, heads_first), x.shape, may_edit()
        shape = (shape[0], shape[2]) if heads_first else shape[:-1]
        ys, hs = [], []
        for scaling, projection in zip(scalings, in_fours(tensors)):
            y, h = projected(rows, *projection, scaling, in_place)
            ys.append(_reshaped(y, (*shape, y.shape[1])))
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
        rows, shape = _rows_of(x, ctx.heads_first), x.shape
        dx, found = differentiated(rows, grads, ctx.scalings, tensors, hs, in_fours(needs), needs_dx)
        if dx is not None and ctx.heads_first:
            batch, heads, tokens, width = shape
            dx = dx.view(batch, tokens, heads, width).transpose(1, 2)
        elif dx is not None:
            dx = dx.view_as(x)
        return None, None, None, None, dx, *itertools.compress(found, needs)


def _rows_of(x: Tensor, heads_first: bool) -> Tensor:
    """x, or x [B, heads, S, D / heads] with the heads of a token together, as a matrix."""
    if not heads_first:
        return x.flatten(0, -2)
    batch, heads, tokens, width = x.shape
    return x.transpose(1, 2).reshape(batch * tokens, heads * width)


# Function.apply looks at every argument for what torch.func leaves behind, which `is_plain` has excluded.
_apply = super(torch.autograd.Function, _Project).apply
# What autograd calls first: two functions of torch would only find `backward` by it.
_Project._backward_cls.apply = _Project.backward


def projected(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor | None,
    up: Tensor | None,
    scaling: float,
    in_place: bool,
) -> tuple[Tensor, Tensor | None]:
    """(y, h) of rows [n, D]; h is None without LoRA. `in_place`: as `may_edit` says."""
    y = F.linear(rows, weight, bias)
    if down is None:
        return y, None
    h = F.linear(rows, down)
    return _accumulated(y, h, up.mT, scaling, in_place), h


def differentiated(
    rows: Tensor, grads, scalings, projections: list, hs: list, needs: list, needs_dx: bool
) -> tuple[Tensor | None, list]:
    """The gradient of rows, and those of (weight, bias, down, up) of every projection of them, one after the other.

    Args:
        rows: [n, D]. grads: of each y, of any shape with its columns last, or None.
        projections: (weight, bias, down, up) of each, hs: as `projected` gave them, needs: who needs gradients.
    """
    dx, found, in_place, again = None, [], may_edit(), torch.is_grad_enabled()
    for grad, scaling, (weight, _, down, up), h, (weight_needs, bias_needs, down_needs, up_needs) in zip(
        grads, scalings, projections, hs, needs
    ):
        if grad is None:
            found += (None, None, None, None)
            continue
        grad = grad.reshape(-1, weight.shape[0])
        turned = grad.mT if weight_needs or up_needs else None  # which takes the host less than t()
        dweight, dbias = torch.mm(turned, rows) if weight_needs else None, grad.sum(0) if bias_needs else None
        if needs_dx:
            dx = torch.mm(grad, weight) if dx is None else _accumulated(dx, grad, weight, 1.0, in_place)
        if down is None:
            found += (dweight, dbias, None, None)
            continue
        if again:
            h = F.linear(rows, down)
        grad_h = torch.mm(grad, up)
        ddown = _scaled_product(grad_h.mT, rows, scaling, down) if down_needs else None
        found += (dweight, dbias, ddown, _scaled_product(turned, h, scaling, up) if up_needs else None)
        if needs_dx:
            dx = _accumulated(dx, grad_h, down, scaling, in_place)
    return dx, found


def may_edit() -> bool:
    """Whether a sum may be made in place: not if autograd looks on or somebody else may keep it, a dispatch mode as
    selective checkpointing is. What is saved for backward must not depend on such a mode."""
    return not torch.is_grad_enabled() and torch._C._len_torch_dispatch_stack() == 0


def _accumulated(total: Tensor, left: Tensor, right: Tensor, factor: float, in_place: bool) -> Tensor:
    """total + factor * left @ right. Not in place where only some are lowered: autocast may be on for the backward of
    a forward without it."""
    if not (in_place and total.dtype == left.dtype == right.dtype):
        return total.addmm(left, right, alpha=factor)
    return total.addmm_(left, right) if factor == 1 else total.addmm_(left, right, alpha=factor)


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
    return not torch.compiler.is_compiling() and is_ordinary(x) and not is_transformed()


def is_ordinary(x: Tensor) -> bool:
    """The part of `is_plain` that depends on x; neither torch.compile nor `is_transformed` is asked."""
    if type(x) is not Tensor or nn.Linear.forward is not _LINEAR_FORWARD or F.linear is not _LINEAR:
        return False
    if x.is_meta or x.ndim < 2:
        return False
    device = "cuda" if x.is_cuda else x.device.type
    return not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == x.dtype


def projection_of(linear: nn.Module, x: Tensor) -> _Projection | None:
    """What a linear, or one with LoRA, does to x, which `is_plain`; None if it does anything else. At every call: no
    attribute of a module that it has to look for, hardly a check in a function of its own."""
    kind = type(linear)
    if kind is nn.Linear:
        own = linear._parameters
        own = own if own.keys() == _OWN else affine_of(linear)
        found = (own["weight"], own["bias"], None, None, 1.0) if no_hooks_on(linear) else None
    else:
        found = _lora_of(linear, x) if is_tested_lora(kind, kind.forward) else None
    if found is None:
        return None
    dtype = x.dtype
    for parameter in found[:4]:  # no DTensor, not quantized; on another device than x the products refuse them, too
        if parameter is not None:
            kind = type(parameter)
            if (kind is not nn.Parameter and kind is not Tensor) or parameter.dtype is not dtype:
                return None
    return found


def _lora_of(linear: nn.Module, x: Tensor) -> _Projection | None:
    if linear._disable_adapters or linear.merged_adapters or linear.lora_variant:
        return None
    children, active = linear._modules, linear._active_adapter
    downs = children["lora_A"]._modules
    names = [name for name in ([active] if isinstance(active, str) else active) if name in downs]
    if len(names) != 1:
        return None
    (name,) = names
    dropout, scaling = children["lora_dropout"]._modules[name], linear.scaling[name]
    base, down, up = children["base_layer"], downs[name], children["lora_B"]._modules[name]
    if not (type(base) is type(down) is type(up) is nn.Linear and type(dropout) is nn.Identity):
        return None
    own, of_down, of_up = base._parameters, down._parameters, up._parameters
    for each in (own, of_down, of_up):
        if len(each) != 2 or "weight" not in each or "bias" not in each:  # `_OWN`, in half the time
            own, of_down, of_up = map(affine_of, (base, down, up))
            break
    if of_down["bias"] is not None or of_up["bias"] is not None:
        return None
    # PEFT makes a tensor of the scaling for adapters that are swapped when compiled.
    if not isinstance(scaling, int | float) or not no_hooks_on(linear, base, down, up, dropout):
        return None
    down, up = of_down["weight"], of_up["weight"]
    if down.dtype != x.dtype and torch.is_autocast_enabled("cuda" if x.is_cuda else x.device.type):
        down, up = down.to(x.dtype), up.to(x.dtype)  # adapters are often in float32 then
    return own["weight"], own["bias"], down, up, scaling


@functools.cache
def is_tested_lora(cls: type, forward: object) -> bool:
    """Whether a class is PEFT's linear with LoRA as the tests compare with it; `forward`: that of the class now."""
    layer = sys.modules.get("peft.tuners.lora.layer")
    if layer is None or cls is not layer.Linear:
        return False
    try:
        read = forward, *(getattr(cls, name).fget for name in _STATE)
        return tuple(running_source(function).digest for function in read) in TESTED_LORA
    except LeftEager:
        return False
