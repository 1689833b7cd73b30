"""Are the CUDA kernels right on shapes, strides, dtypes and sets of operands that nobody chose? 300 drawn cases."""

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from support import adaln_cases
from support.adaln_cases import in_float64, make_modulation, relative_error, run

from adaptiveload_hf.adaln import ops, reference

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HALVES = (torch.bfloat16, torch.float16)
WIDTHS = (1, 7, 8, 17, 40, 64, 100, 1001, 1152, 1536, 2240, 2432, 3072, 4096, 5120)
HEADS_AND_WIDTHS = ((1, 2), (2, 36), (4, 512), (12, 1536), (24, 3072), (40, 5120))
FLOOR = 2e-6  # sums in float32, which ours and eager's both are
# Half a unit in the last place, at most: what one rounding does to the few values of a small tensor is luck.
ONE_ROUNDING = {torch.float32: 6e-8, torch.float16: 4.9e-4, torch.bfloat16: 3.9e-3}
FEW = 2000


def sixty_cases(test):
    """Always the same ones."""
    options = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
    return settings(max_examples=60, **options)(given(st.data())(test))


def draw_shape(data, widths=WIDTHS):
    batch, tokens = data.draw(st.integers(0, 3), "B"), data.draw(st.integers(1, 90), "S")
    rows = data.draw(st.sampled_from([t for t in range(1, tokens + 1) if tokens % t == 0]), "T")
    return batch, tokens, data.draw(st.sampled_from(widths), "D"), rows


def draw_activation(data, shape, kind):
    """A leaf of any strides: plain, from the middle of the tokens, transposed, or one element off in its storage."""
    batch, tokens, width = shape
    layout = data.draw(st.sampled_from(["plain", "tokens", "transposed", "offset"]), "layout")
    mean = data.draw(st.sampled_from([0.0, 5.0]), "mean")

    def values(*sizes):
        return (torch.randn(*sizes, device=DEVICE) + mean).to(kind)

    if layout == "tokens":
        x = values(batch, tokens + 6, width)[:, 3 : 3 + tokens]
    elif layout == "transposed":
        x = values(batch, width, tokens).transpose(1, 2)
    elif layout == "offset":
        x = values(batch * tokens * width + 1)[1:].view(shape)
    else:
        x = values(*shape)
    return x.detach().requires_grad_(data.draw(st.booleans(), "trained"))


def draw_modulation(data, name, batch, rows, width, kind):
    dtype = data.draw(st.sampled_from([torch.float32, kind]), f"dtype of {name}")
    one = data.draw(st.booleans(), f"batch of {name} is 1")
    index = {"shift": 0, "scale": 1, "gate": 2}[name]
    m = make_modulation(1 if one else batch, rows, width, dtype, DEVICE, index)
    return m.requires_grad_(data.draw(st.booleans(), f"{name} trained"))


def draw_column(data, name, width):
    offset = 1.0 if name == "weight" else 0.0
    column = torch.randn(width, device=DEVICE) * 0.3 + offset
    return column.requires_grad_(data.draw(st.booleans(), f"{name} trained"))


def draw_some(data, names):
    return [name for name in names if data.draw(st.booleans(), name)]


def draw_inputs(data, activations, modulations, columns):
    """Operands by name, at least one of them trained."""
    torch.manual_seed(data.draw(st.integers(1, 10**6), "seed"))
    kind = data.draw(st.sampled_from([*HALVES, torch.float32]), "dtype")
    batch, tokens, width, rows = draw_shape(data)
    inputs = {name: draw_activation(data, (batch, tokens, width), kind) for name in activations}
    for name in draw_some(data, modulations):
        inputs[name] = draw_modulation(data, name, batch, rows, width, kind)
    inputs |= {name: draw_column(data, name, width) for name in draw_some(data, columns)}
    if not any(t.requires_grad for t in inputs.values()):
        inputs["x"].requires_grad_()
    return inputs, kind


