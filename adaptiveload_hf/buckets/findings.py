"""What should be known of a plan before training with it?"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..errors import first_of
from .workload import Workload

# What a policy must lose in predicted samples/s before the plan calls it harmful; less is the noise of the excerpt.
_HARM = 0.01
# What samples_per_step may be missed by before the plan looks for a K that reaches it.
_NEAR = 0.05


class Risk(str):
    """A finding that nobody should train without having read, so that a loader says it."""


def plan_findings(
    work: Workload,
    policy: str,
    target: float | None,
    samples_per_step: float | None,
    sizes: np.ndarray,
    unlimited: str | None,
) -> tuple[str, ...]:
    """What the user should know before training with a plan of these batch sizes.

    Args:
        target: the compute limit, in the cost's unit; None where the policy has none.
        unlimited: why no memory limit in GiB holds; None where one does.
    """
    findings = [_memory_finding(work, sizes, unlimited)]
    if policy == "dual" and work.m_mem_tokens is not None:
        findings += _compute_finding(work, target, samples_per_step, sizes)
    if samples_per_step is not None:
        findings.append(_samples_finding(work, sizes, samples_per_step))
    long, short = int(np.argmax(work.tokens)), int(np.argmin(work.tokens))
    if len(work.shapes) > 1:
        findings.append(
            f"In the loss, one {work.shapes[long]} weighs as much as {work.tokens[long] / work.tokens[short]:.1f} of "
            f"{work.shapes[short]} with loss_normalization 'token', 1 with 'sample', "
            f"{sizes[short] / sizes[long]:.1f} with 'none' (batch sizes {sizes[long]} and {sizes[short]})."
        )
    return tuple(finding for finding in findings if finding)


def _memory_finding(work: Workload, sizes: np.ndarray, unlimited: str | None) -> str | None:
    if work.m_mem_tokens is None:
        return Risk("No memory model or limit: nothing keeps a micro-batch from running out of memory.")
    over = first_of(shape for shape, more in zip(work.shapes, sizes * work.tokens > work.m_mem_tokens) if more)
    if unlimited is None:
        return over and Risk(f"Over the memory limit: {over}.")
    if over:
        return Risk(f"{unlimited}: known to fit are {work.m_mem_tokens} tokens, and these may not: {over}.")
    return f"{unlimited}: micro-batches stay within {work.m_mem_tokens} tokens, known to fit."


def _compute_finding(work: Workload, target: float, samples_per_step: float | None, sizes: np.ndarray) -> list[str]:
    memory_only = np.minimum(np.where(work.given > 0, work.given, work.memory_batches()), work.whole_buckets)
    if (memory_only == sizes).all():
        words = "Inert: the compute limit changes no batch size, memory or the samples there are set them all."
        return [f"{words} Only balancing evens the load of the ranks."]
    lost = 1 - work.predict_epoch(memory_only)[0] / work.predict_epoch(sizes)[0]
    if lost <= _HARM:
        return []
    remedy = f"Raise target_seconds (one longest sample takes {work.one_seconds:.3g}), or leave it at 'auto'."
    if samples_per_step is not None:
        remedy = "That is the price of samples_per_step; fewer gradient_accumulation_steps leave larger batches."
    return [f"Harmful: the compute limit of {target:.3g} {work.cost.unit} costs {lost:.0%} of the samples/s. {remedy}"]


def _samples_finding(work: Workload, sizes: np.ndarray, wanted: float) -> str:
    reached = work.samples_per_step(sizes)
    words = f"An optimizer step holds {reached:.1f} samples on average; samples_per_step is {wanted:g}."
    if abs(reached / wanted - 1) <= _NEAR:
        return words
    scaled = work.gradient_accumulation_steps * wanted / reached
    accumulation = max(1, math.ceil(scaled) if reached < wanted else math.floor(scaled))
    if work.world_size * accumulation > work.counts.sum():
        return f"{words} The dataset has {work.counts.sum()} in all."
    if accumulation == work.gradient_accumulation_steps:
        return f"{words} Fewer ranks would lower it, no smaller gradient_accumulation_steps can."
    other = replace(work, gradient_accumulation_steps=accumulation)
    nearest = other.samples_per_step(other.batches(other.target_for_samples(wanted)))
    verb = "would hold" if abs(nearest - wanted) < abs(reached - wanted) else "would come no nearer:"
    return f"{words} With gradient_accumulation_steps={accumulation} it {verb} {nearest:.1f}."
