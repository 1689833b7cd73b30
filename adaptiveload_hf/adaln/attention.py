"""How are queries and keys of Wan, SD3, Flux and HunyuanVideo projected, normalised and turned in few passes?"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers.models import embeddings
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from ..errors import UserError
from .forwards import BACKENDS, MARK
from .onlookers import no_hooks_on
from .ops import OPS
from .projections import is_tested_lora, project, project_heads
from .queries import queries_keys_values
from .runtime import NORM_OPS, FusedOps
from .source import LeftEager, running_source

# Digests of the `__call__` of diffusers' processors that the tests compare with and without the op: Wan's and Wan
# Animate's, ChronoEdit's, SkyReels V2's. All norm queries and keys over all heads together, then turn them.
TESTED_PROCESSORS = {"13c09feedcfe814a", "a000dc173c7fbf59", "be927e58ea7fba80"}
# Of what calls the projections for them.
TESTED_PROJECTIONS = {"657bbdb508a6c612", "6dae2bf5f7fabf98"}
# Of diffusers' attention dispatch (the second is 0.41.0's), and of its backend that calls PyTorch's attention.
TESTED_DISPATCH, TESTED_NATIVE = {"cd20137f05eb6b2b", "39d8d5983a78d41b"}, {"73da793fdffd52d9"}

# Those of SD3, Flux and HunyuanVideo, which norm each head by itself, and what turns queries and keys of the last two.
TESTED_JOINT_PROCESSORS = {
    JointAttnProcessor2_0: "392b6bf56c8505d1",
    FluxAttnProcessor: "d5b36134887ebe45",
    HunyuanVideoAttnProcessor2_0: "9d2e9a44e1dc2bf7",
}
TESTED_ROTATION = "a25267d425f8c5ea"

_ATTENTION = F.scaled_dot_product_attention  # people put their own in its place

_OPS_OF = {backend: FusedOps(*arguments, frozenset(OPS)) for backend, arguments in BACKENDS.items()}


class AdaptiveLoadAttnProcessor:
    """Wan's attention with the RMS norm and the rotary embedding of queries and keys as one op, `rms_norm_rope`, or in
    cross-attention `rms_norm_modulate`; where nothing stands against it together with the projections, as
    `queries.queries_keys_values`.

    The diffusers processor that this one wraps does everything else: image keys, fused projections, the attention
    backend. It also norms and rotates where the ops do not apply: with other norms, hooks on them, or mixed dtypes.

    Args:
        stock: the processor to wrap, by default a new WanAttnProcessor. Its attention backend and parallel
            configuration are those of the wrapper.
        backend: what runs the op, as in `patch_model`.

    Raises:
        UserError: `stock` is not one that the tests cover, or `backend` is unknown.
    """

    installed_by_patch = False
    _families = "Wan, ChronoEdit or SkyReels V2"

    def __init__(self, stock: object | None = None, *, backend: str = "auto"):
        if backend not in BACKENDS:
            raise UserError(f"backend must be one of {', '.join(BACKENDS)}, but it is {backend!r}.")
        stock = WanAttnProcessor() if stock is None else stock
        if not self._can_wrap(stock):
            raise UserError(
                f"expected an attention processor of {self._families} as in a diffusers that the tests cover, found "
                f"{type(stock).__module__}.{type(stock).__qualname__}. Keep that processor."
            )
        self.stock = stock
        self.backend = backend
        self._tested_call = type(stock).__call__

    @property
    def __class__(self) -> type:
        """diffusers makes a processor anew as `processor.__class__()`, and looks up by it what it knows of one: that
        of the stock processor, unless the caller set this one."""
        return type(self.stock) if self.installed_by_patch else type(self)

    def __reduce__(self) -> tuple:
        return object.__new__, (type(self),), vars(self)

    def _stands_for_stock(self, attn: nn.Module) -> bool:
        """Whether the stock processor would still run what the tests cover, and an attention that `patch_model` gave
        this one is still patched: diffusers keeps processors aside and puts them back."""
        if self.installed_by_patch and MARK not in attn.__dict__:
            return False
        return type(self.stock).__call__ is self._tested_call

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """What the stock processor returns, up to rounding."""
        ops = _OPS_OF[self.backend]
        if self._stands_for_stock(attn):
            known = rotary_emb is None or encoder_hidden_states is None
            inputs = attn, hidden_states, encoder_hidden_states
            attended = self._attend(ops, *inputs, attention_mask, rotary_emb) if known else None
            if attended is not None:
                return attended
            norms = [attn.norm_q, attn.norm_k] + ([attn.norm_added_k] if attn.add_k_proj is not None else [])
            together = _ALL_TOGETHER if encoder_hidden_states is None else _KEYS_WITH_VALUES
            if known and ops.can_turn(norms, hidden_states, rotary_emb, attn.heads):
                attn, rotary_emb = _FusedAttention(attn, _turning(ops, rotary_emb, attn.heads), together), None
            elif type(attn.to_q) is not nn.Linear:  # LoRA
                attn = _FusedAttention(attn, _called, together)
        return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)

    def _attend(self, ops: FusedOps, attn, x: Tensor, text: Tensor | None, mask, rotary_emb) -> Tensor | None:
        """All that the stock processor does, with queries, keys and values made at once; None if they cannot be."""
        modules, stock, helpers = attn._modules, self.stock, self._tested_call.__globals__
        if (
            torch.compiler.is_compiling()
            or modules.get("add_k_proj") is not None
            or stock._parallel_config is not None
        ):
            return None
        if _digest(helpers["_get_qkv_projections"]) not in TESTED_PROJECTIONS:
            return None
        attend, backend = helpers["dispatch_attention_fn"], stock._attention_backend
        native = mask is None and _is_native(attend, backend)
        made = queries_keys_values(ops, attn, x, text, rotary_emb, native)
        if made is None:
            return None
        linear, dropout, *_ = modules["to_out"]._modules.values()
        if native:
            y = F.scaled_dot_product_attention(*made)
        else:
            y = attend(*made, attn_mask=mask, dropout_p=0.0, is_causal=False, backend=backend, parallel_config=None)
            y = y.type_as(made[0]).transpose(1, 2)
        # What it saves may not depend on `native`: a backend set around the forward alone is another in recomputation.
        y = project_heads(y, linear)
        return y if type(dropout) is nn.Dropout and dropout.p == 0 and no_hooks_on(dropout) else dropout(y)

    def _can_wrap(self, stock: object) -> bool:
        return is_stock(stock)

    @property
    def _attention_backend(self):
        return self.stock._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, value):
        self.stock._attention_backend = value

    @property
    def _parallel_config(self):
        return self.stock._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, value):
        self.stock._parallel_config = value


class AdaptiveLoadJointAttnProcessor(AdaptiveLoadAttnProcessor):
    """SD3's, Flux's and HunyuanVideo's attention with the RMS norms of queries and keys, each head by itself, and
    their rotary embedding as `rms_norm_rope`, and projections with LoRA as one operation. `patch_model` wraps their
    processors in it. torch.compile gets the stock processor: it fuses these norms with the copies around them, which
    an operation would keep apart (SD3.5 took 17% longer on an H200)."""

    _families = "SD3, Flux or HunyuanVideo"

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,  # named, or diffusers' attention would not pass it on
        **kwargs,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What the stock processor returns, up to rounding."""
        if self._stands_for_stock(attn) and not torch.compiler.is_compiling():
            ops, rotations = _OPS_OF[self.backend], {}
            if image_rotary_emb is not None:
                rotations = self._rotations(ops, attn, hidden_states, encoder_hidden_states, image_rotary_emb)
                image_rotary_emb = None if rotations else image_rotary_emb
            heads_first = type(self.stock) is JointAttnProcessor2_0
            norm = functools.partial(_norm_heads, ops, heads_first, rotations)
            attn = _FusedAttention(attn, norm, _ALL_TOGETHER)
        if image_rotary_emb is not None:
            kwargs["image_rotary_emb"] = image_rotary_emb
        return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, **kwargs)

    def _rotations(self, ops: FusedOps, attn, x: Tensor, text: Tensor | None, rotary_emb: tuple) -> dict[str, tuple]:
        """By the name of a norm, the angles by which what it gives is turned; nothing if the op does not apply."""
        names, before = ["norm_q", "norm_k"], 0
        if type(self.stock) is FluxAttnProcessor and text is not None:  # its text is turned, too, and comes first
            names, before = [*names, "norm_added_q", "norm_added_k"], text.shape[1]
        cos, sin = rotary_emb
        norms = tuple(getattr(attn, name) for name in names)
        turn = self._tested_call.__globals__.get("apply_rotary_emb", embeddings.apply_rotary_emb)
        known = None not in norms and _digest(turn) == TESTED_ROTATION
        if not known or cos.requires_grad or sin.requires_grad or cos.shape != sin.shape:
            return {}
        if cos.ndim != 2 or cos.shape[0] != before + x.shape[1]:
            return {}
        if not ops.can_norm_heads(norms, x, cos.shape[1], (cos, sin)):
            return {}
        tables = cos[None, :, None], sin[None, :, None]
        own, of_text = (tuple(table[:, part] for table in tables) for part in (slice(before, None), slice(before)))
        return {name: of_text if "added" in name else own for name in names}

    def _can_wrap(self, stock: object) -> bool:
        return _is_joint(stock)


