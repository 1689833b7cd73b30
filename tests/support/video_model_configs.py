"""A tiny configuration of each other video and audio transformer of diffusers (see `model_configs`)."""

import importlib

import torch

from .model_inputs import steps, tokens

randn = torch.randn

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}


_SIZES = {**_HEADS, "num_layers": 1, "in_channels": 4, "out_channels": 4}


_WAN = {
    **{"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 1, "freq_dim": 32},
    **{"in_channels": 4, "out_channels": 4, "text_dim": 16, "patch_size": (1, 2, 2), "rope_max_seq_len": 32},
}


_JOY = {
    **{"patch_size": [1, 2, 2], "in_channels": 16, "hidden_size": 32, "num_attention_heads": 2, "text_dim": 16},
    **{"num_layers": 1, "rope_dim_list": [4, 6, 6], "theta": 256},
}


_KANDINSKY = {
    **{"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 8, "time_dim": 16},
    **{"patch_size": (1, 2, 2), "model_dim": 32, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 1},
    **{"axes_dims": (4, 6, 6), "visual_cond": False},
}

_LTX2 = {
    **{**_SIZES, "patch_size": 1, "patch_size_t": 1, "cross_attention_dim": 16, "audio_in_channels": 4},
    **{"audio_out_channels": 4, "audio_num_attention_heads": 2, "audio_attention_head_dim": 4},
    **{"audio_cross_attention_dim": 8, "caption_channels": 16, "rope_double_precision": False},
}


def _wan(**more):
    states = {"hidden_states": randn(2, 4, 2, 4, 4), "encoder_hidden_states": randn(2, 5, 16)}
    return {**states, "timestep": steps(), **more}


def _frames_first():
    return _wan(hidden_states=randn(2, 2, 4, 4, 4), timestep=steps(2, 2), r_timestep=steps(2, 2) / 2)


def _helios():
    ones = {"indices_hidden_states": torch.ones(2, 2), "indices_latents_history_short": torch.ones(2, 1)}
    ones |= {"indices_latents_history_mid": torch.ones(2, 1), "indices_latents_history_long": torch.ones(2, 4)}
    past = {"latents_history_short": randn(2, 4, 1, 16, 16), "latents_history_mid": randn(2, 4, 1, 16, 16)}
    states = {"hidden_states": randn(2, 4, 2, 16, 16), "latents_history_long": randn(2, 4, 4, 16, 16)}
    return _wan() | ones | past | states


def _video(text=16, frames=2, size=8, **more):
    states = {"hidden_states": randn(2, 4, frames, size, size), "encoder_hidden_states": randn(2, 6, text)}
    return {**states, "timestep": steps(), **more}


def _framepack():
    text = {"encoder_attention_mask": torch.ones(2, 6), "pooled_projections": randn(2, 8), "guidance": steps()}
    clean = {"latents_clean": randn(2, 4, 2, 4, 4), "indices_latents_clean": torch.ones(2)}
    past = {"latents_history_2x": randn(2, 4, 2, 4, 4), "indices_latents_history_2x": torch.ones(2)}
    older = {"latents_history_4x": randn(2, 4, 8, 4, 4), "indices_latents_history_4x": torch.ones(8)}
    image = {"image_embeds": randn(2, 6, 16), "indices_latents": torch.ones(3)}
    return _video(frames=3, size=4, **text, **clean, **past, **older, **image)


def _ltx2():
    video = {"hidden_states": randn(2, 32, 4), "num_frames": 2, "height": 4, "width": 4, "fps": 25.0}
    audio = {
        "audio_hidden_states": randn(2, 9, 4),
        "audio_num_frames": 9,
        "audio_encoder_hidden_states": randn(2, 6, 16),
    }
    text = {"encoder_hidden_states": randn(2, 6, 16), "encoder_attention_mask": torch.ones(2, 6).bool()}
    return {**video, **audio, **text, "timestep": steps()}


def _minimax():
    tags = torch.tensor([1] * 4 + [2] * 6 + [0] * 8)
    places = torch.zeros(18, 3)
    places[:, 0] = torch.arange(18)
    kinds = {"token_tags": tags, "timestep_indices": (tags == 2).long(), "position_ids": places}
    kinds |= {"video_indices": torch.arange(10, 18), "audio_indices": torch.arange(4, 10)}
    kinds |= {"text_indices": torch.arange(4), "timestep": steps() / 1024}
    states = {"hidden_states": randn(2, 8, 16), "audio_hidden_states": randn(2, 6, 6)}
    return {**states, "encoder_hidden_states": randn(2, 4, 8), **kinds}


def _kandinsky():
    places = {"visual_rope_pos": [torch.arange(2), torch.arange(2), torch.arange(2)], "text_rope_pos": torch.arange(5)}
    states = {"hidden_states": randn(1, 2, 4, 4, 4), "encoder_hidden_states": randn(1, 5, 16)}
    return {**states, "pooled_projections": randn(1, 8), "timestep": steps(1), **places}


def _refiner():
    angles = randn(2, 32, 8).repeat_interleave(2, -1)
    states = {"hidden_states": randn(2, 32, 4), "encoder_hidden_states": randn(2, 6, 16), "timestep": steps(2, 32)}
    return {**states, "video_rotary_emb": (angles.cos(), angles.sin())}


def _animate2():
    # The pass over the reference. The other needs FlexAttention, and runs the same blocks.
    cache = importlib.import_module("diffusers.models.transformers.transformer_wan_animate_2").WanAnimate2KVCache(2)
    latents = {name: [randn(4, 2, 4, 4) for _ in "12"] for name in ("hidden_states", "condition_latents")}
    text = {"encoder_hidden_states": [randn(5, 16) for _ in "12"], "encoder_hidden_states_image": randn(2, 3, 1280)}
    grid = {"offset_grid_sizes": torch.tensor([[2, 2, 2]] * 2), "seq_len": 8}
    return {**latents, **text, **grid, "timestep": steps(), "kv_cache": cache, "kv_cache_mode": "extract"}


VIDEO_CASES = {
    "ACE-Step": (
        "AceStepTransformer1DModel",
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
        | {"num_key_value_heads": 2, "in_channels": 24, "audio_acoustic_hidden_dim": 8, "sliding_window": 16},
        lambda: (
            {"hidden_states": randn(2, 8, 8), "context_latents": randn(2, 8, 16), "timestep": steps() / 1024}
            | {"timestep_r": steps() / 2048, "encoder_hidden_states": randn(2, 10, 32)}
        ),
    ),
    "Allegro": (
        "AllegroTransformer3DModel",
        _SIZES
        | {"cross_attention_dim": 16, "sample_width": 8, "sample_height": 8, "sample_frames": 8}
        | {"caption_channels": 8},
        lambda: _video(8),
    ),
    "AnyFlow": (
        "AnyFlowTransformer3DModel",
        _WAN | {"cross_attn_norm": True, "gate_value": 0.25, "deltatime_type": "r"},
        _frames_first,
    ),
    "ChronoEdit": ("ChronoEditTransformer3DModel", _WAN | {"rope_temporal_skip_len": 8}, _wan),
    "ConsisID": (
        "ConsisIDTransformer3DModel",
        _SIZES
        | {"time_embed_dim": 2, "text_embed_dim": 8, "sample_width": 8, "sample_height": 8, "sample_frames": 8}
        | {"patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": 8, "cross_attn_interval": 1}
        | {"is_train_face": True, "cross_attn_dim_head": 1, "cross_attn_num_heads": 1, "LFE_id_dim": 2}
        | {"LFE_vit_dim": 2, "LFE_depth": 5, "LFE_dim_head": 8, "LFE_num_heads": 2, "LFE_num_id_token": 1}
        | {"LFE_num_querie": 1, "LFE_output_dim": 10, "LFE_ff_mult": 1, "LFE_num_scale": 1},
        lambda: (
            {"hidden_states": randn(2, 2, 4, 8, 8), "encoder_hidden_states": randn(2, 8, 8), "timestep": steps()}
            | {"id_vit_hidden": [randn(2, 2, 2)], "id_cond": randn(2, 2)}
        ),
    ),
    "Cosmos": (
        "CosmosTransformer3DModel",
        _SIZES
        | {"attention_head_dim": 12, "mlp_ratio": 2, "text_embed_dim": 16, "adaln_lora_dim": 4}
        | {"max_size": (4, 16, 16), "patch_size": (1, 2, 2), "extra_pos_embed_type": "learnable"}
        | {"concat_padding_mask": False},
        lambda: _video(fps=30),
    ),
    "EasyAnimate": (
        "EasyAnimateTransformer3DModel",
        _SIZES
        | {"attention_head_dim": 16, "mmdit_layers": 1, "num_layers": 2, "patch_size": 2, "sample_height": 60}
        | {"sample_width": 90, "text_embed_dim": 16, "time_embed_dim": 8},
        _video,
    ),
    "Framepack": (
        "HunyuanVideoFramepackTransformer3DModel",
        _SIZES
        | {"attention_head_dim": 10, "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 2}
        | {"patch_size_t": 1, "text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)}
        | {"has_image_proj": True, "image_proj_dim": 16, "has_clean_x_embedder": True},
        _framepack,
    ),
    "Helios": (
        "HeliosTransformer3DModel",
        {name: value for name, value in _WAN.items() if name != "rope_max_seq_len"}
        | {"rope_dim": (4, 4, 4), "has_multi_term_memory_patch": True, "guidance_cross_attn": True}
        | {"zero_history_timestep": True, "is_amplify_history": False},
        _helios,
    ),
    "JoyImage Edit": (
        "JoyImageEditTransformer3DModel",
        _JOY,
        lambda: _video() | {"hidden_states": randn(2, 16, 1, 4, 4)},
    ),
    "JoyImage Edit+": (
        "JoyImageEditPlusTransformer3DModel",
        _JOY,
        lambda: _video() | {"hidden_states": randn(2, 2, 16, 1, 2, 2), "shape_list": [[(1, 1, 1)] * 2] * 2},
    ),
    "Kandinsky 5": ("Kandinsky5Transformer3DModel", _KANDINSKY, _kandinsky),
    "Kandinsky 6": (
        "Kandinsky6Transformer3DModel",
        _KANDINSKY,
        lambda: (
            {name: value for name, value in _kandinsky().items() if not name.endswith("rope_pos")}
            | {"audio_hidden_states": randn(1, 6, 20)}
        ),
    ),
    "LongCat-Audio": (
        "LongCatAudioDiTTransformer",
        {"dit_dim": 32, "dit_depth": 1, "dit_heads": 2, "dit_text_dim": 16, "latent_dim": 8, "text_conv": False},
        lambda: tokens(8, encoder_attention_mask=torch.ones(2, 8).bool(), attention_mask=torch.ones(2, 16).bool()),
    ),
    "LTX 2": ("LTX2VideoTransformer3DModel", _LTX2, _ltx2),
    "LTX 2.3": (
        "LTX2VideoTransformer3DModel",
        _LTX2 | {"cross_attn_mod": True, "audio_cross_attn_mod": True},
        lambda: _ltx2() | {"sigma": steps() / 1024, "audio_sigma": steps() / 1024},
    ),
    "MiniMax-H3": (
        "MiniMaxH3Transformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 16, "hidden_size": 24, "num_layers": 1, "ffn_dim": 32}
        | {"num_refiner_layers": 1, "in_channels": 4, "audio_in_channels": 6, "patch_size": (1, 2, 2), "text_dim": 8}
        | {"freq_dim": 8, "time_embed_hidden_dim": 24, "time_embed_dim": 16, "rope_freq_dim": 2},
        _minimax,
    ),
    "MiniMax-Music3": (
        "MiniMaxMusic3Transformer1DModel",
        _HEADS
        | {"in_channels": 8, "condition_dim": 16, "num_layers": 1, "ff_inner_dim": 32, "rotary_dim": 4}
        | {"fourier_embedding_dim": 8},
        lambda: {
            "hidden_states": randn(2, 8, 8),
            "encoder_hidden_states": randn(2, 8, 16),
            "timestep": steps() / 1024,
        },
    ),
    "Mochi": (
        "MochiTransformer3DModel",
        _HEADS
        | {"patch_size": 2, "num_layers": 2, "pooled_projection_dim": 16, "in_channels": 4}
        | {"text_embed_dim": 16, "time_embed_dim": 4, "max_sequence_length": 6},
        lambda: _video(size=4, encoder_attention_mask=torch.ones(2, 6).bool()),
    ),
    "Motif-Video": (
        "MotifVideoTransformer3DModel",
        {"in_channels": 9, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1}
        | {"num_single_layers": 1, "num_decoder_layers": 0, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 16}
        | {"image_embed_dim": 4, "rope_axes_dim": (4, 4, 4), "norm_type": "layer_norm", "qk_norm": "rms_norm"},
        lambda: _video(size=4) | {"hidden_states": randn(2, 9, 2, 4, 4)},
    ),
    "Sana-Video": (
        "SanaVideoTransformer3DModel",
        _SIZES
        | {"attention_head_dim": 12, "num_cross_attention_heads": 2, "cross_attention_head_dim": 12}
        | {"cross_attention_dim": 24, "caption_channels": 16, "sample_size": 4, "patch_size": (1, 2, 2)}
        | {"qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32},
        _video,
    ),
    "SkyReels V2": ("SkyReelsV2Transformer3DModel", _WAN, _wan),
    "SkyReels V2 DF": (
        "SkyReelsV2Transformer3DModel",
        _WAN,
        lambda: _wan(timestep=steps(2, 2).long(), enable_diffusion_forcing=True),
    ),
    "Stable Audio 3": (
        "StableAudio3DiTModel",
        {"io_channels": 8, "patch_size": 1, "embed_dim": 32, "depth": 1, "num_heads": 4, "cond_token_dim": 16}
        | {"global_cond_dim": 12, "local_add_cond_dim": 5, "timestep_features_dim": 16, "ff_mult": 2}
        | {"num_memory_tokens": 3, "use_differential_attention": False},
        lambda: (
            {"hidden_states": randn(2, 8, 16), "encoder_hidden_states": randn(2, 4, 16), "timestep": steps() / 1024}
            | {"global_hidden_states": randn(2, 12)}
        ),
    ),
    "AnyFlow FAR": (
        "AnyFlowFARTransformer3DModel",
        _WAN
        | {"cross_attn_norm": True, "gate_value": 0.25, "deltatime_type": "r", "num_attention_heads": 1}
        | {"attention_head_dim": 24},
        lambda: _frames_first() | {"chunk_partition": (1, 1)},
    ),
    "Cosmos ControlNet": (
        "CosmosControlNetModel",
        {"n_controlnet_blocks": 2, "in_channels": 7, "latent_channels": 6, "model_channels": 24}
        | {"num_attention_heads": 2, "attention_head_dim": 12, "mlp_ratio": 2, "text_embed_dim": 16}
        | {"adaln_lora_dim": 4, "max_size": (4, 16, 16), "extra_pos_embed_type": "learnable"},
        lambda: (
            {"controls_latents": randn(2, 4, 2, 8, 8), "latents": randn(2, 4, 2, 8, 8), "timestep": steps()}
            | {"encoder_hidden_states": randn(2, 6, 16), "condition_mask": torch.ones(2, 1, 2, 8, 8), "fps": 30}
            | {"padding_mask": torch.ones(1, 1, 8, 8)}
        ),
    ),
    "Kandinsky 6 SR": (
        "Kandinsky6SRTransformer3DModel",
        {"in_visual_dim": 4, "out_visual_dim": 4, "time_dim": 16, "model_dim": 32, "ff_dim": 32}
        | {"num_visual_blocks": 1, "axes_dims": (4, 6, 6), "patch_size": (1, 2, 2)},
        lambda: {"hidden_states": randn(2, 1, 16, 16, 9), "timestep": steps()},
    ),
    "Sana WM": (
        "SanaWMTransformer3DModel",
        {"in_channels": 4, "num_layers": 2, "hidden_size": 48, "num_attention_heads": 2, "softmax_every_n": 2}
        | {"linear_head_dim": 24, "chunk_plucker_channels": 6, "chunk_plucker_post_attn_blocks": 2}
        | {"caption_channels": 16},
        lambda: (
            {"hidden_states": randn(2, 4, 2, 4, 4), "timestep": steps(2, 1, 2), "mask": torch.ones(2, 6)}
            | {"encoder_hidden_states": randn(2, 1, 6, 16), "chunk_plucker": randn(2, 6, 2, 4, 4)}
        ),
    ),
    "Sana WM refiner": ("SanaWMLTX2RefinerTransformer3DModel", _LTX2, _refiner),
    "Wan Animate 2": (
        "WanAnimate2Transformer3DModel",
        {"in_dim": 8, "dim": 24, "ffn_dim": 32, "freq_dim": 32, "text_dim": 16, "out_dim": 4, "num_heads": 2}
        | {"num_layers": 2, "text_len": 6},
        _animate2,
    ),
}
