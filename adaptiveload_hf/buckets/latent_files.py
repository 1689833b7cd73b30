"""Which tensors does a file of cached latents hold, and where do their bytes lie?"""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from ..errors import UserError

# safetensors' name -> ours, which are torch's.
_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
# musubi-tuner's keys: [varlen_]NAME[_FxHxW or _HxW][_DTYPE].
_KEY = re.compile(rf"(varlen_)?(?P<name>.+?)(_(?P<size>(\d+x)?\d+x\d+))?(_({'|'.join(_DTYPES.values())}))?", re.DOTALL)

# What operating systems and file servers keep beside the files: resource forks, thumbnails, deleted files.
_NOT_SAMPLES = {"__MACOSX", "@eaDir", "#recycle", "#snapshot", "@Recycle", "$RECYCLE.BIN"}


def is_passed_over(name: str) -> bool:
    """Whether a folder or file of this name holds no samples, whatever lies in it: hidden, or of a system's own."""
    return name.startswith(".") or name in _NOT_SAMPLES


class StoredTensor(NamedTuple):
    """A tensor's place in a file.

    shape: for the latent [C, F, H, W]; else as stored.
    dtype: torch's name, such as `bfloat16`.
    start, end: its bytes, counted from the file's first byte.
    varlen: whether its first dimension is the caption's own length.
    """

    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int
    varlen: bool


def read_header(stream: BinaryIO, start: int, size: int) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Reads the header of a safetensors file that lies at bytes [start, start + size) of `stream`.

    Returns:
        The tensors by the key they are stored under, and the header's metadata.

    Raises:
        UserError: it is no safetensors file, or is cut short. The message does not name the file.
    """
    stream.seek(start)
    length = int.from_bytes(stream.read(8), "little")
    # A header over 100 MB is not one that safetensors itself would read.
    header = stream.read(length) if 8 + length <= min(size, 100_000_000) else b""
    try:
        entries = json.loads(header)
        # Half characters, which json can name, have no place in Arrow: a ValueError.
        metadata = {key: str(value).encode().decode() for key, value in entries.pop("__metadata__", {}).items()}
        places = {key: _place(entry) for key, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{size} bytes that are not a whole safetensors file. Write it again or remove it.") from None
    data = start + 8 + length
    expected = 8 + length + max((end for *_, end in places.values()), default=0)
    if expected != size:
        raise UserError(f"should have {expected} bytes, but has {size}. Write it again or remove it.")
    tensors = {}
    for key, (kind, shape, begin, end) in places.items():
        dtype = _DTYPES.get(kind)
        if dtype is None:
            raise UserError(f"tensor {key!r} has the dtype {kind}, which is none of {', '.join(_DTYPES)}.")
        if end - begin != math.prod(shape) * getattr(torch, dtype).itemsize:
            raise UserError(f"tensor {key!r} of {kind} {shape} has {end - begin} bytes. Write the file again.")
        tensors[key] = StoredTensor(shape, dtype, data + begin, data + end, key.startswith("varlen_"))
    return tensors, metadata


def _place(entry: dict) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and bytes of a header's entry; a ValueError if they cannot be these."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and 0 <= number < 1 << 31 for number in shape) or not 0 <= begin <= end:
        raise ValueError(entry)
    return str(entry["dtype"]), shape, begin, end


def name_tensors(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a latent file by name: `latent`, `prompt_embeds` if there, and others without size and dtype.

    The latent is the tensor `latent` or `latents` (musubi-tuner: `latents_21x60x104_bfloat16`, beside which
    `latents_image_...` and `latents_control_...` are other tensors), else the file's only tensor.

    Raises:
        UserError: no such tensor, or not one of the sizes that a latent has.
    """
    named = _without_suffixes(tensors)
    main = [name for name in ("latent", "latents") if name in named]
    if not main and len(named) == 1 and "prompt_embeds" not in named:
        main = list(named)
    if len(main) != 1:
        found = {key: list(tensor.shape) for key, tensor in tensors.items()}
        raise UserError(f"expected one tensor 'latent' [C, F, H, W], but found {found}.")
    key, latent = named.pop(main[0])
    if not getattr(torch, latent.dtype).is_floating_point:
        raise UserError(f"the latent {key!r} is {latent.dtype}, but a latent is floating point.")
    size = _KEY.fullmatch(key)["size"]
    others = {name: tensor for name, (_, tensor) in named.items()}
    embeds = others.get("prompt_embeds")
    if embeds is not None and len(embeds.shape) == 3 and embeds.shape[0] == 1:
        others["prompt_embeds"] = embeds._replace(shape=embeds.shape[1:])
    return {"latent": latent._replace(shape=latent_shape(latent.shape, key, size)), **others}


