"""Folders of cached latents: other trainers' layouts are read bit for bit, and what is no sample is named."""

import gzip
import io
import os

import pytest
import torch
from safetensors.torch import save_file
from support.caches import latent, save_musubi

from adaptiveload_hf.buckets.collate import BatchReader, Failure, collate_prepared
from adaptiveload_hf.buckets.shapes import dataset_fingerprint, read_shapes
from adaptiveload_hf.buckets.sources import load_latent_folder
from adaptiveload_hf.errors import UserError


def shapes_of(dataset):
    index = read_shapes(dataset)
    return [str(index.shapes[bucket]) for bucket in index.bucket_of_sample]


def batch_of(dataset, *rows):
    batch = BatchReader(dataset, collate_prepared).__getitems__(list(rows))
    assert not isinstance(batch, Failure), batch
    return batch


def test_musubi_clips_images_and_captions_come_back_bit_for_bit(tmp_path):
    clip, still = latent(3), latent(1)
    long, short = torch.randn(5, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    save_musubi(tmp_path, "a_b", clip, long, cut="00000-009", caption="a long one")
    save_musubi(tmp_path, "a_b", clip + 1, cut="00009-009")
    save_musubi(tmp_path, "still", still, short, caption="short")
    dataset, problems = load_latent_folder(tmp_path, latent_normalized=True, prompt_length=6)
    assert problems == []
    assert shapes_of(dataset) == ["3x4x6", "3x4x6", "1x4x6"]
    batch = batch_of(dataset, 1, 0)
    assert torch.equal(batch["latent"], torch.stack([clip + 1, clip])) and batch["latent_normalized"] is True
    assert batch["caption"] == ["a long one", "a long one"]
    assert torch.equal(batch["prompt_embeds"], torch.cat([long, torch.zeros(1, 8)]).bfloat16().expand(2, 6, 8))
    assert torch.equal(batch_of(dataset, 2)["prompt_embeds"][0, :2], short)
    assert batch_of(dataset, 2)["prompt_embeds"][0, 2:].count_nonzero() == 0


def test_image_and_control_latents_are_tensors_beside_the_latent(tmp_path):
    control, image = latent(3), latent(3, channels=8)
    others = {"latents_control_3x4x6_bfloat16": control, "latents_image_3x4x6_bfloat16": image}
    others["f_indices_int32"] = torch.tensor([0, 4, 8], dtype=torch.int32)
    save_musubi(tmp_path, "a", latent(3), cut="00000-009", **others)
    dataset, problems = load_latent_folder(tmp_path, latent_normalized=True)
    assert problems == [] and shapes_of(dataset) == ["3x4x6"]
    batch = batch_of(dataset, 0, 0)
    assert torch.equal(batch["latents_control"][1], control) and torch.equal(batch["latents_image"][0], image)
    assert batch["f_indices"].tolist() == [[0, 4, 8]] * 2


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("latent", (4, 2, 4, 6)),
        ("latents", (1, 4, 2, 4, 6)),
        ("anything", (4, 2, 4, 6)),
        ("latents_2x4x6_bfloat16", (4, 2, 4, 6)),
    ],
)
def test_a_file_of_one_tensor_is_read_in_any_of_these_forms(tmp_path, key, shape):
    stored = torch.randn(shape).bfloat16()
    save_file({key: stored}, tmp_path / "x.safetensors")
    dataset, _ = load_latent_folder(tmp_path, latent_normalized=False)
    assert shapes_of(dataset) == ["2x4x6"]
    assert torch.equal(batch_of(dataset, 0)["latent"], stored.reshape(1, 4, 2, 4, 6))


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("latent", (4, 5, 6)),
        ("latents_5x6_bfloat16", (4, 5, 6)),
        ("latents_1x5x6_bfloat16", (4, 5, 6)),
        ("latents_1x5x6_bfloat16", (1, 4, 5, 6)),
    ],
)
def test_stills_without_frames_have_one_frame(tmp_path, key, shape):
    # FLUX.2, Z-Image, and Kandinsky 5, whose stills come as [1, C, H, W].
    stored = torch.randn(shape).bfloat16()
    save_file({key: stored}, tmp_path / "x.safetensors")
    dataset, _ = load_latent_folder(tmp_path, latent_normalized=False)
    assert shapes_of(dataset) == ["1x5x6"]
    assert torch.equal(batch_of(dataset, 0)["latent"], stored.reshape(1, 4, 1, 5, 6))


