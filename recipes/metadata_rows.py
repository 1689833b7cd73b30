"""What do the rows of a metadata.jsonl, metadata.csv or metadata.parquet say, and which of them cannot be read?"""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from adaptiveload_hf.errors import UserError

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")


def read_rows(path: Path) -> Iterator[tuple[int, dict | UserError]]:
    """Reads one metadata file.

    Args:
        path: its name, in lower case, is one of METADATA. Text is UTF-8, with or without a byte order mark, with
            either line end.

    Yields:
        The line (in parquet: the row, from 1) and what stands there as a dict, or the UserError that says why it
        cannot be read.

    Raises:
        UserError: nothing of the file can be read.
    """
    if path.exists() and not path.is_file():  # a named pipe would be waited for
        raise UserError(f"{path} is no file.")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path} is UTF-16. Save it as UTF-8.")
    content = content.removeprefix(b"\xef\xbb\xbf")
    if suffix == ".jsonl" and content.lstrip().startswith(b"["):
        raise UserError(
            f"{path} is a JSON list, but each of its lines must be an object, without commas between them."
        )
    yield from _json_lines(content) if suffix == ".jsonl" else _csv_lines(path, content)


def _parquet_rows(path: Path):
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is no whole parquet file: {error}") from error
    for number in range(table.num_rows):
        try:
            (row,) = table.slice(number, 1).to_pylist()
        except UnicodeDecodeError:  # Parquet keeps any bytes as text
            row = UserError("it is not UTF-8; write the file anew from text that is")
        yield number + 1, row


def _json_lines(content: bytes):
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield number, _json_object(line)


def _json_object(line: bytes) -> dict | UserError:
    try:
        row = json.loads(line.decode(), object_pairs_hook=_each_key_once)
    except UnicodeDecodeError:
        return UserError("it is not UTF-8; save the file as UTF-8")
    except json.JSONDecodeError as error:
        return UserError(f"it is not JSON, or cut short, at column {error.colno}")
    except ValueError as error:  # a key twice, or a number of more digits than Python reads
        return UserError(f"its JSON cannot be read: {error}")
    except RecursionError:
        return UserError("its JSON is nested too deeply")
    return row if isinstance(row, dict) else UserError("it must be a JSON object")


def _each_key_once(pairs: list[tuple]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it has the key {key!r} more than once")
    return row


def _csv_lines(path: Path, content: bytes):
    lines = csv.reader(io.StringIO(content.decode("utf-8", "surrogateescape"), newline=""), strict=True)
    header, begins = None, 1
    while True:
        try:
            fields = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            yield begins, UserError(f"it is no CSV, and perhaps what follows is lost with it: {error}")
            begins = lines.line_num + 1
            continue
        if fields and header is None:
            header = fields
            twice = [name for name, count in Counter(fields).items() if name and count > 1]
            if twice:  # which of them is meant?
                raise UserError(f"{path} has more than one column {twice[0]!r}. Rename or remove the others.")
        elif fields and len(fields) != len(header):
            yield begins, UserError(f"it has {len(fields)} fields, but the first line has {len(header)}")
        elif fields and not "".join(fields).isascii() and not _is_utf8("".join(fields)):
            yield begins, UserError("it is not UTF-8; save the file as UTF-8")
        elif fields:
            yield begins, dict(zip(header, fields))
        begins = lines.line_num + 1


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
