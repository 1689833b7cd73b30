"""Does the forward of a whole model, once rewritten, keep what is put around it?"""

import inspect
import types

import accelerate
import pytest
import torch
from peft import LoraConfig
from support.accelerators import fresh_accelerate
from support.compositions import fused_ops
from support.tiny_models import relative_error, tiny_inputs, tiny_model

from adaptiveload_hf import patch_model, unpatch_model

INPUTS = {**tiny_inputs("wan"), "return_dict": False}


@pytest.fixture
def bf16():
    with fresh_accelerate():
        yield accelerate.Accelerator(mixed_precision="bf16", cpu=True)


def test_the_scale_of_lora_that_its_decorator_sets_holds():
    outputs = []
    for patch in (False, True):
        model = tiny_model("wan")
        torch.manual_seed(0)
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
        if patch:
            patch_model(model)
        scales = ({}, {"attention_kwargs": {"scale": 0.25}}, {})
        outputs.append([model(**INPUTS, **scale)[0] for scale in scales])
    assert all(relative_error(found, expected) < 1e-5 for found, expected in zip(*outputs))
    assert relative_error(outputs[0][0], outputs[0][1]) > 1e-3


def test_its_signature_stays():
    model = tiny_model("wan")
    expected = inspect.signature(model.forward)
    patch_model(model)
    assert inspect.signature(model.forward) == expected


@pytest.mark.parametrize("patch_first", [True, False], ids=["patch first", "patch last"])
def test_accelerates_mixed_precision_goes_around_it_and_can_be_taken_off(bf16, patch_first):
    expected = bf16.prepare(tiny_model("wan"))(**INPUTS)[0]
    model = tiny_model("wan")
    if patch_first:
        patch_model(model)
    model = bf16.prepare(model)
    if not patch_first:  # accelerate's own forward is on the instance
        assert "not the class's own but" in str(patch_model(model))
    found, ops = fused_ops(model, **INPUTS)
    assert found[0].dtype == expected.dtype == torch.float32
    assert relative_error(found[0], expected) < 2e-2
    assert ops["layer_norm_modulate"] == (3 if patch_first else 2)
    bare = bf16.unwrap_model(model, keep_fp32_wrapper=False)
    assert relative_error(bare(**INPUTS)[0], tiny_model("wan")(**INPUTS)[0]) < 1e-5
    unpatch_model(bare)
    assert torch.equal(bare(**INPUTS)[0], tiny_model("wan")(**INPUTS)[0])


def test_a_forward_that_somebody_puts_around_a_patched_model_and_takes_off_leaves_the_patch():
    model = tiny_model("wan")
    patch_model(model)
    inner = model.forward
    model.forward = types.MethodType(lambda self, *args, **kwargs: (inner(*args, **kwargs)[0] * 2,), model)
    doubled, ops = fused_ops(model, **INPUTS)
    assert ops["layer_norm_modulate"] == 3
    model.forward = inner
    assert torch.equal(model(**INPUTS)[0] * 2, doubled[0])


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_on_the_meta_device_it_runs_as_before(lora):
    model = tiny_model("wan")
    if lora:
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_out.0"]))
    patch_model(model)
    inputs = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in INPUTS.items()}
    assert model.to("meta")(**inputs)[0].shape == INPUTS["hidden_states"].shape
