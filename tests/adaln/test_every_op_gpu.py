"""On a GPU, whatever kernel runs an op: odd rows, two GPUs, second derivatives. One case for each op."""

import pytest
import torch
from support.adaln_cases import in_float64, make_columns, make_modulation, make_x, relative_error, run

from adaptiveload_hf.adaln import ops, reference

pytestmark = pytest.mark.gpu

B, S, D, HEADS = 2, 24, 64, 4
EVERY_OP = pytest.mark.parametrize("op", ops.OPS)
NORMS = pytest.mark.parametrize("op", [op for op in ops.OPS if op != "gate_residual"])
BACKENDS = pytest.mark.parametrize("backend", ["auto", "triton"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)  # not that of `run`, whose gradients would be x


def case(op, x, device="cuda"):
    """Leaves of an op around x, and its other options."""
    inputs = {"x": x}
    if op == "rms_norm_rope":
        angles = torch.randn(1, x.shape[1], 1, D // HEADS // 2, device=device)
        tables = {"cos": angles.cos().repeat_interleave(2, -1), "sin": angles.sin().repeat_interleave(2, -1)}
        return {**inputs, "weight": make_columns(D, device, offset=1.0), **tables}, {"heads": HEADS}
    if "gate" in op:
        inputs["y"] = make_x(*x.shape, x.dtype, device)
        inputs["gate"] = make_modulation(x.shape[0], 1, D, torch.float32, device, index=2)
    if "norm" in op:
        inputs["scale"], inputs["shift"] = (
            make_modulation(x.shape[0], 1, D, torch.float32, device, index=index) for index in (1, 0)
        )
    return inputs, {}


@BACKENDS
@NORMS
def test_rows_far_from_zero_keep_their_digits(op, backend):
    inputs, options = case(op, make_x(B, S, D, torch.float32, "cuda", mean=1000.0))
    ours = run(getattr(ops, op), inputs, **options, backend=backend)
    truth = run(getattr(reference, op), in_float64(inputs), **options)
    for name, exact in truth.items():
        # The mean alone is rounded to 6e-5 of a standard deviation; E[x^2] - E[x]^2 would be off by tenths.
        assert relative_error(ours[name], exact) < 5e-4, name


@BACKENDS
@NORMS
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_rows_stay_finite(op, backend, value):
    x = torch.full((B, S, D), value, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    inputs, options = case(op, x)
    for name, tensor in run(getattr(ops, op), inputs, **options, backend=backend).items():
        assert tensor.isfinite().all(), name


@BACKENDS
@pytest.mark.parametrize("tokens", [40, 5000])
@EVERY_OP
def test_gradients_of_columns_in_a_half_type_are_the_float32_sums_rounded_once(op, tokens, backend):
    inputs, options = case(op, make_x(1, tokens, D, torch.bfloat16, "cuda"))
    names = {"rms_norm_rope": ("weight",), "rms_norm_modulate": ("weight",), "gate_residual": ("gate_table",)}.get(
        op, ("weight", "bias", "scale_table", "shift_table")
    )
    columns = {name: make_columns(D, "cuda").detach().bfloat16() for name in names}
    dtypes = {} if op == "rms_norm_rope" else {"out_dtype": torch.bfloat16}
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = {name: column.to(dtype).requires_grad_() for name, column in columns.items()}
        out = getattr(ops, op)(**inputs | leaves, **options, **dtypes, backend=backend)
        out = out[-1] if isinstance(out, tuple) else out
        torch.manual_seed(2)
        found.append(torch.autograd.grad(out, list(leaves.values()), torch.randn_like(out)))
    for halves, floats in zip(*found):
        assert torch.equal(halves, floats.bfloat16())


# CUDA's clusters come with Hopper; the second kernel of others adds column sums.
@pytest.mark.parametrize("op", ["rms_norm_rope", "rms_norm_modulate"])
def test_backward_of_few_rows_with_a_weight_in_a_half_type_is_one_kernel(op):
    if ops.kernel_backend("cuda") != "cuda" or torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs the extension and a GPU with clusters")
    inputs, options = case(op, make_x(1, 40, D, torch.bfloat16, "cuda"))
    inputs["weight"] = make_columns(D, "cuda").detach().bfloat16().requires_grad_()
    dtypes = {} if op == "rms_norm_rope" else {"out_dtype": torch.bfloat16}
    out = getattr(ops, op)(**inputs, **options, **dtypes)
    leaves, grad = [t for t in inputs.values() if t.requires_grad], torch.randn_like(out)
    torch.autograd.grad(out, leaves, grad, retain_graph=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(out, leaves, grad)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels


@BACKENDS
@EVERY_OP
def test_double_backward_is_that_of_the_reference(op, backend):
    inputs, options = case(op, make_x(1, 6, D, torch.float32, "cuda"))
    found = []
    for function, chosen in ((getattr(ops, op), {"backend": backend}), (getattr(reference, op), {})):
        leaves = {name: t.detach().requires_grad_(t.requires_grad) for name, t in inputs.items()}
        outputs = function(**leaves, **options, **chosen)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum(output.square().sum() for output in outputs)
        (dx,) = torch.autograd.grad(loss, leaves["x"], create_graph=True)
        wanted = [t for t in leaves.values() if t.requires_grad]
        found.append(torch.autograd.grad(dx.square().sum(), wanted, allow_unused=True))
    for ours, exact in zip(*found):
        assert (ours is None) == (exact is None)
        if exact is not None:
            torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-3)


@BACKENDS
@EVERY_OP
def test_the_second_gpu_is_used_while_the_first_is_current(op, backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs, options = case(op, make_x(B, S, D, torch.float32, "cuda:1"), "cuda:1")
    ours = run(getattr(ops, op), inputs, **options, backend=backend)
    truth = run(getattr(reference, op), in_float64(inputs), **options)
    assert torch.cuda.current_device() == 0
    for name, exact in truth.items():
        assert relative_error(ours[name], exact) < 1e-5, name
