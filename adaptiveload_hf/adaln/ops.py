"""Which fused ops are there? Each is one forward and one backward kernel on a GPU, and the reference elsewhere."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UserError
from . import (
    extension,
    reference,
    registry,
    schemas,  # noqa: F401  defines the ops
)
from .reference import check_operands, check_rope, promoted_dtype

OPS = (
    "layer_norm_modulate",
    "rms_norm_modulate",
    "gate_residual",
    "gate_residual_layer_norm_modulate",
    "rms_norm_rope",
)


def extension_missing_reason() -> str | None:
    """Why the CUDA kernels do not run on this machine's current GPU, or None if they do.

    The extension is missing when torch has no CUDA, is too old, when it was not built or does not load, and when it
    was built for other GPU architectures than this one; the ops run in Triton then, or without it the reference.
    """
    problem = extension.load_problem
    if problem is None and torch.cuda.is_available():
        problem = extension.device_problem(torch.cuda.current_device())
        if problem is not None:
            registry.replace_extension(OPS)
    return problem


def kernel_backend(device_type: str) -> str:
    """What the ops run on tensors of a device type ("cuda", "cpu", ...): "cuda", "triton" or "reference"."""
    if device_type != "cuda":
        return "reference"
    if extension_missing_reason() is None:
        return "cuda"
    return "triton" if registry.has_triton else "reference"


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
    backend: str = "auto",
) -> Tensor:
    """LN(x)[* weight + bias] * (1 + scale + scale_table) + shift + shift_table, one rounding at the end.

    LN is over the last dimension. What is absent drops out. Calculated in float32, in float64 if an input is.
    Kept for backward: x, 8 bytes a row, scale; a modulation that needs no gradient costs nothing there. With the CUDA
    kernels D is at most 8192.

    Args:
        x: [B, S, D], any strides (copied once if the last one is not 1).
        scale, shift: [B or 1, T, D], T = 1, S, or a divisor of S (frames): token s reads row s * T // S.
        eps: added to the variance.
        weight, bias: [D], the norm's own.
        scale_table, shift_table: [D], added to scale and shift.
        out_dtype: of the result. Default: what eager promotion of all operands gives.
        backend: "auto" (what `kernel_backend` says) or "triton".

    Returns:
        [B, S, D], contiguous.

    Raises:
        UserError: a shape, dtype or device is another one, or the backend.

    Source: AdaLN of DiT (arXiv:2212.09748, section 3.2), as diffusers writes it; one backward pass instead of the two
    of AdaptiveLoad's D-tile reduction.
    """
    if not _in_order(x, (scale, shift), (weight, bias, scale_table, shift_table)):
        columns = (("weight", weight), ("bias", bias), ("scale_table", scale_table), ("shift_table", shift_table))
        check_operands(x, (("scale", scale), ("shift", shift)), columns)
        x, (scale, shift) = _with_contiguous_columns(x), _with_equal_rows(x, scale, shift)
    if out_dtype is None:
        out_dtype = promoted_dtype(x, scale, shift, weight, bias, scale_table, shift_table)
    if x.dtype == torch.float64 and x.is_cuda:
        options = {"eps": eps, "weight": weight, "bias": bias, "out_dtype": out_dtype}
        return reference.layer_norm_modulate(
            x, scale, shift, scale_table=scale_table, shift_table=shift_table, **options
        )
    tensors = (x, scale, shift, weight, bias, scale_table, shift_table)
    return registry.call(_op("layer_norm_modulate", backend), *tensors, eps, out_dtype)[0]


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
    backend: str = "auto",
) -> Tensor:
    """RMS(x) * (weight + weight_offset) * (scale_offset + scale) + shift, one rounding at the end.

    RMS(x) = x / sqrt(mean(x^2) + eps) over the last dimension. What is absent drops out, its offset too.

    Args:
        x, scale, shift, out_dtype, backend: as in `layer_norm_modulate`.
        weight: [D]. eps: added to the mean square.
        scale_offset: 0 for models that have added the 1 already. weight_offset: 1 for norms that store weight - 1.

    Returns:
        [B, S, D], contiguous.

    Raises:
        UserError: a shape, dtype or device is another one.

    Source: the RMS form of AdaLN in diffusers (LTX, Lumina, Mochi).
    """
    if not _in_order(x, (scale, shift), (weight,)):
        check_operands(x, (("scale", scale), ("shift", shift)), (("weight", weight),))
        x, (scale, shift) = _with_contiguous_columns(x), _with_equal_rows(x, scale, shift)
    if out_dtype is None:
        out_dtype = promoted_dtype(x, scale, shift, weight)
    if x.dtype == torch.float64 and x.is_cuda:
        offsets = {"scale_offset": scale_offset, "weight_offset": weight_offset}
        return reference.rms_norm_modulate(x, scale, shift, weight=weight, eps=eps, out_dtype=out_dtype, **offsets)
    options = (eps, scale_offset, weight_offset, out_dtype)
    return registry.call(_op("rms_norm_modulate", backend), x, scale, shift, weight, *options)[0]


def gate_residual(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None = None,
    *,
    gate_table: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """x + y * (gate + gate_table), or x + y without both, one rounding at the end.

    Kept for backward: gate, and y only if the gate or its table needs a gradient.

    Args:
        x, y: [B, S, D], any strides.
        gate: [B or 1, T, D], rows as in `layer_norm_modulate`. gate_table: [D].
        out_dtype: of the result. Default: what eager promotion of all operands gives. backend: as there.

    Returns:
        [B, S, D], contiguous.

    Raises:
        UserError: a shape, dtype or device is another one.

    Source: the gated residual of DiT (arXiv:2212.09748, section 3.2).
    """
    if not _in_order(x, (gate,), (gate_table,), y):
        check_operands(x, (("gate", gate),), (("gate_table", gate_table),), same_as_x=y)
        x, y, (gate,) = _with_contiguous_columns(x), _with_contiguous_columns(y), _with_equal_rows(x, gate)
    if out_dtype is None:
        out_dtype = promoted_dtype(x, y, gate, gate_table)
    if x.dtype == torch.float64 and x.is_cuda:
        return reference.gate_residual(x, y, gate, gate_table=gate_table, out_dtype=out_dtype)
    return registry.call(_op("gate_residual", backend), x, y, gate, gate_table, out_dtype)


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
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`gate_residual`, then `layer_norm_modulate` of the rounded residual, in one pass.

    Args: as those two. residual_dtype: of the residual. Default: eager promotion of x, y, gate and gate_table.

    Returns:
        residual, normed: both [B, S, D], contiguous.

    Raises:
        UserError: a shape, dtype or device is another one.

    Source: as those two. The statistics are those of the rounded residual, so that backward keeps only it.
    """
    if not _in_order(x, (gate, scale, shift), (weight, bias, gate_table, scale_table, shift_table), y):
        modulation = (("gate", gate), ("scale", scale), ("shift", shift))
        columns = (("weight", weight), ("bias", bias), ("scale_table", scale_table), ("shift_table", shift_table))
        check_operands(x, modulation, (*columns, ("gate_table", gate_table)), same_as_x=y)
        x, y = _with_contiguous_columns(x), _with_contiguous_columns(y)
        gate, scale, shift = _with_equal_rows(x, gate, scale, shift)
    if residual_dtype is None:
        residual_dtype = promoted_dtype(x, y, gate, gate_table)
    if out_dtype is None:
        out_dtype = promoted_dtype(residual_dtype, scale, shift, weight, bias, scale_table, shift_table)
    if x.dtype == torch.float64 and x.is_cuda:
        options = {"eps": eps, "weight": weight, "bias": bias, "gate_table": gate_table, "scale_table": scale_table}
        dtypes = {"residual_dtype": residual_dtype, "out_dtype": out_dtype}
        return reference.gate_residual_layer_norm_modulate(
            x, y, gate, scale, shift, shift_table=shift_table, **options, **dtypes
        )
    tensors = (x, y, gate, gate_table, scale, shift, weight, bias, scale_table, shift_table)
    dtypes = (residual_dtype, out_dtype)
    return registry.call(_op("gate_residual_layer_norm_modulate", backend), *tensors, eps, *dtypes)[:2]


