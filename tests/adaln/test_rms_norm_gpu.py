"""Is rms_norm_modulate on CUDA right? Truth is float64; the bound is 1.5 times the error of the eager expression."""

import pytest
import torch
from support.adaln_cases import (
    assert_as_close_as_eager,
    eager_rms_norm_modulate,
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
WIDTHS = (8, 17, 1536, 2240, 2432, 4096, 5120, 8192)


def make_inputs(
    batch=2, tokens=40, width=256, rows=(1, 1), kind=torch.bfloat16, modulation=torch.float32, weight=True
):
    """Leaves by name; `rows`: of scale and shift, None: absent."""
    inputs = {"x": make_x(batch, tokens, width, kind, DEVICE)}
    for index, (name, count) in enumerate(zip(("scale", "shift"), rows)):
        if count is not None:
            inputs[name] = make_modulation(batch, count, width, modulation, DEVICE, index=index)
    if weight:
        inputs["weight"] = make_columns(width, DEVICE, offset=1.0)
    return inputs


def check(inputs, **options):
    ours = run(ops.rms_norm_modulate, inputs, **options)
    eager = run(eager_rms_norm_modulate, inputs, **options)
    truth = run(reference.rms_norm_modulate, in_float64(inputs), **{**options, "out_dtype": None})
    assert_as_close_as_eager(ours, eager, truth, FLOOR)


def step(inputs):
    return run(ops.rms_norm_modulate, inputs, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 44])
@pytest.mark.parametrize("weight", [False, True])
def test_it_is_as_exact_as_eager_for_every_width_dtype_and_number_of_rows(width, kind, rows, weight):
    check(make_inputs(2, 44, width, (rows, rows), kind, weight=weight), out_dtype=kind)


@pytest.mark.parametrize("rows", [(None, None), (1, None), (None, 1), (40, None), (None, 40), (4, 1), (4, 5)])
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("offsets", [(1.0, 0.0), (0.0, 1.0), (0.5, 0.25)])
@pytest.mark.parametrize("width", [64, 33])
def test_absent_operands_drop_out_with_their_offsets(rows, weight, offsets, width):
    inputs = make_inputs(width=width, rows=rows, weight=weight)
    check(inputs, scale_offset=offsets[0], weight_offset=offsets[1], out_dtype=torch.bfloat16)


@pytest.mark.parametrize("width", [1536, 3072, 5120])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_many_rows_are_shared_among_groups_and_blocks(width, kind):
    check(make_inputs(2, 1037, width, kind=kind), out_dtype=kind)