def check(op, inputs, eager, dtypes=(), **options):
    if ops.kernel_backend(DEVICE) != "cuda":
        pytest.skip(f"no CUDA kernel for {op}")
    lower = dict.fromkeys(dtypes, inputs["x"].dtype)
    ours = run(getattr(ops, op), inputs, **options, **lower)
    theirs = run(eager, inputs, **options, **lower)
    truth = run(getattr(reference, op), in_float64(inputs), **options)
    for name, exact in truth.items():
        assert ours[name].shape == exact.shape, name
        assert ours[name].isfinite().all(), name
        floor = FLOOR + (ONE_ROUNDING[ours[name].dtype] if exact.numel() < FEW else 0)
        error, bound = relative_error(ours[name], exact), max(1.5 * relative_error(theirs[name], exact), floor)
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"


@sixty_cases
def test_layer_norm_modulate(data):
    columns = ("weight", "bias", "scale_table", "shift_table")
    inputs, _ = draw_inputs(data, ["x"], ("scale", "shift"), columns)
    check("layer_norm_modulate", inputs, adaln_cases.eager_layer_norm_modulate, ["out_dtype"], eps=1e-3)


@sixty_cases
def test_rms_norm_modulate(data):
    inputs, _ = draw_inputs(data, ["x"], ("scale", "shift"), ("weight",))
    options = {"scale_offset": data.draw(st.sampled_from([0.0, 1.0])), "eps": 1e-3}
    options["weight_offset"] = data.draw(st.sampled_from([0.0, 1.0])) if "weight" in inputs else 0.0
    check("rms_norm_modulate", inputs, adaln_cases.eager_rms_norm_modulate, ["out_dtype"], **options)


@sixty_cases
def test_gate_residual(data):
    inputs, _ = draw_inputs(data, ["x", "y"], ("gate",), ("gate_table",))
    check("gate_residual", inputs, adaln_cases.eager_gate_residual, ["out_dtype"])


@sixty_cases
def test_gate_residual_layer_norm_modulate(data):
    columns = ("gate_table", "weight", "bias", "scale_table", "shift_table")
    inputs, _ = draw_inputs(data, ["x", "y"], ("gate", "scale", "shift"), columns)
    inputs["x"].requires_grad_()  # or eager's residual has no gradient at all
    eager = adaln_cases.eager_gate_residual_layer_norm_modulate
    check("gate_residual_layer_norm_modulate", inputs, eager, ["residual_dtype", "out_dtype"], eps=1e-3)


def eager_rope(x, weight, cos, sin, *, heads, eps):
    """What Wan's attention processor of diffusers computes."""
    normed = F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps).unflatten(2, (heads, -1))
    first, second = normed.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(3).to(x.dtype)


@sixty_cases
def test_rms_norm_rope(data):
    torch.manual_seed(data.draw(st.integers(1, 10**6), "seed"))
    kind = data.draw(st.sampled_from([*HALVES, torch.float32]), "dtype")
    heads, width = data.draw(st.sampled_from(HEADS_AND_WIDTHS), "heads, D")
    batch, tokens = data.draw(st.integers(0, 3), "B"), data.draw(st.integers(1, 90), "S")
    angles = torch.randn(data.draw(st.sampled_from([1, batch])), tokens, 1, width // heads // 2, device=DEVICE)
    inputs = {"x": draw_activation(data, (batch, tokens, width), kind).requires_grad_()}
    inputs["weight"] = draw_column(data, "weight", width).to(data.draw(st.sampled_from([torch.float32, kind])))
    inputs["weight"] = inputs["weight"].detach().requires_grad_(data.draw(st.booleans(), "weight trained"))
    tables = {"cos": angles.cos().repeat_interleave(2, -1), "sin": angles.sin().repeat_interleave(2, -1)}
    check("rms_norm_rope", inputs | tables, eager_rope, heads=heads, eps=1e-3)
