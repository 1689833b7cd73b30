"""What was a row of the dataset made of, which rows are there already, and which files must be read again?"""

import hashlib
import json
import os
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import datasets
from media import look
from resolution_buckets import Bucket, Footage

from adaptiveload_hf.errors import UserError

RECIPE = 4  # to be raised when media.py or the encoder makes something else of the same input
LATENT = ("content", "frames", "bucket", "vae", "recipe")
REASONS = {
    "content": "its content",
    "frames": "its frames at this fps",
    "bucket": "its bucket",
    "vae": "the VAE",
    "text_encoder": "the text encoder or its options",
    "recipe": "the recipe",
}


class FileRecords:
    """Hashes and looks of earlier runs, kept in a file: only what has changed since is read again.

    A file is taken as unchanged if its size and its times of modification and of status change are; a copy that keeps
    the modification time has another time of status change. The same content at other times needs no new look.
    """

    def __init__(self, path: Path):
        self.path, self.earlier = path, {"files": {}, "looks": {}}
        try:
            if path.exists():
                self.earlier = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}. Remove it: all files will be looked into again.") from None
        self.seen, self.now = {"files": {}, "looks": {}}, {"files": {}, "looks": {}}

    def content(self, file: Path) -> str:
        """Hash of the file's content; a UserError says why it cannot be read."""
        key = os.path.abspath(file)
        record = self.earlier["files"].get(key)
        try:
            now = stamp(file)
            if record is None or record[1:] != now:
                sha256 = hashlib.sha256()
                with open(file, "rb", buffering=0) as stream:
                    while piece := stream.read(1 << 20):
                        sha256.update(piece)
                record = [sha256.hexdigest()[:32], *now]
        except OSError as error:
            raise UserError(f"it cannot be read: {error.strerror}") from error
        self.now["files"][key] = record
        return record[0]

    def footage(self, file: Path, content: str, fps: Fraction, longest: int) -> Footage:
        """What `look` finds in the file. What it refuses is looked at again each time."""
        key = f"{content} {fps} {longest} {file.suffix.lower()} {RECIPE}"
        found = self.earlier["looks"].get(key) or self.seen["looks"].get(key) or self.now["looks"].get(key)
        if found is None:
            footage = look(file, fps, longest)
            found = [footage.source_frames, footage.shown_height, footage.shown_width, footage.moving]
        self.now["looks"][key] = found
        return Footage(tuple(found[0]), *found[1:])

    def folders(self, root: Path, names: Iterable[str]) -> str:
        """Hash of all files in these folders of a pipeline."""
        files = sorted(path for name in names for path in (root / name).rglob("*") if path.is_file())
        return digest([[path.relative_to(root).as_posix(), self.content(path)] for path in files])

    def stamp_of(self, file: Path) -> list[int]:
        """By which `content` knew the file."""
        return self.now["files"][os.path.abspath(file)][1:]

    def drain(self) -> dict:
        """What this process has seen since the last time, to be given to `take`."""
        drained, self.now = self.now, {"files": {}, "looks": {}}
        return drained

    def take(self, drained: list[dict]):
        """Adds what several processes have seen in this run."""
        for of_process in drained:
            for name, records in self.seen.items():
                records |= of_process[name]

    def save(self, finished: bool):
        """Keeps what this run has seen; if it has not seen everything yet, also what earlier ones had."""
        kept = self.seen if finished else {name: self.earlier[name] | self.seen[name] for name in self.seen}
        write_whole(self.path, json.dumps(kept).encode())


def write_whole(path: Path, content: bytes):
    """Replaces a file at once: after a kill, and after a power cut too, it is the old one or the new one."""
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(unfinished, path)


def stamp(file: Path) -> list[int]:
    """By which a file is taken as unchanged."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def digest(value) -> str:
    """Hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def fingerprint(content: str, footage: Footage, bucket: Bucket, vae: str, text_encoder: str) -> str:
    """All that a row was made of but its caption, which is a column of its own, as JSON.

    The fps counts by the frames that it chooses: another fps changes no still.
    """
    parts = {
        "content": content,
        "frames": digest(footage.source_frames[: bucket.frames]),
        "bucket": str(bucket),
        "vae": vae,
        "text_encoder": text_encoder,
        "recipe": RECIPE,
    }
    return json.dumps(parts)


def row_keys(row: dict) -> dict[str, str]:
    """What the tensors of a row's file (`latent`) and of its caption (`text`) are found by."""
    parts = json.loads(row["fingerprint"])
    return {
        "latent": digest(["latent", *(parts[name] for name in LATENT)]),
        "text": text_digest(row["caption"], parts["text_encoder"], parts["recipe"]),
    }


def text_digest(caption: str, text_encoder: str, recipe: int = RECIPE) -> str:
    """What the embedding of a caption is found by."""
    return digest(["text", text_encoder, recipe, caption])


def described_rows(table: datasets.Dataset):
    """Yields file, caption and fingerprint of all rows, without reading their tensors."""
    for batch in table.select_columns(["file", "caption", "fingerprint"]).iter(1000):
        yield from (dict(zip(batch, values)) for values in zip(*batch.values()))


def describe_changes(before: datasets.Dataset | None, now: list[dict], refused: list[dict]) -> dict:
    """What became of the samples.

    Args:
        before: the earlier dataset.
        now: file, caption and fingerprint of the samples of the new one.
        refused: file and reason of what is not in it.

    Returns:
        kept (count), added (count), redone and removed (lists of file and reason).
    """
    earlier = {} if before is None else {row["file"]: row for row in described_rows(before)}
    redone = []
    for row in now:
        old = earlier.get(row["file"], row)
        was, new = json.loads(old["fingerprint"]), json.loads(row["fingerprint"])
        reasons = ["its caption"] if old["caption"] != row["caption"] else []
        reasons += [reason for part, reason in REASONS.items() if was[part] != new[part]]
        if reasons:
            redone.append({"file": row["file"], "reason": "changed: " + ", ".join(reasons)})
    why = {entry["file"]: entry["reason"] for entry in refused}
    files = {row["file"] for row in now}
    return {
        "kept": len(files & earlier.keys()) - len(redone),
        "added": len(files - earlier.keys()),
        "redone": redone,
        "removed": [
            {"file": file, "reason": why.get(file, "it is not in the folder any more")}
            for file in earlier
            if file not in files
        ],
    }
