"""In which order does an epoch train, on which rank, and with which loss weight? Pure numpy, no loop over samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import UserError
from .cost import CostModel, check_cost, cost_model_from_dict
from .deal import best_balance, check_balance, check_ranks, cut_evenly, deal, is_wide
from .shapes import check_repeats

LOSS_NORMALIZATIONS = ("token", "sample", "none")


@dataclass(frozen=True, eq=False)
class EpochSchedule:
    """The micro-batches of an epoch. Micro-batch j = micro_step * world_size + rank.

    sample_order: int64 [n], sample indices, micro-batch after micro-batch.
    offsets: int64 [micro_steps*W + 1], where each micro-batch begins in sample_order.
    bucket: int32 [micro_steps*W]; tokens: int64, S of one of its samples; cost: float64, predicted seconds.
    loss_weight: float64, to multiply the micro-batch's mean loss by. 0 marks padding: if no micro-batch can be split
        to fill the last optimizer step, the cheapest sample is used again and does not count.
    balance: the mode in use; for "auto" the one that it chose.
    first_micro_step: micro-steps before it have been trained on already (a resumed epoch).
    """

    sample_order: np.ndarray
    offsets: np.ndarray
    bucket: np.ndarray
    tokens: np.ndarray
    cost: np.ndarray
    loss_weight: np.ndarray
    balance: str
    world_size: int
    gradient_accumulation_steps: int
    first_micro_step: int = 0

    @cached_property
    def sizes(self) -> np.ndarray:
        """B of each micro-batch, int64 [micro_steps*W]. Kept, since a monitor asks at every step."""
        return np.diff(self.offsets)

    @property
    def num_micro_steps(self) -> int:
        return len(self.bucket) // self.world_size

    @property
    def num_update_steps(self) -> int:
        """Optimizer steps of the epoch."""
        return self.num_micro_steps // self.gradient_accumulation_steps

    @property
    def findings(self) -> tuple[str, ...]:
        """What the user should know before training in this order."""
        if not is_wide(self.balance, self.num_update_steps):
            return ()
        return (
            f"Balance {self.balance} sorts much of the epoch by cost: it has {self.num_update_steps} optimizer steps. "
            "Such steps hold few shapes each, and a model learned more slowly from them (docs/balance.md). Use "
            "stratified:n, a smaller window, or step.",
        )

    @cached_property
    def digest(self) -> str:
        """A hash of which sample goes where: equal on two ranks only if they agree on the whole epoch."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.sample_order, self.offsets):
            digest.update(np.ascontiguousarray(array, dtype="<i8"))
        return digest.hexdigest()

    @cached_property
    def _times_to_come(self) -> np.ndarray:
        """Of each entry of sample_order, int64 [n]."""
        counted = np.flatnonzero(np.repeat(self.loss_weight > 0, self.sizes))[::-1]
        order = np.argsort(self.sample_order[counted], kind="stable")
        samples = self.sample_order[counted[order]]
        place = np.arange(len(samples))
        first = np.append(True, samples[1:] != samples[:-1])
        times = np.zeros(len(self.sample_order), dtype=np.int64)
        times[counted[order]] = place - np.maximum.accumulate(np.where(first, place, 0))
        return times

    def place(self, micro_step: int, rank: int) -> int:
        """j of one data rank's micro-batch.

        Raises:
            UserError: the schedule has no such micro-step or data rank.
        """
        if not (0 <= rank < self.world_size and 0 <= micro_step < self.num_micro_steps):
            raise UserError(
                f"The schedule has data ranks 0..{self.world_size - 1} and micro-steps 0..{self.num_micro_steps - 1}, "
                f"but found rank {rank!r} and micro-step {micro_step!r}. `data_rank_and_size(accelerator)` says which "
                "data rank a process is."
            )
        return micro_step * self.world_size + rank

    def micro_batch(self, micro_step: int, rank: int) -> np.ndarray:
        """Sample indices, int64 [B], of one data rank's micro-batch."""
        j = self.place(micro_step, rank)
        return self.sample_order[self.offsets[j] : self.offsets[j + 1]]

    def occurrences(self, micro_step: int, rank: int) -> np.ndarray:
        """How many times each sample of this micro-batch is still to come in the epoch, int64 [B]; 0 for padding.

        Counted from the end, (sample, occurrence) are the same pairs in any order of the epoch, also where what was
        left of it has been scheduled anew: what random numbers of a sample can be keyed by.
        """
        j = self.place(micro_step, rank)
        return self._times_to_come[self.offsets[j] : self.offsets[j + 1]]

    def rank_batches(self, rank: int, first_micro_step: int) -> Iterator[list[int]]:
        """One data rank's micro-batches from first_micro_step on."""
        for micro_step in range(first_micro_step, self.num_micro_steps):
            yield self.micro_batch(micro_step, rank).tolist()

    def unseen(self) -> np.ndarray:
        """The samples that the micro-steps from first_micro_step on train on, int64."""
        j = self.first_micro_step * self.world_size
        counts = np.repeat(self.loss_weight[j:] > 0, self.sizes[j:])
        return self.sample_order[self.offsets[j] :][counts]


