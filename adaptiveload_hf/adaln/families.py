"""Which blocks of Wan, Qwen-Image, HunyuanVideo, Z-Image, LTX, PixArt, Latte and DiT need an adapter?"""

import torch
from torch import Tensor

from .adapters import register_adapter
from .patch_tokens import patch_tokens

_TRANSFORMERS = "diffusers.models.transformers"

# ------------------------------------------------------------------------------------------------------------- Wan
# Wan 2.2 TI2V has modulation for each token: temb is [B, S, 6, D]. The block adds its table to it in float32, 24 bytes
# for each element of the stream, and keeps them for backward. The ops add the table themselves. SkyReels V2 in its
# diffusion forcing, Helios and AnyFlow do the same.

_NAMES = ("shift_msa", "scale_msa", "gate_msa", "c_shift_msa", "c_scale_msa", "c_gate_msa")
_ROWS = ", ".join(_NAMES)
_TABLES = ", ".join(name.replace("msa", "table") for name in _NAMES)


def _sites() -> list[tuple[str, str]]:
    """Edits of modulations and gates."""
    edits, stream = [], "hidden_states"
    for norm, prefix, branch in (("norm1", "", "attn_output"), ("norm3", "c_", "ff_output.float()")):
        shift, scale, gate = (f"{prefix}{name}_msa" for name in ("shift", "scale", "gate"))
        modulated = "norm_hidden_states = (self.{}({}.float()) * (1 + {}) + {}).type_as({})"
        gated = "{0} = ({0}.float() + {1} * {2}).type_as({0})"
        sums = [f"({rows}.float() + {rows.replace('msa', 'table')})" for rows in (scale, shift, gate)]
        edits += [
            (modulated.format(norm, stream, scale, shift, stream), modulated.format(norm, stream, *sums[:2], stream)),
            (gated.format(stream, branch, gate), gated.format(stream, branch, sums[2])),
        ]
    return edits


_TABLE_ROWS = f"{_TABLES} = self.scale_shift_table.squeeze(0).unbind(0)"
_SQUEEZED = [f"{name} = {name}.squeeze(2)" for name in _NAMES]
_PER_TOKEN = f"{_ROWS} = (self.scale_shift_table.unsqueeze(0) + temb.float()).chunk(6, dim=2)"
_WAN = (
    "\n    ".join(["if temb.ndim == 4:", _PER_TOKEN, *_SQUEEZED])
    + f"\nelse:\n    {_ROWS} = (self.scale_shift_table + temb.float()).chunk(6, dim=1)",
    f"{_TABLE_ROWS}\n{_ROWS} = temb.unbind(2) if temb.ndim == 4 else temb.chunk(6, dim=1)",
)
_SKYREELS = (
    f"""
if temb.dim() == 3:
    {_ROWS} = (self.scale_shift_table + temb.float()).chunk(6, dim=1)
elif temb.dim() == 4:
    e = (self.scale_shift_table.unsqueeze(2) + temb.float()).chunk(6, dim=1)
    {_ROWS} = [ei.squeeze(1) for ei in e]
""",
    f"{_TABLE_ROWS}\n{_ROWS} = temb.unbind(1) if temb.dim() == 4 else temb.chunk(6, dim=1)",
)
_ANYFLOW = (
    f"{_ROWS} = (self.scale_shift_table + temb.float()).chunk(6, dim=2)\n"
    f"{_ROWS} = ({', '.join(f'{name}.squeeze(2)' for name in _NAMES)})",
    f"{_TABLE_ROWS}\n{_ROWS} = temb.unbind(2)",
)
for _class_name, _digest, _rows in (
    ("transformer_wan.WanTransformerBlock", "21c15441b009932c", _WAN),
    ("transformer_wan_animate.WanTransformerBlock", "21c15441b009932c", _WAN),
    ("transformer_chronoedit.WanTransformerBlock", "21c15441b009932c", _WAN),
    ("transformer_helios.HeliosTransformerBlock", "ce1e637747236395", _WAN),
    ("transformer_skyreels_v2.SkyReelsV2TransformerBlock", "3f34de9e2b0be16c", _SKYREELS),
    ("transformer_anyflow.AnyFlowTransformerBlock", "b77809e46e9ece63", _ANYFLOW),
    ("transformer_anyflow_far.AnyFlowTransformerBlock", "b77809e46e9ece63", _ANYFLOW),
):
    register_adapter(f"{_TRANSFORMERS}.{_class_name}", sources={"forward": _digest}, edits=[_rows, *_sites()])


