"""Does a patched model follow what its owner does to it, or to its classes, after the patch?"""

import sys
import types

import pytest
import torch
from diffusers.models.transformers import transformer_wan
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from support.compositions import fused_ops, largest_error
from support.model_configs import CASES, tiny_case
from support.model_runs import forward
from support.tiny_models import output_and_gradients, relative_error, tiny_inputs, tiny_model
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from adaptiveload_hf import patch_model, unpatch_model
from adaptiveload_hf.adaln import ops


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale, shift, gate):
        y = self.norm(x) * (1 + scale) + shift
        return x + gate * self.linear(y)


def tensors():
    torch.manual_seed(0)
    return [torch.randn(2, 5, 8), *(torch.randn(2, 1, 8) for _ in range(3))]


def check_literal(block, fused=()):
    """The patched block gives what its class gives now, with no other ops than `fused`."""
    expected = type(block).forward(block, *tensors())
    found, ran = fused_ops(block, *tensors())
    assert set(ran) == set(fused)
    torch.testing.assert_close(found, expected)


def test_a_forward_that_the_class_gets_later_runs(monkeypatch):
    block = Block()
    patch_model(block, verify="never")
    monkeypatch.setattr(Block, "forward", lambda self, x, *others: x * 2)
    check_literal(block)


@pytest.mark.parametrize(
    ("owner", "name"), [(nn.LayerNorm, "forward"), (nn.functional, "layer_norm"), (nn.functional, "rms_norm")]
)
def test_a_norm_that_is_replaced_later_for_all_models_is_called(owner, name, monkeypatch):
    block = Block()
    patch_model(block, verify="never")
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: original(*args) + 1)
    check_literal(block, fused=["gate_residual"])


def test_what_replaces_a_norm_need_not_be_a_module():
    block = Block()
    patch_model(block, verify="never")
    del block.norm
    block.norm = lambda x: nn.functional.layer_norm(x, (8,)) * 2
    check_literal(block, fused=["gate_residual"])


