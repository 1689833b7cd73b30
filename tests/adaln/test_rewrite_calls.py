"""Guard 3: does each call check that the fused op may stand for the expression?"""

import warnings

import pytest
import torch
from diffusers.models.normalization import FP32LayerNorm, RMSNorm
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm
from support.compositions import fused_ops
from support.odd_norms import DeviceOfNorm
from torch import nn
from torch.nn.modules import module as torch_module

from adaptiveload_hf import patch_model
from adaptiveload_hf.adaln import first_call, registry


class Inline(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.norm = norm or nn.LayerNorm(8, elementwise_affine=False)

    def forward(self, x, scale, shift, gate):
        return x + gate * (self.norm(x) * (1 + scale) + shift)


class Held(Inline):
    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        y = normed * (1 + scale) + shift
        return x + gate * y


class Cast(Inline):
    def forward(self, x, scale, shift, gate):
        y = (self.norm(x.float()) * (1 + scale) + shift).type_as(x)
        return (x.float() + y.float() * gate).type_as(x)


BLOCKS = pytest.mark.parametrize("block_class", [Inline, Held, Cast])


def tensors(rows=1, dtype=torch.float32, modulation=torch.float32, batch=2):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 8, generator=generator).to(dtype)
    rest = (torch.randn(batch, rows, 8, generator=generator).to(modulation) for _ in range(3))
    return [x, *rest]