_NORMS = frozenset({"norm_q", "norm_k", "norm_added_q", "norm_added_k"})
_PROJECTIONS = frozenset({"to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"})
# Which other projections of the same tensor are made with the first that a processor asks for, if that has LoRA.
_KEYS_WITH_VALUES = {"to_k": ("to_v",), "add_k_proj": ("add_v_proj",)}
_ALL_TOGETHER = {**_KEYS_WITH_VALUES, "to_q": ("to_k", "to_v"), "add_q_proj": ("add_k_proj", "add_v_proj")}


class _FusedAttention:
    """An attention module as its processor sees it.

    Args:
        attn: the module.
        norm: what calls a norm of queries or keys: norm(name, module, x).
        together: `_ALL_TOGETHER` in self-attention, else `_KEYS_WITH_VALUES`.
    """

    def __init__(self, attn: nn.Module, norm: Callable, together: dict[str, tuple[str, ...]]):
        self._attn = attn
        self._norm = norm
        self._together = together
        self._made = {}

    def __getattr__(self, name: str):
        module = getattr(self._attn, name)
        if module is None:
            return None
        if name in _NORMS:
            return functools.partial(self._norm, name, module)
        if name in _PROJECTIONS and (type(module) is not nn.Linear or name in self._made):
            return functools.partial(self._projected, name)
        if name == "to_out" and type(module[0]) is not nn.Linear:
            linear, *others = module
            return [functools.partial(_project_alone, linear), *others]
        return module

    def _projected(self, name: str, x: Tensor) -> Tensor:
        of, y = self._made.pop(name, (None, None))
        if of is x:
            return y
        others = self._together.get(name, ())
        y, *made = project(x, *(getattr(self._attn, each) for each in (name, *others)))
        self._made |= {other: (x, y) for other, y in zip(others, made)}
        return y


