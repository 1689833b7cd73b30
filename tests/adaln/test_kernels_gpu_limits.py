"""Do the CUDA kernels hold at the edges: sizes, streams, graphs, repeats, compile, what they refuse?"""

import subprocess
import sys

import pytest
import torch
from support.adaln_cases import in_float64, make_columns, make_modulation, make_x, relative_error, run

from adaptiveload_hf.adaln import ops, reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_kernels")]

DEVICE = "cuda"


def make_inputs(batch=2, tokens=40, width=256, rows=1):
    return {
        "x": make_x(batch, tokens, width, torch.bfloat16, DEVICE),
        "scale": make_modulation(batch, rows, width, torch.float32, DEVICE, index=1),
        "shift": make_modulation(batch, rows, width, torch.float32, DEVICE, index=0),
    }


def gate_inputs(inputs):
    return {"x": inputs["x"], "y": torch.randn_like(inputs["x"], requires_grad=True), "gate": inputs["scale"]}


def assert_near_float64(function, truth_function, inputs, floor=5e-3):
    ours, truth = run(function, inputs), run(truth_function, in_float64(inputs))
    for name, exact in truth.items():
        assert relative_error(ours[name], exact) < floor, name


@pytest.mark.parametrize(
    ("batch", "tokens", "rows"), [(70_000, 1, 1), (1, 70_000, 1), (1, 140_000, 70_000), (1, 70_000, 70_000)]
)
def test_more_than_65535_rows_batch_items_and_modulation_rows(batch, tokens, rows):
    inputs = make_inputs(batch, tokens, 64, rows)
    assert_near_float64(ops.layer_norm_modulate, reference.layer_norm_modulate, inputs)
    assert_near_float64(ops.gate_residual, reference.gate_residual, gate_inputs(inputs))


@pytest.mark.parametrize(("batch", "tokens", "rows"), [(0, 5, 1), (3, 0, 1), (3, 0, 0), (0, 0, 1)])
def test_empty_tensors_give_empty_results_and_zero_gradients(batch, tokens, rows):
    x = torch.empty(batch, tokens, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y = torch.empty_like(x, requires_grad=True)
    scale = torch.empty(batch, rows, 64, device=DEVICE, requires_grad=True)
    table = make_columns(64, DEVICE)
    out = ops.layer_norm_modulate(x, scale, scale_table=table) + ops.gate_residual(x, y, scale, gate_table=table)
    found = torch.autograd.grad(out.sum(), (x, y, scale, table))
    assert out.shape == x.shape
    assert [g.shape for g in found] == [x.shape, x.shape, scale.shape, table.shape]
    assert all((g == 0).all() for g in found)


def test_more_than_two_to_the_31_elements_are_addressed_right():
    if torch.cuda.mem_get_info()[1] < 60 << 30:
        pytest.skip("needs a GPU with 60 GB")
    tokens, width = 524_320, 4096
    x = torch.randn(1, tokens, width, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    scale = make_modulation(1, 1, width, torch.float32, DEVICE).detach()
    y = ops.layer_norm_modulate(x, scale, out_dtype=torch.bfloat16)
    (dx,) = torch.autograd.grad(y, x, y.detach())
    gated = ops.gate_residual(x.detach(), y.detach(), scale, out_dtype=torch.bfloat16)
    last = slice(tokens - 64, tokens)
    part = x.detach()[:, last].double().requires_grad_()
    exact = reference.layer_norm_modulate(part, scale.double())
    (exact_dx,) = torch.autograd.grad(exact, part, y.detach()[:, last].double())
    assert x.numel() > 2**31
    assert relative_error(y[:, last], exact.detach()) < 5e-3
    assert relative_error(dx[:, last], exact_dx) < 5e-3
    assert relative_error(gated[:, last], part.detach() + y.detach()[:, last].double() * scale.double()) < 5e-3


@pytest.mark.parametrize("width", [1536, 5120, 1001])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_hundred_repeats_give_the_same_bits(width, rows):
    inputs = make_inputs(2, 4096, width, rows)
    inputs["weight"] = make_columns(width, DEVICE)
    gated = gate_inputs(inputs)
    first, first_gated = run(ops.layer_norm_modulate, inputs), run(ops.gate_residual, gated)
    for _ in range(100):
        again, again_gated = run(ops.layer_norm_modulate, inputs), run(ops.gate_residual, gated)
        for name, tensor in first.items():
            assert torch.equal(tensor, again[name]), name
        for name, tensor in first_gated.items():
            assert torch.equal(tensor, again_gated[name]), name


def test_work_goes_to_the_current_stream():
    inputs = make_inputs(2, 4096, 1536)
    expected = run(ops.layer_norm_modulate, inputs)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(inputs["x"])
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(inputs["x"].detach())
        found = run(ops.layer_norm_modulate, {**inputs, "x": late.requires_grad_()})
    stream.synchronize()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_a_graph_can_capture_forward_and_backward():
    inputs = make_inputs(1, 256, 1536)
    grad = torch.randn_like(inputs["x"])

    def step():
        y = ops.layer_norm_modulate(**inputs, out_dtype=torch.bfloat16)
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
        inputs["x"].copy_(torch.randn_like(grad))
    graph.replay()
    for ours, again in zip(captured, step()):
        assert torch.equal(ours, again)


def test_the_second_gpu_is_used_while_the_first_is_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = {name: t.detach().to("cuda:1").requires_grad_() for name, t in make_inputs().items()}
    assert torch.cuda.current_device() == 0
    assert_near_float64(ops.layer_norm_modulate, reference.layer_norm_modulate, inputs)


@pytest.mark.parametrize("rows", [1, 8])
def test_opcheck_passes_on_cuda_tensors(rows):
    inputs = make_inputs(rows=rows)
    x, scale, shift = inputs.values()
    namespace = torch.ops.adaptiveload
    forward = (x, scale, shift, None, None, None, None, 1e-6, torch.bfloat16)
    torch.library.opcheck(namespace.layer_norm_modulate.default, forward)
    torch.library.opcheck(namespace.gate_residual.default, (x, x.detach(), scale, None, torch.bfloat16))
    x, scale, shift = (t.detach() for t in (x, scale, shift))
    _, stats = namespace.layer_norm_modulate(x, scale, shift, None, None, None, None, 1e-6, torch.bfloat16)
    table, dtypes = torch.randn_like(x[0, 0]), (torch.float32, torch.float16)
    backward = (torch.randn_like(x), x, stats, scale, table, None, table.float(), rows, *dtypes, 0b1101111)
    torch.library.opcheck(namespace.layer_norm_modulate_backward.default, backward)
    gate_backward = (torch.randn_like(x), x, scale, table, torch.bfloat16, 0b1110)
    torch.library.opcheck(namespace.gate_residual_backward.default, gate_backward)


def test_compile_in_one_graph_gives_what_the_op_gives():
    inputs = make_inputs()

    def step(x, scale, shift):
        return ops.gate_residual(x, ops.layer_norm_modulate(x, scale, shift, out_dtype=torch.bfloat16), scale)

    expected, found = run(step, inputs), run(torch.compile(step, fullgraph=True), inputs)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-2, atol=1e-3, msg=name)


def test_double_backward_on_cuda_is_that_of_the_reference():
    inputs = make_inputs(1, 6, 16)
    results = []
    for function in (ops.layer_norm_modulate, reference.layer_norm_modulate):
        leaves = [t.detach().float().requires_grad_() for t in inputs.values()]
        (dx,) = torch.autograd.grad(function(*leaves).square().sum(), leaves[0], create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), leaves))
    for ours, exact in zip(*results):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def test_float64_on_cuda_passes_gradcheck():
    leaves = [torch.randn(shape, device=DEVICE, dtype=torch.float64, requires_grad=True) for shape in
              ((2, 3, 8), (2, 1, 8), (2, 1, 8))]  # fmt: skip
    assert torch.autograd.gradcheck(ops.layer_norm_modulate, leaves)
    assert torch.autograd.gradcheck(ops.gate_residual, (leaves[0], leaves[0].detach().clone(), leaves[1]))


