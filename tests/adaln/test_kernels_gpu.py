"""Are the CUDA kernels right? Truth is float64; the bound is 1.5 times the error of the eager expression."""

import pytest
import torch
from support.adaln_cases import (
    assert_as_close_as_eager,
    eager_gate_residual,
    eager_layer_norm_modulate,
    in_float64,
    make_columns,
    make_modulation,
    make_x,
    run,
)

from adaptiveload_hf.adaln import ops, reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_kernels")]

DEVICE = "cuda"
WIDTHS = (8, 17, 1152, 1536, 2240, 2432, 3072, 5120, 6144, 8192)
DTYPES = [  # x, modulation
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
]
# Sums over rows and columns in float32, which ours and eager's both are; one rounding of an output is below 1.5 times.
FLOOR = 2e-6


def check_norm(inputs, **options):
    ours = run(ops.layer_norm_modulate, inputs, **options)
    eager = run(eager_layer_norm_modulate, inputs, **options)
    truth = run(reference.layer_norm_modulate, in_float64(inputs), **{**options, "out_dtype": None})
    assert_as_close_as_eager(ours, eager, truth, FLOOR)


def check_gate(inputs, **options):
    ours = run(ops.gate_residual, inputs, **options)
    eager = run(eager_gate_residual, inputs, **options)
    truth = run(reference.gate_residual, in_float64(inputs), **{**options, "out_dtype": None})
    assert_as_close_as_eager(ours, eager, truth, FLOOR)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 44])
def test_norm_is_as_exact_as_eager_for_every_width_dtype_and_number_of_rows(width, dtypes, rows):
    kind, modulation = dtypes
    inputs = {"x": make_x(2, 44, width, kind, DEVICE)}
    inputs["scale"] = make_modulation(2, rows, width, modulation, DEVICE, index=1)
    inputs["shift"] = make_modulation(2, rows, width, modulation, DEVICE, index=0)
    check_norm(inputs, out_dtype=kind)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 44])
def test_gate_is_as_exact_as_eager_for_every_width_dtype_and_number_of_rows(width, dtypes, rows):
    kind, modulation = dtypes
    inputs = {"x": make_x(2, 44, width, kind, DEVICE), "y": make_x(2, 44, width, kind, DEVICE)}
    inputs["gate"] = make_modulation(2, rows, width, modulation, DEVICE, index=2)
    check_gate(inputs, out_dtype=kind)


