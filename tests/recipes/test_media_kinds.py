"""Are pictures of every mode shown in their right tones, and are files that are not whole refused with a reason?"""

import io
import struct
import zlib
from fractions import Fraction

import av
import media
import numpy as np
import pytest
from PIL import Image
from support.clips import decode_all, moving_bar, real_clips, remux, write_clip, write_sound

from adaptiveload_hf import UserError

FPS = Fraction(16)


def pixels_of(path, height=16, width=16):
    """The pixels of a still as int, so that differences do not wrap."""
    return media.read(path, media.look(path, FPS, 1), media.Bucket(1, height, width))[0].astype(int)


def refusal(path) -> str:
    with pytest.raises(UserError) as error:
        media.look(path, FPS, 17)
    return str(error.value)


def saved(path, picture, **options):
    picture.save(path, **options)
    return path


# Stills: tones and transparency


def test_what_is_under_full_transparency_never_shows(tmp_path):
    wild = np.random.default_rng(0).integers(0, 256, (16, 16, 4), dtype=np.uint8)
    wild[..., 3] = 0
    for suffix in (".png", ".webp", ".tif"):
        assert (pixels_of(saved(tmp_path / f"a{suffix}", Image.fromarray(wild))) == 255).all(), suffix


def test_half_transparency_is_mixed_with_white(tmp_path):
    half = Image.new("RGBA", (16, 16), (200, 0, 0, 128))
    assert np.abs(pixels_of(saved(tmp_path / "a.png", half)) - [227, 127, 127]).max() <= 1
    grey = Image.new("LA", (16, 16), (100, 128))
    assert np.abs(pixels_of(saved(tmp_path / "b.png", grey)) - 177).max() <= 1


def test_transparent_palette_and_tone_keys_show_white(tmp_path):
    palette = Image.new("P", (16, 16), 1)
    palette.putpalette([10, 20, 30, 200, 40, 50])
    assert (pixels_of(saved(tmp_path / "opaque.png", palette)) == [200, 40, 50]).all()
    assert (pixels_of(saved(tmp_path / "a.png", palette, transparency=1)) == 255).all()
    assert (pixels_of(saved(tmp_path / "b.gif", palette, transparency=1)) == 255).all()
    assert (pixels_of(saved(tmp_path / "c.png", Image.new("L", (16, 16), 7), transparency=7)) == 255).all()


def png_of_one_tone(path, depth, key, colour=False):
    """A grey or RGB PNG of 16 x 16 whose tones all are `key`, which is transparent, or one more."""
    channels, bits = 3 if colour else 1, "".join(f"{tone:0{depth}b}" for tone in [key, key + 1] * 8)
    row = b"\0" + bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)) * channels
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 16, 16, depth, 2 * colour, 0, 0, 0))]
    chunks += [(b"tRNS", struct.pack(">H", key) * channels), (b"IDAT", zlib.compress(row * 16)), (b"IEND", b"")]
    content = [struct.pack(">I", len(c)) + name + c + struct.pack(">I", zlib.crc32(name + c)) for name, c in chunks]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(content))
    return path


@pytest.mark.parametrize(("depth", "key"), [(2, 1), (4, 5), (8, 77), (16, 30000)])
def test_a_transparent_tone_of_any_depth_shows_white_and_its_neighbour_not(tmp_path, depth, key):
    found = pixels_of(png_of_one_tone(tmp_path / "a.png", depth, key))
    assert (found[:, ::2] == 255).all()
    assert (found[:, 1::2] == round((key + 1) * 255 / (2**depth - 1))).all()


def test_a_transparent_colour_of_sixteen_bits_is_refused(tmp_path):
    path = png_of_one_tone(tmp_path / "a.png", 16, 30000, colour=True)
    assert refusal(path) == "one colour of 16 bits is transparent, which Pillow cannot tell; convert it to 8 bits"


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_sixteen_bit_tones_become_the_nearest_of_eight_bits(tmp_path, suffix):
    tones = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    found = pixels_of(saved(tmp_path / f"a{suffix}", Image.fromarray(tones)))
    assert (found == np.arange(256).reshape(16, 16, 1)).all()


