"""Where in WebDataset shards does each sample lie? Found once and kept in a file of offsets."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import UserError
from .latent_files import name_tensors, read_header
from .sample_rows import keep_one_kind, make_place, make_table

_FORMAT_VERSION = 2
# Stripped whole: keys may hold dots (`22.05.latent.safetensors`).
_LATENT, _JSON = ".latent.safetensors", ".json"
_BLOCK = 512
_ROWS = 10_000  # written at once


def open_index(root: Path, shards: list[Path], index: str | Path | None):
    """The samples of shards below `root`, from the index if it is still right, else from the shards.

    Returns:
        A `datasets.Dataset` mapped from the index, so that workers share its memory, and the list of problems.

    Raises:
        UserError: the index cannot be written.
    """
    import datasets

    names = [shard.relative_to(root).as_posix() for shard in shards]
    if index is None:
        digest = hashlib.blake2b("\0".join(names).encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
        index = root / f"adaptiveload_index_{digest}.arrow"
    index = Path(index)
    states = [shard.stat() for shard in shards]
    stamp = [[ascii(name), state.st_size, state.st_mtime_ns] for name, state in zip(names, states)]
    problems = _problems_of(index, stamp)
    if problems is None:
        problems = _write_index(index, stamp, root, names)
    return datasets.Dataset.from_file(str(index)), problems


def _problems_of(index: Path, stamp: list) -> list[str] | None:
    """The problems that an index notes; None if there is no whole index, or not of these shards as they are now."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(index)) as file, pyarrow.ipc.open_stream(file) as stream:
            noted = json.loads((stream.schema.metadata or {}).get(b"adaptiveload", b"{}"))
            for _ in stream:  # mapped, so this finds where an index was cut, and reads no rows
                pass
    except (OSError, pyarrow.ArrowInvalid):
        return None
    same = noted.get("format_version") == _FORMAT_VERSION and noted.get("shards") == stamp
    return noted["problems"] if same else None


def _write_index(index: Path, stamp: list, root: Path, names: list[str]) -> list[str]:
    import pyarrow
    from datasets.utils import tqdm

    problems: list[str] = []
    tables = []
    quiet = os.environ.get("LOCAL_RANK", "0") != "0"
    for position, name in enumerate(tqdm(names, desc="Reading shards", unit="shard", disable=quiet, leave=False)):
        try:
            tables.append(make_table(_read_shard(root, name, problems)))
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
            stamp[position] = None  # the shard may be readable next time, with the same size and time
    table = keep_one_kind(pyarrow.concat_tables([make_table([]), *tables]), problems)
    noted = {"format_version": _FORMAT_VERSION, "shards": stamp, "problems": problems}
    table = table.replace_schema_metadata({"adaptiveload": json.dumps(noted)})
    # Renamed when whole: other ranks may be reading, or writing the same.
    temporary = index.parent / f"{index.name}.{uuid.uuid4().hex}"
    try:
        with open(temporary, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            for start in range(0, len(table), _ROWS):
                writer.write_table(table.slice(start, _ROWS).combine_chunks())
        os.replace(temporary, index)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"The offsets of the shards cannot be kept in {index}: {error.strerror}. "
            "Give a place for them with index='...'."
        ) from None
    return problems


def _read_shard(root: Path, name: str, problems: list[str]) -> list[dict]:
    """The samples of one shard in the order of their first members; what is wrong is added to `problems`."""
    members: dict[str, dict[str, tuple[int, int]]] = {}
    known = len(problems)
    try:
        name.encode()  # Arrow holds UTF-8 only
        with open(root / name, "rb") as stream:
            for member in whole_files(stream, name, problems):
                path = member.name.removeprefix("./")
                suffix = next((suffix for suffix in (_LATENT, _JSON) if path.endswith(suffix)), None)
                if suffix is None or path.rpartition("/")[2].startswith("._"):
                    continue
                parts = members.setdefault(path.removesuffix(suffix), {})
                if suffix in parts:
                    problems.append(f"{name}: {path} stands there twice, at byte {member.offset} again; not used")
                else:
                    parts[suffix] = (member.offset_data, member.size)
            if not members and len(problems) == known:
                problems.append(f"{name}: no KEY{_LATENT} in it")
            return [place for key, parts in members.items() if (place := _sample(stream, name, key, parts, problems))]
    except UnicodeEncodeError:
        problems.append(f"{name!a}: the name is not UTF-8")
        return []


def whole_files(stream: BinaryIO, name: str, problems: list[str]) -> Iterator[tarfile.TarInfo]:
    """The regular files in a tar that are whole. tarfile alone takes damage after the first member for the end."""
    size = os.fstat(stream.fileno()).st_size
    try:
        with tarfile.open(fileobj=stream, mode="r:", errors="backslashreplace") as tar:
            while member := tar.next():
                if member.offset_data + member.size > size:
                    said = f"cut short in {member.name}, at byte {member.offset}; the rest is not used"
                    problems.append(f"{name}: {said}")
                    return
                if member.isreg():
                    yield member
                elif (member.islnk() or member.issym()) and member.name.endswith((_LATENT, _JSON)):
                    said = f"{member.name} is a link to {member.linkname}, not a file; not used"
                    problems.append(f"{name}: {said}. Pack it with `tar --dereference --hard-dereference`")
    except tarfile.TarError as error:
        problems.append(f"{name}: no uncompressed tar that can be read: {error}")
        return
    stream.seek(tar.offset)
    end = stream.read(_BLOCK)
    if end.strip(b"\0"):
        problems.append(f"{name}: no tar header at byte {tar.offset}; the rest is not used")
    elif len(end) < _BLOCK:
        problems.append(f"{name}: ends at byte {tar.offset} without the mark of a tar's end; it may be cut short")
    elif any(chunk.strip(b"\0") for chunk in iter(lambda: stream.read(1 << 20), b"")):
        problems.append(
            f"{name}: another tar follows at byte {tar.offset}; it is not used: make it a shard of its own"
        )


def _sample(stream: BinaryIO, name: str, key: str, parts: dict, problems: list[str]) -> dict | None:
    missing = [suffix for suffix in (_LATENT, _JSON) if suffix not in parts]
    if missing:
        problems.append(f"{name}: {key} has no {key.rpartition('/')[2]}{missing[0]}")
        return None
    offset, size = parts[_LATENT]
    try:
        tensors = name_tensors(read_header(stream, offset, size)[0])
        stream.seek(parts[_JSON][0])
        told = json.loads(stream.read(parts[_JSON][1]))
        if not isinstance(told, dict):
            raise UserError(f"its json is a {type(told).__name__}, not an object.")
        caption = next((told[word] for word in ("caption", "text") if isinstance(told.get(word), str)), "")
        caption.encode()  # Arrow holds UTF-8 only; json can name half characters
    except UserError as error:
        problems.append(f"{name}: {key} at byte {offset}: {error}")
        return None
    except (ValueError, RecursionError) as error:
        problems.append(f"{name}: the json of {key} at byte {parts[_JSON][0]}: {error}")
        return None
    values = {"caption": caption, "path": name, "offset": offset, "size": size, "json": json.dumps(told)}
    others = {word: tensor for word, tensor in tensors.items() if word != "latent"}
    return make_place(f"{name}/{key}", tensors["latent"], others, **values)
