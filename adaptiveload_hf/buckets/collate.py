"""How do rows of a dataset become a batch, and what if one of them is bad?"""

from __future__ import annotations

import math
import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

import torch

from ..errors import UserError
from .row_bytes import stack_bytes

_DTYPES = {
    name: getattr(torch, name)
    for name in ("bfloat16", "float16", "float32", "float64", "int64", "int32", "uint8", "bool")
}
_NEEDED = {"latent", "latent_shape", "latent_dtype", "latent_normalized", "caption"}


def collate_prepared(rows: list[dict]) -> dict:
    """Stacks rows of a dataset of latents (recipes/prepare_dataset.py, buckets.sources), all of one bucket.

    Args:
        rows: with `latent` (its bytes, or a uint8 tensor of them), `latent_shape`, `latent_dtype`, `caption`,
            `latent_normalized`; `prompt_embeds` and any other tensor as the same three columns; perhaps `prompt_rows`,
            those of prompt_embeds before the zeros; `file` and `sample_index` name the row if it is bad.

    Returns:
        latent [B, C, F, H, W], prompt_embeds [B, L, E] and the other tensors [B, ...] in their stored dtype, caption
        (list of str), latent_normalized (bool).

    Raises:
        UserError: rows without these columns, bytes that do not match the shape, NaN or infinite values, or rows that
            do not belong together.
    """
    for row in rows:
        _check_columns(row)
    normalized = {bool(row["latent_normalized"]) for row in rows}
    if len(normalized) > 1:
        raise UserError(
            "One micro-batch holds normalised and raw latents: " + ", ".join(_name(row) for row in rows) + ". "
            "Prepare all of them the same way."
        )
    tensors = [column for column in rows[0] if {f"{column}_shape", f"{column}_dtype"} <= rows[0].keys()]
    return {
        **{column: _stack(rows, column) for column in tensors},
        "caption": [row["caption"] for row in rows],
        "latent_normalized": normalized.pop(),
    }


def _check_columns(row) -> None:
    if not isinstance(row, dict) or not row.keys() >= _NEEDED:
        found = f"columns {', '.join(row)}" if isinstance(row, dict) else type(row).__name__
        raise UserError(
            f"Without a collate_fn rows need the columns {', '.join(sorted(_NEEDED))}, but found {found}. Give your "
            "own collate_fn; or the dataset as load_prepared, load_latent_folder or load_tar_shards returned it: "
            "with_format, remove_columns and concatenate_datasets of two folders take away what reads its tensors."
        )


def _name(row: dict) -> str:
    return f"sample {row.get('sample_index', '?')} ({row.get('file', 'no file name')})"


def _stack(rows: list[dict], column: str) -> torch.Tensor:
    """The raw bytes of a column as one tensor [B, *shape]."""
    kinds = [(_shape(row.get(f"{column}_shape")), row.get(f"{column}_dtype")) for row in rows]
    kind = kinds[0]
    shape, dtype = kind[0], _DTYPES.get(kind[1])
    if dtype is None:
        raise UserError(f"{column}_dtype is one of {sorted(_DTYPES)}, but {_name(rows[0])} has {kind[1]!r}.")
    expected = math.prod(shape) * dtype.itemsize
    for row, found in zip(rows, kinds):
        if found != kind:
            raise UserError(
                f"One micro-batch needs one {column} shape and dtype, but {_name(rows[0])} has {kind} and "
                f"{_name(row)} has {found}. Prepare the dataset with one setting, or give your own collate_fn."
            )
        size = 0 if row.get(column) is None else len(row[column])
        if size != expected:
            raise UserError(
                f"The {column} of {_name(row)} should have {expected} bytes for {kind[1]} {shape}, but has {size}. "
                "Prepare that file again."
            )
    stacked = stack_bytes([row[column] for row in rows])
    bad = ", ".join(
        _name(row) for row, part in zip(rows, stacked) if not _is_finite(_filled(part, column, row, shape), dtype)
    )
    if bad:
        raise UserError(f"The {column} of {bad} has NaN or infinite values. Prepare it again, or drop that row.")
    return stacked.view(dtype).view(len(rows), *shape)


