"""Through real processes: ranks share an epoch exactly, agree or end together, and sum to the right gradient."""

import json
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
from support.launch import launch, run

pytestmark = pytest.mark.distributed

HERE = Path(__file__).parent
SAMPLES = 92


def torchrun(ranks, script, *arguments, timeout=120):
    start = ["env", "ACCELERATE_USE_CPU=true", sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return run([*start, "--nproc_per_node", ranks, HERE / script, *arguments], timeout=timeout)


def on_ranks(ranks, mode, folder):
    result = torchrun(ranks, "loader_on_ranks.py", mode, folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return results(ranks, mode, folder)


def results(ranks, mode, folder):
    return [json.loads((folder / f"{mode}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def trained(folder):
    return on_ranks(2, "train", folder)


def counted(batches):
    return [sample for batch in batches if batch["loss_weight"] > 0 for sample in batch["samples"]]


def test_two_ranks_share_every_epoch_without_loss_or_repetition(trained):
    for epoch in range(2):
        ranks = [[b for b in rank["batches"] if b["epoch"] == epoch] for rank in trained]
        assert len(ranks[0]) == len(ranks[1]) and len(ranks[0]) % 2 == 0
        assert sorted(counted(ranks[0]) + counted(ranks[1])) == list(range(SAMPLES))
        assert [b["micro_step"] for b in ranks[0]] == [b["micro_step"] for b in ranks[1]] == list(range(len(ranks[0])))
    first, second = ([b["samples"] for b in trained[0]["batches"] if b["epoch"] == epoch] for epoch in range(2))
    assert first != second


def test_two_ranks_synchronise_at_the_same_micro_steps(trained):
    for rank in trained:
        assert [b["sync"] for b in rank["batches"]] == [False, True] * (len(rank["batches"]) // 2)


def test_ranks_that_disagree_are_all_told_which_rank_and_field(trained):
    for rank in trained:
        assert "the seed of rank 1 is 1 and that of rank 0 is 0" in rank["disagreement"]["seed"]
        assert "the plan of rank 1 is {" in rank["disagreement"]["plan"]


def test_the_plain_prepare_route_shards_every_epoch_without_loss_or_repetition(trained):
    for epoch in range(2):
        ranks = [rank["plain"][epoch] for rank in trained]
        assert len(ranks[0]) == len(ranks[1])
        assert sorted(chain(*ranks[0], *ranks[1])) == list(range(SAMPLES))
    assert trained[0]["plain"][0] != trained[0]["plain"][1]


def test_three_ranks_finish_the_epoch_that_two_began(trained, folder):
    resumed = on_ranks(3, "resume", folder)
    began = counted([b for rank in trained for b in rank["batches"][:6]])
    assert {(rank["first_step"], rank["epoch"]) for rank in resumed} == {(3, 1)}
    assert len({len(rank["batches"]) for rank in resumed}) == 1
    rest = counted([b for rank in resumed for b in rank["batches"]])
    assert sorted(began + rest) == list(range(SAMPLES))


def test_a_bad_sample_on_one_rank_ends_the_whole_run_soon(folder):
    start = time.monotonic()
    result = torchrun(2, "loader_on_ranks.py", "fail", folder)
    assert result.returncode != 0
    assert "UserError: sample" in result.stderr and "holds a NaN" in result.stderr
    assert time.monotonic() - start < 60


def test_context_parallel_peers_get_the_same_batches(folder):
    result = launch(HERE / "loader_on_ranks.py", "peers", folder)
    assert result.returncode == 0, result.stderr[-3000:]
    first, second = results(2, "peers", folder)
    assert first == second
    assert first["world_size"] == 1
    assert sorted(counted(first["batches"])) == list(range(SAMPLES))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_gradient_of_two_uneven_ranks_is_that_of_one_process_on_the_union(tmp_path, strategy):
    script = "gradient_on_ranks.py"
    result = torchrun(2, script, tmp_path) if strategy == "ddp" else launch(HERE / script, tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (found["strategy"], found["ranks"]) == (strategy, 2)
        for normalization in ("token", "sample"):
            assert found[normalization]["uneven"] and found[normalization]["update_steps"] >= 4
            assert found[normalization]["difference"] <= 1e-10
