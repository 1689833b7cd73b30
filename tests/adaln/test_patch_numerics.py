"""Do all sites of patched models run fused, on any backend? (All models of diffusers: test_models.py.)"""

import pytest
import torch
from support.compositions import fused_ops
from support.tiny_models import FAMILIES, output_and_gradients, relative_error, tiny_inputs, tiny_model

from adaptiveload_hf import patch_model, unpatch_model
from adaptiveload_hf.adaln import ops

# How often each of the ops runs in a forward of each tiny model, in the order of `ops.OPS`.
FUSED_CALLS = {
    "wan": (3, 4, 2, 4, 4),
    "wan_per_token": (3, 4, 2, 4, 4),
    "wan_i2v": (3, 6, 2, 4, 4),
    "sd3": (7, 0, 5, 5, 0),
    "sd35": (9, 0, 7, 5, 16),
    "flux": (7, 0, 6, 4, 12),
    "cogvideox": (9, 0, 8, 0, 0),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_with_the_reference_outputs_and_all_gradients_equal_the_unpatched_ones(family):
    model, inputs = tiny_model(family), tiny_inputs(family)
    names = list(model.state_dict())
    output, gradients = output_and_gradients(model, inputs)
    attributes = [dict(vars(module)) for module in model.modules()]

    patch_model(model, backend="reference")
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
def test_every_site_runs_fused(family):
    model = tiny_model(family)
    report = patch_model(model)
    _, counts = fused_ops(model, **tiny_inputs(family))
    assert tuple(counts[name] for name in ops.OPS) == FUSED_CALLS[family]
    for row in report.to_dict()["classes"]:
        for kind in ("modulations", "gates", "norms", "pairs", "attention"):
            assert row[f"{kind}_fused"] == row[f"{kind}_found"]


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
