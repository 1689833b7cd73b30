"""What does torch know of the ops: schemas, kernels, shapes without data, and autograd?"""

import torch
from torch import Tensor

from . import gradients
from .reference import (
    apply_gate_residual,
    apply_layer_norm_modulate,
    apply_rms_norm_modulate,
    apply_rms_norm_rope,
    compute_dtype,
    inverse_rms,
    inverse_rms_of_rope,
    row_statistics,
)
from .registry import (
    bits_of,
    define,
    define_autograd,
    define_backward,
    empty_gradients,
    gradients_of,
    keep,
    kept,
    kind_of,
)

# In every schema the tensor arguments come first and modulations are [B, T, D] with one T; the
# functions in `ops` see to that. A backward op returns only the gradients that the bits of `needs` ask for, bit i
# standing for argument i of the forward op. Its double backward is the differentiable formula in `gradients`.


def _save_shift(ctx, x: Tensor, shift: Tensor | None, shift_table: Tensor | None = None):
    """What is added is not kept: its gradient needs only the number of its rows and its dtype."""
    ctx.shift_rows = 1 if shift is None else shift.shape[1]
    ctx.shift_dtype = x.dtype if shift is None else shift.dtype
    ctx.shift_table_dtype = x.dtype if shift_table is None else shift_table.dtype


def _split_shift(ctx, needs: int, shift_bit: int, tokens: int) -> tuple[int, int, bool]:
    """(needs, rows, direct). A per-token shift has grad itself as gradient, and an op may not return its input."""
    if needs >> shift_bit & 1 and ctx.shift_rows == tokens:
        return needs & ~(1 << shift_bit), 1, True
    return needs, ctx.shift_rows, False