@pytest.mark.parametrize("mode", ["I", "F"])
def test_tones_of_32_bits_are_refused(tmp_path, mode):
    assert "convert it to 8 or 16 bits" in refusal(saved(tmp_path / "a.tif", Image.new(mode, (16, 16))))


def test_cmyk_grey_and_one_bit_pictures_keep_their_tones(tmp_path):
    orange = Image.new("RGB", (16, 16), (255, 128, 0))
    assert np.abs(pixels_of(saved(tmp_path / "a.jpg", orange.convert("CMYK"), quality=100)) - [255, 128, 0]).max() < 4
    assert (pixels_of(saved(tmp_path / "b.png", Image.new("L", (16, 16), 90))) == 90).all()
    assert (pixels_of(saved(tmp_path / "c.png", Image.new("1", (16, 16), 1))) == 255).all()


def test_a_still_is_known_by_its_content_not_its_suffix(tmp_path):
    Image.new("RGB", (16, 16), (1, 2, 3)).save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(tmp_path / "a.JPG")
    assert (pixels_of(tmp_path / "a.JPG") == [1, 2, 3]).all()
    assert (pixels_of(saved(tmp_path / "b.jfif", Image.new("RGB", (16, 16), (90, 90, 90)))) == 90).all()


def test_a_tiff_of_several_pages_is_refused(tmp_path):
    page = Image.new("RGB", (16, 16))
    path = saved(tmp_path / "a.tif", page, save_all=True, append_images=[page, page])
    assert refusal(path) == "it has 3 pages; save each as a file of its own"


# Animated pictures are clips


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png", ".avif"])
def test_an_animated_picture_is_a_clip_with_its_own_durations(tmp_path, suffix):
    shades = [Image.new("RGB", (32, 32), (tone, tone, tone)) for tone in (0, 80, 160, 240)]
    durations = [125, 250, 125, 125]  # at 16 frames a second: 2, 4, 2 and 2
    path = saved(tmp_path / f"a{suffix}", shades[0], save_all=True, append_images=shades[1:], duration=durations)
    footage = media.look(path, FPS, 100)
    assert footage.moving
    assert footage.source_frames[:8] == (0, 0, 1, 1, 1, 1, 2, 2)
    sample = media.read(path, footage, media.Bucket(9, 16, 16)).astype(int)
    expected = np.array([0, 0, 80, 80, 80, 80, 160, 160, 240])[:, None, None, None]
    assert np.abs(sample - expected).max() <= 3


def test_the_picture_that_an_animated_png_has_for_other_viewers_is_no_frame_of_it(tmp_path):
    shades = [Image.new("RGB", (32, 32), (tone, tone, tone)) for tone in (200, 0, 80)]
    options = {"save_all": True, "default_image": True, "duration": 125}
    path = saved(tmp_path / "a.png", shades[0], append_images=shades[1:], **options)
    footage = media.look(path, FPS, 100)
    assert footage.source_frames == (0, 0, 1, 1)
    assert media.read(path, footage, media.Bucket(3, 16, 16))[:, 0, 0, 0].tolist() == [0, 0, 80]
    still = saved(tmp_path / "still.png", shades[0], append_images=shades[2:], **options)
    assert not media.look(still, FPS, 100).moving and (pixels_of(still) == 80).all()


# Clips: colour