def _shape(sizes) -> tuple[int, ...]:
    """A list, or of a dataset with set_format an array; None where the row has no such tensor."""
    return () if sizes is None else tuple(map(int, sizes))


def _filled(part: torch.Tensor, column: str, row: dict, shape: tuple[int, ...]) -> torch.Tensor:
    """The bytes without the zeros after a caption, which are as many again and need no look."""
    rows = row.get("prompt_rows") if column == "prompt_embeds" else None
    return part if rows is None else part[: rows * len(part) // max(1, shape[0])]


def _is_finite(part: torch.Tensor, dtype: torch.dtype) -> bool:
    """NaN and infinity pass through aminmax, which is many times as fast as isfinite."""
    return not len(part) or all(torch.isfinite(bound) for bound in torch.aminmax(part.view(dtype)))


@dataclass(frozen=True)
class Failure:
    """A UserError on its way from a worker to the training loop."""

    message: str


class BatchReader:
    """A dataset whose item, for a list of indices, is the collated batch or a `Failure`.

    It is all that a worker gets: the schedule stays in the main process, which hands over indices batch by batch.
    """

    def __init__(self, dataset, collate_fn: Callable[[list], dict]):
        self.dataset = dataset
        self.collate_fn = collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> dict | Failure:
        # torch would put the worker's traceback into a UserError's message; the message alone is for the user.
        try:
            return self.collate_fn(self._rows(indices))
        except UserError as error:
            return Failure(str(error))
        except StopIteration:  # a loop over batches would take it for the end of the epoch
            return Failure(
                f"The dataset or collate_fn raised StopIteration for the samples {indices}: a next(...) in them found "
                "nothing. Give it a default, or correct these rows."
            )

    def _rows(self, indices: list[int]) -> list:
        many = getattr(self.dataset, "__getitems__", None)
        rows = many(indices) if many else [self.dataset[index] for index in indices]
        if len(rows) != len(indices):
            raise UserError(
                f"The dataset gave {len(rows)} rows for the {len(indices)} samples {indices}, so some would be lost. "
                "A transform must return a row for each: drop rows beforehand, with filter or select."
            )
        taken = any(isinstance(row, dict) and "sample_index" in row for row in rows)
        if taken and self.collate_fn is not collate_prepared:  # which takes no such column from rows
            raise UserError("The dataset has a column sample_index, as the loader's own in its rows: rename it.")
        return [{**row, "sample_index": index} if isinstance(row, dict) else row for index, row in zip(indices, rows)]


def keep(batch):
    """The DataLoader's own collate step: nothing is left to do."""
    return batch


def check_workers(num_workers, persistent_workers, prefetch_factor, dataset, collate_fn: Callable) -> None:
    """
    Raises:
        UserError: torch would refuse these options of workers; or workers of this platform's start method could not
            receive the dataset or collate_fn.
    """
    prefetched = 1 if prefetch_factor is None else prefetch_factor
    for name, number, least in (("num_workers", num_workers, 0), ("prefetch_factor", prefetched, 1)):
        if not (isinstance(number, Integral) and number >= least):
            raise UserError(f"{name} is a whole number from {least} on, but found {number!r}.")
    if num_workers:
        _check_picklable(dataset, collate_fn)
    elif persistent_workers or prefetch_factor is not None:
        raise UserError(
            f"persistent_workers={persistent_workers} and prefetch_factor={prefetch_factor} need workers, but "
            "num_workers is 0. Raise it, or leave them out."
        )


def _check_picklable(dataset, collate_fn: Callable) -> None:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method == "fork":
        return
    for name, value in (("collate_fn", collate_fn), ("the dataset", dataset)):
        try:
            pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"{name} cannot be sent to workers started with {method!r}: {error}. Define its functions at the top "
                "level of a module (no lambda, no local function) and open files only where rows are read, or use "
                "num_workers=0."
            ) from None
