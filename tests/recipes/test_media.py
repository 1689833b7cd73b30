"""Do files of every kind become the right frames, and damaged ones a reason?"""

import math
from fractions import Fraction

import av
import media
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.clips import decode_all, frame_times, moving_bar, real_clips, remux, write_clip

from adaptiveload_hf import UserError

FPS = Fraction(16)
CLIPS = real_clips()


def frames_of(path, fps=FPS, longest=1000):
    return media.look(path, fps, longest).source_frames


def picture_of(path, height=16, width=16):
    """The pixels of a still, float, to compare tones."""
    return media.read(path, media.look(path, FPS, 1), media.Bucket(1, height, width))[0].astype(float)


# Frames and rates


@pytest.mark.parametrize("name", CLIPS)
def test_the_frames_of_a_real_clip_are_those_on_screen_to_a_millisecond(name):
    times = frame_times(CLIPS[name])
    with av.open(str(CLIPS[name])) as container:
        rate = container.streams.video[0].average_rate
    assert frames_of(CLIPS[name], rate) == tuple(range(len(times)))
    end = times[-1] + (times[-1] - times[0]) / (len(times) - 1)
    for fps in (FPS, Fraction(60)):
        found = frames_of(CLIPS[name], fps)
        assert len(found) == math.ceil((end - times[0]) * fps)
        for k, index in enumerate(found):
            seconds = times[0] + k / fps + Fraction(1, 1000)
            assert times[index] <= seconds < (times[index + 1] if index + 1 < len(times) else end + Fraction(1, 1000))


def test_counting_stops_at_half_as_much_again_as_the_longest_bucket():
    assert frames_of(CLIPS["bikes"], longest=17) == frames_of(CLIPS["bikes"])[:26]


@settings(deadline=None)
@given(
    frames=st.integers(2, 300),
    fps=st.sampled_from([Fraction(8), Fraction(16), Fraction(24), Fraction(24000, 1001), Fraction(30000, 1001)]),
    ratio=st.sampled_from([Fraction(1), Fraction(2), Fraction(1, 2), Fraction(3, 2)]),
    start=st.integers(0, 5000),
)
def test_times_rounded_to_milliseconds_give_the_same_frames(frames, fps, ratio, start):
    exact = [Fraction(start, 1000) + index / (fps * ratio) for index in range(frames)]
    rounded = [Fraction(round(seconds * 1000), 1000) for seconds in exact]
    assert media.frames_at(rounded, fps) == media.frames_at(exact, fps)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(16, [0, 1, 2, 3, 4, 5]), (32, [0, 2, 4]), (8, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]), (24, [0, 1, 3, 4])],
)
def test_frames_are_dropped_or_repeated_by_time(rate, expected):
    assert media.frames_at([Fraction(index, rate) for index in range(6)], FPS) == expected


def test_a_frame_that_is_held_long_is_repeated(tmp_path):
    path = write_clip(tmp_path / "a.mp4", moving_bar(4), times=[0, 1, 6, 7])
    assert frames_of(path)[:8] == (0, 1, 1, 1, 1, 1, 2, 3)


def test_one_clip_in_four_containers_is_one_sample(tmp_path):
    bar, fragmented = moving_bar(33), {"movflags": "frag_keyframe+empty_moov"}
    mp4 = write_clip(tmp_path / "a.mp4", bar)
    mkv = remux(mp4, tmp_path / "a.mkv")
    late = write_clip(tmp_path / "late.mp4", bar, container=fragmented, start=2)
    webm = write_clip(tmp_path / "a.webm", bar, codec="libvpx-vp9")
    assert frame_times(late)[0] == Fraction(1, 8)
    bucket = media.Bucket(33, 48, 64)
    expected = media.read(mp4, media.look(mp4, FPS, 33), bucket)
    for path in (mp4, mkv, late, webm):
        footage = media.look(path, FPS, 33)
        assert footage == media.look(mp4, FPS, 33)
        difference = np.abs(media.read(path, footage, bucket).astype(int) - expected)
        assert difference.max() == 0 if path != webm else difference.mean() < 3


def test_the_frames_of_a_clip_are_its_decoded_pixels():
    pixels = decode_all(CLIPS["bikes"])
    footage = media.look(CLIPS["bikes"], Fraction(25), 9)
    sample = media.read(CLIPS["bikes"], footage, media.Bucket(9, 272, 640))
    assert np.array_equal(sample, np.stack(pixels[:9]))


