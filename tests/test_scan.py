"""Does `scan` count the shapes of every kind of source, and can plans be made from what it prints?"""

import errno
import io
import json
import math
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from support.caches import latent, sample_members, save_musubi, save_shard
from support.clips import moving_bar, remux, write_clip, write_sound
from support.hub_server import Repository, visited_hub
from support.measured import make_config, save_dataset
from typer.testing import CliRunner

from adaptiveload_hf import LatentShape, UserError, cli
from adaptiveload_hf.scan import scan


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    make_config().save_pretrained(folder)
    return folder


def counts(found):
    return {str(shape): count for shape, count in found.counts.items()}


def run(*arguments):
    """(stdout, stderr) of a command that must succeed."""
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result.stdout, result.stderr


def test_a_prepared_dataset(tmp_path):
    save_dataset(tmp_path / "prepared", {"1x60x104": 3, "21x60x104": 2})
    found = scan(tmp_path / "prepared")
    assert (found.kind, counts(found)) == ("prepared dataset", {"1x60x104": 3, "21x60x104": 2})
    out, err = run("scan", tmp_path / "prepared")
    assert out.splitlines()[-1].split() == ["21x60x104", "81x480x832", "32760", "2", "40.0%"]
    assert "prepared dataset: 5 samples in 2 shapes" in err
    assert err.splitlines()[-1].startswith(
        "next: accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes GPUS "
        "recipes/benchmark_shapes.py --dataset "
    )


def test_a_prepared_dataset_among_other_files_is_the_one_to_give(tmp_path):
    """As where it was prepared into the folder of its clips: its shards are no tar shards of WebDataset's kind."""
    save_dataset(tmp_path / "clips/prepared", {"1x8x8": 2})
    (tmp_path / "clips/prepared/shards").mkdir()
    (tmp_path / "clips/prepared/shards/0.tar").touch()
    write_clip(tmp_path / "clips/a.mp4", moving_bar(9))
    with pytest.raises(UserError, match=r"among other files. Give that one: .*clips/prepared$"):
        scan(tmp_path / "clips")


def test_cached_latents_whose_captions_have_lengths_of_their_own(tmp_path):
    for key, frames in (("a", 2), ("b", 2), ("c", 3)):
        save_musubi(tmp_path, key, latent(frames), torch.randn(frames, 8).bfloat16(), cut="00000-017")
    (tmp_path / "d.safetensors").write_bytes(b"cut short")
    found = scan(tmp_path)
    assert (found.kind, counts(found)) == ("latent files", {"2x4x6": 2, "3x4x6": 1})
    assert found.problems[0].startswith("d.safetensors: ")
    out, err = run("scan", tmp_path, "--patch-size", "1x4x4")
    assert out.splitlines()[2].split()[:4] == ["2x4x6", "5x32x48", "-", "2"]
    assert "-: no multiple of the patch size 1x4x4" in err and "1 files not counted" in err


@pytest.mark.parametrize(("channels", "pixels"), [(16, "5x32x48"), (48, "5x64x96"), (128, "9x128x192")])
def test_tar_shards_with_the_pixels_of_the_vae_that_has_so_many_channels(tmp_path, config, channels, pixels):
    members = sample_members("x", latent(channels=channels)) | sample_members("y", latent(channels=channels))
    save_shard(tmp_path / "shards" / "0.tar", members)
    shapes = tmp_path / "shapes.json"
    out, err = run("scan", tmp_path / "shards", "--json")
    shapes.write_text(out)
    found = json.loads(out)
    assert (found["kind"], found["samples"], found["shapes"]) == ("tar shards", 2, {"2x4x6": 2})
    assert found["buckets"] == [{"shape": "2x4x6", "pixels": pixels, "tokens": 12, "samples": 2}]
    assert err.splitlines()[-1].startswith("next: adaptiveload plan CONFIG --dataset ")
    options = ("--world-size", 1, "--gradient-accumulation-steps", 1, "--allow-extrapolation")
    planned = run("plan", config, "--shapes", shapes, *options)[0]
    assert pixels in planned
    assert planned == run("plan", config, "--dataset", tmp_path / "shards", *options)[0]


def test_clips_and_pictures_are_counted_as_they_are_shown_and_the_next_command_prepares_them(tmp_path):
    folder = tmp_path / "片段"
    (folder / ".hidden").mkdir(parents=True)
    clip = write_clip(folder / "a.mp4", moving_bar(33, 48, 80), rate=16)
    remux(clip, folder / "b.mkv")
    write_clip(folder / "slow.MTS", moving_bar(17, 48, 80), rate=8)
    Image.new("RGB", (80, 50)).save(folder / "c.PNG")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (50, 80)).save(folder / "d.jpg", exif=turned)
    write_sound(folder / "sound.mp4")
    write_clip(folder / "short.mp4", moving_bar(4, 48, 80), rate=16)
    (folder / "e.png").write_bytes(b"no picture")
    (folder / "cut.mp4").write_bytes(clip.read_bytes()[:500])
    os.mkfifo(folder / "pipe.mp4")
    (folder / "linked").symlink_to(tmp_path)
    Image.new("RGB", (80, 50)).save(folder / ".hidden" / "f.png")
    found = scan(folder)
    assert (found.kind, counts(found)) == ("clips and pictures", {"1x6x10": 2, "9x6x10": 3})
    refused = [problem.split(": ")[0] for problem in found.problems]
    assert sorted(refused) == ["cut.mp4", "e.png", "linked", "pipe.mp4", "short.mp4", "sound.mp4"]
    assert {"cut.mp4: Invalid data found when processing input", "pipe.mp4: it is no file"} <= set(found.problems)
    assert "short.mp4: too short: 4 frames at this fps, and the shortest clip has 5" in found.problems
    assert counts(scan(folder, fps=8)) == {"1x6x10": 2, "5x6x10": 3}
    err = run("scan", folder)[1]
    assert err.splitlines()[-1].endswith(
        "--pretrained_model_name_or_path PIPELINE --video_resolution_buckets 1x48x80 33x48x80"
    )


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png", ".avif"])
def test_an_animated_picture_is_counted_as_the_clip_that_is_prepared_of_it(tmp_path, suffix):
    shades = [Image.new("RGB", (80, 50), (tone, tone, tone)) for tone in range(0, 240, 10)]
    shades[0].save(tmp_path / f"a{suffix}", save_all=True, append_images=shades[1:], duration=125)
    shades[0].save(tmp_path / f"still{suffix}")
    assert counts(scan(tmp_path)) == {"1x6x10": 1, "12x6x10": 1}  # 24 pictures in 3 seconds: 48 frames, of them 45


