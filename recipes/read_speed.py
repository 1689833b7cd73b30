"""How long does it take to learn the shapes of a large dataset, and how fast are its samples read?

    python recipes/read_speed.py --output recipes/results/read_speed_cpu.json

Writes small random latents below a temporary folder, loads them and takes the time: a `datasets` table with a column
of pictures that cannot be decoded (reading shapes must not try), a musubi-tuner cache and tar shards. The files have
just been written, so they are read from the page cache. Each time is the least of three, but for the index's.

Then a prepared dataset of clips of 81 x 480 x 832 and captions of 100 tokens, in random order, by the workers that
training has: bytes that lie on the disk per second, beside those of one process that reads the same shards from end
to end in pieces of 8 MiB. The page cache is emptied of them before each; the fastest of three, taken in turn.
"""

import argparse
import datetime
import io
import json
import os
import platform
import shlex
import sys
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import torch
from fingerprints import row_keys
from prepared_shards import ShardWriter, find_stored, make_index, replace_dataset
from safetensors.torch import save, save_file
from torch.utils.data import DataLoader

from adaptiveload_hf.buckets.collate import BatchReader, collate_prepared, keep
from adaptiveload_hf.buckets.shapes import read_shapes
from adaptiveload_hf.buckets.sources import load_latent_folder, load_prepared, load_tar_shards
from adaptiveload_hf.errors import exit_on_user_error

FRAMES, SIZES = (1, 5, 9, 13, 17, 21), ((32, 32), (60, 104), (90, 160))
SHARD = 1000  # samples of a tar shard
READ = 1000  # rows that are read in random order
LATENT, CAPTION, PROMPT_ROWS = (16, 21, 60, 104), (100, 4096), 512  # Wan's, of 81 x 480 x 832


