"""Does preparing again redo exactly what an edit affects, and does it survive being stopped anywhere?"""

import json
import os
import shutil
from pathlib import Path

import fingerprints
import prepare_dataset
import pytest
import sample_plan
from PIL import Image
from safetensors.torch import load_file, save_file
from support.clips import moving_bar, write_clip
from support.prepared import save_prepared
from support.preparing import BUCKETS, report_of, rows_of, run

from adaptiveload_hf.buckets.sources import load_prepared


def still(path, tone, size=(48, 32)):
    Image.new("RGB", size, (tone,) * 3).save(path)


@pytest.fixture
def root(tmp_path):
    """a.mp4, a.png, sub/a.mp4 and two more stills; a.mp4 and a.png share their caption."""
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    write_clip(folder / "a.mp4", moving_bar(9))
    write_clip(folder / "sub/a.mp4", moving_bar(6))
    still(folder / "a.png", 10, (96, 64))
    still(folder / "b.bmp", 20)
    still(folder / "c.png", 30)
    for name in ("a", "sub/a", "b", "c"):
        (folder / f"{name}.txt").write_text(f"caption of {name}")
    return folder


class Preparing:
    """Prepares the folder again and again, and notes what was decoded and encoded."""

    def __init__(self, monkeypatch, root, output, pipeline):
        self.monkeypatch, self.root, self.output, self.options = monkeypatch, root, output, {}
        self.pipeline = pipeline
        self.looked, self.encoded, self.captions, self.loaded = [], [], [], []
        look, read, load_text = fingerprints.look, sample_plan.read, prepare_dataset.load_text_encoder
        load_media = prepare_dataset.load_media_encoder
        self.spy(fingerprints, "look", lambda path, *rest: self.note(self.looked, path) or look(path, *rest))
        self.spy(sample_plan, "read", lambda path, *rest: self.note(self.encoded, path) or read(path, *rest))
        self.spy(prepare_dataset, "load_media_encoder", lambda *rest: self.loaded.append("vae") or load_media(*rest))

        def load_text_and_note(*rest):
            self.loaded.append("text")
            encode = load_text(*rest)
            return lambda caption: self.captions.append(caption) or encode(caption)

        self.spy(prepare_dataset, "load_text_encoder", load_text_and_note)

    def spy(self, owner, name, function):
        self.monkeypatch.setattr(owner, name, function)

    def note(self, files, path):
        files.append(path.relative_to(self.root).as_posix())

    def run(self, *words, output=None):
        for notes in (self.looked, self.encoded, self.captions, self.loaded):
            notes.clear()
        run(self.monkeypatch, self.root, output or self.output, self.pipeline, *words, **self.options)

    def expect(self, *arguments, looked=(), encoded=(), captions=(), kept=0, added=0, redone=None, removed=None):
        """Prepares again; what it did and reports must be this, and no weights are loaded that it does not need."""
        self.run(*arguments)
        assert (sorted(self.looked), sorted(self.encoded)) == (sorted(looked), sorted(encoded))
        assert [text for text in self.captions if text] == list(captions)
        assert self.loaded == (["text"] if self.captions else []) + (["vae"] if encoded else [])
        report = report_of(self.output)
        assert (report["kept"], report["added"]) == (kept, added)
        assert {entry["file"]: entry["reason"] for entry in report["redone"]} == (redone or {})
        assert {entry["file"]: entry["reason"] for entry in report["removed"]} == (removed or {})
        assert not (self.output / "unfinished").exists()

    def is_as_if_made_anew(self):
        """The same rows as from an empty output folder, and nothing else in the shards."""
        fresh = self.output.with_name("fresh")
        self.run(output=fresh)
        assert rows_of(load_prepared(self.output)) == rows_of(load_prepared(fresh))
        name = "empty_prompt_embeds.safetensors"
        assert (self.output / name).read_bytes() == (fresh / name).read_bytes()
        dataset = load_prepared(self.output)
        named = {name for column in ("path", "text_path") for name in dataset.unique(column)}
        assert {f"shards/{path.name}" for path in (self.output / "shards").iterdir()} == named
        shutil.rmtree(fresh)


@pytest.fixture
def preparing(monkeypatch, root, tmp_path, tiny_pipeline):
    shutil.copytree(tiny_pipeline, tmp_path / "pipeline")
    return Preparing(monkeypatch, root, tmp_path / "out", tmp_path / "pipeline")