@dataclass(frozen=True)
class _Setting:
    """What, beside the samples and the seed, decides an order. Two equal settings give the same order."""

    world_size: int
    gradient_accumulation_steps: int
    balance: str
    cost: CostModel
    batch_sizes: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, plan: dict, cost: CostModel, world_size: int, gradient_accumulation_steps: int, balance: str):
        batch_sizes = tuple(bucket["batch_size"] for bucket in plan["buckets"])
        tokens = tuple(bucket["tokens"] for bucket in plan["buckets"])
        return cls(world_size, gradient_accumulation_steps, balance, cost, batch_sizes, tokens)

    @property
    def group(self) -> int:
        return self.world_size * self.gradient_accumulation_steps

    def continues(self, earlier: _Setting) -> bool:
        return self == earlier or (self.balance == "auto" and replace(self, balance=earlier.balance) == earlier)


def schedule_epoch(
    bucket_of_sample: np.ndarray,
    plan: Any,
    cost: CostModel,
    *,
    world_size: int,
    gradient_accumulation_steps: int = 1,
    seed: int = 0,
    epoch: int = 0,
    balance: str = "auto",
    loss_normalization: str = "token",
    repeats: np.ndarray | None = None,
    segments: Sequence[dict] = (),
) -> EpochSchedule:
    """Assigns every sample of an epoch to a micro-batch of one bucket, and those to micro-steps and ranks.

    Args:
        bucket_of_sample: int [samples], position in plan.buckets.
        plan: a BucketPlan.
        cost: the cost model by which ranks are balanced.
        balance: none | step | stratified:n | window:n | auto (the first of step, stratified:2, 4, 8, 16 and window:2,
            4, 8, 16 that reaches 0.95, or one before it within 1% of its seconds; no window of more than an eighth of
            the epoch; with K = 1 none that is stratified).
        loss_normalization: token | sample | none, see `loss_weights`.
        repeats: float [samples], how often each sample occurs in an epoch: floor or ceil of it, drawn anew each epoch.
        segments: what has been trained of this epoch, as in BucketDataLoader's state. The same order continues if
            world, plan, cost and balance are the last segment's; else the unseen samples are scheduled anew.

    Raises:
        UserError: fewer samples than W*K, an unknown option, or segments that this data does not reproduce.
    """
    setting = _Setting.of(plan.to_dict(), cost, world_size, gradient_accumulation_steps, balance)
    buckets = _checked_buckets(bucket_of_sample, setting, loss_normalization)
    samples = _occurrences(len(buckets), repeats, _random(seed, epoch, 0))
    total = len(buckets) if samples is None else len(samples)
    if total < setting.group:
        raise UserError(
            f"An optimizer step needs at least one sample for each of {world_size} ranks x "
            f"{gradient_accumulation_steps} micro-steps, but the dataset gives {total} samples. "
            "Use fewer ranks, fewer gradient_accumulation_steps, or more samples."
        )
    schedule, used, builds = None, None, 0
    for segment in [*segments, None]:
        wanted = setting if segment is None else _setting_of_segment(segment)
        if schedule is None or not wanted.continues(used):
            samples = samples if schedule is None else schedule.unseen()
            builds += 1
            schedule = _deal_epoch(samples, buckets, wanted, loss_normalization, _random(seed, epoch, builds))
            used = replace(wanted, balance=schedule.balance)
        if segment is not None:
            schedule = _after(schedule, segment)
    return schedule


