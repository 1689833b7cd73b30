"""How does an op get into torch's dispatcher: kernel, shapes without data, autograd?"""

import torch
from torch import Tensor

from . import gradients

LIBRARY = torch.library.Library("adaptiveload", "DEF")
_NAMESPACE = torch.ops.adaptiveload
_KERNELS = {}
_OVERRIDDEN = set()
_CALLS = {}


def define(schema: str, kernel, fake):
    """An op of the `adaptiveload` namespace that runs `kernel` on every device, and `fake` on tensors without data."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _KERNELS[name] = kernel
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"adaptiveload::{name}", fake, lib=LIBRARY)


def define_backward(schema: str, formula, fake):
    """A backward op whose kernel is `formula` (see `gradients`). Differentiating the op itself is refused by name."""
    name = schema.partition("(")[0]

    def kernel(*args):
        return [gradient.contiguous() for gradient in formula(*args)]

    def refuse(*args):
        if _wants_grad(args):
            raise RuntimeError(
                f"adaptiveload::{name} is not differentiable. Differentiate the forward op with create_graph=True."
            )
        return _below_autograd(op, *args)

    define(schema, kernel, fake)
    op = getattr(_NAMESPACE, name).default
    LIBRARY.impl(name, refuse, "Autograd")


def define_autograd(name: str, save, differentiate):
    """Autograd of a forward op: `save(ctx, args, output)`, then `differentiate(ctx, *grads)`.

    `torch.library.register_autograd` does the same, but reads the schema in every call: most of the host's time.
    """
    op = getattr(_NAMESPACE, name).default

    def forward(ctx, *args):
        output = _below_autograd(op, *args)
        save(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
    function = type(f"Differentiable_{name}", (torch.autograd.Function,), methods)

    def dispatch(*args):
        return function.apply(*args) if _wants_grad(args) else _below_autograd(op, *args)

    LIBRARY.impl(name, dispatch, "Autograd")
    # Function.apply looks at every argument for what torch.func leaves behind, which `call` has excluded.
    apply = super(torch.autograd.Function, function).apply
    _CALLS[name] = op, apply


def call(name: str, *args):
    """A forward op, without the dispatcher's way through Python to reach autograd: a fifth of the host's time.

    torch.compile, torch.export and torch.func must see the op itself.
    """
    op, apply = _CALLS[name]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return op(*args)
    return apply(*args) if _wants_grad(args) else _below_autograd(op, *args)


def _wants_grad(args) -> bool:
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)


def _below_autograd(op, *args):
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def bits_of(flags) -> int:
    """`needs` of a backward op: bit i is flag i."""
    return sum(1 << bit for bit, flag in enumerate(flags) if flag)


def gradients_of(name: str, count: int, needs: int, *args) -> list[Tensor | None]:
    """The gradients of an op at their arguments' places, by the formula itself if they will be differentiated."""
    if torch.is_grad_enabled():
        found = iter(getattr(gradients, name)(*args, needs))
    else:
        found = iter(_below_autograd(getattr(_NAMESPACE, f"{name}_backward").default, *args, needs))
    return [next(found) if needs >> bit & 1 else None for bit in range(count)]


def empty_gradients(like: Tensor, needs: int, *kinds) -> list[Tensor]:
    """An empty tensor for every (shape, dtype) of `kinds` whose bit is set."""
    return [like.new_empty(kind[0], dtype=kind[1]) for bit, kind in enumerate(kinds) if needs >> bit & 1]


def kind_of(tensor: Tensor | None):
    """(shape, dtype), or None for None."""
    return None if tensor is None else (tensor.shape, tensor.dtype)


def run_reference_on_cuda(names):
    """Puts the reference in front of an extension that holds no code for this GPU."""
    for name in names:
        for op in (name, f"{name}_backward"):
            if op not in _OVERRIDDEN:
                _OVERRIDDEN.add(op)
                LIBRARY.impl(op, _KERNELS[op], "CUDA")
