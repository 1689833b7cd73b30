"""A ledger of every sample that every rank got, through interruptions under ever other worlds, plans and balances."""

import json
import types

import numpy as np
import pytest
import torch
from accelerate.state import GradientState
from accelerate.utils import DistributedType
from support.accelerators import forget_run
from support.bucketed import COST, CountedConfig, NumberedRows, collate_numbers, fixed_plan, mixed_index

from adaptiveload_hf.buckets.loader import BucketDataLoader
from adaptiveload_hf.buckets.schedule import schedule_epoch

COUNTS = (200, 100, 50, 10)
SAMPLES = sum(COUNTS)
INTERRUPTIONS, EPOCHS = 20, 3


@pytest.fixture(autouse=True)
def fresh_accelerate():
    forget_run()
    yield
    forget_run()


def make_rank(rank, world_size, accumulation, **options):
    """The loader of one rank. All ranks live in this process: of its accelerator a loader asks but a few values."""
    accelerator = types.SimpleNamespace(
        process_index=rank,
        is_main_process=rank == 0,
        distributed_type=DistributedType.NO,
        num_processes=world_size,
        parallelism_config=None,
        gradient_accumulation_steps=accumulation,
        gradient_state=GradientState(),
        step=0,
        device=torch.device("cpu"),
        device_placement=False,
        register_for_checkpointing=lambda loader: None,
        _custom_objects=[],
        _schedulers=[],
        _optimizers=[],
    )
    index = mixed_index(COUNTS)
    rows = NumberedRows(SAMPLES)
    return BucketDataLoader(
        rows, CountedConfig(), accelerator=accelerator, shapes=index, collate_fn=collate_numbers, **options
    )


def random_settings(random):
    options = {
        "batch_sizes": {"1x4x6": int(random.integers(1, 9)), "2x4x8": int(random.integers(1, 5))},
        "balance": str(random.choice(["none", "step", "stratified:2", "window:2", "auto"])),
        "loss_normalization": str(random.choice(["token", "sample", "none"])),
        "target_seconds": float(random.choice([0.15, 0.2, 0.4])),
    }
    return int(random.integers(1, 6)), int(random.integers(1, 4)), options


def train(loaders, update_steps, ledger):
    """At most update_steps optimizer steps of the current epoch on all ranks; writes down what they got."""
    epoch, stop = loaders[0].epoch, loaders[0].global_step + update_steps
    for batches in zip(*loaders):
        for batch in batches:
            ledger[epoch].extend(batch["number"].tolist() if batch["loss_weight"] > 0 else [])
        if loaders[0].global_step == stop:
            break


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_twenty_interruptions_with_other_ranks_accumulation_plan_and_balance_lose_and_repeat_no_sample(seed, repeated):
    random = np.random.default_rng(seed)
    repeats = random.uniform(0, 2, SAMPLES) if repeated else None
    ledger = [[] for _ in range(EPOCHS)]
    state, worlds, interrupted = None, set(), []
    for interruption in range(INTERRUPTIONS + 1):
        world_size, accumulation, options = random_settings(random)
        ranks = [
            make_rank(rank, world_size, accumulation, repeats=repeats, seed=seed, **options)
            for rank in range(world_size)
        ]
        if state is not None:
            for loader in ranks:
                loader.load_state_dict(json.loads(state))
        planned = ranks[0].global_step_after(EPOCHS)
        steps = -(-(planned - ranks[0].global_step) // (INTERRUPTIONS + 1 - interruption))
        train(ranks, steps, ledger)
        states = {json.dumps(loader.state_dict()) for loader in ranks}
        assert len(states) == 1, "the state depends on the rank"
        state = states.pop()
        interrupted.append(json.loads(state)["epoch"])
        worlds.add((world_size, accumulation))
    while ranks[0].epoch < EPOCHS:
        train(ranks, planned, ledger)
    assert ranks[0].global_step == planned
    assert set(interrupted) >= set(range(EPOCHS)) and len(worlds) > 5
    for epoch, found in enumerate(ledger):
        expected = schedule_epoch(
            mixed_index(COUNTS).bucket_of_sample,
            fixed_plan(COUNTS, (1, 1, 1, 1), 1, 1),
            COST,
            world_size=1,
            seed=seed,
            epoch=epoch,
            repeats=repeats,
        )
        assert sorted(found) == sorted(expected.unseen().tolist())
        assert repeated or sorted(found) == list(range(SAMPLES))
