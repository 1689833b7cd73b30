"""How does a picture or a clip become the frames of a bucket? Decoding, rate, orientation, transparency, crop."""

import bisect
import math
import struct
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from resolution_buckets import Bucket, Footage

from adaptiveload_hf.errors import UserError
from adaptiveload_hf.scan import ANIMATED_FORMATS, STILL_SUFFIXES, open_clip, video_stream

try:
    import av
except ImportError:
    raise UserError("Reading clips needs PyAV. Install it: pip install av") from None

# Playlist formats are left out: a file of theirs would have FFmpeg read other files, outside the data root too.
CLIP_FORMATS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg"
BACKGROUND = "white"  # what shows through transparent pixels
# Matroska and WebM round timestamps to milliseconds, so two frames of equal time may differ by one.
TIME_TOLERANCE = Fraction(1, 1000)
CUT = 1.5  # a clip with so many times its bucket's frames is reported
HDR_TRANSFERS = {16: "PQ", 18: "HLG"}
# What a display matrix ((a, b), (c, d)) does: the pixel at (x, y) is shown at (a x + c y, b x + d y), y downwards.
TURNS = {
    ((1, 0), (0, 1)): None,
    ((0, -1), (1, 0)): Image.Transpose.ROTATE_90,
    ((-1, 0), (0, -1)): Image.Transpose.ROTATE_180,
    ((0, 1), (-1, 0)): Image.Transpose.ROTATE_270,
    ((-1, 0), (0, 1)): Image.Transpose.FLIP_LEFT_RIGHT,
    ((1, 0), (0, -1)): Image.Transpose.FLIP_TOP_BOTTOM,
    ((0, 1), (1, 0)): Image.Transpose.TRANSPOSE,
    ((0, -1), (-1, 0)): Image.Transpose.TRANSVERSE,
}
# FFmpeg's own decoders of these pass over the second picture of a WebM, its transparency.
ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}


# Pillow's plugins raise any of these on damaged files, so only lines that call nothing but Pillow are guarded so.
PILLOW_ERRORS = (OSError, ValueError, SyntaxError, EOFError, LookupError, RuntimeError, TypeError, struct.error)
PILLOW_ERRORS += (Image.DecompressionBombError,)


class Frame(NamedTuple):
    """One decoded frame: its time in seconds, the width of a pixel over its height, and `load()` -> RGB picture."""

    seconds: Fraction
    pixel_aspect: Fraction
    load: object  # only valid until the next frame is asked for


def look(path: Path, fps: Fraction, longest: int) -> Footage:
    """Decodes what the longest bucket needs of a file, because headers of Matroska and others say nothing, and half as
    much again, to tell of which clips much is left over.

    Args:
        path: of a picture or clip.
        fps: frames a second of the samples.
        longest: frames of the longest bucket. A clip may have more: half as many again are counted, and one.

    Returns:
        The file's Footage, its picture size as shown (turned upright, with square pixels).

    Raises:
        UserError: what is wrong with the file.
    """
    times, enough = [], math.floor(CUT * longest) + 1
    for frame in _frames(path):
        if not times:
            picture, pixel_aspect = frame.load(), frame.pixel_aspect
        elif frame.seconds < times[-1]:
            raise UserError(f"its timestamps go backwards at frame {len(times)}; re-encode it")
        times.append(frame.seconds)
        if frame.seconds - times[0] >= enough / fps + TIME_TOLERANCE:
            break
    if not times:
        raise UserError("not one frame of it can be decoded")
    return Footage(
        source_frames=tuple(frames_at(times, fps)[:enough]),
        shown_height=picture.height,
        shown_width=round(picture.width * pixel_aspect),
        moving=len(times) > 1,
    )


def read(path: Path, footage: Footage, bucket: Bucket) -> np.ndarray:
    """Decodes the frames of one sample.

    Args:
        path: of the picture or clip.
        footage: what `look` found in it.
        bucket: of the sample.

    Returns:
        uint8 [F, H, W, 3], RGB.

    Raises:
        UserError: what is wrong with the file.
    """
    wanted = footage.source_frames[: bucket.frames]
    sample = np.empty((*bucket, 3), dtype=np.uint8)
    filled = 0
    for index, frame in enumerate(_frames(path)):
        if index == wanted[filled]:
            picture = crop_to_fill(frame.load(), frame.pixel_aspect, bucket.height, bucket.width)
            while filled < bucket.frames and wanted[filled] == index:
                sample[filled] = picture
                filled += 1
        if filled == bucket.frames:
            return sample
    raise UserError(f"it ended at frame {filled} of {bucket.frames}, but it was longer when first read")


def frames_at(times: list[Fraction], fps: Fraction) -> list[int]:
    """Which decoded frame is on screen at time k / fps after the first one, for k = 0, 1, ... up to the clip's end.

    A clip ends one mean frame distance after its last frame's time.

    Args:
        times: seconds at which the decoded frames appear, ascending.
        fps: frames a second asked for.

    Returns:
        One index into `times` for each k.
    """
    if len(times) == 1:
        return [0]
    length = (times[-1] - times[0]) * len(times) / (len(times) - 1)
    count = max(1, math.ceil((length - TIME_TOLERANCE) * fps))
    return [bisect.bisect_right(times, times[0] + k / fps + TIME_TOLERANCE) - 1 for k in range(count)]


