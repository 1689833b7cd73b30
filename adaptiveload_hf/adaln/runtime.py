"""Does a fused op apply to this very call, and what runs if not? (Guard 3 of a rewrite.)

`FusedOps` is what rewritten code calls `_adaln`. torch.compile traces all of it, so nothing counts, logs or caches
along the way.
"""

import types
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers.models.normalization import FP32LayerNorm, RMSNorm
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm
from torch import Tensor, nn
from torch.nn import functional

from .onlookers import is_transformed, no_hooks_on

NORM_OPS = {
    nn.LayerNorm: "layer_norm_modulate",
    FP32LayerNorm: "layer_norm_modulate",
    nn.RMSNorm: "rms_norm_modulate",
    RMSNorm: "rms_norm_modulate",
    Krea2RMSNorm: "rms_norm_modulate",
}
_WEIGHT_OFFSETS = {Krea2RMSNorm: 1.0}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST_ROW_ON_CUDA = 8192  # of the CUDA kernels and of Triton's
# What the ops stand for; others, put there by a monkeypatch, are called.
_NORM_FORWARDS = {kind: kind.forward for kind in NORM_OPS if kind.forward.__qualname__ == f"{kind.__name__}.forward"}
_LAYER_NORM, _RMS_NORM = functional.layer_norm, functional.rms_norm


