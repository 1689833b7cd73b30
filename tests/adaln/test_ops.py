"""Are the registered ops right on the CPU: values, gradients, torch's own checks, what they keep?"""

import functools

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from functorch.compile import make_boxed_func
from support.adaln_cases import (
    assert_as_close_as_eager,
    eager_gate_residual,
    eager_layer_norm_modulate,
    in_float64,
    make_columns,
    make_modulation,
    make_x,
    relative_error,
    run,
)
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from adaptiveload_hf.adaln import ops, reference

B, S, D = 2, 6, 8


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def rope_tables(tokens, width):
    angles = torch.randn(1, tokens, 1, width // 2, dtype=torch.float64)
    return angles.cos().repeat_interleave(2, -1), angles.sin().repeat_interleave(2, -1)


def cases(rows):
    """Op name -> (function of the leaves alone, reference of the same, leaves in float64), every operand in use."""
    x, y, gate, scale, shift = double(B, S, D), double(B, S, D), *(double(B, rows, D) for _ in range(3))
    weight, bias, gate_table, scale_table, shift_table = (double(D) for _ in range(5))
    cos, sin = rope_tables(S, D // 2)

    def norm(module):
        def call(x, scale, shift, weight, bias, scale_table, shift_table):
            tables = {"scale_table": scale_table, "shift_table": shift_table}
            return module.layer_norm_modulate(x, scale, shift, eps=1e-3, weight=weight, bias=bias, **tables)

        return call

    def both(module):
        def call(x, y, gate, gate_table, scale, shift, weight, bias, scale_table, shift_table):
            return module.gate_residual_layer_norm_modulate(
                x, y, gate, scale, shift, eps=1e-3, weight=weight, bias=bias, gate_table=gate_table,
                scale_table=scale_table, shift_table=shift_table,
            )  # fmt: skip

        return call

    def rms(module):
        return lambda x, scale, shift, weight: module.rms_norm_modulate(
            x, scale, shift, weight=weight, eps=1e-3, scale_offset=0.5, weight_offset=1.0
        )

    def gated(module):
        return lambda x, y, gate, gate_table: module.gate_residual(x, y, gate, gate_table=gate_table)

    def rope(module):
        return lambda x, weight: module.rms_norm_rope(x, weight, cos, sin, heads=2, eps=1e-3)

    norm_leaves = (scale, shift, weight, bias, scale_table, shift_table)
    made = {
        "layer_norm_modulate": (norm, (x, *norm_leaves)),
        "rms_norm_modulate": (rms, (x, scale, shift, weight)),
        "gate_residual": (gated, (x, y, gate, gate_table)),
        "gate_residual_layer_norm_modulate": (both, (x, y, gate, gate_table, *norm_leaves)),
        "rms_norm_rope": (rope, (x, weight)),
    }
    return {name: (make(ops), make(reference), leaves) for name, (make, leaves) in made.items()}


@pytest.mark.parametrize("rows", [1, 3, S])
@pytest.mark.parametrize("name", ops.OPS)
def test_gradients_and_second_gradients_are_right_in_float64(name, rows):
    function, _, leaves = cases(rows)[name]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("turned", [None, 2, S])
def test_heads_normed_each_by_itself_equal_what_flux_and_hunyuan_video_compute(turned):
    x, weight = double(B, S, D), double(D // 2)
    tables = [None, None] if turned is None else rope_tables(turned, D // 2)

    def eager(x, weight):
        normed = torch.nn.functional.rms_norm(x.unflatten(2, (2, -1)), weight.shape, weight, 1e-3)
        if turned is None:
            return normed
        cos, sin = (table[0, :, 0] for table in tables)
        return torch.cat(
            [apply_rotary_emb(normed[:, :turned], (cos, sin), sequence_dim=1).double(), normed[:, turned:]], 1
        )

    results = []
    for call in (lambda x, weight: ops.rms_norm_rope(x, weight, *tables, heads=2, eps=1e-3), eager):
        y = call(x, weight)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
    for ours, exact in zip(*results):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)  # diffusers turns in float32
    assert torch.autograd.gradgradcheck(
        lambda x, weight: ops.rms_norm_rope(x, weight, *tables, heads=2), (x, weight), fast_mode=True
    )


@pytest.mark.parametrize("rows", [1, 3, S])
@pytest.mark.parametrize("name", ops.OPS)
def test_values_and_gradients_equal_those_of_the_differentiable_reference(name, rows):
    function, plain, leaves = cases(rows)[name]
    results = []
    for call in (function, plain):
        out = call(*leaves)
        outs = out if isinstance(out, tuple) else (out,)
        results.append((*outs, *torch.autograd.grad(sum(o.square().sum() for o in outs), leaves)))
    for ours, exact in zip(*results):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rows", [1, 3, S])
@pytest.mark.parametrize("name", ops.OPS)
def test_outputs_are_new_contiguous_tensors_for_any_strides_of_x(name, rows):
    function, _, leaves = cases(rows)[name]
    transposed = leaves[0].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    out, expected = function(transposed, *leaves[1:]), function(*leaves)
    for ours, exact in zip(out if isinstance(out, tuple) else (out,), torch.utils._pytree.tree_leaves(expected)):
        torch.testing.assert_close(ours, exact)
        assert ours.is_contiguous()
        assert all(ours.data_ptr() != leaf.data_ptr() for leaf in leaves)


def raw_arguments(rows):
    """Raw forward and backward ops with arguments, every operand in use."""
    namespace = torch.ops.adaptiveload
    x, y, gate, scale, shift = (
        make_x(B, S, D, torch.bfloat16, "cpu"),
        *(make_x(B, n, D, torch.bfloat16, "cpu") for n in (S, rows, rows, rows)),
    )
    weight, bias, gate_table, scale_table, shift_table = (make_columns(D, "cpu") for _ in range(5))
    cos, sin = rope_tables(S, D // 2)
    norm = (scale, shift, weight, bias, scale_table, shift_table)
    yield namespace.layer_norm_modulate, (x, *norm, 1e-6, torch.bfloat16)
    yield namespace.rms_norm_modulate, (x, scale, shift, weight, 1e-6, 1.0, 0.0, torch.float32)
    yield namespace.gate_residual, (x, y, gate, gate_table, torch.float32)
    both = (x, y, gate, gate_table, *norm, 1e-6, torch.bfloat16, torch.bfloat16)
    yield namespace.gate_residual_layer_norm_modulate, both
    yield namespace.rms_norm_rope, (x, weight, cos.float(), sin.float(), 2, 1e-6)
    of_head, first = weight[: D // 2], slice(0, 2)  # each head by itself, two tokens turned
    yield namespace.rms_norm_rope, (x, of_head, cos[:, first].float(), sin[:, first].float(), 2, 1e-6)

    x, y, gate, scale, shift, weight, bias, gate_table, scale_table = (
        t.detach() for t in (x, y, gate, scale, shift, weight, bias, gate_table, scale_table)
    )
    grad, stats, rstd = torch.randn(B, S, D), torch.rand(B, S, 2), torch.rand(B, S)
    tail = (rows, torch.bfloat16)
    yield (
        namespace.layer_norm_modulate_backward,
        (grad, x, stats, scale, weight, bias, scale_table, *tail, torch.float16, 0b1111111),
    )
    yield namespace.rms_norm_modulate_backward, (grad, x, rstd, scale, weight, 1.0, 0.0, *tail, 0b1111)
    yield namespace.gate_residual_backward, (grad, y, gate, gate_table, torch.bfloat16, 0b1110)
    kept = (grad, grad, x, stats, y, gate, gate_table, scale, weight, bias, scale_table)
    dtypes = (torch.bfloat16, torch.float32)
    yield namespace.gate_residual_layer_norm_modulate_backward, (*kept, *dtypes, *tail, torch.float16, (1 << 10) - 1)
    turned = grad.unflatten(2, (2, -1))
    yield namespace.rms_norm_rope_backward, (turned, x, rstd, weight, cos.float(), sin.float(), 0b11)
    yield namespace.rms_norm_rope_backward, (turned, x, torch.rand(B, S, 2), of_head.detach(), None, None, 0b11)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("index", range(12))
def test_opcheck_passes_for_every_forward_and_backward_op(index, rows):
    op, args = list(raw_arguments(rows))[index]
    torch.library.opcheck(op.default, args)
    bare = getattr(torch.ops.adaptiveload, f"{op.__name__}_bare")
    torch.library.opcheck(bare.default, [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args])


@pytest.mark.parametrize("name", ops.OPS)
def test_a_compiled_graph_holds_ops_without_autograd_and_a_mode_sees_them_by_their_names(name):
    function, _, leaves = cases(3)[name]
    inputs, graphs = {f"argument{i}": leaf for i, leaf in enumerate(leaves)}, []

    def collect(graph, _):
        graphs.extend(str(node.target) for node in graph.graph.nodes if "adaptiveload" in str(node.target))
        return make_boxed_func(graph.forward)

    def call(**tensors):
        return function(*tensors.values())

    run(torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=collect)), inputs)
    assert graphs == [f"adaptiveload.{name}_bare.default", f"adaptiveload.{name}_backward_bare.default"]
    with Names() as seen:
        run(call, inputs)
    assert seen.names == [f"adaptiveload.{name}.default", f"adaptiveload.{name}_backward.default"]


def test_a_policy_of_selective_checkpointing_knows_ops_by_their_names_when_compiled_too():
    x, seen = torch.randn(1, 4, 8, requires_grad=True), []

    def keep_ours(_, op, *args, **kwargs):
        seen.append(str(op))
        ours = "adaptiveload" in str(op)
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    def call(x):
        contexts = functools.partial(create_selective_checkpoint_contexts, keep_ours)
        return checkpoint(lambda x: ops.layer_norm_modulate(x).sin(), x, use_reentrant=False, context_fn=contexts)

    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        seen.clear()
        function(x).sum().backward()
        assert {name for name in seen if "adaptiveload" in name} == {"adaptiveload.layer_norm_modulate.default"}


class Names(TorchDispatchMode):
    """Collects the names of our ops."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "adaptiveload" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ops.OPS)
def test_each_op_compiles_into_one_graph_with_its_gradients(name):
    function, _, leaves = cases(3)[name]
    inputs = {f"argument{i}": leaf for i, leaf in enumerate(leaves)}

    def call(**tensors):
        return function(*tensors.values())

    expected, found = run(call, inputs), run(torch.compile(call, fullgraph=True, backend="aot_eager"), inputs)
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor)


@pytest.mark.parametrize("rows", [1, 4, 24])
@pytest.mark.parametrize("mean", [0.0, 200.0])
def test_bf16_norm_is_as_exact_as_eager(rows, mean):
    inputs = {"x": make_x(2, 24, 256, torch.bfloat16, "cpu", mean=mean)}
    inputs["scale"] = make_modulation(2, rows, 256, torch.bfloat16, "cpu", index=1)
    inputs["shift"] = make_modulation(2, rows, 256, torch.bfloat16, "cpu", index=0)
    ours, eager = run(ops.layer_norm_modulate, inputs), run(eager_layer_norm_modulate, inputs)
    truth = run(reference.layer_norm_modulate, in_float64(inputs))
    assert_as_close_as_eager(ours, eager, truth, floor=1e-6)
    assert relative_error(ours["out0"], truth["out0"]) < 0.8 * relative_error(eager["out0"], truth["out0"])


@pytest.mark.parametrize("rows", [1, 4, 24])
def test_bf16_gate_is_as_exact_as_eager(rows):
    inputs = {name: make_x(2, 24, 256, torch.bfloat16, "cpu") for name in ("x", "y")}
    inputs["gate"] = make_modulation(2, rows, 256, torch.bfloat16, "cpu", index=2)
    ours, eager = run(ops.gate_residual, inputs), run(eager_gate_residual, inputs)
    assert_as_close_as_eager(ours, eager, run(reference.gate_residual, in_float64(inputs)), floor=1e-6)


def saved_bytes(function, beside=()):
    """Bytes of the distinct storages that backward keeps beside those of some tensors; and what `function` returns."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function()
    for tensor in getattr((out if isinstance(out, torch.Tensor) else out[0]).grad_fn, "kept", ()):
        if tensor is not None:
            pack(tensor)
    owned = {tensor.untyped_storage().data_ptr() for tensor in beside}
    return sum(size for storage, size in kept.items() if storage not in owned), out


def test_norm_keeps_x_and_eight_bytes_a_row_and_the_scale():
    x = make_x(2, 32, 512, torch.bfloat16, "cpu")
    scale, shift = (torch.randn(2, 1, 512, requires_grad=True) for _ in range(2))
    kept, _ = saved_bytes(lambda: ops.layer_norm_modulate(x, scale, shift, out_dtype=torch.bfloat16))
    assert kept == x.nbytes + 2 * 32 * 8 + scale.nbytes


def test_rms_norm_keeps_x_and_four_bytes_a_row_and_the_factors():
    x, weight = make_x(2, 32, 512, torch.bfloat16, "cpu"), make_columns(512, "cpu")
    scale, shift = (torch.randn(2, 1, 512, requires_grad=True) for _ in range(2))
    kept, _ = saved_bytes(lambda: ops.rms_norm_modulate(x, scale, shift, weight=weight, out_dtype=torch.bfloat16))
    assert kept == x.nbytes + 2 * 32 * 4 + scale.nbytes + weight.nbytes


def test_the_norm_of_a_wan_block_makes_a_fifth_of_the_bytes_that_eager_makes():
    x = make_x(2, 32, 1536, torch.bfloat16, "cpu")
    scale, shift = (torch.randn(2, 1, 1536, requires_grad=True) for _ in range(2))
    plus_one = 1 + scale

    def eager():
        return (F.layer_norm(x.float(), (1536,), None, None, 1e-6) * plus_one + shift).type_as(x)

    def fused():
        return ops.layer_norm_modulate(x, scale, shift, out_dtype=x.dtype)

    made = []
    for function in (eager, fused):
        kept, out = saved_bytes(function, beside=(x, scale, plus_one))
        made.append(kept + out.nbytes)
    rows = x.shape[0] * x.shape[1]
    assert made == [10 * x.numel() + 8 * rows, 2 * x.numel() + 8 * rows]
    assert made[1] < (1 - 0.79) * made[0]


def test_a_frozen_gate_does_not_keep_y():
    x, y = make_x(2, 32, 512, torch.bfloat16, "cpu"), make_x(2, 32, 512, torch.bfloat16, "cpu")
    gate = torch.randn(2, 1, 512)
    assert saved_bytes(lambda: ops.gate_residual(x, y, gate, out_dtype=torch.bfloat16))[0] == gate.nbytes
    gate.requires_grad_()
    assert saved_bytes(lambda: ops.gate_residual(x, y, gate, out_dtype=torch.bfloat16))[0] == gate.nbytes + y.nbytes


def test_gate_and_norm_in_one_keep_one_activation_when_the_gate_is_frozen():
    x, y = make_x(2, 32, 512, torch.bfloat16, "cpu"), make_x(2, 32, 512, torch.bfloat16, "cpu")
    gate, scale = torch.randn(2, 1, 512), torch.randn(2, 1, 512)
    dtypes = {"residual_dtype": torch.bfloat16, "out_dtype": torch.bfloat16}
    kept, (residual, _) = saved_bytes(lambda: ops.gate_residual_layer_norm_modulate(x, y, gate, scale, **dtypes))
    assert kept == residual.nbytes + 2 * 32 * 8 + gate.nbytes + scale.nbytes


@pytest.mark.parametrize("rows", [1, 32])
def test_hooks_on_saved_tensors_see_only_what_grows_with_the_tokens(rows):
    x, y = make_x(2, 32, 512, torch.bfloat16, "cpu"), make_x(2, 32, 512, torch.bfloat16, "cpu")
    gate, scale = torch.randn(2, rows, 512), torch.randn(2, rows, 512)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        ops.gate_residual_layer_norm_modulate(x, y, gate, scale, weight=make_columns(512, "cpu"))
    assert saved == [x.shape, (2, 32, 2)] + [gate.shape, scale.shape] * (rows > 1)


@pytest.mark.parametrize("frozen", [(1, 2), (0,), (0, 1), (2,)])
def test_frozen_operands_get_no_gradient_and_others_do(frozen):
    function, _, leaves = cases(1)["layer_norm_modulate"]
    leaves = [leaf.detach().requires_grad_(i not in frozen) for i, leaf in enumerate(leaves)]
    function(*leaves).sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [i in frozen for i in range(len(leaves))]


def test_gradients_come_in_the_dtype_of_their_operand():
    x, scale = make_x(B, S, D, torch.bfloat16, "cpu"), torch.randn(B, 1, D, dtype=torch.float16, requires_grad=True)
    weight = make_columns(D, "cpu")
    out = ops.layer_norm_modulate(x, scale, weight=weight)
    found = torch.autograd.grad(out.sum(), (x, scale, weight))
    assert out.dtype == torch.float32
    assert [g.dtype for g in found] == [torch.bfloat16, torch.float16, torch.float32]


def test_only_one_of_two_outputs_may_have_a_gradient():
    function, plain, leaves = cases(1)["gate_residual_layer_norm_modulate"]
    for index in (0, 1):
        outs = (function(*leaves)[index].square().sum(), plain(*leaves)[index].square().sum())
        found = [torch.autograd.grad(out, leaves, allow_unused=True, materialize_grads=True) for out in outs]
        for ours, exact in zip(*found):
            torch.testing.assert_close(ours, exact)