class DoublesNorms(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is nn.functional.layer_norm else result


def test_a_mode_that_sees_torchs_functions_sees_those_of_the_original():
    block = Block()
    expected = block(*tensors())
    patch_model(block, verify="never")
    with DoublesNorms():
        check_literal(block)
    with torch.device("cpu"):  # which is such a mode, too, but changes no result
        found, ran = fused_ops(block, *tensors())
    assert set(ran) == {"layer_norm_modulate", "gate_residual"}
    torch.testing.assert_close(found, expected)


def test_a_helper_that_an_instance_gets_later_is_called():
    model, inputs = tiny_case("Qwen-Image")
    patch_model(model)

    def twice(self, x, mod_params, index=None):
        modulated, gate = type(self)._modulate(self, x, mod_params, index)
        return 2 * modulated, gate

    for block in model.transformer_blocks:
        block._modulate = types.MethodType(twice, block)
    (found,) = forward(model, inputs)
    unpatch_model(model)
    assert relative_error(found, forward(model, inputs)[0]) < 1e-5


@pytest.mark.skipif("Kandinsky 6" not in CASES, reason="an older diffusers")
def test_a_helper_that_a_module_gets_later_is_called(monkeypatch):
    model, inputs = tiny_case("Kandinsky 6")
    patch_model(model)
    helpers = vars(sys.modules[type(model).__module__])
    original = helpers["apply_gate_sum"]
    monkeypatch.setitem(helpers, "apply_gate_sum", lambda x, out, gate: original(x, 2 * out, gate))
    found = forward(model, inputs)[0]
    unpatch_model(model)
    assert relative_error(found, forward(model, inputs)[0]) < 1e-5


def test_an_attention_processor_whose_code_is_replaced_later_runs_by_itself(monkeypatch):
    model = tiny_model("wan")
    patch_model(model)
    original = WanAttnProcessor.__call__

    def without_turning(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        return original(self, attn, hidden_states, encoder_hidden_states, attention_mask)

    monkeypatch.setattr(WanAttnProcessor, "__call__", without_turning)
    found = model(**tiny_inputs("wan"))[0]
    unpatch_model(model)
    assert relative_error(found, model(**tiny_inputs("wan"))[0]) < 1e-5
    assert patch_model(model).to_dict()["classes"][-1]["attention_fused"] == 0, "a replaced processor is not stock"


def test_an_attention_of_the_users_own_in_place_of_pytorchs_is_called_as_diffusers_calls_it(monkeypatch):
    attention = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional,
        "scaled_dot_product_attention",
        lambda *, query, key, value, attn_mask, **others: attention(query, 2 * key, value, attn_mask),
    )
    model, inputs = tiny_model("wan"), tiny_inputs("wan")
    expected = model(**inputs)[0]
    patch_model(model)
    assert relative_error(model(**inputs)[0], expected) < 1e-5


def of_doubled_values(project):
    def projections(attn, hidden_states, encoder_hidden_states):
        query, key, value = project(attn, hidden_states, encoder_hidden_states)
        return query, key, 2 * value

    return projections


@pytest.mark.parametrize(
    ("owner", "name", "replaced"),
    [
        (nn.functional, "linear", lambda linear: lambda x, *others: linear(x, *others).tanh()),
        (transformer_wan, "_get_qkv_projections", of_doubled_values),
    ],
    ids=["linear", "projections"],
)
def test_what_makes_queries_keys_and_values_is_called_if_it_is_replaced_later(owner, name, replaced, monkeypatch):
    model, inputs = tiny_model("wan"), tiny_inputs("wan")
    patch_model(model)
    monkeypatch.setattr(owner, name, replaced(getattr(owner, name)))
    output, gradients = output_and_gradients(model, inputs)
    unpatch_model(model)
    expected, expected_gradients = output_and_gradients(model, inputs)
    assert relative_error(output, expected) < 1e-5
    assert largest_error(gradients, expected_gradients) < 1e-5


def test_a_function_around_a_patched_forward_runs_the_original_after_unpatching():
    block = Block()
    patch_model(block, verify="never")
    inner, seen = block.forward, []
    block.forward = lambda *args: seen.append(1) or inner(*args)
    assert set(fused_ops(block, *tensors())[1]) == {"layer_norm_modulate", "gate_residual"}
    unpatch_model(block)
    check_literal(block)
    assert len(seen) == 2


def test_unpatching_and_patching_parts_leaves_nothing_behind():
    model = tiny_model("wan")
    before = {name: list(vars(module)) for name, module in model.named_modules()}
    expected = model(**tiny_inputs("wan"))[0]
    patch_model(model)
    patch_model(model, ops="gate_residual", backend="reference")
    unpatch_model(model.blocks[0])
    assert set(fused_ops(model, **tiny_inputs("wan"))[1]) == set()  # the reference is no op of torch's
    patch_model(model.blocks[0])
    assert relative_error(model(**tiny_inputs("wan"))[0], expected) < 1e-5
    unpatch_model(model)
    assert {name: list(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(model(**tiny_inputs("wan"))[0], expected)


def test_a_model_patched_while_half_of_it_is_on_meta_is_right_once_it_is_loaded():
    model = tiny_model("wan")
    model.blocks[1].to("meta")
    patch_model(model)
    model.blocks[1].to_empty(device="cpu")
    model.blocks[1].load_state_dict(tiny_model("wan").blocks[1].state_dict())
    found, ran = fused_ops(model, **tiny_inputs("wan"))
    assert relative_error(found[0], tiny_model("wan")(**tiny_inputs("wan"))[0]) < 1e-5
    assert ran["gate_residual_layer_norm_modulate"] == 4


# ------------------------------------------------------------------------------------------ the first call


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.bank, self.named, self.cache = 0, [], {}, torch.zeros(2, 5, 8)
        self.batch_norm = nn.BatchNorm1d(5)

    def forward(self, y, beside):
        self.calls += 1
        self.bank.append(y.detach())
        self.named[self.calls] = y.detach()
        self.cache.add_(y.detach())
        beside.seen.append(self.calls)
        return self.batch_norm(y)


class Remembers(Block):
    def __init__(self):
        super().__init__()
        self.memory = Memory()

    def forward(self, x, scale, shift, beside):
        return self.memory(self.norm(x) * (1 + scale) + shift, beside)


def test_the_comparison_of_the_first_call_leaves_nothing_behind():
    x, scale, shift, _ = tensors()
    states = []
    for patch in (False, True):
        block, beside = Remembers(), types.SimpleNamespace(seen=[])
        if patch:
            report = patch_model(block)
        block(x, scale, shift, beside)
        memory = block.memory
        states.append([memory.calls, len(memory.bank), list(memory.named), beside.seen, memory.cache])
        states[-1] += [*memory.batch_norm.buffers()]
    assert "first call was equal" in str(report)
    torch.testing.assert_close(states[1], states[0])


# ------------------------------------------------------------------------------- what the ops do not support


@pytest.mark.parametrize("op", ["layer_norm_modulate", "gate_residual"])
def test_forward_mode_differentiation_runs_the_original_and_the_ops_refuse_it(op):
    block = Block().requires_grad_(False)
    x, *others = tensors()
    tangents = []
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for patch in (False, True):
            if patch:
                patch_model(block, verify="never")
            tangents.append(forward_ad.unpack_dual(block(dual, *others)).tangent)
        with pytest.raises(NotImplementedError, match="jvp"):
            getattr(ops, op)(dual, dual)
    torch.testing.assert_close(tangents[1], tangents[0])


def test_a_traced_block_is_the_original():
    block = Block()
    patch_model(block, verify="never")
    traced = torch.jit.trace(block, tensors())
    torch.testing.assert_close(traced(*tensors()), block(*tensors()))


class Sums(Block):
    def forward(self, x, scale, shift, gate):
        total = 0
        for _ in range(2):
            total = total + gate * self.linear(x)
        return total


def test_a_sum_that_starts_as_a_number_is_computed_as_written():
    block = Sums()
    expected = block(*tensors())
    patch_model(block, verify="never")
    torch.testing.assert_close(block(*tensors()), expected)
