"""How long would an epoch take, and how evenly are its ranks loaded?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .cost import CostModel, MemoryModel
from .plan import BucketPlan, make_plan
from .schedule import EpochSchedule, schedule_epoch
from .shapes import LatentShape


@dataclass(frozen=True)
class Simulation:
    """Predictions for one epoch, from the schedule's own costs.

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
    """One policy under one balance mode (the mode chosen, where "auto" was asked)."""

    policy: str
    balance: str
    simulation: Simulation
    plan: BucketPlan


def compare(
    shape_counts: Mapping[LatentShape, int],
    cost: CostModel,
    memory: MemoryModel | None = None,
    *,
    world_size: int,
    gradient_accumulation_steps: int = 1,
    seed: int = 0,
    **plan_options,
) -> list[ComparisonRow]:
    """Simulates what the batch sizes bring (equal_token against dual) and what dealing brings (none, step, auto).

    Args:
        plan_options: further arguments of `make_plan`, except policy.

    Returns:
        equal_token with balance none (the baseline) and auto; dual with none, step and auto.
    """
    shapes = sorted(shape_counts)
    bucket_of_sample = np.repeat(np.arange(len(shapes)), [shape_counts[shape] for shape in shapes])
    run = {"world_size": world_size, "gradient_accumulation_steps": gradient_accumulation_steps}
    rows = []
    for policy, modes in (("equal_token", ("none", "auto")), ("dual", ("none", "step", "auto"))):
        plan = make_plan(shape_counts, cost, memory, policy=policy, **run, **plan_options)
        for balance in modes:
            schedule = schedule_epoch(bucket_of_sample, plan, cost, seed=seed, balance=balance, **run)
            rows.append(ComparisonRow(policy, schedule.balance, simulate(schedule), plan))
    return rows
