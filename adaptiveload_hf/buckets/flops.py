"""How much arithmetic is a training step? Counted from a diffusers transformer's own config, without running it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from numpy.polynomial import Polynomial

from ..errors import UserError
from .cost import FlopCount
from .shapes import TokenGeometry

# The backward of a matrix product is two products of its size.
_TERAFLOP_OF_A_STEP = 3e-12
_TIMESTEP_WIDTH = 256  # of the sinusoids, where diffusers fixes it
_CLIP_TOKENS = 257  # of the image that Wan's image-to-video models attend to
# Models built on one of the families below, with work of their own, in case only `model.config` is given, which does
# not say the class.
_OF_OTHER_MODELS = ("vace_", "audio_", "motion_", "image_proj_", "is_train_face")


class Counted(NamedTuple):
    """model_class: diffusers' name. geometry: how a latent becomes tokens. cost: teraflop of forward and backward."""

    model_class: str
    geometry: TokenGeometry
    cost: FlopCount


def flops_cost(config, text_tokens: int | None = None) -> FlopCount:
    """The cost alone of `count_flops`, same arguments."""
    return count_flops(config, text_tokens).cost


def count_flops(config, text_tokens: int | None = None) -> Counted:
    """c0*B + c1*B*S + c2*B*S**2 teraflop of a micro-batch: all matrix products and attentions, forward and backward.

    The forward's, times 3. What a GPU takes for them depends on how well it runs each, so the numbers are right in
    proportion only, and without anything that a step costs beside them.

    Args:
        config: a diffusers transformer, its `config`, or a folder with its config.json (or with a pipeline whose
            transformer/ has it).
        text_tokens: length of the prompt, if it is not the family's usual one (Wan, Flux: 512, SD3: 333,
            HunyuanVideo: 256, LTX: 128, CogVideoX: its max_text_seq_length).

    Raises:
        UserError: no config there, one of no known family, or a key whose value cannot be counted with.
    """
    keys = _read(config)
    family = _family(keys)
    for key in family.keys:
        _check(key, keys[key])
    text = family.text_tokens(keys) if text_tokens is None else text_tokens
    if isinstance(text, bool) or not isinstance(text, int) or text < 0:
        raise UserError(f"text_tokens must be a whole number of at least 0, but it is {text!r}.")
    try:
        geometry = TokenGeometry(family.patch_size(keys), text if family.text_joins else 0)
        visual = Polynomial([-geometry.text_tokens, 1])
        width = keys["num_attention_heads"] * keys["attention_head_dim"]
        work = family.count(keys, width, visual, text, math.prod(geometry.patch_size))
    except (TypeError, ValueError, OverflowError) as error:  # a list for a number, or words
        raise UserError(
            f"A value in the config is not what a {family.model_class} has: {error}. Correct the config."
        ) from None
    # A model that drops its text early has a small negative c0; a cost model has none.
    c0, c1, c2 = (max(0.0, float(c)) for c in (_TERAFLOP_OF_A_STEP * work).coef)
    return Counted(family.model_class, geometry, FlopCount(0.0, c0, c1, c2))


def _read(config) -> Mapping:
    """The config's keys; only those of a file have `_class_name`."""
    if isinstance(config, str | Path):
        folder = Path(config)
        files = [folder / "config.json", folder / "transformer" / "config.json"]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            raise UserError(
                f"Expected a transformer's config in {files[0]} or {files[1]}, but neither is there. Give a model."
            )
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is no JSON ({error}). Download or save the model's config again.") from None
    elif not isinstance(config, Mapping) and isinstance(getattr(config, "config", None), Mapping):
        return config.config
    if not isinstance(config, Mapping):
        raise UserError(
            "Expected a diffusers transformer, its config or a folder with its config.json, but found "
            f"{type(config).__name__}. Unwrap a prepared model first: accelerator.unwrap_model(model)."
        )
    return config


