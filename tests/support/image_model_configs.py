"""A tiny configuration of each other image transformer of diffusers (see `model_configs`)."""

import torch

from .model_inputs import steps, token_places, tokens

randn = torch.randn

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}


_SIZES = {**_HEADS, "num_layers": 1, "in_channels": 4, "out_channels": 4}


_FLUX = {
    **{"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_single_layers": 1, "patch_size": 1},
    **{"joint_attention_dim": 32, "in_channels": 4, "axes_dims_rope": (4, 4, 8)},
}


_COGVIEW = {**_SIZES, "patch_size": 2, "text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 4}
_IMAGE_TEXT = {
    **{"sample_size": 8, "patch_size": 2, "cross_attention_dim": 16, "attention_bias": True, "caption_channels": 8},
    **{"activation_fn": "gelu-approximate", "norm_type": "ada_norm_single", "norm_elementwise_affine": False},
    **{"norm_eps": 1e-6},
}


_LUMINA = {
    **{"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 1},
    **{"num_attention_heads": 3, "num_kv_heads": 1, "norm_eps": 1e-5, "scaling_factor": 1.0},
}


_HUNYUAN_DIT = {
    **{**_HEADS, "sample_size": 8, "patch_size": 2, "in_channels": 4, "cross_attention_dim": 8, "hidden_size": 16},
    **{"cross_attention_dim_t5": 8, "pooled_projection_dim": 4, "text_len": 4, "text_len_t5": 4},
}


def _flux(channels=4, **more):
    places = {"img_ids": token_places(), "txt_ids": torch.zeros(6, 3)}
    states = {"hidden_states": randn(2, 16, channels), "encoder_hidden_states": randn(2, 6, 32)}
    return {**states, "timestep": steps() / 1024, **places, **more}


def _image(text=8, tokens=6, size=8, **more):
    states = {"hidden_states": randn(2, 4, size, size), "encoder_hidden_states": randn(2, tokens, text)}
    return {**states, "timestep": steps(), **more}


def _sizes():
    return {"original_size": torch.full((2, 2), 64), "target_size": torch.full((2, 2), 64)}


def _cogview(**more):
    return _image(**_sizes(), crop_coords=torch.zeros(2, 2).long(), **more)


def _glm():
    sizes = {"target_size": torch.full((2, 2), 8.0), "crop_coords": torch.zeros(2, 2)}
    return _image(prior_token_id=torch.arange(32).reshape(2, 16), prior_token_drop=torch.zeros(2, 16).bool(), **sizes)


def _hunyuan_dit():
    text = {"encoder_hidden_states_t5": randn(2, 4, 8), "text_embedding_mask": torch.ones(2, 4)}
    meta = {"text_embedding_mask_t5": torch.ones(2, 4), "image_meta_size": torch.full((2, 6), 16.0)}
    rope = {"style": torch.zeros(2).int(), "image_rotary_emb": [torch.ones(1, 8), torch.zeros(1, 8)]}
    return _image(tokens=4, **text, **meta, **rope)


def _hidream():
    text = {"encoder_hidden_states_t5": randn(2, 4, 8), "encoder_hidden_states_llama3": randn(2, 2, 4, 4)}
    return {"hidden_states": randn(2, 4, 8, 8), **text, "pooled_embeds": randn(2, 8), "timesteps": steps()}


def _ideogram():
    places = token_places(2, 2, text=4).long()
    kinds = {"segment_ids": torch.ones(2, 8).long(), "indicator": torch.tensor([[3] * 4 + [2] * 4] * 2)}
    states = {"hidden_states": randn(2, 8, 16), "encoder_hidden_states": randn(2, 8, 24)}
    return {**states, "position_ids": places.expand(2, 8, 3), **kinds, "timestep": steps() / 1024}


def _krea():
    states = {"hidden_states": randn(2, 4, 16), "encoder_hidden_states": randn(2, 4, 3, 16)}
    mask = torch.ones(2, 4).bool()
    return {
        **states,
        "position_ids": token_places(2, 2, text=4),
        "encoder_attention_mask": mask,
        "timestep": steps() / 1024,
    }


def _omnigen():
    image = {"input_img_latents": [randn(1, 4, 8, 8)], "input_image_sizes": {0: [[0, 16]]}}
    mask = {"attention_mask": torch.ones(2, 41, 41), "position_ids": torch.arange(41).expand(2, 41)}
    ids = {"input_ids": torch.arange(48).reshape(2, 24) % 10, "timestep": steps() / 1024}
    return {"hidden_states": randn(2, 4, 8, 8), **ids, **image, **mask}


def _protein():
    places, times = randn(2, 6, 3), {"bb_ca_time": steps() / 1024, "local_latents_time": steps() / 2048}
    kinds = {"is_in_context_conditioning": torch.zeros(2, 6).bool(), "supports_local_latent": torch.ones(2, 6).bool()}
    states = {"bb_ca": places, "local_latents": randn(2, 6, 4), "padding_mask": torch.ones(2, 6).bool()}
    return {**states, **times, "conditioning": kinds}


IMAGE_CASES = {
    "AuraFlow": (
        "AuraFlowTransformer2DModel",
        _HEADS
        | {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_mmdit_layers": 1}
        | {
            "num_single_dit_layers": 1,
            "caption_projection_dim": 16,
            "joint_attention_dim": 8,
            "pos_embed_max_size": 16,
        },
        _image,
    ),
    "Bria": ("BriaTransformer2DModel", _FLUX, _flux),
    "Bria Fibo": (
        "BriaFiboTransformer2DModel",
        _FLUX | {"text_encoder_dim": 16},
        lambda: _flux(text_encoder_layers=[randn(2, 6, 16) for _ in "12"]),
    ),
    "Chroma": (
        "ChromaTransformer2DModel",
        _FLUX | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        _flux,
    ),
    "CogView3+": ("CogView3PlusTransformer2DModel", _COGVIEW | {"pos_embed_max_size": 8, "sample_size": 8}, _cogview),
    "CogView4": ("CogView4Transformer2DModel", _COGVIEW, _cogview),
    "DiT": (
        "DiTTransformer2DModel",
        _SIZES | {"out_channels": 8, "num_embeds_ada_norm": 8, "patch_size": 2, "sample_size": 8},
        lambda: {"hidden_states": randn(2, 4, 8, 8), "timestep": steps().long(), "class_labels": torch.tensor([1, 3])},
    ),
    "ERNIE-Image": (
        "ErnieImageTransformer2DModel",
        {"hidden_size": 32, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 16, "in_channels": 16}
        | {"out_channels": 16, "patch_size": 1, "text_in_dim": 16, "rope_theta": 256, "rope_axes_dim": (8, 4, 4)},
        lambda: (
            {"hidden_states": randn(2, 16, 4, 4), "timestep": steps() / 1024, "text_bth": randn(2, 6, 16)}
            | {"text_lens": torch.tensor([6, 6])}
        ),
    ),
    "GLM-Image": ("GlmImageTransformer2DModel", _COGVIEW | {"prior_vq_quantizer_codebook_size": 64}, _glm),
    "HiDream": (
        "HiDreamImageTransformer2DModel",
        _SIZES
        | {"patch_size": 2, "num_single_layers": 1, "num_attention_heads": 4, "caption_channels": [8, 4]}
        | {"text_emb_dim": 8, "num_routed_experts": 2, "num_activated_experts": 2, "axes_dims_rope": (4, 2, 2)}
        | {"max_resolution": (16, 16), "llama_layers": (0, 1), "force_inference_output": True},
        _hidream,
    ),
    "HunyuanDiT": ("HunyuanDiT2DModel", _HUNYUAN_DIT | {"num_layers": 2}, _hunyuan_dit),
    "HunyuanImage": (
        "HunyuanImageTransformer2DModel",
        _SIZES
        | {"attention_head_dim": 16, "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 16}
        | {"rope_axes_dim": (8, 8)},
        lambda: _image(16, size=4, encoder_attention_mask=torch.ones(2, 6)),
    ),
    "Ideogram 4": (
        "Ideogram4Transformer2DModel",
        {"in_channels": 16, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4, "adaln_dim": 16}
        | {"intermediate_size": 32, "llm_features_dim": 24, "rope_theta": 10000, "mrope_section": (2, 1, 1)},
        _ideogram,
    ),
    "Krea 2": (
        "Krea2Transformer2DModel",
        {
            "in_channels": 16,
            "num_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "intermediate_size": 32,
        }
        | {"num_key_value_heads": 2, "timestep_embed_dim": 8, "text_hidden_dim": 16, "num_text_layers": 3}
        | {"text_num_attention_heads": 2, "text_num_key_value_heads": 1, "text_intermediate_size": 16}
        | {"num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1, "axes_dims_rope": (4, 2, 2)},
        _krea,
    ),
    "LongCat-Image": (
        "LongCatImageTransformer2DModel",
        _FLUX | {"pooled_projection_dim": 32},
        lambda: _flux(guidance=torch.ones(2)),
    ),
    "Latte": (
        "LatteTransformer3DModel",
        _SIZES | _IMAGE_TEXT | {"num_embeds_ada_norm": 1000, "out_channels": 8, "video_length": 2},
        lambda: (
            {"hidden_states": randn(2, 4, 2, 8, 8), "encoder_hidden_states": randn(2, 6, 8), "timestep": steps()}
            | {"enable_temporal_attentions": True}
        ),
    ),
    "Lumina-Next": (
        "LuminaNextDiT2DModel",
        _LUMINA | {"multiple_of": 16, "learn_sigma": False, "qk_norm": True, "cross_attention_dim": 32},
        lambda: (
            _image(32)
            | {"encoder_mask": torch.ones(2, 6), "image_rotary_emb": randn(384, 384, 4)}
            | {"cross_attention_kwargs": {}}
        ),
    ),
    "Lumina 2": (
        "Lumina2Transformer2DModel",
        _LUMINA
        | {"multiple_of": 2, "num_refiner_layers": 1, "axes_dim_rope": (4, 2, 2), "axes_lens": (64, 64, 64)}
        | {"cap_feat_dim": 32},
        lambda: _image(32, encoder_attention_mask=torch.ones(2, 6).bool()),
    ),
    "Nucleus-MoE": (
        "NucleusMoEImageTransformer2DModel",
        {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16}
        | {"num_attention_heads": 2, "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4), "moe_enabled": False}
        | {"capacity_factors": [8.0, 8.0]},
        lambda: tokens(img_shapes=[(1, 4, 4)] * 2, encoder_hidden_states_mask=torch.ones(2, 8).long()),
    ),
    "OmniGen": (
        "OmniGenTransformer2DModel",
        {
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 32,
            "num_layers": 2,
        }
        | {"pad_token_id": 0, "vocab_size": 100, "in_channels": 4, "time_step_dim": 4}
        | {"rope_scaling": {"long_factor": [1, 2], "short_factor": [1, 2]}},
        _omnigen,
    ),
    "Ovis-Image": ("OvisImageTransformer2DModel", _FLUX, _flux),
    "PixArt": (
        "PixArtTransformer2DModel",
        _SIZES | _IMAGE_TEXT | {"out_channels": 8, "num_embeds_ada_norm": 8, "use_additional_conditions": False},
        lambda: _image(added_cond_kwargs={"aspect_ratio": None, "resolution": None}),
    ),
    "PRX": (
        "PRXTransformer2DModel",
        {"in_channels": 4, "patch_size": 2, "context_in_dim": 16, "hidden_size": 32, "num_heads": 2, "depth": 1}
        | {"axes_dim": [8, 8], "theta": 10000},
        lambda: _image(16) | {"timestep": steps() / 1024},
    ),
    "Qwen-Image 2.1": (
        "QwenImage21Transformer2DModel",
        _HEADS
        | {"attention_head_dim": 16, "patch_size": 1, "in_channels": 16, "out_channels": 16, "num_layers": 1}
        | {"context_in_dim": 16, "axes_dims_rope": (4, 6, 6)},
        lambda: tokens(img_shapes=[[(1, 4, 4)]] * 2, img_mask=torch.tensor([[False] * 8 + [True] * 4] * 2)),
    ),
    "Bria Fibo 2": (
        "BriaFibo2Transformer2DModel",
        {"in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "cap_feat_dim": 16}
        | {"injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 2, "max_num_gist_tokens": 4}
        | {"gist_step": 1, "gist_min_text_len": 2, "gist_max_text_len": 8}
        | {"axes_dims": (8, 4, 4), "axes_lens": (64, 32, 32)},
        lambda: (
            {"hidden_states": randn(2, 4, 8, 8), "timestep": steps() / 1024}
            | {"encoder_hidden_states": randn(2, 2, 5, 16), "context_latents": [randn(2, 4, 4, 4)]}
        ),
    ),
    "DreamLite": (
        "DreamLiteTransformer2DModel",
        _SIZES
        | {"num_embeds_ada_norm": 8, "norm_type": "ada_norm_zero", "norm_num_groups": 2, "cross_attention_dim": 16}
        | {"norm_elementwise_affine": False},
        lambda: _image(16, size=4, class_labels=torch.tensor([1, 3])) | {"timestep": steps().long()},
    ),
    "Flux.3": (
        "Flux3Transformer2DModel",
        {name: value for name, value in _FLUX.items() if name != "patch_size"}
        | {"cond_in_channels": 4, "timestep_channels": 16, "axes_dims_rope": (4, 4, 4, 4)},
        lambda: _flux(
            img_ids=token_places(axes=4),
            txt_ids=torch.zeros(6, 4),
            image_cond_hidden_states=randn(2, 4, 4),
            image_cond_ids=token_places(2, 2, axes=4),
        ),
    ),
    "HunyuanDiT ControlNet": (
        "HunyuanDiT2DControlNetModel",
        _HUNYUAN_DIT | {"transformer_num_layers": 4},
        lambda: _hunyuan_dit() | {"controlnet_cond": randn(2, 4, 8, 8)},
    ),
    "RFD4 Proteina": (
        "RFD4ProteinaTransformer",
        {"nlayers": 2, "token_dim": 16, "nheads": 2, "dim_cond": 12, "pair_repr_dim": 8, "latent_dim": 4}
        | {"t_emb_dim": 8, "tri_mult_c": 4, "num_sequence_classes": 6}
        | {"feats_seq": ("xt_bb_ca", "xt_local_latents"), "feats_pair_repr": ("xt_bb_ca_pair_dists",)}
        | {"feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents")},
        _protein,
    ),
}
