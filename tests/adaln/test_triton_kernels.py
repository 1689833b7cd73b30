"""Are the Triton kernels right, on a GPU, or on a CPU under Triton's interpreter (see test_triton.py)?

Truth is float64; the bound is 1.5 times the error of the reference, which rounds once.
"""

import os

import pytest
import torch
from support.adaln_cases import (
    assert_as_close_as_eager,
    in_float64,
    make_columns,
    make_modulation,
    make_x,
    relative_error,
    run,
)

from adaptiveload_hf import UserError
from adaptiveload_hf.adaln import ops, reference

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # the interpreter truncates where bfloat16 is stored
B, S = 2, 12
FLOOR = 2e-6  # sums in float32
# T, dtype of x, D: rows of one tile and of two, each with columns to mask.
CASES = [(1, torch.float32, 600), (4, HALF, 17), (S, HALF, 600), (1, HALF, 600)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)  # not that of `run`, whose gradients would be x


def norm_inputs(rows, kind, width, mean=0.0):
    modulation = HALF if rows == S else torch.float32
    return {
        "x": make_x(B, S, width, kind, DEVICE, mean),
        "scale": make_modulation(B, rows, width, modulation, DEVICE, index=1),
        "shift": make_modulation(B, rows, width, modulation, DEVICE, index=0),
    }


def columns(width, *names):
    return {name: make_columns(width, DEVICE, offset=float(name == "weight")) for name in names}


def gate_inputs(rows, kind, width):
    gate = make_modulation(B, rows, width, torch.float32, DEVICE, index=2)
    return {"x": make_x(B, S, width, kind, DEVICE), "y": make_x(B, S, width, kind, DEVICE), "gate": gate}


