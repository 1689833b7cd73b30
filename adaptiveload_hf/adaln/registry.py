"""How does an op get into torch's dispatcher: kernels, shapes without data, autograd?

Every op is there twice. `name` runs the CUDA extension on a GPU, Triton where that is missing, and the reference on
other devices; `name_triton` runs Triton wherever it is called. Each of them has a form without autograd, `name_bare`:
autograd's part is Python, and who has differentiated already, an autograd function or a graph of torch.compile, need
not come through it once more.
"""

import functools
import importlib.util
import operator

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import extension, gradients

LIBRARY = torch.library.Library("adaptiveload", "DEF")
_NAMESPACE = torch.ops.adaptiveload
_REFERENCES = {}
_TRITON_KERNELS = {}
_OVERRIDDEN = set()
_FORMS = {}  # name -> (the op, what runs its form without autograd)
_CALLS = {}

# Whether it can be imported: the import itself waits until a kernel runs.
has_triton = importlib.util.find_spec("triton") is not None


def define(schema: str, kernel, fake):
    """An op of the `adaptiveload` namespace that runs `kernel` on every device, and `fake` on tensors without data.

    And its twin in Triton, which also serves CUDA tensors where the extension is not built.
    """
    name = schema.partition("(")[0]
    _REFERENCES[name], _TRITON_KERNELS[name] = kernel, _triton_kernel(name, kernel)
    for op, implementation in ((name, kernel), (triton_twin(name), _TRITON_KERNELS[name])):
        for form in (op, f"{op}_bare"):
            LIBRARY.define(schema.replace(name, form, 1), tags=(torch.Tag.pt2_compliant_tag,))
            LIBRARY.impl(form, implementation, "CompositeExplicitAutograd")
            torch.library.register_fake(f"adaptiveload::{form}", fake, lib=LIBRARY)
        _FORMS[op] = getattr(_NAMESPACE, op).default, getattr(_NAMESPACE, f"{op}_bare").default._op
    if has_triton and extension.load_problem is not None:
        _override(name, _TRITON_KERNELS[name])


def triton_twin(name: str) -> str:
    """The name of an op's twin: layer_norm_modulate_triton, layer_norm_modulate_triton_backward."""
    base = name.removesuffix("_backward")
    return f"{base}_triton{name[len(base) :]}"


def _triton_kernel(name: str, reference):
    def kernel(*args):
        if any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args):
            return reference(*args)
        return getattr(_triton_ops(), name)(*args)

    return kernel


@functools.cache
def _triton_ops():
    from . import triton_ops

    return triton_ops


def define_backward(schema: str, formula, fake):
    """A backward op whose kernel is `formula` (see `gradients`). Differentiating the op itself is refused by name."""
    name = schema.partition("(")[0]

    def kernel(*args):
        return [gradient.contiguous() for gradient in formula(*args)]

    define(schema, kernel, fake)
    for op in (name, triton_twin(name)):
        LIBRARY.impl(op, _refusal(op), "Autograd")


def _refusal(name: str):
    def refuse(*args):
        if _wants_grad(args):
            raise RuntimeError(
                f"adaptiveload::{name} is not differentiable. Differentiate the forward op with create_graph=True."
            )
        return _below_autograd(name, *args)

    return refuse


def define_autograd(name: str, save, differentiate):
    """Autograd of a forward op and its twin: `save(ctx, args, output)`, then `differentiate(ctx, *grads)`.

    `torch.library.register_autograd` does the same, but reads the schema in every call: most of the host's time.
    """
    _define_autograd(name, save, differentiate, in_triton=False)
    _define_autograd(triton_twin(name), save, differentiate, in_triton=True)


