"""Training on real ranks that is stopped or killed goes on: same losses, every sample once, rates that end at 0."""

import pytest
import torch
from support import continued
from support.accelerators import FSDP2
from support.worlds import on_ranks
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

pytestmark = pytest.mark.distributed

WORKERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}]
SAMPLES = sum(continued.COUNTS)


@pytest.mark.parametrize(
    ("environment", "variants"), [({}, WORKERS), (FSDP2, [WORKERS[0], WORKERS[2]])], ids=["ddp", "fsdp2"]
)
def test_the_losses_after_a_killed_rank_and_a_resume_are_bit_for_bit_those_of_an_undisturbed_run(
    tmp_path, environment, variants
):
    accumulation, stop = 2, 2
    run = (continued.run_variants, tmp_path, variants, accumulation)
    whole = on_ranks(2, *run, "whole", **environment)
    with pytest.raises(ProcessExitedException, match="process 1 terminated with signal SIGKILL"):
        on_ranks(2, *run, "killed", stop, **environment)
    resumed = on_ranks(2, *run, "resumed", **environment)
    for rank_whole, rank_resumed in zip(whole, resumed):
        for steps, rest in zip(rank_whole, rank_resumed):
            assert {epoch for epoch, *_ in steps} == set(range(continued.EPOCHS))
            assert 0 < len(rest) == len(steps) - stop * accumulation
            assert rest == steps[stop * accumulation :]
    assert whole[0] != whole[1], "ranks should draw different noise"


def test_four_then_two_then_three_ranks_train_every_sample_of_one_epoch_once(tmp_path):
    smaller = (2, *continued.BATCH_SIZES[1:])  # after running out of memory in the first bucket
    phases = [
        (4, (tmp_path, None, "four", 1, continued.BATCH_SIZES, 1)),
        (2, (tmp_path, "four", "two", 2, smaller, 1)),
        (3, (tmp_path, "two", None, 1, smaller, None)),
    ]
    ledger, steps = [], 0
    for world_size, arguments in phases:
        ranks = on_ranks(world_size, continued.run_phase, *arguments, timeout=120, **FSDP2)
        assert {rank["began"] for rank in ranks} == {steps}
        assert len({len(rank["samples"]) for rank in ranks}) == 1
        assert {rank["epoch"] for rank in ranks} == {int(world_size == 3)}
        ledger += [sample for rank in ranks for batch in rank["samples"] for sample in batch]
        steps = ranks[0]["global_step"]
        assert len(ledger) < SAMPLES or world_size == 3
    assert sorted(ledger) == list(range(SAMPLES))


@pytest.mark.parametrize("stepping", ["loop", "accelerate", "split_batches"])
def test_learning_rates_end_at_zero_after_the_last_epoch_also_on_other_ranks(tmp_path, stepping):
    first = on_ranks(2, continued.run_rates, tmp_path, stepping, 2, 4)[0]
    assert_linear(first["rates"], first["steps"], range(4))
    again = on_ranks(2, continued.run_rates, tmp_path, stepping, 2)[0]
    assert_linear(again["rates"], again["steps"], range(4, first["steps"]))
    assert again["last"] == 0 and again["steps"] == first["steps"]
    other = on_ranks(3, continued.run_rates, tmp_path, stepping, 1)
    if stepping == "accelerate":
        message = (
            "stepped the learning-rate schedule 2 times an optimizer step (once a process), and would go on with 3"
        )
        assert all(message in rank["refused"] for rank in other)
    else:
        assert other[0]["steps"] != first["steps"]
        head, *rest = other[0]["rates"]
        assert_linear([head], first["steps"], [4])  # torch restores the rate itself, and computes the next one
        assert_linear(rest, other[0]["steps"], range(5, other[0]["steps"]))
        assert other[0]["last"] == 0


def assert_linear(rates, total, steps):
    assert [step for step, _ in rates] == list(steps)
    for step, rate in rates:
        assert rate == pytest.approx(continued.BASE_RATE * (1 - step / total))


def test_a_truncated_or_edited_state_ends_every_rank(tmp_path):
    on_ranks(2, continued.run_rates, tmp_path, "loop", 2, 4)
    file = tmp_path / "loop" / "custom_checkpoint_0.pkl"
    state = torch.load(file)
    torch.save({**state, "global_step": 2}, file)
    with pytest.raises(ProcessRaisedException, match="state is not as it was saved: expected checksum"):
        on_ranks(2, continued.run_rates, tmp_path, "loop", 2)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(
        ProcessRaisedException,
        match=r"Expected a loader's state in .*custom_checkpoint_0\.pkl: .* Use another checkpoint",
    ):
        on_ranks(2, continued.run_rates, tmp_path, "loop", 2)
