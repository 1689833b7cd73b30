"""What becomes of a run whose checkpoint is damaged, of another model, or cannot be written, or whose data changed?"""

import errno
import json
import os
import re
import shutil
from types import SimpleNamespace

import checkpoints
import pytest
import run_folder
import torch.distributed.checkpoint
from checkpoints import keep_metrics_until
from safetensors.torch import load_file, save_file
from support.accelerators import fresh_accelerate
from support.full_disk import files_of_at_most
from support.held_folder import folder_of_another_run
from support.prepared import save_prepared
from support.train_ranks import COUNTS, save_small_transformer, train_here
from torch.distributed.checkpoint.api import CheckpointException

from adaptiveload_hf import UserError, make_accelerator

LATEST = ("--resume_from_checkpoint", "latest")


@pytest.fixture(scope="module")
def setup(setup):
    setup.run = setup.folder / "run"
    train_here(setup, setup.run, max_train_steps=2, checkpointing_steps=1)
    return setup


@pytest.fixture
def run(setup, tmp_path):
    return shutil.copytree(setup.run, tmp_path / "run")


def test_a_checkpoint_that_lost_something_is_named_with_the_file_and_the_ones_that_are_whole(setup, run):
    latest = run / "checkpoint-2"
    file = latest / "optimizer.bin"
    size = file.stat().st_size
    os.truncate(file, size // 2)
    message = rf"checkpoint-2 is damaged: optimizer.bin was saved with {size} bytes, but has {size // 2}\."
    with pytest.raises(UserError, match=message + r".*--resume_from_checkpoint checkpoint-1"):
        train_here(setup, run, *LATEST, max_train_steps=3)
    file.unlink()
    with pytest.raises(UserError, match=r"optimizer.bin was saved with \d+ bytes, but is gone"):
        train_here(setup, run, *LATEST, max_train_steps=3)
    contents = json.loads((latest / "contents.json").read_text())
    for text in (json.dumps(contents)[:-2], json.dumps({"step": 2}), "[]", json.dumps(contents | {"files": {"a": 1}})):
        (latest / "contents.json").write_text(text)
        with pytest.raises(UserError, match=r"is damaged, or none of these trainers' checkpoints: contents\.json"):
            train_here(setup, run, *LATEST, max_train_steps=3)
    (latest / "contents.json").unlink()
    with pytest.raises(UserError, match=r"is damaged, or none of these trainers' checkpoints: contents\.json"):
        train_here(setup, run, *LATEST, max_train_steps=3)
    assert len(train_here(setup, run, "--resume_from_checkpoint", "checkpoint-1", max_train_steps=3)) == 3
    shutil.rmtree(run / "checkpoint-1")
    (run / "checkpoint-3" / "model.safetensors").unlink()
    shutil.rmtree(latest)
    with pytest.raises(UserError, match=r"There is no other checkpoint in \S+run\."):
        train_here(setup, run, *LATEST, max_train_steps=4)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl"])
def test_a_flipped_bit_in_any_file_of_a_checkpoint_is_named(setup, run, name):
    file = run / "checkpoint-2" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    message = (
        rf"checkpoint-2 is damaged: {name} has another content than was saved \(checksum \w+, it was \w+\)\. Go on"
    )
    with pytest.raises(UserError, match=message):
        train_here(setup, run, *LATEST, max_train_steps=3)


def test_a_checkpoint_of_another_model_or_of_other_weights_of_it_is_refused(setup, run, tmp_path):
    deeper = shutil.copytree(setup.pipeline, tmp_path / "deeper")
    save_small_transformer(deeper / "transformer", num_layers=3, ffn_dim=64)
    other = SimpleNamespace(pipeline=deeper, dataset=setup.dataset, config=setup.config)
    with pytest.raises(UserError, match=r"holds other weights than this run trains \(\d+ differ\)") as caught:
        train_here(other, run, *LATEST, max_train_steps=3)
    assert "blocks.0.ffn.net.0.proj.bias is [32] there and [64] here" in str(caught.value)
    lora = r"blocks.0.attn1.norm_k.weight is \[24\] there and not trained here.*Give the model, --rank"
    with pytest.raises(UserError, match=re.compile(lora, re.DOTALL)):
        train_here(setup, run, *LATEST, "--rank", 2, max_train_steps=3)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_what_is_left_and_the_command(setup, run):
    """As on a full disk: torch's writer then says "unexpected pos"."""
    with files_of_at_most(150_000), pytest.raises(UserError) as caught:  # less than the optimizer's
        train_here(setup, run, "--resume_from_checkpoint", "checkpoint-1", max_train_steps=3)
    said = str(caught.value)
    where = r"step 3 could not be written to \S+partial-checkpoint-3, where [\d.]+ GiB are free: .*unexpected pos"
    assert re.search(where, said)
    assert "Whole checkpoints: checkpoint-1, checkpoint-2." in said
    assert said.endswith("--resume_from_checkpoint latest")
    assert len(train_here(setup, run, *LATEST, max_train_steps=3)) == 3
    assert not list(run.glob("partial-*"))


def test_metrics_that_cannot_be_written_end_the_run_with_what_is_left_and_the_command(setup, tmp_path, capsys):
    """With capsys the words go to memory: a file of them would reach the limit first."""
    with (
        files_of_at_most(1_500),
        pytest.raises(UserError, match=r"the metrics of step \d could not be written") as error,
    ):
        train_here(setup, tmp_path, max_train_steps=8, checkpointing_steps=8)
    assert "Whole checkpoints: none." in str(error.value)
    assert len(train_here(setup, tmp_path, *LATEST, max_train_steps=2)) == 2


def test_a_sharded_checkpoint_that_cannot_be_written_is_named_with_the_ranks_own_reason(tmp_path):
    said = r"the checkpoint could not be written.* free: rank 0: RuntimeError.*unexpected pos"
    named = checkpoints.named_if_not_written("the checkpoint", tmp_path / "partial", tmp_path)
    with files_of_at_most(20_000), pytest.raises(UserError, match=said), named:
        torch.distributed.checkpoint.save({"weight": torch.zeros(9999)}, checkpoint_id=tmp_path / "partial")


GONE = torch.distributed.DistBackendError("peer is gone")
GONE_BY_GLOO = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer.")
OF_THE_GPU = torch.OutOfMemoryError(), torch.AcceleratorError("an illegal memory access")


@pytest.mark.parametrize(
    "error",
    [GONE, GONE_BY_GLOO, *OF_THE_GPU, *(CheckpointException("write", {1: (error, None)}) for error in OF_THE_GPU)],
    ids=repr,
)
def test_an_error_of_the_ranks_or_the_gpu_while_saving_is_not_taken_for_one_of_the_disk(tmp_path, error):
    with pytest.raises(type(error)), checkpoints.named_if_not_written("the checkpoint", tmp_path, tmp_path):
        raise error


def test_weights_that_were_trained_for_something_else_are_refused_though_names_and_sizes_fit(setup, run, tmp_path):
    contents = run / "checkpoint-2" / "contents.json"
    saved = json.loads(contents.read_text())
    assert saved.pop("settings") == {"expert": None, "lora_alpha": None}
    contents.write_text(json.dumps(saved))  # as before there were settings
    train_here(setup, run, *LATEST, max_train_steps=2)
    contents.write_text(json.dumps({**saved, "settings": {"expert": "high_noise"}}))
    with pytest.raises(UserError, match=r"checkpoint-2 was trained with --expert high_noise, but this run has None"):
        train_here(setup, run, *LATEST, max_train_steps=3)
    adapter = ("--rank", 2, "--lora_alpha")
    train_here(setup, tmp_path / "lora", *adapter, 2, max_train_steps=1)
    with pytest.raises(UserError, match=r"was trained with --lora_alpha 2\.0, but this run has 8\.0"):
        train_here(setup, tmp_path / "lora", *LATEST, *adapter, 8, max_train_steps=2)


def test_a_lora_on_other_base_weights_of_the_same_name_is_refused_and_a_copy_of_them_elsewhere_is_not(setup, tmp_path):
    adapter, run = ("--rank", 2), tmp_path / "run"
    here = shutil.copytree(setup.pipeline, tmp_path / "here")
    own = SimpleNamespace(pipeline=here, dataset=setup.dataset, config=setup.config)
    train_here(own, run, *adapter, max_train_steps=1)
    elsewhere = shutil.copytree(here, tmp_path / "elsewhere")
    weights = here / "transformer" / "diffusion_pytorch_model.safetensors"
    other = {name: 1.01 * value for name, value in load_file(weights).items()}
    save_file(other, weights, metadata={"format": "pt"})
    said = rf"checkpoint-1 holds a LoRA on other base weights \(digest \w+\) than those of {here} \(dig.* Give"
    with pytest.raises(UserError, match=said):
        train_here(own, run, *LATEST, *adapter, max_train_steps=2)
    train_here(own, run, *LATEST, *adapter, "--mixed_precision", "bf16", max_train_steps=1)  # said, not compared
    moved = SimpleNamespace(pipeline=elsewhere, dataset=setup.dataset, config=setup.config)
    assert len(train_here(moved, run, *LATEST, *adapter, max_train_steps=2)) == 2


def test_a_result_that_cannot_be_written_is_made_later_from_the_last_checkpoint(setup, run, capsys):
    said = r"(?s)the result could not be written .*Whole checkpoints: checkpoint"
    with files_of_at_most(20_000), pytest.raises(UserError, match=said):  # less than the transformer's
        train_here(setup, run, *LATEST, max_train_steps=2)
    train_here(setup, run, *LATEST, max_train_steps=2)
    said = capsys.readouterr().err
    assert said.count("nothing is left to train") == 2
    assert f"the trained transformer is in {run / 'transformer'}" in said


def test_going_on_from_an_earlier_checkpoint_says_which_later_ones_are_there(setup, run, capsys):
    train_here(setup, run, "--resume_from_checkpoint", "checkpoint-1", max_train_steps=1)
    assert "going on from checkpoint-1, though" in (said := capsys.readouterr().err)
    assert "holds checkpoint-2 of later steps. The first checkpoint of this run renames them" in said
    train_here(setup, run, "--resume_from_checkpoint", run / "checkpoint-2", max_train_steps=2)
    assert "of later steps" not in capsys.readouterr().err
    train_here(setup, run, "--resume_from_checkpoint", "checkpoint-1", max_train_steps=2)  # takes checkpoint-2's place
    assert list(checkpoints.checkpoints_in(run)) == [1, 2]


@pytest.mark.parametrize("limit", [(), ("--checkpoints_total_limit", 2)])
def test_a_run_that_goes_back_keeps_its_own_checkpoints_and_latest_means_them(setup, run, limit):
    for later in (5, 6):
        shutil.copytree(run / "checkpoint-2", run / f"checkpoint-{later}")
    back = ("--resume_from_checkpoint", "checkpoint-1", *limit)
    train_here(setup, run, *back, max_train_steps=2, checkpointing_steps=1)
    assert list(checkpoints.checkpoints_in(run)) == [1, 2]
    outdated = sorted(path.name for path in run.glob("outdated-checkpoint-*"))
    assert outdated == ([] if limit else ["outdated-checkpoint-5", "outdated-checkpoint-6"])


def test_a_checkpoint_of_another_run_is_not_gone_on_with_in_the_folder_of_one(setup, run, tmp_path):
    other = shutil.copytree(run / "checkpoint-1", tmp_path / "other" / "checkpoint-1")
    with pytest.raises(UserError, match=rf"already holds a run \(checkpoint-1, checkpoint-2\), of which .*{other} is"):
        train_here(setup, run, "--resume_from_checkpoint", other)


def test_the_learning_rate_and_options_of_the_command_count_and_not_the_checkpoints(setup, run, capsys):
    train_here(setup, run, *LATEST, "--adam_beta2", 0.5, max_train_steps=3, learning_rate=0)
    said = capsys.readouterr().err
    assert "lr 0.0 as given, not the checkpoint's 0.001\nbetas (0.9, 0.5) as given, not the" in said
    before, after = (load_file(run / f"checkpoint-{step}" / "model.safetensors") for step in (2, 3))
    assert all(torch.equal(before[name], after[name]) for name in before)
    decayed = ("--lr_scheduler", "linear")  # another schedule of another rate, for all the steps that are left
    metrics = train_here(setup, run, *LATEST, *decayed, max_train_steps=6, learning_rate=0.5)
    assert [line["learning_rate"] for line in metrics[3:]] == pytest.approx([0.5 / 3, 0.5 / 6, 0.0])


def test_options_that_differ_from_the_checkpoints_are_said_with_both_values(setup, run, capsys):
    """They are those of the new command; another shift or base would train for something else without a word, also
    where the shift is the pipeline's."""
    base = shutil.copytree(setup.pipeline, run.parent / "other base")
    other = SimpleNamespace(pipeline=base, dataset=setup.dataset, config=setup.config)
    scheduler = base / "scheduler" / "scheduler_config.json"
    scheduler.write_text(json.dumps({**json.loads(scheduler.read_text()), "shift": 5.0}))
    words = ("--lr_scheduler", "linear", "--batch_sizes", "1x4x4=2")
    train_here(other, run, *LATEST, *words, max_train_steps=3)
    said = [line for line in capsys.readouterr().err.splitlines() if "as given, not the checkpoint's" in line]
    assert said == [
        f"--pretrained_model_name_or_path {base} as given, not the checkpoint's {setup.pipeline}",
        "--shift 5.0 as given, not the checkpoint's 3.0",
        "--lr_scheduler linear as given, not the checkpoint's constant",
    ]


def test_a_checkpoint_without_a_scale_of_the_loss_is_refused_in_fp16(run):
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        accelerator = make_accelerator()
        accelerator.scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(UserError, match=r"checkpoint-2 was not written in fp16.*scaler\.pt.*--mixed_precision of"):
            checkpoints.find_checkpoint(accelerator, run, "latest")


def test_a_removal_that_is_killed_leaves_nothing_that_looks_like_a_checkpoint(run, monkeypatch):
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda folder: None)  # as if killed before
    checkpoints._remove(run / "checkpoint-2")
    assert list(checkpoints.checkpoints_in(run)) == [1]