def _project_alone(linear: nn.Module, x: Tensor) -> Tensor:
    return project(x, linear)[0]


def _called(_: str, norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x)


def _turning(ops: FusedOps, rotary_emb: tuple[Tensor, Tensor] | None, heads: int) -> Callable:
    if rotary_emb is None:
        return lambda _, norm, x: ops.rms_norm(norm, x)
    return lambda _, norm, x: ops.rms_norm_rope(norm, x, *rotary_emb, heads)


def _norm_heads(
    ops: FusedOps, heads_first: bool, rotations: dict[str, tuple], name: str, norm: nn.Module, x: Tensor
) -> Tensor:
    """norm(x) over the last dimension of x [B, S, heads, D / heads], or `heads_first` a transposed view of such, and
    turned if `rotations` has the norm's name."""
    if x.ndim != 4:
        return norm(x)
    stream = (x.transpose(1, 2) if heads_first else x).flatten(2)
    if name in rotations:
        return ops.norm_heads(norm, stream, rotations[name])
    if type(norm) in NORM_OPS and ops.can_norm_heads((norm,), stream, x.shape[3]):
        y = ops.norm_heads(norm, stream)
        return y.transpose(1, 2) if heads_first else y
    return norm(x)


def is_stock(processor: object) -> bool:
    """Whether a processor is one of diffusers' own that `AdaptiveLoadAttnProcessor` wraps."""
    cls = type(processor)
    return cls.__module__.startswith("diffusers.") and _digest(cls.__call__) in TESTED_PROCESSORS


