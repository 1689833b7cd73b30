"""How many samples of each shape go into one micro-batch?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from ..errors import UserError
from .cost import CostModel, MemoryModel
from .deal import best_balance, cut_evenly
from .shapes import LatentShape, TokenGeometry

POLICIES = ("dual", "equal_token", "equal_time", "fixed")
_TARGETS_TRIED = 24
# Micro-batches; shorter epochs are judged by the mean over several orders.
_SHORT_EPOCH = 1 << 11
# What a policy must lose in predicted samples/s before the plan calls it harmful; less is the noise of the excerpt.
_HARM = 0.01


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
    """One shape of a plan: seconds and gib are predicted for its batch_size; gib is None without a memory model.

    bound_by: what set the batch size: memory | compute | one (even one sample is over the compute limit) | given.
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
    """Batch size per bucket for one histogram, W and K. Buckets are sorted by shape.

    m_mem_tokens: the memory limit in tokens of a micro-batch; None if nothing limits it.
    target_seconds: the compute limit; None where the policy has none.
    findings: sentences about what the limits do, and about what a sample weighs in the loss.
    """

    policy: str
    target_seconds: float | None
    m_mem_tokens: int | None
    buckets: tuple[Bucket, ...]
    findings: tuple[str, ...] = ()

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
        raise UserError(f"The plan has no shape {shape}; it has {', '.join(map(str, self.shapes))}.")

    def to_dict(self) -> dict:
        """Plain values, for JSON."""
        buckets = [{**asdict(bucket), "shape": str(bucket.shape)} for bucket in self.buckets]
        return {**asdict(self), "buckets": buckets, "findings": list(self.findings)}

    @classmethod
    def from_dict(cls, saved: dict) -> BucketPlan:
        buckets = tuple(
            Bucket(**{**bucket, "shape": LatentShape.parse(bucket["shape"])}) for bucket in saved["buckets"]
        )
        return cls(**{**saved, "buckets": buckets, "findings": tuple(saved["findings"])})