@pytest.mark.parametrize("kinds", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("width", [96, 31])
def test_dtypes_may_differ(kinds, rows, width):
    check(make_inputs(width=width, rows=(rows, rows), kind=kinds[0]), out_dtype=kinds[1])
    check(make_inputs(width=width, rows=(rows, rows), modulation=torch.bfloat16), out_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "frozen", [("scale", "shift"), ("x",), ("weight",), ("x", "shift"), ("scale", "shift", "weight")]
)
@pytest.mark.parametrize("rows", [1, 40])
def test_frozen_operands_leave_the_others_exact(frozen, rows):
    inputs = make_inputs(width=1536, rows=(rows, rows))
    for name in frozen:
        inputs[name] = inputs[name].detach()
    check(inputs, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("layout", ["slice of tokens", "transposed", "offset by one", "gradient transposed"])
@pytest.mark.parametrize("width", [128, 60])
def test_any_strides_and_storage_offsets_are_taken(layout, width):
    inputs = make_inputs(tokens=32, width=width)
    if layout == "slice of tokens":
        inputs["x"] = torch.randn(2, 48, width, device=DEVICE).bfloat16()[:, 8:40].requires_grad_()
    elif layout == "transposed":
        inputs["x"] = torch.randn(2, width, 32, device=DEVICE).bfloat16().transpose(1, 2).requires_grad_()
    elif layout == "offset by one":
        inputs["x"] = torch.randn(64 * width + 1, device=DEVICE).bfloat16()[1:].view(2, 32, width).requires_grad_()
        inputs["scale"] = torch.randn(2 * width + 1, device=DEVICE)[1:].view(2, 1, width).requires_grad_()
    plain = {n: t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for n, t in inputs.items()}
    grad = torch.randn(2, width, 32, device=DEVICE).bfloat16().transpose(1, 2)
    grad = grad if layout == "gradient transposed" else grad.contiguous()
    found = []
    for leaves in (inputs, plain):
        y = ops.rms_norm_modulate(**leaves, out_dtype=torch.bfloat16)
        assert y.is_contiguous()
        found.append([y, *torch.autograd.grad(y, list(leaves.values()), grad)])
    for ours, other in zip(*found):
        torch.testing.assert_close(ours, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("batch", "tokens", "rows"), [(70_000, 1, 1), (1, 70_000, 1), (1, 140_000, 70_000)])
def test_more_than_65535_rows_batch_items_and_modulation_rows(batch, tokens, rows):
    check(make_inputs(batch, tokens, 64, (rows, rows)), out_dtype=torch.bfloat16)


@pytest.mark.parametrize(("batch", "tokens", "rows"), [(0, 5, 1), (3, 0, 1), (3, 0, 0)])
def test_empty_tensors_give_empty_results_and_zero_gradients(batch, tokens, rows):
    x = torch.empty(batch, tokens, 64, device=DEVICE, requires_grad=True)
    scale, weight = torch.empty(batch, rows, 64, device=DEVICE, requires_grad=True), make_columns(64, DEVICE)
    y = ops.rms_norm_modulate(x, scale, weight=weight)
    found = torch.autograd.grad(y.sum(), (x, scale, weight))
    assert [g.shape for g in found] == [x.shape, scale.shape, weight.shape]
    assert all((g == 0).all() for g in found)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("width", [256, 100])
def test_nan_and_infinity_stay_in_their_row_and_batch_item(value, width):
    inputs = make_inputs(tokens=16, width=width)
    with torch.no_grad():
        inputs["x"][1, 3, 7] = value
    found = step(inputs)
    healthy = torch.ones(2, 16, dtype=torch.bool, device=DEVICE)
    healthy[1, 3] = False
    assert found["out0"][healthy].isfinite().all() and found["grad of x"][healthy].isfinite().all()
    assert not found["grad of x"][1, 3].isfinite().all()
    assert found["grad of scale"][0].isfinite().all() and not found["grad of scale"][1].isfinite().all()


@pytest.mark.parametrize("width", [4096, 1001])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_hundred_repeats_give_the_same_bits(width, rows):
    inputs = make_inputs(2, 4096, width, (rows, rows))
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
    inputs, stream = make_inputs(1, 256, 1536), torch.cuda.Stream()
    grad = torch.randn_like(inputs["x"])

    def both():
        y = ops.rms_norm_modulate(**inputs, out_dtype=torch.bfloat16)
        return (y, *torch.autograd.grad(y, list(inputs.values()), grad))

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    with torch.no_grad():
        inputs["x"].copy_(torch.randn_like(grad))
    graph.replay()
    assert all(torch.equal(ours, again) for ours, again in zip(captured, both()))


@pytest.mark.parametrize("rows", [1, 8])
def test_opcheck_passes_on_cuda_tensors(rows):
    x, scale, shift, weight = make_inputs(rows=(rows, rows)).values()
    namespace = torch.ops.adaptiveload
    forward = (x, scale, shift, weight, 1e-6, 1.0, 0.0, torch.bfloat16)
    torch.library.opcheck(namespace.rms_norm_modulate.default, forward)
    with torch.no_grad():
        _, rstd = namespace.rms_norm_modulate(*forward)
    kept = [t.detach() for t in (torch.randn_like(x), x, rstd, scale, weight)]
    torch.library.opcheck(namespace.rms_norm_modulate_backward.default, (*kept, 1.0, 0.0, rows, torch.float32, 0b1111))


def test_float64_on_cuda_passes_gradcheck():
    leaves = [torch.randn(shape, device=DEVICE, dtype=torch.float64, requires_grad=True) for shape in
              ((2, 3, 8), (2, 1, 8), (2, 1, 8))]  # fmt: skip
    assert torch.autograd.gradcheck(ops.rms_norm_modulate, leaves)


def test_more_than_two_to_the_31_elements_are_addressed_right():
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GB of free GPU memory")
    last = slice(-64, None)
    inputs = make_inputs(1, 524_320, 4096)
    y = ops.rms_norm_modulate(**inputs, out_dtype=torch.bfloat16)
    (dx,) = torch.autograd.grad(y, inputs["x"], y.detach())
    part = {n: (t if n == "weight" else t[:, last]).detach().double().requires_grad_() for n, t in inputs.items()}
    exact = reference.rms_norm_modulate(**part)
    (exact_dx,) = torch.autograd.grad(exact, part["x"], y.detach()[:, last].double())
    assert relative_error(y.detach()[:, last], exact.detach()) < 5e-3
    assert relative_error(dx[:, last], exact_dx) < 5e-3
