"""Do patched models compute the same outputs and gradients as unpatched ones?"""

import pytest
import torch
from support.tiny_models import FAMILIES, output_and_gradients, relative_error, tiny_inputs, tiny_model

from adaptiveload_hf import patch_model, unpatch_model
from adaptiveload_hf.adaln import ops

OPS = ("layer_norm_modulate", "gate_residual", "gate_residual_layer_norm_modulate", "rms_norm_rope")
# How often each of OPS runs in a forward of each tiny model.
FUSED_CALLS = {
    "wan": (3, 2, 4, 4),
    "wan_per_token": (3, 2, 4, 4),
    "wan_i2v": (3, 2, 4, 4),
    "sd3": (7, 5, 5, 0),
    "sd35": (9, 7, 5, 16),
    "flux": (7, 6, 4, 12),
    "cogvideox": (9, 8, 0, 0),
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_all_gradients_equal_the_unpatched_ones(family, backend):
    model, inputs = tiny_model(family), tiny_inputs(family)
    names = list(model.state_dict())
    output, gradients = output_and_gradients(model, inputs)
    attributes = [dict(vars(module)) for module in model.modules()]

    patch_model(model, backend=backend)
    patched_output, patched_gradients = output_and_gradients(model, inputs)
    assert list(model.state_dict()) == names
    assert relative_error(patched_output, output) < 1e-5
    assert patched_gradients.keys() == gradients.keys() == set(dict(model.named_parameters()))
    largest = max(gradient.norm() for gradient in gradients.values())
    for name, gradient in gradients.items():
        # Some key biases have a gradient of exactly 0; what is found there is rounding in both.
        if gradient.norm() > 1e-6 * largest:
            assert relative_error(patched_gradients[name], gradient) < 1e-5, name

    unpatch_model(model)
    assert [dict(vars(module)) for module in model.modules()] == attributes
    restored_output, restored_gradients = output_and_gradients(model, inputs)
    assert torch.equal(restored_output, output)
    assert all(torch.equal(restored_gradients[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_runs_fused(family, monkeypatch):
    counts = dict.fromkeys(OPS, 0)
    for name in OPS:
        original = getattr(ops, name)

        def counted(*args, name=name, original=original, **options):
            counts[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(ops, name, counted)
    model = tiny_model(family)
    report = patch_model(model)
    model(**tiny_inputs(family))
    assert tuple(counts.values()) == FUSED_CALLS[family]
    for row in report.to_dict()["classes"]:
        for kind in ("modulations", "gates", "norms", "pairs", "attention"):
            assert row[f"{kind}_fused"] == row[f"{kind}_found"]


@pytest.mark.parametrize("family", ["wan", "wan_per_token", "wan_i2v", "sd3", "sd35"])
def test_bfloat16_is_at_least_as_close_to_float64_as_eager(family):
    eager, fused = torch.zeros(2), torch.zeros(2)
    for seed in range(4):
        model = tiny_model(family, seed).to(torch.bfloat16)
        truth = tiny_model(family, seed).double()
        truth.load_state_dict(model.state_dict())
        inputs = tiny_inputs(family, seed=seed, dtype=torch.bfloat16)
        exact = output_and_gradients(
            truth,
            tiny_inputs(family, seed=seed, dtype=torch.bfloat16)
            | {name: value.double() for name, value in inputs.items() if value.is_floating_point()},
        )
        eager += errors(output_and_gradients(model, inputs), exact)
        patch_model(model)
        found = output_and_gradients(model, inputs)
        assert found[0].dtype == torch.bfloat16
        fused += errors(found, exact)
    assert (fused <= 1.02 * eager).all(), (fused, eager)


def errors(found, exact):
    """Relative errors of the output and of all gradients together."""
    output, gradients = found
    true_output, true_gradients = exact
    flat, true_flat = (
        torch.cat([g[name].flatten().double() for name in true_gradients]) for g in (gradients, true_gradients)
    )
    return torch.tensor([relative_error(output, true_output), relative_error(flat, true_flat)])


def test_frozen_modulation_and_lora_like_training_give_the_same_gradients():
    model, inputs = tiny_model("sd3"), tiny_inputs("sd3")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attn.to_q" in name)
    _, gradients = output_and_gradients(model, inputs)
    patch_model(model)
    _, patched_gradients = output_and_gradients(model, inputs)
    assert gradients.keys() == patched_gradients.keys()
    for name, gradient in gradients.items():
        assert relative_error(patched_gradients[name], gradient) < 1e-5, name
