"""What are the gradients of each op? Plain differentiable PyTorch; also what a double backward differentiates."""

import torch
from torch import Tensor

from .reference import compute_dtype, rows_of, turned

# Every function returns only the gradients asked for, in the order of the op's tensor arguments: bit i of `needs`
# stands for argument i, whose dtype it has. Modulations are [B, T, D] here (`ops` has expanded a batch of 1).


def layer_norm_modulate(
    grad, x, stats, scale, weight, bias, scale_table, rows, shift_dtype, shift_table_dtype, needs
) -> list[Tensor]:
    """Gradients for (x, scale, shift, weight, bias, scale_table, shift_table).

    With xh = (x - mean) * rstd, n = xh * weight + bias, m = 1 + scale + scale_table and g = grad * m * weight:
    dx = rstd * (g - mean(g) - xh * mean(g * xh)), dscale = sum grad * n, dshift = sum grad,
    dweight = sum grad * m * xh, dbias = sum grad * m.

    Args:
        grad: [B, S, D]. x: [B, S, D]. stats: [B, S, 2] as `row_statistics` gives it.
        scale: [B, T, D] or None. weight, bias, scale_table: [D] or None.
        rows: T of shift. shift_dtype, shift_table_dtype: of their gradients. needs: bits, see above.
    """
    dtype = stats.dtype
    mean, rstd = stats[..., :1], stats[..., 1:]
    grad, xh = grad.to(dtype), (x.to(dtype) - mean) * rstd
    grad_affine = grad * _modulation(scale, scale_table, x.shape[1], dtype)
    gradients = []
    if needs & 1:
        g = grad_affine if weight is None else grad_affine * weight.to(dtype)
        dx = rstd * (g - g.mean(-1, keepdim=True) - xh * (g * xh).mean(-1, keepdim=True))
        gradients.append(dx.to(x.dtype))
    normed = xh if weight is None else xh * weight.to(dtype)
    normed = normed if bias is None else normed + bias.to(dtype)
    if needs & 2:
        gradients.append(_sum_rows(grad * normed, scale.shape[1]).to(scale.dtype))
    if needs & 4:
        gradients.append(_sum_rows(grad, rows).to(shift_dtype))
    sums = (grad_affine * xh, grad_affine, grad * normed, grad)
    dtypes = (*(None if each is None else each.dtype for each in (weight, bias, scale_table)), shift_table_dtype)
    columns = enumerate(zip(sums, dtypes), start=3)
    return gradients + [total.sum((0, 1)).to(dtype) for bit, (total, dtype) in columns if needs >> bit & 1]


def rms_norm_modulate(
    grad, x, rstd, scale, weight, scale_offset, weight_offset, rows, shift_dtype, needs
) -> list[Tensor]:
    """Gradients for (x, scale, shift, weight).

    With xh = x * rstd and g = grad * (scale_offset + scale) * (weight + weight_offset):
    dx = rstd * (g - xh * mean(g * xh)).

    Args: as `layer_norm_modulate`; rstd: [B, S].
    """
    dtype, tokens = rstd.dtype, x.shape[1]
    grad, xh = grad.to(dtype), x.to(dtype) * rstd.unsqueeze(-1)
    grad_normed = grad if scale is None else grad * (scale_offset + rows_of(scale, tokens, dtype))
    gain = None if weight is None else weight.to(dtype) + weight_offset
    gradients = []
    if needs & 1:
        gradients.append(_through_rms(grad_normed if gain is None else grad_normed * gain, xh, rstd).to(x.dtype))
    if needs & 2:
        normed = xh if gain is None else xh * gain
        gradients.append(_sum_rows(grad * normed, scale.shape[1]).to(scale.dtype))
    if needs & 4:
        gradients.append(_sum_rows(grad, rows).to(shift_dtype))
    if needs & 8:
        gradients.append((grad_normed * xh).sum((0, 1)).to(weight.dtype))
    return gradients