@dataclass(frozen=True)
class _Job:
    """The data and the run that a plan is for, as arrays over the buckets."""

    shapes: tuple[LatentShape, ...]
    counts: np.ndarray
    tokens: np.ndarray
    cost: CostModel
    world_size: int
    gradient_accumulation_steps: int
    m_mem_tokens: int | None

    @property
    def one_seconds(self) -> float:
        """Seconds of the most expensive single sample: no micro-step with it can be shorter."""
        return float(np.max(self.cost.seconds(1, self.tokens)))

    def memory_batches(self) -> np.ndarray:
        return self.m_mem_tokens // self.tokens

    def batches_within(self, seconds: float) -> np.ndarray:
        """Largest B of each bucket under the compute limit alone; 0 where one sample is over it."""
        growing = self.cost.seconds_per_sample(self.tokens) > 0
        # Where steps all take the floor, as those of tiny models, the limit allows the whole bucket.
        return np.array(
            [
                self.cost.largest_batch(int(tokens), seconds) if grows else int(count)
                for tokens, grows, count in zip(self.tokens, growing, self.counts)
            ]
        )

    def epoch_seconds(self, batch_sizes: np.ndarray) -> float:
        """Predicted seconds of an epoch dealt with balance="auto"."""
        group = self.world_size * self.gradient_accumulation_steps
        numbers, _ = cut_evenly(self.counts, batch_sizes, self.tokens, self.cost, group)
        small, larger = np.divmod(self.counts, np.maximum(numbers, 1))
        seconds = self.cost.seconds(np.append(small + 1, small), np.append(self.tokens, self.tokens))
        numbers = np.append(larger, numbers - larger)
        # Each kind of micro-batch in its proportion: large epochs need not be laid out to be judged.
        total = int(numbers.sum())
        length = min(total, max(1 << 15, 32 * group)) // group * group
        picked = np.diff(np.cumsum(numbers) * length // total, prepend=0)
        excerpt, random = np.repeat(seconds, picked), np.random.default_rng(0)
        # Of a short epoch one order says little: targets would be told apart by luck.
        orders = [random.permutation(excerpt) for _ in range(max(1, _SHORT_EPOCH // length))]
        found = [best_balance(order, self.world_size, self.gradient_accumulation_steps)[1] for order in orders]
        return float((seconds * numbers).sum() / self.world_size / np.mean(found))


def make_plan(
    shape_counts: Mapping[LatentShape, int],
    cost: CostModel,
    memory: MemoryModel | None = None,
    *,
    geometry: TokenGeometry | None = None,
    memory_limit_gib: float | None = None,
    world_size: int,
    gradient_accumulation_steps: int = 1,
    target_seconds: float | str = "auto",
    policy: str = "dual",
    batch_sizes: Mapping | None = None,
    token_budget: int | None = None,
    m_mem_tokens: int | None = None,
    measured_tokens: tuple[int, int] | None = None,
    allow_extrapolation: bool = False,
) -> BucketPlan:
    """Chooses B of every shape.

    dual: max(1, min(floor(M_mem/S), largest B with cost(B, S) <= target)). equal_token: floor(token_budget/S).
    equal_time: the B whose cost is nearest to the target. fixed: what `batch_sizes` says.

    Args:
        shape_counts: samples of each shape.
        memory_limit_gib: what a rank may use; with `memory` it gives M_mem in tokens.
        target_seconds: compute limit of a micro-batch. "auto": dual takes the one with the best predicted samples/s on
            this histogram, W and K (without M_mem, and for equal_time, the cost of one longest sample).
        batch_sizes: {shape: B}, instead of what the policy says.
        token_budget: for equal_token; M_mem if not given, else the tokens of one longest sample.
        m_mem_tokens: M_mem where no memory model and limit give it, such as the largest B*S that was measured.
        measured_tokens: smallest and largest S of the measurements; beyond them only with allow_extrapolation.

    Raises:
        UserError: a shape that does not fit at B = 1 or was never measured, too few samples, or a wrong option.
    """
    shapes = tuple(sorted(shape_counts))
    if policy not in POLICIES:
        raise UserError(f"policy is one of {', '.join(POLICIES)}, but found {policy!r}.")
    geometry = geometry or TokenGeometry()
    tokens = np.array([geometry.tokens(shape) for shape in shapes], dtype=np.int64)
    counts = np.array([shape_counts[shape] for shape in shapes], dtype=np.int64)
    limited = memory is not None and memory_limit_gib is not None
    m_mem_tokens = memory.max_tokens(memory_limit_gib) if limited else m_mem_tokens
    job = _Job(shapes, counts, tokens, cost, world_size, gradient_accumulation_steps, m_mem_tokens)
    _check_counts(job)
    if measured_tokens is not None and not allow_extrapolation:
        _check_measured(job, measured_tokens)
    if limited:
        _check_memory(job, memory, memory_limit_gib, np.ones_like(tokens))

    target = _target(job, policy, target_seconds)
    sizes, bounds = _batch_sizes(job, policy, target, token_budget)
    sizes, bounds = _apply_given(job, policy, sizes, bounds, batch_sizes or {})
    findings = _findings(job, policy, target, sizes, bounds, limited)
    if limited and policy == "equal_time":
        _check_memory(job, memory, memory_limit_gib, sizes)
    gib = [None] * len(shapes) if memory is None else [float(memory.gib(b, s)) for b, s in zip(sizes, tokens)]
    seconds = cost.seconds(sizes, tokens).tolist()
    rows = zip(shapes, tokens.tolist(), counts.tolist(), sizes.tolist(), seconds, gib, bounds)
    return BucketPlan(policy, target, m_mem_tokens, tuple(Bucket(*row) for row in rows), findings)


def _check_counts(job: _Job) -> None:
    group = job.world_size * job.gradient_accumulation_steps
    if len(job.counts) == 0 or job.counts.min() < 0:
        raise UserError(
            f"shape_counts needs at least one shape and no negative count, but found {job.counts.tolist()}."
        )
    if job.counts.sum() < group:
        raise UserError(
            f"An optimizer step needs at least one sample for each of {job.world_size} ranks x "
            f"{job.gradient_accumulation_steps} micro-steps, but the dataset has {job.counts.sum()} samples. "
            "Use fewer ranks, fewer gradient_accumulation_steps, or more samples."
        )


def _check_measured(job: _Job, measured_tokens: tuple[int, int]) -> None:
    low, high = measured_tokens
    outside = [f"{shape} (S = {s})" for shape, s in zip(job.shapes, job.tokens) if not low <= s <= high]
    if outside:
        raise UserError(
            f"The config was measured from S = {low} to {high}, but the dataset has {', '.join(outside)}. Measure "
            "these shapes too (benchmark_shapes.py), or pass allow_extrapolation to trust the fit beyond them."
        )


def _check_memory(job: _Job, memory: MemoryModel, limit_gib: float, sizes: np.ndarray) -> None:
    """Raises for the buckets that would not fit."""
    needed = memory.gib(sizes, job.tokens)
    over = [
        f"{shape} at batch size {size} needs {gib:.1f} GiB"
        for shape, size, gib in zip(job.shapes, sizes, needed)
        if gib > limit_gib
    ]
    if over:
        raise UserError(
            f"Infeasible under {limit_gib:.1f} GiB: {'; '.join(over)}. Drop these shapes, use activation "
            "checkpointing, shard over more GPUs or split the sequence (context parallel), then measure again."
        )


def _target(job: _Job, policy: str, target_seconds: float | str) -> float | None:
    """The compute limit in seconds; None for policies without one."""
    if policy not in ("dual", "equal_time"):
        return None
    if target_seconds != "auto":
        if not isinstance(target_seconds, (int, float)) or not 0 < target_seconds < math.inf:
            raise UserError(f"target_seconds is 'auto' or a number above 0, but found {target_seconds!r}.")
        return float(target_seconds)
    least = job.one_seconds
    if policy == "equal_time" or job.m_mem_tokens is None:
        return least
    most = max(least, float(np.max(job.cost.seconds(job.memory_batches(), job.tokens))))
    found = {}
    for target in np.geomspace(least, most, _TARGETS_TRIED).tolist():
        # Rounding must not cut the one longest sample, or the last one in memory, off its own limit.
        target = min(max(target, least), most)
        sizes = np.maximum(1, np.minimum(job.memory_batches(), job.batches_within(target)))
        if tuple(sizes) not in found:
            found[tuple(sizes)] = (job.epoch_seconds(sizes), target)
    return min(found.values())[1]


def _batch_sizes(
    job: _Job, policy: str, target: float | None, token_budget: int | None
) -> tuple[np.ndarray, list[str]]:
    """B of each bucket as the policy says, and what bound it."""
    if policy == "fixed":
        return np.zeros_like(job.tokens), ["given"] * len(job.tokens)
    if policy == "equal_token":
        budget = token_budget or job.m_mem_tokens or int(job.tokens.max())
        return np.maximum(1, budget // job.tokens), ["memory"] * len(job.tokens)
    compute = job.batches_within(target)
    if policy == "equal_time":
        low, high = np.maximum(1, compute), compute + 1
        above = job.cost.seconds(high, job.tokens) - target
        nearest = np.where(above < np.abs(target - job.cost.seconds(low, job.tokens)), high, low)
        return nearest, ["compute" if b else "one" for b in compute]
    memory = job.memory_batches() if job.m_mem_tokens is not None else compute + 1
    bounds = ["one" if c < 1 else "memory" if m <= c else "compute" for m, c in zip(memory, compute)]
    return np.maximum(1, np.minimum(memory, compute)), bounds


def _apply_given(job: _Job, policy: str, sizes: np.ndarray, bounds: list[str], given: Mapping):
    given = {str(shape): size for shape, size in given.items()}
    names = [str(shape) for shape in job.shapes]
    unknown = sorted(set(given) - set(names))
    missing = [name for name in names if name not in given] if policy == "fixed" else []
    wrong = {name: size for name, size in given.items() if not isinstance(size, (int, np.integer)) or size < 1}
    if unknown or missing or wrong:
        raise UserError(
            f"batch_sizes maps shapes of the dataset ({', '.join(names)}) to whole numbers from 1 on; unknown: "
            f"{unknown}, missing: {missing}, no such number: {wrong}."
        )
    sizes = np.array([given.get(name, size) for name, size in zip(names, sizes.tolist())], dtype=np.int64)
    return sizes, ["given" if name in given else bound for name, bound in zip(names, bounds)]


def _findings(
    job: _Job, policy: str, target: float | None, sizes: np.ndarray, bounds: list[str], limited: bool
) -> tuple[str, ...]:
    """What the user should know before training with this plan."""
    findings = []
    if job.m_mem_tokens is not None and not limited:
        findings.append(f"Memory was not measured: micro-batches stay within {job.m_mem_tokens} tokens, known to fit.")
    if job.m_mem_tokens is None:
        findings.append("No memory model or limit: nothing keeps a micro-batch from running out of memory.")
    else:
        over = [str(s) for s, b, t in zip(job.shapes, sizes, job.tokens) if b > 1 and b * t > job.m_mem_tokens]
        if over:
            findings.append(f"Over the memory limit of {job.m_mem_tokens} tokens: {', '.join(over)}.")
    if policy == "dual" and job.m_mem_tokens is not None:
        memory_only = np.where(np.array(bounds) == "given", sizes, job.memory_batches())
        lost = 1 - job.epoch_seconds(memory_only) / job.epoch_seconds(sizes)
        if (memory_only == sizes).all():
            findings.append("Inert: the compute limit changes no batch size, memory alone sets them all.")
        elif lost > _HARM:
            findings.append(
                f"Harmful: the compute limit of {target:.3g} s costs {lost:.0%} of the samples/s. Raise "
                f"target_seconds (one longest sample takes {job.one_seconds:.3g} s), or leave it at 'auto'."
            )
    long, short = int(np.argmax(job.tokens)), int(np.argmin(job.tokens))
    findings.append(
        f"In the loss, one {job.shapes[long]} weighs as much as {job.tokens[long] / job.tokens[short]:.1f} of "
        f"{job.shapes[short]} with loss_normalization 'token', 1 with 'sample', "
        f"{sizes[short] / sizes[long]:.1f} with 'none' (batch sizes {sizes[long]} and {sizes[short]})."
    )
    return tuple(findings)
