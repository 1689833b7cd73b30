"""Does the CUDA kernel of rms_norm_rope match float64 in every layout, and hold at the edges?"""

import pytest
import torch
import torch.nn.functional as F
from support.adaln_cases import assert_as_close_as_eager, in_float64, make_columns, make_x, relative_error, run

from adaptiveload_hf.adaln import ops, reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_kernels")]

DEVICE = "cuda"
EPS = 1e-6
FLOORS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def make_tables(tokens, head_width, batch=1, dtype=torch.float32):
    """cos and sin as `WanRotaryPosEmbed` gives them: each angle twice."""
    angles = torch.rand(batch, tokens, 1, head_width // 2, device=DEVICE).mul(6.3).repeat_interleave(2, dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def make_inputs(batch, tokens, heads, head_width, dtype=torch.bfloat16):
    width = heads * head_width
    return {
        "x": make_x(batch, tokens, width, dtype, DEVICE),
        "weight": make_columns(width, DEVICE, offset=1.0).detach().to(dtype).requires_grad_(),
    }


def eager(x, weight, cos, sin, *, heads, eps):
    """What WanAttnProcessor computes, in the dtypes of its operands."""
    normed = F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps).unflatten(2, (heads, -1))
    x1, x2 = normed.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(normed)
    out[..., 0::2] = x1 * cos - x2 * sin
    out[..., 1::2] = x1 * sin + x2 * cos
    return out.type_as(normed)


def check(inputs, tables, heads):
    """As close to float64 as the eager expression, forward and backward."""
    exact_tables = [t.double() for t in tables]
    options = {"heads": heads, "eps": EPS}
    ours = run(lambda x, weight: ops.rms_norm_rope(x, weight, *tables, **options), inputs)
    theirs = run(lambda x, weight: eager(x, weight, *tables, **options), inputs)
    truth = run(lambda x, weight: reference.rms_norm_rope(x, weight, *exact_tables, **options), in_float64(inputs))
    assert_as_close_as_eager(ours, theirs, truth, FLOORS[inputs["x"].dtype])


# Wan 1.3B and 14B; one and several warps a row; heads that no whole number of packs makes up; odd numbers of pairs.
SHAPES = [
    (12, 128),
    (40, 128),
    (1, 128),
    (3, 64),
    (5, 96),
    (64, 128),
    (7, 40),
    (6, 12),
    (5, 10),
    (3, 2),
    (1, 34),
    (9, 8),
]