def seconds(call: Callable, repeats: int = 3):
    """What a call returns, and the least time that it took."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - begin)
    return result, min(times)


def time_table(rows: int, folder: Path) -> dict[str, float]:
    """Shapes of a `datasets` table as saved, shuffled, and filtered, shuffled and selected."""
    kinds = np.random.default_rng(0).integers(0, len(FRAMES) * len(SIZES), rows)
    shapes = [[16, frames, *size] for frames in FRAMES for size in SIZES]
    columns = {
        "latent_shape": [shapes[kind] for kind in kinds],
        "number": range(rows),
        "picture": [b"no picture"] * rows,
    }
    table = datasets.Dataset.from_dict(columns).cast_column("picture", datasets.Image())
    table.save_to_disk(str(folder / "table"))
    loaded = datasets.load_from_disk(str(folder / "table"))
    _, plain = seconds(lambda: read_shapes(loaded))
    shuffled = loaded.shuffle(seed=0)
    _, after_shuffle = seconds(lambda: read_shapes(shuffled))
    # Filtered first: `datasets` itself takes two minutes to filter rows that are shuffled.
    chosen = loaded.filter(
        lambda numbers: [number % 10 > 0 for number in numbers], batched=True, input_columns="number"
    ).shuffle(seed=0)
    chosen = chosen.select(np.random.default_rng(1).permutation(len(chosen)))
    index, after_all = seconds(lambda: read_shapes(chosen))
    assert (index.bucket_of_sample[:1000] == expected_buckets(index, chosen.select(range(1000)))).all()
    return {"table": plain, "table_shuffled": after_shuffle, "table_filtered_shuffled_selected": after_all}


def expected_buckets(index, dataset) -> np.ndarray:
    position = {str(shape): bucket for bucket, shape in enumerate(index.shapes)}
    rows = dataset.select_columns("latent_shape")["latent_shape"]
    return np.array([position["x".join(map(str, row[1:]))] for row in rows])


def small_latent(number: int) -> torch.Tensor:
    return torch.randn(16, FRAMES[number % len(FRAMES)], 8, 8).bfloat16()


def time_rows(dataset) -> float:
    """Microseconds a row, in random order."""
    order = np.random.default_rng(0).integers(0, len(dataset), READ).tolist()
    return seconds(lambda: [dataset.__getitems__(order[i : i + 4]) for i in range(0, READ, 4)])[1] / READ * 1e6


def time_folder(samples: int, folder: Path) -> dict[str, float]:
    """A musubi-tuner cache: shapes from the headers of the latents alone, then with one caption file a sample."""
    cache = folder / "cache"
    cache.mkdir()
    for number in range(samples):
        latent = small_latent(number)
        key = f"latents_{'x'.join(map(str, latent.shape[1:]))}_bfloat16"
        about = {"architecture": "wan", "frame_count": str(latent.shape[1] * 4 - 3)}
        save_file({key: latent}, cache / f"clip{number}_00000-081_0064x0064_wan.safetensors", about)
    _, latents = seconds(lambda: read_shapes(load_latent_folder(cache, latent_normalized=True)[0]))
    about = {"architecture": "wan", "caption1": "a cat"}
    for number in range(samples):
        embeds = torch.randn(5 + number % 20, 64).bfloat16()
        save_file({"varlen_t5_bfloat16": embeds}, cache / f"clip{number}_wan_te.safetensors", about)
    options = {"latent_normalized": True, "prompt_length": 32}
    (dataset, _), with_captions = seconds(lambda: load_latent_folder(cache, **options))
    return {"folder": latents, "folder_with_captions": with_captions, "folder_row_microseconds": time_rows(dataset)}


def time_shards(samples: int, folder: Path) -> dict[str, float]:
    """Tar shards: the index made, the index read again, and rows."""
    (folder / "shards").mkdir()
    for first in range(0, samples, SHARD):
        with tarfile.open(folder / "shards" / f"{first:08d}.tar", "w") as tar:
            for number in range(first, min(first + SHARD, samples)):
                add(tar, f"{number}.latent.safetensors", save({"latent": small_latent(number)}))
                add(tar, f"{number}.json", json.dumps({"caption": "a cat"}).encode())
    _, built = seconds(lambda: load_tar_shards(folder / "shards", latent_normalized=True), repeats=1)
    dataset, again = seconds(lambda: load_tar_shards(folder / "shards", latent_normalized=True)[0])
    return {"shards_index_built": built, "shards_index_read": again, "shards_row_microseconds": time_rows(dataset)}


def write_prepared(samples: int, folder: Path):
    """A prepared dataset of random tensors, without encoding anything."""
    writers, rows = (ShardWriter(folder / "shards"), ShardWriter(folder / "shards")), []
    parts = dict.fromkeys(("content", "frames", "bucket", "vae", "text_encoder", "recipe"), "")
    for number in range(samples):
        fingerprint = json.dumps({**parts, "content": str(number)})
        row = {"file": f"{number}.mp4", "caption": f"caption {number}", "fingerprint": fingerprint}
        keys = row_keys(row)
        writers[0].add(keys["latent"], save({"latent": torch.randn(LATENT).bfloat16()}))
        writers[1].add(keys["text"], save({"prompt_embeds": torch.randn(CAPTION).bfloat16()}))
        rows.append(row)
    replace_dataset(folder, make_index(rows, find_stored(folder, None), PROMPT_ROWS), None)


def empty_page_cache(files: list[Path]):
    for file in files:
        with open(file, "rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_through(files: list[Path]) -> int:
    """Reads the files from end to end; the number of their bytes."""
    total, piece = 0, bytearray(8 << 20)
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while count := stream.readinto(piece):
                total += count
    return total


def time_prepared(samples: int, workers: int, folder: Path) -> dict[str, float]:
    """MB a second of one process from end to end, and of workers that make batches in random order."""
    write_prepared(samples, folder)
    dataset, files = load_prepared(folder), sorted((folder / "shards").iterdir())
    order = np.random.default_rng(0).permutation(samples).tolist()
    batches = [order[first : first + 4] for first in range(0, samples, 4)]
    sequential, loaded = [], []
    for _ in range(3):
        empty_page_cache(files)
        total, taken = seconds(lambda: read_through(files), repeats=1)
        sequential.append(total / taken / 1e6)
        loader = DataLoader(
            BatchReader(dataset, collate_prepared), batch_sampler=batches, collate_fn=keep, num_workers=workers
        )
        empty_page_cache(files)
        _, taken = seconds(partial(deque, loader, maxlen=0), repeats=1)
        loaded.append(total / taken / 1e6)
    return {"sequential": max(sequential), "loaded": max(loaded)}


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=10_000, help="of folder and shards (default: %(default)s)")
    parser.add_argument("--clips", type=int, default=100, help="of the prepared dataset (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="that read it (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the numbers as JSON")
    args = parser.parse_args()
    with exit_on_user_error("read_speed.py"), tempfile.TemporaryDirectory() as folder:
        datasets.disable_progress_bars()
        times = time_table(args.rows, Path(folder))
        times |= time_folder(args.samples, Path(folder)) | time_shards(args.samples, Path(folder))
        rates = time_prepared(args.clips, args.workers, Path(folder) / "prepared")
        for name, value in times.items():
            unit = "us a row" if name.endswith("microseconds") else "s"
            print(f"{name.removesuffix('_microseconds'):34} {value:8.3f} {unit}")
        for name, value in rates.items():
            print(f"{'prepared_' + name:34} {value:8.0f} MB/s")
        if args.output:
            about = {
                "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
                "python": platform.python_version(),
                "datasets": datasets.__version__,
                "torch": torch.__version__,
                "date": datetime.date.today().isoformat(),
                "command": shlex.join(["python", *sys.argv]),
                "rows": args.rows,
                "samples": args.samples,
                "clips": args.clips,
                "workers": args.workers,
            }
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(
                json.dumps({**about, "seconds": times, "megabytes_per_second": rates}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
