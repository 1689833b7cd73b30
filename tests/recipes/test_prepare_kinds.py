"""Are SD3, image to video and TI2V prepared as their pipelines do it, and the Hub's datasets as folders are?"""

import shutil

import datasets
import pytest
import torch
from diffusers import StableDiffusion3Pipeline, WanImageToVideoPipeline
from encoders import find_family
from media import crop_to_fill
from PIL import Image
from safetensors.torch import load_file
from support.clips import decode_all, moving_bar, write_clip
from support.hub_server import OWNER, Repository, visited_hub
from support.preparing import report_of, run, tensor_of
from tiny_sd3 import save_tiny_sd3
from tiny_wan import save_tiny_wan, tiny_wan

from adaptiveload_hf import UserError
from adaptiveload_hf.buckets.collate import collate_prepared
from adaptiveload_hf.buckets.sources import load_prepared

close = torch.testing.assert_close


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_clip(folder / "clip.mp4", moving_bar(6, 64, 64))
    noise = torch.randint(0, 256, (40, 60, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    Image.fromarray(noise.numpy()).save(folder / "still.png")
    (folder / "clip.txt").write_text("a bar moves")
    (folder / "still.txt").write_text("noise 猫")
    return folder


def rows_by_file(output):
    return {row["file"]: row for row in load_prepared(output)}


@torch.no_grad()
def test_stills_become_the_latents_and_embeddings_of_sd3(root, tmp_path, monkeypatch):
    pipeline = save_tiny_sd3(tmp_path / "sd3")
    run(monkeypatch, root, tmp_path / "out", pipeline, buckets=["1x32x48"])
    (entry,) = report_of(tmp_path / "out")["refused"]
    assert (entry["file"], entry["reason"]) == ("clip.mp4", "it is a clip, but no bucket has more than one frame")
    row = rows_by_file(tmp_path / "out")["still.png"]
    pipe = StableDiffusion3Pipeline.from_pretrained(pipeline)
    picture = crop_to_fill(Image.open(root / "still.png"), 1, 32, 48)
    config = pipe.vae.config
    latent = pipe.vae.encode(pipe.image_processor.preprocess(picture)).latent_dist.mode()
    close(tensor_of(row, "latent"), ((latent - config.shift_factor) * config.scaling_factor)[0, :, None].bfloat16())
    words = {"do_classifier_free_guidance": False, "max_sequence_length": 48}
    for caption, found in (
        ("noise 猫", {name: tensor_of(row, name) for name in ("prompt_embeds", "pooled_prompt_embeds")}),
        ("", load_file(tmp_path / "out/empty_prompt_embeds.safetensors")),
    ):
        embeds, _, pooled, _ = pipe.encode_prompt(caption, None, None, **words)
        close(found["prompt_embeds"], embeds[0].bfloat16())
        close(found["pooled_prompt_embeds"], pooled[0].bfloat16())
    assert row["prompt_embeds_shape"] == [77 + 48, 64]
    with pytest.raises(SystemExit, match=r"needs 1 frame, and multiples of 16 pixels .*17x32x48 \(nearest: 1x32x48\)"):
        run(monkeypatch, root, tmp_path / "other", pipeline, buckets=["17x32x48"])
    (pipeline / "text_encoder_3").rename(pipeline / "elsewhere")
    with pytest.raises(SystemExit, match=r"has no text_encoder_3/, which its captions or latents are made with"):
        run(monkeypatch, root, tmp_path / "out", pipeline, buckets=["1x32x48"])


@torch.no_grad()
def test_image_to_video_gets_the_condition_that_its_pipeline_makes_of_the_first_frame(root, tmp_path, monkeypatch):
    pipeline = save_tiny_wan(tmp_path / "i2v", kind="i2v")
    run(monkeypatch, root, tmp_path / "out", pipeline, buckets=["1x32x48", "5x32x48"])
    row = rows_by_file(tmp_path / "out")["clip.mp4"]
    pipe = WanImageToVideoPipeline.from_pretrained(pipeline)
    first = crop_to_fill(Image.fromarray(decode_all(root / "clip.mp4")[0]), 1, 32, 48)
    image = pipe.video_processor.preprocess(first, height=32, width=48)
    size = {"height": 32, "width": 48, "num_frames": 5}
    _, condition = pipe.prepare_latents(image, 1, dtype=torch.float32, device="cpu", **size)
    close(tensor_of(row, "image_latent"), condition[0, 4:].bfloat16())
    close(tensor_of(row, "image_embeds"), pipe.encode_image(first, "cpu")[0].bfloat16())
    batch = collate_prepared([row, row])
    assert {name: list(tensor.shape) for name, tensor in batch.items() if isinstance(tensor, torch.Tensor)} == {
        "latent": [2, 16, 2, 4, 6],
        "image_latent": [2, 16, 2, 4, 6],
        "image_embeds": [2, 5, 16],
        "prompt_embeds": [2, 48, 32],
    }
    columns = load_prepared(tmp_path / "out").select_columns(["image_latent_shape", "image_embeds_shape"])
    assert columns[0] == {"image_latent_shape": [16, 2, 4, 6], "image_embeds_shape": [5, 16]}


@torch.no_grad()
def test_the_first_latent_frame_of_ti2v_is_that_of_the_first_frame_alone(root, tmp_path, monkeypatch):
    pipeline = save_tiny_wan(tmp_path / "ti2v", kind="ti2v")
    run(monkeypatch, root, tmp_path / "out", pipeline, buckets=["1x32x64", "5x32x64"])
    row = rows_by_file(tmp_path / "out")["clip.mp4"]
    assert row["latent_shape"] == [48, 2, 2, 4]
    first = crop_to_fill(Image.fromarray(decode_all(root / "clip.mp4")[0]), 1, 32, 64)
    pipe = tiny_wan(kind="ti2v")
    pixels = pipe.video_processor.preprocess(first)[:, :, None]
    alone = (pipe.vae.encode(pixels).latent_dist.mode()[0] - 0.1) / 2.0
    close(tensor_of(row, "latent")[:, :1], alone.bfloat16())
    assert not any(name.startswith("image") for name in row)
    with pytest.raises(SystemExit, match=r"multiples of 32 pixels .*5x48x64 \(nearest: 5x64x64\)"):
        run(monkeypatch, root, tmp_path / "other", pipeline, buckets=["5x48x64"])


def test_a_still_in_all_eight_orientations_is_eight_equal_latents(tmp_path, monkeypatch, tiny_pipeline):
    root, corners = tmp_path / "data", torch.zeros(64, 96, 3, dtype=torch.uint8).numpy()
    root.mkdir()
    corners[:32, :48], corners[:32, 48:], corners[32:, :48] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    turns = [None, 0, 3, 1, 5, 2, 6, 4]  # what a camera stores is the inverse of what a viewer does
    for orientation, turn in enumerate(turns, start=1):
        exif = Image.Exif()
        exif[0x0112] = orientation
        picture = Image.fromarray(corners)
        stored = picture if turn is None else picture.transpose(Image.Transpose(turn))
        stored.save(root / f"{orientation}.jpg", exif=exif, subsampling=0)
    run(monkeypatch, root, tmp_path / "out", tiny_pipeline, buckets=["1x48x32", "1x32x48"])
    rows = list(load_prepared(tmp_path / "out"))
    assert len(rows) == 8 and {tuple(row["latent_shape"]) for row in rows} == {(16, 1, 4, 6)}
    assert all(torch.equal(row["latent"], rows[0]["latent"]) for row in rows)


def test_automatic_buckets_are_those_that_the_files_need(root, tmp_path, monkeypatch, tiny_pipeline):
    words = ["--height", "32", "--width", "32", "--max_num_frames", "9"]
    run(monkeypatch, root, tmp_path / "out", tiny_pipeline, *words, buckets=["auto"])
    report = report_of(tmp_path / "out")
    assert report["buckets"] == {"1x4x4": 1, "2x4x4": 1}
    assert report["resized"] == {"same_size": 0, "reduced": 2, "enlarged": [], "cropped": 1, "cropped_by_a_third": []}


def test_datasets_of_the_hub_are_prepared_like_folders_and_only_what_changed_again(
    root, tmp_path, monkeypatch, tiny_pipeline, capsys
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    pictures = [Image.new("RGB", (48, 32), (tone,) * 3) for tone in (0, 100, 200)] + [None]

    def publish(captions):
        rows = datasets.Dataset.from_dict({"image": pictures, "text": captions, "number": range(4)})
        (tmp_path / "repo").mkdir(exist_ok=True)
        rows.cast_column("image", datasets.Image()).to_parquet(tmp_path / "repo/train.parquet")

    publish(["one", "two", None, "none"])
    source = ["--dataset_name", tmp_path / "repo"]
    run(monkeypatch, None, tmp_path / "out", tiny_pipeline, *source)
    report = report_of(tmp_path / "out")
    assert (report["added"], report["without_caption"]) == (3, ["00000002.png"])
    assert report["refused"][0]["reason"] == "its 'image' is empty, or names a file that is not there"
    publish(["one", "another", None, "none"])
    run(monkeypatch, None, tmp_path / "out", tiny_pipeline, *source)
    report = report_of(tmp_path / "out")
    assert (report["kept"], report["redone"]) == (2, [{"file": "00000001.png", "reason": "changed: its caption"}])
    assert "0 samples and 1 captions to encode" in capsys.readouterr().err

    for words, message in (
        ([*source, "--caption_column", "title"], "has no column 'title', but .* Say with --caption_column"),
        ([*source, "--video_column", "number"], r"Say with --video_column which of \['image'\] to take"),
        (["--dataset_name", tmp_path / "nothing"], "The split 'train' of the dataset .*nothing cannot be loaded: "),
        ([*source, "--instance_data_root", root], "Give either --instance_data_root, a folder, or --dataset_name"),
    ):
        with pytest.raises(SystemExit, match=message):
            run(monkeypatch, None, tmp_path / "out", tiny_pipeline, *words)


def test_another_dataset_does_not_take_the_place_of_one_whose_rows_have_the_same_numbers(
    tmp_path, monkeypatch, tiny_pipeline
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, tone in (("one", 0), ("two", 200)):
        rows = datasets.Dataset.from_dict({"image": [Image.new("RGB", (48, 32), (tone,) * 3)], "text": [name]})
        (tmp_path / name).mkdir()
        rows.cast_column("image", datasets.Image()).to_parquet(tmp_path / name / "train.parquet")
    run(monkeypatch, None, tmp_path / "out", tiny_pipeline, "--dataset_name", tmp_path / "one")
    with pytest.raises(SystemExit, match=r"has the files of the dataset \S+one, and .* Give another --output_dir, or"):
        run(monkeypatch, None, tmp_path / "out", tiny_pipeline, "--dataset_name", tmp_path / "two")
    assert load_prepared(tmp_path / "out")["caption"][:] == ["one"]
    shutil.rmtree(tmp_path / "out" / "media")
    run(monkeypatch, None, tmp_path / "out", tiny_pipeline, "--dataset_name", tmp_path / "two")
    assert load_prepared(tmp_path / "out")["caption"][:] == ["two"]


def test_a_video_folder_is_read_through_datasets_without_decoding(root, tmp_path, monkeypatch):
    from hub_rows import unpack_dataset

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "videos"
    folder.mkdir()
    (root / "clip.mp4").rename(folder / "clip.mp4")
    (folder / "metadata.csv").write_text("file_name,text\nclip.mp4,a bar\n")
    for _ in range(2):
        listing = unpack_dataset(str(folder), None, None, "text", tmp_path / "media")
        assert listing.captions == {"00000000.mp4": "a bar"}
        assert (tmp_path / "media/00000000.mp4").resolve() == folder / "clip.mp4"


def test_a_pipeline_is_read_at_its_revision(tiny_pipeline, tmp_path, monkeypatch):
    configs = {part: tiny_pipeline / part / "config.json" for part in ("vae", "transformer")}
    with visited_hub(monkeypatch, tmp_path) as hub:
        pipeline = hub.repositories[f"{OWNER}/wan"] = Repository(branches={"main": 0, "v2": 0})
        pipeline.add({f"{part}/config.json": path.read_bytes() for part, path in configs.items()}, "v2")
        assert find_family(f"{OWNER}/wan", "v2").vae == "AutoencoderKLWan"
        with pytest.raises(UserError, match="must be the folder or Hub id of a Wan or SD3 pipeline"):
            find_family(f"{OWNER}/wan")