def _random(seed: int, epoch: int, stream: int) -> np.random.Generator:
    if not all(isinstance(number, (int, np.integer)) and number >= 0 for number in (seed, epoch)):
        raise UserError(f"seed and epoch are whole numbers from 0 on, but found {seed!r} and {epoch!r}.")
    return np.random.default_rng([seed, epoch, stream])


def _checked_buckets(bucket_of_sample, setting: _Setting, loss_normalization: str) -> np.ndarray:
    buckets = np.asarray(bucket_of_sample)
    if len(buckets) and not 0 <= buckets.min() <= buckets.max() < len(setting.batch_sizes):
        raise UserError(
            f"bucket_of_sample must lie in 0..{len(setting.batch_sizes) - 1}, the plan's buckets, but it spans "
            f"{buckets.min()}..{buckets.max()}. Make the plan from this dataset's own shapes."
        )
    if loss_normalization not in LOSS_NORMALIZATIONS:
        raise UserError(f"loss_normalization is one of {LOSS_NORMALIZATIONS}, but found {loss_normalization!r}.")
    check_ranks(setting.world_size, setting.gradient_accumulation_steps)
    check_balance(setting.balance)
    check_cost(setting.cost, np.array(setting.tokens))
    # numpy sorts 8- and 16-bit integers by radix, in a pass a byte; how it sorts wider ones is much slower.
    return buckets.astype(np.min_scalar_type(len(setting.batch_sizes) - 1))


def _setting_of_segment(segment: dict) -> _Setting:
    world_size, accumulation = segment["world_size"], segment["gradient_accumulation_steps"]
    return _Setting.of(
        segment["plan"], cost_model_from_dict(segment["cost_model"]), world_size, accumulation, segment["balance"]
    )


def _after(schedule: EpochSchedule, segment: dict) -> EpochSchedule:
    """The same schedule, the segment's micro-steps further on."""
    if segment["digest"] != schedule.digest:
        raise UserError(
            f"The order of a checkpoint could not be rebuilt (expected {segment['digest']}, found {schedule.digest}), "
            "so what it trained on is unknown. Use the dataset, the repeats and the numpy version of that run."
        )
    first = schedule.first_micro_step + segment["micro_steps"]
    whole = first % schedule.gradient_accumulation_steps == 0
    if not (whole and schedule.first_micro_step <= first <= schedule.num_micro_steps):
        raise UserError(
            f"A segment ends on an optimizer step of {schedule.gradient_accumulation_steps} micro-steps, at most "
            f"{schedule.num_micro_steps} in all, but one ends after {first}. The checkpoint is damaged."
        )
    return replace(schedule, first_micro_step=first)


def _occurrences(samples: int, repeats, random: np.random.Generator) -> np.ndarray | None:
    """Sample indices, each floor or ceil of its repeats times, round(sum(repeats)) in all. None: everyone once."""
    if repeats is None or samples == 0:
        return None
    repeats = check_repeats(repeats, samples)
    whole = np.floor(repeats).astype(np.int64)
    # Systematic sampling: one random offset, so the number of roundings up is exact and each is as likely as its
    # fraction. The offset's range makes that number the rounded sum.
    order = random.permutation(samples)
    ends = np.cumsum((repeats - whole)[order])
    fraction = ends[-1] % 1.0
    low, high = (0.0, 1 - fraction) if fraction < 0.5 else (1 - fraction, 1.0)
    steps = np.floor(ends + low + (high - low) * random.uniform(1e-6, 1 - 1e-6)).astype(np.int64)
    whole[order] += np.diff(steps, prepend=0)
    return np.repeat(np.arange(samples), whole)


