"""Does the CUDA kernel of rms_norm_rope that norms each head by itself match float64, and hold at the edges?"""

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from support.adaln_cases import assert_as_close_as_eager, in_float64, make_columns, make_x, relative_error, run
from torch.nn import functional

from adaptiveload_hf.adaln import ops, reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_kernels")]

DEVICE = "cuda"
EPS = 1e-6
FLOORS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def make_tables(tokens, head_width, batch=1, dtype=torch.float32):
    """cos and sin, each angle twice; none for 0 tokens."""
    if tokens == 0:
        return None, None
    angles = torch.rand(batch, tokens, 1, head_width // 2, device=DEVICE).mul(6.3).repeat_interleave(2, dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def make_inputs(batch, tokens, heads, head_width, dtype=torch.bfloat16):
    weight = make_columns(head_width, DEVICE, offset=1.0).detach().to(dtype).requires_grad_()
    return {"x": make_x(batch, tokens, heads * head_width, dtype, DEVICE), "weight": weight}


def eager(x, weight, cos, sin, *, heads, eps):
    """What FluxAttnProcessor and HunyuanVideoAttnProcessor2_0 compute."""
    normed = functional.rms_norm(x.unflatten(2, (heads, -1)), weight.shape, weight.to(x.dtype), eps)
    if cos is None:
        return normed
    turned, rest = normed.split([cos.shape[1], x.shape[1] - cos.shape[1]], dim=1)
    parts = [apply_rotary_emb(t[None], (c, s), sequence_dim=1) for t, c, s in zip(turned, *rows(x, cos, sin))]
    return torch.cat([torch.cat(parts), rest], dim=1)


def rows(x, *tables):
    """Tables of every batch item, [tokens, head width]."""
    return (table.squeeze(2).expand(x.shape[0], -1, -1) for table in tables)


def check(inputs, tables, heads):
    """As close to float64 as the eager expression, forward and backward."""
    exact_tables = [t if t is None else t.double() for t in tables]
    options = {"heads": heads, "eps": EPS}
    ours = run(lambda x, weight: ops.rms_norm_rope(x, weight, *tables, **options), inputs)
    theirs = run(lambda x, weight: eager(x, weight, *tables, **options), inputs)
    truth = run(lambda x, weight: reference.rms_norm_rope(x, weight, *exact_tables, **options), in_float64(inputs))
    assert_as_close_as_eager(ours, theirs, truth, FLOORS[inputs["x"].dtype])


# SD3.5's and Flux's heads; lanes of a group that have no columns; the widest of vectors; heads of no whole vectors.
SHAPES = [(24, 64), (24, 128), (5, 96), (3, 256), (7, 40), (9, 8), (4, 36), (2, 264), (5, 2)]


@pytest.mark.parametrize("turned", [37, 20, 0])
@pytest.mark.parametrize(("heads", "head_width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_output_and_gradients_are_as_close_to_float64_as_eager(heads, head_width, dtype, turned):
    check(make_inputs(2, 37, heads, head_width, dtype), make_tables(turned, head_width), heads)


@pytest.mark.parametrize(("heads", "head_width"), [(38, 64), (23, 128), (11, 256), (15, 192)])
def test_many_elements_which_are_not_asked_for_early(heads, head_width):
    tokens = (1 << 24) // (heads * head_width) + 3
    check(make_inputs(1, tokens, heads, head_width), make_tables(tokens - 100, head_width), heads)


@pytest.mark.parametrize("table_batch", [1, 3])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 1000, 4097])
def test_tables_of_one_or_every_batch_item_and_any_number_of_tokens(table_batch, table_dtype, tokens):
    check(make_inputs(3, tokens, 6, 64), make_tables(tokens, 64, table_batch, table_dtype), 6)


@pytest.mark.parametrize("head_width", [64, 36])
@pytest.mark.parametrize("offset", [0, 1])
def test_operands_may_be_laid_out_in_any_way(head_width, offset):
    heads, tokens = 6, 33
    width = heads * head_width
    storage = torch.randn(2 * tokens * 3 * width + 1, device=DEVICE).bfloat16()
    x = storage[offset : len(storage) - 1 + offset].view(2, tokens, 3 * width).chunk(3, -1)[1].requires_grad_()
    weight = make_columns(head_width + 1, DEVICE, offset=1.0).detach()[1:].requires_grad_()
    tables = make_tables(tokens, head_width)
    check({"x": x, "weight": weight}, tables, heads)
    # Attention leaves its gradients with the heads outside, and those of joined streams as a part of the tokens.
    grad = torch.randn(2, heads, tokens + 5, head_width, device=DEVICE).bfloat16()[:, :, 2:-3].transpose(1, 2)
    y = ops.rms_norm_rope(x, weight, *tables, heads=heads)
    found = torch.autograd.grad(y, (x, weight), grad, retain_graph=True)
    for ours, other in zip(found, torch.autograd.grad(y, (x, weight), grad.contiguous())):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("frozen", ["x", "weight"])
@pytest.mark.parametrize("head_width", [128, 10])
def test_a_frozen_operand_gets_no_gradient_and_leaves_the_other_exact(frozen, head_width):
    inputs = make_inputs(2, 30, 6, head_width)
    inputs[frozen] = inputs[frozen].detach()
    check(inputs, make_tables(30, head_width), 6)


@pytest.mark.parametrize(("batch", "tokens"), [(0, 5), (3, 0)])
def test_empty_tensors_give_empty_results_and_zero_gradients(batch, tokens):
    inputs = make_inputs(batch, tokens, 2, 64)
    y = ops.rms_norm_rope(**inputs, heads=2)
    dx, dweight = torch.autograd.grad(y.sum(), list(inputs.values()))
    assert y.shape == (batch, tokens, 2, 64) and dx.shape == inputs["x"].shape
    assert (dweight == 0).all()


def test_more_than_two_to_the_31_elements_are_addressed_right():
    if torch.cuda.mem_get_info()[1] < 60 << 30:
        pytest.skip("needs a GPU with 60 GB")
    tokens = 524_320
    x = torch.randn(1, tokens, 4096, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = make_columns(128, DEVICE, offset=1.0).detach()
    y = ops.rms_norm_rope(x, weight, heads=32)
    (dx,) = torch.autograd.grad(y, x, y.detach())
    part = x.detach()[:, -64:].double().requires_grad_()
    exact = reference.rms_norm_rope(part, weight.double(), heads=32)
    (exact_dx,) = torch.autograd.grad(exact, part, y.detach()[:, -64:].double())
    assert relative_error(y[:, -64:], exact.detach()) < 5e-3
    assert relative_error(dx[:, -64:], exact_dx) < 5e-3


@pytest.mark.parametrize("head_width", [128, 10])
def test_nan_stays_in_its_head(head_width):
    inputs = make_inputs(2, 50, 4, head_width)
    with torch.no_grad():
        inputs["x"][1, 3, 2 * head_width + 1] = float("nan")
    y = ops.rms_norm_rope(**inputs, heads=4)
    y.backward(torch.ones_like(y))
    healthy = torch.ones(2, 50, 4, dtype=torch.bool, device=DEVICE)
    healthy[1, 3, 2] = False
    for heads in (y, inputs["x"].grad.unflatten(2, (4, -1))):
        assert heads[healthy].isfinite().all()
        assert not heads[1, 3, 2].isfinite().all()


@pytest.mark.parametrize(("heads", "head_width"), [(24, 64), (24, 128), (9, 10)])
def test_a_hundred_repeats_give_the_same_bits(heads, head_width):
    inputs, tables = make_inputs(2, 4096, heads, head_width), make_tables(4096, head_width)

    def step(x, weight):
        return ops.rms_norm_rope(x, weight, *tables, heads=heads)

    first = run(step, inputs)
    for _ in range(100):
        for name, tensor in run(step, inputs).items():
            assert torch.equal(tensor, first[name]), name
