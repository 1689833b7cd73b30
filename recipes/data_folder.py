"""Which samples does a folder hold, with which captions, and what in it cannot be used?"""

import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from media import CLIP_SUFFIXES, STILL_SUFFIXES
from tqdm import tqdm

from adaptiveload_hf.errors import UserError

METADATA = "metadata.jsonl"


@dataclass
class Listing:
    """What the folder holds: captions by file, and what was left out and why."""

    captions: dict[str, str] = field(default_factory=dict)
    refused: list[dict] = field(default_factory=list)
    hidden: int = 0
    other_files: Counter = field(default_factory=Counter)
    without_caption: list[str] = field(default_factory=list)

    def refuse(self, file: str, reason: str):
        self.refused.append({"file": file, "reason": reason})
        tqdm.write(f"refused {file}: {reason}", file=sys.stderr)


def list_samples(root: Path) -> Listing:
    """Finds the samples of a folder. With a metadata.jsonl in it, its rows are the samples; else every file is one.

    A caption is the row's `text`, else the content of the .txt of the same name, else empty (and then listed).

    Args:
        root: the folder; nothing outside it is read, except where a link in it leads.

    Returns:
        The Listing; file names are relative to root, with forward slashes.

    Raises:
        UserError: no such folder, or a metadata.jsonl without one usable row.
    """
    if not root.is_dir():
        raise UserError(f"--instance_data_root must be a folder, but {root} is none.")
    listing, files = Listing(), {}
    for folder, _, names in os.walk(root):
        for name in names:
            relative = (Path(folder) / name).relative_to(root)
            suffix = relative.suffix.lower()
            if any(part.startswith(".") or part == "__MACOSX" for part in relative.parts):
                listing.hidden += 1
            elif suffix in STILL_SUFFIXES | CLIP_SUFFIXES:
                files[relative.as_posix()] = None
            elif suffix != ".txt" and relative.as_posix() != METADATA:
                listing.other_files[suffix or name] += 1
    if (root / METADATA).exists():
        rows = read_metadata(root, files, listing)
        if not rows:
            raise UserError(f"{root / METADATA} has no usable row. Mend the rows listed above, or take the file away.")
        for file in sorted(set(files) - set(rows)):
            listing.refuse(file, f"{METADATA} has no row for it")
    else:
        rows = dict.fromkeys(sorted(files))
    for file, caption in rows.items():
        if (root / file).exists() and (root / file).stat().st_size == 0:
            listing.refuse(file, "it is empty (0 bytes)")
            continue
        try:
            listing.captions[file] = caption if caption is not None else read_caption_file(root / file)
        except UnicodeDecodeError:
            listing.refuse(file, "its .txt is not UTF-8; save it as UTF-8")
            continue
        if not listing.captions[file]:
            listing.without_caption.append(file)
    return listing


def read_metadata(root: Path, files: dict, listing: Listing) -> dict[str, str | None]:
    """Reads metadata.jsonl: file name to caption, None where a row has no `text`. Bad rows are refused by line number.

    Of several rows for one file the first counts.
    """
    content = (root / METADATA).read_bytes()
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{root / METADATA} is UTF-16. Save it as UTF-8.")
    rows, line_of = {}, {}
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            file, caption = parse_row(line, files)
            if file in rows:
                raise UserError(f"{file} has a row already, at line {line_of[file]}; that one counts")
        except UserError as error:
            listing.refuse(f"{METADATA}:{number}", str(error))
            continue
        rows[file], line_of[file] = caption, number
    return rows


def parse_row(line: bytes, files: dict) -> tuple[str, str | None]:
    """The file and caption of one line of metadata.jsonl; a UserError says what is wrong with it."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        raise UserError("it is not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"it is not JSON, or cut short, at column {error.colno}") from None
    if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
        raise UserError('it must be an object with a string "file_name"')
    caption = row.get("text")
    if not isinstance(caption, str | None):
        raise UserError(f'its "text" must be a string, but it is {json.dumps(caption)}')
    file = os.path.normpath(row["file_name"]).replace(os.sep, "/")
    if file.startswith("../") or os.path.isabs(file):
        raise UserError(f"{row['file_name']} leads out of the folder; only files in it are read")
    if file not in files:
        raise UserError(f"no picture or clip {row['file_name']} is in the folder")
    return file, caption


def read_caption_file(path: Path) -> str:
    """The text beside a picture or clip, empty if there is none."""
    beside = path.with_suffix(".txt")
    return beside.read_text(encoding="utf-8-sig").strip() if beside.exists() else ""
