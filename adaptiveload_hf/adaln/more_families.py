"""Which blocks of diffusers' other models need an adapter: CogView4, HiDream, Mochi, Sana WM, Kandinsky and more?"""

from torch import Tensor

from .adapters import register_adapter

_TRANSFORMERS = "diffusers.models.transformers"

# ------------------------------------------------------------------------------------------ norms before their rows
# The norm stands before what computes its modulation, or its result before another call.

_FIRST_NORMS = (
    "norm_hidden_states = self.norm(hidden_states).to(dtype=dtype)\n"
    "norm_encoder_hidden_states = self.norm_context(encoder_hidden_states).to(dtype=dtype)"
)


def _joined(states: str, prefix: str, norm: str) -> tuple[str, str]:
    modulated = f"{states} = {{}} * (1 + {prefix}scale_msa.unsqueeze(1)) + {prefix}shift_msa.unsqueeze(1)"
    return modulated.format(f"norm_{states}"), modulated.format(f"self.{norm}({states}).to(dtype=dtype)")


for _class_name in ("cogview4.CogView4AdaLayerNormZero", "glm_image.GlmImageAdaLayerNormZero"):
    register_adapter(
        f"{_TRANSFORMERS}.transformer_{_class_name}",
        sources={"forward": "d5e54a99be6fba71"},
        edits=[
            (_FIRST_NORMS, ""),
            _joined("hidden_states", "", "norm"),
            _joined("encoder_hidden_states", "c_", "norm_context"),
        ],
    )

_LTX2_ROWS = (
    "shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = "
    "self.get_mod_params(self.scale_shift_table, temb, batch_size)"
)
_LTX2_NORM = "norm_hidden_states = self.norm1(hidden_states)"
register_adapter(
    f"{_TRANSFORMERS}.transformer_sana_wm_refiner.SanaWMLTX2RefinerTransformerBlock",
    sources={"forward": "45ebc2756cbbf83c"},
    edits=[(f"{_LTX2_NORM}\n{_LTX2_ROWS}", f"{_LTX2_ROWS}\n{_LTX2_NORM}")],
)

_TEXT = "ff_output_t = gate_mlp_t * self.ff_t(norm_encoder_hidden_states)"
_IMAGE = "hidden_states = ff_output_i + hidden_states"
register_adapter(
    f"{_TRANSFORMERS}.transformer_hidream_image.HiDreamImageTransformerBlock",
    sources={"forward": "7850cc61f9716cee"},
    edits=[(f"{_TEXT}\n{_IMAGE}", f"{_IMAGE}\n{_TEXT}")],
)

register_adapter(
    f"{_TRANSFORMERS}.transformer_rfd4_proteina.RFD4ProteinaAdaptiveNorm",
    sources={"forward": "357325e0ffe56283"},
    edits=[
        ("normalized = self.norm(values)", ""),
        (
            "return (normalized * gamma + beta) * mask[..., None]",
            "scale = gamma\nreturn (self.norm(values) * scale + beta) * mask[..., None]",
        ),
    ],
)

# ------------------------------------------------------------------------------------------- sums apart from gates

register_adapter(
    f"{_TRANSFORMERS}.transformer_allegro.AllegroTransformerBlock",
    sources={"forward": "0004da078cb60f96"},
    edits=[
        (
            "attn_output = gate_msa * attn_output\nhidden_states = attn_output + hidden_states",
            "hidden_states = gate_msa * attn_output + hidden_states",
        )
    ],
)

# ------------------------------------------------------------------------------------------------ casts in between

register_adapter(
    f"{_TRANSFORMERS}.transformer_mochi.MochiModulatedRMSNorm",
    sources={"forward": "4953cce8f0447c6e"},
    edits=[
        (
            """
            hidden_states_dtype = hidden_states.dtype
            hidden_states = hidden_states.to(torch.float32)
            hidden_states = self.norm(hidden_states)
            if scale is not None:
                hidden_states = hidden_states * scale
            hidden_states = hidden_states.to(hidden_states_dtype)
            """,
            """
            if scale is not None:
                hidden_states = (self.norm(hidden_states.float()) * scale).type_as(hidden_states)
            else:
                hidden_states = self.norm(hidden_states.float()).type_as(hidden_states)
            """,
        )
    ],
)


def _ernie(norm: str, site: str) -> tuple[str, str]:
    rows = f"(1 + scale_{site}.float()) + shift_{site}.float()"
    return (
        f"x = self.{norm}(x)\nx = (x.float() * {rows}).to(x.dtype)",
        f"x = (self.{norm}(x).to(dtype=torch.float32) * {rows}).to(x.dtype)",
    )