@pytest.mark.parametrize(("heads", "head_width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 37), (1, 700), (2, 37), (2, 601)])
def test_output_and_gradients_are_as_close_to_float64_as_eager(heads, head_width, dtype, batch, tokens):
    check(make_inputs(batch, tokens, heads, head_width, dtype), make_tables(tokens, head_width), heads)


@pytest.mark.parametrize("table_batch", [1, 3])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "tokens"), [(3, 1), (3, 5), (3, 1000), (3, 4097)])
def test_tables_of_one_or_every_batch_item_and_any_number_of_tokens(table_batch, table_dtype, batch, tokens):
    check(make_inputs(batch, tokens, 12, 128), make_tables(tokens, 128, table_batch, table_dtype), 12)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("table_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_weight_and_tables_may_have_other_dtypes_than_x(weight_dtype, table_dtype):
    inputs = make_inputs(2, 20, 3, 64)
    inputs["weight"] = inputs["weight"].detach().to(weight_dtype).requires_grad_()
    check(inputs, make_tables(20, 64, dtype=table_dtype), 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_weight_may_begin_anywhere_in_its_storage(dtype):
    inputs = make_inputs(2, 20, 12, 128)
    inputs["weight"] = make_columns(1537, DEVICE, offset=1.0).detach().to(dtype)[1:].requires_grad_()
    check(inputs, make_tables(20, 128), 12)


@pytest.mark.parametrize("frozen", ["x", "weight"])
@pytest.mark.parametrize("head_width", [128, 10])
def test_a_frozen_operand_gets_no_gradient_and_leaves_the_other_exact(frozen, head_width):
    inputs = make_inputs(2, 30, 6, head_width)
    inputs[frozen] = inputs[frozen].detach()
    check(inputs, make_tables(30, head_width), 6)


def layouts(batch, tokens, width, dtype):
    """x as models and users may lay it out, by name."""
    yield (
        "thirds of a fused projection",
        torch.randn(batch, tokens, 3 * width, device=DEVICE).to(dtype).chunk(3, -1)[1],
    )
    yield "slice of tokens", torch.randn(batch, 2 * tokens, width, device=DEVICE).to(dtype)[:, 3 : 3 + tokens]
    yield "columns apart", torch.randn(batch, width, tokens, device=DEVICE).to(dtype).transpose(1, 2)
    flat = torch.randn(batch * tokens * width + 1, device=DEVICE).to(dtype)
    yield "offset by one", flat[1:].view(batch, tokens, width)


@pytest.mark.parametrize(
    "layout", ["thirds of a fused projection", "slice of tokens", "columns apart", "offset by one"]
)
@pytest.mark.parametrize(("heads", "head_width"), [(12, 128), (40, 128), (4, 36)])
def test_any_strides_and_storage_offsets_of_x_are_taken(layout, heads, head_width):
    x = dict(layouts(2, 33, heads * head_width, torch.bfloat16))[layout]
    inputs = {"x": x.requires_grad_(), "weight": make_columns(heads * head_width, DEVICE, offset=1.0)}
    check(inputs, make_tables(33, head_width), heads)


@pytest.mark.parametrize("head_width", [128, 36])
def test_gradients_and_tables_may_be_laid_out_in_any_way(head_width):
    inputs, heads = make_inputs(2, 33, 6, head_width), 6
    cos, sin = make_tables(33, head_width, batch=2)
    apart = torch.randn(2, heads, 33, head_width, device=DEVICE).bfloat16().transpose(1, 2)
    offset = torch.empty(cos.numel() + 1, device=DEVICE)[1:].view(cos.shape).copy_(cos)
    turned = sin.transpose(1, 3).contiguous().transpose(1, 3)
    y = ops.rms_norm_rope(**inputs, cos=cos, sin=sin, heads=heads)
    expected = torch.autograd.grad(y, list(inputs.values()), apart.contiguous(), retain_graph=True)
    again = ops.rms_norm_rope(**inputs, cos=offset, sin=turned, heads=heads)
    found = torch.autograd.grad(again, list(inputs.values()), apart)
    for ours, other in zip((again, *found), (y, *expected)):
        torch.testing.assert_close(ours, other, rtol=1e-2, atol=1e-2)
    summed = torch.autograd.grad(ops.rms_norm_rope(**inputs, cos=cos, sin=sin, heads=heads).sum(), inputs["x"])[0]
    exact = torch.autograd.grad(y, inputs["x"], torch.ones_like(y))[0]
    assert torch.equal(summed, exact)


@pytest.mark.parametrize(("batch", "tokens"), [(0, 5), (3, 0), (0, 0)])
def test_empty_tensors_give_empty_results_and_zero_gradients(batch, tokens):
    inputs = make_inputs(batch, tokens, 2, 64)
    y = ops.rms_norm_rope(**inputs, cos=torch.ones(1, tokens, 1, 64, device=DEVICE),
                          sin=torch.ones(1, tokens, 1, 64, device=DEVICE), heads=2)  # fmt: skip
    dx, dweight = torch.autograd.grad(y.sum(), list(inputs.values()))
    assert y.shape == (batch, tokens, 2, 64) and dx.shape == inputs["x"].shape
    assert (dweight == 0).all()


@pytest.mark.parametrize(("batch", "tokens"), [(70_000, 1), (1, 70_000)])
def test_more_than_65535_rows_and_batch_items(batch, tokens):
    check(make_inputs(batch, tokens, 1, 64), make_tables(tokens, 64), 1)


def test_more_than_two_to_the_31_elements_are_addressed_right():
    if torch.cuda.mem_get_info()[1] < 60 << 30:
        pytest.skip("needs a GPU with 60 GB")
    tokens, heads = 524_320, 32
    x = torch.randn(1, tokens, 4096, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight, tables = make_columns(4096, DEVICE, offset=1.0).detach(), make_tables(tokens, 128)
    y = ops.rms_norm_rope(x, weight, *tables, heads=heads)
    (dx,) = torch.autograd.grad(y, x, y.detach())
    last = slice(tokens - 64, tokens)
    part = x.detach()[:, last].double().requires_grad_()
    exact = reference.rms_norm_rope(part, weight.double(), *(t[:, last].double() for t in tables), heads=heads)
    (exact_dx,) = torch.autograd.grad(exact, part, y.detach()[:, last].double())
    assert x.numel() > 2**31
    assert relative_error(y[:, last], exact.detach()) < 5e-3
    assert relative_error(dx[:, last], exact_dx) < 5e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("head_width", [128, 10])
def test_nan_and_infinity_stay_in_their_row(value, head_width):
    inputs, tables = make_inputs(2, 50, 4, head_width), make_tables(50, head_width)
    with torch.no_grad():
        inputs["x"][1, 3, 7] = value
    y = ops.rms_norm_rope(**inputs, cos=tables[0], sin=tables[1], heads=4)
    y.backward(torch.ones_like(y))
    healthy = torch.ones(2, 50, dtype=torch.bool, device=DEVICE)
    healthy[1, 3] = False
    for rows in (y.flatten(2), inputs["x"].grad):
        assert rows[healthy].isfinite().all()
        assert not rows[1, 3].isfinite().all()


@pytest.mark.parametrize(("heads", "head_width"), [(12, 128), (40, 128), (9, 10)])
def test_a_hundred_repeats_give_the_same_bits(heads, head_width):
    inputs, tables = make_inputs(2, 4096, heads, head_width), make_tables(4096, head_width)

    def step(x, weight):
        return ops.rms_norm_rope(x, weight, *tables, heads=heads)

    first = run(step, inputs)
    for _ in range(100):
        for name, tensor in run(step, inputs).items():
            assert torch.equal(tensor, first[name]), name


def test_work_goes_to_the_current_stream():
    inputs, tables = make_inputs(2, 4096, 12, 128), make_tables(4096, 128)

    def step(x, weight):
        return ops.rms_norm_rope(x, weight, *tables, heads=12)

    expected = run(step, inputs)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(inputs["x"])
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(inputs["x"].detach())
        found = run(step, {**inputs, "x": late.requires_grad_()})
    stream.synchronize()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_a_graph_can_capture_forward_and_backward():
    inputs, tables = make_inputs(1, 256, 12, 128), make_tables(256, 128)
    grad = torch.randn(1, 256, 12, 128, device=DEVICE).bfloat16()

    def step():
        y = ops.rms_norm_rope(**inputs, cos=tables[0], sin=tables[1], heads=12)
        return (y, *torch.autograd.grad(y, list(inputs.values()), grad))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        inputs["x"].copy_(torch.randn_like(inputs["x"]))
    graph.replay()
    for ours, again in zip(captured, step()):
        assert torch.equal(ours, again)


def test_the_second_gpu_is_used_while_the_first_is_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = {name: t.detach().to("cuda:1").requires_grad_() for name, t in make_inputs(2, 40, 2, 128).items()}
    tables = [t.to("cuda:1") for t in make_tables(40, 128)]
    assert torch.cuda.current_device() == 0
    check(inputs, tables, 2)


def test_opcheck_passes_on_cuda_tensors():
    inputs, tables = make_inputs(2, 20, 2, 64), make_tables(20, 64)
    x, weight = inputs.values()
    namespace = torch.ops.adaptiveload
    torch.library.opcheck(namespace.rms_norm_rope.default, (x, weight, *tables, 2, EPS))
    x, weight = x.detach(), weight.detach()
    y, rstd = namespace.rms_norm_rope(x, weight, *tables, 2, EPS)
    torch.library.opcheck(namespace.rms_norm_rope_backward.default, (y, x, rstd, weight, *tables, 0b11))


def test_compile_in_one_graph_gives_what_the_op_gives():
    inputs, tables = make_inputs(2, 40, 12, 128), make_tables(40, 128)

    def step(x, weight):
        return ops.rms_norm_rope(2 * x, weight, *tables, heads=12)

    expected, found = run(step, inputs), run(torch.compile(step, fullgraph=True), inputs)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-2, atol=1e-3, msg=name)


def test_backward_keeps_x_and_one_float_a_row():
    inputs, tables = make_inputs(2, 512, 12, 128), make_tables(512, 128)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ops.rms_norm_rope(**inputs, cos=tables[0], sin=tables[1], heads=12)
    known = {t.untyped_storage().data_ptr() for t in (inputs["x"], *tables)}
    assert known <= kept.keys()
    assert sum(nbytes for at, nbytes in kept.items() if at not in known) == 2 * 512 * 4


def test_double_backward_on_cuda_is_that_of_the_reference():
    results = []
    tables = make_tables(6, 8)
    inputs = make_inputs(1, 6, 2, 8, torch.float32)
    for function in (ops.rms_norm_rope, reference.rms_norm_rope):
        leaves = [t.detach().requires_grad_() for t in inputs.values()]
        (dx,) = torch.autograd.grad(function(*leaves, *tables, heads=2).square().sum(), leaves[0], create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), leaves))
    for ours, exact in zip(*results):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def test_float64_on_cuda_passes_gradcheck():
    leaves = [torch.randn(s, device=DEVICE, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 8), (8,))]
    tables = [t.double() for t in make_tables(3, 4)]
    assert torch.autograd.gradcheck(lambda x, weight: ops.rms_norm_rope(x, weight, *tables, heads=2), leaves)


def test_wider_rows_than_tested_are_refused_by_name():
    inputs, tables = make_inputs(1, 2, 82, 100), make_tables(2, 100)
    with pytest.raises(RuntimeError, match="up to 8192 columns, but x has D = 8200"):
        ops.rms_norm_rope(**inputs, cos=tables[0], sin=tables[1], heads=82)