def train_a_little(weights):
    """Other weights in a file of the same size."""
    tensors = load_file(weights)
    name = max(tensors, key=lambda name: tensors[name].numel())
    save_file({**tensors, name: tensors[name] * 1.1}, weights, metadata={"format": "pt"})


EVERYTHING = ["a.mp4", "a.png", "b.bmp", "c.png", "sub/a.mp4"]
CAPTIONS = ["caption of a", "caption of b", "caption of c", "caption of sub/a"]


def test_edited_captions_and_files_are_redone_and_nothing_else_is(preparing, root, capsys):
    preparing.expect(looked=EVERYTHING, encoded=EVERYTHING, captions=CAPTIONS, added=5)
    made = (preparing.output / "dataset").stat().st_ino
    for file in (root / "a.png", root / "a.txt", preparing.pipeline / "vae/config.json"):
        os.utime(file)
    capsys.readouterr()
    preparing.expect(kept=5)
    assert "encoding" not in capsys.readouterr().err, "a bar of nothing"
    assert (preparing.output / "dataset").stat().st_ino == made

    (root / "sub/a.txt").write_text("another caption")
    preparing.expect(captions=["another caption"], kept=4, redone={"sub/a.mp4": "changed: its caption"})
    # A copy that keeps the size and the time of modification, as rsync makes it.
    before = (root / "b.bmp").stat()
    still(root / "b.bmp", 21)
    os.utime(root / "b.bmp", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (root / "b.bmp").stat().st_size == before.st_size
    preparing.expect(looked=["b.bmp"], encoded=["b.bmp"], kept=4, redone={"b.bmp": "changed: its content"})

    (root / "c.png").unlink()
    still(root / "sub/d.png", 40)
    preparing.expect(
        looked=["sub/d.png"],
        encoded=["sub/d.png"],
        kept=4,
        added=1,
        removed={"c.png": "it is not in the folder any more"},
    )
    (root / "a.mp4").rename(root / "moved.mp4")
    (root / "moved.txt").write_text("caption of a")
    preparing.expect(kept=4, added=1, removed={"a.mp4": "it is not in the folder any more"})
    preparing.is_as_if_made_anew()
    (root / "moved.mp4").write_bytes((root / "moved.mp4").read_bytes()[:1500])
    preparing.run()
    (entry,) = report_of(preparing.output)["removed"]
    assert entry["file"] == "moved.mp4"
    assert entry["reason"].startswith("FFmpeg cannot decode it")


def test_other_buckets_fps_and_weights_redo_what_they_change(preparing):
    preparing.run()
    preparing.options = {"buckets": [*BUCKETS, "1x64x96"]}
    preparing.expect(encoded=["a.png"], kept=4, redone={"a.png": "changed: its bucket"})
    # At half the rate sub/a.mp4 has 3 frames, a.mp4 still 5, but others.
    preparing.options["fps"] = "8"
    preparing.expect(
        looked=EVERYTHING,
        encoded=["a.mp4"],
        kept=3,
        redone={"a.mp4": "changed: its frames at this fps"},
        removed={"sub/a.mp4": "too short: 3 frames at --fps 8, and the shortest bucket of clips has 5"},
    )
    train_a_little(preparing.pipeline / "vae/diffusion_pytorch_model.safetensors")
    files = EVERYTHING[:-1]
    preparing.expect(encoded=files, redone=dict.fromkeys(files, "changed: the VAE"))
    train_a_little(preparing.pipeline / "text_encoder/model.safetensors")
    reason = "changed: the text encoder or its options"
    preparing.expect(captions=CAPTIONS[:-1], redone=dict.fromkeys(files, reason))
    preparing.is_as_if_made_anew()


def test_options_of_the_captions_and_a_transformer_that_takes_the_first_frame_redo_what_they_change(preparing):
    preparing.run()
    reason = dict.fromkeys(EVERYTHING, "changed: the text encoder or its options")
    shorter = ("--max_sequence_length", 40)
    preparing.expect(*shorter, captions=CAPTIONS, redone=reason)
    preparing.expect(*shorter, "--mixed_precision", "bf16", captions=CAPTIONS, redone=reason)
    config = preparing.pipeline / "transformer/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "in_channels": 36}))  # Wan 2.2 image to video
    again = dict.fromkeys(EVERYTHING, "changed: the VAE")
    preparing.expect(*shorter, "--mixed_precision", "bf16", encoded=EVERYTHING, redone=again)
    assert "image_latent_shape" in load_prepared(preparing.output).column_names


# Renames: 0-1 prepare_files.json, 2 that of the empty caption, 3 the report, 4 the old dataset away, 5 the new one in.
@pytest.mark.parametrize(("rename", "encoded"), [(0, ["x", "y"]), (2, []), (4, []), (5, [])])
def test_a_run_that_ends_at_any_rename_loses_nothing(preparing, root, monkeypatch, rename, encoded):
    preparing.run()
    for name in ("x", "y"):
        still(root / f"{name}.png", ord(name))
    (root / "a.txt").write_text("new caption")
    train_a_little(preparing.pipeline / "text_encoder/model.safetensors")
    replace, renames = os.replace, []

    def stopped(source, target):
        if len(renames) == rename:
            raise KeyboardInterrupt
        renames.append(target)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stopped)
        with pytest.raises(SystemExit) as stop:
            preparing.run()
    assert stop.value.code == 130
    preparing.run()
    assert sorted(preparing.encoded) == [f"{name}.png" for name in encoded]
    assert preparing.loaded == (["text", "vae"] if encoded else [])
    report = report_of(preparing.output)
    assert (report["kept"], report["added"], len(report["redone"])) == (0, 2, 5)
    if rename == 5:
        preparing.is_as_if_made_anew()


