"""In which order do indices come out of a schedule, for all ranks of a prepared DataLoader or for one rank?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import UserError
from .cost import CostModel
from .plan import BucketPlan
from .ranks import check_run
from .schedule import EpochSchedule, count_update_steps, schedule_epoch


class BucketBatchSampler:
    """The micro-batches of an epoch for all ranks: micro-step 0 rank 0, micro-step 0 rank 1, ...

    It knows no rank, and has no `batch_size`, because accelerate would drop every batch of another size. Its length is
    a multiple of W*K. `accelerator.prepare(DataLoader(dataset, batch_sampler=sampler))` shards it correctly, but its
    batches carry no loss weight. So only loss_normalization="none" works there, or caller_weights_loss=True, which
    says that the loop multiplies each loss by `loss_weight(micro_step, rank)` itself.

    Args: those of `schedule_epoch`.
    """

    def __init__(
        self,
        bucket_of_sample: np.ndarray,
        plan: BucketPlan,
        cost: CostModel,
        *,
        world_size: int,
        gradient_accumulation_steps: int = 1,
        seed: int = 0,
        balance: str = "auto",
        loss_normalization: str = "token",
        repeats: np.ndarray | None = None,
        caller_weights_loss: bool = False,
    ):
        self._data = (bucket_of_sample, plan, cost)
        self._run = {
            "world_size": world_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "seed": seed,
            "repeats": repeats,
        }
        self._order = {"balance": balance, "loss_normalization": loss_normalization}
        self._caller_weights_loss = caller_weights_loss
        self.epoch, self._segments, self._schedule = 0, (), None

    @property
    def sampler(self) -> BucketBatchSampler:
        """Itself, since accelerate passes set_epoch only to `batch_sampler.sampler`."""
        return self

    @property
    def schedule(self) -> EpochSchedule:
        """The current epoch's schedule, made when first asked for."""
        if self._schedule is None:
            self._schedule = schedule_epoch(
                *self._data, **self._run, **self._order, epoch=self.epoch, segments=self._segments
            )
        return self._schedule

    def set_epoch(self, epoch: int, segments: Sequence[dict] = ()) -> None:
        """Goes to an epoch, of which `segments` have been trained on already."""
        if (epoch, tuple(segments)) != (self.epoch, self._segments):
            self.epoch, self._segments, self._schedule = epoch, tuple(segments), None

    @property
    def loss_normalization(self) -> str:
        return self._order["loss_normalization"]

    @property
    def repeated(self) -> bool:
        """Whether samples may come several times in an epoch; then epochs may differ in optimizer steps."""
        return self._run["repeats"] is not None

    def num_update_steps(self, epoch: int) -> int:
        """Optimizer steps of one whole epoch."""
        return count_update_steps(*self._data, **self._run, epoch=epoch)

    def loss_weight(self, micro_step: int, rank: int) -> float:
        """What to multiply the mean loss of a rank's micro-batch by, before `accelerator.backward`."""
        return float(self.schedule.loss_weight[self.schedule.place(micro_step, rank)])

    def for_rank(self, rank: int) -> RankBatches:
        """One data rank's micro-batches, to give to a torch DataLoader that is not prepared."""
        return RankBatches(self, rank)

    def __len__(self) -> int:
        return len(self.schedule.bucket)

    def __iter__(self) -> Iterator[list[int]]:
        if self.loss_normalization != "none" and not self._caller_weights_loss:
            raise UserError(
                "Batches of a plain DataLoader carry no loss weight, which loss_normalization="
                f"{self.loss_normalization!r} needs. Use BucketDataLoader; or loss_normalization='none'; or "
                "caller_weights_loss=True, and multiply each loss with sampler.loss_weight(micro_step, rank) yourself."
            )
        schedule = self.schedule
        check_run(schedule)
        for j in range(len(schedule.bucket)):
            yield schedule.sample_order[schedule.offsets[j] : schedule.offsets[j + 1]].tolist()


class RankBatches:
    """One rank's micro-batches of a sampler's current epoch, from first_micro_step on."""

    def __init__(self, sampler: BucketBatchSampler, rank: int):
        self._sampler, self.rank, self.first_micro_step = sampler, rank, 0

    def __len__(self) -> int:
        return self._sampler.schedule.num_micro_steps - self.first_micro_step

    def __iter__(self) -> Iterator[list[int]]:
        return self._sampler.schedule.rank_batches(self.rank, self.first_micro_step)