def _family(keys: Mapping) -> _Family:
    name = keys.get("_class_name")
    foreign = name is None and any(key.startswith(_OF_OTHER_MODELS) for key in keys)
    for family in _FAMILIES:
        if name in (None, family.model_class) and not foreign and all(key in keys for key in family.keys):
            return family
    looked_for = "; ".join(f"{family.model_class}: {', '.join(family.keys)}" for family in _FAMILIES)
    found = ", ".join(sorted(key for key in keys if not key.startswith("_"))) or "none"
    raise UserError(
        f"FLOPs are counted for these transformers, by these keys of their config: {looked_for}. Found "
        f"{name or 'no class name'} with {found}. Measure this model instead: recipes/benchmark_shapes.py, or "
        "adaptiveload_hf.benchmark in your own loop."
    )


def _check(key: str, value) -> None:
    numbers = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and n > 0 for n in numbers):
        raise UserError(f"{key} of a transformer's config must be above 0, but it is {value!r}. Correct the config.")


def _attention(width, queries, keys, key_width=None):
    """Query and output projections on the queries, key and value projections on the keys, and the attention."""
    return 4 * width * (width * queries + (key_width or width) * keys) + 4 * width * queries * keys


def _feed_forward(width, hidden, tokens):
    return 4 * width * hidden * tokens


def _embedding(width, out):
    """Two layers, as of timesteps, pooled prompts and captions."""
    return 2 * out * (width + out)


def _channels(keys: Mapping) -> int:
    """In and out."""
    return keys["in_channels"] + (keys.get("out_channels") or keys["in_channels"])


def _count_wan(keys, width, visual, text, patch):
    layer = _attention(width, visual, visual) + _attention(width, visual, text)
    layer += _feed_forward(width, keys["ffn_dim"], visual)
    ends = 2 * width * patch * _channels(keys) * visual + text * _embedding(keys["text_dim"], width)
    ends += _embedding(keys["freq_dim"], width) + 12 * width**2
    if keys.get("image_dim"):
        image, image_width = keys.get("pos_embed_seq_len") or _CLIP_TOKENS, keys["image_dim"]
        layer += 4 * width * image * visual + 4 * width * (keys.get("added_kv_proj_dim") or width) * image
        ends += 2 * image * image_width * (image_width + width)
    return keys["num_layers"] * layer + ends


def _joint_layer(width, hidden, tokens):
    return _attention(width, tokens, tokens) + _feed_forward(width, hidden, tokens)


def _count_sd3(keys, width, visual, text, patch):
    layer = _joint_layer(width, 4 * width, visual + text) + 24 * width**2
    dual = _attention(width, visual, visual) + 6 * width**2
    last = -(18 * text + 8) * width**2  # its text goes nowhere
    ends = 2 * width * (patch * _channels(keys) * visual + keys["joint_attention_dim"] * text) + 4 * width**2
    ends += _embedding(_TIMESTEP_WIDTH, width) + _embedding(keys["pooled_projection_dim"], width)
    return keys["num_layers"] * layer + len(keys.get("dual_attention_layers") or ()) * dual + last + ends


def _count_flux(keys, width, visual, text, patch):
    layer = _joint_layer(width, keys.get("mlp_ratio", 4) * width, visual + text)
    modulation = keys["num_layers"] * 24 * width**2 + keys["num_single_layers"] * 6 * width**2 + 4 * width**2
    embedded = 2 * width * _channels(keys) * visual + _embedding(keys["pooled_projection_dim"], width)
    embedded += (2 if keys.get("guidance_embeds") else 1) * _embedding(_TIMESTEP_WIDTH, width)
    embedded += 2 * width * keys.get("joint_attention_dim", 0) * text
    return (keys["num_layers"] + keys["num_single_layers"]) * layer + modulation + embedded