def rms_norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    heads: int,
    eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """RMS(x) * weight over all heads together or over each by itself, then the rotary embedding of queries and keys.

    Columns 2i and 2i + 1 of a head are a pair (a, b) and become (a * c - b * s, a * s + b * c) with c = cos[2i] and
    s = sin[2i + 1]. One rounding at the end (eager rounds the norm's result too).

    Args:
        x: [B, S, D]. weight: [D], or [D / heads]: each head is normalised by itself.
        cos, sin: [B or 1, S, 1, D / heads], each angle twice, as `WanRotaryPosEmbed` gives them. No gradient. With a
            weight of one head they may end before the tokens do, and the other tokens are not turned; without them
            none is.
        heads: attention heads. eps: added to the mean square. backend: as in `layer_norm_modulate`.

    Returns:
        [B, S, heads, D / heads] of x's dtype, contiguous.

    Raises:
        UserError: a shape, dtype or device is another one, or cos or sin asks for a gradient.

    Source: WanAttnProcessor, FluxAttnProcessor and HunyuanVideoAttnProcessor2_0 of diffusers 0.42.1.
    """
    check_rope(x, weight, cos, sin, heads)
    if x.dtype == torch.float64 and x.is_cuda:
        return reference.rms_norm_rope(x, weight, cos, sin, heads=heads, eps=eps)
    return registry.call(_op("rms_norm_rope", backend), _with_contiguous_columns(x), weight, cos, sin, heads, eps)[0]


def _op(name: str, backend: str) -> str:
    if backend not in ("auto", "triton"):
        raise UserError(f"backend of an op must be auto or triton, but it is {backend!r}.")
    return name if backend == "auto" else registry.triton_twin(name)


def _in_order(
    x: Tensor, modulations: Sequence[Tensor | None], columns: Sequence[Tensor | None], y: Tensor | None = None
) -> bool:
    """Whether all is as nearly every call has it, so that there is nothing to check further, to copy or to expand: one
    row a batch item. The checks with their messages take three times as long."""
    shape, device = x.shape, x.device
    if len(shape) != 3 or not x.is_floating_point() or x.stride(-1) != 1:
        return False
    if y is not None and (y.shape != shape or y.device != device or y.stride(-1) != 1):
        return False
    batch, _, width = shape
    for expected, tensors in (((batch, 1, width), modulations), ((width,), columns)):
        for tensor in tensors:
            if tensor is not None and (
                tensor.shape != expected or tensor.device != device or not tensor.is_floating_point()
            ):
                return False
    return True


def _with_contiguous_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _with_equal_rows(x: Tensor, *modulations: Tensor | None) -> list[Tensor | None]:
    """All as [B, T, D] with one T: views, but for the unheard-of case of two numbers of frames."""
    batch, tokens, width = x.shape
    counts = {m.shape[1] for m in modulations if m is not None} - {1}
    rows = 1 if not counts else counts.pop() if len(counts) == 1 else tokens
    result = []
    for m in modulations:
        if m is not None and m.shape != (batch, rows, width):
            m = m if m.shape[1] in (1, rows) else m.repeat_interleave(rows // m.shape[1], dim=1)
            m = m.expand(batch, rows, width)
        result.append(m)
    return result