def test_wider_rows_than_tested_are_refused_by_name():
    with pytest.raises(RuntimeError, match="up to 8192 columns, but x has D = 8200"):
        ops.layer_norm_modulate(torch.randn(1, 2, 8200, device=DEVICE))


def test_float64_modulation_of_float32_rows_is_refused_by_name():
    with pytest.raises(RuntimeError, match="float32, float16 and bfloat16"):
        ops.layer_norm_modulate(torch.randn(1, 2, 64, device=DEVICE), torch.randn(1, 1, 64, device=DEVICE).double())


@pytest.mark.parametrize(
    ("left", "lacks"),
    [(64, "the result"), (200, "a copy of a modulation whose columns do not lie side by side")],
)
def test_too_little_memory_is_torchs_own_error_and_nothing_is_lost(left, lacks):
    script = f"""
import torch
from adaptiveload_hf.adaln import ops
x = torch.randn(2, 4096, 4096, device="cuda", requires_grad=True)
scale = torch.randn(2, 4096, 4096, device="cuda").transpose(1, 2)

def step():
    return torch.autograd.grad(ops.layer_norm_modulate(x, scale).sum(), x)

step()  # CUDA loads the code of a kernel when it first runs, into memory of its own: all of this step's are there now
torch.cuda.synchronize()
torch.cuda.empty_cache()
held = torch.empty(torch.cuda.mem_get_info()[0] - {left} * 2**20, dtype=torch.uint8, device="cuda")
try:
    step()
except torch.OutOfMemoryError as error:
    assert "CUDA out of memory" in str(error), error
else:
    raise SystemExit("there was memory")
del held
step()
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, (
        f"{lacks}: {done.returncode}, {done.stdout}, {done.stderr[:1500]} ... {done.stderr[-500:]}"
    )


def test_an_extension_for_another_gpu_is_named_and_triton_runs():
    script = """
import sys
import torch
from adaptiveload_hf.adaln import extension, ops
extension.device_problem = lambda device: "it holds no code for GPU 0"
assert ops.extension_missing_reason() == "it holds no code for GPU 0"
assert ops.kernel_backend("cuda") == "triton"
x = torch.randn(1, 2, 64, device="cuda", requires_grad=True)
ops.gate_residual(x, ops.layer_norm_modulate(x)).sum().backward()
assert "triton" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