@pytest.mark.parametrize("width", [64, 33, 2048])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_weight_bias_and_tables_get_exact_gradients(width, rows, tables, affine):
    inputs = {"x": make_x(3, 40, width, torch.bfloat16, DEVICE)}
    inputs["scale"] = make_modulation(3, rows, width, torch.bfloat16, DEVICE, index=1)
    inputs["shift"] = make_modulation(3, rows, width, torch.bfloat16, DEVICE, index=0)
    if tables:
        inputs["scale_table"], inputs["shift_table"] = make_columns(width, DEVICE), make_columns(width, DEVICE)
    if affine:
        inputs["weight"], inputs["bias"] = make_columns(width, DEVICE, offset=1.0), make_columns(width, DEVICE)
    check_norm(inputs, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("width", [520, 1536, 2432, 3072, 5120])
@pytest.mark.parametrize(  # fetched ahead of time; the last, if wide, dealt by tickets
    ("tokens", "rows", "kind"),
    [(1037, 1, torch.bfloat16), (1037, 17, torch.float16), (1037, 1, torch.float32), (8200, 1, torch.bfloat16)],
    ids=str,
)
def test_many_rows_are_shared_among_groups_and_blocks(width, tokens, rows, kind):
    inputs = {"x": make_x(2, tokens, width, kind, DEVICE)}
    inputs["scale"] = make_modulation(2, rows, width, torch.float32, DEVICE, index=1)
    inputs["shift"] = make_modulation(2, rows, width, torch.float32, DEVICE, index=0)
    check_norm(inputs, out_dtype=kind)
    gated = {"x": inputs["x"], "y": make_x(2, tokens, width, kind, DEVICE), "gate": inputs["scale"]}
    check_gate(gated, out_dtype=kind)


@pytest.mark.parametrize("tokens", [3, 300, 900])  # few rows: one kernel makes everything
@pytest.mark.parametrize("width", [24, 1536])
def test_few_rows_of_one_item_get_all_gradients(tokens, width):
    inputs = {"x": make_x(1, tokens, width, torch.bfloat16, DEVICE)}
    inputs["scale"] = make_modulation(1, 1, width, torch.float32, DEVICE, index=1)
    inputs["shift"] = make_modulation(1, 1, width, torch.float32, DEVICE, index=0)
    inputs["scale_table"], inputs["shift_table"] = make_columns(width, DEVICE), make_columns(width, DEVICE)
    inputs["weight"], inputs["bias"] = make_columns(width, DEVICE, offset=1.0), make_columns(width, DEVICE)
    check_norm(inputs, out_dtype=torch.bfloat16)
    gated = {"x": inputs["x"], "y": make_x(1, tokens, width, torch.bfloat16, DEVICE), "gate": inputs["scale"]}
    check_gate({**gated, "gate_table": make_columns(width, DEVICE)}, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("names", [(), ("scale",), ("shift",), ("weight",), ("weight", "bias"), ("scale_table",)])
def test_absent_operands_drop_out(names):
    width = 72
    make = {"scale": lambda: make_modulation(2, 1, width, torch.float32, DEVICE)}
    make["shift"] = make["scale"]
    inputs = {"x": make_x(2, 19, width, torch.bfloat16, DEVICE)}
    inputs.update({n: make.get(n, lambda: make_columns(width, DEVICE))() for n in names})
    check_norm(inputs, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["scale", "shift"])
@pytest.mark.parametrize("width", [72, 1536])
def test_scale_or_shift_alone_may_have_a_row_per_token(name, width):
    inputs = {"x": make_x(2, 19, width, torch.bfloat16, DEVICE)}
    inputs[name] = make_modulation(2, 19, width, torch.bfloat16, DEVICE)
    inputs[f"{name}_table"] = make_columns(width, DEVICE)
    check_norm(inputs, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("gate", [None, 1, 5, 40])
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("width", [64, 33, 4608])
def test_gate_table_and_absent_gate(gate, table, width):
    inputs = {"x": make_x(2, 40, width, torch.bfloat16, DEVICE), "y": make_x(2, 40, width, torch.bfloat16, DEVICE)}
    if gate is not None:
        inputs["gate"] = make_modulation(2, gate, width, torch.float32, DEVICE)
    if table:
        inputs["gate_table"] = make_columns(width, DEVICE)
    check_gate(inputs, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("kinds", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 24])
@pytest.mark.parametrize("width", [96, 31])
def test_input_and_output_dtypes_may_differ(kinds, rows, width):
    kind, out = kinds
    inputs = {"x": make_x(2, 24, width, kind, DEVICE)}
    inputs["scale"] = make_modulation(2, rows, width, torch.float32, DEVICE, index=1)
    inputs["shift"] = make_modulation(2, rows, width, torch.bfloat16, DEVICE, index=0)
    check_norm(inputs, out_dtype=out)
    gated = {"x": inputs["x"], "y": make_x(2, 24, width, out, DEVICE), "gate": inputs["scale"]}
    check_gate(gated, out_dtype=kind)


@pytest.mark.parametrize("frozen", [("scale", "shift"), ("x",), ("scale",), ("x", "shift")])
@pytest.mark.parametrize("rows", [1, 6])
def test_frozen_operands_get_no_gradient_and_leave_the_others_exact(frozen, rows):
    inputs = {"x": make_x(2, 30, 1536, torch.bfloat16, DEVICE)}
    inputs["scale"] = make_modulation(2, rows, 1536, torch.float32, DEVICE, index=1)
    inputs["shift"] = make_modulation(2, rows, 1536, torch.float32, DEVICE, index=0)
    for name in frozen:
        inputs[name] = inputs[name].detach()
    check_norm(inputs, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("frozen", [("gate",), ("y",), ("x", "y")])
def test_frozen_gate_operands(frozen):
    inputs = {"x": make_x(2, 30, 1536, torch.bfloat16, DEVICE), "y": make_x(2, 30, 1536, torch.bfloat16, DEVICE)}
    inputs["gate"] = make_modulation(2, 1, 1536, torch.float32, DEVICE)
    for name in frozen:
        inputs[name] = inputs[name].detach()
    check_gate(inputs, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1536, 1001])
def test_rows_far_from_zero_keep_their_digits(kind, width):
    inputs = {"x": make_x(2, 20, width, kind, DEVICE, mean=1000.0)}
    inputs["scale"] = make_modulation(2, 1, width, torch.float32, DEVICE)
    check_norm(inputs, out_dtype=torch.float32)


def test_constant_rows_give_the_shift():
    x = torch.full((1, 5, 256), 3.0, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    shift = make_modulation(1, 1, 256, torch.float32, DEVICE)
    y = ops.layer_norm_modulate(x, torch.zeros_like(shift), shift, out_dtype=torch.float32)
    torch.testing.assert_close(y, shift.expand(1, 5, 256).float(), rtol=0, atol=1e-6)
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_modulation_of_batch_one_serves_the_whole_batch():
    inputs = {"x": make_x(3, 24, 160, torch.bfloat16, DEVICE)}
    inputs["scale"] = make_modulation(1, 1, 160, torch.float32, DEVICE, index=1)
    inputs["shift"] = make_modulation(1, 4, 160, torch.float32, DEVICE, index=0)
    check_norm(inputs, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("width", [256, 100])
def test_nan_and_infinity_stay_in_their_row_and_batch_item(value, width):
    x = make_x(2, 16, width, torch.bfloat16, DEVICE).detach()
    x[1, 3, 7] = value
    x.requires_grad_()
    scale = make_modulation(2, 1, width, torch.float32, DEVICE)
    y = ops.layer_norm_modulate(x, scale)
    y.backward(torch.ones_like(y))
    healthy = torch.ones(2, 16, dtype=torch.bool, device=DEVICE)
    healthy[1, 3] = False
    for rows in (y, x.grad):
        assert rows[healthy].isfinite().all()
        assert not rows[1, 3].isfinite().all()
    assert scale.grad[0].isfinite().all() and not scale.grad[1].isfinite().all()


@pytest.mark.parametrize("layout", ["slice of tokens", "transposed", "offset by one", "gradient transposed"])
@pytest.mark.parametrize("width", [128, 60])
def test_any_strides_and_storage_offsets_are_taken(layout, width):
    kind = torch.bfloat16
    x = torch.randn(2, 32, width, device=DEVICE).to(kind)
    if layout == "slice of tokens":
        x = torch.randn(2, 48, width, device=DEVICE).to(kind)[:, 8:40]
    elif layout == "transposed":
        x = torch.randn(2, width, 32, device=DEVICE).to(kind).transpose(1, 2)
    elif layout == "offset by one":
        x = torch.randn(2 * 32 * width + 1, device=DEVICE).to(kind)[1:].view(2, 32, width)
    scale = torch.randn(2 * width + 1, device=DEVICE)[1:].view(2, 1, width)
    leaves = [x.detach().requires_grad_(), scale.requires_grad_()]
    plain = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in leaves]
    grad = torch.randn(2, width, 32, device=DEVICE).to(kind).transpose(1, 2)
    if layout != "gradient transposed":
        grad = grad.contiguous()
    found, expected = [], []
    for tensors, results in ((leaves, found), (plain, expected)):
        y = ops.layer_norm_modulate(tensors[0], tensors[1], out_dtype=kind)
        gated = ops.gate_residual(tensors[0], y, tensors[1], out_dtype=kind)
        assert y.is_contiguous() and gated.is_contiguous()
        results += [y, gated, *torch.autograd.grad((y, gated), tensors, (grad, grad))]
    for ours, other in zip(found, expected):
        torch.testing.assert_close(ours, other, rtol=1e-2, atol=1e-2)
