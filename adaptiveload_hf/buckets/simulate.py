"""How long would an epoch take, and how evenly are its ranks loaded?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import numpy as np

from .cost import CostModel
from .plan import BucketPlan
from .schedule import EpochSchedule, schedule_epoch

BALANCES = ("none", "step", "auto")
MOST_SAMPLES = 4_000_000  # that a comparison lays out; of a larger epoch the rest goes on like these


@dataclass(frozen=True)
class Simulation:
    """Predictions for one epoch, from the schedule's own costs. Of a counted cost, seconds are its relative units.

    epoch_seconds: sum over micro-steps of the slowest rank; ideal_seconds: of the mean rank.
    balance_efficiency: ideal_seconds / epoch_seconds.
    step_cv: mean over micro-steps of std/mean over ranks of cost. compute_cv: std/mean over all micro-batches.
    tokens_per_second, samples_per_second: over all ranks.
    samples_per_update_step, its cv: samples in an optimizer step, mean and std/mean.
    """

    epoch_seconds: float
    ideal_seconds: float
    balance_efficiency: float
    step_cv: float
    compute_cv: float
    tokens_per_second: float
    samples_per_second: float
    samples_per_update_step: float
    samples_per_update_step_cv: float


def simulate(schedule: EpochSchedule, cost: CostModel | None = None) -> Simulation:
    """Adds up a schedule's micro-steps, each as long as its slowest rank.

    Args:
        schedule: a whole epoch.
        cost: another cost model than the one that the schedule was dealt by (to see what a wrong one loses).
    """
    seconds = schedule.cost if cost is None else cost.seconds(schedule.sizes, schedule.tokens)
    by_step = seconds.reshape(-1, schedule.world_size)
    epoch, ideal = float(by_step.max(axis=1).sum()), float(by_step.mean(axis=1).sum())
    samples = np.where(schedule.loss_weight > 0, schedule.sizes, 0)
    per_update = samples.reshape(schedule.num_update_steps, -1).sum(axis=1)
    return Simulation(
        epoch_seconds=epoch,
        ideal_seconds=ideal,
        balance_efficiency=ideal / epoch,
        step_cv=float((by_step.std(axis=1) / by_step.mean(axis=1)).mean()),
        compute_cv=float(seconds.std() / seconds.mean()),
        tokens_per_second=float((samples * schedule.tokens).sum() / epoch),
        samples_per_second=float(samples.sum() / epoch),
        samples_per_update_step=float(per_update.mean()),
        samples_per_update_step_cv=float(per_update.std() / per_update.mean()),
    )


def shape_weights(schedule: EpochSchedule) -> np.ndarray:
    """The share of an epoch's gradient that comes from each bucket.

    sum over its micro-batches of loss_weight / sum over all: micro-batches enter the gradient of their optimizer step
    with loss_weight / (W*K), and every optimizer step counts alike.

    Returns:
        float64 [buckets up to the last one that has samples], sum 1.
    """
    return np.bincount(schedule.bucket, weights=schedule.loss_weight) / schedule.loss_weight.sum()


class ComparisonRow(NamedTuple):
    """One policy, planned for one balance mode (the mode chosen, where "auto" was asked), W ranks and K micro-steps.

    Gains are ratios of epoch times at the same W and K, and from_batch_sizes * from_dealing is the whole gain over the
    baseline's batch sizes dealt at random:
    from_batch_sizes: baseline dealt at random / this plan dealt at random.
    from_dealing: this plan dealt at random / this plan dealt with `balance`.
    """

    policy: str
    balance: str
    world_size: int
    gradient_accumulation_steps: int
    simulation: Simulation
    plan: BucketPlan
    from_batch_sizes: float
    from_dealing: float

    @property
    def gain(self) -> float:
        return self.from_batch_sizes * self.from_dealing


def compare(
    plan: Callable[..., BucketPlan],
    cost: CostModel,
    *,
    policies: Sequence[str] = ("equal_token", "dual"),
    balances: Sequence[str] = BALANCES,
    world_sizes: Sequence[int],
    accumulations: Sequence[int] = (1,),
    baseline: str = "equal_token",
) -> list[ComparisonRow]:
    """Simulates an epoch of the same samples under every policy x balance x W x K, batch sizes and dealing apart.

    An epoch of more than MOST_SAMPLES is laid out as a smaller one of the same mix, and its seconds are scaled up.

    Args:
        plan: (policy=, balance=, world_size=, gradient_accumulation_steps=) -> BucketPlan, such as
            `functools.partial(make_plan, shape_counts, cost, memory, memory_limit_gib=...)`.
        baseline: the policy that gains are measured against; it need not be among `policies`.

    Returns:
        The rows, W outermost, then K, policy, balance. A mode that "auto" chose and that was asked for is there once.
    """
    rows = {}
    for world_size, accumulation in product(world_sizes, accumulations):
        run = {"world_size": world_size, "gradient_accumulation_steps": accumulation}
        dealt = cache(partial(_dealt, cost=cost, **run))
        before = dealt(plan(policy=baseline, balance="none", **run), "none")[1].epoch_seconds
        for policy, balance in product(policies, balances):
            made = plan(policy=policy, balance=balance, **run)
            mode, found = dealt(made, balance)
            # Of plans that differ in nothing but what they were made for, one is dealt at random.
            random = dealt(replace(made, balance="none"), "none")[1].epoch_seconds
            rows[world_size, accumulation, policy, mode] = ComparisonRow(
                policy,
                mode,
                world_size,
                accumulation,
                found,
                made,
                before / random,
                random / found.epoch_seconds,
            )
    return list(rows.values())


def _dealt(plan: BucketPlan, balance: str, cost: CostModel, **run) -> tuple[str, Simulation]:
    """The mode that was used, and what it gives. A very large epoch is taken for a smaller one of the same mix."""
    counts = np.array([bucket.count for bucket in plan.buckets])
    fewer = np.ceil(counts * min(1.0, MOST_SAMPLES / counts.sum())).astype(np.int64)
    schedule = schedule_epoch(np.repeat(np.arange(len(counts)), fewer), plan, cost, balance=balance, **run)
    found, times = simulate(schedule), counts.sum() / fewer.sum()
    seconds = {"epoch_seconds": times * found.epoch_seconds, "ideal_seconds": times * found.ideal_seconds}
    return schedule.balance, replace(found, **seconds)
