"""How is an op cut into Triton programs, what is allocated, which sums follow? Same arguments as the schemas."""

import contextlib
import functools
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ..errors import UserError
from . import triton_kernels

WIDEST = 8192  # what is tested
# Measured on an H200 (docs/kernels.md): float32 values that a thread can hold over a row without spilling; programs
# that a multiprocessor gets in a forward pass; bytes of rows to come that it needs under way in a backward pass, whose
# programs are as few as that takes, since each ends with sums; the fewest rows worth loading a modulation for.
_VALUES_PER_THREAD = 200
_FORWARD_PROGRAMS = 32
_BYTES_UNDER_WAY = 48 << 10
_FEWEST_ROWS = 8
_SUMS = ("gate", "scale", "shift", "weight", "bias")
_NORM_ARGUMENTS = ("x", "scale", "shift", "weight", "bias", "scale_table", "shift_table")
_GATE_ARGUMENTS = ("x", "y", "gate", "gate_table")


def layer_norm_modulate(x, scale, shift, weight, bias, scale_table, shift_table, eps, out_dtype):
    norm = {"scale": scale, "shift": shift, "weight": weight, "bias": bias}
    tables = {"scale_table": scale_table, "shift_table": shift_table}
    return _forward(x, **norm, **tables, out_dtype=out_dtype, eps=eps, center=True)[1:]


def layer_norm_modulate_backward(
    grad, x, stats, scale, weight, bias, scale_table, rows, shift_dtype, shift_table_dtype, needs
):
    norm = {"scale": scale, "weight": weight, "bias": bias, "scale_table": scale_table}
    rows_and_dtypes = {"x_dtype": x.dtype, "shift_rows": rows, "shift_dtype": shift_dtype}
    rows_and_dtypes["shift_table_dtype"] = shift_table_dtype
    return _backward(grad, _wanted(_NORM_ARGUMENTS, needs), x=x, stats=stats, **norm, **rows_and_dtypes, center=True)


def rms_norm_modulate(x, scale, shift, weight, eps, scale_offset, weight_offset, out_dtype):
    offsets = {"scale_offset": scale_offset, "weight_offset": weight_offset}
    return _forward(x, scale=scale, shift=shift, weight=weight, eps=eps, out_dtype=out_dtype, **offsets)[1:]


def rms_norm_modulate_backward(
    grad, x, rstd, scale, weight, scale_offset, weight_offset, rows, shift_dtype, needs
):  # fmt: skip
    options = {"scale_offset": scale_offset, "weight_offset": weight_offset}
    options |= {"x_dtype": x.dtype, "shift_rows": rows, "shift_dtype": shift_dtype}
    return _backward(grad, _wanted(_NORM_ARGUMENTS, needs), x=x, stats=rstd, scale=scale, weight=weight, **options)


def gate_residual(x, y, gate, gate_table, out_dtype):
    return _forward(x, y=y, gate=gate, gate_table=gate_table, residual_dtype=out_dtype)[0]


def gate_residual_backward(grad, y, gate, gate_table, y_dtype, needs):
    return _backward(grad, _wanted(_GATE_ARGUMENTS, needs), y=y, gate=gate, gate_table=gate_table, y_dtype=y_dtype)


def gate_residual_layer_norm_modulate(
    x, y, gate, gate_table, scale, shift, weight, bias, scale_table, shift_table, eps, residual_dtype, out_dtype
):
    norm = {"scale": scale, "shift": shift, "weight": weight, "bias": bias}
    norm |= {"scale_table": scale_table, "shift_table": shift_table}
    dtypes = {"residual_dtype": residual_dtype, "out_dtype": out_dtype}
    return _forward(x, y=y, gate=gate, gate_table=gate_table, **norm, **dtypes, eps=eps, center=True)


