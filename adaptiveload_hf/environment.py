"""On what was a config measured, and what of it holds on other hardware and other ranks?"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import torch

from . import __version__
from .buckets.cost import MemoryModel
from .errors import UserError

MEMORY_RESERVE = 0.1  # of the GPU's memory: CUDA context, NCCL buffers and fragmentation, which no measurement sees
# The plan is made anew for the user's own ranks and accumulation, so those two may differ.
_MAY_DIFFER = ("world_size", "gradient_accumulation_steps")
_SETUP_FILE = "run_setup.json"
_GEOMETRY_KEYS = ("patch_size", "text_tokens", "vae_scale")  # what makes pixels latents, and latents tokens
_MODEL_KEYS = ("class", "config_hash", *_GEOMETRY_KEYS)


def current_environment() -> dict[str, Any]:
    """The part of `environment` that this process knows by itself: `gpu`, `gpu_memory_gib` and `versions`.

    The GPU is this rank's, which need not be like that of another one.
    """
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()) if torch.cuda.is_available() else None
    packages = (torch, diffusers, accelerate)
    return {
        "gpu": gpu and gpu.name,
        "gpu_memory_gib": gpu and round(gpu.total_memory / 2**30, 2),
        "versions": {"adaptiveload_hf": __version__, **{p.__name__: str(p.__version__) for p in packages}},
    }


def save_setup(folder: Path, model: dict[str, Any], environment: dict[str, Any]) -> None:
    """Keeps beside a run's metrics.jsonl what it is a log of: arguments of `BucketConfig.from_measurements`."""
    text = json.dumps({"model": model, "environment": environment}, indent=2)
    (folder / _SETUP_FILE).write_text(text + "\n", encoding="utf-8")


def read_setup(folder: Path) -> dict[str, dict[str, Any]] | None:
    """`model` and `environment` that `save_setup` kept there; None where there is none.

    Raises:
        UserError: it is damaged.
    """
    path = folder / _SETUP_FILE
    if not path.is_file():
        return None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return {name: dict(saved[name]) for name in ("model", "environment")}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{path} should say what the log beside it is of, but it is damaged ({error!r}). Remove it, and pass "
            "--patch-size and --text-tokens of the model."
        ) from None