def gate_residual(grad, y, gate, gate_table, y_dtype, needs) -> list[Tensor]:
    """Gradients for (y, gate, gate_table), bits 1 to 3: grad * (gate + gate_table), sum grad * y. That of x is grad.

    Args:
        grad: [B, S, D]. y: [B, S, D], or None when neither the gate nor its table needs a gradient.
        gate: [B, T, D] or None. gate_table: [D] or None. y_dtype: dtype of y's gradient. needs: bits, see above.
    """
    dtype = compute_dtype(grad, y, gate, gate_table)
    grad, gradients = grad.to(dtype), []
    if needs & 2:
        gradients.append((grad * _modulation(gate, gate_table, grad.shape[1], dtype, offset=0)).to(y_dtype))
    if needs & 12:
        product = grad * y.to(dtype)
    if needs & 4:
        gradients.append(_sum_rows(product, gate.shape[1]).to(gate.dtype))
    if needs & 8:
        gradients.append(product.sum((0, 1)).to(gate_table.dtype))
    return gradients


def gate_residual_layer_norm_modulate(
    grad_residual, grad, residual, stats, y, gate, gate_table, scale, weight, bias, scale_table,
    x_dtype, y_dtype, rows, shift_dtype, shift_table_dtype, needs,
) -> list[Tensor]:  # fmt: skip
    """Gradients for (x, y, gate, gate_table, scale, shift, weight, bias, scale_table, shift_table).

    Both functions above in turn; what reaches the residual is the sum of grad_residual (or None) and dx of the norm.
    """
    dtype = stats.dtype
    norm_needs = 1 | (needs >> 3 & ~1)
    norm = (scale, weight, bias, scale_table, rows, shift_dtype, shift_table_dtype)
    total, *norm_gradients = layer_norm_modulate(grad, residual.to(dtype), stats, *norm, norm_needs)
    if grad_residual is not None:
        total = total + grad_residual.to(dtype)
    gradients = [total.to(x_dtype, copy=True)] if needs & 1 else []
    if needs & 0b1110:
        gradients += gate_residual(total, y, gate, gate_table, y_dtype, needs & 0b1110)
    return gradients + norm_gradients


def rms_norm_rope(grad, x, rstd, weight, cos, sin, needs) -> list[Tensor]:
    """Gradients for (x, weight): grad turned back by the rotation, then as `rms_norm_modulate`.

    Args:
        grad: [B, S, heads, D / heads]. x: [B, S, D]. rstd: [B, S] or [B, S, heads]. weight: [D] or [D / heads].
        cos, sin: [B or 1, S or fewer, 1, D / heads] or None.
    """
    dtype, shape = rstd.dtype, x.shape
    grad = turned(grad.to(dtype), cos, sin, back=True)
    if rstd.ndim == 2:
        grad = grad.flatten(2)
    xh, gradients = x.to(dtype).view(grad.shape) * rstd.unsqueeze(-1), []
    if needs & 1:
        gradients.append(_through_rms(grad * weight.to(dtype), xh, rstd).to(x.dtype).view(shape))
    if needs & 2:
        gradients.append((grad * xh).sum(tuple(range(grad.ndim - 1))).to(weight.dtype))
    return gradients


def _through_rms(g: Tensor, xh: Tensor, rstd: Tensor) -> Tensor:
    return rstd.unsqueeze(-1) * (g - xh * (g * xh).mean(-1, keepdim=True))


def _modulation(m: Tensor | None, table: Tensor | None, tokens: int, dtype: torch.dtype, offset: int = 1):
    """offset + m + table as rows; 1 where both are absent."""
    if m is None and table is None:
        return 1
    total = offset if m is None else offset + rows_of(m, tokens, dtype)
    return total if table is None else total + table.to(dtype)


def _sum_rows(values: Tensor, rows: int) -> Tensor:
    """[B, S, D] summed over the tokens that share a row: [B, T, D], never `values` itself."""
    batch, tokens, width = values.shape
    if tokens == 0:
        return values.new_zeros((batch, rows, width))
    return values.unflatten(1, (rows, tokens // rows)).sum(2)