@pytest.mark.parametrize("compressed", [False, True])
def test_files_of_simpletuner_are_read_compressed_or_not(tmp_path, compressed):
    stored = {"a.pt": latent(3), "sub/b.pt": latent(1)[:, 0], "sub/c.pt": {"latents": latent(3), "num_frames": 9}}
    for name, content in stored.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        buffer = io.BytesIO()
        torch.save(content, buffer)
        (tmp_path / name).write_bytes(gzip.compress(buffer.getvalue()) if compressed else buffer.getvalue())
    dataset, problems = load_latent_folder(tmp_path, latent_normalized=True)
    assert problems == [] and shapes_of(dataset) == ["3x4x6", "1x4x6", "3x4x6"]
    batch = batch_of(dataset, 2, 0)
    assert torch.equal(batch["latent"][0], stored["sub/c.pt"]["latents"])
    assert torch.equal(batch["latent"][1], stored["a.pt"])
    assert torch.equal(batch_of(dataset, 1)["latent"][0, :, 0], stored["sub/b.pt"])


class Trap:
    def __reduce__(self):
        return (open, ("trapped", "w"))


@pytest.mark.parametrize("damaged", [b"", b"PK\x03\x04", b"\x1f\x8b", b"\x1f\x8bzip", "half", "other"])
def test_a_damaged_file_of_simpletuner_is_named(tmp_path, damaged):
    torch.save({"latents": latent(3).requires_grad_()}, tmp_path / "good.pt")
    if damaged == "other":
        torch.save({"prompt_embeds": torch.zeros(3, 8)}, tmp_path / "bad.pt")
    else:
        content = (tmp_path / "good.pt").read_bytes()
        (tmp_path / "bad.pt").write_bytes(content[: len(content) // 2] if damaged == "half" else damaged)
    dataset, problems = load_latent_folder(tmp_path, latent_normalized=True)
    assert batch_of(dataset, 0)["latent"].shape == (1, 4, 3, 4, 6)
    said = "is no whole file of torch.save" if damaged != "other" else "but found ['prompt_embeds']"
    assert len(problems) == 1 and problems[0].startswith("bad.pt: ") and said in problems[0]


def test_a_file_of_simpletuner_whose_pickle_is_empty_is_named(tmp_path):
    torch.save({"latents": latent(3)}, tmp_path / "good.pt")
    content = (tmp_path / "good.pt").read_bytes()
    start = content.index(b"\x80\x02")
    (tmp_path / "bad.pt").write_bytes(content[:start] + b"\x80\x02." + content[start + 3 :])
    dataset, problems = load_latent_folder(tmp_path, latent_normalized=True)
    assert len(dataset) == 1 and "bad.pt: is no whole file of torch.save" in problems[0]


def test_code_in_a_pickle_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(latent(), "good.pt")
    torch.save({"latents": Trap()}, "trap.pt")
    dataset, problems = load_latent_folder(".", latent_normalized=True)
    assert len(dataset) == 1 and not (tmp_path / "trapped").exists()
    assert problems[0].startswith("trap.pt: is no whole file of torch.save with tensors alone")


def test_whether_latents_are_normalised_is_asked_for(tmp_path):
    save_musubi(tmp_path, "a", latent())
    with pytest.raises(UserError, match=r"must be True or False, but is None\. Caches do not say"):
        load_latent_folder(tmp_path)
    with pytest.raises(UserError, match="but is 'yes'"):
        load_latent_folder(tmp_path, latent_normalized="yes")


def test_captions_of_their_own_length_need_one_length(tmp_path):
    # One row each: equal by chance, but a model trained on 512 rows is not to see one.
    for key in "ab":
        save_musubi(tmp_path, key, latent(), torch.randn(3, 8))
    with pytest.raises(UserError, match=r"own lengths, 3 to 3 rows.*512 for Wan"):
        load_latent_folder(tmp_path, latent_normalized=True)
    save_musubi(tmp_path / "other", "a", latent())
    (tmp_path / "a_wan_te.safetensors").rename(tmp_path / "other" / "b_wan_te.safetensors")
    assert len(load_latent_folder(tmp_path / "other", latent_normalized=True)[0]) == 1
    with pytest.raises(UserError, match="has 3 rows, more than prompt_length=2"):
        load_latent_folder(tmp_path, latent_normalized=True, prompt_length=2)
    with pytest.raises(UserError, match="is a number of rows such as 512, or None, but found -1"):
        load_latent_folder(tmp_path, latent_normalized=True, prompt_length=-1)


def test_plain_captions_of_one_length_need_nothing_more(tmp_path):
    embeds = torch.randn(1, 3, 8)
    save_file({"latent": latent(), "prompt_embeds": embeds}, tmp_path / "a.safetensors")
    dataset, _ = load_latent_folder(tmp_path, latent_normalized=True)
    assert torch.equal(batch_of(dataset, 0)["prompt_embeds"], embeds)
    save_file({"latent": latent(), "prompt_embeds": embeds[:, :2].clone()}, tmp_path / "b.safetensors")
    with pytest.raises(UserError, match="own lengths, 2 to 3 rows"):
        load_latent_folder(tmp_path, latent_normalized=True)


def damage(path, how):
    content = path.read_bytes()
    path.write_bytes({"short": content[:-3], "long": content + b"x", "empty": b"", "head": content[:20]}[how])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("short", r"bad.safetensors: should have \d+ bytes, but has \d+"),
        ("long", r"bad.safetensors: should have \d+ bytes, but has \d+"),
        ("empty", "bad.safetensors: 0 bytes that are not a whole safetensors file"),
        ("head", "bad.safetensors: 20 bytes that are not a whole safetensors file"),
    ],
)
def test_a_damaged_file_is_named_and_the_rest_kept(tmp_path, how, said):
    save_file({"latent": latent()}, tmp_path / "good.safetensors")
    save_file({"latent": latent()}, tmp_path / "bad.safetensors")
    damage(tmp_path / "bad.safetensors", how)
    dataset, problems = load_latent_folder(tmp_path, latent_normalized=True)
    assert dataset["file"][:] == ["good.safetensors"]
    assert len(problems) == 1
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(problems[0])


