"""How does a schedule reach a training loop: every rank its batches, with exact resume?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader
from typing_extensions import Unpack

from ..distributed import strategy_of
from ..environment import differences
from ..errors import UserError
from .collate import BatchReader, Failure, check_workers, collate_prepared, keep
from .findings import Risk
from .plan import BucketPlan, PlanOptions
from .ranks import check_arguments, check_run, check_scheduler, compare_ranks, data_rank_and_size
from .sampler import BucketBatchSampler
from .schedule import EpochSchedule
from .shapes import BucketIndex, check_index, dataset_fingerprint, leave_out_absent, read_shapes, shape_counts
from .state import call_after_updates, check_whole, read_state, register, sealed


class BucketDataLoader(DataLoaderStateMixin):
    """Loads one rank's micro-batches: plans, schedules, reads, and resumes exactly.

    Not a torch DataLoader, so `accelerator.prepare` returns it as it is. Construct it on all ranks after the
    Accelerator: it takes W, rank and K from there, and registers itself for save_state and load_state. Its batches are
    what collate_fn returns plus loss_weight (float: multiply the micro-batch's mean loss with it before
    `accelerator.backward`), bucket (the shape, str), micro_step (position in `schedule`), sample_index and, with
    repeats, occurrence (`EpochSchedule.occurrences`; both int64 [B], on the CPU). It advances its own epoch, and a
    loop over it goes on with the batch after the one where the loop before was left.

    Args:
        dataset: rows by index; dict rows get `sample_index` added before collate_fn sees them.
        config: has `cost_model` and `plan(shape_counts, ...)`: a BucketConfig.
        accelerator: of the run.
        shapes: bucket of every sample; read from the column latent_shape if not given.
        collate_fn: list of rows -> dict; without it, rows of the prepared dataset.
        repeats: float [samples], occurrences of each sample in an epoch.
        on_dataset_change: "error", or "new_epoch": after a checkpoint of another dataset begin a new epoch of this
            one.
        balance, loss_normalization: see `schedule_epoch`; an automatic compute limit is chosen for this balance.
        num_workers, persistent_workers, prefetch_factor: torch's.
        plan_options: `PlanOptions`, such as batch_sizes ({shape: B}) after running out of memory.

    Raises:
        UserError: what the plan and the schedule refuse, ranks that disagree, or a wrong option.
    """

    # accelerate reads it: there is no padding at the end of an epoch for gather_for_metrics to cut off.
    _drop_last = True

    def __init__(
        self,
        dataset: Any,
        config: Any,
        *,
        accelerator: Accelerator,
        shapes: BucketIndex | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list], dict] | None = None,
        seed: int = 0,
        balance: str = "auto",
        loss_normalization: str = "token",
        on_dataset_change: str = "error",
        repeats: np.ndarray | None = None,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        **plan_options: Unpack[PlanOptions],
    ):
        if on_dataset_change not in ("error", "new_epoch"):
            raise UserError(f"on_dataset_change is 'error' or 'new_epoch', but found {on_dataset_change!r}.")
        check_arguments(dataset, config, accelerator, shapes, collate_fn, plan_options)
        index = check_index(read_shapes(dataset) if shapes is None else shapes, len(dataset))
        collate_fn = collate_fn or collate_prepared
        check_workers(num_workers, persistent_workers, prefetch_factor, dataset, collate_fn)
        self.dataset, self.accelerator, self.gradient_state = dataset, accelerator, accelerator.gradient_state
        self.seed, self._on_dataset_change = seed, on_dataset_change
        self.fingerprint = dataset_fingerprint(dataset, index, repeats)
        index = leave_out_absent(index, repeats)
        self.rank, world_size = data_rank_and_size(accelerator)
        accumulation = accelerator.gradient_accumulation_steps
        run = {"world_size": world_size, "gradient_accumulation_steps": accumulation}
        self.plan: BucketPlan = config.plan(shape_counts(index, repeats), **run, balance=balance, **plan_options)
        if accelerator.is_main_process:
            for risk in _risks(self.plan, config, accelerator):
                warnings.warn(risk, stacklevel=2)
        self.cost_model = cost = config.cost_model
        order = {"balance": balance, "loss_normalization": loss_normalization, "repeats": repeats}
        self._sampler = BucketBatchSampler(index.bucket_of_sample, self.plan, cost, **run, seed=seed, **order)
        self._batches = self._sampler.for_rank(self.rank)
        # Its own generator: a DataLoader without one draws from the global one, and noise after a resume would differ.
        self._generator = torch.Generator()
        self._loader = DataLoader(
            BatchReader(dataset, collate_fn),
            batch_sampler=self._batches,
            collate_fn=keep,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=accelerator.device.type == "cuda",
            generator=self._generator,
        )
        self._visit, self._trains, self._resumed_epoch = 0, False, 0
        self._begin_epoch(0, (), global_step=0)
        self._compare_ranks()
        self._registered = register(accelerator, self)
        call_after_updates(self._note_update)

    @property
    def epoch(self) -> int:
        return self._sampler.epoch

    @property
    def schedule(self) -> EpochSchedule:
        """Of the current epoch; after a resume with another W, K or plan, of what was left of it."""
        return self._sampler.schedule

    @property
    def global_step(self) -> int:
        """Optimizer steps whose batches have been handed out, over all epochs and resumes."""
        return self._steps_before + self._position // self.schedule.gradient_accumulation_steps

    def global_step_after(self, epochs: int) -> int:
        """The global step at which `epochs` epochs are complete: the length of a learning rate schedule."""
        if self.epoch >= epochs:
            return self.global_step
        later, steps = range(self.epoch + 1, epochs), self._sampler.num_update_steps
        rest = sum(map(steps, later)) if self._sampler.repeated else len(later) * steps(self.epoch)
        return self._steps_before + self.schedule.num_update_steps + rest

    @property
    def sampler(self) -> NoReturn:
        """Asked for by `skip_first_batches` of accelerate, which would rebuild this loader as one of torch's."""
        raise UserError(
            "A BucketDataLoader has no sampler to replace: after accelerator.load_state it goes on by itself. "
            "Leave skip_first_batches out."
        )

    def __len__(self) -> int:
        """Micro-steps of the current or next loop: after a resume or a break those left of the epoch."""
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of another epoch; the current one (which may have been resumed) is left as it is.

        Raises:
            UserError: an epoch before the one in which a training checkpoint was saved.
        """
        if epoch in range(self._resumed_epoch):
            raise UserError(
                f"The checkpoint was saved in epoch {self._resumed_epoch}, and set_epoch({epoch}) would train again "
                "what came before. Begin with that epoch: `for epoch in range(loader.epoch, epochs)`."
            )
        if epoch != self.epoch:
            self._begin_epoch(epoch, (), self.global_step)

    def __iter__(self) -> Iterator[dict]:
        self._leave_finished_epoch(self._position)
        self._compare_ranks()
        check_run(self.schedule, self.accelerator)
        # accelerate's own count may be out of phase: restored under another K, or left inside an optimizer step.
        count, first, beside = self.accelerator.step, self._position, self._is_read_beside_training()
        if not beside:
            self.accelerator.step = first
        visit = self._visit = self._visit + 1
        self._batches.first_micro_step = first
        # Of the workers. They must not draw the same on all ranks, nor after a resume what they drew before it.
        place = np.random.SeedSequence((self.seed, self.epoch, self.rank, first))
        self._generator.manual_seed(int(place.generate_state(1, np.uint64)[0]))
        left, read = True, 0
        try:
            for batch in self._loader:
                if visit != self._visit:
                    raise UserError(
                        "The epoch or state was changed inside the loader's own loop, or another loop begun. Let one "
                        "loop at a time run, and change them outside."
                    )
                yield self._hand_out(batch)
                if visit == self._visit:
                    read += self._note_body(only_read=first + read == self._position - 1)
            left = False
        finally:
            self.end()
            # A loop that only read, as of validation, leaves the count to a loop over one of torch's loaders, inside
            # of which it may have been.
            if not beside and self.accelerator.step == first + read and (read or self.gradient_state.in_dataloader):
                self.accelerator.step = count
            if visit == self._visit:
                self._batches.first_micro_step = self._position
                # Also where the loop is left by a break after the last batch, but not before that was trained on.
                self._leave_finished_epoch(self._trained_to() if left else self._position)

    def _is_read_beside_training(self) -> bool:
        """Whether another loader's loop is what accelerate counts micro-steps of."""
        other = self.gradient_state.active_dataloader
        if other is self or not isinstance(other, BucketDataLoader):
            return False
        return other._position - self.accelerator.step in (0, 1)  # 1: it handed out a batch, which is not counted yet

    def _hand_out(self, batch) -> dict:
        if isinstance(batch, Failure):
            raise UserError(batch.message)
        if not isinstance(batch, dict):
            raise UserError(f"collate_fn must return a dict, but returned {type(batch).__name__}.")
        if self.accelerator.device_placement:
            batch = send_to_device(batch, self.accelerator.device, non_blocking=self._loader.pin_memory)
        schedule, micro_step = self.schedule, self._position
        # At the end of the active loader accelerate synchronises in any case. So none is active that is not counted,
        # as one of validation that is read a batch now and then, and may stay at its end for many micro-steps.
        if self.accelerator.step != micro_step:
            self.end()
        elif self.gradient_state.active_dataloader is not self:
            self.end()
            self.begin()
        # Counted when the loop gets it: what workers read ahead is read again after a resume.
        self._position += 1
        self.end_of_dataloader = self._position == schedule.num_micro_steps
        bucket = schedule.bucket[schedule.place(micro_step, self.rank)]
        ours = {"loss_weight": self._sampler.loss_weight(micro_step, self.rank), "micro_step": micro_step}
        ours["bucket"] = str(self.plan.buckets[bucket].shape)
        if self._sampler.repeated:
            ours["occurrence"] = torch.tensor(schedule.occurrences(micro_step, self.rank))
        if taken := ", ".join(sorted(ours.keys() & batch.keys())):
            raise UserError(f"The loader adds {', '.join(ours)} to a batch, but collate_fn gave {taken}: rename it.")
        batch |= {**ours, "sample_index": torch.tensor(schedule.micro_batch(micro_step, self.rank))}
        return batch

    def _note_update(self) -> None:
        """An optimizer has stepped: what was handed out is in the model."""
        if not self.gradient_state.initialized:  # accelerate has forgotten this run, as notebooks make it do
            return
        self._trained = self._position
        self._trains |= self.gradient_state.active_dataloader is self

    def _note_body(self, only_read: bool) -> bool:
        """A loop, which has only read so far or not, is done with a batch. Returns whether it passed it over."""
        alone = self.gradient_state.dataloader_references == [None, self]
        passed_over = alone and self.accelerator.step == self._position - 1
        if passed_over:  # the next one must not take its place in the optimizer step
            self.accelerator.step = self._position
        whole = self._position % self.schedule.gradient_accumulation_steps == 0
        if whole and not self._trains and (only_read or not passed_over):
            self._trained = self._position
        return passed_over

    def _trained_to(self) -> int:
        """Micro-steps of the whole optimizer steps that were made, or, where nothing trains, that were read."""
        trains = self._trains or self.accelerator._optimizers
        done = self._trained if trains else self._position
        return done - done % self.schedule.gradient_accumulation_steps

    def _begin_epoch(self, epoch: int, segments: Sequence[dict], global_step: int) -> None:
        self._visit += 1
        self._sampler.set_epoch(epoch, segments)
        self._position = self._trained = self._batches.first_micro_step = self.schedule.first_micro_step
        # A last segment that goes on is written anew, longer, by state_dict.
        self._earlier_segments = tuple(segments[:-1] if self._position else segments)
        self._steps_before = global_step - self._position // self.schedule.gradient_accumulation_steps

    def _leave_finished_epoch(self, done: int) -> None:
        if done == self.schedule.num_micro_steps:
            self._begin_epoch(self.epoch + 1, (), self.global_step)

    def state_dict(self) -> dict:
        """Where training stands, the same on every rank, as plain values.

        It is after the last optimizer step that was made, wherever in a loop this is called: accumulated gradients are
        in no checkpoint, so their micro-batches, and a batch that is yet to be trained on, come again after a resume.
        """
        schedule, position = self.schedule, self._trained_to()
        segments, epoch = list(self._earlier_segments), self.epoch
        if position == schedule.num_micro_steps:
            segments, epoch = [], epoch + 1
        elif position:
            segment = {
                "world_size": schedule.world_size,
                "gradient_accumulation_steps": schedule.gradient_accumulation_steps,
                "plan": self.plan.to_dict(),
                "cost_model": {"kind": self.cost_model.kind, "parameters": self.cost_model.parameters},
                "balance": schedule.balance,
                "micro_steps": position,
                "digest": schedule.digest,
            }
            segments.append(segment)
        step = self._steps_before + position // schedule.gradient_accumulation_steps
        state = {"epoch": int(epoch), "global_step": step, "processes": self.accelerator.num_processes}
        state |= {"trains": self._trains, "seed": int(self.seed), "dataset_fingerprint": self.fingerprint}
        return sealed({**state, "segments": segments})

    def load_checkpoint(self, folder: str | Path) -> None:
        """Goes to where `accelerator.save_state(folder)` was called, before load_state is: to ask global_step_after.

        A learning-rate schedule is made before load_state, but how long it is follows from what is left to train.

        Raises:
            UserError: no such checkpoint, or a damaged one; or what `load_state_dict` refuses.
        """
        self.load_state_dict(read_state(self.accelerator, self._registered, folder))

    def load_state_dict(self, state: dict) -> None:
        """Goes to where a `state_dict` was taken, under any W, K, plan and balance.

        Raises:
            UserError: another dataset (unless on_dataset_change="new_epoch"), another seed, or a damaged state.
        """
        check_whole(state)
        check_scheduler(self.accelerator, state["processes"])
        epoch, segments = state["epoch"], state["segments"]
        if state["dataset_fingerprint"] != self.fingerprint:
            if self._on_dataset_change == "error":
                raise UserError(
                    f"The checkpoint was trained on another dataset: expected {state['dataset_fingerprint']}, found "
                    f"{self.fingerprint}. Give that dataset (and repeats), or on_dataset_change='new_epoch' to begin "
                    "a new epoch on this one."
                )
            epoch, segments = epoch + bool(segments), []
        elif state["seed"] != self.seed:
            raise UserError(f"The checkpoint's order has seed {state['seed']}, but found {self.seed}. Use that seed.")
        self._trains = state.get("trains", False)
        self._resumed_epoch = epoch if self._trains else 0
        self._begin_epoch(epoch, segments, state["global_step"])

    def _compare_ranks(self) -> None:
        """Raises on all ranks if any would train on another schedule than rank 0."""
        schedule = self.schedule
        mine = {
            "dataset": self.fingerprint,
            "seed": self.seed,
            "epoch": self.epoch,
            "world_size": schedule.world_size,
            "gradient_accumulation_steps": schedule.gradient_accumulation_steps,
            "plan": {str(bucket.shape): bucket.batch_size for bucket in self.plan.buckets},
            "cost_model": str(self.cost_model),
            "balance": schedule.balance,
            "loss_normalization": self._sampler.loss_normalization,
            "first_micro_step": self._position,
            "order": schedule.digest,
        }
        compare_ranks(mine)


def _risks(plan: BucketPlan, config: Any, accelerator: Accelerator) -> list[str]:
    """What the run may fail by, or differ in from what was measured."""
    here = {"strategy": strategy_of(accelerator)}
    if accelerator.device.type == "cuda":
        here["gpu"] = torch.cuda.get_device_name(accelerator.device)
    found = [risk for risk in plan.findings if isinstance(risk, Risk)]
    if different := differences(getattr(config, "environment", {}), here):
        found.append(
            f"The bucket config is of another set-up, where seconds and memory differ: {'; '.join(different)}. "
            "Measure as you train, or give memory_limit_gib or batch_sizes that are known to fit."
        )
    return found