register_adapter(
    f"{_TRANSFORMERS}.transformer_ernie_image.ErnieImageSharedAdaLNBlock",
    sources={"forward": "4e0e905bbd98a34d"},
    edits=[
        _ernie("adaLN_sa_ln", "msa"),
        _ernie("adaLN_mlp_ln", "mlp"),
        (
            "x = residual + (gate_msa.float() * attn_out.float()).to(x.dtype)",
            "x = (residual + gate_msa.float() * attn_out.float()).type_as(residual)",
        ),
        (
            "return residual + (gate_mlp.float() * self.mlp(x).float()).to(x.dtype)",
            "mlp_out = self.mlp(x)\nreturn (residual + gate_mlp.float() * mlp_out.float()).type_as(residual)",
        ),
    ],
)

# --------------------------------------------------------------------------------------------------------- Sana WM
# Each frame has its own modulation: frames are a dimension of their own.

_FRAMES = "self.{}(x.reshape(B * num_frames, -1, C)) * (1 + {}.reshape(-1, 1, C)) + {}.reshape(-1, 1, C)"


def _sana_wm(number: int, site: str) -> tuple[str, str]:
    rows = f"scale_{site}", f"shift_{site}"
    return (
        f"x_norm{number} = self.norm{number}(x).reshape(B, num_frames, -1, C)\n"
        f"x_{site}_in = (x_norm{number} * (1 + {rows[0]}) + {rows[1]}).reshape(B, N, C)",
        f"x_{site}_in = ({_FRAMES.format(f'norm{number}', *rows)}).reshape(B, N, C)",
    )


register_adapter(
    f"{_TRANSFORMERS}.transformer_sana_wm.SanaVideoMSCamCtrlBlock",
    sources={"forward": "1790e1666161194a"},
    edits=[_sana_wm(1, "msa"), _sana_wm(2, "mlp")],
)
register_adapter(
    f"{_TRANSFORMERS}.transformer_sana_wm.T2IFinalLayer",
    sources={"forward": "82209595b463e6e2"},
    edits=[
        (
            "x = (self.norm_final(x).reshape(B, num_frames, -1, C) * (1 + scale) + shift).reshape(B, N, C)",
            f"x = ({_FRAMES.format('norm_final', 'scale', 'shift')}).reshape(B, N, C)",
        )
    ],
)

# ----------------------------------------------------------------------------------------------------- Kandinsky 5
# One trio of names serves all sites. With names of their own, a residual and its next norm are a pair.


def _kandinsky5(stream: str, out: str, sites: dict[str, tuple[str, str]]) -> list[tuple[str, str]]:
    edits, rows = [], []
    for number, (parameters, (norm, call)) in enumerate(sites.items()):
        chunk = f"{{}} = torch.chunk({parameters}, 3, dim=-1)"
        shift, scale, gate = (f"{name}{number}" for name in ("shift", "scale", "gate"))
        statements = (
            f"{{chunk}}{out} = (self.{norm}({stream}.float()) * ({{scale}}.float() + 1.0) + {{shift}}.float())"
            f".type_as({stream})\n{out} = self.{call}\n"
            f"{stream} = ({stream}.float() + {{gate}}.float() * {out}.float()).type_as({stream})"
        )
        names = {"shift": "shift", "scale": "scale", "gate": "gate"}
        old = statements.format(chunk=f"{chunk.format('shift, scale, gate')}\n", **names)
        edits.append((old, statements.format(chunk="", shift=shift, scale=scale, gate=gate)))
        rows.append(chunk.format(f"{shift}, {scale}, {gate}"))
    return [(edits[0][0], "\n".join([*rows, edits[0][1]])), *edits[1:]]


_TURNED = "self_attention({}, rotary_emb=rope{})"
register_adapter(
    f"{_TRANSFORMERS}.transformer_kandinsky.Kandinsky5TransformerEncoderBlock",
    sources={"forward": "cc9b2bf0800d2344"},
    edits=_kandinsky5(
        "x",
        "out",
        {
            "self_attn_params": ("self_attention_norm", _TURNED.format("out", "")),
            "ff_params": ("feed_forward_norm", "feed_forward(out)"),
        },
    ),
)
register_adapter(
    f"{_TRANSFORMERS}.transformer_kandinsky.Kandinsky5TransformerDecoderBlock",
    sources={"forward": "c4d4a8ae7e985708"},
    edits=_kandinsky5(
        "visual_embed",
        "visual_out",
        {
            "self_attn_params": (
                "self_attention_norm",
                _TURNED.format("visual_out", ", sparse_params=sparse_params"),
            ),
            "cross_attn_params": (
                "cross_attention_norm",
                "cross_attention(visual_out, encoder_hidden_states=text_embed)",
            ),
            "ff_params": ("feed_forward_norm", "feed_forward(visual_out)"),
        },
    ),
)

