"""What do memory and compute limits allow for these samples on these ranks, and how long would an epoch take?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .cost import CostModel
from .deal import AUTO, best_balance, cut_evenly, matched_efficiency, mean_slowest
from .shapes import LatentShape

# Micro-batches of an epoch that are laid out to judge it, many times in other orders: of one order, the efficiency may
# lie on this side or that of the one at which "auto" is content, and the limit would be chosen by luck. An epoch of 59
# optimizer steps dealt in windows of two varies by 0.4% from order to order; "auto" asks for 1%.
_EXCERPT, _IN_ALL = 1 << 13, 1 << 17
_IN_STRATA = 1 << 15  # "auto" tries stratified steps in several sizes: slower to lay out, and more alike
_ORDERS = 64
_NO_LIMIT = (1 << 31) - 1


@dataclass(frozen=True)
class Workload:
    """The data and the run that a plan is for, as arrays over the buckets.

    given: 0 where the policy chooses B. m_mem_tokens: M_mem of all buckets, or an array over them.
    """

    shapes: tuple[LatentShape, ...]
    counts: np.ndarray
    tokens: np.ndarray
    given: np.ndarray
    cost: CostModel
    world_size: int
    gradient_accumulation_steps: int
    m_mem_tokens: int | np.ndarray | None
    balance: str

    @property
    def least_m_mem_tokens(self) -> int | None:
        """M_mem that holds for every bucket."""
        return None if self.m_mem_tokens is None else int(np.min(self.m_mem_tokens))

    @property
    def one_seconds(self) -> float:
        """Seconds of the most expensive single sample: no micro-step with it can be shorter."""
        return float(np.max(self.cost.seconds(1, self.tokens)))

    @property
    def whole_buckets(self) -> np.ndarray:
        """All samples of each bucket: no micro-batch of an epoch holds more."""
        return np.maximum(1, self.counts)

    def memory_batches(self) -> np.ndarray:
        """B of each bucket under the memory limit alone, at most all of its samples."""
        if self.m_mem_tokens is None:
            return self.whole_buckets
        return np.minimum(np.maximum(1, self.m_mem_tokens // self.tokens), self.whole_buckets)

    def batches_within(self, seconds: float) -> np.ndarray:
        """Largest B of each bucket under the compute limit alone; 0 where one sample is over it."""
        growing = self.cost.seconds_per_sample(self.tokens) > 0
        # Where steps all take the floor, as those of tiny models, the limit allows any number.
        batches = np.full_like(self.counts, _NO_LIMIT)
        batches[growing] = self.cost.largest_batch(self.tokens[growing], seconds)
        return batches

    def batches(self, seconds: float) -> np.ndarray:
        """B of each bucket under both limits, or as given; at most all of its samples."""
        chosen = np.minimum(np.maximum(1, self.batches_within(seconds)), self.memory_batches())
        return np.minimum(np.where(self.given > 0, self.given, chosen), self.whole_buckets)

    def samples_per_step(self, batch_sizes: np.ndarray) -> float:
        """Mean samples of an optimizer step over an epoch."""
        group = self.world_size * self.gradient_accumulation_steps
        return float(self.counts.sum()) / -(-int((-(-self.counts // batch_sizes)).sum()) // group)

    def target_for_samples(self, wanted: float) -> float:
        """The compute limit whose mean samples per optimizer step are nearest to wanted."""

        def missed(seconds: float) -> float:
            return self.samples_per_step(self.batches(seconds)) - wanted

        below = 0.5 * float(np.min(self.cost.seconds(1, self.tokens)))  # under it every B is 1
        above = max(below, float(np.max(self.cost.seconds(self.memory_batches(), self.tokens))))
        # The samples only rise with the limit; between two limits this close, batch sizes differ by rounding alone.
        while above > below * (1 + 1e-9):
            middle = math.sqrt(below * above)
            below, above = (middle, above) if missed(middle) < 0 else (below, middle)
        return min((above, below), key=lambda seconds: abs(missed(seconds)))

    def predict_epoch(self, batch_sizes: np.ndarray) -> tuple[float, float]:
        """How an epoch goes that is dealt as `balance` says.

        Returns:
            Its predicted seconds, and how uneven its optimizer steps are: of "auto" the place in AUTO of the mode that
            it takes, on average over the orders that are laid out; else 0.
        """
        group = self.world_size * self.gradient_accumulation_steps
        numbers, _ = cut_evenly(self.counts, batch_sizes, self.tokens, self.cost, group)
        small, larger = np.divmod(self.counts, np.maximum(numbers, 1))
        seconds = self.cost.seconds(np.append(small + 1, small), np.append(self.tokens, self.tokens))
        numbers = np.append(larger, numbers - larger)
        total = int(numbers.sum())
        if self.balance == "none" or (self.balance == "step" and self.gradient_accumulation_steps == 1):
            return total / self.world_size * mean_slowest(seconds, numbers, self.world_size), 0
        # Each kind of micro-batch in its proportion: large epochs need not be laid out to be judged.
        length = min(total, max(_EXCERPT, 32 * group)) // group * group
        picked = np.diff(np.cumsum(numbers) * length // total, prepend=0)
        excerpt, random = np.repeat(seconds, picked), np.random.default_rng(0)
        stratified = self.balance == "auto" and self.gradient_accumulation_steps > 1
        number = (_IN_STRATA if stratified else _IN_ALL) // length
        orders = [random.permutation(excerpt) for _ in range(min(_ORDERS, max(1, number)))]
        run = self.world_size, self.gradient_accumulation_steps
        if self.balance == "auto":
            modes, found = zip(*(best_balance(order, *run, total // group) for order in orders))
        else:
            modes, found = AUTO[:1], [matched_efficiency(order, *run, self.balance) for order in orders]
        seconds = float((seconds * numbers).sum() / self.world_size / np.mean(found))
        return seconds, float(np.mean([AUTO.index(mode) for mode in modes]))
