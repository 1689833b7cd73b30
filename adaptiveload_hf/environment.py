"""On what was a config measured, and what of it holds on other hardware and other ranks?"""

from dataclasses import replace
from typing import Any

import accelerate
import diffusers
import torch

from . import __version__
from .buckets.cost import MemoryModel

MEMORY_RESERVE = 0.1  # of the GPU's memory: CUDA context, NCCL buffers and fragmentation, which no measurement sees
# The plan is made anew for the user's own ranks and accumulation, so those two may differ.
_MAY_DIFFER = ("world_size", "gradient_accumulation_steps")


def current_environment() -> dict[str, Any]:
    """The part of `environment` that this machine knows by itself: `gpu`, `gpu_memory_gib` and `versions`."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    packages = (torch, diffusers, accelerate)
    return {
        "gpu": gpu and gpu.name,
        "gpu_memory_gib": gpu and round(gpu.total_memory / 2**30, 2),
        "versions": {"adaptiveload_hf": __version__, **{p.__name__: str(p.__version__) for p in packages}},
    }


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


def memory_elsewhere(
    memory: MemoryModel, measured: dict[str, Any], world_size: int, accumulation: int
) -> tuple[MemoryModel, list[str]]:
    """The memory law on another number of ranks than the measured one, and with other accumulation.

    With more than one micro-step a rank keeps its gradients while the next one's activations live. FSDP2 shards
    weights, gradients and optimizer state over all ranks, so on fewer ranks each holds more: at most base_gib and
    floor_gib times measured / world_size. On more ranks they are kept: too much rather than too little.

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
    ranks = measured.get("world_size")
    if ranks is None or world_size >= ranks or measured.get("strategy") != "fsdp2":
        return memory, found
    more = ranks / world_size
    larger = replace(memory, base_gib=more * memory.base_gib, floor_gib=more * memory.floor_gib)
    return larger, [
        *found,
        f"FSDP2 shards over {world_size} ranks instead of {ranks}: what a rank holds before any sample is taken as "
        f"{larger.base_gib:.1f} GiB instead of {memory.base_gib:.1f}, which is the most it can be.",
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