def choose_bucket(footage: Footage, buckets: list[Bucket], fps: Fraction) -> Bucket:
    """The bucket of a file: the longest that it fills, then the nearest aspect ratio, then the largest size in it.

    A clip never goes to a bucket of one frame, nor a still to one of several. Of equal aspect ratios the largest
    bucket that needs no enlarging is taken, or else the smallest.

    Args:
        footage: of the file.
        buckets: all there are.
        fps: frames a second that the footage was looked at with, for the message.

    Returns:
        One of `buckets`.

    Raises:
        UserError: the clip is shorter than every bucket, or there is no bucket of its kind.
    """
    kind = [bucket for bucket in buckets if (bucket.frames > 1) == footage.moving]
    if not kind:
        raise UserError(
            "it is a clip, but no bucket has more than one frame"
            if footage.moving
            else "it is a still, but no bucket has one frame"
        )
    frames = len(footage.source_frames)
    fitting = [bucket for bucket in kind if bucket.frames <= frames]
    if not fitting:
        shortest = min(bucket.frames for bucket in kind)
        raise UserError(
            f"too short: {frames} frames at --fps {float(fps):g}, and the shortest bucket of clips has {shortest}"
        )
    longest = max(bucket.frames for bucket in fitting)
    aspect, area = footage.shown_width / footage.shown_height, footage.shown_width * footage.shown_height

    def distance(bucket: Bucket):
        size = bucket.height * bucket.width
        return (
            round(abs(math.log(bucket.width / bucket.height / aspect)), 6),
            size > area,
            size if size > area else -size,
        )

    return min((bucket for bucket in fitting if bucket.frames == longest), key=distance)


def describe_resizing(samples: list[tuple[str, Footage, Bucket]]) -> dict:
    """How many samples keep their size, and how many and which do not.

    Args:
        samples: (file, its footage, its bucket).

    Returns:
        same_size, reduced (counts), enlarged (list of files); cropped: of how many more than a hundredth of the
        picture is cut away; cropped_by_a_third: which lose more than a third.
    """
    resized = {"same_size": 0, "reduced": 0, "enlarged": [], "cropped": 0, "cropped_by_a_third": []}
    for file, footage, bucket in samples:
        across, down = bucket.width / footage.shown_width, bucket.height / footage.shown_height
        kept = min(across, down) / max(across, down)
        resized["cropped"] += kept < 0.99
        if kept < 2 / 3:
            resized["cropped_by_a_third"].append(file)
        if max(across, down) > 1:
            resized["enlarged"].append(file)
        else:
            resized["same_size" if max(across, down) == 1 else "reduced"] += 1
    return resized


def clips_cut(samples: list[tuple[str, Footage, Bucket]]) -> list[str]:
    """Files of clips of which more than a third of the frames is left over.

    Args:
        samples: (file, its footage, its bucket).
    """
    return [file for file, seen, bucket in samples if seen.moving and len(seen.source_frames) > CUT * bucket.frames]


def crop_to_fill(picture: Image.Image, pixel_aspect: Fraction, height: int, width: int) -> Image.Image:
    """Resizes a picture to cover height x width and cuts away equally on both sides (Lanczos, in one step).

    Args:
        picture: any size.
        pixel_aspect: width of one of its pixels over the height.
        height, width: asked for, with square pixels.

    Returns:
        A picture of that size.
    """
    covered_width = min(Fraction(picture.width), picture.height * Fraction(width, height) / pixel_aspect)
    covered_height = min(Fraction(picture.height), picture.width * Fraction(height, width) * pixel_aspect)
    left, top = (picture.width - covered_width) / 2, (picture.height - covered_height) / 2
    box = tuple(map(float, (left, top, left + covered_width, top + covered_height)))
    return picture.resize((width, height), Image.Resampling.LANCZOS, box=box)


@contextmanager
def _pillow_errors():
    try:
        yield
    except UserError:
        raise
    except UnidentifiedImageError as error:
        raise UserError("it is no picture that Pillow knows") from error
    except PILLOW_ERRORS as error:
        raise UserError(f"Pillow cannot decode it: {error}") from error


