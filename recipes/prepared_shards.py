"""Where in the output folder are encoded tensors, and how do they become the dataset at once?

output_dir/shards holds tar files whose members are safetensors, each named by the key of what it was made from. One
process appends to a shard, and whatever ends it leaves all whole members to be found again. output_dir/dataset is an
index: a row for every sample, which says where its tensors lie. Shards that no row needs are removed at the end.
"""

import os
import shutil
import tarfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import datasets
import torch
from fingerprints import row_keys
from safetensors.torch import load

from adaptiveload_hf.buckets.latent_files import read_header
from adaptiveload_hf.buckets.sample_rows import COLUMNS
from adaptiveload_hf.buckets.tar_index import whole_files
from adaptiveload_hf.errors import UserError

SUFFIX = ".latent.safetensors"
SHARD_BYTES = 1 << 30  # a new shard is begun beyond this

_text, _number = datasets.Value("string"), datasets.Value("int64")
_sizes = datasets.List(datasets.Value("int32"))
_kinds = {"latent_shape": _sizes, "prompt_rows": datasets.Value("int32")}
_kinds |= dict.fromkeys(("offset", "size", "text_offset", "text_size"), _number)
INDEX = {name: _kinds.get(name, _text) for name in COLUMNS}
INDEX |= {"latent_normalized": datasets.Value("bool"), "fingerprint": _text}


class Stored(NamedTuple):
    """Where the tensors of one key lie, and the shape of each."""

    path: str
    offset: int
    size: int
    shapes: dict[str, list[int]]


class ShardWriter:
    """Appends tensors to shards of this process alone."""

    def __init__(self, folder: Path):
        self.folder, self.path, self.bytes = folder, None, 0

    def add(self, key: str, content: bytes):
        """Appends the tensors of one key, as safetensors; they are on the disk when this returns."""
        if self.path is None or self.bytes > SHARD_BYTES:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.path, self.bytes = self.folder / f"{uuid.uuid4().hex}.tar", 0
        member = tarfile.TarInfo(key + SUFFIX)
        member.size = len(content)
        whole = member.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)
        with open(self.path, "ab") as stream:
            stream.write(whole)
            stream.flush()
            os.fsync(stream.fileno())
        self.bytes += len(whole)


def read_shard(root: Path, path: str) -> Iterator[tuple[str, Stored]]:
    """Yields the key and place of every whole member of a shard; a torn one at its end is passed over."""
    with open(root / path, "rb") as stream:
        for member in whole_files(stream, path, []):
            try:
                tensors, _ = read_header(stream, member.offset_data, member.size)
            except UserError:
                continue
            shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
            yield member.name.removesuffix(SUFFIX), Stored(path, member.offset_data, member.size, shapes)


def read_tensors(output_dir: Path, place: Stored) -> dict[str, torch.Tensor]:
    """The tensors of one key."""
    return load(read_content(output_dir, place))


def read_content(output_dir: Path, place: Stored) -> bytes:
    """The same as the bytes of a safetensors file."""
    with open(output_dir / place.path, "rb") as stream:
        stream.seek(place.offset)
        return stream.read(place.size)


def open_earlier(output_dir: Path, root: str, files: Iterable[str], overwrite: bool) -> datasets.Dataset | None:
    """Finds the index that is in output_dir.

    Args:
        output_dir: of earlier runs, if there were any.
        root: where the samples come from, to be named.
        files: the usable ones.
        overwrite: whether any other dataset may be replaced.

    Raises:
        UserError: most of the dataset's files are not among these, or it is not of this recipe.
    """
    folder, replaced = output_dir / "dataset", output_dir / "unfinished" / "replaced"
    if replaced.exists() and not folder.exists():
        os.replace(replaced, folder)  # the last run ended between its two renames
    if not folder.exists():
        return None
    dataset = datasets.load_from_disk(folder) if (folder / "state.json").exists() else None
    if dataset is None or not INDEX.keys() <= set(dataset.column_names):
        if overwrite:
            return None
        raise UserError(
            f"{folder} is not of this version of the recipe, which cannot tell what in it is up to date. Give another "
            "--output_dir, or --overwrite to encode everything anew."
        )
    earlier = set(dataset["file"])
    gone = earlier.difference(files)
    if not overwrite and 2 * len(gone) > len(earlier):
        raise UserError(
            f"{folder} has samples of {len(earlier)} files, but {len(gone)} of them cannot be used in {root} "
            f"(such as {min(gone)}), and what was encoded of them would be removed. Is all of it mounted? Give "
            "another --output_dir, or --overwrite to remove them."
        )
    return dataset


