"""Which models does block_speed.py measure? Real classes and widths, a few layers, random weights and latents."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import (
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from inductor_options import correct_options
from peft import LoraConfig
from torch import nn

from adaptiveload_hf import patch_model

DEVICE = "cuda"
WIDTHS = {"1.3B": (12, 8960), "14B": (40, 13824)}  # heads of 128, width of the feed-forward
LATENTS = {7800: (5, 60, 104), 32760: (21, 60, 104)}
CONTENDERS = ("eager", "compile", "patched", "patched + compile")
CORRECT = "compile, correct"  # with `correct_options`
COLUMNS = (*CONTENDERS[:2], CORRECT, *CONTENDERS[2:])
WITHOUT_COMPILE = ("eager", "patched")
SHORT = 48_000  # tokens at which eager's memory is the budget for the longest


@dataclass(frozen=True)
class Case:
    """One model and one size of its inputs.

    Args:
        name, tokens: as in the table; tokens of the image or video stream.
        make: gives the model on the GPU, and the keyword arguments of its forward.
        training: "full", also with checkpointing, or "LoRA" (rank 32 on attention, the rest frozen).
    """

    name: str
    tokens: int
    make: Callable[[], tuple[nn.Module, dict]]
    training: str = "full"


def wan_cases(training: str) -> list[Case]:
    """Two layers of each width at each length, the short ones first."""
    return [
        Case(f"Wan {width}", tokens, lambda width=width, latent=latent: (wan(width, 2), wan_inputs(latent)), training)
        for tokens, latent in LATENTS.items()
        for width in WIDTHS
    ]


def family_cases() -> list[Case]:
    """Blocks of other families, at about the lengths that they are trained at."""
    return [
        Case("SD3.5 medium", 4 * 4096, _sd35),
        Case("Flux.1", 4096, _flux),
        Case("HunyuanVideo", 7800, _hunyuan_video),
    ]


def whole_case() -> Case:
    """All 30 layers of 1.3B on a tiny input."""
    return Case("Wan 1.3B, 30 layers", 256, _whole, "full, checkpointing")


def _whole() -> tuple[nn.Module, dict]:
    model = wan("1.3B", 30)
    model.enable_gradient_checkpointing()
    return model, wan_inputs((1, 32, 32))


def wan(width: str, layers: int) -> WanTransformer3DModel:
    """In bfloat16 as `from_pretrained` loads it: norms and modulation tables in float32."""
    heads, ffn = WIDTHS[width]
    sizes = {"num_attention_heads": heads, "attention_head_dim": 128, "ffn_dim": ffn, "num_layers": layers}
    return _on_gpu(WanTransformer3DModel, **sizes)


def wan_inputs(latent: tuple[int, int, int]) -> dict:
    """A sample of frames x height x width."""
    states = {"hidden_states": _normal(1, 16, *latent), "encoder_hidden_states": _normal(1, 512, 4096)}
    return {**states, "timestep": torch.tensor([500.0], device=DEVICE)}


def _sd35() -> tuple[nn.Module, dict]:
    """One block with dual attention, one without, and the last, which leaves the text alone. Four images."""
    sizes = {"num_attention_heads": 24, "attention_head_dim": 64, "caption_projection_dim": 1536, "num_layers": 3}
    inputs = {"sample_size": 128, "in_channels": 16, "out_channels": 16, "pos_embed_max_size": 384}
    model = _on_gpu(SD3Transformer2DModel, **sizes, **inputs, dual_attention_layers=(0,), qk_norm="rms_norm")
    text = {"encoder_hidden_states": _normal(4, 333, 4096), "pooled_projections": _normal(4, 2048)}
    timestep = torch.full((4,), 500.0, device=DEVICE)
    return model, {"hidden_states": _normal(4, 16, 128, 128), "timestep": timestep, **text}


def _flux() -> tuple[nn.Module, dict]:
    """Two double and two single blocks. One image of 1024 x 1024."""
    model = _on_gpu(FluxTransformer2DModel, num_layers=2, num_single_layers=2, guidance_embeds=True)
    for (
        processor
    ) in model.attn_processors.values():  # cuDNN's backward of torch 2.11 fails at this length, unpatched too
        processor._attention_backend = "_native_flash"
    text = {"encoder_hidden_states": _normal(1, 512, 4096), "pooled_projections": _normal(1, 768)}
    places = {"img_ids": torch.rand(4096, 3, device=DEVICE), "txt_ids": torch.zeros(512, 3, device=DEVICE)}
    numbers = {"timestep": torch.tensor([0.5], device=DEVICE), "guidance": torch.tensor([3.5], device=DEVICE)}
    return model, {"hidden_states": _normal(1, 4096, 64), **text, **places, **numbers}


def _hunyuan_video() -> tuple[nn.Module, dict]:
    """Two double and two single blocks. One clip."""
    model = _on_gpu(HunyuanVideoTransformer3DModel, num_layers=2, num_single_layers=2, num_refiner_layers=1)
    text = {"encoder_hidden_states": _normal(1, 256, 4096), "pooled_projections": _normal(1, 768)}
    mask = {"encoder_attention_mask": torch.ones(1, 256, device=DEVICE, dtype=torch.bool)}
    numbers = {"timestep": torch.tensor([500.0], device=DEVICE), "guidance": torch.tensor([6000.0], device=DEVICE)}
    return model, {"hidden_states": _normal(1, 16, *LATENTS[7800]), **text, **mask, **numbers}


def _on_gpu(model_class: type, **config) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = model_class(**config)
    kept = model_class._keep_in_fp32_modules or ()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data if any(part in name for part in kept) else parameter.data.bfloat16()
    for name, buffer in model.named_buffers():  # SD3's positions are one
        buffer.data = buffer.data.bfloat16() if "pos_embed" in name else buffer.data
    return model.train()


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def add_lora(model: nn.Module):
    """Rank 32 on the projections of attention; all else frozen."""
    model.requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=32, lora_alpha=32, target_modules=targets, init_lora_weights=False))


def model_and_inputs(case: Case) -> tuple[nn.Module, dict]:
    """The same ones at each call: a case's models are made from a seed."""
    model, inputs = case.make()
    if case.training == "LoRA":
        add_lora(model)
    return model, inputs


def contenders(model: nn.Module, names: tuple[str, ...] = CONTENDERS) -> dict[str, nn.Module]:
    """A copy of the model for each, prepared as its name says."""
    models = {name: copy.deepcopy(model) for name in names}
    for name, other in models.items():
        prepare(other, name)
    return models


def prepare(model: nn.Module, name: str):
    """Make a contender of it."""
    if "patched" in name:
        patch_model(model)
    if "compile" in name:
        compile_blocks(model, correct_options() if name == CORRECT else {})


def compile_blocks(model: nn.Module, options: dict[str, bool]):
    """What `compile_repeated_blocks` does, also where a class names no blocks (SD3). options: of Inductor."""
    if model._repeated_blocks:
        model.compile_repeated_blocks(options=options)
    else:
        for block in model.transformer_blocks:
            block.compile(options=options)