@pytest.mark.parametrize(
    ("color_range", "colorspace", "yuv", "rgb"),
    [
        (1, 1, (63, 102, 240), (255, 0, 0)),  # BT.709
        (1, 5, (81, 90, 240), (255, 0, 0)),  # BT.601
        (0, 2, (81, 90, 240), (255, 0, 0)),  # no tags: BT.601
        (1, 1, (16, 128, 128), (0, 0, 0)),
        (2, 1, (16, 128, 128), (16, 16, 16)),  # full range
    ],
)
def test_the_colours_of_a_clip_follow_its_tags(tmp_path, color_range, colorspace, yuv, rgb):
    with av.open(str(tmp_path / "a.mp4"), "w") as output:
        stream = output.add_stream("libx264", rate=16, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.color_range, stream.codec_context.colorspace = color_range, colorspace
        for _ in range(5):
            frame = av.VideoFrame(64, 48, "yuv420p")
            for plane, tone in zip(frame.planes, yuv):
                plane.update(bytes([tone]) * plane.buffer_size)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    footage = media.look(tmp_path / "a.mp4", FPS, 5)
    found = media.read(tmp_path / "a.mp4", footage, media.Bucket(5, 48, 64)).astype(int)
    assert np.abs(found - rgb).max() <= 3


@pytest.mark.parametrize(("transfer", "name"), [(16, "PQ"), (18, "HLG")])
def test_hdr_is_refused_because_its_tones_would_be_wrong(tmp_path, transfer, name):
    def hdr(stream):
        stream.codec_context.color_trc = transfer

    path = write_clip(tmp_path / "a.mp4", moving_bar(5), stream_setup=hdr)
    assert refusal(path) == f"it is HDR ({name}); convert it to SDR"


def test_a_clip_whose_title_is_no_utf8_is_read(tmp_path):
    path = remux(write_clip(tmp_path / "a.mp4", moving_bar(5)), tmp_path / "a.mkv", title="NAME")
    path.write_bytes(path.read_bytes().replace(b"NAME", "Çäöü".encode("latin-1")))
    assert media.look(path, FPS, 5).source_frames == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("codec", ["libvpx", "libvpx-vp9"])
def test_what_is_under_the_transparency_of_a_webm_never_shows(tmp_path, codec):
    path = tmp_path / "a.webm"
    with av.open(str(path), "w") as output:
        stream = output.add_stream(codec, rate=FPS, options={"auto-alt-ref": "0"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuva420p"
        for index in range(5):
            pixels = np.zeros((48, 64, 4), np.uint8)
            pixels[..., 0], pixels[:, :32, 3] = 255, 255  # red, and on the right wholly transparent
            frame = av.VideoFrame.from_ndarray(pixels, format="rgba")
            frame.pts, frame.time_base = index, 1 / FPS
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    footage = media.look(path, FPS, 9)
    assert footage.source_frames == (0, 1, 2, 3, 4)
    sample = media.read(path, footage, media.Bucket(5, 48, 64)).astype(int)
    assert np.abs(sample[:, :, 8:24] - [255, 0, 0]).max() < 8
    assert (sample[:, :, 40:56] > 250).all()


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("flip", [None, "hflip", "vflip"])
def test_a_clip_that_is_to_be_shown_turned_or_mirrored_is(tmp_path, degrees, flip):
    scene = np.zeros((32, 64, 3), np.uint8)
    scene[:16, :32] = 255
    turn = dict.fromkeys(filter(None, [flip]), True)
    path = write_clip(
        tmp_path / "a.mp4", [scene] * 5, stream_setup=lambda stream: stream.set_display_rotation(degrees, **turn)
    )
    mirror = {None: lambda shown: shown, "hflip": np.fliplr, "vflip": np.flipud}[flip]
    expected = mirror(np.rot90(scene, degrees // 90)).astype(int)
    footage = media.look(path, FPS, 5)
    assert (footage.shown_height, footage.shown_width) == expected.shape[:2]
    assert np.abs(media.read(path, footage, media.Bucket(5, *expected.shape[:2]))[0] - expected).max() < 60


def test_a_clip_that_is_to_be_shown_askew_is_refused(tmp_path):
    path = write_clip(tmp_path / "a.mp4", moving_bar(5), stream_setup=lambda stream: stream.set_display_rotation(45))
    assert refusal(path) == "it is to be shown turned by 45 degrees; re-encode it upright"


# Files that are not whole, or no media


@pytest.mark.parametrize("name", real_clips())
@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.7])
def test_a_real_clip_that_is_cut_short_is_refused(tmp_path, name, fraction):
    content = real_clips()[name].read_bytes()
    (tmp_path / "a.mp4").write_bytes(content[: int(len(content) * fraction)])
    # The 7 KB clip is mostly index: of its 70% something can be opened.
    reasons = ("FFmpeg cannot decode it: Invalid data found when processing input", "it has no video")
    assert refusal(tmp_path / "a.mp4") in reasons


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9, 0.99])
def test_a_cut_clip_whose_index_comes_first_is_refused_even_where_the_start_is_whole(tmp_path, fraction):
    whole = remux(real_clips()["carphone_pristine"], tmp_path / "whole.mp4", {"movflags": "faststart"})
    content = whole.read_bytes()
    (tmp_path / "a.mp4").write_bytes(content[: int(len(content) * fraction)])
    assert refusal(tmp_path / "a.mp4").startswith("it is cut short: its index needs 588825 bytes, but it has ")


def test_a_fragmented_clip_cut_in_a_frame_that_is_needed_is_refused(tmp_path):
    options = {"movflags": "frag_keyframe+empty_moov"}
    content = remux(real_clips()["carphone_pristine"], tmp_path / "whole.mp4", options).read_bytes()
    (tmp_path / "a.mp4").write_bytes(content[: len(content) // 10])
    assert refusal(tmp_path / "a.mp4").startswith("it is cut short: its index needs")


def test_a_transport_stream_with_a_piece_missing_is_refused(tmp_path):
    content = write_clip(tmp_path / "whole.ts", moving_bar(33)).read_bytes()
    (tmp_path / "a.ts").write_bytes(content[: 188 * 30] + content[188 * 36 :])
    assert refusal(tmp_path / "a.ts").startswith("it is damaged or cut short: a packet or frame of it is not whole")


@pytest.mark.parametrize("length", [4, 40, 3000])
@pytest.mark.parametrize("encoded_anew", [False, True])
def test_a_clip_damaged_in_a_frame_is_refused_and_not_filled_in(tmp_path, length, encoded_anew):
    source, whole, options = real_clips()["carphone_pristine"], tmp_path / "whole.mp4", {"movflags": "faststart"}
    if encoded_anew:
        write_clip(whole, decode_all(source)[:40], container=options)
    else:
        remux(source, whole, options)
    with av.open(str(whole)) as container:
        frame = container.streams.video[0].index_entries[8]
    middle, content = frame.pos + frame.size // 2, bytearray(whole.read_bytes())
    content[middle : middle + length] = np.random.default_rng(0).integers(0, 256, length, dtype=np.uint8).tobytes()
    (tmp_path / "a.mp4").write_bytes(content)
    reasons = ("it is damaged or cut short: ", "FFmpeg cannot decode it: Invalid data found when processing input")
    assert refusal(tmp_path / "a.mp4").startswith(reasons)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".gif", ".tif", ".avif"])
def test_a_still_that_is_cut_short_is_refused(tmp_path, suffix):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = saved(tmp_path / f"whole{suffix}", Image.fromarray(noise)).read_bytes()
    for fraction in (0.1, 0.5, 0.9):
        (tmp_path / f"a{suffix}").write_bytes(content[: int(len(content) * fraction)])
        assert "Pillow" in refusal(tmp_path / f"a{suffix}")


def test_what_is_no_media_is_refused(tmp_path):
    (tmp_path / "a.jpg").write_text("a note")
    (tmp_path / "a.mp4").write_text("a note")
    assert refusal(tmp_path / "a.jpg") == "it is no picture that Pillow knows"
    assert refusal(tmp_path / "a.mp4").startswith("FFmpeg cannot decode it: ")


def test_a_picture_too_large_for_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    path = saved(tmp_path / "a.png", Image.new("RGB", (64, 64)))
    assert "exceeds limit" in refusal(path)


def test_sound_alone_is_no_video_even_with_a_cover_picture(tmp_path):
    cover = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(cover, "JPEG")
    assert refusal(write_sound(tmp_path / "a.mp4")) == "it has no video, only sound"
    assert refusal(write_sound(tmp_path / "b.mp4", cover.getvalue())) == "it has no video, only sound"


@pytest.mark.parametrize("first", ["thumbnail", "clip"])
def test_a_thumbnail_that_is_a_video_of_one_frame_is_not_taken_for_the_clip(tmp_path, first):
    """As some cameras write it, without saying that it is one."""
    clips = {"thumbnail": moving_bar(1, 32, 32), "clip": moving_bar(9)}
    with av.open(str(tmp_path / "a.mp4"), "w") as output:
        streams = {name: output.add_stream("libx264", rate=FPS) for name in sorted(clips, key=first.__ne__)}
        for name, stream in streams.items():
            stream.height, stream.width = clips[name][0].shape[:2]
            stream.pix_fmt = "yuv420p"
        for name, stream in streams.items():
            for index, pixels in enumerate(clips[name]):
                frame = av.VideoFrame.from_ndarray(pixels)
                frame.pts, frame.time_base = index, 1 / FPS
                output.mux(stream.encode(frame))
            output.mux(stream.encode())
    assert media.look(tmp_path / "a.mp4", FPS, 9) == media.Footage(tuple(range(9)), 48, 64, True)


def test_a_playlist_named_like_a_clip_does_not_have_other_files_read(tmp_path):
    write_clip(tmp_path / "other.mp4", moving_bar(5))
    (tmp_path / "a.mp4").write_text("ffconcat version 1.0\nfile other.mp4\n")
    assert len(decode_all(tmp_path / "a.mp4")) == 5  # FFmpeg itself follows it
    assert refusal(tmp_path / "a.mp4").startswith("FFmpeg cannot decode it: ")


def test_a_file_that_changed_while_the_run_went_on_is_refused(tmp_path):
    path = write_clip(tmp_path / "a.mp4", moving_bar(9))
    footage = media.look(path, FPS, 9)
    write_clip(path, moving_bar(5))
    with pytest.raises(UserError, match="it ended at frame 5 of 9, but it was longer when first read"):
        media.read(path, footage, media.Bucket(9, 16, 16))


# Buckets


def footage_of(frames, height, width, moving=True):
    return media.Footage(tuple(range(frames)), height, width, moving)


def test_the_longest_bucket_that_a_clip_fills_comes_before_its_aspect_ratio():
    buckets = [media.Bucket(*size) for size in [(1, 64, 96), (5, 64, 96), (5, 96, 64), (9, 64, 64), (17, 64, 96)]]
    assert media.choose_bucket(footage_of(16, 64, 96), buckets, 16) == media.Bucket(9, 64, 64)
    assert media.choose_bucket(footage_of(8, 640, 950), buckets, 16) == media.Bucket(5, 64, 96)
    assert media.choose_bucket(footage_of(8, 95, 60), buckets, 16) == media.Bucket(5, 96, 64)
    assert media.choose_bucket(footage_of(1, 640, 480, moving=False), buckets, 16) == media.Bucket(1, 64, 96)


def test_of_equal_aspect_ratios_the_largest_that_needs_no_enlarging_is_taken():
    buckets = [media.Bucket(1, 64 * k, 96 * k) for k in (2, 1, 4)]
    assert media.choose_bucket(footage_of(1, 200, 300, moving=False), buckets, 16) == buckets[0]
    assert media.choose_bucket(footage_of(1, 32, 48, moving=False), buckets, 16) == buckets[1]


def test_a_clip_is_no_still_and_a_still_no_clip():
    stills, clips = [media.Bucket(1, 64, 64)], [media.Bucket(5, 64, 64), media.Bucket(9, 64, 64)]
    with pytest.raises(UserError, match="too short: 4 frames at --fps 16, and the shortest bucket of clips has 5"):
        media.choose_bucket(footage_of(4, 64, 64), clips + stills, 16)
    with pytest.raises(UserError, match="it is a clip, but no bucket has more than one frame"):
        media.choose_bucket(footage_of(4, 64, 64), stills, 16)
    with pytest.raises(UserError, match="it is a still, but no bucket has one frame"):
        media.choose_bucket(footage_of(1, 64, 64, moving=False), clips, 16)
