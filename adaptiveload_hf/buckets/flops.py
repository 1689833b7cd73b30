"""How much arithmetic is a training step? Counted from a diffusers transformer's own config, without its weights."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import diffusers
import numpy as np
import torch
from accelerate import init_empty_weights
from diffusers.models.attention_dispatch import attention_backend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from ..errors import UserError
from .cost import FlopCount
from .shapes import TokenGeometry
from .transformers import FAMILIES, Family

# The backward of a matrix product is two products of its size.
_TERAFLOP_OF_A_STEP = 3e-12
_UNIT = 32  # tokens; Z-Image fills up each sequence to a multiple of it
# What a class raises in its __init__ or forward for values that are none of its own.
_NOT_ITS_CONFIG = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_ELSE_MEASURE = (
    "What cannot be counted can be measured: adaptiveload_hf.measure_shapes in your own loop (docs/cost-model.md), "
    "then `adaptiveload fit measurements.jsonl --output config`."
)


class Counted(NamedTuple):
    """model_class: diffusers' name. geometry: how a latent becomes tokens. cost: teraflop of forward and backward."""

    model_class: str
    geometry: TokenGeometry
    cost: FlopCount


def flops_cost(config, text_tokens: int | None = None) -> FlopCount:
    """The cost alone of `count_flops`, same arguments."""
    return count_flops(config, text_tokens).cost


@torch.inference_mode(mode=False)  # where layers are not taken apart into the products that are counted
def count_flops(config, text_tokens: int | None = None) -> Counted:
    """c0*B + c1*B*S + c2*B*S**2 teraflop of a micro-batch: all matrix products and attentions, forward and backward.

    The forward's, times 3. diffusers' own class runs it on a few tokens on the CPU, with weights that take no memory
    and products that are counted, but not computed, so a large model takes seconds. How long a GPU takes for a FLOP
    differs: the numbers are right in proportion only, and without anything that a step costs beside them.

    Args:
        config: a diffusers transformer, its `config`, or a folder with its config.json (or with a pipeline whose
            transformer/ has it).
        text_tokens: length of the prompt, if it is not the longest of the model's pipelines (Wan, Flux, Qwen-Image:
            512, SD3: 333, HunyuanVideo: 256; `buckets.transformers` has all).

    Raises:
        UserError: no config there, one of no known class, or one that its class does not take.
    """
    keys = _read(config)
    family, model_class = _family(config, keys)
    try:
        own = {key: value for key, value in keys.items() if not key.startswith("_")}
        model = _without_weights(model_class, {**own, **family.changed(own)})
        keys = model.config
        text = _text_tokens(family, keys, text_tokens)
        geometry = TokenGeometry(family.patch_size(keys), text + sum(family.further) if family.text_joins else 0)
        work = _work(family, model, (text, *family.further))
    except UserError:
        raise
    except _NOT_ITS_CONFIG as error:
        reason = str(error).partition("\n")[0][:200].rstrip(".")
        raise UserError(
            f"diffusers' {family.model_class} does not run with this config: {reason}. Correct it. {_ELSE_MEASURE}"
        ) from error
    fixed, linear, quadratic = (float(coefficient) for coefficient in work)
    joined = geometry.text_tokens
    in_all_tokens = (fixed - linear * joined + quadratic * joined**2, linear - 2 * quadratic * joined, quadratic)
    # A model that drops its text early has a small negative c0; a cost model has none.
    c0, c1, c2 = (max(0.0, _TERAFLOP_OF_A_STEP * c) for c in in_all_tokens)
    return Counted(family.model_class, geometry, FlopCount(0.0, c0, c1, c2))


