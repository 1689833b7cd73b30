"""Are a residual and its next norm one op where that is proven, and as written where it is not?"""

import contextlib
import copy
import pickle

import pytest
import torch
from diffusers.models.normalization import FP32LayerNorm
from support.odd_pairs import ODD_PAIRS, Adjacent, OtherNormBetween, SumOfBranches
from support.tiny_models import output_and_gradients, relative_error, tiny_inputs, tiny_model
from torch import nn

from adaptiveload_hf import UserError, patch_model
from adaptiveload_hf.adaln import ops
from adaptiveload_hf.adaln.runtime import FusedOps

PAIR = "gate_residual_layer_norm_modulate"


@pytest.fixture
def pair_calls(monkeypatch):
    """The keyword options of each call that gives a residual and its norm."""
    calls, original = [], FusedOps.pair

    def counted(self, *args, **options):
        both = original(self, *args, **options)
        if both:
            calls.append(options)
        return both

    monkeypatch.setattr(FusedOps, "pair", counted)
    return calls


def inputs(dtype=torch.float32, modulation=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 8, generator=generator).to(dtype)
    rest = (torch.randn(2, 1, 8, generator=generator).to(modulation) for _ in range(3))
    return [tensor.requires_grad_() for tensor in (x, *rest)]


def run(block):
    """The output, and the gradients of all inputs and parameters; the block as it was before."""
    block, leaves = copy.deepcopy(block), inputs()
    output = block(leaves[0] * 1, *leaves[1:])
    (output * torch.linspace(-1, 1, output.numel()).reshape(output.shape)).sum().backward()
    return block.calls, [output.detach(), *(t.grad for t in (*leaves, *block.parameters()) if t.grad is not None)]


def report_of(block):
    return patch_model(block, verify="never").to_dict()["classes"][0]


@pytest.mark.parametrize("block_class", ODD_PAIRS, ids=lambda cls: cls.__name__)
def test_odd_blocks_compute_the_same_and_fuse_only_what_is_proven(block_class, pair_calls):
    torch.manual_seed(0)
    block = block_class()
    calls, expected = run(block)
    row = report_of(block)
    calls_now, found = run(block)
    assert calls_now == calls
    assert len(found) == len(expected)
    for value, truth in zip(found, expected):
        torch.testing.assert_close(value, truth, rtol=1e-5, atol=1e-5)
    assert row["pairs_fused"] == block_class.pairs
    assert block_class.reason in str(row["left_eager"])
    assert (row["pairs_found"] > block_class.pairs) == bool(block_class.reason)
    assert bool(pair_calls) == (block_class.pairs > 0 and block_class.__name__ != "SumThatBroadcasts")


@pytest.mark.parametrize("name", ["norm2", "norm3"])
@pytest.mark.parametrize(
    "place_hook",
    [
        lambda norm, hook: norm.register_forward_hook(hook),
        lambda norm, hook: norm.register_forward_pre_hook(lambda *args: hook(*args, None)),
        lambda norm, hook: setattr(norm, "forward", lambda x: hook(norm, x, FP32LayerNorm.forward(norm, x) * 2)),
    ],
    ids=["forward hook", "pre-hook", "own forward"],
)
def test_a_hooked_norm_is_called_and_its_residual_still_fused(name, place_hook, pair_calls):
    model = tiny_model("wan")
    seen = []

    def hook(module, _, output):
        seen.append(module)
        return output

    place_hook(getattr(model.blocks[0], name), hook)
    output, gradients = output_and_gradients(model, tiny_inputs("wan"))
    assert seen == [getattr(model.blocks[0], name)]
    patch_model(model)
    patched_output, patched_gradients = output_and_gradients(model, tiny_inputs("wan"))
    assert seen == [getattr(model.blocks[0], name)] * 2
    assert len(pair_calls) == 3  # of four
    assert relative_error(patched_output, output) < 1e-5
    for key, gradient in gradients.items():
        assert relative_error(patched_gradients[key], gradient) < 1e-5 or gradient.norm() < 1e-5, key