def _count_hunyuan_video(keys, width, visual, text, patch):
    refiner = _joint_layer(width, 4 * width, text) + 4 * width**2
    refined = keys["num_refiner_layers"] * refiner + 2 * width * keys["text_embed_dim"] * text
    refined += _embedding(_TIMESTEP_WIDTH, width) + _embedding(keys["text_embed_dim"], width)
    further_patch = 2 * width * (patch - 1) * _channels(keys) * visual
    return _count_flux(keys, width, visual, text, patch) + refined + further_patch


def _count_cogvideox(keys, width, visual, text, patch):
    time = keys["time_embed_dim"]
    layer = _joint_layer(width, 4 * width, visual + text) + 24 * time * width
    ends = 2 * width * (patch * _channels(keys) * visual + keys["text_embed_dim"] * text)
    return keys["num_layers"] * layer + ends + _embedding(width, time) + 4 * time * width


def _count_ltx(keys, width, visual, text, patch):
    layer = _attention(width, visual, visual) + _attention(width, visual, text, keys["cross_attention_dim"])
    layer += _feed_forward(width, 4 * width, visual)
    ends = 2 * width * _channels(keys) * visual + text * _embedding(keys["caption_channels"], width)
    return keys["num_layers"] * layer + ends + _embedding(_TIMESTEP_WIDTH, width) + 12 * width**2


class _Family(NamedTuple):
    """keys: what the config must have. text_joins: whether text joins the self-attention, and so counts in S.

    count: (config, D, visual tokens as a polynomial of S, text tokens, values in a patch) -> FLOPs of a forward.
    """

    model_class: str
    keys: tuple[str, ...]
    patch_size: Callable[[Mapping], tuple[int, int, int]]
    text_tokens: Callable[[Mapping], int]
    text_joins: bool
    count: Callable


def _square_patch(keys: Mapping) -> tuple[int, int, int]:
    return (keys.get("patch_size_t") or 1, keys["patch_size"], keys["patch_size"])


_EVERY = ("num_layers", "num_attention_heads", "attention_head_dim", "in_channels")
_FAMILIES = (
    _Family(
        "WanTransformer3DModel",
        (*_EVERY, "ffn_dim", "text_dim", "freq_dim", "patch_size"),
        lambda keys: tuple(keys["patch_size"]),
        lambda keys: 512,
        False,
        _count_wan,
    ),
    _Family(
        "SD3Transformer2DModel",
        (*_EVERY, "joint_attention_dim", "pooled_projection_dim", "caption_projection_dim", "patch_size"),
        _square_patch,
        lambda keys: 333,  # 77 of CLIP and 256 of T5
        True,
        _count_sd3,
    ),
    _Family(
        "HunyuanVideoTransformer3DModel",
        (
            *(*_EVERY, "num_single_layers", "num_refiner_layers", "mlp_ratio"),
            *("text_embed_dim", "pooled_projection_dim", "patch_size", "patch_size_t"),
        ),
        _square_patch,
        lambda keys: 256,
        True,
        _count_hunyuan_video,
    ),
    _Family(
        "FluxTransformer2DModel",
        (*_EVERY, "num_single_layers", "joint_attention_dim", "pooled_projection_dim", "axes_dims_rope"),
        lambda keys: (1, 2, 2),  # the pipeline packs 2x2 latents into one of its in_channels, patch_size is 1
        lambda keys: 512,
        True,
        _count_flux,
    ),
    _Family(
        "CogVideoXTransformer3DModel",
        (*_EVERY, "time_embed_dim", "text_embed_dim", "max_text_seq_length", "patch_size"),
        _square_patch,
        lambda keys: keys["max_text_seq_length"],
        True,
        _count_cogvideox,
    ),
    _Family(
        "LTXVideoTransformer3DModel",
        (*_EVERY, "cross_attention_dim", "caption_channels", "patch_size", "patch_size_t"),
        _square_patch,
        lambda keys: 128,
        False,
        _count_ltx,
    ),
)
