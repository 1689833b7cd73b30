"""What does each op compute? Plain differentiable PyTorch: the CPU path, and the definition of right."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UserError


def promoted_dtype(*operands: Tensor | torch.dtype | None) -> torch.dtype:
    """The dtype that eager arithmetic on these tensors (None: absent), or tensors of these dtypes, would give."""
    dtypes = [o if isinstance(o, torch.dtype) else o.dtype for o in operands if o is not None]
    return functools.reduce(torch.promote_types, dtypes)


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype that the ops calculate in: float64 if any tensor (None: absent) is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def check_operands(
    x: Tensor,
    modulation: Sequence[tuple[str, Tensor | None]] = (),
    columns: Sequence[tuple[str, Tensor | None]] = (),
    same_as_x: Tensor | None = None,
):
    """Holds the layout contract of every op.

    Args:
        x: [B, S, D], floating point.
        modulation: (name, tensor) of what must be [B or 1, T, D] with T = 1, a divisor of S (frames), or S.
        columns: (name, tensor) of what must be [D].
        same_as_x: y, which must have the shape of x.

    Raises:
        UserError: a shape, dtype or device is another one.
    """
    shape = x.shape  # each reading makes an object: a third of the time of these checks, which every call pays
    if len(shape) != 3 or not x.is_floating_point():
        raise UserError(f"x must be floating point and [B, S, D], but it is {x.dtype} {tuple(shape)}.")
    batch, tokens, width = shape
    if same_as_x is not None and (same_as_x.shape != shape or same_as_x.device != x.device):
        raise UserError(
            f"y must have the shape and device of x, {tuple(x.shape)} on {x.device}, "
            f"but it is {tuple(same_as_x.shape)} on {same_as_x.device}."
        )
    for name, m in modulation:
        if m is None:
            continue
        found = m.shape
        fits = len(found) == 3 and found[2] == width and (found[0] == 1 or found[0] == batch)
        if not fits or not (found[1] == 1 or found[1] == tokens or (found[1] > 0 and tokens % found[1] == 0)):
            raise UserError(
                f"{name} must be [B or 1, T, D] with B = {batch}, D = {width} and T = 1, S = {tokens} or a divisor of "
                f"S for x of shape {tuple(x.shape)}, but it is {tuple(m.shape)}. Pass the modulation of this block."
            )
        _check_kind(x, name, m)
    for name, c in columns:
        if c is None:
            continue
        if c.dim() != 1 or c.shape[0] != width:
            raise UserError(
                f"{name} must be [D] with D = {width} for x of shape {tuple(x.shape)}, but it is {tuple(c.shape)}."
            )
        _check_kind(x, name, c)


def check_rope(x: Tensor, weight: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int):
    """Holds the layout contract of rms_norm_rope, see there.

    Raises:
        UserError: a shape, dtype or device is another one, or cos or sin asks for a gradient.
    """
    check_operands(x)
    batch, tokens, width = x.shape
    if heads < 1 or width % (2 * heads) != 0:
        raise UserError(f"heads must divide D = {width} into heads of even width, but heads is {heads}.")
    head_width = width // heads
    if weight.shape not in ((width,), (head_width,)):
        raise UserError(
            f"weight must be [D] = [{width}], or [D / heads] = [{head_width}] where each head is normalised "
            f"by itself, with x of shape {tuple(x.shape)} and {heads} heads, but it is {tuple(weight.shape)}."
        )
    _check_kind(x, "weight", weight)
    if cos is None and sin is None and weight.shape == (head_width,):
        return
    if cos is None or sin is None:
        raise UserError(
            "cos and sin must be given, both, unless each head is normalised by itself and none is turned; but cos is "
            f"{'absent' if cos is None else 'there'} and sin {'absent' if sin is None else 'there'} for a weight of "
            f"shape {tuple(weight.shape)}. Without rotation and over all heads use rms_norm_modulate."
        )
    shorter = weight.shape != (width,) and cos.ndim == 4 and cos.shape[1] < tokens
    rows = cos.shape[1] if shorter else tokens
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape not in ((1, rows, 1, head_width), (batch, rows, 1, head_width)):
            raise UserError(
                f"{name} must be [B or 1, S, 1, D / heads] = [{batch} or 1, {rows}, 1, {head_width}] for x of "
                f"shape {tuple(x.shape)} and {heads} heads, but it is {tuple(table.shape)}."
            )
        _check_kind(x, name, table)
        if table.requires_grad:
            raise UserError(f"{name} is a table of positions and gets no gradient. Pass {name}.detach().")


def _check_kind(x: Tensor, name: str, tensor: Tensor):
    if tensor.device != x.device or not tensor.is_floating_point():
        raise UserError(
            f"{name} must be floating point and on the device of x, {x.device}, "
            f"but it is {tensor.dtype} on {tensor.device}."
        )


def row_statistics(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Mean and 1 / sqrt(variance + eps) of every row.

    Args:
        x: [B, S, D]. eps: added to the variance. dtype: to calculate in.

    Returns:
        [B, S, 2] of `dtype`: mean, reciprocal standard deviation.
    """
    variance, mean = torch.var_mean(x.to(dtype), dim=-1, correction=0)
    return torch.stack((mean, torch.rsqrt(variance + eps)), dim=-1)