def test_times_that_go_backwards_are_refused(tmp_path):
    part = write_clip(tmp_path / "part.mpg", moving_bar(9), 25, codec="mpeg2video").read_bytes()
    (tmp_path / "twice.mpg").write_bytes(part + part)
    with pytest.raises(UserError, match=r"timestamps go backwards at frame 9; re-encode"):
        frames_of(tmp_path / "twice.mpg")


# Geometry


def test_what_does_not_fit_is_cut_away_equally_on_both_sides():
    wide = np.zeros((100, 200, 3), np.uint8)
    wide[:, :50, 0] = wide[:, 150:, 2] = 255
    wide[:, 50:150, 1] = 255
    green = np.asarray(media.crop_to_fill(Image.fromarray(wide), Fraction(1), 64, 64))
    assert (green[:, 4:-4] == [0, 255, 0]).all()  # Lanczos also looks over the edge
    high = np.asarray(media.crop_to_fill(Image.fromarray(wide.transpose(1, 0, 2)), Fraction(1), 64, 64))
    assert (high[4:-4] == [0, 255, 0]).all()


@pytest.mark.parametrize("size", [(100, 37), (37, 100), (64, 48), (1, 1), (1999, 3)])
def test_a_position_in_the_bucket_shows_the_same_position_of_the_picture(size):
    width, height = size
    ramp = np.linspace(0, 255, width, dtype=np.float32)[None].repeat(height, 0)
    picture = Image.fromarray(np.stack([ramp.astype(np.uint8)] * 3, axis=-1))
    cropped = np.asarray(media.crop_to_fill(picture, Fraction(1), 48, 64))[..., 0].astype(float)
    scale = max(48 / height, 64 / width)
    column = (np.arange(64) + 0.5 - 32) / scale + width / 2 - 0.5  # position in the picture's pixels
    inside = (column > 3) & (column < width - 4)
    assert np.abs(cropped[24] - column / max(width - 1, 1) * 255)[inside].max(initial=0) < 255 / width + 2


def test_wide_pixels_are_shown_wide(tmp_path):
    def wide_pixels(stream):
        stream.codec_context.sample_aspect_ratio = Fraction(2)

    path = write_clip(tmp_path / "a.mp4", moving_bar(5, 64, 64), stream_setup=wide_pixels)
    footage = media.look(path, FPS, 5)
    assert (footage.shown_height, footage.shown_width) == (64, 128)
    middle = media.read(path, footage, media.Bucket(5, 64, 64))
    squeezed = decode_all(path)
    expected = Image.fromarray(squeezed[0]).resize((64, 64), Image.Resampling.LANCZOS, box=(16, 0, 48, 64))
    assert np.array_equal(middle[0], np.asarray(expected))


def test_a_turned_clip_of_wide_pixels_has_high_pixels(tmp_path):
    def turned_and_wide(stream):
        stream.codec_context.sample_aspect_ratio = Fraction(2)
        stream.set_display_rotation(90)

    footage = media.look(write_clip(tmp_path / "a.mp4", moving_bar(5), stream_setup=turned_and_wide), FPS, 5)
    # 64x48 pixels of 2:1, shown 128x48 before the turn: the same shape as 24 wide and 64 high.
    assert Fraction(footage.shown_width, footage.shown_height) == Fraction(48, 128)


def test_all_eight_exif_orientations_show_the_same_picture(tmp_path):
    corners = np.zeros((64, 96, 3), np.uint8)
    corners[:32, :48], corners[:32, 48:], corners[32:, :48] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    transpose = Image.Transpose
    # What a camera stores for an orientation is the inverse of what a viewer does with it.
    stored = dict(
        enumerate([None, transpose.FLIP_LEFT_RIGHT, transpose.ROTATE_180, transpose.FLIP_TOP_BOTTOM], start=1)
    )
    stored |= {5: transpose.TRANSPOSE, 6: transpose.ROTATE_90, 7: transpose.TRANSVERSE, 8: transpose.ROTATE_270}
    for orientation, turn in stored.items():
        picture = Image.fromarray(corners)
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = tmp_path / f"{orientation}.jpg"
        (picture.transpose(turn) if turn is not None else picture).save(path, exif=exif, quality=100, subsampling=0)
        footage = media.look(path, FPS, 1)
        assert (footage.shown_height, footage.shown_width) == (64, 96)
        assert np.abs(picture_of(path, 64, 96) - corners).max() < 8, orientation
