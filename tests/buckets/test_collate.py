"""Rows become tensors bit for bit, and a bad row is named."""

import multiprocessing
import pickle

import datasets
import pytest
import torch
from support.prepared import save_prepared

from adaptiveload_hf.buckets.collate import BatchReader, Failure, check_workers, collate_prepared
from adaptiveload_hf.buckets.sources import load_prepared
from adaptiveload_hf.errors import UserError


@pytest.fixture
def dataset(tmp_path):
    return load_prepared(save_prepared(tmp_path, {"2x4x6": 5}, channels=3))


def rows_of(dataset, **changed):
    """Three rows with their indices; `changed` replaces values of the middle one."""
    rows = [{**dataset[i], "sample_index": i} for i in range(3)]
    rows[1].update(changed)
    return rows


def test_latents_and_embeddings_come_back_bit_for_bit(dataset):
    batch = BatchReader(dataset, collate_prepared).__getitems__([4, 1])
    assert batch["latent"].shape == (2, 3, 2, 4, 6) and batch["latent"].dtype == torch.bfloat16
    assert batch["prompt_embeds"].shape == (2, 8, 32)
    assert batch["latent_normalized"] is True
    for position, index in enumerate([4, 1]):
        for column in ("latent", "prompt_embeds"):
            stored = torch.frombuffer(bytearray(dataset[index][column]), dtype=torch.bfloat16)
            assert torch.equal(batch[column][position].flatten(), stored)
        assert batch["caption"][position] == dataset[index]["caption"]


def test_a_latent_with_nan_or_infinity_is_named_with_its_file(tmp_path):
    dataset = load_prepared(save_prepared(tmp_path, {"2x4x6": 5}, channels=3, nan_in=3))
    found = BatchReader(dataset, collate_prepared).__getitems__([1, 3])
    assert isinstance(found, Failure)
    assert found.message.startswith("The latent of sample 3 (3.mp4) has NaN or infinite values.")
    row = dataset[0]
    infinite = torch.full((8, 32), float("inf"), dtype=torch.bfloat16)
    row["prompt_embeds"] = infinite.view(torch.uint8).numpy().tobytes()
    with pytest.raises(UserError, match=r"prompt_embeds of sample \? \(0.mp4\) has NaN or infinite"):
        collate_prepared([row])


def test_the_last_row_of_a_caption_is_looked_at_too_and_the_zeros_after_it_are_not(dataset):
    embeds = torch.zeros(8, 32, dtype=torch.bfloat16)
    embeds[5, 31] = float("nan")
    row = {**dataset[0], "prompt_embeds": embeds.view(torch.uint8).numpy().tobytes()}
    with pytest.raises(UserError, match=r"prompt_embeds of sample .* has NaN or infinite"):
        collate_prepared([{**row, "prompt_rows": 6}])
    collate_prepared([{**row, "prompt_rows": 5}])


def test_bytes_that_do_not_match_the_shape_are_named(dataset):
    with pytest.raises(UserError, match=r"latent of sample 1 \(1.mp4\) should have 288 bytes .* has 286"):
        collate_prepared(rows_of(dataset, latent=dataset[1]["latent"][:-2]))


def test_rows_of_two_shapes_are_refused(dataset):
    with pytest.raises(UserError, match=r"sample 0 \(0.mp4\) has .* and sample 1 \(1.mp4\) has .*\(3, 2, 6, 4\)"):
        collate_prepared(rows_of(dataset, latent_shape=[3, 2, 6, 4]))


def test_normalised_and_raw_latents_do_not_mix(dataset):
    with pytest.raises(UserError, match=r"holds normalised and raw latents: sample 0 .* sample 1"):
        collate_prepared(rows_of(dataset, latent_normalized=False))


def test_an_unknown_dtype_is_refused(dataset):
    rows = [{**row, "latent_dtype": "int4"} for row in rows_of(dataset)]
    with pytest.raises(UserError, match=r"latent_dtype is one of .* sample 0 .* 'int4'"):
        collate_prepared(rows)


def test_rows_that_are_no_dicts_reach_the_callers_collate_unchanged():
    assert BatchReader(["a", "b", "c"], lambda rows: {"rows": rows}).__getitems__([2, 0]) == {"rows": ["c", "a"]}


def test_an_error_that_is_no_users_mistake_is_not_swallowed():
    with pytest.raises(IndexError):
        BatchReader(["a"], list).__getitems__([5])


def test_what_a_worker_receives_is_small(tmp_path):
    # A table on disk is sent by its path: 100,000 rows cost no more than 100.
    datasets.Dataset.from_dict({"number": list(range(100_000))}).save_to_disk(str(tmp_path))
    reader = BatchReader(datasets.load_from_disk(str(tmp_path)), collate_prepared)
    assert len(pickle.dumps(reader)) < 50_000


@pytest.fixture
def spawn():
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def test_a_collate_function_or_dataset_that_cannot_be_sent_to_workers_is_refused(spawn, dataset):
    with pytest.raises(UserError, match=r"collate_fn cannot be sent .* with 'spawn': .* at the top level"):
        check_workers(1, False, None, dataset, lambda rows: rows)
    with pytest.raises(UserError, match=r"the dataset cannot be sent to workers started with 'spawn'"):
        check_workers(1, False, None, dataset.with_transform(lambda rows: rows), collate_prepared)
    check_workers(1, False, None, dataset, collate_prepared)


def test_forked_workers_take_any_collate_function(dataset):
    if multiprocessing.get_start_method() != "fork":
        pytest.skip("this platform does not fork")
    check_workers(1, False, None, dataset, lambda rows: rows)
