"""Does preparing again redo exactly what an edit affects, and does it survive being stopped anywhere?"""

import os
import shutil

import fingerprints
import prepare_dataset
import prepared_rows
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from support.clips import moving_bar, write_clip
from support.prepared import save_prepared
from support.preparing import BUCKETS, report_of, run

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
        look, read, encoder = fingerprints.look, prepare_dataset.read, prepare_dataset.Encoder
        load, prompt_embeds = encoder.__init__, encoder.prompt_embeds
        self.spy(fingerprints, "look", lambda path, *rest: self.note(self.looked, path) or look(path, *rest))
        self.spy(prepare_dataset, "read", lambda path, *rest: self.note(self.encoded, path) or read(path, *rest))
        self.spy(encoder, "__init__", lambda *rest: self.loaded.append(1) or load(*rest))
        self.spy(encoder, "prompt_embeds", lambda e, text: self.captions.append(text) or prompt_embeds(e, text))

    def spy(self, owner, name, function):
        self.monkeypatch.setattr(owner, name, function)

    def note(self, files, path):
        files.append(path.relative_to(self.root).as_posix())

    def run(self, *words, output=None):
        for notes in (self.looked, self.encoded, self.captions, self.loaded):
            notes.clear()
        run(self.monkeypatch, self.root, output or self.output, self.pipeline, *words, **self.options)

    def expect(self, *, looked=(), encoded=(), captions=(), kept=0, added=0, redone=None, removed=None):
        """Prepares again; what it did and reports must be this, and the dataset as if it were made anew."""
        self.run()
        assert (self.looked, self.encoded) == (list(looked), list(encoded))
        assert [text for text in self.captions if text] == list(captions)
        report = report_of(self.output)
        assert (report["kept"], report["added"]) == (kept, added)
        assert {entry["file"]: entry["reason"] for entry in report["redone"]} == (redone or {})
        assert {entry["file"]: entry["reason"] for entry in report["removed"]} == (removed or {})
        loaded, fresh = list(self.loaded), self.output.with_name("fresh")
        self.run(output=fresh)
        rows, expected = (load_prepared(folder).to_list() for folder in (self.output, fresh))
        assert rows == expected
        name = "empty_prompt_embeds.safetensors"
        assert (self.output / name).read_bytes() == (fresh / name).read_bytes()
        assert not (self.output / "unfinished").exists()
        shutil.rmtree(fresh)
        return bool(loaded)


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


def test_edited_captions_and_files_are_redone_and_nothing_else_is(preparing, root):
    assert preparing.expect(looked=EVERYTHING, encoded=EVERYTHING, captions=CAPTIONS, added=5)
    made = (preparing.output / "dataset").stat().st_ino
    assert not preparing.expect(kept=5), "no weights are loaded where nothing is to be encoded"
    for file in (root / "a.png", root / "a.txt", preparing.pipeline / "vae/config.json"):
        os.utime(file)
    assert not preparing.expect(kept=5)
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
        removed={"sub/a.mp4": "too short: 3 frames at this fps, and the shortest bucket of clips has 5"},
    )
    train_a_little(preparing.pipeline / "vae/diffusion_pytorch_model.safetensors")
    files = EVERYTHING[:-1]
    preparing.expect(encoded=files, redone=dict.fromkeys(files, "changed: the VAE"))
    train_a_little(preparing.pipeline / "text_encoder/model.safetensors")
    reason = "changed: the text encoder or its options"
    preparing.expect(captions=CAPTIONS[:-1], redone=dict.fromkeys(files, reason))


# Renames: 0 prepare_files.json, 1-3 the parts [a.mp4, a.png], [x, y], [z], 4 the old dataset away, 5 the new one in.
@pytest.mark.parametrize(("rename", "encoded"), [(2, ["x", "y", "z"]), (3, ["z"]), (5, [])])
def test_a_run_that_ends_at_any_rename_loses_nothing(preparing, root, monkeypatch, rename, encoded):
    monkeypatch.setattr(prepare_dataset, "SAMPLES_PER_PART", 2)
    preparing.run()
    for name in ("x", "y", "z"):
        still(root / f"{name}.png", ord(name))
    (root / "a.txt").write_text("new caption")
    replace, renames = os.replace, []

    def stopped(source, target):
        if len(renames) == rename:
            raise KeyboardInterrupt
        renames.append(target)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(prepared_rows.os, "replace", stopped)
        with pytest.raises(SystemExit):
            preparing.run()
    preparing.run()
    assert (preparing.encoded, preparing.loaded) == ([f"{name}.png" for name in encoded], [1] if encoded else [])
    report = report_of(preparing.output)
    assert (report["kept"], report["added"], len(report["redone"])) == (3, 3, 2)
    assert not (preparing.output / "unfinished").exists()
    preparing.run(output=preparing.output.with_name("fresh"))
    assert load_prepared(preparing.output).to_list() == load_prepared(preparing.output.with_name("fresh")).to_list()


def test_a_file_that_changes_while_it_is_encoded_is_refused_and_taken_the_next_time(preparing, monkeypatch):
    read = prepare_dataset.read

    def edited_meanwhile(path, *rest):
        sample = read(path, *rest)
        if path.name == "c.png":
            still(path, 200)
        return sample

    with monkeypatch.context() as patch:
        patch.setattr(prepare_dataset, "read", edited_meanwhile)
        preparing.run()
    assert report_of(preparing.output)["refused"] == [
        {"file": "c.png", "reason": "it was changed while this ran; give the same command again"}
    ]
    preparing.expect(looked=["c.png"], encoded=["c.png"], captions=["caption of c"], kept=4, added=1)


def test_a_dataset_of_other_files_or_without_fingerprints_is_only_replaced_when_asked_to(preparing, root, tmp_path):
    save_prepared(preparing.output, {"1x4x6": 2})
    with pytest.raises(SystemExit, match=r"has no fingerprints: .* Give another --output_dir, or --overwrite to enc"):
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
        SystemExit, match=r"has 5 samples, but not one of their files can be used in .*other\. Give another"
    ):
        preparing.run()
    assert len(load_prepared(preparing.output)) == 5
    preparing.run("--overwrite")
    assert load_prepared(preparing.output)["file"][:] == ["other.bmp"]
    assert (preparing.encoded, preparing.captions) == ([], ["", ""]), "the picture was encoded before"
