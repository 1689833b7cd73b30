"""Are queries, keys and values of one operation those of the stock processor, with all that autograd does to them?"""

import pytest
import torch
from support.wan_attention import HEAD_WIDTH, HEADS, TOKENS, assert_close, make_attention, make_inputs, run, with_lora
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError, checkpoint

from adaptiveload_hf import AdaptiveLoadAttnProcessor
from adaptiveload_hf.adaln import queries


@pytest.fixture
def made_together(monkeypatch):
    """Collects the operation's calls."""
    calls, original = [], queries._apply
    monkeypatch.setattr(queries, "_apply", lambda *args: calls.append(1) or original(*args))
    return calls


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("text", [False, True], ids=["self-attention", "cross-attention"])
def test_second_derivatives_equal_the_stock_ones(text, lora, made_together):
    attn, inputs = make_attention(**{"cross_attention_dim_head": HEAD_WIDTH} if text else {}), make_inputs()
    if text:
        text = torch.randn(2, 5, HEADS * HEAD_WIDTH, requires_grad=True)
        inputs |= {"rotary_emb": None, "encoder_hidden_states": text}
    if lora:
        attn = with_lora(attn)

    def of_gradients():
        with sdpa_kernel(SDPBackend.MATH):
            first = run(attn, create_graph=True, **inputs)
            return run(lambda **_: sum(g.square().sum() for name, g in first.items() if name != "out"), attn, **inputs)

    expected = of_gradients()
    attn.set_processor(AdaptiveLoadAttnProcessor(attn.processor))
    assert_close(of_gradients(), expected, 1e-4)
    assert made_together


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_a_backward_under_autocast_of_a_forward_without_it_is_the_stock_one_but_for_rounding(lora, made_together):
    attn, inputs = make_attention(), make_inputs()
    attn = with_lora(attn) if lora else attn
    expected = run(attn, autocast=True, **inputs)
    attn.set_processor(AdaptiveLoadAttnProcessor())
    assert_close(run(attn, autocast=True, **inputs), expected, 2e-2)
    assert made_together


def test_a_text_without_tokens_is_attended_to_as_the_stock_processor_does(made_together):
    attn, inputs = make_attention(cross_attention_dim_head=HEAD_WIDTH), make_inputs() | {"rotary_emb": None}
    inputs["encoder_hidden_states"] = torch.zeros(2, 0, HEADS * HEAD_WIDTH, requires_grad=True)
    expected = run(attn, **inputs)
    attn.set_processor(AdaptiveLoadAttnProcessor())
    assert_close(run(attn, **inputs), expected)
    assert made_together


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_it_runs_in_inference_mode_with_tables_made_there(lora, made_together):
    attn = with_lora(make_attention()) if lora else make_attention()
    with torch.inference_mode():
        inputs = make_inputs()
        expected = attn(**inputs)
        attn.set_processor(AdaptiveLoadAttnProcessor())
        torch.testing.assert_close(attn(**inputs), expected)
    assert made_together


def kept_for_backward(attn, inputs):
    """The storages, without those of parameters and of row statistics."""
    kept, parameters = {}, {p.data_ptr() for p in attn.parameters()}

    def keep(tensor):
        if tensor.numel() > 2 * TOKENS:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, or its place would be another's
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attn(**inputs)
    return [tensor.untyped_storage() for place, tensor in kept.items() if place not in parameters]


@pytest.mark.parametrize("trained", [["to_q"], ["to_k"], ["to_v"], ["to_q", "to_v"], []], ids=str)
@pytest.mark.parametrize("text", [False, True], ids=["self-attention", "cross-attention"])
def test_no_more_is_kept_for_backward_than_by_the_stock_processor(text, trained):
    attn = make_attention(**{"cross_attention_dim_head": HEAD_WIDTH} if text else {}).requires_grad_(False)
    inputs = make_inputs()
    for name in trained:  # the first block gets an input that needs no gradient
        getattr(attn, name).weight.requires_grad_()
        inputs["hidden_states"].requires_grad_(False)
    if text:
        inputs |= {"rotary_emb": None, "encoder_hidden_states": torch.randn(2, 5, HEADS * HEAD_WIDTH)}
    stock = sum(storage.nbytes() for storage in kept_for_backward(attn, inputs))
    attn.set_processor(AdaptiveLoadAttnProcessor())
    assert 0 < sum(storage.nbytes() for storage in kept_for_backward(attn, inputs)) <= stock


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_checkpointing_has_no_hooks_to_call_for_parameters_and_one_of_the_rotary_tables(lora):
    attn, inputs, saved = make_attention(), make_inputs(), set()
    attn = with_lora(attn) if lora else attn
    attn.set_processor(AdaptiveLoadAttnProcessor())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.add(t.data_ptr()) or t, lambda t: t):
        attn(**inputs)
    known = dict(attn.named_parameters()) | dict(zip(("cos", "sin"), inputs["rotary_emb"]))
    assert inputs["hidden_states"].data_ptr() in saved
    assert [name for name, tensor in known.items() if tensor.data_ptr() in saved] == ["to_out.0.weight", "cos"]


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_checkpointing_refuses_tables_of_another_dtype_when_it_recomputes(stock):
    attn, inputs = make_attention(), make_inputs()
    if not stock:
        attn.set_processor(AdaptiveLoadAttnProcessor())
    tables = inputs["rotary_emb"]
    calls = iter([tables, tuple(table.bfloat16() for table in tables)])
    out = checkpoint(lambda x: attn(x, rotary_emb=next(calls)), inputs["hidden_states"], use_reentrant=False)
    with pytest.raises(CheckpointError, match="different metadata"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["to_q.weight", "norm_k.weight", "sin"])
@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_a_tensor_changed_in_place_before_backward_is_refused_as_autograd_does(stock, name):
    attn, inputs = make_attention(), make_inputs()
    if not stock:
        attn.set_processor(AdaptiveLoadAttnProcessor())
    out = attn(**inputs)
    with torch.no_grad():
        (inputs["rotary_emb"][1] if name == "sin" else attn.get_parameter(name)).mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* expected version"):
        out.sum().backward()


def test_an_adapter_changed_in_place_before_backward_is_refused_under_checkpointing_too():
    attn, inputs = with_lora(make_attention()), make_inputs()
    attn.set_processor(AdaptiveLoadAttnProcessor())
    out = checkpoint(attn, use_reentrant=False, **inputs)
    with torch.no_grad():
        attn.to_q.lora_A.default.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* expected version"):
        out.sum().backward()


def test_a_norm_of_another_width_is_refused_as_the_stock_processor_refuses_it():
    attn = make_attention()
    attn.norm_q = nn.RMSNorm(HEAD_WIDTH, eps=1e-6)
    attn.set_processor(AdaptiveLoadAttnProcessor())
    with pytest.raises(RuntimeError, match=rf"normalized_shape=\[{HEAD_WIDTH}\]"):
        attn(**make_inputs())


def test_many_gradients_at_once_are_refused_with_the_name_of_an_op():
    attn, inputs = make_attention(), make_inputs()
    attn.set_processor(AdaptiveLoadAttnProcessor())
    with sdpa_kernel(SDPBackend.MATH):
        out = attn(**inputs)
        with pytest.raises(
            RuntimeError, match="Batching rule not implemented for adaptiveload::rms_norm_rope_backward"
        ):
            torch.autograd.grad(out, inputs["hidden_states"], torch.ones(2, *out.shape), is_grads_batched=True)