def differences(measured: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """List where two environments differ.

    Args:
        measured, here: `environment` of a config and of this run; only keys that both have are compared.
            World size and accumulation are not: plans are made for those at hand.

    Returns: one sentence a difference.
    """
    measured, here = _flat(measured), _flat(here)
    return [
        f"{key}: measured with {measured[key]}, here {here[key]}"
        for key in sorted(measured.keys() & here.keys())
        if key not in _MAY_DIFFER and not _same(measured[key], here[key])
    ]


def model_differences(
    measured: dict[str, Any], here: dict[str, Any], keys: tuple[str, ...] = _MODEL_KEYS
) -> list[str]:
    """The same of two models; of keys that both have."""
    return [
        f"model {key}: measured with {measured[key]}, here {here[key]}"
        for key in keys
        if key in here and key in measured and here[key] != measured[key]
    ]


def refuse_other_geometry(measured: dict[str, Any], here: dict[str, Any]) -> None:
    """
    Raises:
        UserError: the two models make other tokens of a sample, or other latents.
    """
    if different := model_differences(measured, here, _GEOMETRY_KEYS):
        raise UserError(
            f"The bucket config is of a model of another geometry ({'; '.join(different)}), and by its tokens samples "
            "are weighed and batch sizes set. Measure this model, count it with its text tokens, or fit a run's log."
        )


def memory_limit(measured: dict[str, Any]) -> tuple[float | None, str | None]:
    """GiB of a rank that plans may use: all but MEMORY_RESERVE of the GPU here, or without one of the measured GPU.

    Args:
        measured: `environment` of a config.

    Returns: (limit_gib, a sentence that says so); (None, None) where neither memory is known.
    """
    here, there = current_environment(), measured.get("gpu_memory_gib")
    memory = here["gpu_memory_gib"] or there
    if memory is None:
        return None, None
    limit = (1 - MEMORY_RESERVE) * memory
    words = f"Memory limit {limit:.1f} GiB: {1 - MEMORY_RESERVE:.0%} of a GPU with {memory:.1f} GiB"
    if here["gpu_memory_gib"] and there and not _same(float(there), memory):
        words += f", the one here; the measured one had {there:.1f} GiB"
    return limit, words + "."


def freed_gradients_gib(measured: dict[str, Any]) -> float:
    """GiB of gradients that are gone when the next backward begins: all of them with one micro-step a step, else none.

    Args:
        measured: `environment` of a config. 0 where it does not tell.
    """
    return (measured.get("gradient_gib") or 0.0) if measured.get("gradient_accumulation_steps") == 1 else 0.0


def memory_elsewhere(
    memory: MemoryModel, measured: dict[str, Any], world_size: int, accumulation: int
) -> tuple[MemoryModel, list[str]]:
    """The memory law on another number of ranks than the measured one, and with other accumulation.

    With more than one micro-step a rank keeps its gradients while the next one's activations live. FSDP2 shards
    weights, gradients and optimizer state over all ranks (HSDP over dp_shard_size of them), so on fewer ranks each
    holds more: at most base_gib and floor_gib times measured / world_size. On more ranks they are kept: too much
    rather than too little.

    Args:
        memory: `MemoryModel`.
        measured: `environment` of a config.
        world_size: data ranks of the plan.
        accumulation: K of the plan.

    Returns: (`MemoryModel`, what is assumed as a list of sentences).
    """
    found = []
    if accumulation > 1 and measured.get("gradient_accumulation_steps") == 1:
        kept = measured.get("gradient_gib")
        memory = replace(memory, base_gib=memory.base_gib + (kept or 0.0))
        found.append(
            f"Measured with one micro-step in an optimizer step, planned for {accumulation}: "
            + (
                "what a rank then keeps of gradients between micro-steps is not in the memory law. Measure with "
                f"--gradient_accumulation_steps {accumulation}, or leave memory for it."
                if kept is None
                else f"a rank keeps {kept:.2f} GiB of gradients between micro-steps, which is added."
            )
        )
    ranks, strategy = measured.get("world_size"), measured.get("strategy")
    if ranks is None or world_size >= ranks or strategy not in ("fsdp2", "hsdp"):
        return memory, found
    shards = ranks if strategy == "fsdp2" else measured.get("dp_shard_size")
    if shards is None:
        found.append(
            f"Measured under HSDP on {ranks} ranks, over how many of them the model was sharded is not known: on "
            f"{world_size} a rank may hold more of it than planned. Measure here, or leave memory for it."
        )
    if shards is None or world_size >= shards:
        return memory, found
    more = shards / world_size
    larger = replace(memory, base_gib=more * memory.base_gib, floor_gib=more * memory.floor_gib)
    return larger, [
        *found,
        f"{strategy.upper()} shards over {world_size} ranks instead of {shards}: what a rank holds before any sample "
        f"is taken as {larger.base_gib:.1f} GiB instead of {memory.base_gib:.1f}, which is the most it can be.",
    ]


def assumptions(measured: dict[str, Any], world_size: int) -> list[str]:
    """What a plan takes for granted where it is made for other ranks or another GPU than were measured, list[str]."""
    found, here = [], current_environment()["gpu"]
    ranks = measured.get("world_size")
    if ranks not in (None, world_size):
        found.append(
            f"Measured on {ranks} rank{'s' * (ranks > 1)}, planned for {world_size}: a micro-batch is assumed to take "
            "as long there as it did when measured."
        )
    if here and measured.get("gpu") and here != measured["gpu"]:
        found.append(f"Measured on {measured['gpu']}, but here is {here}: seconds will differ. Measure again here.")
    return found


def _flat(environment: dict[str, Any]) -> dict[str, Any]:
    """Nested keys as "versions.torch"."""
    flat = {}
    for key, value in environment.items():
        flat.update({f"{key}.{k}": v for k, v in _flat(value).items()} if isinstance(value, dict) else {key: value})
    return flat


def _same(measured: object, here: object) -> bool:
    if isinstance(measured, float) and isinstance(here, int | float):
        return abs(measured - here) <= 0.01 * abs(measured)
    return measured == here
