"""How does a row of a table that only says where a sample lies become a row with its tensors?"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from ..errors import UserError
from .latent_files import StoredTensor, load_pt_latent, name_tensors, name_text_tensors, read_header
from .row_bytes import RowMemory

# file: the sample's name. path, text_path: below the root. offset, size: bytes of a safetensors file in `path`; of
# the captions' in `text_path` text_offset, text_size. prompt_rows: rows of prompt_embeds. json: what a shard says.
_PLACE = ("path", "offset", "size", "text_path", "text_offset", "text_size")
COLUMNS = ("file", "latent_shape", "caption", "prompt_rows", *_PLACE, "json")


def make_place(file: str, latent: StoredTensor, others: dict[str, StoredTensor], **values) -> dict:
    """A sample called `file` before its tensors are read: COLUMNS, filled by `values`, and the `kind` of tensors."""
    prompt = others.get("prompt_embeds")
    kinds = [f"latent of {latent.shape[0]} channels {latent.dtype}"]
    for name, tensor in sorted(others.items()):
        width = f"{list(tensor.shape[1:])} " if name == "prompt_embeds" else ""
        kinds.append(f"{name} {width}{tensor.dtype}")
    row = dict.fromkeys(COLUMNS) | {"file": file, "latent_shape": list(latent.shape), "caption": "", "offset": 0}
    row["prompt_rows"] = None if prompt is None else prompt.shape[0]
    return row | values | {"kind": ", ".join(kinds)}


def make_table(places: list[dict]):
    """A pyarrow.Table of what `make_place` gives. It takes a quarter of their memory."""
    import pyarrow

    text, number = pyarrow.string(), pyarrow.int64()
    place = (text, number, number) * 2
    kinds = (text, pyarrow.list_(pyarrow.int32()), text, pyarrow.int32(), *place, text, text)
    schema = pyarrow.schema(list(zip((*COLUMNS, "kind"), kinds)))
    return pyarrow.Table.from_pylist(places, schema=schema)


def keep_one_kind(table, problems: list[str]):
    """COLUMNS of the samples of a `make_table` whose tensors are of the most frequent kind, or that with captions'
    embeddings if any have them.

    The others become problems, since they could not share a micro-batch: another number of channels or dtype, or no
    embedding.
    """
    from pyarrow import compute

    kinds = table.column("kind")
    counts = {count["values"]: count["counts"] for count in kinds.value_counts().to_pylist()}
    if len(counts) > 1:
        has_text = compute.or_(*(compute.is_valid(table.column(name)) for name in ("text_path", "prompt_rows")))
        with_text = set(kinds.filter(has_text).to_pylist())
        wanted = max(counts, key=lambda kind: (kind in with_text, counts[kind]))
        is_wanted = compute.equal(kinds, wanted)
        problems += [
            f"{other['file']}: has {other['kind']}; not used with the {counts[wanted]} that have {wanted}"
            for other in table.filter(compute.invert(is_wanted)).select(["file", "kind"]).to_pylist()
        ]
        table = table.filter(is_wanted)
    return table.select(COLUMNS)


@dataclass(frozen=True)
class ReadSamples:
    """The transform of a `datasets.Dataset` with COLUMNS: rows as recipes/prepare_dataset.py writes them.

    It opens files anew for every row: nothing is shared between processes, and any start method of workers works. The
    tensors' bytes are uint8 tensors; those of rows that are asked for together follow each other in memory, as
    `collate_prepared` needs them.

    Args:
        root: folder that `path` and `text_path` are below.
        latent_normalized: whether the latents are.
        prompt_length: rows that prompt_embeds gets, zeros after the caption's own.
    """

    root: str
    latent_normalized: bool
    prompt_length: int | None

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        if not batch.keys() >= set(COLUMNS):
            return batch  # a few columns were asked for, not samples
        memory = RowMemory(Counter(map(tuple, batch["latent_shape"])))
        rows = [self._read(dict(zip(batch, values)), memory) for values in zip(*batch.values())]
        return {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain.from_iterable(rows))}

    def _read(self, place: dict, memory: RowMemory) -> dict:
        row = json.loads(place["json"]) if place["json"] else {}
        row |= {"file": place["file"], "caption": place["caption"], "latent_normalized": self.latent_normalized}
        take = partial(memory.take, tuple(place["latent_shape"]))
        try:
            tensors = self._read_tensors(place["path"], place["offset"], place["size"], name_tensors, take)
            if place["text_path"]:
                place_of_text = (place["text_path"], place["text_offset"], place["text_size"])
                tensors |= self._read_tensors(*place_of_text, name_text_tensors, take)
        except (UserError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{place['file']} cannot be read any more: {reason}") from None
        if tensors["latent_shape"] != place["latent_shape"]:
            raise UserError(
                f"{place['file']} had the latent shape {place['latent_shape']} when the dataset was loaded, but now "
                f"has {tensors['latent_shape']}. Load the dataset again."
            )
        return row | tensors

    def _read_tensors(self, name: str, start: int, size: int, naming, take) -> dict:
        """The columns of all tensors in a safetensors file that lies at [start, start + size) of a file."""
        path = Path(self.root, name)
        if path.suffix == ".pt":
            place, latent = load_pt_latent(path)
            stored = latent.contiguous().view(torch.uint8).flatten()
            content = take("latent", place.dtype, len(stored)).copy_(stored)
            return _columns("latent", place, place.shape, content)
        columns = {}
        with open(path, "rb") as stream:
            for name, tensor in naming(read_header(stream, start, size)[0]).items():
                shape = tensor.shape
                if name == "prompt_embeds":
                    columns["prompt_rows"] = shape[0]
                    shape = (self.prompt_length or shape[0], *shape[1:])
                content = take(name, tensor.dtype, math.prod(shape) * getattr(torch, tensor.dtype).itemsize)
                stream.seek(tensor.start)
                read = stream.readinto(memoryview(content.numpy())[: tensor.end - tensor.start])
                if read < tensor.end - tensor.start:
                    raise UserError(f"it ends {tensor.end - tensor.start - read} bytes too early")
                columns |= _columns(name, tensor, shape, content)
        return columns


def _columns(name: str, tensor: StoredTensor, shape: tuple[int, ...], content: torch.Tensor) -> dict:
    return {name: content, f"{name}_shape": list(shape), f"{name}_dtype": tensor.dtype}
