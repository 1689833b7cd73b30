"""How do queries, keys and values of Wan's attention come out of one operation?

q = turned(RMS(project(x)) * w), k likewise, v = project(x). Called one by one they are three linears, with a node of
autograd for every view, two norms, and two sums over all of the gradients of x. Together they cost the host less, and
these sums accumulate in the matrix products.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import ops as fused_ops
from .projections import differentiated, in_fours, is_ordinary, may_edit, needs_of, projected, projection_of
from .reference import compute_dtype, inverse_rms
from .registry import bits_of, gradients_of, keep, kept, run
from .runtime import FusedOps, weight_of


class _Settings(NamedTuple):
    """Heads; whether they come before the tokens; eps of the norms; how many of the projections read x (the others
    read the text); LoRA's scalings; whether the ops run in Triton."""

    heads: int
    heads_first: bool
    eps: tuple[float, float]
    of_x: int
    scalings: tuple[float, float, float]
    in_triton: bool


def queries_keys_values(
    ops: FusedOps,
    attn: nn.Module,
    x: Tensor,
    text: Tensor | None,
    rotary_emb: tuple[Tensor, Tensor] | None,
    heads_first: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """What an attention module of Wan attends with, each [B, S, heads, D / heads], or with `heads_first` [B, heads, S,
    D / heads] with the same memory, up to rounding.

    None where calling its modules does more (see `projections.project` and `FusedOps.can_turn`), and where x, the
    text, or queries or keys of them would be kept for nothing, because what reads them, or made them, is frozen.

    Args:
        text: what keys and values are made of, [B, T, E]; None: of x.
        rotary_emb: cos and sin of `rms_norm_rope`; None: nothing is turned.
    """
    children = attn._modules
    norms = children.get("norm_q"), children.get("norm_k")
    if ops.ops is not fused_ops or None in norms or attn.fused_projections or not is_ordinary(x):
        return None
    if text is not None and not (is_ordinary(text) and text.ndim == 3 and text.dtype == x.dtype):
        return None
    if not ops.can_turn(norms, x, rotary_emb, attn.heads):
        return None
    of_q = projection_of(children["to_q"], x)
    of_k = projection_of(children["to_k"], x if text is None else text)
    of_v = projection_of(children["to_v"], x if text is None else text)
    if of_q is None or of_k is None or of_v is None:
        return None
    norm_q, norm_k = weight_of(norms[0]), weight_of(norms[1])
    (*q, scaling_q), (*k, scaling_k), (*v, scaling_v) = of_q, of_k, of_v
    if norm_q.shape[0] != q[0].shape[0] or norm_k.shape[0] != k[0].shape[0]:
        return None  # it is refused where it is called
    cos, sin = (None, None) if rotary_emb is None else rotary_emb
    tensors = cos, sin, norm_q, norm_k, *q, *k, *v
    needs, of_x = needs_of(tensors), 3 if text is None else 1
    of_linears = in_fours(needs)[1:]
    if torch.is_grad_enabled() and (
        _is_kept_for_nothing(x, of_linears[:of_x])
        or (text is not None and _is_kept_for_nothing(text, of_linears[of_x:]))
    ):
        return None
    eps, scalings = (norms[0].eps, norms[1].eps), (scaling_q, scaling_k, scaling_v)
    settings = _Settings(attn.heads, heads_first, eps, of_x, scalings, bool(ops.options))
    return _apply(settings, needs, tensors, x, text, *itertools.compress(tensors, needs))


def _is_kept_for_nothing(x: Tensor, needs: list[list[bool]]) -> bool:
    """Whether x would be kept though no projection of it is trained, or queries or keys that need no gradient."""
    trained = [weight or down for weight, _, down, _ in needs]
    normed = trained[:-1] or trained  # values, the last of several, are not kept
    return not (any(trained) and (x.requires_grad or all(normed)))


class _QueriesKeysValues(torch.autograd.Function):
    """Gradients: through the norms by their ops, then as `projections` does. Arguments as there."""

    @staticmethod
    def forward(ctx, settings, needs, tensors, x, text, *_):
        cos, sin, norm_q, norm_k, *tensors = tensors
        (q, h_q), (k, h_k), (v, h_v) = _projections(settings, x, text, in_fours(tensors))
        q, k = _as_tokens(q, x), _as_tokens(k, x if text is None else text)
        turned_q, rstd_q = _normed(settings, q, norm_q, cos, sin, 0)
        turned_k, rstd_k = _normed(settings, k, norm_k, cos, sin, 1)
        ctx.set_materialize_grads(False)
        # Sin belongs to the model, not to its blocks. So does cos, but by what is saved checkpointing sees that tables
        # have another dtype when it recomputes, as under FSDP2 that casts inputs before torch 2.12.
        ctx.save_for_backward(x, text, cos, q, k, rstd_q, rstd_k, h_q, h_k, h_v)
        keep(ctx, sin, norm_q, norm_k, *tensors)
        ctx.settings, ctx.needs, ctx.in_triton = settings, needs, settings.in_triton
        batch, tokens = k.shape[:2]
        return turned_q, turned_k, _by_head(settings, v, batch, tokens)

    @staticmethod
    def backward(ctx, *grads):
        x, text, cos, q, k, rstd_q, rstd_k, *hs = ctx.saved_tensors
        sin, norm_q, norm_k, *tensors = kept(ctx)
        settings, tensors = ctx.settings, in_fours(tensors)
        x_needs, text_needs = ctx.needs_input_grad[3:5]
        _, _, norm_q_needs, norm_k_needs, *needs = ctx.needs
        if settings.heads_first:
            grads = [None if grad is None else grad.transpose(1, 2) for grad in grads]
        grad_q, grad_k, grad_v = grads
        if torch.is_grad_enabled():  # the gradients of the norms depend on x, too
            (q, _), (k, _), _ = _projections(settings, x, text, tensors)
            q, k = _as_tokens(q, x), _as_tokens(k, x if text is None else text)
        grad_q, grad_norm_q = _through_norm(ctx, grad_q, q, rstd_q, norm_q, cos, sin, 0, norm_q_needs)
        grad_k, grad_norm_k = _through_norm(ctx, grad_k, k, rstd_k, norm_k, cos, sin, 1, norm_k_needs)
        grads, found, dxs, needs = (grad_q, grad_k, grad_v), [], [], in_fours(needs)
        for of, some, of_needs in ((x, slice(settings.of_x), x_needs), (text, slice(settings.of_x, 3), text_needs)):
            dx, of_some = None, []
            if of is not None:
                some = [each[some] for each in (grads, settings.scalings, tensors, hs, needs)]
                dx, of_some = differentiated(of.flatten(0, 1), *some, of_needs)
            dxs.append(None if dx is None else dx.view_as(of))
            found += of_some
        found = itertools.compress((None, None, grad_norm_q, grad_norm_k, *found), ctx.needs)
        return None, None, None, *dxs, *found


# Function.apply looks at every argument for what torch.func leaves behind, which `is_plain` has excluded.
_apply = super(torch.autograd.Function, _QueriesKeysValues).apply
_QueriesKeysValues._backward_cls.apply = _QueriesKeysValues.backward  # as in `projections`


def _projections(settings: _Settings, x: Tensor, text: Tensor | None, tensors: list) -> list:
    """(y, h) of each as in `projections.projected`."""
    made, rows, in_place = [], x.flatten(0, 1), may_edit()
    for i, (scaling, projection) in enumerate(zip(settings.scalings, tensors)):
        if i == settings.of_x:
            rows = text.flatten(0, 1)
        made.append(projected(rows, *projection, scaling, in_place))
    return made


def _as_tokens(y: Tensor, of: Tensor) -> Tensor:
    """y [B S, D] as [B, S, D]."""
    return y.view(of.shape[0], of.shape[1], y.shape[1])


def _normed(settings: _Settings, y: Tensor, weight: Tensor, cos, sin, which: int) -> tuple[Tensor, Tensor]:
    """(y normalised and turned, as attention takes it, the statistics of its rows)."""
    if cos is not None:
        eps = settings.eps[which]
        turned, rstd = run("rms_norm_rope", settings.in_triton, y, weight, cos, sin, settings.heads, eps)
        return turned.transpose(1, 2) if settings.heads_first else turned, rstd
    normed, rstd = run(
        "rms_norm_modulate", settings.in_triton, y, None, None, weight, settings.eps[which], 1.0, 0.0, y.dtype
    )
    return _by_head(settings, normed, y.shape[0], y.shape[1]), rstd


def _by_head(settings: _Settings, y: Tensor, batch: int, tokens: int) -> Tensor:
    """y, which has been made anew, as attention takes it, in one step: each view takes the host as long as a product's
    arguments."""
    heads, width = settings.heads, y.shape[-1]
    if settings.heads_first:
        return y.as_strided((batch, heads, tokens, width // heads), (tokens * width, width // heads, width, 1))
    return y.view(batch, tokens, heads, width // heads)


def _through_norm(ctx, grad, y, rstd, weight, cos, sin, which: int, weight_needs: bool) -> list[Tensor | None]:
    """Gradients of y and of the norm's weight."""
    if grad is None:
        return [None, None]
    if torch.is_grad_enabled():
        rstd = inverse_rms(y, ctx.settings.eps[which], compute_dtype(y, weight, cos, sin))
    if cos is not None:
        needs = bits_of((True, weight_needs))
        return gradients_of(ctx, "rms_norm_rope", 2, needs, grad, y, rstd, weight, cos, sin)
    needs, grad = bits_of((True, False, False, weight_needs)), grad.flatten(2)
    args = (grad, y, rstd, None, weight, 1.0, 0.0, 1, y.dtype)
    dy, _, _, dweight = gradients_of(ctx, "rms_norm_modulate", 4, needs, *args)
    return [dy, dweight]
