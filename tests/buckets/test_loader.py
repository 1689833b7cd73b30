"""BucketDataLoader in one process: batches, epochs, counters, workers, errors."""

import gc
import itertools
import multiprocessing
import time
import types
from itertools import chain

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from support.bucketed import (
    COST,
    CountedConfig,
    NumberedRows,
    collate_numbers,
    collate_with_memory,
    fixed_plan,
    mixed_index,
)
from support.prepared import save_prepared
from support.worlds import start_server
from torch.utils.data import DataLoader

from adaptiveload_hf.buckets.loader import BucketDataLoader
from adaptiveload_hf.buckets.ranks import data_rank_and_size
from adaptiveload_hf.buckets.sampler import BucketBatchSampler
from adaptiveload_hf.buckets.sources import load_prepared
from adaptiveload_hf.errors import UserError

COUNTS = (30, 14, 9, 4)


@pytest.fixture(autouse=True)
def fresh_accelerate():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make(accumulation=2, counts=COUNTS, collate_fn=collate_numbers, **options):
    accelerator = options.pop("accelerator", None) or Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    shapes = options.pop("shapes", mixed_index(counts))
    dataset = options.pop("dataset", None) or NumberedRows(len(shapes.bucket_of_sample))
    return BucketDataLoader(
        dataset, CountedConfig(), accelerator=accelerator, shapes=shapes, collate_fn=collate_fn, **options
    )


def collate_until_7(rows):
    return {"number": [next(number for number in (row["number"],) if number != 7) for row in rows]}


def numbers(batches):
    return [batch["number"].tolist() for batch in batches]


def test_an_epoch_hands_out_every_sample_once_with_its_bucket_and_weight():
    loader = make()
    schedule = loader.schedule
    batches = list(loader)
    assert sorted(chain(*numbers(batches))) == list(range(sum(COUNTS)))
    assert len(batches) == schedule.num_micro_steps
    for step, batch in enumerate(batches):
        assert batch["micro_step"] == step
        assert batch["sample_index"].tolist() == batch["number"].tolist() == schedule.micro_batch(step, 0).tolist()
        assert batch["bucket"] == str(loader.plan.shapes[schedule.bucket[step]])
        assert type(batch["loss_weight"]) is float and batch["loss_weight"] == schedule.loss_weight[step]


def test_prepared_rows_arrive_as_tensors(tmp_path):
    dataset = load_prepared(save_prepared(tmp_path, {"1x4x4": 9, "3x4x4": 4}, channels=3))
    accelerator = Accelerator(cpu=True)
    loader = BucketDataLoader(dataset, CountedConfig(), accelerator=accelerator)
    for batch in loader:
        assert batch["latent"].shape[1:] == (3, *map(int, batch["bucket"].split("x")))
        assert batch["caption"] == [f"sample {index}" for index in batch["sample_index"]]


def test_the_epoch_advances_by_itself_and_an_equal_set_epoch_does_nothing():
    loader = make()
    first = numbers(loader)
    assert loader.epoch == 1
    loader.set_epoch(1)
    second = numbers(loader)
    assert loader.epoch == 2 and first != second
    loader.set_epoch(0)
    assert numbers(loader) == first


def test_leaving_the_loop_at_the_last_batch_still_ends_the_epoch():
    loader = make()
    for batch in loader:
        assert loader.epoch == 0
        if batch["micro_step"] == len(loader) - 1:
            break
    assert loader.epoch == 1
    assert next(iter(loader))["micro_step"] == 0
    assert loader.epoch == 1


def test_an_interrupted_loop_goes_on_where_it_stopped():
    loader = make(num_workers=2, persistent_workers=True, prefetch_factor=3)
    whole = numbers(make())
    found = []
    for batch in loader:
        found += numbers([batch])
        if len(found) == 4:
            break
    assert found + numbers(loader) == whole


