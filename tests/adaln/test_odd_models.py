"""Are models right that are not as diffusers makes them: quantised, shared, in float16, without autograd?"""

import pytest
import torch
from peft import LoraConfig
from support.compositions import BOTH, ORDERS, fused_ops, largest_error, plain_ops
from support.tiny_models import output_and_gradients, relative_error, tiny_inputs, tiny_model
from torch import nn

from adaptiveload_hf import patch_model


class Int8Linear(nn.Linear):
    """Weights of 8 bits with a scale a row, as quantisation libraries subclass nn.Linear."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.bias = linear.bias
        self.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def quantize(model):
    blocks = model.blocks if hasattr(model, "blocks") else model.transformer_blocks
    for module in list(blocks.modules()):
        for name, linear in [(n, child) for n, child in module.named_children() if type(child) is nn.Linear]:
            setattr(module, name, Int8Linear(linear))
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v", "to_out.0"], init_lora_weights=False))


def share(model):
    blocks = model.blocks if hasattr(model, "blocks") else model.transformer_blocks
    blocks[1] = blocks[0]


def keep_norms_apart(model):
    """Weights of norms are no parameters of theirs any more, as FSDP 1 has it during forwards."""
    for norm in [module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm)]:
        for name, weight in list(norm._parameters.items()):
            del norm._parameters[name]
            super(nn.Module, norm).__setattr__(name, weight)


@BOTH
@ORDERS
@pytest.mark.parametrize("change", [quantize, share, keep_norms_apart])
def test_changed_linears_norms_and_blocks_give_what_unpatched_ones_give_and_the_ops_run(family, patch_first, change):
    inputs, found = tiny_inputs(family), []
    for order in (None, patch_first):
        model = tiny_model(family)
        if order:
            patch_model(model)
        change(model)
        if order is False:
            patch_model(model)
        found.append(output_and_gradients(model, inputs))
    assert relative_error(found[1][0], found[0][0]) < 1e-5
    assert largest_error(found[1][1], found[0][1]) < 1e-5
    assert fused_ops(model, **inputs)[1] == plain_ops(family)


@BOTH
def test_a_model_that_was_made_and_runs_in_inference_mode(family):
    inputs = tiny_inputs(family)
    with torch.inference_mode():
        model = tiny_model(family)
        expected = model(**inputs)[0]
        patch_model(model)
        found, ops = fused_ops(model, **inputs)
    assert relative_error(found[0], expected) < 1e-5
    assert ops == plain_ops(family)


@BOTH
def test_float16_is_at_least_as_close_to_float64_as_eager(family):
    errors = torch.zeros(2)
    for seed in range(3):
        model, inputs = tiny_model(family, seed).half(), tiny_inputs(family, seed=seed, dtype=torch.float16)
        truth = tiny_model(family, seed).double()
        truth.load_state_dict(model.state_dict())
        exact = truth(**{name: v.double() if v.is_floating_point() else v for name, v in inputs.items()})[0]
        eager = model(**inputs)[0]
        patch_model(model)
        found = model(**inputs)[0]
        assert found.dtype == torch.float16
        errors += torch.tensor([relative_error(value, exact) for value in (eager, found)])
    assert errors[1] < 1.02 * errors[0]