# Its tokens are those of a convolution, copied into their order.
register_adapter(
    f"{_TRANSFORMERS}.transformer_wan.WanTransformer3DModel",
    sources={"forward": "d460398c51fcd8ef"},
    edits=[
        (
            """
            hidden_states = self.patch_embedding(hidden_states)
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
            hidden_states = hidden_states.contiguous()
            """,
            "hidden_states = patch_tokens(self.patch_embedding, hidden_states)",
        )
    ],
    functions=[patch_tokens],
)

# Wan Animate keeps the dtype of its output norm's input in a variable.
register_adapter(
    f"{_TRANSFORMERS}.transformer_wan_animate.WanAnimateTransformer3DModel",
    sources={"forward": "15f234d152ee9d3c"},
    edits=[
        (
            """
            hidden_states_original_dtype = hidden_states.dtype
            hidden_states = self.norm_out(hidden_states.float())
            shift = shift.to(hidden_states.device)
            scale = scale.to(hidden_states.device)
            hidden_states = (hidden_states * (1 + scale) + shift).to(dtype=hidden_states_original_dtype)
            """,
            """
            normed = self.norm_out(hidden_states.float())
            shift = shift.to(normed.device)
            scale = scale.to(normed.device)
            hidden_states = (normed * (1 + scale) + shift).type_as(hidden_states)
            """,
        )
    ],
)

# ------------------------------------------------------------------------------------------------------ Qwen-Image
# The helper method takes a norm's result.


