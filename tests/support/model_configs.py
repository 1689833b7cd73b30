"""A tiny configuration of each transformer that people train most, with inputs that it takes.

`CASES[name]` is (class name, configuration or what makes the model, inputs); the others are in `image_model_configs`
and `video_model_configs`. Two samples, different timesteps where the class allows it, no weight at zero, few tokens.
"""

import functools
import importlib
import pkgutil
import types

import diffusers
import torch
from diffusers.models import controlnets, transformers
from diffusers.models.controlnets import controlnet_cosmos
from torch.nn.attention import flex_attention

from .image_model_configs import IMAGE_CASES
from .model_inputs import steps, token_places
from .tiny_models import randomized
from .video_model_configs import VIDEO_CASES

randn = torch.randn


_WAN = {
    **{"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 2, "freq_dim": 32},
    **{"in_channels": 4, "out_channels": 4, "text_dim": 16, "patch_size": (1, 2, 2), "rope_max_seq_len": 32},
}
_SD3 = {
    **{"num_attention_heads": 2, "attention_head_dim": 8, "caption_projection_dim": 16, "num_layers": 2},
    **{"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 8},
    **{"joint_attention_dim": 32, "pooled_projection_dim": 16},
}
_FLUX = {
    **{"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_single_layers": 1, "patch_size": 1},
    **{"joint_attention_dim": 32, "pooled_projection_dim": 16, "in_channels": 4, "axes_dims_rope": (4, 4, 8)},
}
_HUNYUAN = {
    **{"num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1, "num_single_layers": 1},
    **{"in_channels": 4, "out_channels": 4, "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1},
    **{"text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)},
}
_QWEN = {
    **{"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "in_channels": 16, "out_channels": 4},
    **{"patch_size": 2, "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)},
}
_SANA = {
    **{"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_cross_attention_heads": 2},
    **{"in_channels": 4, "out_channels": 4, "patch_size": 1, "sample_size": 4},
    **{"cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 8},
}
_ZIMAGE = {
    **{"all_patch_size": (2,), "all_f_patch_size": (1,), "dim": 32, "n_refiner_layers": 1, "n_heads": 2},
    **{"n_kv_heads": 2, "qk_norm": True},
}


def _wan(frames=3, timestep=(2,), **more):
    states = {"hidden_states": randn(2, 4, frames, 4, 4), "encoder_hidden_states": randn(2, 5, 16)}
    return {**states, "timestep": steps(*timestep), **more}


def _wan_image(**more):
    return _wan() | {"encoder_hidden_states": randn(2, 512, 16), "encoder_hidden_states_image": randn(2, 3, 8)} | more


def _wan_animate():
    states = {"hidden_states": randn(1, 12, 5, 4, 4), "encoder_hidden_states": randn(1, 512, 16)}
    pose = {"pose_hidden_states": randn(1, 4, 4, 4, 4), "face_pixel_values": randn(1, 3, 13, 16, 16)}
    return {**states, "encoder_hidden_states_image": randn(1, 3, 16), **pose, "timestep": steps(1)}


def _sd3(**more):
    text = {"encoder_hidden_states": randn(2, 5, 32), "pooled_projections": randn(2, 16)}
    return {"hidden_states": randn(2, 4, 8, 8), "timestep": steps(), **text, **more}


def _flux(**more):
    text = {"encoder_hidden_states": randn(2, 6, 32), "pooled_projections": randn(2, 16)}
    places = {"img_ids": token_places(), "txt_ids": torch.zeros(6, 3)}
    return {"hidden_states": randn(2, 16, 4), "timestep": steps() / 1024, **text, **places, **more}


def _flux2():
    places = {"img_ids": token_places(axes=4).expand(2, 16, 4), "txt_ids": torch.zeros(2, 6, 4)}
    states = {"hidden_states": randn(2, 16, 4), "encoder_hidden_states": randn(2, 6, 32)}
    return {**states, **places, "timestep": steps() / 1024, "guidance": torch.ones(2)}


def _hunyuan(channels=4, **more):
    text = {"encoder_hidden_states": randn(2, 6, 16), "pooled_projections": randn(2, 8)}
    mask = {"encoder_attention_mask": torch.ones(2, 6)}
    return {"hidden_states": randn(2, channels, 3, 4, 4), "timestep": steps(), **text, **mask, **more}


def _hunyuan15():
    text = {"encoder_hidden_states": randn(2, 6, 16), "encoder_hidden_states_2": randn(2, 4, 8)}
    masks = {"encoder_attention_mask": torch.ones(2, 6), "encoder_attention_mask_2": torch.ones(2, 4)}
    states = {"hidden_states": randn(2, 4, 2, 4, 4), "image_embeds": randn(2, 3, 12)}
    return {**states, **text, **masks, "timestep": steps()}


def _qwen(**more):
    text = {"encoder_hidden_states": randn(2, 8, 16), "encoder_hidden_states_mask": torch.ones(2, 8).long()}
    return {
        "hidden_states": randn(2, 16, 16),
        "timestep": steps() / 1024,
        "img_shapes": [(1, 4, 4)] * 2,
        **text,
        **more,
    }


def _ltx():
    text = {"encoder_hidden_states": randn(2, 6, 16), "encoder_attention_mask": torch.ones(2, 6).bool()}
    states = {"hidden_states": randn(2, 32, 4), "num_frames": 2, "height": 4, "width": 4}
    return {**states, **text, "timestep": steps()}


def _cogvideox(**more):
    states = {"hidden_states": randn(2, 2, 4, 8, 8), "encoder_hidden_states": randn(2, 8, 8)}
    return {**states, "timestep": steps(), **more}


def _sana(**more):
    return {"hidden_states": randn(2, 4, 4, 4), "encoder_hidden_states": randn(2, 6, 8), "timestep": steps(), **more}


def _z_image():
    return {"x": [randn(16, 1, 4, 4) for _ in "12"], "cap_feats": [randn(5, 16) for _ in "12"], "t": steps() / 1024}


def _z_image_controlnet():
    sizes = {"dim": 32, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "control_in_dim": 16}
    places = {"control_layers_places": [0, 1], "control_refiner_layers_places": [0]}
    controlnet = controlnets.ZImageControlNetModel(**sizes, **places)
    controlnet.gradient_checkpointing = False  # its forward reads what its __init__ forgets to set
    return controlnet.from_transformer(controlnet, transformers.ZImageTransformer2DModel(**CASES["Z-Image"][1]))


def _z_image_control():
    return _z_image() | {"control_context": [randn(16, 1, 4, 4) for _ in "12"]}


CASES = {
    "Wan T2V": ("WanTransformer3DModel", _WAN, _wan),
    "Wan I2V": ("WanTransformer3DModel", _WAN | {"image_dim": 8, "added_kv_proj_dim": 24}, _wan_image),
    "Wan FLF2V": (
        "WanTransformer3DModel",
        _WAN | {"image_dim": 8, "added_kv_proj_dim": 24, "pos_embed_seq_len": 6},
        lambda: _wan_image(encoder_hidden_states_image=randn(4, 3, 8)),
    ),
    "Wan 2.2 TI2V": ("WanTransformer3DModel", _WAN, lambda: _wan(timestep=(2, 12))),
    "Wan VACE": (
        "WanVACETransformer3DModel",
        _WAN | {"vace_layers": [0, 1], "vace_in_channels": 8},
        lambda: _wan(control_hidden_states=randn(2, 8, 3, 4, 4)),
    ),
    "Wan Animate": (
        "WanAnimateTransformer3DModel",
        _WAN
        | {"in_channels": 12, "latent_channels": 4, "image_dim": 16, "motion_encoder_size": 16, "motion_dim": 4}
        | {"motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16}, "motion_style_dim": 8}
        | {"motion_encoder_dim": 16, "face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2}
        | {"inject_face_latents_blocks": 2},
        _wan_animate,
    ),
    "SD3": ("SD3Transformer2DModel", _SD3, _sd3),
    "SD3.5 medium": ("SD3Transformer2DModel", _SD3 | {"dual_attention_layers": (0,), "qk_norm": "rms_norm"}, _sd3),
    "SD3.5 large": ("SD3Transformer2DModel", _SD3 | {"qk_norm": "rms_norm"}, _sd3),
    "SD3 ControlNet": ("SD3ControlNetModel", _SD3, lambda: _sd3(controlnet_cond=randn(2, 4, 8, 8))),
    "Flux.1": ("FluxTransformer2DModel", _FLUX | {"guidance_embeds": True}, lambda: _flux(guidance=torch.ones(2))),
    "Flux.1 ControlNet": ("FluxControlNetModel", _FLUX, lambda: _flux(controlnet_cond=randn(2, 16, 4))),
    "Flux.2": (
        "Flux2Transformer2DModel",
        _FLUX | {"axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 32, "pooled_projection_dim": None},
        _flux2,
    ),
    "HunyuanVideo": (
        "HunyuanVideoTransformer3DModel",
        _HUNYUAN | {"guidance_embeds": True},
        lambda: _hunyuan(guidance=steps()),
    ),
    "HunyuanVideo I2V": (
        "HunyuanVideoTransformer3DModel",
        _HUNYUAN | {"in_channels": 9, "guidance_embeds": False, "image_condition_type": "latent_concat"},
        lambda: _hunyuan(9),
    ),
    "HunyuanVideo I2V, token replace": (
        "HunyuanVideoTransformer3DModel",
        _HUNYUAN | {"guidance_embeds": True, "image_condition_type": "token_replace"},
        lambda: _hunyuan(guidance=steps()),
    ),
    "HunyuanVideo 1.5": (
        "HunyuanVideo15Transformer3DModel",
        {name: value for name, value in _HUNYUAN.items() if name not in ("num_single_layers", "pooled_projection_dim")}
        | {"text_embed_2_dim": 8, "image_embed_dim": 12, "target_size": 16, "task_type": "t2v", "mlp_ratio": 2.0},
        _hunyuan15,
    ),
    "Qwen-Image": ("QwenImageTransformer2DModel", _QWEN, _qwen),
    "Qwen-Image Edit 2511": (
        "QwenImageTransformer2DModel",
        _QWEN | {"zero_cond_t": True},
        lambda: _qwen(hidden_states=randn(2, 20, 16), img_shapes=[[(1, 4, 4), (1, 2, 2)]] * 2),
    ),
    "Qwen-Image ControlNet": ("QwenImageControlNetModel", _QWEN, lambda: _qwen(controlnet_cond=randn(2, 16, 16))),
    "LTX": (
        "LTXVideoTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 1}
        | {"cross_attention_dim": 16, "caption_channels": 16},
        _ltx,
    ),
    "CogVideoX": (
        "CogVideoXTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 8, "time_embed_dim": 4, "num_layers": 1, "in_channels": 4}
        | {"out_channels": 4, "patch_size": 2, "text_embed_dim": 8, "max_text_seq_length": 8, "sample_width": 8}
        | {"sample_height": 8, "sample_frames": 8, "temporal_compression_ratio": 4},
        _cogvideox,
    ),
    "Sana": ("SanaTransformer2DModel", _SANA, _sana),
    "Sana ControlNet": ("SanaControlNetModel", _SANA, lambda: _sana(controlnet_cond=randn(2, 4, 4, 4))),
    "Z-Image": (
        "ZImageTransformer2DModel",
        _ZIMAGE
        | {"in_channels": 16, "n_layers": 2, "cap_feat_dim": 16, "axes_dims": [8, 4, 4], "axes_lens": [64, 32, 32]},
        _z_image,
    ),
    "Z-Image ControlNet": ("ZImageControlNetModel", _z_image_controlnet, _z_image_control),
}
FIRST_CLASS = tuple(CASES)
CASES |= IMAGE_CASES | VIDEO_CASES
NO_ADALN = {
    *("ControlNetModel", "ControlNetUnionModel", "ControlNetXSAdapter", "UNetControlNetXSModel"),
    *("SparseControlNetModel", "FluxMultiControlNetModel", "HunyuanDiT2DMultiControlNetModel"),
    *("QwenImageMultiControlNetModel", "SD3MultiControlNetModel", "MultiControlNetModel"),
    *("MultiControlNetUnionModel", "PriorTransformer", "StableAudioDiTModel", "T5FilmDecoder"),
    *("Transformer2DModel", "TransformerTemporalModel", "Cosmos3OmniTransformer", "MiniMaxMusic3RVQDepthDecoder"),
}


@functools.cache
def transformer_classes() -> dict[str, type]:
    """Every transformer and controlnet of diffusers by its class name."""
    found = {}
    for package in (transformers, controlnets):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if "flax" not in module.name:
                members = vars(importlib.import_module(module.name))
                own = (m for m in members.values() if isinstance(m, type) and m.__module__ == module.name)
                found |= {cls.__name__: cls for cls in own if issubclass(cls, diffusers.ModelMixin)}
    return found


def _replace_what_a_cpu_lacks():
    """FlexAttention refuses to differentiate on a CPU, where its eager form could; torchvision is not installed."""
    flex_attention._validate_device = lambda *tensors: None
    controlnet_cosmos.transforms = types.SimpleNamespace(
        functional=types.SimpleNamespace(
            resize=lambda image, size, **kwargs: torch.nn.functional.interpolate(image, size)
        ),
        InterpolationMode=types.SimpleNamespace(NEAREST="nearest"),
    )


_replace_what_a_cpu_lacks()

# Older releases have fewer.
CASES = {name: case for name, case in CASES.items() if case[0] in transformer_classes()}


def tiny_case(name: str, seed: int = 0) -> tuple[torch.nn.Module, dict]:
    """(model in float32 and training mode, keyword arguments of its forward); the same seed gives the same numbers."""
    class_name, config, inputs = CASES[name]
    torch.manual_seed(seed)
    if callable(config):
        return randomized(config()).train(), inputs()
    config = {key: value for key, value in config.items() if value is not None}
    return randomized(transformer_classes()[class_name](**config)).train(), inputs()
