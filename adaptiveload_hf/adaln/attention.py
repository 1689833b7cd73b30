"""How are queries and keys of Wan's attention projected, normalised and turned in few passes?"""

import functools

from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from ..errors import UserError
from .forwards import BACKENDS
from .ops import OPS
from .projections import project
from .runtime import FusedOps
from .source import LeftEager, running_source

# Digests of the `__call__` of diffusers' processors that the tests compare with and without the op: Wan's and Wan
# Animate's, ChronoEdit's, SkyReels V2's. All norm queries and keys over all heads together, then turn them.
TESTED_PROCESSORS = {"13c09feedcfe814a", "a000dc173c7fbf59", "be927e58ea7fba80"}

_OPS_OF = {backend: FusedOps(*arguments, frozenset(OPS)) for backend, arguments in BACKENDS.items()}


class AdaptiveLoadAttnProcessor:
    """Wan's attention with the RMS norm and the rotary embedding of queries and keys as one op, `rms_norm_rope`.

    Projections of one tensor, and those with LoRA, are one operation, see `projections.project`. Everything else
    (image keys, the attention backend) is done by a processor of diffusers, which this one wraps. It also norms and
    turns where the op does not apply: in cross-attention, with other norms or hooks on them, with mixed dtypes.

    Args:
        stock: the processor to wrap, by default a new WanAttnProcessor. Its attention backend and parallel
            configuration are those of the wrapper.
        backend: what runs the op, as in `patch_model`.

    Raises:
        UserError: `stock` is not one that the tests cover, or `backend` is unknown.
    """

    installed_by_patch = False

    def __init__(self, stock: object | None = None, *, backend: str = "auto"):
        if backend not in BACKENDS:
            raise UserError(f"backend must be one of {', '.join(BACKENDS)}, but it is {backend!r}.")
        stock = WanAttnProcessor() if stock is None else stock
        if not is_stock(stock):
            raise UserError(
                "expected an attention processor of Wan, ChronoEdit or SkyReels V2 as in a diffusers that the tests "
                f"cover, found {type(stock).__module__}.{type(stock).__qualname__}. Keep that processor."
            )
        self.stock = stock
        self.backend = backend

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
        self_attention = rotary_emb is not None and encoder_hidden_states is None
        if self_attention and ops.can_turn((attn.norm_q, attn.norm_k), hidden_states, *rotary_emb, attn.heads):
            attn, rotary_emb = _FusedAttention(attn, ops, rotary_emb), None
        elif type(attn.to_q) is not nn.Linear:  # LoRA
            attn = _FusedAttention(attn, ops)
        return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)

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


class _FusedAttention:
    """An attention module as its processor sees it.

    With `rotary_emb` it is self-attention, the projection of queries is also that of keys and values, and the norms of
    queries and keys also turn the heads.
    """

    def __init__(self, attn: nn.Module, ops: FusedOps, rotary_emb: tuple[Tensor, Tensor] | None = None):
        self._attn = attn
        self._ops = ops
        self._rotary_emb = rotary_emb
        self._projected = (None, None, None)

    def __getattr__(self, name: str):
        return getattr(self._attn, name)

    def to_q(self, x: Tensor) -> Tensor:
        attn = self._attn
        if self._rotary_emb is None:
            return project(x, attn.to_q)[0]
        query, key, value = project(x, attn.to_q, attn.to_k, attn.to_v)
        self._projected = x, key, value
        return query

    def to_k(self, x: Tensor) -> Tensor:
        of, key, _ = self._projected
        return key if of is x else project(x, self._attn.to_k)[0]

    def to_v(self, x: Tensor) -> Tensor:
        of, _, value = self._projected
        return value if of is x else project(x, self._attn.to_v)[0]

    @property
    def to_out(self) -> list:
        linear, *others = self._attn.to_out
        return [lambda x: project(x, linear)[0], *others]

    def norm_q(self, query: Tensor) -> Tensor:
        return self._normed(self._attn.norm_q, query)

    def norm_k(self, key: Tensor) -> Tensor:
        return self._normed(self._attn.norm_k, key)

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        if self._rotary_emb is None:
            return norm(x)
        return self._ops.rms_norm_rope(norm, x, *self._rotary_emb, self._attn.heads)


def is_stock(processor: object) -> bool:
    """Whether a processor is one of diffusers' own that the tests cover."""
    cls = type(processor)
    return cls.__module__.startswith("diffusers.") and _is_tested(cls)


def can_hold(module: nn.Module) -> bool:
    """Whether a module is an attention that a stock processor, or this one, serves."""
    stock = getattr(type(module), "_default_processor_cls", None)
    return isinstance(stock, type) and _is_tested(stock)


@functools.cache
def _is_tested(cls: type) -> bool:
    try:
        return running_source(cls.__call__).digest in TESTED_PROCESSORS
    except LeftEager:
        return False


def install(module: nn.Module, backend: str) -> str | None:
    """Wrap the processor of an attention in place, or say why not."""
    processor = module.processor
    if isinstance(processor, AdaptiveLoadAttnProcessor):
        return None
    if not is_stock(processor):
        return f"its attention processor is {type(processor).__qualname__}, not the stock one"
    wrapper = AdaptiveLoadAttnProcessor(processor, backend=backend)
    wrapper.installed_by_patch = True
    module.processor = wrapper
    return None


def uninstall(module: nn.Module) -> None:
    """Give a module the very processor back that `install` wrapped."""
    processor = getattr(module, "processor", None)
    if isinstance(processor, AdaptiveLoadAttnProcessor) and processor.installed_by_patch:
        module.processor = processor.stock
