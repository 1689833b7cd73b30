"""Which samples does a folder hold, with which captions, and what in it cannot be used?"""

import os
import sys
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from metadata_rows import METADATA, read_rows
from tqdm import tqdm

from adaptiveload_hf.buckets.latent_files import is_passed_over
from adaptiveload_hf.errors import UserError
from adaptiveload_hf.scan import CLIP_SUFFIXES, STILL_SUFFIXES

REPORT = "prepare_report.json"


@dataclass
class Listing:
    """What the folder holds: captions by file, and what was left out and why."""

    captions: dict[str, str] = field(default_factory=dict)
    refused: list[dict] = field(default_factory=list)
    hidden: int = 0
    other_files: Counter = field(default_factory=Counter)
    without_caption: list[str] = field(default_factory=list)
    texts_without_file: list[str] = field(default_factory=list)  # .txt that are no picture's or clip's

    def refuse(self, file: str, reason: str):
        self.refused.append({"file": file, "reason": reason})
        tqdm.write(f"refused {printable(file)}: {reason}", file=sys.stderr)

    def say_what_is_missing(self, used: set[str]):
        """Before hours of encoding: what is passed over, and which of the used samples get the empty caption."""
        if self.other_files:
            counts = ", ".join(f"{count} {suffix}" for suffix, count in self.other_files.most_common())
            print(f"passed over, neither pictures nor clips by their suffix: {counts}", file=sys.stderr)
        if self.texts_without_file:
            named = name_three(self.texts_without_file, ".txt")
            print(f"captions that no picture or clip is named like: {named}", file=sys.stderr)
        bare = [file for file in self.without_caption if file in used]
        if bare:
            share = "of the samples" if len(bare) < len(used) else "samples, which is all"
            print(f"without a caption, and given the empty one: {name_three(bare, share)}", file=sys.stderr)


def printable(file: str) -> str:
    """A file's name on one line of a terminal."""
    return file if file.isprintable() else ascii(file)


def name_three(files: list[str], what: str = "of the samples") -> str:
    shown = ", ".join(map(printable, files[:3])) + (", ..." if len(files) > 3 else "")
    return f"{len(files)} {what}, {shown}; {REPORT} names all"


def list_samples(root: Path, file_column: str = "file_name", caption_column: str = "text") -> Listing:
    """Finds the samples of a folder. With metadata files in it, their rows are the samples; else every file is one.

    A caption is the row's, else the content of the .txt of the same name, else empty (and then listed). A metadata
    file may lie in any folder; its rows name files from there, as in `datasets`' videofolder and imagefolder.

    Args:
        root: the folder; nothing outside it is read, except where a link to a file in it leads.
        file_column, caption_column: of the metadata files.

    Returns:
        The Listing; file names are relative to root, with forward slashes.

    Raises:
        UserError: no such folder, or metadata without one usable row or without captions.
    """
    if not root.is_dir():
        raise UserError(f"--instance_data_root must be a folder, but {root} is none.")
    listing = Listing()
    files, tables, texts = find_files(root, listing)
    if tables:
        rows, columns = read_metadata(root, tables, files, (file_column, caption_column), listing)
        if not rows and columns and file_column not in columns:
            raise UserError(
                f"{', '.join(tables)} in {root} names no file: no row has a {file_column!r}, but they have "
                f"{sorted(columns)}. Say with --video_column which one holds the file names."
            )
        if not rows:
            raise UserError(
                f"{', '.join(tables)} in {root} has no usable row. Fix the rows listed above, or remove it."
            )
        for file in sorted(set(files) - set(rows)):
            listing.refuse(file, f"{' and '.join(tables)} has no row for it")
    else:
        rows, columns = dict.fromkeys(sorted(files)), set()
    for file, caption in rows.items():
        add_sample(root, file, caption, texts.get(_stem(file)), listing)
    for stem in sorted(set(texts) - set(map(_stem, files))):
        listing.texts_without_file.append(os.fsencode(texts[stem]).decode("utf-8", "backslashreplace"))
    if columns - {file_column, caption_column} and not any(listing.captions.values()):
        raise UserError(
            f"{', '.join(tables)} in {root} gives no sample a {caption_column!r}, and no .txt does, but it has "
            f"{sorted(columns)}. Say with --caption_column which one holds the captions."
        )
    return listing


def _stem(file: str) -> str:
    """By which a picture or clip and its .txt belong together; macOS stores names decomposed."""
    return unicodedata.normalize("NFC", str(Path(file).with_suffix("")))