# ----------------------------------------------------------------------------------------------------- Kandinsky 6
# Helpers take a norm's result and a gated branch; modulation is [B, D].


def token_rows(modulation: Tensor) -> Tensor:
    """[B, 1, D] of [B, D]; per-token modulation as it is."""
    return modulation.unsqueeze(1) if modulation.ndim == 2 else modulation


def _modulated(norm: str, x: str, call: str = "{}") -> tuple[str, str]:
    """A norm's result in a helper's call, and without it; `call`: what takes it."""
    return (
        call.format(f"apply_scale_shift(self.{norm}({x}.float()), {x}, scale, shift)"),
        call.format(f"(self.{norm}({x}.float()) * (scale.float() + 1.0) + shift.float()).type_as({x})"),
    )


def _gated(target: str, x: str, branch: tuple[str, str], cast: str = "") -> tuple[str, str]:
    """A statement that adds a gated branch; `target`: `x =` or `return`."""
    return (
        f"{target} apply_gate_sum({x}, {branch[0]}, gate){cast}",
        f"branch = {branch[1]}\n{target} ({x}.float() + gate.float() * branch.float()).type_as({x})",
    )


def _chunked(modulation: str, names: str, parts: int) -> tuple[str, str]:
    chunk = f"{names} = torch.chunk({{}}, {parts}, dim=-1)"
    return chunk.format(modulation), chunk.format(f"token_rows({modulation})")


def _fused_stream(block: str, x: str, temb: str, a: str) -> list[tuple[str, str]]:
    """`a`: what the names of the audio stream end in."""
    attention, feed_forward = (
        f"self.{block}.self_attention({{}}, rotary_emb={x}_rope)",
        f"self.{block}.feed_forward({{}})",
    )
    old, new = _modulated(f"{block}.cross_attention_norm", x)
    return [
        _chunked(f"self.{block}.visual_modulation({temb})", f"sa_p, ca_p, ff_p{a}", 3),
        _gated(f"{x} =", x, _modulated(f"{block}.self_attention_norm", x, attention), f".type_as({x})"),
        (f"{x}_pre_ca = {old}", f"{x}_pre_ca = {new}"),
        _gated(f"{x} =", x, _modulated(f"{block}.feed_forward_norm", x, feed_forward), f".type_as({x})"),
    ]


def _one_stream(x: str, modulation: str, parts: str, norm: str, attention: str) -> list[tuple[str, str]]:
    return [
        _chunked(modulation, parts, 2),
        _gated(f"{x} =", x, _modulated(norm, x, attention)),
        _gated("return", x, _modulated("feed_forward_norm", x, "self.feed_forward({})")),
    ]


_HELPERS = {"apply_scale_shift": "1f6e3e4d592a10fc", "apply_gate_sum": "6d15587ced232fa9"}
_ENCODER = ("attn_norm", "self.attn({}, rotary_emb=rope, attn_mask=attn_mask)")
_SR = ("self_attention_norm", "self.self_attention({}, rotary_emb, sparse_params)")
_SR_PARTS = "self_attention_params, feed_forward_params"
for _class_name, _digest, _edits in (
    (
        "kandinsky6.Kandinsky6TransformerEncoderBlock",
        "145f2f72f02efb00",
        _one_stream("x", "self.text_modulation(time_embed)", "sa_params, ff_params", *_ENCODER),
    ),
    (
        "kandinsky6_sr.Kandinsky6SRTransformerBlock",
        "8169921368543f79",
        _one_stream("hidden_states", "self.visual_modulation(temb)", _SR_PARTS, *_SR),
    ),
    (
        "kandinsky6.Kandinsky6FusedTransformerDecoderBlock",
        "9b2c0e99e28098b9",
        _fused_stream("video_dec_block", "vis", "t_v", "") + _fused_stream("audio_dec_block", "aud", "t_a", "_a"),
    ),
):
    register_adapter(
        f"{_TRANSFORMERS}.transformer_{_class_name}",
        sources={"forward": _digest, **_HELPERS},
        edits=_edits,
        functions=[token_rows],
    )