def inverse_rms(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of every row of x [B, S, D]: [B, S] of `dtype`."""
    return torch.rsqrt(x.to(dtype).square().mean(dim=-1) + eps)


def inverse_rms_of_rope(x: Tensor, weight: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int, eps: float):
    """`inverse_rms` as rms_norm_rope needs it: [B, S], or [B, S, heads] where each head is normalised by itself."""
    by_head = cos is None or weight.shape[0] != x.shape[2]
    return inverse_rms(x.unflatten(2, (heads, -1)) if by_head else x, eps, compute_dtype(x, weight, cos, sin))


def layer_norm_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """LN(x)[* weight + bias] * (1 + scale + scale_table) + shift + shift_table; see `ops.layer_norm_modulate`."""
    columns = (("weight", weight), ("bias", bias), ("scale_table", scale_table), ("shift_table", shift_table))
    check_operands(x, (("scale", scale), ("shift", shift)), columns)
    operands = (x, scale, shift, weight, bias, scale_table, shift_table)
    stats = row_statistics(x, eps, compute_dtype(*operands))
    return apply_layer_norm_modulate(stats, *operands, out_dtype or promoted_dtype(*operands))


def rms_norm_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    scale_offset: float = 1.0,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """RMS(x) * (weight + weight_offset) * (scale_offset + scale) + shift; see `ops.rms_norm_modulate`."""
    check_operands(x, (("scale", scale), ("shift", shift)), (("weight", weight),))
    operands = (x, scale, shift, weight)
    rstd = inverse_rms(x, eps, compute_dtype(*operands))
    return apply_rms_norm_modulate(
        rstd, *operands, scale_offset, weight_offset, out_dtype or promoted_dtype(*operands)
    )


def gate_residual(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None = None,
    *,
    gate_table: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x + y * (gate + gate_table), or x + y without both; see `ops.gate_residual`."""
    check_operands(x, (("gate", gate),), (("gate_table", gate_table),), same_as_x=y)
    return apply_gate_residual(x, y, gate, gate_table, out_dtype or promoted_dtype(x, y, gate, gate_table))


def gate_residual_layer_norm_modulate(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    gate_table: Tensor | None = None,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`gate_residual`, then `layer_norm_modulate` of its rounded result; see `ops`."""
    residual = gate_residual(x, y, gate, gate_table=gate_table, out_dtype=residual_dtype)
    tables = {"scale_table": scale_table, "shift_table": shift_table}
    normed = layer_norm_modulate(
        residual, scale, shift, eps=eps, weight=weight, bias=bias, out_dtype=out_dtype, **tables
    )
    return residual, normed


def rms_norm_rope(
    x: Tensor, weight: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, *, heads: int, eps: float = 1e-6
) -> Tensor:
    """RMS over all heads or over each, times weight, then pairs of columns rotated by their position; see `ops`."""
    check_rope(x, weight, cos, sin, heads)
    rstd = inverse_rms_of_rope(x, weight, cos, sin, heads, eps)
    return apply_rms_norm_rope(rstd, x, weight, cos, sin, heads)


def apply_layer_norm_modulate(stats, x, scale, shift, weight, bias, scale_table, shift_table, out_dtype) -> Tensor:
    """The op's result from x [B, S, D] and its `row_statistics` [B, S, 2]."""
    dtype, tokens = stats.dtype, x.shape[1]
    y = (x.to(dtype) - stats[..., :1]) * stats[..., 1:]
    y = _affine(y, weight, bias)
    gain = _sum_of(scale, scale_table, tokens, dtype)
    offset = _sum_of(shift, shift_table, tokens, dtype)
    y = y if gain is None else y * (1 + gain)
    return (y if offset is None else y + offset).to(out_dtype)


def apply_rms_norm_modulate(rstd, x, scale, shift, weight, scale_offset, weight_offset, out_dtype) -> Tensor:
    """The op's result from x [B, S, D] and its `inverse_rms` [B, S]."""
    dtype, tokens = rstd.dtype, x.shape[1]
    y = x.to(dtype) * rstd.unsqueeze(-1)
    y = y if weight is None else y * (weight.to(dtype) + weight_offset)
    y = y if scale is None else y * (scale_offset + rows_of(scale, tokens, dtype))
    return (y if shift is None else y + rows_of(shift, tokens, dtype)).to(out_dtype)


def apply_gate_residual(x, y, gate, gate_table, out_dtype) -> Tensor:
    """The op's result."""
    dtype = compute_dtype(x, y, gate, gate_table)
    factor = _sum_of(gate, gate_table, x.shape[1], dtype)
    y = y.to(dtype)
    return (x.to(dtype) + (y if factor is None else y * factor)).to(out_dtype)


def apply_rms_norm_rope(rstd, x, weight, cos, sin, heads) -> Tensor:
    """The op's result from x [B, S, D] and its `inverse_rms_of_rope`: [B, S, heads, D / heads] of x's dtype."""
    x_of_norm = x if rstd.ndim == 2 else x.unflatten(2, (heads, -1))
    normed = x_of_norm.to(rstd.dtype) * rstd.unsqueeze(-1) * weight.to(rstd.dtype)
    return turned(normed.view(*x.shape[:2], heads, x.shape[2] // heads), cos, sin).to(x.dtype)


def turned(x: Tensor, cos: Tensor | None, sin: Tensor | None, back: bool = False) -> Tensor:
    """x [B, S, heads, D / heads] with the pairs of its first tokens rotated: as many as the tables have."""
    if cos is None:
        return x
    even, odd = x[:, : cos.shape[1]].unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2].to(x.dtype), sin[..., 1::2].to(x.dtype)
    sin = -sin if back else sin
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return pairs if pairs.shape[1] == x.shape[1] else torch.cat((pairs, x[:, pairs.shape[1] :]), dim=1)


def rows_of(m: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Modulation [B, T, D] as [B, 1 or S, D] of `dtype`: token s reads row s * T // S."""
    m = m.to(dtype)
    if m.shape[1] in (1, tokens):
        return m
    return m.repeat_interleave(tokens // m.shape[1], dim=1)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def _sum_of(m: Tensor | None, table: Tensor | None, tokens: int, dtype: torch.dtype) -> Tensor | None:
    if m is None:
        return None if table is None else table.to(dtype)
    rows = rows_of(m, tokens, dtype)
    return rows if table is None else rows + table.to(dtype)