@dataclass(frozen=True)
class FusedOps:
    """What rewritten code calls: the checks, and the ops of one backend.

    Args:
        ops: the module that holds them, `adaln.ops` or `adaln.reference`.
        device_types: devices that they are used on.
        options: passed to every op.
        registry: the module whose `call` runs an op with arguments that have been looked at: to have `ops` look at
            them again takes the host a third of the time that an op takes. None: `ops` runs them.
        names: the ops that may be used.
    """

    ops: types.ModuleType
    device_types: tuple[str, ...]
    options: dict[str, str]
    registry: types.ModuleType | None
    names: frozenset[str]

    def is_plain(self, *norms: nn.Module) -> bool:
        """Whether norms are known ones whose calls do nothing but their arithmetic."""
        for norm in norms:
            if NORM_OPS.get(type(norm)) not in self.names:
                return False
        return _as_they_came(*norms) and no_hooks_on(*norms)

    def modulate(
        self,
        norm: nn.Module,
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        *,
        cast_back: bool = False,
        dtype: torch.dtype | None = None,
        scale_offset: float = 1.0,
        **tables: Tensor,
    ) -> tuple[Tensor] | tuple[()]:
        """norm(x) * (scale_offset + scale) + shift, of x's dtype with `cast_back`, else of the dtype that eager gives;
        nothing where that would be more than rounding away from what eager computes, or skip anything.

        `dtype` is what the source casts norm(x) to. Only RMS norms take a `scale_offset`. `tables`: `scale_table` and
        `shift_table`, which the source adds to scale and shift.
        """
        if not (self.is_plain(norm) and self._is_stream(x) and _normalizes_rows_of(norm, x, x.dtype)):
            return ()
        in_order = _in_order(x, (scale, shift), tables)
        if in_order is None:
            return ()
        if cast_back:
            out_dtype = x.dtype
        elif dtype is not None:
            out_dtype = _promoted(dtype, scale, shift, *tables.values())
        else:
            out_dtype = _modulated_dtype(norm, x, x.dtype, scale, shift, *tables.values())
        if NORM_OPS[type(norm)] == "layer_norm_modulate":
            affine = affine_of(norm)
            if in_order and self.registry is not None:
                columns = affine["weight"], affine["bias"], tables.get("scale_table"), tables.get("shift_table")
                return self._call("layer_norm_modulate", x, scale, shift, *columns, norm.eps, out_dtype)[:1]
            options = {"eps": norm.eps, "out_dtype": out_dtype, **affine, **tables}
            return (self.ops.layer_norm_modulate(x, _as_rows(scale), _as_rows(shift), **options, **self.options),)
        offsets = {"scale_offset": scale_offset, "weight_offset": _WEIGHT_OFFSETS.get(type(norm), 0.0)}
        options = {"weight": norm.weight, "eps": norm.eps, "out_dtype": out_dtype, **offsets}
        return (self.ops.rms_norm_modulate(x, _as_rows(scale), _as_rows(shift), **options, **self.options),)

    def gate_residual(
        self, x: Tensor, y: Tensor, gate: Tensor, cast_back: bool = False, gate_table: Tensor | None = None
    ) -> tuple[Tensor] | tuple[()]:
        """x + (gate + gate_table) * y, of x's dtype with `cast_back`, else of the dtype that eager gives; nothing as
        in `modulate`."""
        if not (self._is_stream(x) and _is_branch(y, x)):
            return ()
        in_order = _in_order(x, (gate,), {"gate_table": gate_table})
        if in_order is None:
            return ()
        out_dtype = x.dtype if cast_back else _promoted(x.dtype, y, gate, gate_table)
        if in_order and self.registry is not None and y.stride(-1) == 1:
            return (self._call("gate_residual", x, y, gate, gate_table, out_dtype),)
        options = {"gate_table": gate_table, "out_dtype": out_dtype, **self.options}
        return (self.ops.gate_residual(x, y, _as_rows(gate), **options),)

    def pair(
        self,
        x: Tensor,
        y: Tensor,
        gate: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        norm: nn.Module,
        cast_back: bool = False,
        norm_casts_back: bool = False,
        between: tuple[nn.Module, ...] = (),
        unless: object = False,
        **tables: Tensor,
    ) -> tuple[Tensor, Tensor] | tuple[()]:
        """(residual as in `gate_residual` (or x + y), norm(residual) * (1 + scale) + shift), of dtypes as there and in
        `modulate`; nothing as there, where a norm `between` both is not plain, and `unless` something is so."""
        if unless or not self.is_plain(norm, *between) or NORM_OPS[type(norm)] != "layer_norm_modulate":
            return ()
        if not (self._is_stream(x) and _is_branch(y, x)):
            return ()
        gate_table = tables.get("gate_table")
        residual_dtype = x.dtype if cast_back else _promoted(x.dtype, y, gate, gate_table)
        in_order = _in_order(x, (gate, scale, shift), tables)
        if in_order is None or not _normalizes_rows_of(norm, x, residual_dtype):
            return ()
        scale_table, shift_table, out_dtype = tables.get("scale_table"), tables.get("shift_table"), residual_dtype
        if not norm_casts_back:
            out_dtype = _modulated_dtype(norm, x, residual_dtype, scale, shift, scale_table, shift_table)
        affine, dtypes = affine_of(norm), (residual_dtype, out_dtype)
        if in_order and self.registry is not None and y.stride(-1) == 1:
            columns = affine["weight"], affine["bias"], scale_table, shift_table
            tensors = x, y, gate, gate_table, scale, shift, *columns
            return self._call("gate_residual_layer_norm_modulate", *tensors, norm.eps, *dtypes)[:2]
        rows = map(_as_rows, (gate, scale, shift))
        options = {"eps": norm.eps, "residual_dtype": residual_dtype, "out_dtype": out_dtype, **affine, **tables}
        return self.ops.gate_residual_layer_norm_modulate(x, y, *rows, **options, **self.options)

    def can_turn(
        self, norms: Sequence[nn.Module], x: Tensor, rotary_emb: tuple[Tensor, Tensor] | None, heads: int
    ) -> bool:
        """Whether `rms_norm_rope` stands for the norms of projections of x [B, S, D] and the rotation after them, or
        `rms_norm_modulate` for the norms alone.

        The projections themselves are not known yet: they have x's dtype, or that of autocast. Under CUDA autocast
        eager computes the norm in float32, and attention casts that down again. Plain loops: this runs at each call.
        """
        if not (self._is_stream(x) and _as_they_came(*norms) and no_hooks_on(*norms)):
            return False
        device, dtype, width, (batch, tokens, _) = x.device, x.dtype, None, x.shape
        if torch.is_autocast_enabled(device.type):
            if not x.is_cuda:
                return False
            dtype = None
        for norm in norms:
            if type(norm) is not nn.RMSNorm or norm.eps is None:
                return False
            weight = weight_of(norm)
            if not _is_weight(weight, dtype, device) or (width is not None and weight.shape[0] != width):
                return False
            width = weight.shape[0]
        if width % heads != 0:
            return False
        for table in rotary_emb or ():  # [B or 1, S, 1, D / heads] and no more than numbers
            if not _is_tensor(table) or table.device != device or table.requires_grad:
                return False
            shape = table.shape
            if shape[1:] != (tokens, 1, width // heads) or (shape[0] != 1 and shape[0] != batch):
                return False
        return True

    def can_norm_heads(
        self, norms: tuple[nn.Module, ...], x: Tensor, head_width: int, rotation: tuple[Tensor, Tensor] | None = None
    ) -> bool:
        """Whether `norm_heads` stands for norms of the heads, each by itself, of x [B, S, D] or of projections of it,
        and for the rotation after them; rotation: cos and sin [tokens, D / heads]. Autocast as in `can_turn`."""
        if not (self._is_stream(x) and _as_they_came(*norms) and no_hooks_on(*norms)):
            return False
        autocast = torch.is_autocast_enabled("cuda" if x.is_cuda else x.device.type)
        if autocast and not x.is_cuda:
            return False
        for norm in norms:
            plain = NORM_OPS[type(norm)] == "rms_norm_modulate" and norm.eps is not None
            if not plain or getattr(norm, "bias", None) is not None:
                return False
            dtype = None if autocast else x.dtype
            if not _is_weight(norm.weight, dtype, x.device) or norm.weight.shape[0] != head_width:
                return False
        return rotation is None or all(
            _is_tensor(table) and table.shape[1:] == (head_width,) and table.device == x.device for table in rotation
        )

    def norm_heads(self, norm: nn.Module, x: Tensor, rotation: tuple[Tensor, Tensor] | tuple[()] = ()) -> Tensor:
        """norm(x) of each head by itself, the first tokens turned, of x's dtype: [B, S, heads, D / heads].

        rotation: cos and sin [1, S or fewer, 1, D / heads]."""
        heads = x.shape[2] // norm.weight.shape[0]
        return self.ops.rms_norm_rope(x, norm.weight, *rotation, heads=heads, eps=norm.eps, **self.options)

    def rms_norm(self, norm: nn.RMSNorm, x: Tensor) -> Tensor:
        """norm(x), of x's dtype."""
        return self.ops.rms_norm_modulate(x, weight=norm.weight, eps=norm.eps, out_dtype=x.dtype, **self.options)

    def rms_norm_rope(self, norm: nn.RMSNorm, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        """norm(x) with the columns of its heads turned, of x's dtype: [B, S, D]."""
        y = self.ops.rms_norm_rope(x, norm.weight, cos, sin, heads=heads, eps=norm.eps, **self.options)
        return y.flatten(2)

    def _call(self, name: str, *args):
        return self.registry.call(self.registry.triton_twin(name) if self.options else name, *args)

    def _is_stream(self, x: Tensor) -> bool:
        if not _is_tensor(x) or x.ndim != 3:
            return False
        if x.is_cuda:
            return "cuda" in self.device_types and x.shape[2] <= _WIDEST_ROW_ON_CUDA and not is_transformed()
        return x.device.type in self.device_types and not is_transformed()


def _as_they_came(*norms: nn.Module) -> bool:
    """Whether norms are of known classes, whose forwards nobody has replaced."""
    if functional.layer_norm is not _LAYER_NORM or functional.rms_norm is not _RMS_NORM:
        return False
    for norm in norms:
        kind = type(norm)
        if kind not in _NORM_FORWARDS or kind.forward is not _NORM_FORWARDS[kind]:
            return False
    return True


def _is_tensor(x: Tensor) -> bool:
    """An ordinary tensor (no DTensor, no quantised one) of a dtype that the ops are exact enough for."""
    return (type(x) is Tensor or type(x) is nn.Parameter) and x.dtype in _DTYPES


def _is_branch(y: Tensor, x: Tensor) -> bool:
    return _is_tensor(y) and y.shape == x.shape and y.device == x.device


def _in_order(x: Tensor, modulations: tuple[Tensor | None, ...], tables: dict[str, Tensor | None]) -> bool | None:
    """None if they do not fit rows of x; else whether the op's kernel takes all as it is: modulations of one row a
    sample, columns of x side by side.

    Modulations are None, [B or 1, 1 or S, D], [1 or S, D] or [D], as broadcasting reads it (ops also take frames;
    eager not); tables [D].
    """
    device, (batch, tokens, width) = x.device, x.shape
    in_order, row = x.stride(-1) == 1, (batch, 1, width)
    for m in modulations:
        if m is None:
            continue
        if not _is_tensor(m) or m.device != device:
            return None
        shape = m.shape
        if shape != row:
            in_order, rows = False, (1,) * (3 - len(shape)) + shape
            if not shape or len(rows) != 3 or rows[2] != width:
                return None
            if (rows[1] != 1 and rows[1] != tokens) or (rows[0] != 1 and rows[0] != batch):
                return None
    for table in tables.values():
        if table is not None and (not _is_tensor(table) or table.device != device or table.shape != (width,)):
            return None
    return in_order


def _as_rows(m: Tensor | None) -> Tensor | None:
    """As the ops take it: [B or 1, T, D]."""
    return m if m is None or m.ndim == 3 else m[(None,) * (3 - m.ndim)]


def _is_weight(weight: Tensor | None, dtype: torch.dtype | None, device: torch.device) -> bool:
    """[D], narrow enough, on the device and of a dtype, of any if that is None."""
    if weight is None or not _is_tensor(weight) or weight.device != device or (dtype or weight.dtype) != weight.dtype:
        return False
    shape = weight.shape
    return len(shape) == 1 and (device.type != "cuda" or shape[0] <= _WIDEST_ROW_ON_CUDA)


def weight_of(norm: nn.Module) -> Tensor | None:
    """norm.weight, without nn.Module's search for it unless something keeps it elsewhere, as FSDP 1 does."""
    own = norm._parameters
    if "weight" in own:
        return own["weight"]
    return norm.weight


def affine_of(module: nn.LayerNorm | nn.Linear) -> dict[str, Tensor | None]:
    """Its weight and bias, in this order; as `weight_of`."""
    own = module._parameters
    return own if tuple(own) == ("weight", "bias") else {"weight": module.weight, "bias": module.bias}


def _normalizes_rows_of(norm: nn.Module, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether norm is over the last dimension of x, and its weight and bias are plain, on x's device, and of a dtype
    that eager takes with inputs of `dtype`."""
    kind = type(norm)
    if NORM_OPS[kind] == "layer_norm_modulate":
        weight, bias = affine_of(norm).values()
    else:
        weight, bias = norm.weight, getattr(norm, "bias", None)
        if norm.eps is None or bias is not None:
            return False
    if kind is RMSNorm or kind is Krea2RMSNorm:  # always the last dimension, whatever their `dim` says
        if weight is not None and weight.shape != x.shape[-1:]:
            return False
    elif norm.normalized_shape != (x.shape[2],):
        return False
    if weight is None and bias is None:
        return True
    any_dtype = kind in (FP32LayerNorm, RMSNorm, Krea2RMSNorm) or _lowers_to_autocast(norm, x)
    for parameter in (weight, bias):
        if parameter is not None and not (
            _is_tensor(parameter)
            and parameter.device == x.device
            and parameter.shape == (x.shape[2],)
            and (any_dtype or parameter.dtype == dtype)
        ):
            return False
    return True


def _promoted(dtype: torch.dtype, *tensors: Tensor | None) -> torch.dtype:
    for tensor in tensors:
        if tensor is not None and tensor.dtype is not dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _modulated_dtype(norm, x: Tensor, dtype: torch.dtype, *modulation: Tensor | None) -> torch.dtype:
    """Of the modulated norm of an input of `dtype`, on x's device."""
    if _lowers_to_autocast(norm, x):
        return torch.get_autocast_dtype("cuda")
    return _promoted(_norm_dtype(norm, dtype), *modulation)


def _norm_dtype(norm: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """What norm(x) has in eager mode without autocast, for x of `dtype`."""
    if type(norm) is not RMSNorm or norm.weight is None:
        return dtype
    half = norm.weight.dtype in (torch.float16, torch.bfloat16)
    return norm.weight.dtype if half else torch.promote_types(torch.float32, norm.weight.dtype)


def _lowers_to_autocast(norm: nn.Module, x: Tensor) -> bool:
    """CUDA autocast computes these norms in float32, and every consumer casts that down again: do so at once."""
    return type(norm) in (nn.LayerNorm, nn.RMSNorm) and x.is_cuda and torch.is_autocast_enabled("cuda")