def test_another_dataset_is_gone_on_with_when_asked(setup, run, tmp_path):
    other = save_prepared(tmp_path / "other", {**COUNTS, "1x4x4": 18})
    with pytest.raises(UserError, match=r"trained on another dataset.*on_dataset_change"):
        train_here(setup, run, *LATEST, dataset=other, max_train_steps=3)
    metrics = train_here(setup, run, *LATEST, "--on_dataset_change", "new_epoch", dataset=other, max_train_steps=3)
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert [line["epoch"] for line in metrics] == [0, 0, 1]


def test_an_output_dir_that_is_a_file_is_named(setup, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output_dir \S+file cannot be made a folder: .*File exists"):
        train_here(setup, tmp_path / "file")


def test_a_second_run_into_the_same_folder_is_refused_while_the_first_lives(setup, tmp_path):
    refused = pytest.raises(
        UserError, match=r"another run \(process 7 on it\) is writing to .*touch \S+STOP`, or give"
    )
    with folder_of_another_run(tmp_path), refused:
        train_here(setup, tmp_path)
    train_here(setup, tmp_path, max_train_steps=1)


def test_a_folder_that_cannot_be_locked_is_written_to_with_a_word(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.fcntl, "lockf", refuse)
    with fresh_accelerate(ACCELERATE_USE_CPU="true"), run_folder.only_run(make_accelerator(), tmp_path, ""):
        assert f"{tmp_path} cannot be locked ([Errno 37] No locks available): start no" in capsys.readouterr().err


def test_a_line_of_metrics_that_was_cut_short_or_damaged_is_dropped(tmp_path):
    lines = [json.dumps({"step": step, "samples": {}}) + "\n" for step in range(1, 5)]
    path = tmp_path / "metrics.jsonl"
    damaged = lines[1][:9] + "\n" + lines[1][:-2] + "\n" + "\0\0}\n" + '{"step": 1e999}\n'
    path.write_text(lines[0] + damaged + lines[1] + lines[2] + lines[3])
    keep_metrics_until(path, 3)
    assert path.read_text() == lines[0] + lines[1] + lines[2]
    assert (tmp_path / "outdated-metrics.jsonl").read_text() == lines[3]


def test_the_metrics_of_a_run_that_died_before_its_first_checkpoint_are_kept_when_it_begins_anew(run, setup, capsys):
    for checkpoint in checkpoints.checkpoints_in(run).values():
        shutil.rmtree(checkpoint)
    died = (run / "metrics.jsonl").read_text()
    assert len(train_here(setup, run, *LATEST, max_train_steps=1)) == 1
    assert (run / "outdated-metrics.jsonl").read_text() == died
    assert f"moved 2 lines of steps after 0 from {run / 'metrics.jsonl'} to " in capsys.readouterr().err
    shutil.rmtree(run / "checkpoint-1")
    train_here(setup, run, max_train_steps=1)
    assert (run / "outdated-metrics.jsonl").read_text().startswith(died)
    assert len((run / "outdated-metrics.jsonl").read_text().splitlines()) == 3