def check_literal(block, arguments, op_calls, op="layer_norm_modulate"):
    """Patched, the block gives bit for bit what it gives unpatched, without the op."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = type(block).forward(block, *arguments)
        found = block(*arguments)
    assert op not in op_calls
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@BLOCKS
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_that_broadcast_are_fused(block_class, rows, batch, op_calls):
    block = block_class()
    arguments = tensors(rows, batch=batch)
    expected = block(*arguments)
    patch_model(block, verify="never")
    torch.testing.assert_close(block(*arguments), expected)
    assert op_calls == ["layer_norm_modulate", "gate_residual"]


@BLOCKS
@pytest.mark.parametrize(
    "place_hook",
    [
        lambda norm, hook: norm.register_forward_hook(hook),
        lambda norm, hook: norm.register_forward_pre_hook(hook),
        lambda norm, hook: norm.register_full_backward_hook(hook),
        lambda norm, hook: norm.register_full_backward_pre_hook(hook),
        lambda norm, hook: torch_module.register_module_forward_hook(hook),
        lambda norm, hook: torch_module.register_module_forward_pre_hook(hook),
        lambda norm, hook: torch_module.register_module_full_backward_hook(hook),
    ],
)
def test_a_hook_on_the_norm_or_on_all_modules_is_called(block_class, place_hook, op_calls):
    block = block_class()
    patch_model(block, verify="never")
    seen = []
    arguments = [tensor.requires_grad_() for tensor in tensors()]
    handle = place_hook(block.norm, lambda module, *_: seen.append(module))
    try:
        block(*arguments).sum().backward()
    finally:
        handle.remove()
    assert block.norm in seen
    assert "layer_norm_modulate" not in op_calls
    block(*arguments)
    assert "layer_norm_modulate" in op_calls


@BLOCKS
def test_an_own_forward_of_the_norm_instance_is_called(block_class, op_calls):
    block = block_class()
    patch_model(block, verify="never")
    block.norm.forward = lambda x: x * 0
    _, scale, shift, gate = arguments = tensors()
    torch.testing.assert_close(block(*arguments), arguments[0] + gate * shift)
    assert "layer_norm_modulate" not in op_calls
    del scale


class OwnNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + 1


@BLOCKS
def test_a_norm_swapped_for_another_class_after_patching_is_called(block_class, op_calls):
    block = block_class()
    patch_model(block, verify="never")
    block.norm = OwnNorm(8)
    check_literal(block, tensors(), op_calls)


@BLOCKS
@pytest.mark.parametrize(
    "change",
    [
        lambda x, scale, shift, gate: (x.double(), scale.double(), shift.double(), gate.double()),
        lambda x, scale, shift, gate: (x[0], scale, shift, gate),
        lambda x, scale, shift, gate: (x[:, None], scale, shift, gate),
        lambda x, scale, shift, gate: (x[:1], scale, shift, gate),
        lambda x, scale, shift, gate: (x, scale[None], shift, gate),
        lambda x, scale, shift, gate: (x, scale, shift[..., :1], gate),
        lambda x, scale, shift, gate: (x.to("meta"), scale.to("meta"), shift.to("meta"), gate.to("meta")),
    ],
    ids=["float64", "2-D x", "4-D x", "x broadcast", "4-D scale", "narrow shift", "meta"],
)
def test_what_the_ops_do_not_take_runs_as_written(block_class, change, op_calls):
    block = block_class()
    patch_model(block, verify="never")
    check_literal(block, change(*tensors()), op_calls)


def test_what_a_norm_elsewhere_gives_says_where_its_modulation_goes():
    block = DeviceOfNorm()
    patch_model(block, verify="never")
    block.norm.register_forward_hook(lambda norm, inputs, output: output.to("meta"))
    assert block(*tensors()).is_meta


@BLOCKS
def test_a_shape_that_eager_refuses_is_refused_as_by_eager(block_class):
    block = block_class()
    patch_model(block, verify="never")
    x, _, shift, gate = tensors()
    frames = torch.randn(2, 3, 8)  # the op would take 3 rows for 6 tokens
    with pytest.raises(RuntimeError, match="must match the size"):
        block(torch.cat([x, x[:, :1]], 1), frames, shift, gate)


@pytest.mark.parametrize(
    ("norm", "weight"),
    [
        (nn.LayerNorm(8, eps=1e-5), None),
        (nn.LayerNorm(8, eps=1e-5, bias=False), None),
        (FP32LayerNorm(8, eps=1e-5), None),
        (FP32LayerNorm(8, eps=1e-5), torch.bfloat16),
        (nn.RMSNorm(8, eps=1e-5), None),
        (RMSNorm(8, eps=1e-5), None),
        (RMSNorm(8, eps=1e-5), torch.bfloat16),
        (RMSNorm(0, eps=1e-5, elementwise_affine=False), None),
        (Krea2RMSNorm(8), None),
        (Krea2RMSNorm(8), torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("modulation", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_norm_gives_eagers_dtype_and_values(norm, weight, dtype, modulation, op_calls):
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    norm = norm.to(weight or (dtype if type(norm) in (nn.LayerNorm, nn.RMSNorm) else torch.float32))
    block = Inline(norm)
    arguments = tensors(dtype=dtype, modulation=modulation)
    expected = block(*arguments)
    patch_model(block, verify="never")
    found = block(*arguments)
    assert found.dtype == expected.dtype
    assert len(op_calls) == 2
    lowest = torch.bfloat16 in (dtype, modulation, weight)
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=0.03 if lowest else 1e-5, atol=0.06 if lowest else 1e-5
    )


@pytest.mark.parametrize("norm", [RMSNorm(8, eps=1e-5, bias=True), nn.RMSNorm(8)], ids=str)
def test_norms_that_the_ops_do_not_cover_run_as_written(norm, op_calls):
    block = Inline(norm)
    patch_model(block, verify="never")
    check_literal(block, tensors(), op_calls, op="rms_norm_modulate")


def test_a_norm_whose_weight_has_another_dtype_runs_as_written(op_calls):
    block = Inline(nn.LayerNorm(8))
    patch_model(block, verify="never")
    check_literal(block, tensors(dtype=torch.bfloat16), op_calls)


class CastNormOnly(Inline):
    def forward(self, x, scale, shift, gate):
        normed = self.norm(x.float())
        return (normed * (1 + scale) + shift).to(x.dtype)


@pytest.mark.parametrize("block_class", [Cast, CastNormOnly])
def test_cast_back_gives_the_dtype_of_x(block_class, op_calls):
    block = block_class()
    arguments = tensors(dtype=torch.bfloat16)
    expected = block(*arguments)
    patch_model(block, verify="never")
    found = block(*arguments)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert op_calls[:1] == ["layer_norm_modulate"]
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


# ------------------------------------------------------------------------------------- first-call comparison


def broken(name, *args, original=registry.call):
    y, stats = original(name, *args)
    return y * 1.5, stats


class NeverSeen(Inline):
    def forward(self, x, scale, shift, gate):
        return self.norm(x) * (1 + scale) + shift + gate


class NeverSeenEither(Inline):
    def forward(self, x, scale, shift, gate):
        return nn.functional.dropout(self.norm(x) * (1 + scale) + shift, 0.5)


def test_an_untested_class_that_differs_runs_its_original_and_warns_once(monkeypatch):
    block = NeverSeen()
    arguments = tensors()
    expected = block(*arguments)
    report = patch_model(block)
    assert "not compared yet" in str(report)
    monkeypatch.setattr(registry, "call", broken)
    with pytest.warns(UserWarning, match="NeverSeen differs from the original, which runs instead"):
        found = block(*arguments)
    assert torch.equal(found, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(block(*arguments), expected)
        other = NeverSeen()
        assert "first call differed" in str(patch_model(other))
        assert torch.equal(other(*arguments), expected)
    assert report.to_dict()["classes"][0]["modulations_fused"] == 0


def test_an_untested_class_whose_result_has_another_dtype_differs(monkeypatch):
    block, call = NeverSeen(), registry.call
    patch_model(block, verify="always")
    monkeypatch.setattr(registry, "call", lambda *args: [made.double() for made in call(*args)])
    with pytest.warns(UserWarning, match="NeverSeen differs from the original"):
        assert block(*tensors()).dtype == torch.float32


def test_the_comparison_uses_the_same_random_numbers_and_leaves_none_used_up():
    block = NeverSeenEither()
    arguments = tensors()
    torch.manual_seed(3)
    expected = block(*arguments)
    report = patch_model(block)
    torch.manual_seed(3)
    torch.testing.assert_close(block(*arguments), expected)
    assert "first call was equal" in str(report)


class Passing(Inline):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale, shift, gate, mask):
        return self.linear(self.norm(x) * (1 + scale) + shift), mask


def test_a_first_call_without_numbers_settles_that_the_original_runs_and_no_later_call_runs_twice():
    block, arguments = Held(), tensors()
    report = patch_model(block, verify="always")
    with pytest.warns(UserWarning, match="could not be compared with the original, which runs instead"):
        assert torch.isnan(block(arguments[0] * torch.nan, *arguments[1:])).all()
    assert "first call could not be compared" in str(report)
    assert report.to_dict()["classes"][0]["modulations_fused"] == 0
    assert torch.equal(block(*arguments), Held.forward(block, *arguments))
    block = Held()
    assert "not compared, as asked" in str(patch_model(block, verify="never"))
    assert fused_ops(block, *arguments)[1]


def test_a_first_call_with_numbers_that_are_not_finite_is_compared_once():
    block, (x, *rest) = Passing(), tensors()
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    runs = []
    block.linear.register_forward_hook(lambda *_: runs.append(1))
    report = patch_model(block)
    x[0, 0] = torch.nan  # of one row
    for _ in range(3):
        assert torch.equal(block(x, *rest, mask)[1], mask)
    assert "first call was equal" in str(report)
    assert len(runs) == 3 + 2  # both forwards, once


def test_a_tested_source_is_not_compared(monkeypatch):
    from support.tiny_models import tiny_inputs, tiny_model

    model = tiny_model("wan")
    report = patch_model(model)
    monkeypatch.setattr(first_call, "_compare", lambda *_: pytest.fail("compared"))
    model(**tiny_inputs("wan"))
    assert "tested source" in str(report)
