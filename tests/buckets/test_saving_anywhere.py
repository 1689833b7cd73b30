"""A loop may save or be left at any place: after a resume no sample is lost, and none is trained on twice."""

import itertools
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from support.accelerators import forget_run
from support.bucketed import CountedConfig, NumberedRows, collate_numbers, mixed_index
from support.worlds import on_ranks

from adaptiveload_hf.buckets.loader import BucketDataLoader
from adaptiveload_hf.errors import UserError

COUNTS = (13, 7, 4, 1)
PLACES = (
    *("with a batch", "before forward", "before the update", "after the update", "without gradients"),
    *("after the micro-step", "in validation"),
)


@pytest.fixture(autouse=True)
def fresh_accelerate():
    yield
    forget_run()


class Run:
    """A process that trains. Its model counts how often it was trained on each sample."""

    def __init__(self, accumulation, resume_from=None):
        forget_run()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model = torch.nn.Embedding(sum(COUNTS), 1)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.loader, self.held_out = self.load(COUNTS), self.load((6, 3, 3))
        if resume_from:
            self.accelerator.load_state(resume_from)

    def load(self, counts):
        options = {"shapes": mixed_index(counts), "collate_fn": collate_numbers, "batch_sizes": {"1x4x6": 3}}
        return BucketDataLoader(NumberedRows(sum(counts)), CountedConfig(), accelerator=self.accelerator, **options)

    def train(self, style="accumulate", odd=()):
        """The loop over an epoch, as a generator that says where it is: micro-batch and place."""
        for number, batch in enumerate(self.loader):
            yield number, "with a batch"
            if style == "passes over" and number in odd:
                continue
            if style in ("plain", "steps by itself", "gradients dropped first"):
                yield from self.micro_step(number, batch, style, odd)
            else:
                with self.accelerator.accumulate(self.model):
                    yield from self.micro_step(number, batch, style, odd)
            yield number, "after the micro-step"
            for _ in itertools.islice(self.held_out, 2):
                yield number, "in validation"

    def micro_step(self, number, batch, style, odd):
        yield number, "before forward"
        if style == "gradients dropped first":
            self.optimizer.zero_grad()
        counts = -self.model(batch["number"]).sum() * (batch["loss_weight"] > 0)
        # Backward divides by K, and DDP by the ranks.
        self.accelerator.backward(
            counts * self.accelerator.gradient_accumulation_steps * self.accelerator.num_processes
        )
        yield number, "before the update"
        between = style == "steps by itself" and (number + 1) % self.accelerator.gradient_accumulation_steps
        if not between and not (style == "updates left out" and number in odd):
            self.optimizer.step()
        yield number, "after the update"
        if not between and style != "gradients dropped first":
            self.optimizer.zero_grad()
        yield number, "without gradients"

    def times_trained(self):
        return self.accelerator.unwrap_model(self.model).weight.detach().round().long().flatten().tolist()


def finish(accumulation, checkpoint, style="accumulate"):
    """Another process goes on with what is left of the epoch."""
    run = Run(accumulation, str(checkpoint))
    if run.loader.epoch == 0:
        list(run.train(style))
    assert run.loader.epoch == 1 and run.loader.global_step == run.loader.global_step_after(1)
    return run.times_trained()


STYLES = [
    *((1, "accumulate"), (2, "accumulate"), (3, "accumulate")),
    *((1, "plain"), (2, "steps by itself"), (3, "steps by itself"), (1, "gradients dropped first")),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("accumulation", "style"), STYLES)
def test_a_checkpoint_of_any_place_goes_on_with_what_is_not_in_the_model(tmp_path, accumulation, style, place):
    run = Run(accumulation)
    last = len(run.loader) - 1
    saved = [0, 2, 3, last - 1, last]
    for number, reached in run.train(style):
        if number in saved and reached == place:
            run.accelerator.save_state(str(tmp_path / str(number)))
    assert run.times_trained() == [1] * sum(COUNTS)
    for number in saved:
        assert finish(accumulation, tmp_path / str(number), style) == [1] * sum(COUNTS), number


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("accumulation", "style"), STYLES)
def test_a_checkpoint_after_a_loop_that_was_left_goes_on_with_what_is_not_in_the_model(
    tmp_path, accumulation, style, place
):
    for number in (0, len(Run(accumulation).loader) - 1):
        run = Run(accumulation)
        loop = run.train(style)
        assert (number, place) in loop  # reads up to there
        loop.close()
        run.accelerator.save_state(str(tmp_path / str(number)))
        assert finish(accumulation, tmp_path / str(number), style) == [1] * sum(COUNTS), number


