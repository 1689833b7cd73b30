"""How does a dataset on the Hub, or a folder in a layout of `datasets`, become a folder of files and captions?"""

import os
from pathlib import Path

import datasets
from data_folder import Listing
from fingerprints import write_whole
from tqdm import tqdm

from adaptiveload_hf.errors import UserError
from adaptiveload_hf.scan import CLIP_SUFFIXES, STILL_SUFFIXES


def unpack_dataset(
    name: str, config_name: str | None, media_column: str | None, caption_column: str, folder: Path
) -> Listing:
    """Brings the files of a dataset's split `train` into a folder, one at a time.

    Files that the dataset embeds are written there, those that it names are linked to. A file that is there already
    with the same content stays as it is, so that running again finds it unchanged.

    Args:
        name, config_name: as for `datasets.load_dataset`: a Hub id or a folder.
        media_column: of images or videos; None takes the only one.
        caption_column: of the captions.
        folder: made if it is not there.

    Returns:
        The Listing; files are named by the number of their row.

    Raises:
        UserError: the dataset cannot be loaded, or has no such columns, or the folder has another one's files.
    """
    rows, media_column = open_rows(name, config_name, media_column, caption_column)
    folder.mkdir(parents=True, exist_ok=True)
    claim(folder, name if config_name is None else f"{name}, configuration {config_name}")
    listing = Listing()
    for number, row in enumerate(tqdm(rows, desc="unpacking", unit="file")):
        media, caption = row[media_column], row[caption_column]
        place = f"row {number} of {name}"
        if not isinstance(caption, str | None):
            listing.refuse(place, f"its {caption_column!r} must be a string, but it is {caption!r}")
        elif media is None or not (media.get("bytes") or os.path.isfile(media.get("path") or "")):
            listing.refuse(place, f"its {media_column!r} is empty, or names a file that is not there")
        else:
            file = f"{number:08d}{suffix_of(media, rows.features[media_column])}"
            put(folder / file, media)
            listing.captions[file] = caption or ""
            if not caption:
                listing.without_caption.append(file)
    return listing


def claim(folder: Path, dataset: str):
    """Files are named by row numbers, so those of another dataset would take the place of these one by one."""
    mark = folder / ".dataset"
    if mark.exists() and (earlier := mark.read_text(encoding="utf-8")) != dataset:
        raise UserError(
            f"{folder} has the files of the dataset {earlier}, and what was encoded of them would be removed for "
            f"those of {dataset}. Give another --output_dir, or remove {folder} to go on here."
        )
    write_whole(mark, dataset.encode())


def open_rows(
    name: str, config_name: str | None, media_column: str | None, caption_column: str
) -> tuple[datasets.Dataset, str]:
    """The rows, whose media stay undecoded, and the name of the column that holds these."""
    try:
        rows = datasets.load_dataset(name, config_name, split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise UserError(f"The split 'train' of the dataset {name} cannot be loaded: {error}") from error
    media = [key for key, kind in rows.features.items() if isinstance(kind, datasets.Image | datasets.Video)]
    if media_column is None and len(media) == 1:
        media_column = media[0]
    if media_column not in media:
        raise UserError(
            f"{name} must have a column of images or videos. Found {dict(rows.features)}. Say with --video_column "
            f"which of {media} to take."
        )
    if caption_column not in rows.features:
        raise UserError(
            f"{name} has no column {caption_column!r}, but {sorted(rows.features)}. Say with --caption_column which "
            "one holds the captions."
        )
    kind = type(rows.features[media_column])(decode=False)
    return rows.select_columns([media_column, caption_column]).cast_column(media_column, kind), media_column


def suffix_of(media: dict, kind) -> str:
    """The file's own suffix if it is one that is known; what is in a file decides in any case how it is decoded."""
    suffix = Path(media.get("path") or "").suffix.lower()
    if suffix in STILL_SUFFIXES | CLIP_SUFFIXES:
        return suffix
    return ".mp4" if isinstance(kind, datasets.Video) else ".png"


def put(file: Path, media: dict):
    """Writes or links one file, unless it is there with this content."""
    content, source = media.get("bytes"), media.get("path")
    if content is None:
        if os.path.realpath(file) != os.path.realpath(source):
            file.unlink(missing_ok=True)
            file.symlink_to(os.path.abspath(source))
    elif file.is_symlink() or not file.exists() or file.read_bytes() != content:
        file.unlink(missing_ok=True)
        file.write_bytes(content)
