"""Through real processes: ranks share an epoch exactly, agree or end together, and sum to the right gradient."""

import sys
import time
from itertools import chain
from pathlib import Path

import pytest
from support import loader_ranks, union_gradient
from support.accelerators import FSDP2
from support.launch import run
from support.worlds import on_ranks
from torch.multiprocessing import ProcessRaisedException

pytestmark = pytest.mark.distributed

SAMPLES = loader_ranks.SAMPLES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def trained(folder):
    return on_ranks(2, loader_ranks.share, folder)


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


def test_what_workers_draw_differs_from_rank_to_rank(trained):
    draws = [draw for rank in trained for batch in rank["batches"] for draw in batch["draws"]]
    assert len(set(draws)) == len(draws) >= 2 * SAMPLES


def test_the_plain_prepare_route_shards_every_epoch_without_loss_or_repetition(trained):
    for epoch in range(2):
        ranks = [rank["plain"][epoch] for rank in trained]
        assert len(ranks[0]) == len(ranks[1])
        assert sorted(chain(*ranks[0], *ranks[1])) == list(range(SAMPLES))
    assert trained[0]["plain"][0] != trained[0]["plain"][1]


def test_three_ranks_finish_the_epoch_that_two_began(trained, folder):
    resumed = on_ranks(3, loader_ranks.finish, folder)
    began = counted([b for rank in trained for b in rank["batches"][:6]])
    assert {(rank["first_step"], rank["epoch"]) for rank in resumed} == {(3, 1)}
    assert len({len(rank["batches"]) for rank in resumed}) == 1
    rest = counted([b for rank in resumed for b in rank["batches"]])
    assert sorted(began + rest) == list(range(SAMPLES))


def test_a_plain_dataloader_whose_sampler_is_for_other_ranks_or_accumulation_does_not_train():
    runs = [(2, 2), (1, 2), (4, 2), (2, 1), (2, 4)]
    right, *wrong = zip(*on_ranks(2, loader_ranks.plain_mistakes, runs))
    assert sum(right) == SAMPLES
    for (world_size, accumulation), messages in zip(runs[1:], wrong):
        for message in messages:
            assert f"made for {world_size} data ranks and {accumulation} gradient_accumulation_steps, but" in message
            assert "accelerate runs 2 data ranks and accumulates 2 micro-steps. Make it with world_size=2, " in message


def test_ranks_that_disagree_are_all_told_which_rank_and_field():
    first, second = on_ranks(2, loader_ranks.disagreements)
    assert first == second
    named = {**{way: way for way in first}, "files": "dataset", "repeats": "dataset"}
    assert len(first) == 12
    for way, message in first.items():
        assert f"the {named[way]} of rank 1 is " in message, way
    assert first["plan"].endswith("config and arguments. Where GPUs differ in memory, give memory_limit_gib.")
    assert "the seed of rank 1 is 1 and that of rank 0 is 0." in first["seed"]
    assert "the first_micro_step of rank 1 is 4 and that of rank 0 is 0." in first["first_micro_step"]


def test_a_rank_that_waits_long_for_the_others_says_what_they_must_do():
    waiting, late = on_ranks(2, loader_ranks.one_rank_is_late)
    assert "make and iterate each BucketDataLoader on all ranks, one for validation too." in waiting
    assert late == ""


def test_a_rank_that_fails_before_the_ranks_compare_ends_the_others_with_its_reason():
    with pytest.raises(ProcessRaisedException, match="the dataset has 91 samples, shapes 92"):
        on_ranks(2, loader_ranks.one_rank_without_data)


def test_a_bad_sample_on_one_rank_ends_the_whole_run_soon():
    script = Path(__file__).parent / "bad_sample_on_rank_1.py"
    start = ["env", "ACCELERATE_USE_CPU=true", sys.executable, "-m", "torch.distributed.run", "--standalone"]
    began = time.monotonic()
    result = run([*start, "--nproc_per_node", 2, script], timeout=120)
    assert result.returncode != 0
    assert "UserError: sample" in result.stderr and "holds a NaN" in result.stderr
    assert time.monotonic() - began < 60


MESHES = [
    ({"dp_shard_size": 2, "cp_size": 2}, 2),
    ({"dp_shard_size": 2, "tp_size": 2}, 2),
    ({"dp_replicate_size": 2, "dp_shard_size": 2}, 4),
    ({"cp_size": 4}, 1),
]


@pytest.mark.parametrize(("sizes", "world_size"), MESHES, ids=str)
def test_on_four_ranks_peers_get_the_same_batches_and_data_ranks_share_the_epoch(sizes, world_size):
    ranks = on_ranks(4, loader_ranks.parallel, sizes, **FSDP2)
    shares = {}
    for rank in ranks:
        place = (rank["place"].get("dp_replicate", 0), rank["place"].get("dp_shard", 0))
        assert rank["rank"] == place[0] * sizes.get("dp_shard_size", 1) + place[1]
        assert rank["world_size"] == world_size
        assert shares.setdefault(rank["rank"], rank["batches"]) == rank["batches"]
        assert rank["plain"], "accelerate deals a prepared DataLoader otherwise"
        if world_size < 4:
            assert (
                f"made for 4 data ranks and 2 gradient_accumulation_steps, but accelerate runs {world_size} "
                in (rank["refused"])
            )
    assert sorted(shares) == list(range(world_size))
    assert sorted(chain(*map(counted, shares.values()))) == list(range(SAMPLES))


@pytest.mark.parametrize(
    ("world_size", "strategy"), [(1, "single"), (2, "ddp"), (4, "ddp"), (1, "fsdp2"), (2, "fsdp2")]
)
def test_the_gradient_of_uneven_ranks_is_that_of_one_process_on_the_union(world_size, strategy):
    check_gradients(world_size, strategy, {})


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        pytest.param("fsdp2", {}, marks=pytest.mark.slow),  # as two ranks, above
        ("hsdp", {"dp_replicate_size": 2, "dp_shard_size": 2}),
    ],
)
def test_the_gradient_of_four_sharded_ranks_is_that_of_one_process_on_the_union(strategy, sizes):
    check_gradients(4, strategy, sizes)


def check_gradients(world_size, strategy, sizes):
    environment = FSDP2 if strategy in ("fsdp2", "hsdp") else {}
    main, *_ = on_ranks(world_size, union_gradient.compare, sizes, timeout=120, **environment)
    assert (main["strategy"], main["ranks"]) == (strategy, world_size)
    found = main["found"]
    assert len(found) == 8
    assert all(case["steps"] == 2 for case in found.values())
    assert any(case["padding"] for case in found.values())
    assert any(case["uneven"] for case in found.values()) == (world_size > 1)
    assert {name: case["difference"] for name, case in found.items() if not case["difference"] <= 1e-10} == {}
