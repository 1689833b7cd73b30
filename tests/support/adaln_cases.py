"""Inputs of the fused ops laid out as diffusers lays them out, and errors against float64."""

import torch
import torch.nn.functional as F


def make_modulation(batch, rows, width, dtype, device, index=1, rows_are_tokens=False):
    """A strided chunk of [B, 6, D] (one row) or [B, T, 6, D], as a leaf: [B, T, D]."""
    if rows == 1 and not rows_are_tokens:
        chunk = torch.randn(batch, 6, width, device=device).mul_(0.3).to(dtype).chunk(6, dim=1)[index]
    else:
        chunk = torch.randn(batch, rows, 6, width, device=device).mul_(0.3).to(dtype).chunk(6, dim=2)[index].squeeze(2)
    return chunk.detach().requires_grad_()


def make_x(batch, tokens, width, dtype, device, mean=0.0):
    return (torch.randn(batch, tokens, width, device=device) + mean).to(dtype).requires_grad_()


def make_columns(width, device, offset=0.0):
    return (torch.randn(width, device=device) * 0.3 + offset).requires_grad_()


def rows_of(m, tokens):
    return m if m.shape[1] in (1, tokens) else m.repeat_interleave(tokens // m.shape[1], dim=1)


def eager_layer_norm_modulate(x, scale=None, shift=None, *, eps=1e-6, weight=None, bias=None, scale_table=None,
                              shift_table=None, out_dtype=None):  # fmt: skip
    """The expression as a model would write it, in the dtypes of its operands."""
    kind = torch.promote_types(x.dtype, weight.dtype) if weight is not None else x.dtype
    cast = [None if t is None else t.to(kind) for t in (weight, bias)]
    y = F.layer_norm(x.to(kind), (x.shape[-1],), *cast, eps)
    gain = _sum(scale, scale_table, x.shape[1])
    offset = _sum(shift, shift_table, x.shape[1])
    y = y if gain is None else y * (1 + gain)
    y = y if offset is None else y + offset
    return y.to(out_dtype or y.dtype)


def eager_rms_norm_modulate(x, scale=None, shift=None, *, weight=None, eps=1e-6, scale_offset=1.0, weight_offset=0.0,
                            out_dtype=None):  # fmt: skip
    kind = torch.promote_types(x.dtype, weight.dtype) if weight is not None else x.dtype
    gain = None if weight is None else weight.to(kind) + weight_offset
    y = F.rms_norm(x.to(kind), (x.shape[-1],), gain, eps)
    y = y if scale is None else y * (scale_offset + rows_of(scale, x.shape[1]))
    y = y if shift is None else y + rows_of(shift, x.shape[1])
    return y.to(out_dtype or y.dtype)


def eager_gate_residual(x, y, gate=None, *, gate_table=None, out_dtype=None):
    factor = _sum(gate, gate_table, x.shape[1])
    out = x + (y if factor is None else y * factor)
    return out.to(out_dtype or out.dtype)


def eager_gate_residual_layer_norm_modulate(x, y, gate=None, scale=None, shift=None, *, gate_table=None,
                                            residual_dtype=None, **norm):  # fmt: skip
    residual = eager_gate_residual(x, y, gate, gate_table=gate_table, out_dtype=residual_dtype)
    return residual, eager_layer_norm_modulate(residual, scale, shift, **norm)


def _sum(m, table, tokens):
    if m is None:
        return table
    return rows_of(m, tokens) if table is None else rows_of(m, tokens) + table


def run(function, inputs, **options):
    """Outputs and gradients by name. `inputs`: name -> leaf tensor."""
    leaves = {name: t.detach().requires_grad_(t.requires_grad) for name, t in inputs.items()}
    out = function(**leaves, **options)
    outs = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator(outs[0].device).manual_seed(0)
    # Rounded to bfloat16, so that every dtype of output gets the very same gradient.
    grads = [torch.randn(o.shape, generator=generator, device=o.device).bfloat16().to(o) for o in outs]
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    found = torch.autograd.grad(outs, list(wanted.values()), grads, allow_unused=True)
    result = {f"out{i}": o.detach() for i, o in enumerate(outs)}
    result.update({f"grad of {name}": g for name, g in zip(wanted, found)})
    return result


def in_float64(inputs):
    return {name: t.detach().double().requires_grad_(t.requires_grad) for name, t in inputs.items()}


def relative_error(found, truth):
    return ((found.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def assert_as_close_as_eager(ours, eager, truth, floor):
    """Each output and gradient is at most 1.5 times as far from float64 as eager's; `floor`: rounding both have."""
    assert ours.keys() == truth.keys()
    for name, exact in truth.items():
        assert ours[name].shape == exact.shape, name
        assert ours[name].isfinite().all(), name
        error, bound = relative_error(ours[name], exact), max(1.5 * relative_error(eager[name], exact), floor)
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"