def _is_native(attend: Callable, backend: object) -> bool:
    """Whether diffusers' dispatch would call nothing but PyTorch's attention: to do so at once spares the host its
    dictionaries, and autograd eight nodes for views."""
    if F.scaled_dot_product_attention is not _ATTENTION or _digest(attend) not in TESTED_DISPATCH:
        return False
    backends = attend.__globals__["_AttentionBackendRegistry"]
    name = backends._active_backend if backend is None else backend
    return not backends._checks_enabled and _digest(backends._backends.get(name)) in TESTED_NATIVE


def op_of(module: nn.Module) -> str | None:
    """The op that a wrapped processor of this module runs, if it is an attention that stock ones serve."""
    default = getattr(type(module), "_default_processor_cls", None)
    if isinstance(default, type) and _digest(default.__call__) in TESTED_PROCESSORS:
        return "rms_norm_rope"
    processor = getattr(module, "processor", None)
    joint = _is_joint(processor) or type(processor) is AdaptiveLoadJointAttnProcessor
    return "rms_norm_rope" if joint else None


def _is_joint(processor: object) -> bool:
    cls = type(processor)
    return cls in TESTED_JOINT_PROCESSORS and _digest(cls.__call__) == TESTED_JOINT_PROCESSORS[cls]


@functools.cache
def _digest(call: object) -> str | None:
    try:
        return running_source(call).digest
    except LeftEager:
        return None


def install(module: nn.Module, backend: str) -> str | None:
    """Wrap the processor of an attention in place, or say why not."""
    processor = module.processor
    if isinstance(processor, AdaptiveLoadAttnProcessor):
        return None
    joint = _is_joint(processor)
    if not joint and not is_stock(processor):
        return f"its attention processor is {type(processor).__qualname__}, not the stock one"
    wrapper = (AdaptiveLoadJointAttnProcessor if joint else AdaptiveLoadAttnProcessor)(processor, backend=backend)
    wrapper.installed_by_patch = vars(module)[MARK] = True
    module.processor = wrapper
    return None


def as_written(module: nn.Module) -> str | None:
    """What a wrapped attention leaves as somebody wrote it because the tests know other code, if there is such."""
    processor = module.processor
    if not isinstance(processor, AdaptiveLoadAttnProcessor):
        return None
    for linear in (each for each in module.modules() if hasattr(each, "lora_A")):
        if not is_tested_lora(type(linear), type(linear).forward):
            return f"its LoRA layers ({type(linear).__qualname__}) run as PEFT wrote them: the tests cover other code"
    helpers = processor._tested_call.__globals__
    for name, tested in (("_get_qkv_projections", TESTED_PROJECTIONS), ("dispatch_attention_fn", TESTED_DISPATCH)):
        if is_stock(processor.stock) and _digest(helpers[name]) not in tested:
            return f"its processor calls {name} as it would unpatched: the tests cover other code"
    return None


def uninstall(module: nn.Module) -> None:
    """Give a module the very processor back that `install` wrapped."""
    processor = getattr(module, "processor", None)
    if isinstance(processor, AdaptiveLoadAttnProcessor) and processor.installed_by_patch:
        module.processor = processor.stock
