"""Which latent shapes does a dataset hold, and how many tokens is each?"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError, first_of

_LARGEST_SIZE = 1 << 20
_ROWS = 1 << 20  # sorted at once


@dataclass(frozen=True, order=True)
class LatentShape:
    """Size of one sample's latent: frames x height x width, written `21x60x104`.

    Args:
        frames, height, width: of the latent, not in pixels.
    """

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"

    @classmethod
    def parse(cls, text: str) -> LatentShape:
        """Reads `21x60x104`.

        Raises:
            UserError: not three positive whole numbers below 2^20 joined by `x`.
        """
        numbers = re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", text)
        sizes = [int(number) for number in text.split("x")] if numbers else []
        if len(sizes) == 2:
            raise UserError(
                f"A shape is frames x height x width, but {text!r} has two numbers. Write a still as '1x{text}'."
            )
        if len(sizes) != 3 or max(sizes) >= _LARGEST_SIZE:
            raise UserError(
                f"A shape is three positive numbers below 2^20 such as '21x60x104', but found {text[:80]!r}."
            )
        return cls(*sizes)

    def pixels(self, temporal: int = 4, spatial: int = 8) -> str:
        """The clip's size before the VAE, `81x480x832`: (frames-1)*temporal+1 x height*spatial x width*spatial."""
        return f"{(self.frames - 1) * temporal + 1}x{self.height * spatial}x{self.width * spatial}"