def stored(**tensors):
    return lambda path: save_file(tensors, path)


def header(content):
    return lambda path: path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(384))


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (stored(weight=torch.zeros(3, 3)), "'weight' must be [C, F, H, W] or, a still, [C, H, W], but is [3, 3]"),
        (stored(a=latent(), b=latent()), "expected one tensor 'latent' [C, F, H, W], but found {'a': [4, 2, 4, 6]"),
        (stored(prompt_embeds=torch.zeros(1, 5, 8)), "expected one tensor 'latent'"),
        (stored(latent=latent().to(torch.int32)), "is int32, but a latent is floating point"),
        (stored(latent=latent(), x_float32=torch.zeros(1), x_bool=torch.zeros(1).bool()), "are named ['x']"),
        # HiDream-O1 caches tokens of pixels [H, W, values] under a latent's name.
        (stored(latents_1x7x5_float32=torch.zeros(7, 5, 3)), "but is [7, 5, 3]"),
        (stored(latents_2x4x5_bfloat16=latent()), "but is [4, 2, 4, 6]"),
        (stored(latent=torch.zeros(4, 0, 4, 6)), "but is [4, 0, 4, 6]"),
        (stored(latent=latent(), mask=torch.zeros(1).to(torch.float8_e5m2)), "has the dtype F8_E5M2"),
        (
            stored(latent=latent(channels=5)),
            "has latent of 5 channels bfloat16; not used with the 2 that have latent of 4",
        ),
        (
            stored(latent=latent(), clip=torch.zeros(2)),
            "clip float32; not used with the 2 that have latent of 4 channels bfloat16",
        ),
        (lambda path: path.symlink_to("nowhere"), "No such file or directory"),
        (os.mkfifo, "it is no file"),
        (lambda path: path.write_bytes(b"\x02" + bytes(7) + b"[]"), "not a whole safetensors file"),
        (lambda path: path.write_bytes(b"\xff" * 8 + b"{}"), "not a whole safetensors file"),
        (header(b"[" * 100_000), "not a whole safetensors file"),
        (header(b'{"latent": {"dtype": "BF16", "shape": [4, -2, -4, 6], "data_offsets": [0, 384]}}'), "not a whole"),
        (header(b'{"latent": {"dtype": "BF16", "shape": [4, 2, 4, 6], "data_offsets": [-384, 0]}}'), "not a whole"),
        (header(b'{"latent": {"dtype": "BF16", "shape": [4, 2, 4, 5], "data_offsets": [0, 384]}}'), "has 384 bytes"),
        (header(b'{"__metadata__": {"caption1": "\\ud800"}}'), "not a whole safetensors file"),
        (stored(**{"a\nb": torch.zeros(2)}), "'a\\nb' must be [C, F, H, W]"),
    ],
)
def test_what_is_no_sample_like_the_others_is_named(tmp_path, write, said):
    for name in "xy":
        save_file({"latent": latent()}, tmp_path / f"{name}.safetensors")
    write(tmp_path / "bad.safetensors")
    dataset, problems = load_latent_folder(tmp_path, latent_normalized=True)
    assert dataset["file"][:] == ["x.safetensors", "y.safetensors"]
    assert len(problems) == 1 and problems[0].startswith("bad.safetensors: ") and said in problems[0]


def test_latents_without_a_caption_and_captions_without_latents_are_named(tmp_path):
    for key in "abc":
        save_musubi(tmp_path, key, latent(), torch.randn(3, 8))
    save_musubi(tmp_path, "a2", latent())
    (tmp_path / "a_wan_te.safetensors").unlink()
    (tmp_path / "b_0064x0064_wan.safetensors").unlink()
    dataset, problems = load_latent_folder(tmp_path, latent_normalized=True, prompt_length=3)
    assert dataset["file"][:] == ["c_0064x0064_wan.safetensors"]
    assert problems == [
        "b_wan_te.safetensors: no latents belong to it",
        *(
            f"{key}_0064x0064_wan.safetensors: has latent of 4 channels bfloat16; not used with the 1 that have "
            "latent of 4 channels bfloat16, prompt_embeds [8] float32"
            for key in ("a2", "a")
        ),
    ]