def test_a_hook_on_a_norm_in_between_runs_before_the_norm(pair_calls):
    block, order = OtherNormBetween(), []
    patch_model(block, verify="never")
    block.other.register_forward_hook(lambda *_: order.append("other"))
    block(*inputs())
    assert order == ["other"]
    assert not pair_calls


@pytest.mark.parametrize("modulation", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("norm_class", [nn.LayerNorm, FP32LayerNorm])
def test_both_results_have_eagers_dtypes_and_values(norm_class, weight, dtype, modulation, pair_calls):
    block = PairOfAnyNorm(norm_class(8, elementwise_affine=weight is not None).to(weight))
    x, *rest = inputs(dtype, modulation)
    residual_dtype = torch.promote_types(dtype, modulation)
    if norm_class is nn.LayerNorm and weight not in (None, residual_dtype):
        patch_model(block, verify="never")
        with contextlib.suppress(RuntimeError):  # as eager, which takes some mixed dtypes
            block(x, x, *rest)
        assert not pair_calls
        return
    expected = block(x, x, *rest)
    patch_model(block, verify="never")
    found = block(x, x, *rest)
    assert len(pair_calls) == 1
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    lowest = torch.bfloat16 in (dtype, modulation, weight)
    for value, truth in zip(found, expected):
        tolerance = 0.05 if lowest else 1e-5
        torch.testing.assert_close(value.float(), truth.float(), rtol=tolerance, atol=tolerance)


class PairOfAnyNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, y, scale, shift, gate):
        x = x + gate * y
        return x, self.norm(x) * (1 + scale) + shift


def test_an_rms_norm_makes_no_pair(pair_calls):
    block = PairOfAnyNorm(nn.RMSNorm(8, eps=1e-6))
    row = report_of(block)
    assert (row["pairs_found"], row["gates_fused"], row["modulations_fused"]) == (0, 1, 1)
    block.norm = nn.LayerNorm(8)
    patch_model(block, verify="never")
    block.norm = nn.RMSNorm(8, eps=1e-6)  # after patching
    x, *rest = inputs()
    torch.testing.assert_close(block(x, x, *rest), PairOfAnyNorm.forward(block, x, x, *rest))
    assert not pair_calls


def test_the_statistics_are_those_of_the_rounded_residual(pair_calls):
    block = PairOfAnyNorm(FP32LayerNorm(8, elementwise_affine=False))
    x, *rest = inputs(torch.bfloat16, torch.bfloat16)
    patch_model(block, verify="never")
    residual, normed = block(x * 100, x, *rest)
    scale, shift = rest[:2]
    alone = ops.layer_norm_modulate(residual, scale, shift, eps=block.norm.eps)
    assert pair_calls
    assert torch.equal(normed, alone)


def test_pairs_are_declined_by_leaving_their_op_out(pair_calls):
    row = patch_model(Adjacent(), ops=["layer_norm_modulate", "gate_residual"], verify="never").to_dict()["classes"][0]
    assert (row["pairs_found"], row["modulations_fused"], row["gates_fused"]) == (0, 1, 2)
    with pytest.raises(UserError, match="needs layer_norm_modulate and gate_residual beside it"):
        patch_model(Adjacent(), ops=PAIR)


def test_each_branch_runs_once_and_in_order_when_the_pair_does_not_apply(pair_calls):
    block = SumOfBranches().double()
    leaves = [tensor.detach().double() for tensor in inputs()]
    expected = block(*leaves)
    patch_model(block, verify="never")
    block.calls.clear()
    torch.testing.assert_close(block(*leaves), expected)
    assert block.calls == ["branch", "branch"]
    assert not pair_calls


def test_a_pickled_and_a_copied_block_keep_their_pairs(pair_calls):
    model = tiny_model("wan")
    patch_model(model)
    expected = model(**tiny_inputs("wan"), return_dict=False)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        pair_calls.clear()
        assert torch.equal(other(**tiny_inputs("wan"), return_dict=False)[0], expected)
        assert len(pair_calls) == 4