def _apart(modulation: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(rows of tokens, the row of a sample): the first is saved; the second, small beside x, is for `keep`."""
    return (modulation, None) if modulation is not None and modulation.shape[1] > 1 else (None, modulation)


def _either(rows: Tensor | None, row: Tensor | None) -> Tensor | None:
    return row if rows is None else rows


def _layer_norm_modulate(x, scale, shift, weight, bias, scale_table, shift_table, eps, out_dtype):
    operands = (x, scale, shift, weight, bias, scale_table, shift_table)
    stats = row_statistics(x, eps, compute_dtype(*operands))
    return apply_layer_norm_modulate(stats, *operands, out_dtype).contiguous(), stats


def _fake_layer_norm_modulate(x, scale, shift, weight, bias, scale_table, shift_table, eps, out_dtype):
    dtype = compute_dtype(x, scale, shift, weight, bias, scale_table, shift_table)
    return x.new_empty(x.shape, dtype=out_dtype), x.new_empty((*x.shape[:2], 2), dtype=dtype)


def _fake_layer_norm_modulate_backward(
    grad, x, stats, scale, weight, bias, scale_table, rows, shift_dtype, shift_table_dtype, needs
):
    shift = ((x.shape[0], rows, x.shape[2]), shift_dtype)
    columns = (*map(kind_of, (weight, bias, scale_table)), ((x.shape[2],), shift_table_dtype))
    return empty_gradients(x, needs, kind_of(x), kind_of(scale), shift, *columns)


def _save_layer_norm_modulate(ctx, inputs, output):
    x, scale, shift, weight, bias, scale_table, shift_table, eps, _ = inputs
    _, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    rows, row = _apart(scale)
    ctx.save_for_backward(x, stats, rows)
    keep(ctx, row, weight, bias, scale_table)
    ctx.eps = eps
    _save_shift(ctx, x, shift, shift_table)


def _differentiate_layer_norm_modulate(ctx, grad, _):
    if grad is None:
        return (None,) * 9
    (x, stats, scale), (row, weight, bias, scale_table) = ctx.saved_tensors, kept(ctx)
    scale = _either(scale, row)
    needs, rows, direct = _split_shift(ctx, bits_of(ctx.needs_input_grad), 2, x.shape[1])
    if torch.is_grad_enabled():
        stats = row_statistics(x, ctx.eps, stats.dtype)
    args = (grad, x, stats, scale, weight, bias, scale_table, rows, ctx.shift_dtype, ctx.shift_table_dtype)
    placed = gradients_of(ctx, "layer_norm_modulate", 9, needs, *args)
    return (*placed[:2], grad, *placed[3:]) if direct else placed


def _rms_norm_modulate(x, scale, shift, weight, eps, scale_offset, weight_offset, out_dtype):
    rstd = inverse_rms(x, eps, compute_dtype(x, scale, shift, weight))
    y = apply_rms_norm_modulate(rstd, x, scale, shift, weight, scale_offset, weight_offset, out_dtype)
    return y.contiguous(), rstd


def _fake_rms_norm_modulate(x, scale, shift, weight, eps, scale_offset, weight_offset, out_dtype):
    dtype = compute_dtype(x, scale, shift, weight)
    return x.new_empty(x.shape, dtype=out_dtype), x.new_empty(x.shape[:2], dtype=dtype)


def _fake_rms_norm_modulate_backward(
    grad, x, rstd, scale, weight, scale_offset, weight_offset, rows, shift_dtype, needs
):
    shift = ((x.shape[0], rows, x.shape[2]), shift_dtype)
    return empty_gradients(x, needs, kind_of(x), kind_of(scale), shift, kind_of(weight))


def _save_rms_norm_modulate(ctx, inputs, output):
    x, scale, shift, weight, eps, scale_offset, weight_offset, _ = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    rows, row = _apart(scale)
    ctx.save_for_backward(x, rstd, rows)
    keep(ctx, row, weight)
    ctx.eps, ctx.offsets = eps, (scale_offset, weight_offset)
    _save_shift(ctx, x, shift)


def _differentiate_rms_norm_modulate(ctx, grad, _):
    if grad is None:
        return (None,) * 8
    (x, rstd, scale), (row, weight) = ctx.saved_tensors, kept(ctx)
    scale = _either(scale, row)
    needs, rows, direct = _split_shift(ctx, bits_of(ctx.needs_input_grad), 2, x.shape[1])
    if torch.is_grad_enabled():
        rstd = inverse_rms(x, ctx.eps, rstd.dtype)
    args = (grad, x, rstd, scale, weight, *ctx.offsets, rows, ctx.shift_dtype)
    placed = gradients_of(ctx, "rms_norm_modulate", 8, needs, *args)
    return (*placed[:2], grad, *placed[3:]) if direct else placed


def _gate_residual(x, y, gate, gate_table, out_dtype):
    return apply_gate_residual(x, y, gate, gate_table, out_dtype).contiguous()


def _fake_gate_residual(x, y, gate, gate_table, out_dtype):
    return x.new_empty(x.shape, dtype=out_dtype)


def _fake_gate_residual_backward(grad, y, gate, gate_table, y_dtype, needs):
    return empty_gradients(grad, needs, None, (grad.shape, y_dtype), kind_of(gate), kind_of(gate_table))


def _save_gate_residual(ctx, inputs, output):
    _, y, gate, gate_table, _ = inputs
    ctx.set_materialize_grads(False)
    rows, row = _apart(gate)
    # With a frozen gate (LoRA) y would be kept for nothing: 2 bytes an element that eager would not keep either.
    ctx.save_for_backward(y if any(ctx.needs_input_grad[2:4]) else None, rows)
    keep(ctx, row, gate_table)
    ctx.y_dtype = y.dtype


def _differentiate_gate(ctx, count, grad, y, gate, gate_table):
    """Gradients for (x, y, gate, gate_table) and None for more arguments, `count` in all."""
    if gate is None and gate_table is None:
        return grad, grad, *(None,) * (count - 2)
    needs = bits_of(ctx.needs_input_grad) & 0b1110
    if not needs:
        return grad, *(None,) * (count - 1)
    found = gradients_of(ctx, "gate_residual", count, needs, grad, y, gate, gate_table, ctx.y_dtype)
    return grad, *found[1:]


def _differentiate_gate_residual(ctx, grad):
    if grad is None:
        return (None,) * 5
    (y, gate), (row, gate_table) = ctx.saved_tensors, kept(ctx)
    return _differentiate_gate(ctx, 5, grad, y, _either(gate, row), gate_table)


def _gate_residual_layer_norm_modulate(
    x, y, gate, gate_table, scale, shift, weight, bias, scale_table, shift_table, eps, residual_dtype, out_dtype
):
    residual = apply_gate_residual(x, y, gate, gate_table, residual_dtype).contiguous()
    return residual, *_layer_norm_modulate(
        residual, scale, shift, weight, bias, scale_table, shift_table, eps, out_dtype
    )


def _fake_gate_residual_layer_norm_modulate(
    x, y, gate, gate_table, scale, shift, weight, bias, scale_table, shift_table, eps, residual_dtype, out_dtype
):
    residual = x.new_empty(x.shape, dtype=residual_dtype)
    return residual, *_fake_layer_norm_modulate(
        residual, scale, shift, weight, bias, scale_table, shift_table, eps, out_dtype
    )


def _fake_gate_residual_layer_norm_modulate_backward(
    grad_residual, grad, residual, stats, y, gate, gate_table, scale, weight, bias, scale_table,
    x_dtype, y_dtype, rows, shift_dtype, shift_table_dtype, needs,
):  # fmt: skip
    shift = ((residual.shape[0], rows, residual.shape[2]), shift_dtype)
    whole = [(residual.shape, x_dtype), (residual.shape, y_dtype)]
    shift_table = ((residual.shape[2],), shift_table_dtype)
    norm = (kind_of(scale), shift, *map(kind_of, (weight, bias, scale_table)), shift_table)
    return empty_gradients(residual, needs, *whole, kind_of(gate), kind_of(gate_table), *norm)


def _save_gate_residual_layer_norm_modulate(ctx, inputs, output):
    x, y, gate, gate_table, scale, shift, weight, bias, scale_table, shift_table, eps, _, _ = inputs
    residual, _, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    y_kept = y if any(ctx.needs_input_grad[2:4]) else None
    (gates, gate), (scales, scale) = _apart(gate), _apart(scale)
    ctx.save_for_backward(residual, stats, y_kept, gates, scales)
    keep(ctx, gate, scale, gate_table, weight, bias, scale_table)
    ctx.eps, ctx.x_dtype, ctx.y_dtype = eps, x.dtype, y.dtype
    _save_shift(ctx, x, shift, shift_table)


def _differentiate_gate_residual_layer_norm_modulate(ctx, grad_residual, grad, _):
    residual, stats, y, gates, scales = ctx.saved_tensors
    gate, scale, gate_table, weight, bias, scale_table = kept(ctx)
    gate, scale = _either(gates, gate), _either(scales, scale)
    if grad is None and grad_residual is None:
        return (None,) * 13
    if grad is None:
        return _differentiate_gate(ctx, 13, grad_residual, y, gate, gate_table)
    needs, rows, direct = _split_shift(ctx, bits_of(ctx.needs_input_grad), 5, residual.shape[1])
    shared = gate is None and gate_table is None and ctx.x_dtype == ctx.y_dtype and needs & 3 == 3
    if shared:
        needs &= ~2
    if torch.is_grad_enabled():
        stats = row_statistics(residual, ctx.eps, stats.dtype)
    forward = (residual, stats, y, gate, gate_table, scale, weight, bias, scale_table)
    dtypes = (ctx.shift_dtype, ctx.shift_table_dtype)
    args = (grad_residual, grad, *forward, ctx.x_dtype, ctx.y_dtype, rows, *dtypes)
    placed = gradients_of(ctx, "gate_residual_layer_norm_modulate", 13, needs, *args)
    if shared:
        placed = (placed[0], placed[0], *placed[2:])
    return (*placed[:5], grad, *placed[6:]) if direct else placed


def _rms_norm_rope(x, weight, cos, sin, heads, eps):
    rstd = inverse_rms_of_rope(x, weight, cos, sin, heads, eps)
    return apply_rms_norm_rope(rstd, x, weight, cos, sin, heads).contiguous(), rstd


def _fake_rms_norm_rope(x, weight, cos, sin, heads, eps):
    batch, tokens, width = x.shape
    by_head = cos is None or weight.shape[0] != width
    rows = (batch, tokens, heads) if by_head else (batch, tokens)
    rstd = x.new_empty(rows, dtype=compute_dtype(x, weight, cos, sin))
    return x.new_empty((batch, tokens, heads, width // heads)), rstd


def _fake_rms_norm_rope_backward(grad, x, rstd, weight, cos, sin, needs):
    return empty_gradients(x, needs, kind_of(x), kind_of(weight))


def _save_rms_norm_rope(ctx, inputs, output):
    x, weight, cos, sin, _, eps = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, rstd, cos, sin)
    keep(ctx, weight)
    ctx.eps = eps


def _differentiate_rms_norm_rope(ctx, grad, _):
    if grad is None:
        return (None,) * 6
    (x, rstd, cos, sin), (weight,) = ctx.saved_tensors, kept(ctx)
    needs = bits_of(ctx.needs_input_grad)
    if torch.is_grad_enabled():
        rstd = inverse_rms_of_rope(x, weight, cos, sin, grad.shape[2], ctx.eps)
    return gradients_of(ctx, "rms_norm_rope", 6, needs, grad, x, rstd, weight, cos, sin)


define(
    "layer_norm_modulate(Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, Tensor? scale_table, "
    "Tensor? shift_table, float eps, ScalarType out_dtype) -> (Tensor y, Tensor stats)",
    _layer_norm_modulate,
    _fake_layer_norm_modulate,
)
define_backward(
    "layer_norm_modulate_backward(Tensor grad, Tensor x, Tensor stats, Tensor? scale, Tensor? weight, Tensor? bias, "
    "Tensor? scale_table, int rows, ScalarType shift_dtype, ScalarType shift_table_dtype, int needs) -> Tensor[]",
    gradients.layer_norm_modulate,
    _fake_layer_norm_modulate_backward,
)
define_autograd("layer_norm_modulate", _save_layer_norm_modulate, _differentiate_layer_norm_modulate)
define(
    "rms_norm_modulate(Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, float eps, float scale_offset, "
    "float weight_offset, ScalarType out_dtype) -> (Tensor y, Tensor rstd)",
    _rms_norm_modulate,
    _fake_rms_norm_modulate,
)
define_backward(
    "rms_norm_modulate_backward(Tensor grad, Tensor x, Tensor rstd, Tensor? scale, Tensor? weight, "
    "float scale_offset, float weight_offset, int rows, ScalarType shift_dtype, int needs) -> Tensor[]",
    gradients.rms_norm_modulate,
    _fake_rms_norm_modulate_backward,
)
define_autograd("rms_norm_modulate", _save_rms_norm_modulate, _differentiate_rms_norm_modulate)
define(
    "gate_residual(Tensor x, Tensor y, Tensor? gate, Tensor? gate_table, ScalarType out_dtype) -> Tensor",
    _gate_residual,
    _fake_gate_residual,
)
define_backward(
    "gate_residual_backward(Tensor grad, Tensor? y, Tensor? gate, Tensor? gate_table, ScalarType y_dtype, int needs)"
    " -> Tensor[]",
    gradients.gate_residual,
    _fake_gate_residual_backward,
)
define_autograd("gate_residual", _save_gate_residual, _differentiate_gate_residual)
define(
    "gate_residual_layer_norm_modulate(Tensor x, Tensor y, Tensor? gate, Tensor? gate_table, Tensor? scale, "
    "Tensor? shift, Tensor? weight, Tensor? bias, Tensor? scale_table, Tensor? shift_table, float eps, "
    "ScalarType residual_dtype, ScalarType out_dtype) -> (Tensor residual, Tensor y, Tensor stats)",
    _gate_residual_layer_norm_modulate,
    _fake_gate_residual_layer_norm_modulate,
)
define_backward(
    "gate_residual_layer_norm_modulate_backward(Tensor? grad_residual, Tensor grad, Tensor residual, Tensor stats, "
    "Tensor? y, Tensor? gate, Tensor? gate_table, Tensor? scale, Tensor? weight, Tensor? bias, Tensor? scale_table, "
    "ScalarType x_dtype, ScalarType y_dtype, int rows, ScalarType shift_dtype, ScalarType shift_table_dtype, "
    "int needs) -> Tensor[]",
    gradients.gate_residual_layer_norm_modulate,
    _fake_gate_residual_layer_norm_modulate_backward,
)
define_autograd(
    "gate_residual_layer_norm_modulate",
    _save_gate_residual_layer_norm_modulate,
    _differentiate_gate_residual_layer_norm_modulate,
)
define(
    "rms_norm_rope(Tensor x, Tensor weight, Tensor? cos, Tensor? sin, int heads, float eps)"
    " -> (Tensor y, Tensor rstd)",
    _rms_norm_rope,
    _fake_rms_norm_rope,
)
define_backward(
    "rms_norm_rope_backward(Tensor grad, Tensor x, Tensor rstd, Tensor weight, Tensor? cos, Tensor? sin, int needs)"
    " -> Tensor[]",
    gradients.rms_norm_rope,
    _fake_rms_norm_rope_backward,
)
define_autograd("rms_norm_rope", _save_rms_norm_rope, _differentiate_rms_norm_rope)