def test_latents_in_folders_of_a_system_are_named_and_not_used(tmp_path):
    for folder in ("sub", ".Trash-0/files", "@eaDir"):
        save_musubi(tmp_path / folder, "a", latent())
    dataset, problems = load_latent_folder(tmp_path, latent_normalized=True)
    assert dataset.select_columns("file")["file"][:] == ["sub/a_0064x0064_wan.safetensors"]
    said = "it is in a folder that is hidden or a system's own; not used"
    assert problems == [f"{name}/a_0064x0064_wan.safetensors: {said}" for name in (".Trash-0/files", "@eaDir")]


def test_a_name_that_is_not_utf8_is_named(tmp_path):
    save_file({"latent": latent()}, tmp_path / "good.safetensors")
    os.rename(tmp_path / "good.safetensors", os.fsencode(tmp_path) + b"/\xff.safetensors")
    save_file({"latent": latent()}, tmp_path / "good.safetensors")
    dataset, problems = load_latent_folder(tmp_path, latent_normalized=True)
    assert len(dataset) == 1 and problems == [r"'\udcff.safetensors': the name is not UTF-8"]


def test_a_folder_without_latents_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"in \*.safetensors or \*.pt files in .* but found none\."):
        load_latent_folder(tmp_path, latent_normalized=True)
    with pytest.raises(UserError, match=r"found none; .*absent: No such file or directory"):
        load_latent_folder(tmp_path / "absent", latent_normalized=True)
    (tmp_path / "a.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"found none; a.safetensors: 0 bytes that are not"):
        load_latent_folder(tmp_path, latent_normalized=True)


def test_a_file_that_changes_after_loading_is_named_when_read(tmp_path):
    for name in "abc":
        save_file({"latent": latent()}, tmp_path / f"{name}.safetensors")
    dataset, _ = load_latent_folder(tmp_path, latent_normalized=True)
    (tmp_path / "a.safetensors").unlink()
    save_file({"latent": latent().transpose(2, 3).contiguous()}, tmp_path / "b.safetensors")
    damage(tmp_path / "c.safetensors", "short")
    reader = BatchReader(dataset, collate_prepared)
    assert reader.__getitems__([0]).message == "a.safetensors cannot be read any more: No such file or directory"
    assert "b.safetensors had the latent shape [4, 2, 4, 6] when the dataset was" in reader.__getitems__([1]).message
    assert reader.__getitems__([2]).message == "c.safetensors cannot be read any more: it ends 3 bytes too early"


def test_nan_in_a_cache_is_named_with_its_file(tmp_path):
    save_file({"latent": latent(value=float("nan"))}, tmp_path / "a.safetensors")
    dataset, _ = load_latent_folder(tmp_path, latent_normalized=True)
    found = BatchReader(dataset, collate_prepared).__getitems__([0])
    assert found.message.startswith("The latent of sample 0 (a.safetensors) has NaN")


def test_the_fingerprint_sees_file_names_but_not_where_the_folder_is(tmp_path):
    def fingerprint(folder, *names):
        folder.mkdir()
        for name in names:
            save_file({"latent": latent(value=1)}, folder / f"{name}.safetensors")
        dataset, _ = load_latent_folder(folder, latent_normalized=True)
        return dataset_fingerprint(dataset, read_shapes(dataset))

    first = fingerprint(tmp_path / "1", "a", "b")
    assert fingerprint(tmp_path / "2", "a", "b") == first
    assert fingerprint(tmp_path / "3", "a", "c") != first


def test_shuffle_filter_and_select_work_and_columns_cost_no_reading(tmp_path):
    for number in range(6):
        save_musubi(tmp_path, str(number), latent(1 + number % 2), torch.randn(3, 8), caption=f"caption {number}")
    dataset, _ = load_latent_folder(tmp_path, latent_normalized=True, prompt_length=3)
    odd = dataset.filter(lambda caption: int(caption[-1]) % 2, input_columns="caption").shuffle(seed=1)
    assert sorted(odd["caption"][:]) == ["caption 1", "caption 3", "caption 5"]
    assert shapes_of(odd) == ["2x4x6"] * 3
    assert batch_of(odd, 0, 1, 2)["caption"] == odd["caption"][:]
    for file in tmp_path.iterdir():
        file.unlink()
    assert dataset.select_columns("caption")[4] == {"caption": "caption 4"} and len(shapes_of(dataset)) == 6