def _deal_epoch(
    samples: np.ndarray | None,
    buckets: np.ndarray,
    setting: _Setting,
    loss_normalization: str,
    random: np.random.Generator,
) -> EpochSchedule:
    members = buckets if samples is None else buckets[samples]
    if len(members) == 0:
        raise UserError("The segments already cover the whole epoch. Go on with the next epoch.")
    world_size, accumulation = setting.world_size, setting.gradient_accumulation_steps
    tokens = np.array(setting.tokens, dtype=np.int64)
    grouped = np.argsort(members, kind="stable")
    samples = grouped if samples is None else samples[grouped]
    counts = np.bincount(members, minlength=len(tokens))
    for bucket_samples in np.split(samples, np.cumsum(counts)[:-1]):
        random.shuffle(bucket_samples)
    numbers, padding = cut_evenly(counts, np.array(setting.batch_sizes), tokens, setting.cost, setting.group)

    bucket = np.repeat(np.arange(len(tokens), dtype=np.int32), numbers)
    place = np.arange(len(bucket)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    small, larger = np.divmod(counts, np.maximum(numbers, 1))
    sizes = small[bucket] + (place < larger[bucket])
    starts = np.cumsum(sizes) - sizes
    real = np.ones(len(bucket) + padding, dtype=bool)
    if padding:
        cheapest = np.argmin(np.where(counts > 0, setting.cost.seconds(1, tokens), np.inf))
        real[len(bucket) :] = False
        starts = np.append(starts, np.full(padding, starts[np.argmax(bucket == cheapest)]))
        bucket = np.append(bucket, np.full(padding, cheapest, dtype=np.int32))
        sizes = np.append(sizes, np.ones(padding, dtype=np.int64))

    order = random.permutation(len(bucket))
    seconds = np.asarray(setting.cost.seconds(sizes, tokens[bucket]), dtype=np.float64)
    balance = setting.balance
    if balance == "auto":
        balance, _ = best_balance(seconds[order], world_size, accumulation, len(order) // setting.group)
    work = sizes * tokens[bucket]
    order = order[deal(seconds[order], work[order], world_size, accumulation, balance, random)]

    bucket, sizes, seconds, real = bucket[order], sizes[order], seconds[order], real[order]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    starts = starts[order]
    # Where each sample comes from: one further than the sample before it, except at the head of a micro-batch. In
    # one array, in place: at 10 million samples, touching the memory of a new one costs more than the arithmetic.
    source = np.ones(offsets[-1], dtype=np.int64)
    source[offsets[:-1]] = starts - np.concatenate([[0], (starts + sizes - 1)[:-1]])
    np.cumsum(source, out=source)
    weights = loss_weights(loss_normalization, sizes * real, tokens[bucket], world_size, accumulation)
    return EpochSchedule(
        samples[source], offsets, bucket, tokens[bucket], seconds, weights, balance, world_size, accumulation
    )


def count_update_steps(
    bucket_of_sample: np.ndarray,
    plan,
    cost: CostModel,
    *,
    world_size: int,
    gradient_accumulation_steps: int = 1,
    seed: int = 0,
    epoch: int = 0,
    repeats: np.ndarray | None = None,
) -> int:
    """Optimizer steps of a whole epoch, without laying it out. Arguments as of `schedule_epoch`."""
    setting = _Setting.of(plan.to_dict(), cost, world_size, gradient_accumulation_steps, "none")
    buckets = _checked_buckets(bucket_of_sample, setting, "none")
    samples = _occurrences(len(buckets), repeats, _random(seed, epoch, 0))
    members = buckets if samples is None else buckets[samples]
    counts = np.bincount(members, minlength=len(setting.tokens))
    numbers, padding = cut_evenly(counts, np.array(setting.batch_sizes), np.array(setting.tokens), cost, setting.group)
    return int(numbers.sum() + padding) // setting.group


def loss_weights(
    normalization: str, samples: np.ndarray, tokens: np.ndarray, world_size: int, gradient_accumulation_steps: int
) -> np.ndarray:
    """What to multiply each micro-batch's mean loss with, before mean over ranks and division by K.

    token: gives sum(tokens*loss) / tokens of the optimizer step. sample: sum(loss) / expected samples of a step; the
    expected number, because dividing by a step's own would over-weight the samples of small steps. none: 1.

    Args:
        samples: int64 [micro-batches], in schedule order; 0 for padding, whose weight is 0.
        tokens: int64 [micro-batches], S of one sample.

    Returns:
        float64 [micro-batches].
    """
    if normalization == "none":
        return (samples > 0).astype(np.float64)
    group = world_size * gradient_accumulation_steps
    if normalization == "sample":
        return samples * (len(samples) / samples.sum())
    work = (samples * tokens).astype(np.float64)
    return group * work / np.repeat(work.reshape(-1, group).sum(axis=1), group)
