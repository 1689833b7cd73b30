"""Is gate_residual_layer_norm_modulate on CUDA right? Truth is float64; the bound is 1.5 times eager's error."""

import pytest
import torch
from support.adaln_cases import (
    assert_as_close_as_eager,
    eager_gate_residual_layer_norm_modulate,
    in_float64,
    make_columns,
    make_modulation,
    make_x,
    relative_error,
    run,
)

from adaptiveload_hf.adaln import ops, reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_kernels")]

DEVICE = "cuda"
FLOOR = 2e-6  # sums in float32, which ours and eager's both are
WIDTHS = (8, 17, 1152, 1536, 2432, 5120, 6144, 8192)


def make_inputs(batch=2, tokens=40, width=256, rows=(1, 1, 1), kind=torch.bfloat16, modulation=torch.float32):
    """Of width `width`; `rows`: of gate, scale and shift, None: absent."""
    inputs = {name: make_x(batch, tokens, width, kind, DEVICE) for name in ("x", "y")}
    for index, (name, count) in enumerate(zip(("gate", "scale", "shift"), rows)):
        if count is not None:
            inputs[name] = make_modulation(batch, count, width, modulation, DEVICE, index=index)
    return inputs


def check(inputs, kind=torch.bfloat16, out=None):
    options = {"residual_dtype": kind, "out_dtype": out or kind}
    ours = run(ops.gate_residual_layer_norm_modulate, inputs, **options)
    eager = run(eager_gate_residual_layer_norm_modulate, inputs, **options)
    truth = run(reference.gate_residual_layer_norm_modulate, in_float64(inputs))
    assert_as_close_as_eager(ours, eager, truth, FLOOR)


def step(inputs):
    return run(ops.gate_residual_layer_norm_modulate, inputs, residual_dtype=torch.bfloat16, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 44])
def test_it_is_as_exact_as_eager_for_every_width_dtype_and_number_of_rows(width, kind, rows):
    check(make_inputs(2, 44, width, (rows,) * 3, kind), kind)


@pytest.mark.parametrize(
    "rows", [(None, None, None), (1, None, None), (None, 1, 1), (4, 1, None), (1, 4, 40), (4, 5, 1)]
)
@pytest.mark.parametrize(
    "columns", [(), ("weight", "bias"), ("gate_table", "scale_table", "shift_table"), ("weight",)]
)
@pytest.mark.parametrize("width", [64, 33])
def test_absent_operands_drop_out_and_every_operand_has_its_own_rows(rows, columns, width):
    inputs = make_inputs(width=width, rows=rows)
    inputs.update({name: make_columns(width, DEVICE, offset=float(name == "weight")) for name in columns})
    check(inputs)


@pytest.mark.parametrize("rows", [1, 40])
def test_modulation_in_the_dtype_of_x_with_all_columns(rows):
    inputs = make_inputs(rows=(rows,) * 3, modulation=torch.bfloat16)
    for name in ("gate_table", "scale_table", "shift_table", "weight", "bias"):
        inputs[name] = make_columns(256, DEVICE)
    check(inputs)