@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_synchronise_after_every_k_micro_steps_in_every_epoch(accumulation):
    loader = make(accumulation)
    model = torch.nn.Linear(1, 1)
    for _ in range(2):
        pattern = []
        for _ in loader:
            with loader.accelerator.accumulate(model):
                pattern.append(loader.accelerator.sync_gradients)
        assert pattern == ([False] * (accumulation - 1) + [True]) * (len(pattern) // accumulation)


def test_gradients_synchronise_on_the_schedules_optimizer_steps_after_leaving_inside_one():
    loader = make(accumulation=3)
    model = torch.nn.Linear(1, 1)
    for leave in ("break", "set_epoch"):
        for batch in loader:
            with loader.accelerator.accumulate(model):
                pass
            if batch["micro_step"] % 3 == 0:
                break
        if leave == "set_epoch":
            loader.set_epoch(5)
        for batch in loader:
            with loader.accelerator.accumulate(model):
                assert loader.accelerator.sync_gradients == (batch["micro_step"] % 3 == 2)


def test_validation_inside_an_optimizer_step_leaves_its_count_alone():
    loader, model = make(accumulation=3), torch.nn.Linear(1, 1)
    held_out = make(accumulation=3, counts=(9,), accelerator=loader.accelerator)
    for batch in loader:
        with loader.accelerator.accumulate(model):
            assert loader.accelerator.sync_gradients == (batch["micro_step"] % 3 == 2)
        if batch["micro_step"] % 2:
            assert len(list(held_out)) == 3


@pytest.mark.parametrize("begun", ["before training", "in its first micro-step", "inside an optimizer step"])
@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_a_validation_that_is_held_open_leaves_the_count_of_training_alone(kind, begun):
    """Read by one batch now and then, for ever, so that it also stays at its last batch for several micro-steps."""
    loader, model = make(accumulation=3), torch.nn.Linear(1, 1)
    if kind == "ours":
        held_out = make(accumulation=3, counts=(9,), accelerator=loader.accelerator)
    else:
        held_out = loader.accelerator.prepare(DataLoader(NumberedRows(9), batch_size=3))
    read = chain.from_iterable(itertools.repeat(held_out))
    if begun == "before training":
        next(read)
    for _ in range(2):
        for number, batch in enumerate(loader):
            if number >= (begun == "inside an optimizer step") and number % 4 < 2:
                next(read)
            with loader.accelerator.accumulate(model):
                assert loader.accelerator.sync_gradients == (batch["micro_step"] % 3 == 2)
    del read


def test_another_accumulation_than_the_schedules_is_refused():
    loader = make(accumulation=2)
    loader.accelerator.gradient_accumulation_steps = 3
    with pytest.raises(UserError, match=r"1 data ranks and 2 gradient_accumulation_steps, but accelerate runs 1 .* 3"):
        next(iter(loader))


def test_the_global_step_counts_optimizer_steps_over_epochs():
    loader = make(accumulation=2)
    seen = []
    for _ in range(2):
        for _ in loader:
            seen.append(loader.global_step)
    assert seen == [(i + 1) // 2 for i in range(len(seen))]
    assert loader.global_step == len(seen) // 2


@pytest.mark.parametrize("repeats", [None, np.random.default_rng(0).uniform(0.2, 2, sum(COUNTS))])
def test_the_number_of_update_steps_is_what_the_epochs_take(repeats):
    loader = make(accumulation=3, repeats=repeats)
    planned = loader.global_step_after(3)
    assert loader.global_step_after(1) == loader.schedule.num_update_steps
    for _ in range(3):
        for _ in loader:
            assert loader.global_step_after(3) == planned
    assert loader.global_step == planned == loader.global_step_after(3)


@pytest.mark.parametrize("absent", range(len(COUNTS)))
def test_a_shape_whose_samples_never_occur_is_in_no_plan_and_one_that_hardly_does_counts_as_one(absent):
    index = mixed_index(COUNTS)
    rare = (absent + 1) % len(COUNTS)
    share = np.where(np.arange(len(COUNTS)) == absent, 0.0, np.where(np.arange(len(COUNTS)) == rare, 0.01, 1.0))
    loader = make(shapes=index, repeats=share[index.bucket_of_sample])
    shapes = [shape for bucket, shape in enumerate(index.shapes) if bucket != absent]
    assert list(loader.plan.shapes) == shapes
    assert [bucket.count for bucket in loader.plan.buckets if bucket.shape == index.shapes[rare]] == [1]
    for batch in loader:
        assert {str(index.shapes[index.bucket_of_sample[number]]) for number in batch["number"]} == {batch["bucket"]}


def test_the_loader_draws_nothing_from_the_global_generator():
    loader = make(num_workers=1)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    numbers(loader)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_plan_is_made_for_the_loaders_own_dealing():
    assert [make(balance=balance).plan.balance for balance in ("none", "window:2")] == ["none", "window:2"]


def test_given_batch_sizes_override_the_plan():
    loader = make(batch_sizes={"1x4x6": 3})
    assert loader.plan.batch_size_of("1x4x6") == 3
    assert {len(batch["number"]) for batch in loader if batch["bucket"] == "1x4x6"} <= {2, 3}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_nan_latent_is_one_users_error_without_a_workers_traceback(tmp_path, workers):
    dataset = load_prepared(save_prepared(tmp_path, {"1x4x4": 9, "3x4x4": 4}, channels=3, nan_in=6))
    loader = BucketDataLoader(dataset, CountedConfig(), accelerator=Accelerator(cpu=True), num_workers=workers)
    with pytest.raises(UserError) as caught:
        list(loader)
    assert str(caught.value).startswith("The latent of sample 6 (6.mp4) has NaN or infinite values.")
    assert "Traceback" not in str(caught.value)


@pytest.fixture
def start_method(request):
    before = multiprocessing.get_start_method()
    if request.param == "forkserver":
        start_server()
    multiprocessing.set_start_method(request.param, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
# Workers of a forkserver are sent the same things as spawned ones, and import nothing anew.
@pytest.mark.parametrize(
    "start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"], indirect=True
)
def test_workers_started_in_any_way_give_the_same_batches_and_hold_no_copy_of_a_large_schedule(start_method):
    loader = make(counts=(900_000, 90_000, 10_000), collate_fn=collate_with_memory, num_workers=4)
    memory = {}
    for step, batch in enumerate(loader):
        assert batch["numbers"] == loader.schedule.micro_batch(step, 0).tolist()
        if "mib" in batch:
            memory.setdefault(batch["worker"], []).append((step, batch["mib"]))
        if step == 5000:
            break
    assert sorted(memory) == [0, 1, 2, 3]
    for seen in memory.values():
        assert max(mib for _, mib in seen) < 150
        early = max(mib for step, mib in seen if 500 <= step < 1500)
        assert max(mib for step, mib in seen if step >= 4000) < early + 10


@pytest.mark.parametrize("start_method", ["spawn"], indirect=True)
def test_a_local_collate_function_is_refused_before_training(start_method):
    with pytest.raises(UserError, match="collate_fn cannot be sent to workers"):
        make(num_workers=1, collate_fn=lambda rows: {})


def test_a_collate_function_must_return_a_dict():
    with pytest.raises(UserError, match="must return a dict, but returned list"):
        list(make(collate_fn=list))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_next_that_finds_nothing_in_a_collate_function_does_not_end_the_epoch(workers):
    loader = make(collate_fn=collate_until_7, num_workers=workers)
    with pytest.raises(UserError, match=r"raised StopIteration for the samples \[.*\b7\b.*\]: a next"):
        list(loader)


def test_the_epoch_must_not_change_inside_the_loaders_own_loop():
    loader = make()
    with pytest.raises(UserError, match="changed inside the loader's own loop"):
        for _ in loader:
            loader.set_epoch(7)


def test_a_loop_does_not_go_on_after_another_was_begun():
    loader = make()
    first, second = iter(loader), iter(loader)
    begun = [next(first), next(second)]
    with pytest.raises(UserError, match="another loop begun"):
        next(first)
    seen = [*begun, *second]
    assert sorted(chain(*numbers(seen))) == list(range(sum(COUNTS)))
    assert all(batch["sample_index"].tolist() == batch["number"].tolist() for batch in seen)


def test_dropping_a_loader_does_not_wait_for_its_workers():
    loader = make(num_workers=2, persistent_workers=True)
    next(iter(loader))
    start = time.monotonic()
    del loader
    gc.collect()
    assert time.monotonic() - start < 4


def test_wrong_arguments_are_refused():
    with pytest.raises(UserError, match="on_dataset_change is 'error' or 'new_epoch', but found 'ignore'"):
        make(on_dataset_change="ignore")
    with pytest.raises(UserError, match="the dataset has 5 samples, shapes 57"):
        make(dataset=NumberedRows(5))
    for repeats in ([1.0] * 5, np.full(57, np.nan)):
        with pytest.raises(UserError, match="repeats must be 57 numbers of at least 0"):
            make(repeats=repeats)
    right = {"dataset": [1], "config": CountedConfig(), "accelerator": Accelerator(cpu=True)}
    for argument, value, words in (
        ("dataset", iter(()), "rows by index; of a streaming dataset .*, but it is tuple_iterator"),
        ("dataset", DataLoader([1]), "rows by index; of a streaming dataset .*, but it is DataLoader"),
        ("config", "config", r"a BucketConfig, such as .*from_pretrained\(FOLDER\), but it is str 'config'"),
        ("accelerator", None, r"the run's Accelerator, such as make_accelerator\(\), but it is NoneType"),
        ("shapes", [1, 2], r"a BucketIndex, such as index_shapes\(sizes\), but it is list"),
    ):
        with pytest.raises(UserError, match=f"{argument} must be {words}"):
            BucketDataLoader(**right | {argument: value})
    with pytest.raises(UserError, match=r"does not take batch_size, shuffle\. The plan sets .*allow_extrapolation\."):
        BucketDataLoader(**right, batch_size=4, shuffle=True)
    with pytest.raises(UserError, match="8 micro-steps, but the dataset has 5 samples"):
        make(accumulation=8, counts=(5,))


def sampler(**options):
    return BucketBatchSampler(
        mixed_index(COUNTS).bucket_of_sample, fixed_plan(COUNTS, (4, 2, 2, 1), 2, 2), COST, world_size=2, **options
    )


def test_a_plain_dataloader_refuses_to_lose_the_loss_weights():
    with pytest.raises(UserError, match=r"carry no loss weight, which loss_normalization='token' needs"):
        next(iter(DataLoader(NumberedRows(sum(COUNTS)), batch_sampler=sampler())))


@pytest.mark.parametrize("options", [{"caller_weights_loss": True}, {"loss_normalization": "none"}])
def test_a_plain_dataloader_gets_every_micro_batch_in_schedule_order(options):
    batches = sampler(**options)
    assert not hasattr(batches, "batch_size") and batches.sampler is batches
    found = [batch["number"].tolist() for batch in DataLoader(NumberedRows(57), batch_sampler=batches)]
    schedule = batches.schedule
    ranks = [list(batches.for_rank(rank)) for rank in range(2)]
    assert found == [ranks[j % 2][j // 2] for j in range(len(batches))]
    assert len(found) == len(batches) == 2 * len(batches.for_rank(0)) == 2 * schedule.num_micro_steps
    assert batches.loss_weight(3, 1) == schedule.loss_weight[7]
    batches.set_epoch(1)
    assert batches.schedule.digest != schedule.digest


def test_tensor_and_context_parallel_peers_share_a_data_rank():
    for process, expected in enumerate([(0, 3), (0, 3), (1, 3), (1, 3), (2, 3), (2, 3)]):
        parallelism = types.SimpleNamespace(non_data_parallel_size=2)
        run = types.SimpleNamespace(process_index=process, num_processes=6, parallelism_config=parallelism)
        assert data_rank_and_size(run) == expected
    plain = types.SimpleNamespace(process_index=3, num_processes=4, parallelism_config=None)
    assert data_rank_and_size(plain) == (3, 4)
