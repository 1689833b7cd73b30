"""What does kernel_speed.py measure: which rows, on what inputs, as whose code?"""

from collections.abc import Callable
from dataclasses import dataclass

import kernel_peers
import torch
import torch.nn.functional as F
from torch import Tensor

from adaptiveload_hf.adaln import ops

EPS = 1e-6
DEVICE = "cuda"
EACH_HEAD = ("each head", "not turned")
# A contender of a case: from the case's arguments to (the call to time, the tensors whose gradients are wanted).
Contender = Callable[..., tuple[Callable[[], Tensor | tuple[Tensor, ...]], list[Tensor]]]


@dataclass(frozen=True)
class Case:
    """One row of the table, both directions.

    Args:
        op: of `adaln.ops`.
        shape: (B, S, D) of x, which is bfloat16.
        modulation: "float32" or "bfloat16" [B, 1, D] as a chunk of [B, 6, D]; "frozen" (float32 without a gradient);
            "per token": bfloat16 chunks of [B, S, 6, D] and float32 tables [D]. Of `rms_norm_rope`, where each head is
            normalised by itself, "each head", or "not turned" without a rotary embedding.
        goals: share of the roof that we set out to reach, forward and backward; 0 for none.
        head: columns of a head.
    """

    op: str
    shape: tuple[int, int, int]
    modulation: str = "float32"
    goals: tuple[float, float] = (0.0, 0.0)
    head: int = 128

    @property
    def name(self) -> str:
        return f"{self.op} {'x'.join(map(str, self.shape))} {self.modulation}"

    @property
    def least_bytes(self) -> tuple[int, int]:
        """What a forward and a backward call must read and write at least; the gradient of a sum costs nothing."""
        batch, tokens, width = self.shape
        forward, backward = _BYTES_AN_ELEMENT[self.op]
        if self.modulation == "per token":  # scale and shift are read, the gradient of scale is written
            forward, backward = forward + 4, backward + 4
        if self.op == "gate_residual" and self.modulation == "frozen":  # y is not needed
            backward -= 2
        turned = self.op == "rms_norm_rope" and self.modulation != "not turned"
        table = 2 * 4 * self.head * tokens if turned else 0
        return tuple(each * batch * tokens * width + table for each in (forward, backward))


_BYTES_AN_ELEMENT = {
    "layer_norm_modulate": (4, 6),
    "rms_norm_modulate": (4, 6),
    "gate_residual": (6, 6),
    "gate_residual_layer_norm_modulate": (8, 12),
    "rms_norm_rope": (4, 6),
}

CASES = (
    Case("layer_norm_modulate", (2, 32768, 5120), goals=(0.95, 0.93)),
    Case("layer_norm_modulate", (2, 32768, 5120), "bfloat16"),
    Case("layer_norm_modulate", (2, 32768, 5120), "frozen", goals=(0.0, 0.93)),
    Case("layer_norm_modulate", (2, 32768, 3072), goals=(0.93, 0.90)),
    Case("layer_norm_modulate", (2, 32768, 2432), goals=(0.93, 0.90)),
    Case("layer_norm_modulate", (2, 32768, 1536), goals=(0.92, 0.88)),
    Case("layer_norm_modulate", (2, 32768, 1536), "bfloat16"),
    Case("layer_norm_modulate", (2, 32768, 1536), "frozen", goals=(0.0, 0.90)),
    Case("layer_norm_modulate", (2, 8192, 5120), goals=(0.86, 0.84)),
    Case("layer_norm_modulate", (4, 4096, 1536), goals=(0.76, 0.70)),
    Case("layer_norm_modulate", (1, 32768, 3072), "per token", goals=(0.90, 0.80)),
    Case("gate_residual", (2, 32768, 5120), goals=(0.95, 0.90)),
    Case("gate_residual", (2, 32768, 1536), goals=(0.95, 0.90)),
    Case("gate_residual_layer_norm_modulate", (2, 32768, 5120), goals=(0.93, 0.86)),
    Case("gate_residual_layer_norm_modulate", (2, 32768, 1536), goals=(0.93, 0.86)),
    Case("rms_norm_modulate", (2, 32768, 4096), goals=(0.93, 0.88)),
    Case("rms_norm_rope", (1, 32760, 5120), goals=(0.88, 0.80)),
    Case("rms_norm_rope", (1, 32760, 1536), goals=(0.88, 0.80)),
    Case("rms_norm_rope", (1, 32768, 3072), "each head", goals=(0.88, 0.80)),  # HunyuanVideo
    Case("rms_norm_rope", (1, 4608, 3072), "each head", goals=(0.76, 0.70)),  # Flux
    Case("rms_norm_rope", (4, 4096, 1536), "not turned", goals=(0.76, 0.70), head=64),  # SD3.5
)
QUICK_CASES = tuple(Case(op, (2, 8192, 3072)) for op in _BYTES_AN_ELEMENT)
SMALL_CASES = tuple(
    Case(op, (1, tokens, 1536))
    for op in ("layer_norm_modulate", "gate_residual", "gate_residual_layer_norm_modulate", "rms_norm_rope")
    for tokens in (256, 1024, 4096)
)