def rope_inputs(kind, width, heads):
    angles = torch.randn(1, S, 1, width // heads // 2, device=DEVICE)
    tables = {"cos": angles.cos().repeat_interleave(2, -1), "sin": angles.sin().repeat_interleave(2, -1)}
    return {"x": make_x(B, S, width, kind, DEVICE), **columns(width, "weight"), **tables}


def check(op, inputs, dtypes=(), floor=FLOOR, **options):
    """`dtypes`: options that give a dtype of the result, which the truth goes without."""
    lower = dict.fromkeys(dtypes, inputs["x"].dtype)
    ours = run(getattr(ops, op), inputs, **options, **lower, backend="triton")
    rounded_once = run(getattr(reference, op), inputs, **options, **lower)
    truth = run(getattr(reference, op), in_float64(inputs), **options)
    for name, exact in truth.items():
        assert ours[name].dtype == rounded_once[name].dtype, name
        assert ours[name].shape == exact.shape, name
    assert_as_close_as_eager(ours, rounded_once, truth, floor)


@pytest.mark.parametrize(("rows", "kind", "width"), CASES)
def test_layer_norm_with_all_operands(rows, kind, width):
    inputs = norm_inputs(rows, kind, width) | columns(width, "weight", "bias", "scale_table", "shift_table")
    check("layer_norm_modulate", inputs, ["out_dtype"])


@pytest.mark.parametrize(("rows", "kind", "width"), CASES)
def test_rms_norm_with_all_operands(rows, kind, width):
    inputs = norm_inputs(rows, kind, width) | columns(width, "weight")
    check("rms_norm_modulate", inputs, ["out_dtype"], scale_offset=0.5, weight_offset=1.0)


@pytest.mark.parametrize(("rows", "kind", "width"), CASES)
def test_gate(rows, kind, width):
    check("gate_residual", gate_inputs(rows, kind, width) | columns(width, "gate_table"), ["out_dtype"])


@pytest.mark.parametrize(("rows", "kind", "width"), CASES)
def test_gate_and_norm_with_their_own_numbers_of_rows(rows, kind, width):
    gates = 3 if rows == 4 else 1
    inputs = norm_inputs(rows, kind, width) | gate_inputs(gates, kind, width) | columns(width, "gate_table")
    check("gate_residual_layer_norm_modulate", inputs, ["residual_dtype", "out_dtype"])


@pytest.mark.parametrize(("kind", "width", "heads"), [(torch.float32, 96, 2), (HALF, 768, 6)])
def test_norm_and_rotary_embedding(kind, width, heads):
    check("rms_norm_rope", rope_inputs(kind, width, heads), heads=heads)


@pytest.mark.parametrize("turned", [0, 5, S])
def test_norm_of_each_head_by_itself(turned):
    inputs = rope_inputs(torch.float32, 96, 2) | columns(48, "weight")
    for name in ("cos", "sin"):
        table = inputs.pop(name)
        inputs |= {name: table[:, :turned]} if turned else {}
    check("rms_norm_rope", inputs, heads=2)


@pytest.mark.parametrize("names", [(), ("weight", "bias"), ("scale_table",)])
def test_absent_operands_drop_out(names):
    inputs = {"x": make_x(B, S, 72, torch.float32, DEVICE), **columns(72, *names)}
    check("layer_norm_modulate", inputs)
    check("gate_residual", {"x": inputs["x"], "y": make_x(B, S, 72, torch.float32, DEVICE)})


@pytest.mark.parametrize("frozen", [("scale", "shift"), ("x",)])
def test_frozen_operands_get_no_gradient(frozen):
    inputs = norm_inputs(1, torch.float32, 72)
    inputs |= {name: inputs[name].detach() for name in frozen}
    check("layer_norm_modulate", inputs)


def test_frozen_gate_keeps_no_y():
    inputs = gate_inputs(1, torch.float32, 72)
    check("gate_residual", inputs | {"gate": inputs["gate"].detach()})


def test_rows_far_from_zero_keep_their_digits():
    # The mean alone is rounded to 6e-5 of a standard deviation.
    check("layer_norm_modulate", norm_inputs(1, torch.float32, 600, mean=1000.0), floor=1e-4)


def test_constant_rows_give_the_shift():
    x = torch.full((1, 3, 72), 3.0, device=DEVICE, requires_grad=True)
    shift = make_modulation(1, 1, 72, torch.float32, DEVICE)
    y = ops.layer_norm_modulate(x, torch.zeros_like(shift), shift, backend="triton")
    torch.testing.assert_close(y, shift.expand(1, 3, 72), rtol=0, atol=1e-6)
    y.sum().backward()  # a gradient whose strides are all 0
    assert x.grad.isfinite().all()


def test_nan_stays_in_its_row_and_batch_item():
    inputs = norm_inputs(1, torch.float32, 72)
    x, scale = inputs["x"].detach(), inputs["scale"]
    x[1, 3, 7] = float("nan")
    y = ops.layer_norm_modulate(x.requires_grad_(), scale, backend="triton")
    y.backward(torch.ones_like(y))
    healthy = torch.ones(B, S, dtype=torch.bool, device=DEVICE)
    healthy[1, 3] = False
    for rows in (y, x.grad):
        assert rows[healthy].isfinite().all() and not rows[1, 3].isfinite().all()
    assert scale.grad[0].isfinite().all() and not scale.grad[1].isfinite().all()


@pytest.mark.parametrize(("batch", "tokens", "rows"), [(0, 5, 1), (3, 0, 0)])
def test_empty_tensors_give_empty_results_and_zero_gradients(batch, tokens, rows):
    x, y = (torch.empty(batch, tokens, 64, device=DEVICE, requires_grad=True) for _ in range(2))
    scale, table = torch.empty(batch, rows, 64, device=DEVICE, requires_grad=True), make_columns(64, DEVICE)
    normed = ops.layer_norm_modulate(x, scale, scale_table=table, backend="triton")
    out = normed + ops.gate_residual(x, y, scale, gate_table=table, backend="triton")
    found = torch.autograd.grad(out.sum(), (x, y, scale, table))
    assert out.shape == x.shape
    assert [g.shape for g in found] == [x.shape, x.shape, scale.shape, table.shape]
    assert all((g == 0).all() for g in found)


def test_any_strides_are_taken():
    inputs = norm_inputs(1, torch.float32, 24)
    inputs["x"] = torch.randn(B, 24, S, device=DEVICE).transpose(1, 2).requires_grad_()
    check("layer_norm_modulate", inputs)
    tokens = torch.randn(B, S + 8, 25, device=DEVICE)[:, 4:-4, 1:].requires_grad_()
    check("layer_norm_modulate", inputs | {"x": tokens})


def test_repeats_give_the_same_bits():
    inputs = norm_inputs(1, HALF, 600)
    first, again = (run(ops.layer_norm_modulate, inputs, backend="triton") for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name


def test_float64_runs_the_reference():
    inputs = in_float64(norm_inputs(1, torch.float32, 24))
    ours, exact = run(ops.layer_norm_modulate, inputs, backend="triton"), run(reference.layer_norm_modulate, inputs)
    assert all(relative_error(ours[name], tensor) < 1e-14 for name, tensor in exact.items())


def test_wider_rows_than_tested_are_refused_by_name():
    with pytest.raises(UserError, match="up to 8192 columns, but x has D = 8200"):
        ops.layer_norm_modulate(torch.randn(1, 2, 8200, device=DEVICE), backend="triton")


def test_torch_accepts_the_ops():
    x, scale, shift = norm_inputs(1, torch.float32, 24).values()
    forward = (x, scale, shift, None, None, None, None, 1e-6, torch.float32)
    torch.library.opcheck(torch.ops.adaptiveload.layer_norm_modulate_triton.default, forward)


def test_double_backward_is_that_of_the_reference_and_the_backward_op_refuses_it():
    results = []
    inputs = norm_inputs(1, torch.float32, 16)
    for function, options in ((ops.layer_norm_modulate, {"backend": "triton"}), (reference.layer_norm_modulate, {})):
        leaves = [t.detach().requires_grad_() for t in inputs.values()]
        (dx,) = torch.autograd.grad(function(*leaves, **options).square().sum(), leaves[0], create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), leaves))
    for ours, exact in zip(*results):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)
    y = inputs["x"]
    with pytest.raises(RuntimeError, match="gate_residual_triton_backward is not differentiable"):
        torch.ops.adaptiveload.gate_residual_triton_backward(y, y, inputs["scale"], None, torch.float32, 2)