def test_a_cover_picture_is_no_clip(tmp_path):
    cover = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(cover, "JPEG")
    write_sound(tmp_path / "song.mp4", cover.getvalue())
    with pytest.raises(UserError, match=r"song\.mp4: it has no video, only sound"):
        scan(tmp_path)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".ts"])
def test_what_comes_before_the_first_frame_is_no_part_of_a_clip(tmp_path, suffix):
    (tmp_path / "clips").mkdir()
    late = write_clip(tmp_path / "late.mp4", moving_bar(33, 48, 80), start=160)
    remux(late, tmp_path / "clips" / f"a{suffix}")
    assert counts(scan(tmp_path / "clips")) == {"9x6x10": 1}


def test_names_that_steer_a_terminal_are_printed_as_text(tmp_path):
    Image.new("RGB", (80, 50)).save(tmp_path / "a.png")
    for name in ("two\nlines.png", "\x1b[31mred.png", "坏.png"):
        (tmp_path / name).write_bytes(b"x")
    said = [line for line in run("scan", tmp_path)[1].splitlines() if line.startswith("not counted: ")]
    starts = (r"\x1b[31mred.png: ", r"two\nlines.png: ", "坏.png: ")
    assert len(said) == 3 and all(line.startswith(f"not counted: {start}") for line, start in zip(said, starts))


def test_a_dataset_on_the_hub_of_which_only_the_shapes_are_fetched(tmp_path, monkeypatch):
    def parquet(**columns):
        stream = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns), stream)
        return stream.getvalue()

    shapes = [[16, 1, 60, 104]] * 3 + [[16, 5, 60, 104]]
    latents = [os.urandom(1 << 19)] * 2 + [os.urandom(1 << 19)] * 2
    files = {f"data/train-{n}.parquet": parquet(latent=latents, latent_shape=shapes) for n in range(2)}
    with visited_hub(monkeypatch, tmp_path) as hub:
        hub.repositories["datasets/someone/latents"] = Repository()
        hub.repositories["datasets/someone/latents"].add(files)
        hub.repositories["datasets/someone/words"] = Repository()
        hub.repositories["datasets/someone/words"].add({"data/0.parquet": parquet(text=["a"]), "README.md": b""})
        hub.repositories["datasets/someone/clips"] = Repository()
        hub.repositories["datasets/someone/clips"].add({"a.mp4": b""})
        found = scan("someone/latents")
        assert (found.kind, counts(found)) == ("Hub dataset", {"1x60x104": 6, "5x60x104": 2})
        assert hub.sent_bytes < sum(map(len, files.values())) / 2
        for name, words in {
            "words": "has no column 'latent_shape', but text",
            "clips": "has no Parquet files. Download it and scan the folder: hf download someone/clips",
            "nothing": "is nothing here and no dataset on the Hub",
        }.items():
            with pytest.raises(UserError, match=words):
                scan(f"someone/{name}")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, r"There is no .*x\. Give a folder, tar shards, or the Hub id"),
        (lambda folder: (folder / "x").mkdir(), r"holds no samples: .* Files there: none"),
        (lambda folder: (folder / "x").write_text("?"), r"holds no samples: .* Files there: 1 without a suffix"),
        (
            lambda folder: ((folder / "x").mkdir(), (folder / "x" / "a.png").write_text("?")),
            r"None of the 1 clips and pictures in .*x can be read; a\.png: ",
        ),
    ],
)
def test_what_holds_no_samples_is_named(tmp_path, make, words):
    make(tmp_path)
    with pytest.raises(UserError, match=words):
        scan(tmp_path / "x")


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    Image.new("RGB", (80, 50)).save(tmp_path / "a.png")
    (tmp_path / "locked").mkdir()

    def scandir(folder, listing=os.scandir):
        if Path(folder).name == "locked":  # root, as whom tests may run, can read all
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return listing(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert scan(tmp_path).problems == ("locked: Permission denied",)


def test_frames_a_second_that_cannot_be_are_refused(tmp_path):
    for fps in (0, -1.0, math.inf, math.nan, 10**400):
        with pytest.raises(UserError, match="fps must be above 0 and at most 1000, but it is "):
            scan(tmp_path, fps=fps)


def test_a_clip_that_says_no_length_is_measured_by_its_packets(tmp_path):
    clip = write_clip(tmp_path / "a.mp4", moving_bar(33, 48, 80), rate=16)
    remux(clip, tmp_path / "b.mp4", container={"movflags": "frag_keyframe+empty_moov"})
    clip.unlink()
    assert scan(tmp_path).counts == {LatentShape(9, 6, 10): 1}