@pytest.mark.parametrize("odd", [(2, 3, 5), (0,), (0, 1, 2)])
@pytest.mark.parametrize("style", ["updates left out", "passes over"])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_what_a_loop_leaves_out_moves_nothing_else(tmp_path, accumulation, style, odd):
    """An update, for its gradient is not finite, or a whole micro-batch."""
    run = Run(accumulation)
    schedule = run.loader.schedule
    steps = [range(number // accumulation * accumulation, number + 1) for number in odd]
    batches = odd if style == "passes over" else [batch for step in steps for batch in step]
    may_be_missing = {sample for batch in batches for sample in schedule.micro_batch(batch, 0)}
    saved = []
    for number, place in run.train(style, odd):
        if place in ("with a batch", "after the micro-step"):
            saved.append((tmp_path / f"{number} {place}", run.times_trained()))
            run.accelerator.save_state(str(saved[-1][0]))
    for checkpoint, trained in [*saved, (None, run.times_trained())]:
        found = run.times_trained() if checkpoint is None else finish(accumulation, checkpoint)
        assert all(before <= after <= 1 for before, after in zip(trained, found)), checkpoint
        assert {sample for sample, times in enumerate(found) if not times} <= may_be_missing, checkpoint


@pytest.mark.parametrize("read", [3, None])
def test_a_loop_that_only_reads_leaves_the_count_of_micro_steps_to_another_loader(read):
    run = Run(accumulation=2)
    run.accelerator.step = 1  # as a loop over one of torch's loaders may leave it
    for _ in itertools.islice(run.held_out, read):
        pass
    assert run.accelerator.step == 1


def pass_over_on_one_rank(_):
    run = Run(accumulation=2)
    for number, batch in enumerate(run.loader):
        if number in (0, 4) and run.accelerator.is_main_process:
            continue
        with run.accelerator.accumulate(run.model):
            list(run.micro_step(number, batch, "accumulate", ()))
    return run.times_trained()


def test_one_of_two_ranks_passes_over_micro_batches_between_updates():
    schedule = Run(accumulation=2).loader.schedule
    assert schedule.num_micro_steps > 5
    first, second = on_ranks(2, pass_over_on_one_rank, None)
    assert first == second and sum(first) < sum(COUNTS) and set(first) == {0, 1}


def train_rank(folder):
    """An epoch on this rank, with a checkpoint at each place of the two micro-steps of an optimizer step."""
    run = Run(accumulation=2)
    for number, place in run.train():
        if number in (2, 3):
            run.accelerator.save_state(str(Path(folder, f"{number} {place}")))
    return run.times_trained()


def finish_rank(folder):
    return [finish(3, checkpoint) for checkpoint in sorted(Path(folder).iterdir())]


def test_two_ranks_save_anywhere_and_three_go_on(tmp_path):
    assert on_ranks(2, train_rank, str(tmp_path)) == [[1] * sum(COUNTS)] * 2
    for rank in on_ranks(3, finish_rank, str(tmp_path)):
        assert rank == [[1] * sum(COUNTS)] * 2 * len(PLACES)


def test_a_loader_of_a_run_that_accelerate_has_forgotten_does_not_disturb_another():
    before = Run(accumulation=1)
    next(iter(before.loader))
    forget_run()
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def test_a_loop_that_trains_nothing_goes_on_after_what_it_was_handed():
    forget_run()
    accelerator = Accelerator(cpu=True)
    options = {"shapes": mixed_index(COUNTS), "collate_fn": collate_numbers, "accelerator": accelerator}
    loader, again = (BucketDataLoader(NumberedRows(sum(COUNTS)), CountedConfig(), **options) for _ in range(2))
    seen = [next(iter(loader))["number"].tolist() for _ in range(3)]
    again.load_state_dict(loader.state_dict())
    seen += [batch["number"].tolist() for batch in again]
    assert sorted(itertools.chain(*seen)) == list(range(sum(COUNTS)))


def test_one_batch_at_a_time_is_trained_on_outside_of_a_loop(tmp_path):
    run = Run(accumulation=1)
    for number in range(4):
        batch = next(iter(run.loader))
        with run.accelerator.accumulate(run.model):
            list(run.micro_step(number, batch, "accumulate", ()))
    run.accelerator.save_state(str(tmp_path))
    assert finish(1, tmp_path) == [1] * sum(COUNTS)


def test_after_a_resume_the_epochs_before_are_not_trained_again_but_validation_may_repeat_one(tmp_path):
    run = Run(accumulation=1)
    for _ in range(2):
        list(run.train())
        list(run.held_out)
    run.accelerator.save_state(str(tmp_path))
    again = Run(1, str(tmp_path))
    for epoch in range(2):
        with pytest.raises(UserError, match=rf"in epoch 2, and set_epoch\({epoch}\) would .* range\(loader\.epoch"):
            again.loader.set_epoch(epoch)
        again.held_out.set_epoch(epoch)
    for epoch in (2, 4, 3):
        again.loader.set_epoch(epoch)
        assert again.loader.epoch == epoch