@pytest.mark.parametrize("kinds", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("width", [96, 31])
def test_dtypes_may_differ(kinds, width):
    inputs = make_inputs(width=width)
    inputs["y"] = make_x(2, 40, width, kinds[1], DEVICE)
    check(inputs, *kinds)


@pytest.mark.parametrize(
    "frozen", [("gate",), ("scale", "shift"), ("gate", "scale", "shift"), ("x",), ("y",), ("x", "y")]
)
@pytest.mark.parametrize("rows", [1, 40])
def test_frozen_operands_leave_the_others_exact(frozen, rows):
    inputs = make_inputs(width=1536, rows=(rows,) * 3)
    for name in frozen:
        inputs[name] = inputs[name].detach()
    check(inputs)


@pytest.mark.parametrize(
    ("batch", "tokens", "rows", "width"), [(3, 2999, 1, 5120), (2, 9001, 1, 1536), (2, 6000, 40, 2432)]
)
def test_no_row_is_left_out_where_blocks_take_many_turns(batch, tokens, rows, width):
    check(make_inputs(batch, tokens, width, (rows,) * 3))


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("gate", [1, 40, None])
def test_one_of_the_outputs_may_have_no_gradient(output, gate):
    inputs = make_inputs(rows=(gate, 1, 1))
    found = []
    for module, leaves in ((ops, inputs), (reference, in_float64(inputs))):
        out = module.gate_residual_layer_norm_modulate(**leaves)[output]
        grad = torch.linspace(-1, 1, out.numel(), device=DEVICE, dtype=torch.float64).view_as(out).to(out)
        found.append(torch.autograd.grad(out, list(leaves.values()), grad, allow_unused=True))
    for ours, exact in zip(*found):
        assert (ours is None) == (exact is None)
        assert ours is None or relative_error(ours, exact) < 5e-3


@pytest.mark.parametrize("layout", ["slice of tokens", "offset by one", "gradient transposed"])
@pytest.mark.parametrize("width", [128, 60])
def test_any_strides_and_storage_offsets_are_taken(layout, width):
    inputs = make_inputs(tokens=32, width=width)
    if layout == "slice of tokens":
        inputs["x"] = torch.randn(2, 48, width, device=DEVICE).bfloat16()[:, 8:40].requires_grad_()
    elif layout == "offset by one":
        inputs["y"] = torch.randn(64 * width + 1, device=DEVICE).bfloat16()[1:].view(2, 32, width).requires_grad_()
        inputs["gate"] = torch.randn(2 * width + 1, device=DEVICE)[1:].view(2, 1, width).requires_grad_()
    grads = [torch.randn(2, width, 32, device=DEVICE).bfloat16().transpose(1, 2) for _ in range(2)]
    if layout != "gradient transposed":
        grads = [grad.contiguous() for grad in grads]
    plain = {n: t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for n, t in inputs.items()}
    options = {"residual_dtype": torch.bfloat16, "out_dtype": torch.bfloat16}
    found = []
    for leaves in (inputs, plain):
        outs = ops.gate_residual_layer_norm_modulate(**leaves, **options)
        assert all(out.is_contiguous() for out in outs)
        found.append([*outs, *torch.autograd.grad(outs, list(leaves.values()), grads)])
    for ours, other in zip(*found):
        torch.testing.assert_close(ours, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("batch", "tokens", "rows"), [(70_000, 1, 1), (1, 140_000, 70_000), (1, 70_000, 70_000)])
def test_more_than_65535_rows_batch_items_and_modulation_rows(batch, tokens, rows):
    check(make_inputs(batch, tokens, 64, (rows,) * 3))


@pytest.mark.parametrize(("batch", "tokens", "rows"), [(0, 5, 1), (3, 0, 1), (3, 0, 0)])
def test_empty_tensors_give_empty_results_and_zero_gradients(batch, tokens, rows):
    leaves = {n: torch.empty(batch, tokens, 64, device=DEVICE, requires_grad=True) for n in ("x", "y")}
    leaves.update({n: torch.empty(batch, rows, 64, device=DEVICE, requires_grad=True) for n in ("gate", "scale")})
    leaves["gate_table"], leaves["scale_table"] = make_columns(64, DEVICE), make_columns(64, DEVICE)
    residual, normed = ops.gate_residual_layer_norm_modulate(**leaves)
    found = torch.autograd.grad((residual + normed).sum(), list(leaves.values()))
    assert [g.shape for g in found] == [leaf.shape for leaf in leaves.values()]
    assert all((g == 0).all() for g in found)


@pytest.mark.parametrize("width", [256, 100])
def test_nan_stays_in_its_row_and_batch_item(width):
    inputs = make_inputs(tokens=16, width=width)
    with torch.no_grad():
        inputs["y"][1, 3, 7] = float("nan")
    found = step(inputs)
    healthy = torch.ones(2, 16, dtype=torch.bool, device=DEVICE)
    healthy[1, 3] = False
    for name in ("out0", "out1", "grad of x", "grad of y"):
        assert found[name][healthy].isfinite().all(), name
    for name in ("gate", "scale"):
        assert found[f"grad of {name}"][0].isfinite().all()
        assert not found[f"grad of {name}"][1].isfinite().all()


@pytest.mark.parametrize("width", [1536, 5120, 1001])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_hundred_repeats_give_the_same_bits(width, rows):
    inputs = make_inputs(2, 4096, width, (rows,) * 3)
    first = step(inputs)
    for _ in range(100):
        again = step(inputs)
        assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


def test_work_goes_to_the_current_stream():
    inputs = make_inputs(2, 4096, 1536)
    expected, stream, late = step(inputs), torch.cuda.Stream(), torch.zeros_like(inputs["x"])
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(inputs["x"].detach())
        found = step({**inputs, "x": late.requires_grad_()})
    stream.synchronize()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_a_graph_can_capture_forward_and_backward():
    inputs = make_inputs(1, 256, 1536)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    options = {"residual_dtype": torch.bfloat16, "out_dtype": torch.bfloat16}
    grads = [torch.randn_like(inputs["x"]) for _ in range(2)]

    def both():
        outs = ops.gate_residual_layer_norm_modulate(**inputs, **options)
        return (*outs, *torch.autograd.grad(outs, list(inputs.values()), grads))

    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    with torch.no_grad():
        inputs["x"].copy_(torch.randn_like(grads[0]))
    graph.replay()
    assert all(torch.equal(ours, again) for ours, again in zip(captured, both()))


@pytest.mark.parametrize("rows", [1, 8])
def test_opcheck_passes_on_cuda_tensors(rows):
    x, y, gate, scale, shift = make_inputs(rows=(rows,) * 3).values()
    namespace, columns = torch.ops.adaptiveload, [make_columns(256, DEVICE) for _ in range(5)]
    gate_table, weight, bias, scale_table, shift_table = columns
    dtypes = (torch.bfloat16, torch.bfloat16)
    forward = (x, y, gate, gate_table, scale, shift, weight, bias, scale_table, shift_table, 1e-6, *dtypes)
    torch.library.opcheck(namespace.gate_residual_layer_norm_modulate.default, forward)
    with torch.no_grad():
        residual, _, stats = namespace.gate_residual_layer_norm_modulate(*forward)
    kept = (y, gate, gate_table, scale, weight, bias, scale_table)
    kept = [t.detach() for t in (torch.randn_like(x), torch.randn_like(x), residual, stats, *kept)]
    backward = (*kept, *dtypes, rows, torch.float32, torch.float16, (1 << 10) - 1)
    torch.library.opcheck(namespace.gate_residual_layer_norm_modulate_backward.default, backward)


def test_more_than_two_to_the_31_elements_are_addressed_right():
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GB of free GPU memory")
    tokens, width, last = 524_320, 4096, slice(-64, None)
    inputs = make_inputs(1, tokens, width)
    options = {"residual_dtype": torch.bfloat16, "out_dtype": torch.bfloat16}
    outs = ops.gate_residual_layer_norm_modulate(**inputs, **options)
    dx, dy = torch.autograd.grad(outs, (inputs["x"], inputs["y"]), [inputs["y"].detach()] * 2)
    part = {n: t.detach()[:, last].double().requires_grad_() for n, t in inputs.items()}
    exact = reference.gate_residual_layer_norm_modulate(**part)
    exact_gradients = torch.autograd.grad(exact, (part["x"], part["y"]), [part["y"].detach()] * 2)
    for ours, truth in zip((*outs, dx, dy), (*exact, *exact_gradients)):
        assert relative_error(ours.detach()[:, last], truth.detach()) < 5e-3