@_pillow_errors()
def to_rgb(picture: Image.Image, depth: int = 8) -> Image.Image:
    """Turns a picture upright by its EXIF orientation and converts any mode to RGB, transparency over white.

    Args:
        picture: as Pillow opened it.
        depth: bits of a tone in the file. Pillow leaves the tone that is transparent as it is there.

    Returns:
        An RGB picture.

    Raises:
        UserError: tones of 32 bits, which have no stated range, or a transparent colour of 16 bits.
    """
    picture = ImageOps.exif_transpose(picture)
    if picture.mode in ("I", "F"):
        raise UserError(
            f"its tones have 32 bits (mode {picture.mode}) and no stated range; convert it to 8 or 16 bits"
        )
    key = picture.info.get("transparency")
    if picture.mode.startswith("I;16"):
        tones = np.asarray(picture)
        alpha = np.where(tones == key, 0, 255) if isinstance(key, int) else np.full_like(tones, 255)
        # Pillow's own conversion clips tones at 255, which makes nearly all of them white.
        picture = Image.fromarray(np.stack([(tones / 257).round(), alpha], axis=-1).astype(np.uint8))
    elif depth != 8 and picture.mode == "L" and isinstance(key, int):
        picture.info["transparency"] = key * 255 // (2**depth - 1)
    elif depth == 16 and picture.mode == "RGB" and isinstance(key, tuple):
        raise UserError("one colour of 16 bits is transparent, which Pillow cannot tell; convert it to 8 bits")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", picture.size, BACKGROUND), picture).convert("RGB")
    return picture.convert("RGB")


def _frames(path: Path):
    return _still_frames(path) if path.suffix.lower() in STILL_SUFFIXES else _clip_frames(path)


def _still_frames(path: Path):
    with _pillow_errors():
        picture = Image.open(path)
        count = getattr(picture, "n_frames", 1)
    with picture:
        if picture.format == "TIFF" and count > 1:
            raise UserError(f"it has {count} pages; save each as a file of its own")
        seconds, depth = Fraction(0), _depth(path)
        # The first picture of an animated PNG may be for viewers that cannot show the others, and is none of them.
        first = 1 if picture.info.get("default_image") else 0
        for index in range(first, count if picture.format in ANIMATED_FORMATS else 1):
            with _pillow_errors():
                picture.seek(index)
                picture.load()  # WebP and AVIF tell a frame's duration only then
            yield Frame(seconds, Fraction(1), partial(to_rgb, picture, depth))
            # As browsers do, a frame without a duration is shown for 100 ms.
            seconds += Fraction(picture.info.get("duration") or 100) / 1000


def _depth(path: Path) -> int:
    """Bits of a tone of a PNG; 8 of any other file."""
    with open(path, "rb") as stream:
        head = stream.read(25)
    return head[24] if head.startswith(b"\x89PNG") and len(head) == 25 else 8


def _clip_frames(path: Path):
    options = {"format_whitelist": CLIP_FORMATS}
    with _ffmpeg_errors(), open_clip(path.resolve(), options) as container:
        stream = video_stream(container)
        end = max((entry.pos + entry.size for entry in stream.index_entries), default=0)
        if end > path.stat().st_size:
            raise UserError(f"it is cut short: its index needs {end} bytes, but it has {path.stat().st_size}")
        decoder = _decoder(stream)
        for packet in container.demux(stream):
            frames = decoder.decode(packet)
            if packet.is_corrupt or any(frame.is_corrupt or frame.pts is None for frame in frames):
                raise UserError("it is damaged or cut short: a packet or frame of it is not whole, or has no time")
            for frame in frames:
                aspect = Fraction(stream.sample_aspect_ratio or 1)
                turned = frame.rotation % 180 == 90
                yield Frame(frame.pts * frame.time_base, 1 / aspect if turned else aspect, partial(_upright, frame))


def _decoder(stream) -> av.CodecContext:
    decoder, name = stream.codec_context, stream.codec_context.name
    if stream.metadata.get("alpha_mode") == "1" and name in ALPHA_DECODERS:
        decoder = av.CodecContext.create(ALPHA_DECODERS[name], "r")
    # With several threads FFmpeg fills damaged areas of H.264 by guessing and, now and then or always, says nothing.
    decoder.thread_count = 1
    return decoder


def _upright(frame: av.VideoFrame) -> Image.Image:
    if frame.color_trc in HDR_TRANSFERS:
        raise UserError(f"it is HDR ({HDR_TRANSFERS[frame.color_trc]}); convert it to SDR")
    turn = _turn(frame)
    transparent = any(component.is_alpha for component in frame.format.components)
    with _ffmpeg_errors():
        pixels = frame.to_ndarray(format="rgba" if transparent else "rgb24")
    picture = to_rgb(Image.fromarray(pixels))
    return picture if turn is None else picture.transpose(turn)


def _turn(frame: av.VideoFrame) -> Image.Transpose | None:
    """How the frame is turned or mirrored to be shown; `frame.rotation` takes a mirrored one for upside down."""
    stored = frame.side_data.get("DISPLAYMATRIX")
    if stored is None:
        return None
    matrix = np.frombuffer(stored, np.int32).reshape(3, 3)[:2, :2]
    # Some files scale by it too; what the bucket's size leaves of that is in the pixels' aspect.
    scaled = matrix / np.abs(matrix).max(axis=1, keepdims=True)
    shown = tuple(tuple(row) for row in scaled.round(2).tolist())
    if shown not in TURNS:
        raise UserError(f"it is to be shown turned by {frame.rotation} degrees; re-encode it upright")
    return TURNS[shown]


@contextmanager
def _ffmpeg_errors():
    try:
        yield
    except av.FFmpegError as error:
        raise UserError(f"FFmpeg cannot decode it: {error.strerror}") from error
