"""Is a modulation fused that a helper of the model computes, as in the code of DiT, and only where it may be?"""

import functools
import pickle
import sys

import pytest
import torch
from support.compositions import fused_ops, largest_error
from support.odd_blocks import OddBlock
from support.tiny_models import relative_error
from torch import nn

from adaptiveload_hf import UserError, patch_model


def modulate(x, shift, scale):
    """As DiT, SiT, LightningDiT and DiffSynth-Studio have it."""
    return x * (1 + scale) + shift


def scaled_first(x, shift, scale):
    return (1 + scale) * x + shift


def in_two_steps(x, shift, scale):
    x = x * (1 + scale)
    return x + shift


def with_a_global(x, shift, scale):
    return x * (1 + torch.tanh(scale)) + shift


def with_a_default(x, shift, scale, more=0):
    return x * (1 + scale) + shift + more


def squared(x, shift, scale):
    return x * (1 + scale) + shift + x


def decorated(x, shift, scale):
    return x * (1 + scale) + shift


decorated = functools.wraps(decorated)(lambda *args: 2 * modulate(*args))


class DiTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(8, elementwise_affine=False, eps=1e-6)
        self.attn = nn.Linear(8, 8)
        self.norm2 = nn.LayerNorm(8)
        self.mlp = nn.Linear(8, 8)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(8, 48))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).unsqueeze(1).chunk(6, dim=-1)
        x = x + gate1 * self.attn(modulate(self.norm1(x), shift1, scale1))
        normed = self.norm2(x)
        return x + gate2 * self.mlp(modulate(normed, scale=scale2, shift=shift2))


class ScaledFirst(OddBlock):
    def forward(self, x, scale, shift, gate):
        return scaled_first(self.norm(x), shift, scale) + gate


class InTwoSteps(OddBlock):
    def forward(self, x, scale, shift, gate):
        return in_two_steps(self.norm(x), shift, scale) + gate


class WithAGlobal(OddBlock):
    def forward(self, x, scale, shift, gate):
        return with_a_global(self.norm(x), shift, scale) + gate


class WithADefault(OddBlock):
    def forward(self, x, scale, shift, gate):
        return with_a_default(self.norm(x), shift, scale) + gate


class Squared(OddBlock):
    def forward(self, x, scale, shift, gate):
        return squared(self.norm(x), shift, scale) + gate


class Decorated(OddBlock):
    def forward(self, x, scale, shift, gate):
        return decorated(self.norm(x), shift, scale) + gate


class Shadowed(OddBlock):
    def forward(self, x, scale, shift, gate):
        modulate = self.linear
        return modulate(self.norm(x)) + gate


class EffectInArgument(OddBlock):
    def forward(self, x, scale, shift, gate):
        return modulate(self.norm(x), self.linear(shift), scale) + gate


class Starred(OddBlock):
    def forward(self, x, scale, shift, gate):
        return modulate(self.norm(x), *(shift, scale)) + gate


ODD = [ScaledFirst, InTwoSteps, WithAGlobal, WithADefault, Squared, Decorated, Shadowed, EffectInArgument, Starred]
ALL = {"layer_norm_modulate": 1, "gate_residual_layer_norm_modulate": 1, "gate_residual": 1}


def inputs():
    torch.manual_seed(0)
    return torch.randn(2, 5, 8), torch.randn(2, 8)


def output_and_gradients(block):
    block.zero_grad()
    output = block(*inputs())
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    return output.detach(), {name: p.grad.clone() for name, p in block.named_parameters()}


def test_a_helper_of_one_expression_is_read_as_if_it_stood_in_the_forward():
    block = DiTBlock()
    expected, gradients = output_and_gradients(block)
    report = patch_model(block)
    assert "Fused: 2 of 2 modulations, 2 of 2 gates, 1 of 1 pairs." in str(report)
    for model in (block, pickle.loads(pickle.dumps(block)), torch.compile(block, backend="eager", fullgraph=True)):
        found, found_gradients = output_and_gradients(model)
        assert relative_error(found, expected) < 1e-6
        assert max(relative_error(g, t) for g, t in zip(found_gradients.values(), gradients.values())) < 1e-5
    assert largest_error(output_and_gradients(block)[1], gradients) < 1e-5
    assert fused_ops(block, *inputs())[1] == ALL
    assert "first call was equal" in str(report)


def test_a_helper_that_is_replaced_later_is_called(monkeypatch):
    block = DiTBlock()
    patch_model(block, verify="never")
    monkeypatch.setattr(sys.modules[__name__], "modulate", lambda x, shift, scale: x * scale)
    found, ran = fused_ops(block, *inputs())
    assert not ran
    torch.testing.assert_close(found, DiTBlock.forward(block, *inputs()))


def test_a_hook_on_a_norm_that_a_helper_is_given_runs_once():
    block, seen = DiTBlock(), []
    block.norm1.register_forward_hook(lambda *_: seen.append(1))
    patch_model(block, verify="never")
    assert fused_ops(block, *inputs())[1] == {op: n for op, n in ALL.items() if op != "layer_norm_modulate"}
    assert len(seen) == 1


@pytest.mark.parametrize("cls", ODD, ids=lambda cls: cls.__name__)
def test_other_helpers_are_called(cls):
    with pytest.raises(UserError, match="found nothing to patch"):
        patch_model(cls())