def name_text_tensors(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a text encoder's file by name; if there is only one, it is `prompt_embeds`."""
    named = {name: tensor for name, (_, tensor) in _without_suffixes(tensors).items()}
    return dict(zip(["prompt_embeds"], named.values())) if len(named) == 1 else named


def _without_suffixes(tensors: dict[str, StoredTensor]) -> dict[str, tuple[str, StoredTensor]]:
    names = {key: _KEY.fullmatch(key)["name"] for key in tensors if key}
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice or len(names) < len(tensors):
        raise UserError(f"several tensors are named {twice}: {sorted(tensors)}. Keep one of them.")
    return {names[key]: (key, tensor) for key, tensor in tensors.items()}


def latent_shape(stored: tuple[int, ...], key: str, size: str | None) -> tuple[int, int, int, int]:
    """[C, F, H, W] of a latent that is stored so, or with a batch of one before it, or as an image [C, H, W].

    Args:
        stored: its shape in the file.
        key: its name there.
        size: the `FxHxW` or `HxW` in that name, which must then agree with `stored` but for dimensions of 1.
    """
    if size:
        sizes = [int(number) for number in size.split("x")]
        sizes = [1, *sizes] if len(sizes) == 2 else sizes
        shape = (math.prod(stored) // max(math.prod(sizes), 1), *sizes)
        fits = [d for d in stored if d != 1] == [d for d in shape if d != 1]
    else:
        without_batch = stored[1:] if len(stored) == 5 and stored[0] == 1 else stored
        shape = (without_batch[0], 1, *without_batch[1:]) if len(without_batch) == 3 else without_batch
        fits = len(shape) == 4
    if not fits or min(shape) < 1:
        raise UserError(f"the latent {key!r} must be [C, F, H, W] or, a still, [C, H, W], but is {list(stored)}.")
    return shape


def load_pt_latent(path: str | Path) -> tuple[StoredTensor, torch.Tensor]:
    """The latent [C, F, H, W] in a file that SimpleTuner wrote with torch.save, compressed or not.

    Uncompressed ones are mapped, so that a shape costs no reading. No code in the file can run (weights_only). Where
    in the file its bytes lie is not known: start and end are 0.

    Raises:
        UserError: another content. The message does not name the file.
    """
    with open(path, "rb") as stream:
        compressed = stream.read(2) == b"\x1f\x8b"
    try:
        source = io.BytesIO(gzip.decompress(Path(path).read_bytes())) if compressed else str(path)
        stored = torch.load(source, map_location="cpu", weights_only=True, mmap=not compressed)
    except (
        gzip.BadGzipFile,
        zlib.error,
        EOFError,
        RuntimeError,
        ValueError,
        LookupError,
        pickle.UnpicklingError,
    ) as error:
        reason = str(error).split("\n")[0][:120]
        raise UserError(f"is no whole file of torch.save with tensors alone: {reason}") from None
    latent = stored.get("latents") if isinstance(stored, dict) else stored
    if not isinstance(latent, torch.Tensor) or not latent.is_floating_point():
        found = sorted(map(str, stored)) if isinstance(stored, dict) else type(stored).__name__
        raise UserError(f"expected a latent, or a dict with one under 'latents', but found {found}.")
    shape = latent_shape(tuple(latent.shape), "latents", None)
    dtype = str(latent.dtype).removeprefix("torch.")
    return StoredTensor(shape, dtype, 0, 0, varlen=False), latent.detach().reshape(shape)
