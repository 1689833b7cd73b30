"""Which shapes does a source of samples hold: a prepared dataset, cached latents, tar shards, clips, a Hub dataset?"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .buckets.latent_files import is_passed_over
from .buckets.shapes import LatentShape, read_shapes, shape_counts
from .buckets.sources import load_latent_folder, load_prepared, load_tar_shards
from .errors import UserError
from .hub import is_hub_id, read_dataset_column

# By the latent's channels: LTX, Wan 2.2 TI2V-5B, Mochi; else (4, 8).
_VAE_SCALES = {128: (8, 32), 48: (4, 16), 12: (6, 8)}
_USUAL_SCALE = (4, 8)
STILL_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif"}
STILL_SUFFIXES |= {".jfif"}  # what browsers on Windows call a JPEG
CLIP_SUFFIXES = {".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".wmv", ".ogv"}
CLIP_SUFFIXES |= {".3gp", ".mts", ".m2ts"}  # of telephones and camcorders
ANIMATED_FORMATS = {"GIF", "WEBP", "PNG", "AVIF"}  # Pillow's names
_LATENTS = {".safetensors", ".pt"}
_LONGEST_CLIP = 81  # frames: what Wan is trained on
_PIXEL_STEP = 16
_MOST_FPS = 1000
_ANY_LENGTH = 1 << 30  # of a caption: no row is read here


@dataclass(frozen=True)
class Scan:
    """What was found.

    kind: "prepared dataset", "latent files", "tar shards", "clips and pictures" or "Hub dataset".
    counts: samples by `LatentShape`.
    vae_scale: frames and pixels that one latent stands for.
    problems: one sentence for each file that is not counted.
    """

    kind: str
    counts: dict[LatentShape, int]
    vae_scale: tuple[int, int]
    problems: tuple[str, ...] = ()


def scan(source: str | Path, *, fps: float = 16.0) -> Scan:
    """Counts the samples of each shape, without reading any latent.

    Clips and pictures have no latents yet: they are counted in the largest shape that prepare_dataset.py could give
    them without enlarging: 4n+1 frames at `fps`, at most 81, and multiples of 16 pixels. Of a clip the header and the
    first frame are read, of an animated picture all.

    Args:
        source: a folder, a tar file, or the Hub id of a dataset with the column `latent_shape` in Parquet files.
        fps: frames a second of the samples, for clips.

    Raises:
        UserError: nothing there, nothing of a known kind, or no such fps.
    """
    if not 0 < fps <= _MOST_FPS:
        raise UserError(f"fps must be above 0 and at most {_MOST_FPS}, but it is {fps}.")
    path = Path(source)
    if not path.exists():
        if not is_hub_id(str(source)):
            raise UserError(f"There is no {source}. Give a folder, tar shards, or the Hub id user/repo of a dataset.")
        return _of_table("Hub dataset", read_dataset_column(str(source), "latent_shape"))
    if any((folder / "state.json").is_file() for folder in (path, path / "dataset")):
        return _of_table("prepared dataset", load_prepared(path))
    suffixes = Counter([path.suffix]) if path.is_file() else _suffixes(path)
    for inside in sorted(path.rglob("dataset/state.json")) if ".tar" in suffixes else ():
        if (inside.parents[1] / "shards").is_dir():  # whose tar files are its own
            raise UserError(f"{path} holds a prepared dataset among other files. Give that one: {inside.parents[1]}")
    # What the latents were normalised with, and how long captions are, is asked only of those who read rows.
    options = {"latent_normalized": True, "prompt_length": _ANY_LENGTH}
    if ".tar" in suffixes:
        return _of_table("tar shards", *load_tar_shards(path, **options))
    if _LATENTS & suffixes.keys():
        return _of_table("latent files", *load_latent_folder(path, **options))
    if (STILL_SUFFIXES | CLIP_SUFFIXES) & suffixes.keys():
        return _of_media(path, fps)
    found = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in suffixes.most_common(5))
    raise UserError(
        f"{path} holds no samples: neither a prepared dataset, nor *.tar, *.safetensors, *.pt, clips or pictures. "
        f"Files there: {found or 'none'}."
    )


def _of_table(kind: str, dataset, problems=()) -> Scan:
    counts = shape_counts(read_shapes(dataset))
    return Scan(kind, counts, vae_scale_of(dataset), tuple(problems))


def vae_scale_of(dataset) -> tuple[int, int]:
    """Frames and pixels that one latent of a dataset stands for, by its channels."""
    return vae_scale_of_channels(dataset.data.column("latent_shape")[0].as_py()[0])


def vae_scale_of_channels(channels: int) -> tuple[int, int]:
    return _VAE_SCALES.get(channels, _USUAL_SCALE)


def _files(root: Path, refuse=lambda path, words: None):
    """Paths of all files; `refuse` is told of folders that are passed over."""
    for folder, folders, names in os.walk(root, onerror=lambda error: refuse(Path(error.filename), error.strerror)):
        folders[:] = sorted(name for name in folders if not is_passed_over(name))
        for link in (path for path in (Path(folder, name) for name in folders) if path.is_symlink()):
            refuse(link, "it is a link to a folder, which is not followed")
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def open_clip(path: Path, options: dict | None = None) -> Any:
    """`av.open` of a clip, whatever encoding its title is in.

    Args:
        options: FFmpeg's.
    """
    import av

    # Before 19 PyAV reads metadata at once, as strict UTF-8 unless told otherwise; from 19 on it cannot be told.
    lenient = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
    return av.open(str(path), options=options, **lenient)


def video_stream(container: Any) -> Any:
    """The first video of what `open_clip` opened; a cover picture is none, nor a thumbnail beside another video.

    Raises:
        UserError: there is none that can be decoded.
    """
    import av

    streams = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
    if not streams:
        raise UserError("it has no video" + (", only sound" if container.streams.audio else ""))
    streams = [s for s in streams if s.frames != 1] or streams  # 0: the file does not say
    if streams[0].codec_context is None:
        raise UserError("it is damaged, or FFmpeg has no decoder for its codec")
    return streams[0]


def _suffixes(root: Path) -> Counter:
    return Counter(path.suffix.lower() for path in _files(root))


def _of_media(root: Path, fps: float) -> Scan:
    try:
        import av
    except ImportError:
        raise UserError("Clips need PyAV. Install it: pip install av") from None
    from PIL import Image
    from tqdm import tqdm

    counts, problems = Counter(), []

    def refuse(path, words):
        problems.append(f"{path.relative_to(root)}: {words}")

    files = [path for path in _files(root, refuse) if path.suffix.lower() in STILL_SUFFIXES | CLIP_SUFFIXES]
    for path in tqdm(files, desc="reading headers", unit="file", leave=False, disable=None):
        try:
            if not path.is_file():  # a named pipe would be waited for
                raise UserError("it is no file")
            size = _still_size(path, Image, fps) if path.suffix.lower() in STILL_SUFFIXES else _clip_size(path, fps)
            counts[_nearest_shape(*size)] += 1
        except (OSError, SyntaxError, ValueError, av.FFmpegError, Image.DecompressionBombError) as error:
            words = getattr(error, "strerror", None) or str(error)  # without the number and the path
            refuse(path, words.splitlines()[0])
    if not counts:
        raise UserError(f"None of the {len(files)} clips and pictures in {root} can be read; {problems[0]}.")
    return Scan("clips and pictures", dict(sorted(counts.items())), _USUAL_SCALE, tuple(problems))


def _still_size(path: Path, image, fps: float) -> tuple[int, int, int]:
    """(frames at fps, of an animated picture more than 1, height, width) as shown."""
    with image.open(path) as picture:
        turned = picture.getexif().get(0x0112, 1) >= 5
        sizes = picture.size if turned else picture.size[::-1]
        return _picture_frames(picture, fps), *sizes


def _picture_frames(picture, fps: float) -> int:
    """As recipes/media.py counts them: shown for 100 ms where the picture does not say."""
    first = 1 if picture.info.get("default_image") else 0
    shown = range(first, getattr(picture, "n_frames", 1) if picture.format in ANIMATED_FORMATS else 1)
    times = [0.0]
    for index in shown:
        picture.seek(index)
        picture.load()
        times.append(times[-1] + (picture.info.get("duration") or 100) / 1000)
    return 1 if len(shown) < 2 else math.ceil(times[-2] * len(shown) / (len(shown) - 1) * fps - 0.01)


def _clip_size(path: Path, fps: float) -> tuple[int, int, int]:
    """(frames at fps, height, width) as shown."""
    with open_clip(path) as container:
        stream = video_stream(container)
        first = next(container.decode(stream), None)
        if first is None:
            raise UserError("not one frame of it can be decoded")
        height, width = round(first.height), round(first.width * (stream.sample_aspect_ratio or 1))
        seconds = _seconds(container, stream)
        sizes = (width, height) if first.rotation % 180 == 90 else (height, width)
        return max(1, math.ceil(seconds * fps - 0.01)), *sizes


def _seconds(container, stream) -> float:
    """From the header; where it does not say, as in Matroska and fragmented mp4, from the packets' times."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    if container.duration:
        # Matroska counts from 0, also where the first frame comes later.
        late = float((stream.start_time or 0) * stream.time_base) if "matroska" in container.format.name else 0.0
        return container.duration / 1e6 - late
    container.seek(0)
    times = [float(packet.pts * packet.time_base) for packet in container.demux(stream) if packet.pts is not None]
    return (max(times) - min(times)) * len(times) / max(len(times) - 1, 1) if times else 0.0


def _nearest_shape(frames: int, height: int, width: int) -> LatentShape:
    temporal, spatial = _USUAL_SCALE
    if 1 < frames <= temporal:
        raise UserError(f"too short: {frames} frames at this fps, and the shortest clip has {temporal + 1}")
    if min(height, width) < _PIXEL_STEP:
        raise UserError(f"it is {height}x{width} pixels, less than {_PIXEL_STEP}")
    step = _PIXEL_STEP // spatial
    sizes = (size // _PIXEL_STEP * step for size in (height, width))
    return LatentShape((min(frames, _LONGEST_CLIP) - 1) // temporal + 1, *sizes)