@dataclass(frozen=True)
class TokenGeometry:
    """How a transformer turns a latent into tokens.

    Args:
        patch_size: (frames, height, width) of a patch; Wan has (1, 2, 2).
        text_tokens: text tokens that join the self-attention (SD3: its prompt length; Wan: 0).

    Raises:
        UserError: a patch size that is not three whole numbers from 1 to 1024, or no number of text tokens.
    """

    patch_size: tuple[int, int, int] = (1, 2, 2)
    text_tokens: int = 0

    def __post_init__(self):
        patch, text = self.patch_size if isinstance(self.patch_size, tuple) else (), self.text_tokens
        whole = [n for n in (*patch, text) if isinstance(n, int) and not isinstance(n, bool)]
        if len(patch) != 3 or len(whole) != 4 or not (1 <= min(patch) <= max(patch) <= 1024 and 0 <= text < 1 << 31):
            raise UserError(
                "A patch size is three whole numbers from 1 to 1024 such as 1x2x2, and text tokens are 0 or more, "
                f"below 2^31, but found {self.patch_size} and {text}."
            )

    def __str__(self) -> str:
        return f"patch size {'x'.join(map(str, self.patch_size))} and {self.text_tokens} text tokens"

    def tokens(self, shape: LatentShape) -> int:
        """S = F/pf * H/ph * W/pw + text_tokens, the length of the transformer's sequence for one sample.

        Raises:
            UserError: the shape is not a multiple of the patch.
        """
        sizes = (shape.frames, shape.height, shape.width)
        if any(size % patch for size, patch in zip(sizes, self.patch_size)):
            patch = "x".join(map(str, self.patch_size))
            raise UserError(
                f"The latent shape {shape} must be a multiple of the transformer's patch {patch}. "
                "Prepare the dataset with other resolution buckets."
            )
        return int(np.prod([size // patch for size, patch in zip(sizes, self.patch_size)])) + self.text_tokens


class BucketIndex(NamedTuple):
    """The bucket of every sample.

    shapes: the distinct shapes, sorted.
    bucket_of_sample: int64 [samples], position in `shapes`.
    """

    shapes: tuple[LatentShape, ...]
    bucket_of_sample: np.ndarray


def index_shapes(sizes: np.ndarray) -> BucketIndex:
    """Groups samples by shape.

    Args:
        sizes: int [samples, 3], frames, height, width of each sample's latent.

    Returns:
        BucketIndex: `shapes`, the distinct shapes, sorted; `bucket_of_sample`, int64 [samples], positions in them.

    Raises:
        UserError: no samples, or another array.
    """
    sizes = np.asarray(sizes)
    if sizes.size == 0:
        raise UserError("Expected at least one sample, but the dataset is empty. Prepare the dataset again.")
    if sizes.ndim != 2 or sizes.shape[1] != 3 or sizes.dtype.kind not in "iu":
        raise UserError(
            "Sizes are whole numbers [samples, 3]: frames, height, width, without channels. Found "
            f"{sizes.dtype} {list(sizes.shape)}."
        )
    sizes = sizes.astype(np.int64, copy=False)
    if sizes.min() < 1 or sizes.max() >= _LARGEST_SIZE:
        row = int(np.argmax(((sizes < 1) | (sizes >= _LARGEST_SIZE)).any(axis=1)))
        raise UserError(
            f"Sample {row} has the latent shape {tuple(sizes[row].tolist())}: sizes must be 1 or more, below 2^20."
        )
    # One integer per row, in the order of (frames, height, width). Few are different: to look all of them up takes, of
    # 100 million, half the time and a fifth of the memory that one sort would.
    keys = (sizes[:, 0] << 40) | (sizes[:, 1] << 20) | sizes[:, 2]
    known = np.unique(np.concatenate([np.unique(keys[i : i + _ROWS]) for i in range(0, len(keys), _ROWS)]))
    mask = (1 << 20) - 1
    shapes = tuple(LatentShape(int(k >> 40), int(k >> 20) & mask, int(k) & mask) for k in known)
    return BucketIndex(shapes, np.searchsorted(known, keys))


def check_index(index: BucketIndex, samples: int) -> BucketIndex:
    """`index`, with its buckets as int64, where it is as `index_shapes` makes it.

    A plan sorts its buckets by shape. In any other order samples would be trained in batches of another shape's size.

    Raises:
        UserError: buckets of another number of samples or that are not among the shapes, or shapes not sorted.
    """
    shapes, buckets = tuple(index.shapes), np.asarray(index.bucket_of_sample)
    if len(buckets) != samples:
        raise UserError(
            f"shapes must have one entry per sample: the dataset has {samples} samples, shapes {len(buckets)}."
        )
    known = all(isinstance(shape, LatentShape) for shape in shapes) and list(shapes) == sorted(set(shapes))
    whole = buckets.ndim == 1 and buckets.size and buckets.dtype.kind in "iu"
    if not (known and whole and buckets.min() >= 0 and buckets.max() < len(shapes)):
        raise UserError(
            "shapes must be as index_shapes(sizes) returns them: distinct, sorted LatentShapes and each sample's "
            f"position among them, but found {first_of(shapes)} and {buckets.dtype} "
            f"{list(buckets.shape)} from {buckets.min(initial=0)} to {buckets.max(initial=0)}. Call index_shapes."
        )
    return BucketIndex(shapes, buckets.astype(np.int64, copy=False))


def read_shapes(dataset: Any) -> BucketIndex:
    """Reads the shape of every sample from a `datasets.Dataset` without decoding any other column.

    Args:
        dataset: a `datasets.Dataset` with the column `latent_shape`, a list of four integers [C, F, H, W]. What
            shuffle, select and filter did to it is honoured.

    Returns:
        BucketIndex, as of `index_shapes`.

    Raises:
        UserError: no such column, an empty dataset, or a row that is not four positive numbers.
    """
    columns = getattr(dataset, "column_names", None)
    if columns is None or "latent_shape" not in columns:
        raise UserError(
            f"Expected a datasets.Dataset with the column 'latent_shape' ([C, F, H, W]), but found "
            f"{columns or type(dataset).__name__}. Take load_prepared(FOLDER) for what recipes/prepare_dataset.py "
            "wrote, load_latent_folder or load_tar_shards for a cache, or give the shapes yourself (shapes=...)."
        )
    if len(dataset) == 0:
        return index_shapes(np.empty((0, 3)))
    import pyarrow.compute
    from pyarrow import types

    column = _read_column(dataset, "latent_shape").combine_chunks()
    of_lists = types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)
    if not of_lists or not types.is_integer(column.type.value_type):
        raise UserError(
            f"latent_shape must be [C, F, H, W], four whole numbers, but the column holds {column.type}. Save it as "
            "lists of integers."
        )
    wrong = np.asarray(pyarrow.compute.list_value_length(column).fill_null(0)) != 4
    values = column.flatten()
    if values.null_count and not wrong.any():
        wrong = np.asarray(values.is_null()).reshape(-1, 4).any(axis=1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise UserError(
            f"latent_shape must be [C, F, H, W], but sample {row} has {column[row].as_py()}. "
            "A still has F = 1. Fix or drop that row."
        )
    return index_shapes(values.to_numpy(zero_copy_only=False).reshape(-1, 4)[:, 1:])


def _read_column(dataset, name: str):
    """One column as a pyarrow.ChunkedArray, in the order in which shuffle, select and filter left the rows."""
    import pyarrow

    column = dataset.data.column(name)
    # `dataset[:]` gathers a shuffled column row by row, 8 s for a million rows; there is no public way to the order.
    if dataset._indices is None:
        return column
    if pyarrow.types.is_string(column.type):  # which could not hold more than 2 GiB of names in one piece
        column = column.cast(pyarrow.large_string())
    return column.take(dataset._indices.column(0))


def shape_counts(index: BucketIndex, repeats: np.ndarray | None = None) -> dict[LatentShape, int]:
    """Number of samples of each shape; with repeats (float [samples]), the expected number in an epoch, 1 for less."""
    counts = np.bincount(index.bucket_of_sample, weights=repeats, minlength=len(index.shapes))
    counts = np.where((counts > 0) & (counts < 1), 1, np.rint(counts))
    return dict(zip(index.shapes, counts.astype(np.int64).tolist()))


def leave_out_absent(index: BucketIndex, repeats: np.ndarray | None) -> BucketIndex:
    """Without the shapes whose samples all have repeats of 0, so that no plan makes room for them.

    Such samples, which never occur, are put into the first bucket.
    """
    if repeats is None:
        return index
    occur = np.bincount(index.bucket_of_sample, weights=repeats, minlength=len(index.shapes)) > 0
    if occur.all() or not occur.any():
        return index
    place = np.where(occur, np.cumsum(occur) - 1, 0)
    shapes = tuple(shape for shape, occurs in zip(index.shapes, occur) if occurs)
    return BucketIndex(shapes, place[index.bucket_of_sample])


def check_repeats(repeats, samples: int) -> np.ndarray:
    """`repeats` as float64 [samples]; a UserError if they are not that, or cannot be numbers of occurrences."""
    try:
        numbers = np.asarray(repeats, dtype=np.float64)
    except (TypeError, ValueError):
        numbers = np.empty(0)
    # An epoch is laid out at once, so there is an end to how long one can be.
    possible = numbers.shape == (samples,) and ((numbers >= 0) & (numbers < 1 << 31)).all()  # NaN is neither
    if not possible or numbers.sum() >= 1 << 31:
        raise UserError(
            f"repeats must be {samples} numbers of at least 0, one a sample, together below 2^31, but found {repeats}."
        )
    return numbers


def dataset_fingerprint(dataset, index: BucketIndex, repeats: np.ndarray | None = None) -> str:
    """Number of samples and a hash of their shapes, repeats and, where there is such a column, files, in order.

    Not the fingerprint of `datasets`: that one changes when the same files are prepared again.
    """
    digest = hashlib.blake2b(" ".join(map(str, index.shapes)).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(index.bucket_of_sample, dtype="<i8"))
    if repeats is not None:
        digest.update(np.ascontiguousarray(check_repeats(repeats, len(index.bucket_of_sample)), dtype="<f8"))
    if "file" in (getattr(dataset, "column_names", None) or ()):
        files = _read_column(dataset, "file")
        for start in range(0, len(files), 1 << 16):  # a shuffled column is one chunk of all
            digest.update("".join(f"{name}\0" for name in files.slice(start, 1 << 16).to_pylist()).encode())
    return f"{len(index.bucket_of_sample)} samples {digest.hexdigest()}"
