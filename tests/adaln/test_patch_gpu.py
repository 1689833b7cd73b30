"""On a GPU: do patched models use the kernels, stay as exact as eager, and follow CUDA autocast?"""

import pytest
import torch
from diffusers.models.normalization import AdaLayerNormZero
from support.tiny_models import output_and_gradients, relative_error, tiny_inputs, tiny_model
from torch.utils.checkpoint import checkpoint

from adaptiveload_hf import patch_model
from adaptiveload_hf.adaln import ops

pytestmark = pytest.mark.gpu
FAMILIES = pytest.mark.parametrize("family", ["wan", "wan_per_token", "sd3", "sd35", "flux", "cogvideox"])


def needs_extension():
    if reason := ops.extension_missing_reason():
        pytest.skip(f"needs the CUDA extension: {reason}")


def on_gpu(inputs, dtype=None):
    return {name: value.cuda().to(dtype if value.is_floating_point() else None) for name, value in inputs.items()}


def flat_error(found, exact):
    """Relative errors of the output and of all gradients together."""
    output, gradients = found
    flat, true_flat = (torch.cat([g[name].flatten().double() for name in exact[1]]) for g in (gradients, exact[1]))
    return torch.tensor([relative_error(output, exact[0]), relative_error(flat, true_flat)])


def errors_of(family, *, autocast, prepare):
    """Mean errors against float64 over four models, run by themselves and after `prepare`."""
    totals = torch.zeros(2, 2)
    weights = torch.float32 if autocast else torch.bfloat16
    for seed in range(4):
        model = tiny_model(family, seed).cuda().to(weights)
        truth = tiny_model(family, seed).cuda().double()
        truth.load_state_dict(model.state_dict())
        inputs = on_gpu(tiny_inputs(family, seed=seed), torch.bfloat16)
        exact = output_and_gradients(truth, {n: v.double() if v.is_floating_point() else v for n, v in inputs.items()})
        for row in range(2):
            if row:
                prepare(model)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                inputs = on_gpu(inputs, weights)
                found = output_and_gradients(model, inputs)
            totals[row] += flat_error(found, exact)
    return totals


# Not Flux: in bfloat16 its own timestep embedding is off by more than all else.
CLOSE = [("auto", family) for family in ("wan", "wan_per_token", "sd3", "sd35", "cogvideox")]
CLOSE += [(backend, family) for backend in ("triton", "reference") for family in ("wan", "sd35")]  # together all ops


@pytest.mark.parametrize(("backend", "family"), CLOSE)
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_patched_models_are_at_least_as_close_to_float64_as_eager(family, autocast, backend):
    eager, fused = errors_of(family, autocast=autocast, prepare=lambda model: patch_model(model, backend=backend))
    assert (fused <= 1.05 * eager).all(), (fused, eager)


@FAMILIES
def test_float32_outputs_and_gradients_equal_the_unpatched_ones(family):
    model, inputs = tiny_model(family).cuda(), on_gpu(tiny_inputs(family))
    output, gradients = output_and_gradients(model, inputs)
    patch_model(model)
    patched_output, patched_gradients = output_and_gradients(model, inputs)
    assert relative_error(patched_output, output) < 1e-5
    largest = max(gradient.norm() for gradient in gradients.values())
    for name, gradient in gradients.items():
        if gradient.norm() > 1e-6 * largest:
            assert relative_error(patched_gradients[name], gradient) < 1e-5, name


def kernels_of(model, inputs):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model(**inputs)
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages()}


def test_the_kernels_run_and_the_report_says_so():
    needs_extension()
    model, inputs = tiny_model("sd35").cuda().bfloat16(), on_gpu(tiny_inputs("sd35"), torch.bfloat16)
    eager_kernels = kernels_of(model, inputs)
    report = patch_model(model, backend="cuda")
    assert set(report.backends) >= {"layer_norm_modulate", "gate_residual", "rms_norm_rope"}
    assert set(report.backends.values()) == {"cuda"}
    assert patch_model(model).backends["layer_norm_modulate"] == "cuda on cuda"
    kernels = kernels_of(model, inputs)
    assert any("layer_norm" in name for name in eager_kernels - kernels)
    assert len(kernels - eager_kernels) >= 2


def test_the_triton_backend_runs_its_kernels_and_no_others():
    model, inputs = tiny_model("sd35").cuda().bfloat16(), on_gpu(tiny_inputs("sd35"), torch.bfloat16)
    assert set(patch_model(model, backend="reference").backends.values()) == {"reference"}
    others = kernels_of(model, inputs)
    assert set(patch_model(model, backend="triton").backends.values()) == {"triton"}
    assert "forward" in kernels_of(model, inputs) - others


def test_under_autocast_the_norm_gives_the_autocast_dtype_at_once():
    torch.manual_seed(0)
    norm, x, emb = AdaLayerNormZero(64).cuda(), torch.randn(2, 5, 64).cuda().bfloat16(), torch.randn(2, 64).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        eager = norm(x, emb=emb)[0]
        report = patch_model(norm, verify="always")
        fused = norm(x, emb=emb)[0]
    assert (eager.dtype, fused.dtype) == (torch.float32, torch.bfloat16)
    assert "first call was equal" in str(report)
    torch.testing.assert_close(fused.float(), eager, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_gradient_checkpointing_changes_nothing(reentrant, autocast):
    model, inputs = tiny_model("wan").cuda(), on_gpu(tiny_inputs("wan"))
    patch_model(model)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        output, gradients = output_and_gradients(model, inputs)
        model.enable_gradient_checkpointing(lambda f, *args: checkpoint(f, *args, use_reentrant=reentrant))
        again, gradients_again = output_and_gradients(model, inputs)
    assert relative_error(again, output) < 1e-6
    for name, gradient in gradients.items():
        assert relative_error(gradients_again[name], gradient) < (2e-2 if autocast else 1e-5), name


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_compiled_by_inductor_it_is_one_graph_and_right(autocast):
    torch._dynamo.reset()
    dtype = torch.float32 if autocast else torch.bfloat16
    model, inputs = tiny_model("sd35").cuda().to(dtype), on_gpu(tiny_inputs("sd35"), dtype)
    del model.transformer_blocks[1:]  # the first has both attentions, and Inductor takes most of this test's time
    patch_model(model)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        output, gradients = output_and_gradients(model, inputs)
        compiled_output, compiled = output_and_gradients(torch.compile(model, fullgraph=True), inputs)
    compiled = {name.removeprefix("_orig_mod."): gradient for name, gradient in compiled.items()}
    assert (flat_error((compiled_output, compiled), (output, gradients)) < 2e-2).all()
