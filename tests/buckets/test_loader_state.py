"""A BucketDataLoader resumes exactly: with any workers, through accelerate's checkpoints, under another K or plan."""

import copy
import json

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from support.bucketed import CountedConfig, NumberedRows, collate_numbers, mixed_index

from adaptiveload_hf.buckets.loader import BucketDataLoader
from adaptiveload_hf.errors import UserError

COUNTS = (30, 14, 9, 4)
SAMPLES = sum(COUNTS)


@pytest.fixture(autouse=True)
def fresh_accelerate():
    yield
    forget_run()


def forget_run():
    """As a new process would begin."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make(accumulation=2, counts=COUNTS, seed=0, **options):
    forget_run()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    index = mixed_index(counts, options.pop("order", 0))
    rows = NumberedRows(len(index.bucket_of_sample))
    options.setdefault("collate_fn", collate_numbers)
    return BucketDataLoader(rows, CountedConfig(), accelerator=accelerator, shapes=index, seed=seed, **options)


def dict_of(rows):
    return {"numbers": [row["number"] for row in rows]}


def train(loader, update_steps):
    """Batches (sample numbers, weight, position) of the next update_steps optimizer steps, over epochs."""
    found = []
    stop = loader.global_step + update_steps
    while loader.global_step < stop:
        for batch in loader:
            found.append((batch["number"].tolist(), batch["loss_weight"], batch["micro_step"], loader.epoch))
            if len(found) % loader.schedule.gradient_accumulation_steps == 0 and loader.global_step == stop:
                break
    return found


def samples_of(batches):
    return [sample for numbers, weight, _, _ in batches for sample in numbers if weight > 0]


WORKERS = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("update_steps", [1, 4, 9, 11])
def test_a_resumed_run_hands_out_the_same_batches_as_an_uninterrupted_one(workers, update_steps):
    whole = train(make(**workers), 20)
    loader = make(**workers)
    before = train(loader, update_steps)
    state = loader.state_dict()
    resumed = make(**workers)
    resumed.load_state_dict(state)
    assert resumed.global_step == update_steps
    assert before + train(resumed, 20 - update_steps) == whole


def test_workers_do_not_draw_the_same_again_after_a_resume():
    loader, draws = make(num_workers=1), []
    for _ in range(2):
        for batch in loader:
            draws += batch["draw"].tolist()
            if batch["micro_step"] == 3:
                break
        state = loader.state_dict()
        loader = make(num_workers=1)
        loader.load_state_dict(state)
    assert len(set(draws)) == len(draws) > SAMPLES // 2


def test_a_state_is_plain_values_and_says_where_training_stands():
    loader = make()
    train(loader, 3)
    state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert (state["epoch"], state["global_step"], state["segments"][0]["micro_steps"]) == (0, 3, 6)
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.state_dict() == state


def test_a_seed_of_numpy_is_saved_as_a_plain_number():
    loader = make(seed=np.int64(3))
    train(loader, 2)
    assert json.loads(json.dumps(loader.state_dict()))["seed"] == 3


def test_a_state_at_the_end_of_an_epoch_begins_the_next_one():
    loader = make()
    for _ in loader:
        if loader.end_of_dataloader:
            state = loader.state_dict()
    assert (state["epoch"], state["segments"], state["global_step"]) == (1, [], loader.global_step)
    assert loader.state_dict() == state
    resumed = make()
    resumed.load_state_dict(state)
    assert train(resumed, 3) == train(loader, 3)


def test_a_validation_that_ends_inside_an_optimizer_step_does_not_keep_training_from_saving(tmp_path):
    loader, model = make(accumulation=2), torch.nn.Linear(1, 1)
    held_out = BucketDataLoader(
        NumberedRows(9), CountedConfig(), accelerator=loader.accelerator, shapes=mixed_index((9,)), collate_fn=dict_of
    )
    for batch in loader:
        with loader.accelerator.accumulate(model):
            pass
        if batch["micro_step"] == 3:
            break
    first = next(iter(held_out))
    loader.accelerator.save_state(str(tmp_path))
    loader.accelerator.load_state(str(tmp_path))
    assert loader.global_step == 2 and held_out.global_step == 0
    assert next(iter(held_out))["numbers"] == first["numbers"]


def test_an_equal_set_epoch_after_a_resume_keeps_the_position():
    loader = make()
    train(loader, 3)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(0)
    assert train(resumed, 5) == train(loader, 5)


def test_the_length_is_the_number_of_batches_of_the_next_or_current_loop():
    loader, whole = make(), len(make())
    for number, _ in enumerate(loader):
        assert len(loader) == whole
        if number == 5:
            break
    assert len(loader) == whole - 6
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert [len(resumed) for _ in resumed] == [whole - 6] * (whole - 6)
    assert len(resumed) == len(resumed.schedule.bucket) == whole


def test_accelerates_own_checkpoints_carry_the_loader_and_the_noise(tmp_path):
    def noisy(loader, update_steps):
        return [(numbers, torch.rand(2).tolist()) for step in range(update_steps) for numbers, *_ in train(loader, 1)]

    loader = make(num_workers=2)
    torch.manual_seed(0)
    noisy(loader, 4)
    loader.accelerator.save_state(str(tmp_path))
    rest = noisy(loader, 12)
    resumed = make(num_workers=2)
    resumed.accelerator.load_state(str(tmp_path))
    assert noisy(resumed, 12) == rest


def test_torchs_distributed_checkpoint_keeps_the_state_as_json(tmp_path):
    loader = make()
    seen = train(loader, 3)
    torch.distributed.checkpoint.save({"loader": json.dumps(loader.state_dict())}, checkpoint_id=tmp_path)
    resumed, state = make(), {"loader": ""}
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path)
    resumed.load_state_dict(json.loads(state["loader"]))
    assert resumed.global_step == 3
    rest = train(resumed, resumed.global_step_after(1) - 3)
    assert sorted(samples_of(seen) + samples_of(rest)) == list(range(SAMPLES))


def test_a_loader_that_takes_the_place_of_another_is_saved_and_loaded_in_its_place(tmp_path):
    loader = make()
    train(loader, 2)
    loader.accelerator.register_for_checkpointing(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    accelerator, state = loader.accelerator, loader.state_dict()
    rows, index = loader.dataset, mixed_index(COUNTS)
    loader = BucketDataLoader(
        rows,
        CountedConfig(),
        accelerator=accelerator,
        shapes=index,
        batch_sizes={"1x4x6": 2},
        collate_fn=collate_numbers,
    )
    loader.load_state_dict(state)
    rest = train(loader, 1)
    accelerator.save_state(str(tmp_path))
    loader.set_epoch(7)
    loader.load_checkpoint(tmp_path)
    assert (loader.epoch, loader.global_step) == (0, 3)
    accelerator.load_state(str(tmp_path))
    assert not set(samples_of(rest)) & set(samples_of(train(loader, 2)))


def test_a_checkpoint_that_is_not_there_or_damaged_is_refused_by_name(tmp_path):
    loader = make()
    with pytest.raises(UserError, match=r"state in .*custom_checkpoint_0\.pkl: .*No such file"):
        loader.load_checkpoint(tmp_path)
    loader.accelerator.save_state(str(tmp_path))
    file = tmp_path / "custom_checkpoint_0.pkl"
    whole = file.read_bytes()
    for damaged in (b"", whole[:-40], whole[:9], b"not a checkpoint"):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"Expected a loader's state in .*custom_checkpoint_0\.pkl: .+"):
            loader.load_checkpoint(tmp_path)
    for other, found in (([1], "list"), ({"decay": 0.9}, "a dict of decay")):
        torch.save(other, file)
        with pytest.raises(UserError, match=f"loader state of format 2, but found {found}.* in the order of the run"):
            loader.load_checkpoint(tmp_path)


def test_a_flipped_byte_in_a_checkpoint_is_named_or_changes_nothing(tmp_path):
    loader = make()
    train(loader, 2)
    loader.accelerator.save_state(str(tmp_path))
    file, state = tmp_path / "custom_checkpoint_0.pkl", loader.state_dict()
    whole = file.read_bytes()
    refused = 0
    for position in range(0, len(whole), 11):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 255]) + whole[position + 1 :])
        try:
            loader.load_checkpoint(tmp_path)
        except UserError:
            refused += 1
        assert loader.state_dict() == state, position
    assert refused > 50


def test_accelerate_prepares_the_loader_as_it_is():
    loader = make()
    assert loader.accelerator.prepare(loader) is loader


CHANGES = [
    {"accumulation": 3},
    {"accumulation": 1, "balance": "none"},
    {"batch_sizes": {"1x4x6": 2}},
    {"target_seconds": 0.4},
]


@pytest.mark.parametrize("change", CHANGES)
def test_under_another_accumulation_plan_or_balance_the_rest_of_the_epoch_follows(change):
    loader = make()
    seen = samples_of(train(loader, 4))
    resumed = make(**change)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.global_step == 4
    rest = list(resumed)
    for batch in rest:
        seen += batch["number"].tolist() if batch["loss_weight"] > 0 else []
    assert sorted(seen) == list(range(SAMPLES))
    assert (resumed.epoch, resumed.global_step) == (1, 4 + len(rest) // resumed.schedule.gradient_accumulation_steps)


def test_under_auto_an_epoch_ends_in_the_order_it_was_begun_in():
    sizes = {"batch_sizes": {"1x4x6": 4, "2x4x8": 2, "3x4x10": 1, "5x4x14": 1}, "policy": "fixed"}
    loader = make(balance="none", **sizes)
    train(loader, 2)
    resumed = make(balance="auto", **sizes)
    chosen = resumed.schedule.balance
    resumed.load_state_dict(loader.state_dict())
    assert resumed.schedule.digest == loader.schedule.digest and resumed.schedule.balance == "none" != chosen
    resumed.set_epoch(1)
    assert resumed.schedule.balance == chosen


def test_another_loss_normalization_gives_the_same_batches_new_weights():
    loader = make()
    train(loader, 2)
    resumed, samples = make(loss_normalization="sample"), make(loss_normalization="sample")
    resumed.load_state_dict(loader.state_dict())
    assert resumed.schedule.digest == loader.schedule.digest
    assert (resumed.schedule.loss_weight == samples.schedule.loss_weight).all()
    assert (resumed.schedule.loss_weight != loader.schedule.loss_weight).any()


def test_after_a_resume_accelerate_counts_from_an_optimizer_step_boundary(tmp_path):
    loader = make(accumulation=3)
    model = torch.nn.Linear(1, 1)
    for _ in loader:
        with loader.accelerator.accumulate(model):
            pass
        if loader.global_step == 1:
            break
    assert loader.accelerator.step == 3
    loader.accelerator.save_state(str(tmp_path))
    resumed = make(accumulation=4)
    resumed.accelerator.load_state(str(tmp_path))
    pattern = []
    for _ in resumed:
        with resumed.accelerator.accumulate(model):
            pattern.append(resumed.accelerator.sync_gradients)
    assert pattern == [False, False, False, True] * (len(pattern) // 4)


def test_another_dataset_is_refused_by_name():
    loader = make()
    train(loader, 3)
    for other in ({"counts": (31, 14, 9, 4)}, {"order": 1}, {"repeats": np.ones(SAMPLES)}):
        resumed = make(**other)
        with pytest.raises(UserError, match=r"another dataset: expected 57 samples \w+, found 5\d samples"):
            resumed.load_state_dict(loader.state_dict())


def test_another_dataset_may_begin_a_new_epoch_with_the_global_step_kept():
    loader = make()
    train(loader, 3)
    resumed = make(counts=(31, 14, 9, 4), on_dataset_change="new_epoch")
    resumed.load_state_dict(loader.state_dict())
    assert (resumed.epoch, resumed.global_step) == (1, 3)
    assert resumed.global_step_after(3) == 3 + 2 * resumed.schedule.num_update_steps
    assert sorted(samples_of(train(resumed, resumed.schedule.num_update_steps))) == list(range(SAMPLES + 1))


def test_another_dataset_after_a_whole_epoch_begins_the_next_epoch_and_skips_none():
    loader = make()
    train(loader, loader.global_step_after(1))
    resumed = make(counts=(31, 14, 9, 4), on_dataset_change="new_epoch")
    resumed.load_state_dict(loader.state_dict())
    assert (resumed.epoch, resumed.global_step) == (1, loader.global_step)


def test_another_seed_or_format_is_refused():
    state = make().state_dict()
    with pytest.raises(UserError, match="order has seed 0, but found 7"):
        make(seed=7).load_state_dict(state)
    for other in (1, 9, None):
        with pytest.raises(UserError, match=f"state of format 2, but found {other}"):
            make().load_state_dict({**state, "format_version": other})


def edits(value):
    """Every way to change one number or text of a nested value, and to lose one of its entries."""
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        rest = [(k, v) for k, v in value.items() if k != key] if isinstance(value, dict) else value[:key]
        yield dict(rest) if isinstance(value, dict) else rest
        if isinstance(entry, dict | list):
            changed = edits(entry)
        else:
            changed = [None if entry else 1, f"{entry}0" if isinstance(entry, str) else (entry or 0) + 1]
        for other in changed:
            copied = copy.copy(value)
            copied[key] = other
            yield copied


def test_a_state_with_any_value_edited_or_lost_is_refused():
    loader = make()
    train(loader, 3)
    state = json.loads(json.dumps(loader.state_dict()))
    found = [edited for edited in edits(state) if edited != state]
    assert len(found) > 80
    resumed = make()
    for edited in found:
        with pytest.raises(UserError, match=r"state is not as it was saved: expected checksum|state of format 2"):
            resumed.load_state_dict(edited)
    resumed.load_state_dict(state)
    assert resumed.global_step == 3


def test_a_state_loaded_inside_the_loop_is_refused_even_if_it_leads_to_the_same_epoch():
    loader = make()
    state = loader.state_dict()
    with pytest.raises(UserError, match="changed inside the loader's own loop"):
        for _ in loader:
            loader.load_state_dict(state)
