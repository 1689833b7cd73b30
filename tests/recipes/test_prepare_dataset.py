"""Does preparing keep every good sample, say what is wrong with the others, and encode as Wan's pipeline does?"""

import json
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path

import media
import pytest
import torch
from data_folder import list_samples
from diffusers import WanPipeline
from make_demo_clips import SAMPLES as DEMO_SAMPLES
from make_demo_clips import make_demo_clips
from PIL import Image
from safetensors.torch import load_file, save_file
from support.clips import moving_bar, real_clips, write_clip
from support.preparing import report_of, run, tensor_of

from adaptiveload_hf.buckets.sources import load_prepared


@pytest.fixture
def stills(tmp_path) -> Path:
    """Five pictures of their own grey, without captions."""
    folder = tmp_path / "stills"
    folder.mkdir()
    for index in range(5):
        Image.new("RGB", (48, 32), (index * 50,) * 3).save(folder / f"{index}.png")
    return folder


def test_real_clips_become_the_latents_and_embeddings_of_wan(tmp_path, monkeypatch, capsys, tiny_pipeline):
    root, captions = tmp_path / "clips", {name: f"a clip of {name} 猫" for name in real_clips()}
    root.mkdir()
    for name, path in real_clips().items():
        shutil.copy(path, root / f"{name}.MP4")
    rows = [{"file_name": f"{name}.MP4", "text": caption} for name, caption in captions.items()]
    (root / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(monkeypatch, root, tmp_path / "out", tiny_pipeline)

    assert report_of(tmp_path / "out") == {
        "samples": 4,
        "kept": 0,
        "added": 4,
        "redone": [],
        "removed": [],
        "resized": {"same_size": 0, "reduced": 4, "enlarged": [], "cropped": 4, "cropped_by_a_third": ["bikes.MP4"]},
        "refused": [],
        "buckets": {"5x4x6": 4},
        "without_caption": [],
        "texts_without_file": [],
        "clips_cut": [row["file_name"] for row in rows],
        "captions_cut": [],
        "hidden_files": 0,
        "other_files": {},
    }
    assert "5x4x6       17x32x48        4" in capsys.readouterr().out
    pipe = WanPipeline.from_pretrained(tiny_pipeline)
    mean, std = (
        torch.tensor(v).view(16, 1, 1, 1) for v in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    dataset = load_prepared(tmp_path / "out")
    assert dataset["file"][:] == [row["file_name"] for row in rows]
    for row in dataset:
        clip = root / row["file"]
        sample = media.read(clip, media.look(clip, Fraction(16), 17), media.Bucket(17, 32, 48))
        pixels = torch.from_numpy(sample).permute(3, 0, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            latent = (pipe.vae.encode(pixels[None]).latent_dist.mode()[0] - mean) / std
            embeds, _ = pipe.encode_prompt(row["caption"], do_classifier_free_guidance=False, max_sequence_length=48)
        assert row["caption"] == captions[clip.stem]
        assert row["latent_normalized"] is True
        assert row["latent_shape"] == [16, 5, 4, 6]
        torch.testing.assert_close(tensor_of(row, "latent"), latent.bfloat16())
        torch.testing.assert_close(tensor_of(row, "prompt_embeds"), embeds[0].bfloat16())
        assert tensor_of(row, "prompt_embeds")[len(row["caption"].encode()) + 1 :].abs().sum() == 0
    latents = {row["file"]: tensor_of(row, "latent") for row in dataset}
    assert not torch.equal(latents["carphone_pristine.MP4"], latents["carphone_distorted.MP4"])
    with torch.no_grad():
        empty, _ = pipe.encode_prompt("", do_classifier_free_guidance=False, max_sequence_length=48)
    saved = load_file(tmp_path / "out" / "empty_prompt_embeds.safetensors")["prompt_embeds"]
    torch.testing.assert_close(saved, empty[0].bfloat16())


def test_the_good_samples_of_a_bad_folder_are_kept_and_all_else_is_listed_before_encoding(
    tmp_path, monkeypatch, capsys, tiny_pipeline
):
    root = tmp_path / "data"
    for folder in ("sub", "__MACOSX", ".cache"):
        (root / folder).mkdir(parents=True)
    still = Image.new("RGB", (60, 40), "teal")
    for name in ("a.png", "sub/a.png", "B.JPEG", "no_row.png", "__MACOSX/a.png", ".cache/x.png", "._a.png"):
        still.save(root / name)
    write_clip(root / "a.mp4", moving_bar(9))
    write_clip(root / "sub/a.mp4", moving_bar(3))
    (root / "cut.mp4").write_bytes((root / "a.mp4").read_bytes()[:1500])
    (root / "empty.mp4").touch()
    (root / "broken_link.png").symlink_to("nowhere.png")
    (root / "notes.pdf").write_bytes(b"%PDF")
    still.save(tmp_path / "outside.png")
    lines = [
        '{"file_name": "a.png", "text": "one"}',
        '{"file_name": "./a.png", "text": "another"}',
        '{"file_name": "a.mp4", "text": "ein Clip, schön"}',
        '{"file_name": "sub/a.png"}',
        '{"file_name": "sub/a.mp4", "text": ""}',
        '{"file_name": "B.JPEG", "text": "upper case"}',
        '{"file_name": "../outside.png", "text": "out"}',
        f'{{"file_name": "{tmp_path}/outside.png", "text": "out"}}',
        '{"file_name": "gone.png", "text": "gone"}',
        '{"file_name": "cut.mp4", "text": "cut"}',
        '{"file_name": "empty.mp4", "text": "empty"}',
        '{"file_name": "broken_link.png", "text": "nowhere"}',
        '{"file_name": "a.png", "text": 3}',
        '["a.png"]',
        "",
    ]
    content = "\r\n".join(lines).encode("utf-8-sig") + '{"file_name": "a.png", "text": "é"}'.encode("cp1252")
    (root / "metadata.jsonl").write_bytes(content + b'\r\n{"file_name": "a.png", "te')
    run(monkeypatch, root, tmp_path / "out", tiny_pipeline)

    report = report_of(tmp_path / "out")
    refused = {entry["file"]: entry["reason"] for entry in report["refused"]}
    out_of = "leads out of the folder; only files in it are read"
    assert refused == {
        "metadata.jsonl:2": "a.png has a row already, at metadata.jsonl:1; that one counts",
        "metadata.jsonl:7": f"../outside.png {out_of}",
        "metadata.jsonl:8": f"{tmp_path}/outside.png {out_of}",
        "metadata.jsonl:9": "no picture or clip gone.png is in the folder",
        "metadata.jsonl:13": 'its "text" must be a string, but it is 3',
        "metadata.jsonl:14": "it must be a JSON object",
        "metadata.jsonl:15": "it is not UTF-8; save the file as UTF-8",
        "metadata.jsonl:16": "it is not JSON, or cut short, at column 24",
        "no_row.png": "metadata.jsonl has no row for it",
        "empty.mp4": "it is empty (0 bytes)",
        "broken_link.png": "it cannot be read: No such file or directory",
        "sub/a.mp4": "too short: 3 frames at --fps 16, and the shortest bucket of clips has 5",
        "cut.mp4": refused["cut.mp4"],
    }
    assert refused["cut.mp4"].startswith("FFmpeg cannot decode it")
    assert (report["samples"], report["buckets"]) == (4, {"1x4x6": 3, "2x4x6": 1})
    assert (report["without_caption"], report["hidden_files"], report["other_files"]) == (
        ["sub/a.png"],
        3,
        {".pdf": 1},
    )
    dataset = load_prepared(tmp_path / "out")
    kept = dict(zip(dataset["file"], dataset["caption"]))
    assert kept == {"a.png": "one", "a.mp4": "ein Clip, schön", "sub/a.png": "", "B.JPEG": "upper case"}
    words = capsys.readouterr().err
    assert all(f"refused {file}: {reason}\n" in words for file, reason in refused.items())
    assert words.splitlines()[-1] == f"next: adaptiveload scan {tmp_path / 'out'}"
    assert words.index("4 samples can be used, 13 refused") > words.rindex("refused cut.mp4")
    assert words.index("4 samples can be used, 13 refused") < words.index("encoding")
    assert "passed over, neither pictures nor clips by their suffix: 1 .pdf\n" in words
    bare = "without a caption, and given the empty one: 1 of the samples, sub/a.png; prepare_report.json"
    assert words.index(bare) < words.index("encoding")


def test_without_metadata_a_caption_is_the_text_beside_the_file(tmp_path, monkeypatch, capsys, stills, tiny_pipeline):
    (stills / "0.txt").write_bytes("\ufeffa dark picture\r\n".encode())
    (stills / "1.txt").write_bytes("é".encode("cp1252"))
    (stills / "2.txt").write_text("long " * 20)
    (stills / "3.png.txt").write_text("named in another way")
    run(monkeypatch, stills, tmp_path / "out", tiny_pipeline)
    report, dataset = report_of(tmp_path / "out"), load_prepared(tmp_path / "out")
    assert dataset["caption"][:] == ["a dark picture", ("long " * 20).strip(), "", ""]
    assert report["without_caption"] == ["3.png", "4.png"]
    assert report["captions_cut"] == ["2.png"]
    assert report["texts_without_file"] == ["3.png.txt"]
    words = capsys.readouterr().err
    missing = words.index(
        "captions that no picture or clip is named like: 1 .txt, 3.png.txt; prepare_report.json names all"
    )
    assert missing < words.index("encoding")
    assert "captions cut to 48 tokens: 1 of the samples, 2.png; prepare_report.json names all" in words
    assert report["refused"] == [{"file": "1.png", "reason": "its .txt is not UTF-8; save it as UTF-8"}]


def overflowing_pipeline(tiny_pipeline, folder) -> Path:
    """A copy of the tiny pipeline whose VAE starts with weights so large that all but middle grey overflows."""
    shutil.copytree(tiny_pipeline, folder)
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    weight = tensors["encoder.conv_in.weight"]
    tensors["encoder.conv_in.weight"] = weight / weight.abs().max() * 3.3e38
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def test_a_sample_whose_latent_has_nan_is_refused_by_name(tmp_path, monkeypatch, capsys, tiny_pipeline):
    root = tmp_path / "data"
    root.mkdir()
    for name, tone in (("grey", 127), ("white", 255), ("darker", 126)):
        Image.new("RGB", (48, 32), (tone,) * 3).save(root / f"{name}.png")
    pipeline = overflowing_pipeline(tiny_pipeline, tmp_path / "overflowing")
    run(monkeypatch, root, tmp_path / "out", pipeline)
    assert report_of(tmp_path / "out")["refused"] == [
        {"file": "white.png", "reason": "its latent has NaN or infinity"}
    ]
    assert load_prepared(tmp_path / "out")["file"][:] == ["darker.png", "grey.png"]

    for name in ("grey", "darker"):
        (root / f"{name}.png").unlink()
    with pytest.raises(SystemExit, match="No sample could be encoded, for the reasons listed above"):
        run(monkeypatch, root, tmp_path / "none", pipeline)
    assert not (tmp_path / "none" / "dataset").exists()
    assert "refused white.png: its latent has NaN or infinity" in capsys.readouterr().err


def with_config(tiny_pipeline, folder, component, **values) -> Path:
    shutil.copytree(tiny_pipeline, folder)
    path = folder / component / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def test_illegal_buckets_are_named_with_the_nearest_legal_ones_before_any_file_is_read(
    tmp_path, monkeypatch, capsys, tiny_pipeline
):
    # Wan 2.2 TI2V-5B compresses 16 pixels into one.
    ti2v = with_config(tiny_pipeline, tmp_path / "ti2v", "vae", scale_factor_spatial=16)
    for pipeline, step, nearest in ((tiny_pipeline, 16, "81x176x320"), (ti2v, 32, "81x192x320")):
        with pytest.raises(SystemExit) as error:
            run(monkeypatch, tmp_path / "no folder", tmp_path, pipeline, buckets=["80x180x320", "1x320x320", "3x2x32"])
        message = str(error.value.code)
        assert message.startswith("prepare_dataset.py: error: A bucket is frames x height x width, and this")
        assert "needs 4n+1 frames" in message
        assert f"multiples of {step} pixels" in message
        assert f"80x180x320 (nearest: {nearest}), 3x2x32 (nearest: 1x{step}x32)." in message
        assert "1x320x320 (" not in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": ["60x104"]}, "frames x height x width in pixels, as 1x60x104 for stills, but it is '60x104'"),
        ({"buckets": ["big"]}, "frames x height x width in pixels, as 81x480x832, or is auto, but it is 'big'"),
        ({"fps": "0"}, "--fps must be a positive number such as 16, 23.976 or 30000/1001, but it is 0"),
        ({"fps": "fast"}, "--fps must be a positive number such as 16, 23.976 or 30000/1001, but it is fast"),
        ({"root": "gone"}, "--instance_data_root must be a folder, but "),
        ({"root": "empty"}, "has no picture or clip that can be used"),
        ({"root": "unusable"}, "has no usable row. Fix the rows listed above"),
        ({"root": "utf16"}, "metadata.jsonl is UTF-16. Save it as UTF-8"),
        ({"pipeline": "gone"}, "must be the folder or Hub id of a Wan or SD3 pipeline: "),
        (
            {"pipeline": "other"},
            "must be a Wan or SD3 pipeline, but its VAE and transformer are AutoencoderKL and WanTransformer3DModel.",
        ),
    ],
)
def test_what_the_caller_can_mend_ends_with_a_message_and_no_traceback(
    tmp_path, monkeypatch, stills, tiny_pipeline, options, message
):
    for folder, content in (("empty", None), ("unusable", b'{"file'), ("utf16", "{}".encode("utf-16"))):
        (tmp_path / folder).mkdir()
        if content:
            (tmp_path / folder / "metadata.jsonl").write_bytes(content)
    with_config(tiny_pipeline, tmp_path / "other", "vae", _class_name="AutoencoderKL")
    root = tmp_path / options["root"] if "root" in options else stills
    pipeline = tmp_path / options["pipeline"] if "pipeline" in options else tiny_pipeline
    where = {name: options[name] for name in ("buckets", "fps") if name in options}
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, root, tmp_path / "out", pipeline, **where)
    assert str(error.value.code).startswith("prepare_dataset.py: error: ")
    assert message in str(error.value.code)
    assert not (tmp_path / "out" / "dataset").exists()


