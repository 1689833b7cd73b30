"""What do the files show when they are looked into, and which bucket does each go to?"""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from data_folder import Listing
from fingerprints import FileRecords, fingerprint, row_keys, stamp
from media import choose_bucket, read
from resolution_buckets import Bucket, Footage
from shared_work import check_alike, gather, in_threads, own_share
from tqdm import tqdm

from adaptiveload_hf.errors import UserError

LOOKED_AT_ONCE = 1000  # files of a process
KEPT_FROM = 0.1  # once so large a part of what was seen is new, it is kept: all of it is written each time


@dataclass(frozen=True)
class Seen:
    """A file that can be read."""

    file: str
    content: str
    stamp: list[int]
    footage: Footage


@dataclass(frozen=True)
class Planned:
    """A sample that can be encoded, and the keys of what it is encoded to."""

    seen: Seen
    bucket: Bucket
    row: dict
    keys: dict[str, str]


def look_through(
    accelerator, root: Path, listing: Listing, fps: Fraction, longest: int, records: FileRecords
) -> list[Seen]:
    """Looks into every file; what cannot be used is refused in the listing.

    Raises:
        UserError: a process has another folder there, or none: it would refuse all files of its share.
    """
    for file in [*listing.captions][:1]:
        check_alike(accelerator, {f"size in bytes of {file}": size_of(root / file)})

    def look_into(file: str) -> Seen:
        content = records.content(root / file)
        footage = records.footage(root / file, content, fps, longest)
        return Seen(file, content, records.stamp_of(root / file), footage)

    files, seen, kept = list(listing.captions), [], 0
    progress = tqdm(
        total=len(files), desc="looking through files", unit="file", disable=not accelerator.is_main_process
    )
    for first in range(0, len(files), LOOKED_AT_ONCE * accelerator.num_processes):
        chunk = files[first : first + LOOKED_AT_ONCE * accelerator.num_processes]
        mine = Listing()
        good = []
        for file, found in in_threads(accelerator, look_into, own_share(accelerator, chunk), ahead=16):
            if isinstance(found, UserError):
                mine.refuse(file, str(found))
            else:
                good.append(found)
            progress.update(min(accelerator.num_processes, len(files) - progress.n))
        everyone = gather(accelerator, (good, mine.refused, records.drain()))
        seen += [found for good, _, _ in everyone for found in good]
        listing.refused += [entry for _, refused, _ in everyone for entry in refused]
        records.take([drained for _, _, drained in everyone])
        looked_at = first + len(chunk)
        if accelerator.is_main_process and looked_at - kept >= KEPT_FROM * looked_at:
            records.save(finished=False)
            kept = looked_at
    progress.close()
    order = {file: number for number, file in enumerate(files)}
    return sorted(seen, key=lambda found: order[found.file])


def size_of(path: Path) -> str:
    return str(path.stat().st_size) if path.exists() else "none"


def plan_samples(
    seen: list[Seen], listing: Listing, buckets: list[Bucket], fps: Fraction, media_key: str, text_key: str
) -> list[Planned]:
    """Chooses the bucket of every file; what fits none is refused in the listing."""
    planned = []
    for found in seen:
        try:
            bucket = choose_bucket(found.footage, buckets, fps)
        except UserError as error:
            listing.refuse(found.file, str(error))
            continue
        row = {
            "file": found.file,
            "caption": listing.captions[found.file],
            "fingerprint": fingerprint(found.content, found.footage, bucket, media_key, text_key),
        }
        planned.append(Planned(found, bucket, row, row_keys(row)))
    return planned


def read_sample(root: Path, sample: Planned) -> np.ndarray:
    """The frames of a sample, if its file is still the one that was looked into."""
    path = root / sample.seen.file
    frames = read(path, sample.seen.footage, sample.bucket)
    if not path.exists() or stamp(path) != sample.seen.stamp:
        raise UserError("it was changed while this ran; give the same command again")
    return frames