def _define_autograd(name: str, save, differentiate, in_triton: bool):
    def forward(ctx, *args):
        ctx.in_triton = in_triton
        output = _below_autograd(name, *args)
        save(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
    function = type(f"Differentiable_{name}", (torch.autograd.Function,), methods)
    # What autograd calls first; two functions of torch would only find `differentiate` by it.
    function._backward_cls.apply = differentiate

    def dispatch(*args):
        return function.apply(*args) if _wants_grad(args) else _below_autograd(name, *args)

    LIBRARY.impl(name, dispatch, "Autograd")
    # Function.apply looks at every argument for what torch.func leaves behind, which `call` has excluded.
    apply = super(torch.autograd.Function, function).apply
    _CALLS[name] = getattr(_NAMESPACE, name).default, apply


def call(name: str, *args):
    """A forward op, without the dispatcher's way through Python to reach autograd: a fifth of the host's time.

    torch.compile, torch.export and torch.func must see the op itself.
    """
    op, apply = _CALLS[name]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return op(*args)
    return apply(*args) if _wants_grad(args) else _below_autograd(name, *args)


def run(name: str, in_triton: bool, *args):
    """A forward op inside of an autograd function, which differentiates it by `gradients_of`."""
    return _below_autograd(triton_twin(name) if in_triton else name, *args)


def keep(ctx, *tensors: Tensor | None):
    """Keep arguments of an autograd function for its backward, `kept(ctx)`: those that stay alive anyway (parameters)
    or are small.

    For each tensor that `save_for_backward` is given, gradient checkpointing calls three Python hooks; of 66 tensors
    of a Wan block 27 are kept here instead.
    """
    ctx.kept = tensors
    try:
        ctx.versions = [None if tensor is None else tensor._version for tensor in tensors]
    except RuntimeError:  # tensors of inference mode have no version, and no backward to come
        ctx.versions = [None if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


def kept(ctx) -> tuple[Tensor | None, ...]:
    """What `keep` was given. Unless the graph is retained it is let go, as saved tensors are, or a loss that outlives
    its model would hold the frozen weights of LoRA.

    Raises:
        RuntimeError: a tensor was changed in place since, as autograd says of saved ones.
    """
    tensors = ctx.kept
    for tensor, version in zip(tensors, ctx.versions):
        if version is not None and tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version "
                f"{version} instead, that of the forward."
            )
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.kept = ()
    return tensors


def _wants_grad(args) -> bool:
    if forward_ad._current_level >= 0:
        return True  # no op has a jvp: autograd says so where it meets a dual tensor
    if torch.is_grad_enabled():
        for a in args:
            if isinstance(a, Tensor) and a.requires_grad:
                return True
    return False


def _below_autograd(name: str, *args):
    op, bare = _FORMS[name]
    try:
        if torch._C._len_torch_dispatch_stack() == 0 or _only_traced():
            return bare(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)  # by its name, which a policy of selective checkpointing waits for
    except RuntimeError as error:
        _raise_out_of_memory(error, name)
        raise


def _only_traced() -> bool:
    """Whether all dispatch modes at work are those of a tracer such as torch.compile's."""
    kinds = torch._C._TorchDispatchModeKey
    modes = [torch._C._get_dispatch_mode(kind) for kind in (kinds.PROXY, kinds.FAKE, kinds.FUNCTIONAL)]
    return modes[0] is not None and torch._C._len_torch_dispatch_stack() == sum(mode is not None for mode in modes)


def _raise_out_of_memory(error: RuntimeError, name: str):
    """The stable ABI has one class of errors. Who handles too little memory waits for torch's."""
    if str(error).startswith("CUDA out of memory") and not isinstance(error, torch.OutOfMemoryError):
        raise torch.OutOfMemoryError(f"{error} In adaptiveload::{name}.") from None


@functools.cache
def bits_of(flags: tuple[bool, ...]) -> int:
    """`needs` of a backward op: bit i is flag i."""
    needs = 0
    for bit, flag in enumerate(flags):
        if flag:
            needs |= 1 << bit
    return needs


def gradients_of(ctx, name: str, count: int, needs: int, *args) -> tuple[Tensor | None, ...]:
    """The gradients of an op at their arguments' places, by the formula itself if they will be differentiated.

    As few Python functions as can be: autograd calls this on a thread of its own, whose caches are cold.
    """
    op, bare, placed = _backward_of(name, ctx.in_triton, count, needs)
    if torch.is_grad_enabled():
        found = getattr(gradients, name)(*args, needs)
    elif torch._C._len_torch_dispatch_stack():
        found = _below_autograd(op, *args, needs)
    else:
        try:
            found = bare(*args, needs)
        except RuntimeError as error:
            _raise_out_of_memory(error, op)
            raise
    found.append(None)
    return placed(found)


@functools.cache
def _backward_of(name: str, in_triton: bool, count: int, needs: int):
    """The name of a backward op, what runs it without autograd, and what puts each argument's gradient at its place:
    the last, None, where none was asked for."""
    op = triton_twin(f"{name}_backward") if in_triton else f"{name}_backward"
    asked = [bit for bit in range(count) if needs >> bit & 1]
    places = (asked.index(bit) if bit in asked else -1 for bit in range(count))
    return op, _FORMS[op][1], operator.itemgetter(*places)


def empty_gradients(like: Tensor, needs: int, *kinds) -> list[Tensor]:
    """An empty tensor for every (shape, dtype) of `kinds` whose bit is set."""
    return [like.new_empty(kind[0], dtype=kind[1]) for bit, kind in enumerate(kinds) if needs >> bit & 1]


def kind_of(tensor: Tensor | None):
    """(shape, dtype), or None for None."""
    return None if tensor is None else (tensor.shape, tensor.dtype)


def replace_extension(names):
    """Puts Triton, or without it the reference, in front of an extension that holds no code for this GPU."""
    for name in names:
        for op in (name, f"{name}_backward"):
            if op not in _OVERRIDDEN:
                _OVERRIDDEN.add(op)
                _override(op, (_TRITON_KERNELS if has_triton else _REFERENCES)[op])


def _override(op: str, kernel):
    for form in (op, f"{op}_bare"):
        LIBRARY.impl(form, kernel, "CUDA")
