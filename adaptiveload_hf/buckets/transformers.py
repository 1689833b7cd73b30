"""Which transformers of diffusers can be counted, and what does the forward of each take?"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import ones, zeros

_CLIP_TOKENS = 257  # of the image that Wan's image-to-video models attend to


class Family(NamedTuple):
    """What a forward takes, where its arguments' names do not say it.

    model_class: diffusers' name. text: key of the width of a prompt's states. text_tokens: the longest prompt that its
    pipelines take, or the key that has it. text_joins: whether prompts join the self-attention, and so count in S.
    latents: order of the sizes of hidden_states, S where they are packed. patch: None is by `patch_size`. further:
    tokens beside the prompt's that its pipelines always give. more: (config, sizes by letter, tokens of the prompt and
    further ones) -> arguments with other names. changed: config -> keys that make it run here with the same products.
    """

    model_class: str
    text: str
    text_tokens: int | str
    text_joins: bool
    latents: str = "CFHW"
    patch: tuple[int, int, int] | None = None
    further: tuple[int, ...] = ()
    more: Callable[..., dict] = lambda keys, sizes, *tokens: {}
    changed: Callable[[Mapping], dict] = lambda keys: {}

    def patch_size(self, keys: Mapping) -> tuple[int, int, int]:
        """(frames, height, width) of a patch."""
        if self.patch:
            return self.patch
        size = keys["patch_size"]
        return (keys.get("patch_size_t") or 1, size, size) if isinstance(size, int) else tuple(size)

    def inputs(self, forward: Callable, keys: Mapping, grid: tuple[int, int, int], text: int, *further: int) -> dict:
        """Arguments of `forward` for one sample.

        Args:
            grid: patches in (frames, height, width).
            text, further: tokens of the prompt, and beside it.
        """
        sizes = dict(zip("FHW", (n * patch for n, patch in zip(grid, self.patch_size(keys)))))
        sizes |= {"S": math.prod(grid), "C": keys.get("in_channels", 0)}
        axes = len(keys.get("axes_dims_rope") or ())
        known = {
            "hidden_states": zeros(1, *(sizes[letter] for letter in self.latents)),
            "timestep": ones(1),
            "encoder_hidden_states": zeros(1, text, keys[self.text]),
            "encoder_attention_mask": ones(1, text).bool(),
            "pooled_projections": zeros(1, keys.get("pooled_projection_dim") or 0),
            "img_ids": zeros(sizes["S"], axes),
            "txt_ids": zeros(text, axes),
            "img_shapes": [[grid]],
            **{"num_frames": sizes["F"], "height": sizes["H"], "width": sizes["W"]},
            **({"guidance": ones(1)} if keys.get("guidance_embeds") else {}),
            **self.more(keys, sizes, text, *further),
            "return_dict": False,
        }
        return {name: value for name, value in known.items() if name in inspect.signature(forward).parameters}


def _wan(keys, sizes, text):
    given = {}
    if keys.get("image_dim"):
        both = keys.get("pos_embed_seq_len")  # of the first and the last frame
        image = zeros(2, both // 2, keys["image_dim"]) if both else zeros(1, _CLIP_TOKENS, keys["image_dim"])
        given["encoder_hidden_states_image"] = image
    if "vace_in_channels" in keys:
        given["control_hidden_states"] = zeros(1, keys["vace_in_channels"], *(sizes[letter] for letter in "FHW"))
    return given


def _hunyuan_video15(keys, sizes, text, glyphs, image):
    return {
        "encoder_hidden_states_2": zeros(1, glyphs, keys["text_embed_2_dim"]),
        "encoder_attention_mask_2": ones(1, glyphs).bool(),
        "image_embeds": zeros(1, image, keys["image_embed_dim"]),
    }


def _ltx2(keys, sizes, text, audio):
    return {
        "audio_hidden_states": zeros(1, audio, keys["audio_in_channels"]),
        "audio_encoder_hidden_states": zeros(1, text, keys["caption_channels"]),
        "audio_num_frames": audio,
        **{"sigma": ones(1), "audio_sigma": ones(1)},  # LTX-2.3
    }


def _z_image(keys, sizes, text):
    image = zeros(*(sizes[letter] for letter in "CFHW"))
    return {"x": [image], "cap_feats": [zeros(text, keys["cap_feat_dim"])], "t": ones(1)}


def _krea2(keys, sizes, text):
    prompt = zeros(1, text, keys["num_text_layers"], keys["text_hidden_dim"])
    return {"encoder_hidden_states": prompt, "position_ids": zeros(text + sizes["S"], 3)}


def _cosmos(keys, sizes, text):
    projected = {"encoder_hidden_states": zeros(1, text, keys["crossattn_proj_in_channels"])}
    return projected if keys["use_crossattn_projection"] else {}


def _cosmos_unpadded(keys):
    """The mask is one more channel, and concatenating it needs torchvision."""
    padded = keys.get("concat_padding_mask", True)
    return {"concat_padding_mask": False, "in_channels": keys.get("in_channels", 16) + padded}


_PACKED = (1, 2, 2)  # the pipeline packs 2x2 latents into one of in_channels, and patch_size is 1
FAMILIES = (
    Family("WanTransformer3DModel", "text_dim", 512, False, more=_wan),
    Family("WanVACETransformer3DModel", "text_dim", 512, False, more=_wan),
    Family("SkyReelsV2Transformer3DModel", "text_dim", 512, False, more=_wan),
    Family("ChronoEditTransformer3DModel", "text_dim", 512, False, more=_wan),
    Family("HunyuanVideoTransformer3DModel", "text_embed_dim", 256, True),
    Family(
        *("HunyuanVideo15Transformer3DModel", "text_embed_dim", 1000, True),
        further=(256, 729),  # of the glyphs' and of the image's encoder
        more=_hunyuan_video15,
    ),
    Family("LTXVideoTransformer3DModel", "caption_channels", 128, False, "SC"),
    Family(
        *("LTX2VideoTransformer3DModel", "caption_channels", 1024, False, "SC"),
        further=(126,),  # of the audio of 121 frames at 24 a second, the pipelines' usual length
        more=_ltx2,
    ),
    Family(
        *("CogVideoXTransformer3DModel", "text_embed_dim", "max_text_seq_length", True, "FCHW"),
        changed=lambda keys: {"use_rotary_positional_embeddings": True},  # the others want that length exactly
    ),
    # Its text joins, but is narrower: as tokens of S it would cost too much.
    Family("MochiTransformer3DModel", "text_embed_dim", 256, False),
    Family("CosmosTransformer3DModel", "text_embed_dim", 512, False, more=_cosmos, changed=_cosmos_unpadded),
    Family("SanaVideoTransformer3DModel", "caption_channels", 300, False),
    Family("SD3Transformer2DModel", "joint_attention_dim", 333, True, "CHW"),  # 77 of CLIP and 256 of T5
    Family("FluxTransformer2DModel", "joint_attention_dim", 512, True, "SC", _PACKED),
    Family("Flux2Transformer2DModel", "joint_attention_dim", 512, True, "SC", _PACKED),
    Family("ChromaTransformer2DModel", "joint_attention_dim", 512, True, "SC", _PACKED),
    Family("QwenImageTransformer2DModel", "joint_attention_dim", 512, True, "SC"),
    Family("ZImageTransformer2DModel", "cap_feat_dim", 512, True, patch=_PACKED, more=_z_image),
    Family("Krea2Transformer2DModel", "text_hidden_dim", 512, True, "SC", _PACKED, more=_krea2),
    Family("SanaTransformer2DModel", "caption_channels", 300, False, "CHW"),
    Family("Lumina2Transformer2DModel", "cap_feat_dim", 256, True, "CHW"),
    Family("AuraFlowTransformer2DModel", "joint_attention_dim", 256, True, "CHW"),
    Family(
        *("PixArtTransformer2DModel", "caption_channels", 300, False, "CHW"),
        more=lambda keys, sizes, text: {
            "added_cond_kwargs": {"resolution": zeros(1, 2), "aspect_ratio": zeros(1, 1)},
        },
    ),
    Family(
        *("CogView4Transformer2DModel", "text_embed_dim", 1024, True, "CHW"),
        more=lambda keys, sizes, text: {name: zeros(1, 2) for name in ("original_size", "target_size", "crop_coords")},
    ),
)
