"""Rows that are read together are a batch already: stacking copies nothing, and what is not alike is still right."""

import pytest
import torch
from support.caches import latent, save_musubi
from torch.utils.data import DataLoader

from adaptiveload_hf.buckets.collate import BatchReader, collate_prepared, keep
from adaptiveload_hf.buckets.row_bytes import RowMemory, stack_bytes
from adaptiveload_hf.buckets.sources import load_latent_folder
from adaptiveload_hf.errors import UserError


@pytest.fixture
def clips():
    return [latent(3) + number for number in range(3)]


@pytest.fixture
def dataset(tmp_path, clips):
    for number, clip in enumerate(clips):
        caption = torch.full((1 + number, 8), float(number)).bfloat16()
        save_musubi(tmp_path, f"clip{number}", clip, caption, cut="00000-009")
    return load_latent_folder(tmp_path, latent_normalized=True, prompt_length=4)[0]


def test_rows_of_one_memory_are_stacked_without_a_copy():
    memory = RowMemory({"a": 3, "b": 1})
    first, other, second = (memory.take(bucket, "latent", "uint8", 8) for bucket in ("a", "b", "a"))
    stacked = stack_bytes([first, second])
    second[0] = 7
    assert stacked.shape == (2, 8) and stacked[1, 0] == 7 and stacked.data_ptr() == first.data_ptr()
    other[0] = 9
    for parts in ([second, first], [first, first], [first, other], [first, bytes(range(8))]):
        assert stack_bytes(parts).tolist() == [list(part) for part in parts]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_has_the_tensors_of_its_rows_in_any_order(dataset, clips, workers):
    loader = DataLoader(
        BatchReader(dataset, collate_prepared),
        batch_sampler=[[2, 0], [1], [0, 1, 2], [1, 1]],
        collate_fn=keep,
        num_workers=workers,
    )
    for rows, batch in zip(loader.batch_sampler, loader, strict=True):
        assert torch.equal(batch["latent"], torch.stack([clips[row] for row in rows]))
        assert batch["prompt_embeds"].shape == (len(rows), 4, 8)
        for row, caption in zip(rows, batch["prompt_embeds"]):
            assert caption[: 1 + row].eq(row).all() and caption[1 + row :].count_nonzero() == 0
        assert batch["latent"].is_shared() == bool(workers)


def test_rows_of_several_shapes_that_are_read_together_keep_their_own_bytes(tmp_path):
    stored = {f"clip{number}": latent(1 + number % 2) + number for number in range(4)}
    for name, tensor in stored.items():
        save_musubi(tmp_path, name, tensor, cut="00000-009")
    dataset, _ = load_latent_folder(tmp_path, latent_normalized=True)
    rows = dataset[0:4]
    for name, shape, content in zip(stored, rows["latent_shape"], rows["latent"], strict=True):
        assert torch.equal(content.view(torch.bfloat16).view(shape), stored[name])


def test_a_nan_in_the_last_row_of_a_caption_is_found(tmp_path):
    caption = torch.zeros(3, 8).bfloat16()
    caption[2, 7] = float("nan")
    save_musubi(tmp_path, "a", latent(3), caption, cut="00000-009")
    dataset, _ = load_latent_folder(tmp_path, latent_normalized=True, prompt_length=5)
    assert dataset[0]["prompt_rows"] == 3
    with pytest.raises(UserError, match=r"prompt_embeds of sample \? \(a_.*\) has NaN or infinite values"):
        collate_prepared([dataset[0]])