def test_shards_that_are_mostly_of_no_use_any_more_are_written_anew_without_encoding(preparing, root):
    preparing.run()
    for name in ("a.mp4", "sub/a.mp4", "b.bmp"):
        (root / name).unlink()
    before = sum(path.stat().st_size for path in (preparing.output / "shards").iterdir())
    gone = dict.fromkeys(("a.mp4", "sub/a.mp4", "b.bmp"), "it is not in the folder any more")
    preparing.expect("--overwrite", kept=2, removed=gone)
    assert sum(path.stat().st_size for path in (preparing.output / "shards").iterdir()) < before / 2
    preparing.is_as_if_made_anew()


def test_a_file_that_changes_while_it_is_encoded_is_refused_and_taken_the_next_time(preparing, monkeypatch):
    read = sample_plan.read

    def edited_meanwhile(path, *rest):
        sample = read(path, *rest)
        if path.name == "c.png":
            still(path, 200)
        return sample

    with monkeypatch.context() as patch:
        patch.setattr(sample_plan, "read", edited_meanwhile)
        preparing.run()
    assert report_of(preparing.output)["refused"] == [
        {"file": "c.png", "reason": "it was changed while this ran; give the same command again"}
    ]
    preparing.expect(looked=["c.png"], encoded=["c.png"], captions=["caption of c"], kept=4, added=1)


def test_a_folder_that_has_lost_most_of_its_files_costs_no_encoded_sample(preparing, root, tmp_path):
    preparing.run()
    for name in EVERYTHING[:3]:
        (root / name).rename(tmp_path / Path(name).name)
    with pytest.raises(SystemExit, match=r"5 files, but 3 of them cannot be used .* Is all of it mounted\?"):
        preparing.run()
    assert load_prepared(preparing.output)["file"][:] == EVERYTHING
    preparing.run("--overwrite")
    assert load_prepared(preparing.output)["file"][:] == EVERYTHING[3:]


def test_a_dataset_of_other_files_or_without_fingerprints_is_only_replaced_when_asked_to(preparing, root, tmp_path):
    save_prepared(preparing.output, {"1x4x6": 2})
    with pytest.raises(
        SystemExit, match=r"is not of this version of the recipe.* Give another --output_dir, or --overwrite to enc"
    ):
        preparing.run()
    assert len(load_prepared(preparing.output)) == 2
    assert not preparing.loaded
    preparing.run("--overwrite")
    assert load_prepared(preparing.output)["file"][:] == EVERYTHING

    other = tmp_path / "other"
    other.mkdir()
    (root / "b.bmp").rename(other / "other.bmp")
    preparing.root = other
    with pytest.raises(
        SystemExit, match=r"has samples of 5 files, but 5 of them cannot be used in .*other \(such as a"
    ):
        preparing.run()
    assert len(load_prepared(preparing.output)) == 5
    preparing.run("--overwrite")
    assert load_prepared(preparing.output)["file"][:] == ["other.bmp"]
    assert preparing.encoded == [], "the picture was encoded before"
