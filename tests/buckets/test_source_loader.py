"""BucketDataLoader over folders and tar shards of latents: workers of any kind, exact resume, the page's examples."""

import os
import pickle
import re
from pathlib import Path

import datasets
import pytest
import torch
from accelerate import Accelerator
from support.accelerators import fresh_accelerate
from support.bucketed import CountedConfig
from support.caches import latent, sample_members, save_musubi, save_shard
from support.prepared import save_config
from support.preparing import rows_of

from adaptiveload_hf.buckets.collate import collate_prepared
from adaptiveload_hf.buckets.loader import BucketDataLoader
from adaptiveload_hf.buckets.sources import load_latent_folder, load_tar_shards
from adaptiveload_hf.errors import UserError

FRAMES = (1, 3, 1, 1, 2, 1, 3, 1, 2, 1, 1)


@pytest.fixture(autouse=True)
def accelerate_alone():
    with fresh_accelerate():
        yield


def folder_source(folder):
    for number, frames in enumerate(FRAMES):
        save_musubi(folder, f"{number:02d}", latent(frames, number), torch.full((3, 8), float(number)))
    return load_latent_folder(folder, latent_normalized=True, prompt_length=4)[0]


def tar_source(folder):
    members = [sample_members(f"{n}.5", latent(frames, n), {"caption": str(n)}) for n, frames in enumerate(FRAMES)]
    for shard in range(2):
        save_shard(
            folder / f"{shard}.tar", {name: content for part in members[shard::2] for name, content in part.items()}
        )
    return load_tar_shards(folder, latent_normalized=True)[0]


def make(dataset, **options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    return BucketDataLoader(dataset, CountedConfig(), accelerator=accelerator, seed=3, **options)


def values(batches):
    """Of each micro-batch: the numbers that its latents are filled with, its indices, weight and captions."""
    return [
        (b["latent"][:, 0, 0, 0, 0].tolist(), b["sample_index"].tolist(), b["loss_weight"], b["caption"])
        for b in batches
    ]


@pytest.fixture(params=[folder_source, tar_source])
def dataset(request, tmp_path):
    return request.param(tmp_path)


def test_an_epoch_hands_out_every_sample_once_as_tensors(dataset):
    seen = []
    for batch in make(dataset):
        assert batch["latent"].shape[1:] == (4, *map(int, batch["bucket"].split("x")))
        assert batch["latent_normalized"] is True
        assert [dataset[index]["caption"] for index in batch["sample_index"].tolist()] == batch["caption"]
        seen += batch["latent"][:, 0, 0, 0, 0].tolist()
    assert sorted(seen) == list(range(len(FRAMES)))


def test_forked_workers_give_the_same_batches(dataset):
    assert values(make(dataset, num_workers=2)) == values(make(dataset))


def test_a_dataset_sent_to_another_process_is_small_and_reads_the_same(dataset):
    sent = pickle.dumps(dataset)
    assert len(sent) < 6_000
    assert rows_of(pickle.loads(sent)) == rows_of(dataset)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_loader_goes_on_where_the_other_stopped(dataset, workers, tmp_path):
    whole = values(make(dataset))
    loader, first = make(dataset, num_workers=workers), []
    for batch in loader:
        first += values([batch])
        if len(first) == 2:
            state = loader.state_dict()
            break
    again = make(dataset, num_workers=workers)
    again.load_state_dict(state)
    assert len(whole) > 2 and first + values(again) == whole


def test_a_checkpoint_of_other_files_is_refused(tmp_path):
    loader = make(folder_source(tmp_path))
    os.rename(tmp_path / "03_0064x0064_wan.safetensors", tmp_path / "99_0064x0064_wan.safetensors")
    os.rename(tmp_path / "03_wan_te.safetensors", tmp_path / "99_wan_te.safetensors")
    other = make(load_latent_folder(tmp_path, latent_normalized=True, prompt_length=4)[0])
    with pytest.raises(UserError, match="trained on another dataset"):
        other.load_state_dict(loader.state_dict())


def test_no_file_of_latents_stays_open(dataset):
    dataset.__getitems__([0, 3, 5])
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert [path for path in opened if path.endswith((".tar", ".safetensors"))] == []


PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_code_on_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder_source(Path("cache"))
    tar_source(Path("shards"))
    save_config("config", ["1x4x6", "3x4x6", "5x32x32"])
    folder, shards, own = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    with fresh_accelerate():
        names = run_block(folder)
        assert names["batch"]["prompt_embeds"].shape[1:] == (512, 8) and names["problems"] == []
    with fresh_accelerate():
        assert len(run_block(shards)["dataset"]) == len(FRAMES)
    with fresh_accelerate():
        assert "number" in next(iter(run_block(own)["loader"]))


def run_block(block):
    names = {}
    exec(block, names)
    return names


@pytest.mark.parametrize(
    ("lose", "found"),
    [
        (lambda dataset, other: dataset.with_format("torch"), "columns file, latent_shape"),
        (lambda dataset, other: dataset.remove_columns("json"), "columns file, latent_shape"),
        (
            lambda dataset, other: datasets.concatenate_datasets([dataset, other]),
            "columns file, latent_shape",
        ),
        (lambda dataset, other: [(1, 2)], "tuple"),
    ],
)
def test_rows_without_their_tensors_are_refused_with_what_takes_them_away(lose, found, tmp_path):
    rows = lose(folder_source(tmp_path / "one"), folder_source(tmp_path / "other"))
    with pytest.raises(UserError, match=f"but found {found}") as caught:
        collate_prepared([rows[0]])
    assert "Give your own collate_fn; or the dataset as load_prepared" in str(caught.value)