def gate_residual_layer_norm_modulate_backward(
    grad_residual, grad, residual, stats, y, gate, gate_table, scale, weight, bias, scale_table,
    x_dtype, y_dtype, rows, shift_dtype, shift_table_dtype, needs,
):  # fmt: skip
    kept = {"x": residual, "stats": stats, "y": y, "gate": gate, "gate_table": gate_table}
    norm = {"scale": scale, "weight": weight, "bias": bias, "scale_table": scale_table}
    dtypes = {"x_dtype": x_dtype, "y_dtype": y_dtype, "shift_rows": rows, "shift_dtype": shift_dtype}
    dtypes["shift_table_dtype"] = shift_table_dtype
    names = _GATE_ARGUMENTS + _NORM_ARGUMENTS[1:]
    return _backward(grad, _wanted(names, needs), grad_residual=grad_residual, **kept, **norm, **dtypes, center=True)


def rms_norm_rope(x, weight, cos, sin, heads, eps):
    by_head = cos is None or weight.shape[0] != x.shape[2]
    rows, cos, sin = _heads_as_rows(x, cos, sin, heads) if by_head else (x, cos, sin)
    _, y, rstd = _forward(rows, weight=weight, cos=cos, sin=sin, out_dtype=x.dtype, eps=eps)
    return y.view(*x.shape[:2], heads, x.shape[2] // heads), rstd.view(*x.shape[:2], heads) if by_head else rstd


def rms_norm_rope_backward(grad, x, rstd, weight, cos, sin, needs):
    wanted, rows = _wanted(("x", "weight"), needs), x
    if rstd.ndim == 3:
        rows, cos, sin = _heads_as_rows(x, cos, sin, grad.shape[2])
    stats, grad = rstd.flatten(1), grad.reshape(rows.shape)
    found = _backward(grad, wanted, x=rows, x_dtype=x.dtype, stats=stats, weight=weight, cos=cos, sin=sin)
    return [gradient.view(x.shape) if name == "x" else gradient for name, gradient in zip(wanted, found)]


def _heads_as_rows(x, cos, sin, heads: int):
    """(x, cos, sin) with every head a row of its own: [B, S * heads, D / heads], and so the tables."""
    rows = x.reshape(x.shape[0], x.shape[1] * heads, x.shape[2] // heads)
    if cos is None:
        return rows, None, None
    rest = x.shape[1] - cos.shape[1]
    tables = (F.pad(table, (0, 0, 0, 0, 0, rest), value=value) for table, value in ((cos, 1.0), (sin, 0.0)))
    return rows, *(table.repeat_interleave(heads, dim=1) for table in tables)


def _wanted(names, needs: int) -> list[str]:
    return [name for bit, name in enumerate(names) if needs >> bit & 1]


def _forward(
    x, *, y=None, gate=None, gate_table=None, scale=None, shift=None, weight=None, bias=None, scale_table=None,
    shift_table=None, cos=None, sin=None, residual_dtype=None, out_dtype=None,
    eps=0.0, center=False, scale_offset=1.0, weight_offset=0.0,
):  # fmt: skip
    """(residual or None, out or None, stats or None): out without `out_dtype` is not wanted."""
    residual = None if y is None else x.new_empty(x.shape, dtype=residual_dtype)
    out = stats = None
    if out_dtype is not None:
        out = x.new_empty(x.shape, dtype=out_dtype)
        stats = x.new_empty((*x.shape[:2], 2) if center else x.shape[:2], dtype=torch.float32)
    row_bytes = _bytes_of([x, y, *_per_token(x, gate, scale, shift)])
    kept = (y is not None) + 2 * (out is not None)
    if _per_token(x, scale, shift):
        kept += sum(column is not None for column in (weight, bias, scale_table, shift_table))
    rows = tuple(1 if m is None else m.shape[1] for m in (gate, scale if scale is not None else shift))
    cut = _cut(x.shape, x.device, rows, row_bytes, kept, summing=False)
    if x.numel() > 0:
        norm = _norm(scale, shift, weight, bias, scale_table, shift_table, scale_offset, weight_offset)
        operands = (_rows(x), _rows(y), *_gate(gate, gate_table), norm, *_angles(x, cos, sin), residual, stats, out)
        with _on_device_of(x):
            triton_kernels.forward[cut.grid](
                *operands, eps, *cut.sizes, NORM=out is not None, CENTER=center, HEAD=_head(cos), **cut.options
            )
    return residual, out, stats


def _backward(
    grad, wanted, *, grad_residual=None, x=None, stats=None, y=None, gate=None, gate_table=None, scale=None,
    weight=None, bias=None, scale_table=None, cos=None, sin=None, x_dtype=None, y_dtype=None, shift_rows=1,
    shift_dtype=None, shift_table_dtype=None, center=False, scale_offset=1.0, weight_offset=0.0,
):  # fmt: skip
    """The gradients that are wanted, in that order."""
    kinds = {"x": x_dtype, "y": y_dtype}
    kinds |= {name: m.dtype for name, m in (("gate", gate), ("scale", scale)) if _per_token(grad, m)}
    found = {name: grad.new_empty(grad.shape, dtype=kind) for name, kind in kinds.items() if name in wanted}
    summed = {n for n in _SUMS if f"{n}_table" in wanted or (n in wanted and n not in found)}
    row_bytes = _bytes_of([grad, grad_residual, x, y, *_per_token(grad, gate, scale)])
    kept = len(summed) + (x is not None) + (weight is not None) + (bias is not None) + ("y" in wanted)
    norm_rows = scale.shape[1] if scale is not None else shift_rows if "shift" in wanted else 1
    rows = (1 if gate is None else gate.shape[1], norm_rows)
    cut = _cut(grad.shape, grad.device, rows, row_bytes, kept, summing=True)
    sums = {n: grad.new_empty((cut.programs, grad.shape[2]), dtype=torch.float32) for n in _SUMS if n in summed}
    if grad.numel() > 0:
        norm = _norm(scale, None, weight, bias, scale_table, None, scale_offset, weight_offset)
        operands = (_rows(grad), _rows(grad_residual), _rows(x), None if stats is None else stats.contiguous())
        operands += (_rows(y), *_gate(gate, gate_table), norm, *_angles(grad, cos, sin))
        outputs = (*map(found.get, ("x", "y", "gate", "scale")), tuple(map(sums.get, _SUMS)))
        with _on_device_of(grad):
            triton_kernels.backward[cut.grid](
                *operands, *outputs, *cut.sizes, NORM=x is not None, CENTER=center, HEAD=_head(cos), **cut.options
            )
    kinds = {"gate": gate, "scale": scale}
    kinds = {name: (m.shape[1], m.dtype) for name, m in kinds.items() if m is not None}
    kinds["shift"] = (shift_rows, shift_dtype)
    columns = {"weight": weight, "bias": bias, "gate_table": gate_table, "scale_table": scale_table}
    columns = {name: m.dtype for name, m in columns.items() if m is not None} | {"shift_table": shift_table_dtype}
    for name in wanted:
        if name in kinds and name not in found:
            rows, dtype = kinds[name]
            found[name] = _sum_rows(sums[name], grad.shape[0], rows).to(dtype)
        elif name not in found:
            found[name] = sums[name.removesuffix("_table")].sum(0).to(columns[name])
    return [found[name] for name in wanted]


@functools.lru_cache(1024)
def _cut(
    shape: torch.Size, device: torch.device, rows: tuple[int, int], row_bytes: int, kept: int, *, summing: bool
) -> SimpleNamespace:
    """How [B, S, D] is cut: a segment is what shares its modulation, a chunk of it is a program's.

    A modulation with a row per token shares nothing and does not cut. The cut depends on shapes and the GPU alone, so
    sums are taken in the same order in every run.

    Args:
        rows: T of the gate and of the norm's modulation.
        row_bytes: of an element in all that a program reads row by row.
        kept: how many rows of D values it holds in registers meanwhile.
        summing: whether it does so for column sums, of which few programs give few.
    """
    batch, tokens, width = shape
    if width > WIDEST:
        raise UserError(
            f"the Triton kernels take rows of up to {WIDEST} columns, but x has D = {width}. "
            "Use adaptiveload_hf.adaln.reference for it."
        )
    gate_per_token, norm_per_token = (1 < count == tokens for count in rows)
    segments = math.lcm(1 if gate_per_token else rows[0], 1 if norm_per_token else rows[1])
    segment_rows = tokens // max(1, segments)
    warps = next((w for w in (1, 2, 4, 8) if (kept + 2) * width <= _VALUES_PER_THREAD * 32 * w), 16)
    tile = min(256 * warps, max(32, triton.next_power_of_2(width)))  # at most 16 bytes of a half type a thread
    processors, shared_memory = _device(device)
    row_bytes *= -(-width // tile) * tile
    # Each stage but one holds a row of all that is read.
    stages = min(5, max(3, 1 + -(-_BYTES_UNDER_WAY // (2 * row_bytes)))) if summing else 3
    stages = min(stages, 1 + shared_memory // row_bytes)
    programs = _FORWARD_PROGRAMS
    if summing:
        programs = -(-_BYTES_UNDER_WAY // (max(1, stages - 1) * row_bytes))
        programs = max(1 if warps >= 8 else 2, min(16, programs))
    chunk_rows = max(_FEWEST_ROWS, -(-segment_rows * batch * segments // (programs * processors)))
    chunks = -(-segment_rows // chunk_rows)
    options = {"D": width, "TILE": tile, "STAGES": stages, "num_warps": warps}
    options["enable_fp_fusion"] = True  # multiply and add in one: no default from Triton 3.10 on
    options |= {"GATE_PER_TOKEN": gate_per_token, "NORM_PER_TOKEN": norm_per_token}
    return SimpleNamespace(
        programs=batch * segments * chunks,
        grid=(batch * segments * chunks,),
        sizes=(tokens, segments, segment_rows, chunks, chunk_rows, *rows),
        options=options,
    )


def _per_token(x: Tensor, *modulations: Tensor | None) -> list[Tensor]:
    """Those with a row for every token of x."""
    return [m for m in modulations if m is not None and 1 < m.shape[1] == x.shape[1]]


def _bytes_of(streams: list[Tensor | None]) -> int:
    return sum(t.element_size() for t in streams if t is not None)


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory that a program may fill with rows)."""
    if device.type == "cpu":  # Triton's interpreter
        return 1, 1 << 16
    properties = torch.cuda.get_device_properties(device)
    largest = getattr(properties, "shared_memory_per_block_optin", 1 << 16)  # ROCm does not say
    return properties.multi_processor_count, largest - (1 << 12)


def _rows(t: Tensor | None):
    """[B, T, D] as the kernels take it."""
    if t is None:
        return None
    t = t if t.stride(2) == 1 else t.contiguous()
    return t, t.stride(0), t.stride(1)


def _column(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _gate(gate: Tensor | None, gate_table: Tensor | None):
    return _rows(gate), _column(gate_table), 1.0 if gate is None and gate_table is None else 0.0


def _norm(scale, shift, weight, bias, scale_table, shift_table, scale_offset: float, weight_offset: float):
    columns = map(_column, (weight, bias, scale_table, shift_table))
    absent = scale is None and scale_table is None
    return _rows(scale), _rows(shift), *columns, 1.0 if absent else scale_offset, weight_offset


def _angles(x: Tensor, cos: Tensor | None, sin: Tensor | None):
    if cos is None:
        return None, None
    return tuple(_rows(t.squeeze(2).expand(x.shape[0], -1, -1)) for t in (cos, sin))


def _head(cos: Tensor | None) -> int:
    return 0 if cos is None else cos.shape[3]


def _sum_rows(sums: Tensor, batch: int, rows: int) -> Tensor:
    """[programs, D] as [B, T, D]: the programs of a batch item and row are neighbours."""
    programs = len(sums) // max(1, batch * rows)
    return sums.view(batch, rows, programs, sums.shape[1]).sum(2)


def _on_device_of(x: Tensor):
    """Triton launches on the current GPU."""
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else contextlib.nullcontext()