def modulation_rows(modulation: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(shift, scale, gate), each [B, 1 or S, D], of modulation [B, 3 D].

    With an index [B, S], modulation is [2 B, 3 D]: tokens whose index is 0 take its first half, others its second.
    """
    parts = modulation.chunk(3, dim=-1)
    if index is None:
        return tuple(part.unsqueeze(1) for part in parts)
    halves = (part.unsqueeze(1).chunk(2, dim=0) for part in parts)
    return tuple(torch.where(index.unsqueeze(-1) == 0, first, second) for first, second in halves)


_QWEN_STREAMS = (("img", "hidden_states", ", modulate_index"), ("txt", "encoder_hidden_states", ""))


def _qwen_rows(stream: str, index: str) -> str:
    names = (", ".join(f"{stream}_{name}{site}" for name in ("shift", "scale", "gate")) for site in (1, 2))
    return "\n".join(f"{n} = modulation_rows({stream}_mod{site}{index})" for site, n in enumerate(names, start=1))


def _qwen_site(stream: str, states: str, index: str, number: str) -> tuple[str, str]:
    site = number or "1"
    normed, modulated = f"{stream}_normed{number}", f"{stream}_modulated{number}"
    norm, gate = f"self.{stream}_norm{site}({states})", f"{stream}_gate{site}"
    return (
        f"{normed} = {norm}\n{modulated}, {gate} = self._modulate({normed}, {stream}_mod{site}{index})",
        f"{modulated} = {norm} * (1 + {stream}_scale{site}) + {stream}_shift{site}",
    )


_SPLIT = "txt_mod1, txt_mod2 = txt_mod_params.chunk(2, dim=-1)"
_IMAGE_SUM = "hidden_states = hidden_states + img_gate1 * img_attn_output"
_TEXT_SUM = "encoder_hidden_states = encoder_hidden_states + txt_gate1 * txt_attn_output"
_IMAGE_END = "hidden_states = hidden_states + img_gate2 * img_mlp_output"
register_adapter(
    f"{_TRANSFORMERS}.transformer_qwenimage.QwenImageTransformerBlock",
    sources={"forward": "89de238db44a7a47", "_modulate": "9ee78b512057d504"},
    edits=[
        (_SPLIT, "\n".join([_SPLIT, *(_qwen_rows(stream, index) for stream, _, index in _QWEN_STREAMS)])),
        *(_qwen_site(*stream, number) for number in ("", "2") for stream in _QWEN_STREAMS),
        # The text's residual waits until its norm comes.
        (f"{_IMAGE_SUM}\n{_TEXT_SUM}", _IMAGE_SUM),
        (_IMAGE_END, f"{_IMAGE_END}\n{_TEXT_SUM}"),
    ],
    functions=[modulation_rows],
)

# --------------------------------------------------------------------------------------- HunyuanVideo token replace
# The gated rows are joined before the residual is added.

register_adapter(
    f"{_TRANSFORMERS}.transformer_hunyuan_video.HunyuanVideoTokenReplaceSingleTransformerBlock",
    sources={"forward": "782cdfa08ddd58c0"},
    edits=[
        (
            """
            hidden_states_zero = proj_output[:, :num_tokens] * tr_gate.unsqueeze(1)
            hidden_states_orig = proj_output[:, num_tokens:] * gate.unsqueeze(1)
            hidden_states = torch.cat([hidden_states_zero, hidden_states_orig], dim=1)
            hidden_states = hidden_states + residual
            """,
            """
            hidden_states_zero = residual[:, :num_tokens] + proj_output[:, :num_tokens] * tr_gate.unsqueeze(1)
            hidden_states_orig = residual[:, num_tokens:] + proj_output[:, num_tokens:] * gate.unsqueeze(1)
            hidden_states = torch.cat([hidden_states_zero, hidden_states_orig], dim=1)
            """,
        )
    ],
)

# --------------------------------------------------------------------------------------------------------- Z-Image
# Layer norms take a scale without its 1, and a list that grows in place holds the stream.

_ROWS_OF_FINAL = [
    (f"{name} = 1.0 + self.adaLN_modulation({condition})", f"{name} = self.adaLN_modulation({condition})")
    for name, condition in (("scale_noisy", "c_noisy"), ("scale_clean", "c_clean"), ("scale", "c"))
]
for _module in ("transformer_z_image", "transformer_bria_fibo2"):
    register_adapter(
        f"{_TRANSFORMERS}.{_module}.FinalLayer",
        sources={"forward": "3ff23ca1b52cbfde"},
        edits=[*_ROWS_OF_FINAL, ("x = self.norm_final(x) * scale", "x = self.norm_final(x) * (1.0 + scale)")],
    )
register_adapter(
    f"{_TRANSFORMERS}.transformer_ideogram4.Ideogram4FinalLayer",
    sources={"forward": "658d069d68c6bcbb"},
    edits=[
        (
            "scale = 1.0 + self.adaln_modulation(F.silu(conditioning))",
            "scale = self.adaln_modulation(F.silu(conditioning))",
        ),
        (
            "return self.linear(self.norm_final(hidden_states) * scale)",
            "return self.linear(self.norm_final(hidden_states) * (1.0 + scale))",
        ),
    ],
)
register_adapter(
    "diffusers.models.controlnets.controlnet_z_image.ZImageControlTransformerBlock",
    sources={"forward": "c02e71b6810a03d1"},
    edits=[("all_c += [c_skip, c]", "all_c = all_c + [c_skip, c]")],
)

# ----------------------------------------------------------------------------------------------------------- LTX 2.3
# Text attention is modulated and gated under an `if`; between video and audio one norm is modulated under each of two.
# (The modulation of text itself follows no norm.)


def _ltx2_text(stream: str) -> list[tuple[str, str]]:
    states, norm = f"{stream}hidden_states", f"self.{stream}norm2({stream}hidden_states)"
    condition = f"self.{stream or 'video_'}cross_attn_adaln"
    normed, branch = f"norm_{states}", f"attn_{states}"
    modulated = f"{{}} * (1 + {stream}scale_text_q) + {stream}shift_text_q"
    return [
        (
            f"{normed} = {norm}\nif {condition}:\n    {normed} = {modulated.format(normed)}",
            f"if {condition}:\n    {normed} = {modulated.format(norm)}\nelse:\n    {normed} = {norm}",
        ),
        (
            f"if {condition}:\n    {branch} = {branch} * {stream}gate_text_q\n{states} = {states} + {branch}",
            f"if {condition}:\n    {states} = {states} + {branch} * {stream}gate_text_q\n"
            f"else:\n    {states} = {states} + {branch}",
        ),
    ]


_LTX2_NORMS = (("", "video", "audio_to_video_norm"), ("audio_", "audio", "video_to_audio_norm"))


def _ltx2_cross(direction: str) -> list[tuple[str, str]]:
    edits = []
    for stream, prefix, norm in _LTX2_NORMS:
        rows = f"(1 + {prefix}_{direction}_ca_scale.squeeze(2)) + {prefix}_{direction}_ca_shift.squeeze(2)"
        modulated = f"mod_norm_{stream}hidden_states = {{}} * {rows}"
        normed = f"self.{norm}({stream}states_before)"
        edits.append((modulated.format(f"norm_{stream}hidden_states"), modulated.format(normed)))
    return edits


register_adapter(
    f"{_TRANSFORMERS}.transformer_ltx2.LTX2VideoTransformerBlock",
    sources={"forward": "1dbdd9ab731b53b9"},
    edits=[
        *_ltx2_text(""),
        *_ltx2_text("audio_"),
        *(
            (f"norm_{s}hidden_states = self.{n}({s}hidden_states)", f"{s}states_before = {s}hidden_states")
            for s, _, n in _LTX2_NORMS
        ),
        *_ltx2_cross("a2v"),
        *_ltx2_cross("v2a"),
    ],
)

# ---------------------------------------------------------------------------------------------- Qwen-Image 2.1
# A helper again. `_select_modulation_rows` stays and is a global of the block.


def _qwen21_edit(site: str) -> tuple[str, str]:
    gate, modulated = f"img_gate{site}", f"img_modulated{site.replace('1', '')}"
    new = f"{modulated} = self.img_norm{site}(hidden_states) * (1 + scale{site})"
    return (
        f"{modulated}, {gate} = self._modulate(self.img_norm{site}(hidden_states), mod{site}, target_token_mask)",
        "\n".join([*(_qwen21_rows("1") + _qwen21_rows("2")), new]) if site == "1" else new,
    )


def _qwen21_rows(site: str) -> list[str]:
    names, rows = f"scale{site}, img_gate{site}", f"_select_modulation_rows({{}}{site}, target_token_mask)"
    return [f"{names} = mod{site}.chunk(2, dim=-1)", f"{names} = {rows.format('scale')}, {rows.format('img_gate')}"]


register_adapter(
    f"{_TRANSFORMERS}.transformer_qwenimage21.QwenImage21TransformerBlock",
    sources={"forward": "4d00610eb23125f4", "_modulate": "c0ca04b4ae860209"},
    edits=[_qwen21_edit("1"), _qwen21_edit("2")],
)

# ------------------------------------------------------------------------------------------------ PixArt, Latte, DiT
# Gates, and DiT's second modulation, stand under an `if` apart from what they belong to.


def _basic_gate(branch: str, gate: str) -> tuple[str, str]:
    zero, single = f"{gate}.unsqueeze(1) * {branch}", f"{gate} * {branch}"
    conditions = ("if self.norm_type == 'ada_norm_zero':", "elif self.norm_type == 'ada_norm_single':")
    both = "{}\n    {} = {}\n{}\n    {} = {}\n"
    total = "{} + hidden_states".format
    return (
        both.format(conditions[0], branch, zero, conditions[1], branch, single)
        + f"hidden_states = {branch} + hidden_states",
        both.format(conditions[0], "hidden_states", total(zero), conditions[1], "hidden_states", total(single))
        + f"else:\n    hidden_states = {branch} + hidden_states",
    )


_CONTINUOUS = """
if self.norm_type == 'ada_norm_continuous':
    norm_hidden_states = self.norm3(hidden_states, added_cond_kwargs['pooled_text_emb'])
"""
_OTHER_NORM = """elif not self.norm_type == 'ada_norm_single':
    norm_hidden_states = self.norm3(hidden_states)
"""
_ZERO = """if self.norm_type == 'ada_norm_zero':
    norm_hidden_states = {} * (1 + scale_mlp[:, None]) + shift_mlp[:, None]
"""
for _class_name, _digest in (
    ("diffusers.models.attention.BasicTransformerBlock", "440071576ac5ee6f"),
    (f"{_TRANSFORMERS}.transformer_2d_dreamlite.BasicTransformerBlockDreamLite", "2e0444b29f1de70a"),
):
    register_adapter(
        _class_name,
        sources={"forward": _digest},
        edits=[
            _basic_gate("attn_output", "gate_msa"),
            _basic_gate("ff_output", "gate_mlp"),
            (
                _CONTINUOUS + _OTHER_NORM + _ZERO.format("norm_hidden_states"),
                _CONTINUOUS + "el" + _ZERO.format("self.norm3(hidden_states)") + _OTHER_NORM,
            ),
        ],
    )
