"""Does preparing survive kill -9, a full disk, other runs, damaged shards and many processes?"""

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import prepare_dataset
import prepared_shards
import pytest
import sample_plan
from PIL import Image
from safetensors.torch import load_file, save_file
from support.clips import moving_bar, write_clip
from support.full_disk import files_of_at_most
from support.held_folder import folder_of_another_run
from support.launch import ROOT, command_of, environment_of, launch
from support.preparing import BUCKETS, arguments_of, report_of, rows_of, run
from support.train_ranks import look_through_own, train_on_ranks
from support.worlds import on_ranks
from torch.multiprocessing import ProcessExitedException

from adaptiveload_hf.buckets.sources import load_prepared
from adaptiveload_hf.errors import UserError

RECIPE = ROOT / "recipes" / "prepare_dataset.py"


@pytest.fixture
def root(tmp_path):
    """Eight clips and eight stills with captions of their own, but two that share theirs."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(8):
        write_clip(folder / f"{number}.mp4", moving_bar(5 + number))
        (folder / f"{number}.txt").write_text(f"caption {max(number, 1)}")
        Image.new("RGB", (48, 32), (number * 30,) * 3).save(folder / f"still {number}.png")
    return folder


@pytest.fixture
def encoded(monkeypatch):
    """The files that are decoded to be encoded."""
    files, read = [], sample_plan.read
    monkeypatch.setattr(sample_plan, "read", lambda path, *rest: files.append(path.name) or read(path, *rest))
    return files


def members(output) -> int:
    """How many latents and captions are whole on the disk."""
    shards = (output / "shards").glob("*.tar")
    return sum(1 for shard in shards for _ in prepared_shards.read_shard(output, f"shards/{shard.name}"))


def test_processes_share_the_work_and_one_that_is_killed_costs_only_what_it_was_at(
    root, tmp_path, monkeypatch, tiny_pipeline, encoded
):
    output = tmp_path / "out"
    command = command_of(RECIPE, *arguments_of(root, output, tiny_pipeline, buckets=BUCKETS))
    with open(tmp_path / "log", "w") as log:
        launcher = subprocess.Popen(
            command, cwd=ROOT, env=environment_of(), stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 240
        while members(output) < 12 and launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        ranks = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=True).stdout
        ranks = [int(rank) for rank in ranks.split()]
        os.kill(ranks[-1], signal.SIGKILL)
        assert launcher.wait(timeout=120) != 0
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    assert len(ranks) == 2 and not (output / "dataset").exists()
    done = members(output)
    assert 12 <= done < 24  # 16 latents, 7 captions and the empty one
    run(monkeypatch, root, output, tiny_pipeline)
    assert len(encoded) <= 24 - done
    again = len(encoded)
    run(monkeypatch, root, tmp_path / "fresh", tiny_pipeline)
    assert rows_of(load_prepared(output)) == rows_of(load_prepared(tmp_path / "fresh"))
    assert report_of(output) == report_of(tmp_path / "fresh")
    assert len(encoded) == again + 16


@pytest.mark.distributed
def test_two_processes_make_what_one_makes_and_say_it_once(root, tmp_path, monkeypatch, tiny_pipeline):
    (root / "broken.mp4").write_text("no clip")
    done = launch(RECIPE, *map(str, arguments_of(root, tmp_path / "out", tiny_pipeline)))
    assert done.returncode == 0, done.stderr
    run(monkeypatch, root, tmp_path / "fresh", tiny_pipeline)
    assert rows_of(load_prepared(tmp_path / "out")) == rows_of(load_prepared(tmp_path / "fresh"))
    assert report_of(tmp_path / "out") == report_of(tmp_path / "fresh")
    for said in ("refused broken.mp4", "0 samples kept, 16 added", "16 samples in "):
        assert done.stderr.count(said) == 1
    assert done.stdout.count("latent shape") == 1
    # Each process has one for captions and one for latents.
    assert len(list((tmp_path / "out" / "shards").iterdir())) == 4, "a process encoded nothing"


@pytest.mark.distributed
def test_processes_that_do_not_share_their_folder_end_before_anything_is_encoded(root, tmp_path, tiny_pipeline):
    """As on two machines without shared storage: all that one of them encodes would be lost."""
    words = list(map(str, arguments_of(root, tmp_path / "out", tiny_pipeline)))
    with pytest.raises(ProcessExitedException, match="exit code 1"):
        train_on_ranks(2, words, recipe="prepare_dataset", OWN_WORD=str(tmp_path / "out"), ERRORS=str(tmp_path))
    reason = (tmp_path / "0").read_text()
    assert re.search(r"rank 1 on \S+ does not see what rank 0 wrote; it finds \S+out1: 0 shards", reason)
    assert not (tmp_path / "out0" / "shards").exists() and not list((tmp_path / "out0").glob(".seen*"))


@pytest.mark.distributed
@pytest.mark.parametrize("other", ["fps", "weights"])
def test_processes_that_would_make_samples_of_another_kind_are_told(root, tmp_path, tiny_pipeline, other):
    """As on two machines with commands, or copies of the pipeline, of their own."""
    for rank in "01":
        shutil.copytree(tiny_pipeline, tmp_path / f"pipeline{rank}")
    weights = tmp_path / "pipeline1/vae/diffusion_pytorch_model.safetensors"
    save_file({name: 2 * value for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    pipeline, fps, own, said = {
        "fps": (tmp_path / "pipeline0", "1", "1", "--fps of rank 1 is 11 and that of rank 0 is 10,"),
        "weights": (tmp_path / "pipeline", "16", str(tmp_path / "pipeline"), "the pipeline of rank 1 is "),
    }[other]
    words = list(map(str, arguments_of(root, tmp_path / "out", pipeline, fps=fps)))
    with pytest.raises(ProcessExitedException, match="exit code 1"):
        train_on_ranks(2, words, recipe="prepare_dataset", OWN_WORD=own, ERRORS=str(tmp_path))
    assert said in (tmp_path / "0").read_text()
    assert not (tmp_path / "out" / "shards").exists()


@pytest.mark.distributed
def test_a_process_that_does_not_see_the_files_ends_all_and_refuses_none_of_its_share(tmp_path):
    (tmp_path / "data0").mkdir()
    (tmp_path / "data0" / "a.png").write_bytes(bytes(17))
    said = "the size in bytes of a.png of rank 1 is none and that of rank 0 is 17,"
    assert [words.startswith(said) for words in on_ranks(2, look_through_own, str(tmp_path / "data"))] == [True] * 2


def test_a_full_disk_ends_the_run_with_a_message_and_the_next_goes_on(
    root, tmp_path, monkeypatch, tiny_pipeline, encoded
):
    output = tmp_path / "out"
    run(monkeypatch, root, tmp_path / "fresh", tiny_pipeline)
    encoded.clear()
    size = max(path.stat().st_size for path in (tmp_path / "fresh" / "shards").iterdir())
    with files_of_at_most(size // 2), pytest.raises(SystemExit) as stop:
        run(monkeypatch, root, output, tiny_pipeline)
    assert "cannot be written: File too large. What is encoded is kept: make room" in str(stop.value.code)
    done, first = members(output), len(encoded)
    assert 0 < done < 24 and not (output / "dataset").exists()
    run(monkeypatch, root, output, tiny_pipeline)
    assert len(encoded) - first == 16 - (done - 8)  # the captions, seven and the empty one, were whole
    assert rows_of(load_prepared(output)) == rows_of(load_prepared(tmp_path / "fresh"))


def test_a_second_run_into_the_same_folder_is_refused(root, tmp_path, monkeypatch, tiny_pipeline):
    output = tmp_path / "out"
    with folder_of_another_run(output):
        with pytest.raises(
            SystemExit, match=r"another run \(process 7 on it\) is writing to .*out\. Wait for it, start"
        ):
            run(monkeypatch, root, output, tiny_pipeline)
        assert [path.name for path in output.iterdir()] == [".run.lock"]
    run(monkeypatch, root, output, tiny_pipeline)


def test_a_folder_on_a_file_system_without_locks_is_prepared_into_with_a_word(
    root, tmp_path, monkeypatch, tiny_pipeline, capsys
):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    run(monkeypatch, root, tmp_path / "out", tiny_pipeline)
    assert "out cannot be locked ([Errno 37] No locks available): start no second run" in capsys.readouterr().err
    assert len(load_prepared(tmp_path / "out")) == 16


def test_looking_through_is_kept_even_if_it_does_not_end(root, tmp_path, monkeypatch, tiny_pipeline):
    monkeypatch.setattr(sample_plan, "LOOKED_AT_ONCE", 6)
    looked, footage = [], sample_plan.FileRecords.footage

    def stopped_at_the_tenth(records, file, *rest):
        looked.append(file.name)
        if len(looked) == 10:
            raise KeyboardInterrupt
        return footage(records, file, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(sample_plan.FileRecords, "footage", stopped_at_the_tenth)
        patch.setattr(sample_plan, "in_threads", lambda _, function, items, ahead: [(i, function(i)) for i in items])
        with pytest.raises(SystemExit):
            run(monkeypatch, root, tmp_path / "out", tiny_pipeline)
    records = sample_plan.FileRecords(tmp_path / "out/prepare_files.json")
    assert len(records.earlier["files"]) == 6


def test_what_was_seen_of_many_files_is_not_written_anew_for_every_few_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_plan, "LOOKED_AT_ONCE", 1)
    monkeypatch.setattr(sample_plan, "gather", lambda _, found: [found])
    kept = []
    monkeypatch.setattr(sample_plan.FileRecords, "save", lambda self, finished: kept.append(len(self.seen["files"])))
    listing = sample_plan.Listing()
    for number in range(200):
        Image.new("L", (2, 2)).save(tmp_path / f"{number}.png")
        listing.captions[f"{number}.png"] = ""
    alone = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True)
    records = sample_plan.FileRecords(tmp_path / "records.json")
    assert len(sample_plan.look_through(alone, tmp_path, listing, Fraction(16), 1, records)) == 200
    assert kept[:10] == list(range(1, 11)) and len(kept) < 50
    assert all(later - earlier <= 0.1 * later + 1 for earlier, later in pairwise([*kept, 200]))


@pytest.mark.parametrize("damage", ["removed", "cut short"])
def test_a_damaged_shard_is_named_and_only_what_it_lost_is_made_again(
    root, tmp_path, monkeypatch, tiny_pipeline, encoded, damage
):
    output = tmp_path / "out"
    run(monkeypatch, root, output, tiny_pipeline)
    before = rows_of(load_prepared(output))
    (path,) = load_prepared(output).unique("path")
    if damage == "removed":
        (output / path).unlink()
    else:
        os.truncate(output / path, load_prepared(output).data.column("offset")[7].as_py())
    with pytest.raises(UserError, match=r"\.tar is missing or cut short\. Copy all of .*out, or run recipes/prepare"):
        load_prepared(output)
    encoded.clear()
    run(monkeypatch, root, output, tiny_pipeline)
    assert 0 < len(encoded) < 16 if damage == "cut short" else len(encoded) == 16
    assert rows_of(load_prepared(output)) == before


def test_a_new_shard_is_begun_beyond_its_size(root, tmp_path, monkeypatch, tiny_pipeline):
    run(monkeypatch, root, tmp_path / "one", tiny_pipeline)
    monkeypatch.setattr(prepared_shards, "SHARD_BYTES", 4000)
    run(monkeypatch, root, tmp_path / "many", tiny_pipeline)
    assert len(list((tmp_path / "many/shards").iterdir())) > 4
    assert rows_of(load_prepared(tmp_path / "one")) == rows_of(load_prepared(tmp_path / "many"))
    assert prepare_dataset.REPORT in {path.name for path in (tmp_path / "many").iterdir()}


def test_records_of_files_that_are_damaged_are_named(tmp_path):
    path = tmp_path / "prepare_files.json"
    path.write_text('{"files": {"a')
    with pytest.raises(UserError, match=r"prepare_files\.json is damaged: .*Remove it: all files will be looked into"):
        sample_plan.FileRecords(path)
