"""Attention modules of the Wan family with inputs, and what a call of them gives: output and gradients."""

import torch
from diffusers.models.transformers import (
    transformer_chronoedit,
    transformer_skyreels_v2,
    transformer_wan,
    transformer_wan_animate,
)
from peft import LoraConfig, inject_adapter_in_model

from .tiny_models import relative_error

HEADS, HEAD_WIDTH, TOKENS = 3, 12, 7
CLASSES = {
    "Wan": (transformer_wan.WanAttention, transformer_wan.WanAttnProcessor),
    "Wan Animate": (transformer_wan_animate.WanAttention, transformer_wan_animate.WanAttnProcessor),
    "ChronoEdit": (transformer_chronoedit.WanAttention, transformer_chronoedit.WanAttnProcessor),
    "SkyReels": (transformer_skyreels_v2.SkyReelsV2Attention, transformer_skyreels_v2.SkyReelsV2AttnProcessor),
}


def make_attention(family="Wan", **options):
    torch.manual_seed(0)
    attention_class, processor_class = CLASSES[family]
    attn = attention_class(HEADS * HEAD_WIDTH, HEADS, HEAD_WIDTH, processor=processor_class(), **options)
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return attn


def make_inputs(dtype=torch.float32):
    torch.manual_seed(1)
    angles = torch.rand(1, TOKENS, 1, HEAD_WIDTH // 2).mul(6.3).repeat_interleave(2, dim=-1)
    x = torch.randn(2, TOKENS, HEADS * HEAD_WIDTH).to(dtype)
    return {"hidden_states": x.requires_grad_(), "rotary_emb": (angles.cos(), angles.sin())}


def run(call, attn=None, create_graph=False, autocast=False, **inputs):
    """The output, and the gradients of the inputs and of every parameter of `attn`, by default what is called.

    autocast: for the gradients alone.
    """
    out, attn = call(**inputs), call if attn is None else attn
    leaves = {"x": inputs["hidden_states"], **{name: p for name, p in attn.named_parameters() if p.requires_grad}}
    if "encoder_hidden_states" in inputs:
        leaves["text"] = inputs["encoder_hidden_states"]
    grad = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        gradients = torch.autograd.grad(out, list(leaves.values()), grad, allow_unused=True, create_graph=create_graph)
    return {"out": out, **{name: g for name, g in zip(leaves, gradients) if g is not None}}


def assert_close(found, expected, limit=1e-5):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.norm() > 1e-4:  # the gradient of to_k.bias is all rounding
            assert relative_error(found[name], tensor) < limit, name


def with_lora(attn, targets=("to_q", "to_k", "to_v")):
    config = LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
    return inject_adapter_in_model(config, attn.requires_grad_(False))