def make_arguments(case: Case) -> dict[str, Tensor]:
    """Random inputs by the names of the op's parameters, laid out as diffusers lays them out."""
    batch, tokens, width = case.shape

    def activation():
        return torch.randn(case.shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()

    def chunk(index):
        trained = case.modulation != "frozen"
        if case.modulation == "per token":
            whole = torch.randn(batch, tokens, 6, width, device=DEVICE, dtype=torch.bfloat16).mul_(0.3)
            return whole.chunk(6, dim=2)[index].squeeze(2).detach().requires_grad_()
        dtype = torch.bfloat16 if case.modulation == "bfloat16" else torch.float32
        whole = torch.randn(batch, 6, width, device=DEVICE).mul_(0.3).to(dtype)
        return whole.chunk(6, dim=1)[index].detach().requires_grad_(trained)

    arguments = {"x": activation()}
    if case.op == "rms_norm_rope":
        normed = case.head if case.modulation in EACH_HEAD else width
        weight = torch.randn(normed, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        if case.modulation == "not turned":
            return {**arguments, "weight": weight}
        angles = torch.randn(1, tokens, 1, case.head // 2, device=DEVICE)
        tables = {n: f(angles).repeat_interleave(2, -1) for n, f in (("cos", torch.cos), ("sin", torch.sin))}
        return {**arguments, "weight": weight, **tables}
    if "gate" in case.op:
        arguments |= {"y": activation(), "gate": chunk(2)}
    if "norm" in case.op:
        arguments |= {"scale": chunk(1), "shift": chunk(0)}
    if case.modulation == "per token":
        arguments |= {
            name: torch.randn(width, device=DEVICE).requires_grad_() for name in ("scale_table", "shift_table")
        }
    return arguments


def contenders(case: Case) -> dict[str, Contender]:
    """Whose code is measured on a case, by name; our own CUDA kernel only where it is built."""
    options = {"heads": case.shape[2] // case.head} if case.op == "rms_norm_rope" else {}
    found = {}
    if ops.kernel_backend("cuda") == "cuda":
        found["CUDA"] = fused(case.op, "auto", **options)
    found["Triton"] = fused(case.op, "triton", **options)
    if case in SMALL_CASES:
        from kernel_floor import floor_of  # needs Triton, as kernel_speed.py does

        found["plainest"] = floor_of(case.op)
    found["eager"] = eager_of(case)
    found["torch.compile"] = _whole(torch.compile(_expression_of(case), dynamic=False))
    if case.modulation == "float32":
        found |= kernel_peers.of_op(case.op)
    return found


def fused(op: str, backend: str, **options) -> Contender:
    """Our op by one backend."""

    def prepare(**arguments):
        x, function = arguments["x"], getattr(ops, op)
        dtypes = {} if op == "rms_norm_rope" else {"out_dtype": x.dtype}
        dtypes |= {"residual_dtype": x.dtype} if op.startswith("gate_residual_") else {}
        return lambda: function(**arguments, **dtypes, **options, backend=backend), _trained(arguments)

    return prepare


def eager_of(case: Case) -> Contender:
    """The expression of diffusers that the op stands for."""
    return _whole(_expression_of(case))


def _expression_of(case: Case):
    if case.modulation in EACH_HEAD:
        return _norm_of_heads
    return _EAGER_BFLOAT16[case.op] if case.modulation == "bfloat16" else _EAGER[case.op]


def _whole(function) -> Contender:
    return lambda **arguments: (lambda: function(**arguments), _trained(arguments))


def _trained(arguments: dict[str, Tensor]) -> list[Tensor]:
    return [tensor for tensor in arguments.values() if tensor.requires_grad]


# As diffusers writes it: Wan's float32 expressions.


def _norm(x, scale, shift, scale_table=None, shift_table=None):
    if scale_table is not None:
        scale, shift = scale_table + scale.float(), shift_table + shift.float()
    return (F.layer_norm(x.float(), (x.shape[-1],), None, None, EPS) * (1 + scale) + shift).type_as(x)


def _gate(x, y, gate):
    return (x.float() + y * gate).type_as(x)


def _gate_norm(x, y, gate, scale, shift):
    residual = _gate(x, y, gate)
    return residual, _norm(residual, scale, shift)


def _rope(x, weight, cos, sin):
    x = F.rms_norm(x, (x.shape[-1],), weight, EPS).unflatten(2, (-1, cos.shape[-1]))
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = first * cos - second * sin
    out[..., 1::2] = first * sin + second * cos
    return out


# Flux's and HunyuanVideo's; SD3.5's without cos and sin.


def _norm_of_heads(x, weight, cos=None, sin=None):
    x = F.rms_norm(x.unflatten(2, (-1, len(weight))), weight.shape, weight, EPS)
    if cos is None:
        return x
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-second, first], -1).flatten(3)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


# LTX's RMS expression, and SD3's of the layer norm: all in the dtype of x.


def _rms_norm(x, scale, shift):
    return (F.rms_norm(x, (x.shape[-1],), None, EPS) * (1 + scale) + shift).type_as(x)


def _norm_in_bfloat16(x, scale, shift):
    return F.layer_norm(x, (x.shape[-1],), None, None, EPS) * (1 + scale) + shift


_EAGER = {
    "layer_norm_modulate": _norm,
    "rms_norm_modulate": _rms_norm,
    "gate_residual": _gate,
    "gate_residual_layer_norm_modulate": _gate_norm,
    "rms_norm_rope": _rope,
}
_EAGER_BFLOAT16 = {"layer_norm_modulate": _norm_in_bfloat16}