def _read(config) -> Mapping:
    """The config's keys."""
    if isinstance(config, str | Path):
        folder = Path(config)
        files = [folder / "config.json", folder / "transformer" / "config.json"]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            raise UserError(
                f"Expected a transformer's config in {files[0]} or {files[1]}, but neither is there. Give a model."
            )
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is no JSON ({error}). Download or save the model's config again.") from None
    elif not isinstance(config, Mapping) and isinstance(getattr(config, "config", None), Mapping):
        return config.config
    if not isinstance(config, Mapping):
        raise UserError(
            "Expected a diffusers transformer, its config or a folder with its config.json, but found "
            f"{type(config).__name__}. Unwrap a prepared model first: accelerator.unwrap_model(model)."
        )
    return config


def _family(config, keys: Mapping) -> tuple[Family, type]:
    """By the model's class or the name in the config; a config without one must have exactly the keys of a class."""
    classes = {family: getattr(diffusers, family.model_class, None) for family in FAMILIES}
    name = keys.get("_class_name")
    own = {key for key in keys if not key.startswith("_")}
    for family, known in classes.items():
        if known is None:  # an older diffusers
            continue
        by_keys = name is None and own == inspect.signature(known.__init__).parameters.keys() - {"self"}
        if isinstance(config, known) or name == family.model_class or by_keys:
            return family, known
    found = f"no _class_name, and of none of these exactly the keys: {', '.join(sorted(own)) or 'there are none'}"
    counted = ", ".join(known.__name__ for known in classes.values() if known)
    raise UserError(f"FLOPs are counted for {counted}. Found {name or found}. {_ELSE_MEASURE}")


def _text_tokens(family: Family, keys: Mapping, given: int | None) -> int:
    usual = family.text_tokens
    text = given if given is not None else keys[usual] if isinstance(usual, str) else usual
    if isinstance(text, bool) or not isinstance(text, int) or text < 0:
        raise UserError(f"text_tokens must be a whole number of at least 0, but it is {text!r}.")
    return text


def _without_weights(model_class, keys: Mapping):
    """The model with all weights zero and in no memory, whatever its size."""
    with torch.device("cpu"), torch.random.fork_rng(devices=()):
        with init_empty_weights():
            model = model_class.from_config(keys)
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                zero = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
                setattr(module, name, torch.nn.Parameter(zero, requires_grad=False))
    return model.eval()


def _work(family: Family, model, tokens: tuple[int, ...]) -> np.ndarray:
    """[3]: FLOPs of a forward of one sample as a polynomial of its visual tokens.

    They are a polynomial of degree 2 of the numbers of tokens of each kind, and so known from a few small numbers.

    Args:
        tokens: of the prompt, and of what the family has beside it.
    """
    powers = [p for p in itertools.product(range(3), repeat=1 + len(tokens)) if sum(p) <= 2]
    flops = [_forward_flops(family, model, [_UNIT * (1 + n) for n in point]) for point in powers]
    terms = [[math.prod((1 + n) ** k for n, k in zip(point, power)) for power in powers] for point in powers]
    # Whole numbers, so that all ranks deal by the same cost.
    coefficients = np.rint(np.linalg.solve(np.array(terms, float), np.array(flops, float)))
    work = np.zeros(3)
    for power, coefficient in zip(powers, coefficients):
        others = math.prod((n / _UNIT) ** k for n, k in zip(tokens, power[1:]))
        work[power[0]] += coefficient * others / _UNIT ** power[0]
    return work


_ATEN = torch.ops.aten
_FORMULAS = {
    **flop_registry,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
}


class _CountedOnly(TorchDispatchMode):
    """Matrix products, convolutions and attentions are zero, and their FLOPs added up; all else is computed."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is None:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs or {}))
        out = func(*args, **kwargs)
        self.flops += formula(*args, **kwargs, out_val=out)
        return tree_map_only(torch.Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), out)


def _forward_flops(family: Family, model, tokens: list[int]) -> int:
    visual, *others = tokens
    with torch.device("cpu"), torch.no_grad(), attention_backend("native"), _CountedOnly() as counted:
        model(**family.inputs(model.forward, model.config, (1, 8, visual // 8), *others))
    return counted.flops