def find_files(root: Path, listing: Listing) -> tuple[dict[str, None], list[str], dict[str, str]]:
    """All pictures and clips of a folder, its metadata files, and its .txt by what they share with their picture.

    What is none of these is counted or refused.
    """
    files, tables, texts = {}, [], []

    def refuse_folder(error):
        listing.refuse(Path(error.filename).relative_to(root).as_posix(), f"it cannot be read: {error.strerror}")

    for folder, folders, names in os.walk(root, onerror=refuse_folder):
        at = Path(folder).relative_to(root)
        hidden = any(map(is_passed_over, at.parts))
        for name in folders:
            if not hidden and not is_passed_over(name) and os.path.islink(os.path.join(folder, name)):
                listing.refuse((at / name).as_posix(), "it is a link to a folder, which is not followed")
        for name in names:
            relative, suffix = (at / name).as_posix(), Path(name).suffix.lower()
            if hidden or name.startswith("."):
                listing.hidden += 1
            elif suffix in STILL_SUFFIXES | CLIP_SUFFIXES:
                try:
                    relative.encode()
                    if (root / relative).exists() and not (root / relative).is_file():
                        listing.refuse(relative, "it is no file")  # a named pipe would be waited for
                    else:
                        files[relative] = None
                except UnicodeEncodeError:
                    listing.refuse(ascii(relative), "its name is not UTF-8; rename it")
            elif name.lower() in METADATA:
                tables.append(relative)
            elif suffix == ".txt":
                texts.append(relative)
            else:
                listing.other_files[ascii(suffix or name).strip("'")] += 1
    return files, sorted(tables), {_stem(text): text for text in sorted(texts)}  # of a.TXT and a.txt the latter


def read_metadata(
    root: Path, tables: list[str], files: dict, columns: tuple[str, str], listing: Listing
) -> tuple[dict[str, str | None], set[str]]:
    """File name to caption, None where a row has none, and all columns. Bad rows are refused by file and line.

    Of several rows for one file the first counts.
    """
    rows, place_of, found = {}, {}, set()
    composed = {unicodedata.normalize("NFC", file): file for file in files}
    for table in tables:
        for number, row in read_rows(root / table):
            place = f"{table}:{number}"
            if isinstance(row, dict) and columns[0] not in row and not table.lower().endswith(".jsonl"):
                raise UserError(  # of a table it is then in no row
                    f"{root / table} has no column {columns[0]!r}, but {sorted(row)}. Say with --video_column which "
                    "one holds the file names; commas separate the columns of a CSV."
                )
            try:
                if isinstance(row, UserError):
                    raise row
                found |= row.keys()
                file, caption = parse_row(row, root, Path(table).parent, composed, columns)
                if file in rows:
                    raise UserError(f"{file} has a row already, at {place_of[file]}; that one counts")
            except UserError as error:
                listing.refuse(place, str(error))
                continue
            rows[file], place_of[file] = caption, place
    return rows, found


def parse_row(row: dict, root: Path, folder: Path, files: dict, columns: tuple[str, str]) -> tuple[str, str | None]:
    """The file and caption of a row of a metadata file in root's `folder`; a UserError says what is wrong with it."""
    name, caption = (row.get(column) for column in columns)
    if not isinstance(name, str):
        raise UserError(
            f'it must have a string "{columns[0]}", but it has {sorted(map(str, row))}; see --video_column'
        )
    if not isinstance(caption, str | None):
        raise UserError(f'its "{columns[1]}" must be a string, but it is {caption!r}')
    file = os.path.relpath(root / folder / name, root).replace(os.sep, "/")
    if file.startswith("../"):
        raise UserError(f"{name} leads out of the folder; only files in it are read")
    # macOS stores names decomposed, and Windows writes paths with backslashes.
    for spelling in (file, file.replace("\\", "/")):
        found = files.get(unicodedata.normalize("NFC", spelling))
        if found is not None:
            return found, caption
    raise UserError(f"no picture or clip {name} is in the folder")


def add_sample(root: Path, file: str, caption: str | None, text: str | None, listing: Listing):
    """Takes a file with the caption of its row, or of the .txt beside it (`text`), into the listing."""
    try:
        if (root / file).stat().st_size == 0:
            raise UserError("it is empty (0 bytes)")
        if not (caption or "").strip():  # a CSV has empty fields for none
            caption = "" if text is None else read_caption_file(root / text)
        caption.encode()  # json can name half characters
    except UnicodeDecodeError:
        listing.refuse(file, "its .txt is not UTF-8; save it as UTF-8")
    except UnicodeEncodeError:
        listing.refuse(file, "its caption has half a character, which is no text")
    except OSError as error:
        listing.refuse(file, f"it cannot be read: {error.strerror}")
    except UserError as error:
        listing.refuse(file, str(error))
    else:
        listing.captions[file] = caption
        if not caption:
            listing.without_caption.append(file)


def read_caption_file(path: Path) -> str:
    if not path.is_file():  # a named pipe would be waited for
        raise UserError("its .txt is no file that can be read")
    return path.read_text(encoding="utf-8-sig").strip()
