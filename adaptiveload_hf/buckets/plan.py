"""How many samples of each shape go into one micro-batch?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import TypedDict

import numpy as np

from ..errors import UserError, first_of
from .cost import CostModel, MemoryModel, check_cost
from .deal import WORTH_A_WINDOW, check_balance, check_ranks
from .findings import plan_findings
from .shapes import LatentShape, TokenGeometry
from .workload import Workload

POLICIES = ("dual", "equal_token", "equal_time", "fixed")
_TARGETS_TRIED = 64
# Why no memory limit in GiB holds, so that tokens known to fit are the limit.
_NOT_MEASURED = "Memory was not measured"
_NO_SIZE = "Memory was measured, but the GPU's size is not known (give a memory limit)"


def dual_constraint_batch_size(tokens: int, *, m_mem: float, m_comp: float, p: float) -> int:
    """max(1, min(floor(M_mem / S), floor(M_comp / S**p))).

    Args:
        tokens: S of one sample.
        m_mem: memory limit in tokens of a micro-batch.
        m_comp: compute limit in B * S**p.
        p: the fitted exponent of the power law.

    Source: AdaptiveLoad (arXiv 2605.17923), the dual-constraint rule, to the letter. `make_plan` has the same two
    limits with any cost model.
    """
    return max(1, min(math.floor(m_mem / tokens), math.floor(m_comp / tokens**p)))


@dataclass(frozen=True)
class Bucket:
    """One shape of a plan: seconds (in the cost model's unit) and gib are predicted for its batch_size; gib is None
    without a memory model.

    batch_size: the most samples of a micro-batch, so never more than count.
    bound_by: what set the batch size: memory | compute | one (even one sample is over the compute limit) | given |
        samples (the bucket has no more).
    """

    shape: LatentShape
    tokens: int
    count: int
    batch_size: int
    seconds: float
    gib: float | None
    bound_by: str


@dataclass(frozen=True)
class BucketPlan:
    """Batch size per bucket for one histogram, W, K and balance. Buckets are sorted by shape.

    m_mem_tokens: the memory limit in tokens of a micro-batch, of shapes whose samples take most beside their tokens;
        None if nothing limits it.
    target_seconds: the compute limit, in the cost model's unit; None where the policy has none.
    findings: sentences about what the limits do, and about what a sample weighs in the loss.
    balance: the balance for which an automatic compute limit was chosen.
    """

    policy: str
    target_seconds: float | None
    m_mem_tokens: int | None
    buckets: tuple[Bucket, ...]
    findings: tuple[str, ...] = ()
    balance: str = "auto"

    def __str__(self) -> str:
        """The limits, a line for each bucket, and the findings; costs are in the cost model's unit."""
        limits = [f"{self.m_mem_tokens:,} tokens"] if self.m_mem_tokens is not None else []
        limits += [f"cost {self.target_seconds:.4g}"] if self.target_seconds is not None else []
        words = f"{self.policy}, balance {self.balance}: " + ("at most " + ", ".join(limits) if limits else "no limit")
        rows = [("shape", "tokens", "samples", "batch size", "cost", "GiB", "bound by")]
        for bucket in self.buckets:
            gib = "-" if bucket.gib is None else f"{bucket.gib:.1f}"
            sizes = bucket.shape, f"{bucket.tokens:,}", f"{bucket.count:,}", bucket.batch_size
            rows.append((*map(str, sizes), f"{bucket.seconds:.4g}", gib, bucket.bound_by))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
        return "\n".join([words, *lines, *self.findings])

    @property
    def shapes(self) -> tuple[LatentShape, ...]:
        return tuple(bucket.shape for bucket in self.buckets)

    def batch_size_of(self, shape: LatentShape | str) -> int:
        """The batch size of a shape.

        Raises:
            UserError: the plan has no such shape.
        """
        for bucket in self.buckets:
            if str(bucket.shape) == str(shape):
                return bucket.batch_size
        raise UserError(f"The plan has no shape {shape}; it has {first_of(self.shapes)}.")

    def to_dict(self) -> dict:
        """Plain values, for JSON."""
        buckets = [{**asdict(bucket), "shape": str(bucket.shape)} for bucket in self.buckets]
        return {**asdict(self), "buckets": buckets, "findings": [*map(str, self.findings)]}

    @classmethod
    def from_dict(cls, saved: dict) -> BucketPlan:
        """Read what `to_dict` gave, to show it; keys of later versions are left out."""
        buckets = tuple(
            Bucket(**{**_known(bucket, Bucket), "shape": LatentShape.parse(bucket["shape"])})
            for bucket in saved["buckets"]
        )
        return cls(**{**_known(saved, cls), "buckets": buckets, "findings": tuple(saved["findings"])})


def _known(saved: dict, kind: type) -> dict:
    return {field.name: saved[field.name] for field in fields(kind) if field.name in saved}


class PlanOptions(TypedDict, total=False):
    """Those arguments of `BucketConfig.plan` that a loader passes on; they mean what they mean to `make_plan`."""

    memory_limit_gib: float | None
    target_seconds: float | str
    policy: str | None
    samples_per_step: float | None
    batch_sizes: Mapping | None
    allow_extrapolation: bool


def make_plan(
    shape_counts: Mapping[LatentShape, int],
    cost: CostModel,
    memory: MemoryModel | None = None,
    *,
    geometry: TokenGeometry | None = None,
    memory_limit_gib: float | None = None,
    world_size: int,
    gradient_accumulation_steps: int = 1,
    balance: str = "auto",
    target_seconds: float | str = "auto",
    policy: str = "dual",
    samples_per_step: float | None = None,
    batch_sizes: Mapping | None = None,
    token_budget: int | None = None,
    m_mem_tokens: int | None = None,
    measured_tokens: tuple[int, int] | None = None,
    allow_extrapolation: bool = False,
) -> BucketPlan:
    """Chooses B of every shape.

    dual: max(1, min(floor(M_mem/S), largest B with cost(B, S) <= target)). equal_token: floor(token_budget/S).
    equal_time: the B whose cost is nearest to the target. fixed: what `batch_sizes` says. None is larger than its
    bucket: how the epoch is cut does not change by it, and what the plan says of seconds and GiB can happen.

    Args:
        shape_counts: samples of each shape.
        cost, memory: laws, as from `fit_cost_model(...).model` and `fit_memory_model`.
        geometry: shape to tokens; None is `TokenGeometry()`, Wan's.
        memory_limit_gib: what a rank may use; with `memory` it gives M_mem in tokens.
        world_size, gradient_accumulation_steps: W data ranks, K.
        balance: how the schedule will balance ranks, as in `schedule_epoch`.
        target_seconds: compute limit of a micro-batch, in the cost's unit. "auto": dual takes the one with the best
            predicted samples/s on this histogram, W and K under `balance`, or within 1% of it the one that lets "auto"
            take a more even mode (without M_mem, and for equal_time, the cost of one longest sample).
        samples_per_step: samples that an optimizer step should hold: dual takes the compute limit whose predicted mean
            is nearest. If memory or W*K do not allow it, a finding says what is reached, and which K would.
        batch_sizes: {shape: B}, instead of what the policy says.
        token_budget: for equal_token; M_mem if not given, else the tokens of one longest sample.
        m_mem_tokens: M_mem where no memory model and limit give it, such as the largest B*S that was measured.
        measured_tokens: smallest and largest S of the measurements; beyond them only with allow_extrapolation.

    Returns:
        BucketPlan: `print` it.

    Raises:
        UserError: a shape that does not fit at B = 1 or was never measured, too few samples, or an option that is
            wrong or that nothing follows.
    """
    check_ranks(world_size, gradient_accumulation_steps)
    check_balance(balance)
    limits = {"m_mem_tokens": m_mem_tokens, "token_budget": token_budget}
    _check_arguments(shape_counts, policy, memory_limit_gib, batch_sizes, limits)
    _check_followed(policy, target_seconds, memory_limit_gib, limits)
    shapes = tuple(sorted(shape_counts))
    geometry = geometry or TokenGeometry()
    tokens = np.array([geometry.tokens(shape) for shape in shapes], dtype=np.int64)
    counts = np.array([shape_counts[shape] for shape in shapes], dtype=np.int64)
    check_cost(cost, tokens)
    limited = memory_limit_gib is not None
    if limited and memory is None:
        raise UserError(
            f"memory_limit_gib = {memory_limit_gib:g} says nothing without measured memory. Measure on the GPU "
            "(recipes/benchmark_shapes.py), or leave it out and give batch_sizes that are known to fit."
        )
    m_mem_tokens = memory.max_tokens(memory_limit_gib, tokens) if limited else m_mem_tokens
    given = _given(shapes, policy, batch_sizes or {})
    work = Workload(
        shapes, counts, tokens, given, cost, world_size, gradient_accumulation_steps, m_mem_tokens, balance
    )
    check_samples(counts.sum(), world_size, gradient_accumulation_steps)
    if measured_tokens is not None and not allow_extrapolation:
        _check_measured(work, measured_tokens)
    if limited:
        _check_memory(work, memory, memory_limit_gib, np.ones_like(tokens))

    target = _target(work, policy, target_seconds, samples_per_step)
    sizes, bounds = _batch_sizes(work, policy, target, token_budget)
    unlimited = None if limited else _NOT_MEASURED if memory is None else _NO_SIZE
    findings = plan_findings(work, policy, target, samples_per_step, sizes, unlimited)
    if limited and policy == "equal_time":
        _check_memory(work, memory, memory_limit_gib, sizes)
    gib = [None] * len(shapes) if memory is None else [float(memory.gib(b, s)) for b, s in zip(sizes, tokens)]
    seconds = cost.seconds(sizes, tokens).tolist()
    buckets = tuple(map(Bucket, shapes, tokens.tolist(), counts.tolist(), sizes.tolist(), seconds, gib, bounds))
    return BucketPlan(policy, target, work.least_m_mem_tokens, buckets, findings, balance)


def _check_arguments(shape_counts, policy, memory_limit_gib, batch_sizes, limits) -> None:
    if policy not in POLICIES:
        raise UserError(f"policy is one of {', '.join(POLICIES)}, but found {policy!r}.")
    wrong = [
        f"{shape!r}: {count!r}"
        for shape, count in dict(shape_counts).items()
        if not (isinstance(shape, LatentShape) and isinstance(count, Integral) and count >= 0)
    ]
    if wrong or not shape_counts:
        raise UserError(
            "shape_counts maps at least one LatentShape, such as LatentShape.parse('21x60x104'), to a whole number of "
            f"samples, but found {', '.join(wrong[:3]) or 'none'}."
        )
    if memory_limit_gib is not None and not (isinstance(memory_limit_gib, Real) and memory_limit_gib > 0):
        raise UserError(f"memory_limit_gib is a number of GiB above 0, or None, but found {memory_limit_gib!r}.")
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    wrong = [f"{name} = {n!r}" for name, n in limits.items() if not (isinstance(n, Integral) and n > 0)]
    if wrong:
        raise UserError(f"A number of tokens is whole and at least 1, or None, but found {', '.join(wrong)}.")
    if not isinstance(batch_sizes, Mapping | None):
        raise UserError(f"batch_sizes is {{shape: B}} such as {{'21x60x104': 1}}, but found {batch_sizes!r}.")


def _check_followed(policy, target_seconds, memory_limit_gib, limits) -> None:
    found = {
        "target_seconds": policy in ("dual", "equal_time") or target_seconds == "auto",
        "token_budget": policy == "equal_token" or limits["token_budget"] is None,
        "m_mem_tokens": memory_limit_gib is None or limits["m_mem_tokens"] is None,
    }
    if idle := [name for name, followed in found.items() if not followed]:
        raise UserError(
            f"Nothing would follow {', '.join(idle)}: policies 'dual' and 'equal_time' have target_seconds, "
            f"'equal_token' has token_budget, and m_mem_tokens holds where there is no memory_limit_gib. Found policy "
            f"{policy!r}. Leave out what it does not have."
        )


def check_samples(samples: int, world_size: int, gradient_accumulation_steps: int) -> None:
    """Raises if there are too few for one optimizer step."""
    if samples < world_size * gradient_accumulation_steps:
        raise UserError(
            f"An optimizer step needs at least one sample for each of {world_size} ranks x "
            f"{gradient_accumulation_steps} micro-steps, but the dataset has {samples} samples. "
            "Use fewer ranks, fewer gradient_accumulation_steps, or more samples."
        )


def _check_measured(work: Workload, measured_tokens: tuple[int, int]) -> None:
    low, high = measured_tokens
    outside = [f"{shape} (S = {s})" for shape, s in zip(work.shapes, work.tokens) if not low <= s <= high]
    if outside:
        raise UserError(
            f"The config was measured from S = {low} to {high}, but the dataset has {first_of(outside)}. Measure "
            "these shapes too (benchmark_shapes.py), or pass allow_extrapolation to trust the fit beyond them."
        )


def _check_memory(work: Workload, memory: MemoryModel, limit_gib: float, sizes: np.ndarray) -> None:
    """Raises for the buckets that would not fit."""
    needed = memory.gib(sizes, work.tokens)
    over = [
        f"{shape} at batch size {size} needs {gib:.1f} GiB"
        for shape, size, gib in zip(work.shapes, sizes, needed)
        if gib > limit_gib
    ]
    if over:
        remedy = "Lower target_seconds, or take policy 'dual', which has both limits."
        if sizes.max() == 1:
            remedy = (
                "Drop these shapes, use activation checkpointing, shard over more GPUs or split the sequence (context "
                "parallel), then measure again."
            )
        raise UserError(f"Infeasible under {limit_gib:.1f} GiB: {first_of(over, '; ')}. {remedy}")


def _target(work: Workload, policy: str, target_seconds: float | str, samples_per_step: float | None) -> float | None:
    """The compute limit in the cost's unit; None for policies without one."""
    if samples_per_step is not None:
        number = isinstance(samples_per_step, Real) and 0 < samples_per_step < math.inf
        if policy != "dual" or target_seconds != "auto" or not number:
            raise UserError(
                "samples_per_step is a number above 0 by which policy 'dual' chooses its target_seconds ('auto'), but "
                f"found {samples_per_step!r} with policy {policy!r} and target_seconds {target_seconds!r}."
            )
        return work.target_for_samples(samples_per_step)
    if policy not in ("dual", "equal_time"):
        return None
    if target_seconds != "auto":
        if not isinstance(target_seconds, Real) or not 0 < target_seconds < math.inf:
            raise UserError(f"target_seconds is 'auto' or a number above 0, but found {target_seconds!r}.")
        if work.cost.unit != "seconds":
            raise UserError(
                f"target_seconds is {target_seconds:g}, but this cost was counted, not measured: it knows no seconds. "
                "Leave it at 'auto', or measure (recipes/benchmark_shapes.py)."
            )
        return float(target_seconds)
    least = work.one_seconds
    if policy == "equal_time" or work.m_mem_tokens is None:
        return least
    most = max(least, float(np.max(work.cost.seconds(work.memory_batches(), work.tokens))))
    found = {}
    for target in np.geomspace(least, most, _TARGETS_TRIED).tolist():
        # Rounding must not cut the one longest sample, or the last one in memory, off its own limit.
        target = min(max(target, least), most)
        sizes = work.batches(target)
        if tuple(sizes) not in found:
            seconds, unevenness = work.predict_epoch(sizes)
            found[tuple(sizes)] = (unevenness, seconds, target)
    longest = WORTH_A_WINDOW * min(seconds for _, seconds, _ in found.values())
    return min(row for row in found.values() if row[1] <= longest)[2]


def _batch_sizes(
    work: Workload, policy: str, target: float | None, token_budget: int | None
) -> tuple[np.ndarray, list[str]]:
    """B of each bucket as the policy says, at most all of its samples, and what bound it."""
    if policy in ("fixed", "equal_token"):
        budget = token_budget or work.least_m_mem_tokens or int(work.tokens.max())
        sizes, bounds = np.maximum(1, budget // work.tokens), ["memory"] * len(work.tokens)
    elif policy == "equal_time":
        compute = work.batches_within(target)
        low, high = np.maximum(1, compute), compute + 1
        above = work.cost.seconds(high, work.tokens) - target
        sizes = np.where(above < np.abs(target - work.cost.seconds(low, work.tokens)), high, low)
        bounds = ["compute" if b else "one" for b in compute]
    else:
        compute = work.batches_within(target)
        memory = compute + 1 if work.m_mem_tokens is None else work.m_mem_tokens // work.tokens
        sizes = np.maximum(1, np.minimum(memory, compute))
        bounds = ["one" if c < 1 else "memory" if m <= c else "compute" for m, c in zip(memory, compute)]
    sizes = np.where(work.given > 0, work.given, sizes)
    bounds = ["given" if given else bound for given, bound in zip(work.given, bounds)]
    bounds = ["samples" if more else bound for more, bound in zip(sizes > work.whole_buckets, bounds)]
    return np.minimum(sizes, work.whole_buckets), bounds


def _given(shapes: tuple[LatentShape, ...], policy: str, given: Mapping) -> np.ndarray:
    """The batch sizes of the caller, int64 [buckets], 0 where there is none."""
    given = {str(shape): size for shape, size in given.items()}
    names = [str(shape) for shape in shapes]
    unknown = sorted(set(given) - set(names))
    missing = [name for name in names if name not in given] if policy == "fixed" else []
    wrong = {name: size for name, size in given.items() if not (isinstance(size, Integral) and 0 < size < 1 << 31)}
    if unknown or missing or wrong:
        found = [f"there is none for {first_of(missing)}"] if missing else []
        found += [f"no sample has the shape {first_of(unknown)}"] if unknown else []
        found += [f"{name} has {size!r}" for name, size in wrong.items()]
        raise UserError(
            f"batch_sizes (of the bucket config or given by hand) hold a whole number from 1 on for shapes of the "
            f"dataset, which are {first_of(names)}, but {'; '.join(found)}."
        )
    return np.array([given.get(name, 0) for name in names], dtype=np.int64)
