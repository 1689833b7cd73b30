"""Tiny diffusers transformers of the real classes, no weight at zero, with inputs that they take."""

import torch
from diffusers import SD3Transformer2DModel, WanTransformer3DModel

FAMILIES = ("wan", "wan_per_token", "sd3", "sd35")


def tiny_model(family: str, seed: int = 0) -> torch.nn.Module:
    """A model of a family, in float32 and training mode; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return _randomized(_wan() if family.startswith("wan") else _sd3(dual_attention=family == "sd35"))


def tiny_inputs(family: str, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict:
    """Keyword arguments of its forward."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    if family.startswith("wan"):
        # 12 tokens; Wan 2.2 TI2V gives every token its own timestep.
        shape = (batch, 12) if family == "wan_per_token" else (batch,)
        inputs = {"hidden_states": normal(batch, 4, 3, 4, 4), "encoder_hidden_states": normal(batch, 5, 16)}
    else:
        shape = (batch,)
        inputs = {"hidden_states": normal(batch, 4, 8, 8), "encoder_hidden_states": normal(batch, 5, 32)}
        inputs["pooled_projections"] = normal(batch, 16)
    inputs["timestep"] = torch.randint(1, 1000, shape, generator=generator)
    return inputs


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


def _wan() -> WanTransformer3DModel:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 2}
    inputs = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32, "patch_size": (1, 2, 2)}
    return WanTransformer3DModel(**sizes, **inputs, rope_max_seq_len=32)


def _sd3(dual_attention: bool) -> SD3Transformer2DModel:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "caption_projection_dim": 16, "num_layers": 3}
    inputs = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 8}
    text = {"joint_attention_dim": 32, "pooled_projection_dim": 16}
    sd35 = {"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"} if dual_attention else {}
    return SD3Transformer2DModel(**sizes, **inputs, **text, **sd35)


def _randomized(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter random, so that no modulation, gate or bias hides a mistake by being zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = parameter.shape[1:].numel() ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.copy_(
                torch.randn_like(parameter) * spread + (0.5 if "norm" in name and parameter.ndim == 1 else 0)
            )
    return model