def find_stored(output_dir: Path, dataset: datasets.Dataset | None) -> dict[str, Stored]:
    """Everything that is encoded: what the index names, and what unfinished runs have left in other shards."""
    stored, indexed = {}, set()
    for row in [] if dataset is None else dataset.to_iterable_dataset():
        shapes = {name.removesuffix("_shape"): row[name] for name in row if name.endswith("_shape")}
        text = {name: shapes.pop(name) for name in list(shapes) if "prompt" in name}
        text["prompt_embeds"] = [row["prompt_rows"], *text["prompt_embeds"][1:]]
        keys = row_keys(row)
        stored[keys["latent"]] = Stored(row["path"], row["offset"], row["size"], shapes)
        stored[keys["text"]] = Stored(row["text_path"], row["text_offset"], row["text_size"], text)
        indexed |= {row["path"], row["text_path"]}
    shards = {f"shards/{shard.name}": shard.stat().st_size for shard in (output_dir / "shards").glob("*.tar")}
    stored = {key: place for key, place in stored.items() if place.offset + place.size <= shards.get(place.path, 0)}
    for path in sorted(shards.keys() - indexed):
        stored = dict(read_shard(output_dir, path)) | stored
    return stored


def compact(output_dir: Path, keys: Iterable[str], stored: dict[str, Stored]) -> dict[str, Stored]:
    """Copies what is needed of shards that are mostly not into new ones.

    Args:
        output_dir: has the shards.
        keys: that the dataset needs.
        stored: has them all.

    Returns:
        `stored` with the new places.
    """
    needed = {key: stored[key] for key in keys}
    live = Counter()
    for place in needed.values():
        live[place.path] += tarfile.BLOCKSIZE * (1 + -(-place.size // tarfile.BLOCKSIZE))
    sparse = {path for path, size in live.items() if 2 * size < (output_dir / path).stat().st_size}
    if not sparse:
        return needed
    writer, before = ShardWriter(output_dir / "shards"), {path.name for path in (output_dir / "shards").iterdir()}
    for key, place in needed.items():
        if place.path in sparse:
            writer.add(key, read_content(output_dir, place))
    for shard in (output_dir / "shards").iterdir():
        if shard.name not in before:
            needed |= dict(read_shard(output_dir, f"shards/{shard.name}"))
    return needed


def make_index(rows: list[dict], stored: dict[str, Stored], prompt_rows: int) -> datasets.Dataset:
    """The index of these samples.

    Args:
        rows: file, caption and fingerprint of each.
        stored: has the tensors of all.
        prompt_rows: of every prompt_embeds when it is read: rows of zeros follow those that are stored.
    """
    columns = {name: [] for name in INDEX}
    for row in rows:
        latent, text = (stored[row_keys(row)[kind]] for kind in ("latent", "text"))
        shapes = {**latent.shapes, **text.shapes}
        stored_rows = shapes["prompt_embeds"][0]
        shapes["prompt_embeds"] = [max(stored_rows, prompt_rows), *shapes["prompt_embeds"][1:]]
        values = {f"{name}_shape": shape for name, shape in shapes.items()} | row
        values |= {"path": latent.path, "offset": latent.offset, "size": latent.size, "prompt_rows": stored_rows}
        values |= {"text_path": text.path, "text_offset": text.offset, "text_size": text.size, "json": None}
        for name, value in {**values, "latent_normalized": True}.items():
            columns.setdefault(name, []).append(value)
    features = datasets.Features({name: INDEX.get(name, _sizes) for name in columns})
    return datasets.Dataset.from_dict(columns, features=features)


def replace_dataset(output_dir: Path, index: datasets.Dataset, before: datasets.Dataset | None):
    """Makes the index the dataset, if it is another than before, and removes the shards that it does not name.

    By two renames: at every moment a whole dataset is in dataset/ or in unfinished/replaced.
    """
    folder, work = output_dir / "dataset", output_dir / "unfinished"
    if before is None or before.column_names != index.column_names or not before.data.table.equals(index.data.table):
        shutil.rmtree(work / "dataset", ignore_errors=True)
        index.save_to_disk(work / "dataset")
        os.sync()  # before the old one is gone: after a power cut one of the two is whole
        if folder.exists():
            shutil.rmtree(work / "replaced", ignore_errors=True)
            os.replace(folder, work / "replaced")
        os.replace(work / "dataset", folder)
    shutil.rmtree(work, ignore_errors=True)
    needed = {name for column in ("path", "text_path") for name in index.unique(column)}
    for shard in (output_dir / "shards").iterdir():
        if f"shards/{shard.name}" not in needed:
            shard.unlink()
