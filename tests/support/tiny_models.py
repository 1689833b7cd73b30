"""Tiny diffusers transformers of the real classes, no weight at zero, with inputs that they take."""

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)

FAMILIES = ("wan", "wan_per_token", "wan_i2v", "sd3", "sd35", "flux", "cogvideox")


def tiny_model(family: str, seed: int = 0) -> torch.nn.Module:
    """A model of a family, in float32 and training mode; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return randomized(_MAKERS[family]())


def tiny_inputs(family: str, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict:
    """Keyword arguments of its forward."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    timestep = torch.randint(1, 1000, (batch,), generator=generator)
    if family == "flux":
        text = {"encoder_hidden_states": normal(batch, 6, 32), "pooled_projections": normal(batch, 16)}
        places = {"img_ids": torch.arange(48.0).reshape(16, 3), "txt_ids": torch.zeros(6, 3)}
        return {"hidden_states": normal(batch, 16, 4), "timestep": timestep / 1000, **text, **places}
    if family == "cogvideox":
        states = {"hidden_states": normal(batch, 3, 4, 8, 8), "encoder_hidden_states": normal(batch, 8, 8)}
        return {**states, "timestep": timestep}
    if family.startswith("sd3"):
        text = {"encoder_hidden_states": normal(batch, 5, 32), "pooled_projections": normal(batch, 16)}
        return {"hidden_states": normal(batch, 4, 8, 8), "timestep": timestep, **text}
    if family == "wan_per_token":  # as in Wan 2.2 TI2V: each of the 12 tokens has its own
        timestep = torch.randint(1, 1000, (batch, 12), generator=generator)
    if family == "wan_i2v":  # the attention takes the last 512 tokens for text, those before for the image
        states = {"hidden_states": normal(batch, 4, 3, 4, 4), "encoder_hidden_states": normal(batch, 512, 16)}
        return {**states, "encoder_hidden_states_image": normal(batch, 3, 8), "timestep": timestep}
    states = {"hidden_states": normal(batch, 4, 3, 4, 4), "encoder_hidden_states": normal(batch, 5, 16)}
    return {**states, "timestep": timestep}


def output_and_gradients(model: torch.nn.Module, inputs: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output, and the gradient of each parameter for a loss that weighs every output element differently."""
    model.zero_grad()
    output = model(**inputs, return_dict=False)[0]
    weights = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output)
    (output * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.detach(), {name: gradient.clone() for name, gradient in gradients.items()}


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """L2 norm of the difference over that of the truth."""
    return ((value.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30)).item()


def _wan(**image_to_video) -> WanTransformer3DModel:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 2}
    inputs = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32, "patch_size": (1, 2, 2)}
    return WanTransformer3DModel(**sizes, **inputs, rope_max_seq_len=32, **image_to_video)


def _sd3(**sd35) -> SD3Transformer2DModel:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "caption_projection_dim": 16, "num_layers": 3}
    inputs = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 8}
    text = {"joint_attention_dim": 32, "pooled_projection_dim": 16}
    return SD3Transformer2DModel(**sizes, **inputs, **text, **sd35)


def _flux() -> FluxTransformer2DModel:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "num_single_layers": 2}
    text = {"joint_attention_dim": 32, "pooled_projection_dim": 16}
    return FluxTransformer2DModel(**sizes, **text, patch_size=1, in_channels=4, axes_dims_rope=(4, 4, 8))


def _cogvideox() -> CogVideoXTransformer3DModel:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "time_embed_dim": 4, "num_layers": 2}
    inputs = {"in_channels": 4, "out_channels": 4, "patch_size": 2, "text_embed_dim": 8, "max_text_seq_length": 8}
    sample = {"sample_width": 8, "sample_height": 8, "sample_frames": 8, "temporal_compression_ratio": 4}
    return CogVideoXTransformer3DModel(**sizes, **inputs, **sample)


_MAKERS = {
    "wan": _wan,
    "wan_per_token": _wan,
    "wan_i2v": lambda: _wan(image_dim=8, added_kv_proj_dim=24),
    "sd3": _sd3,
    "sd35": lambda: _sd3(dual_attention_layers=(0, 1), qk_norm="rms_norm"),
    "flux": _flux,
    "cogvideox": _cogvideox,
}


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter random, so that no modulation, gate or bias hides a mistake by being zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = max(parameter.shape[1:].numel(), 1) ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.copy_(
                torch.randn_like(parameter) * spread + (0.5 if "norm" in name and parameter.ndim == 1 else 0)
            )
    return model