@pytest.mark.parametrize("name", ["--max_num_frames", "--height", "--width", "--max_sequence_length"])
def test_a_size_that_makes_no_sense_is_wrong_usage(tmp_path, monkeypatch, capsys, name):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, tmp_path, tmp_path / "out", "PIPELINE", name, -5)
    assert f"argument {name}: must be at least 1, but it is -5" in capsys.readouterr().err


def test_the_demo_files_are_the_same_each_time_and_fill_every_bucket_they_were_made_for(tmp_path):
    paths, again = make_demo_clips(tmp_path / "clips"), make_demo_clips(tmp_path / "again")
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]
    listing = list_samples(tmp_path / "clips")
    buckets = [media.Bucket(*size) for size in DEMO_SAMPLES]
    chosen = Counter(
        media.choose_bucket(media.look(tmp_path / "clips" / file, Fraction(16), 33), buckets, 16)
        for file in listing.captions
    )
    assert chosen == DEMO_SAMPLES
    assert (listing.refused, listing.without_caption) == ([], [])
    assert " moving " in listing.captions[paths[-1].name]


def test_clips_of_which_more_than_a_third_is_left_over_are_named(tmp_path, monkeypatch, capsys, tiny_pipeline):
    (tmp_path / "clips").mkdir()
    for frames in (5, 7, 8, 9, 13, 14):
        write_clip(tmp_path / "clips" / f"{frames:02}.mp4", moving_bar(frames))
    run(monkeypatch, tmp_path / "clips", tmp_path / "out", tiny_pipeline, buckets=["5x32x48", "9x32x48"])
    report = report_of(tmp_path / "out")
    assert (report["buckets"], report["clips_cut"]) == ({"2x4x6": 3, "3x4x6": 3}, ["08.mp4", "14.mp4"])
    assert "a third of their frames is left over: 2 of the samples, 08.mp4, 14.mp4; prep" in capsys.readouterr().err


def test_pictures_that_are_enlarged_or_of_which_most_is_cut_away_are_named(
    stills, tmp_path, monkeypatch, capsys, tiny_pipeline
):
    for name, size in (("tall.png", (32, 96)), ("square.png", (48, 48))):
        Image.new("RGB", size).save(stills / name)
    run(monkeypatch, stills, tmp_path / "out", tiny_pipeline, buckets=["1x32x48"])
    resized = report_of(tmp_path / "out")["resized"]
    assert (resized["enlarged"], resized["cropped_by_a_third"]) == (["tall.png"], ["tall.png"])
    printed = capsys.readouterr().err
    assert "enlarged to fill their bucket: 1 of the samples, tall.png; prepare_report.json names all" in printed
    assert "cut away: 1 of the samples, tall.png; prepare_report.json names all" in printed
