"""Do runs on two FSDP2 ranks train, die together with the reason, and go on bit for bit, also on other ranks?"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from support.accelerators import FSDP2, free_port
from support.launch import ROOT, command_of, environment_of, launch
from support.prepared import save_prepared
from support.train_ranks import (
    COUNTS,
    arguments,
    difference_of_arguments,
    held_out_loss,
    metrics_of,
    timeless,
    train_here,
    train_on_ranks,
    work_alone,
)
from support.worlds import on_ranks
from torch.distributed.checkpoint import FileSystemReader
from torch.multiprocessing import ProcessExitedException

from adaptiveload_hf import UserError

RECIPE = ROOT / "recipes" / "train_wan.py"
LATEST = ("--resume_from_checkpoint", "latest")

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def undisturbed(setup):
    """8 optimizer steps on two ranks, over the end of the first epoch, keeping the newest checkpoint; launched."""
    run = setup.folder / "undisturbed"
    done = launch(RECIPE, *arguments(setup, run, "--checkpoints_total_limit", 1))
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(folder=run, stderr=done.stderr, metrics=metrics_of(run))


def test_a_launched_run_trains_every_sample_once_an_epoch_and_says_what_it_does(undisturbed):
    metrics = undisturbed.metrics
    assert [line["step"] for line in metrics] == list(range(1, 9))
    first_epoch = [line for line in metrics if line["epoch"] == 0]
    assert 0 < len(first_epoch) < 8, "the run should go over an epoch's end"
    for line in metrics:
        assert [len(micro_step) for micro_step in line["micro_batches"]] == [2, 2]
        assert 0 < line["balance_efficiency"] <= 1
    assert sum(line["samples"] for line in first_epoch) == sum(COUNTS.values())
    assert undisturbed.stderr.count("***** Running training *****") == 1
    assert "WanTransformerBlock" in undisturbed.stderr, "the patch report"
    assert [path.name for path in undisturbed.folder.glob("*checkpoint*")] == ["checkpoint-8"]
    WanTransformer3DModel.from_pretrained(undisturbed.folder / "transformer")


def test_a_run_whose_rank_is_killed_goes_on_bit_for_bit(undisturbed, setup, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(ProcessExitedException, match="signal SIGKILL"):
        train_on_ranks(2, arguments(setup, run), kill_at=12)
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-4"]
    (run / "partial-checkpoint-8").mkdir()  # as a kill during a save leaves it
    train_on_ranks(2, arguments(setup, run, *LATEST))
    assert timeless(metrics_of(run)) == timeless(undisturbed.metrics)
    assert [path.name for path in run.glob("*checkpoint-8")] == ["checkpoint-8"]


def test_a_run_of_two_ranks_goes_on_on_one_if_that_one_shards_too(undisturbed, setup, tmp_path):
    run = shutil.copytree(undisturbed.folder, tmp_path / "run")
    words = arguments(setup, run, *LATEST, max_train_steps=None, num_train_epochs=2)
    with pytest.raises(UserError, match=r"checkpoint-8 was written under FSDP2, but .* Launch with an FSDP2 config"):
        train_here(setup, run, *LATEST, max_train_steps=None, num_train_epochs=2)
    train_on_ranks(1, words)
    second = [line for line in metrics_of(run) if line["epoch"] == 1]
    assert sum(line["samples"] for line in second) == sum(COUNTS.values())
    assert {len(step) for line in second for step in line["micro_batches"]} == {1, 2}


def test_a_stop_that_one_rank_alone_was_asked_for_ends_both_with_a_checkpoint(setup, tmp_path):
    train_on_ranks(2, arguments(setup, tmp_path), terminate_at=5)
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert not (tmp_path / "transformer").exists()


def test_a_lora_under_activation_checkpointing_is_validated_and_goes_on_bit_for_bit(setup, tmp_path):
    options = ("--rank", 2, "--validation_dataset", setup.dataset, "--validation_prompt", "a cat")
    options += ("--validation_resolution", "1x32x32", "--validation_inference_steps", 1)
    environment = {"FSDP_ACTIVATION_CHECKPOINTING": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}
    steps = {"max_train_steps": 3, "checkpointing_steps": 2}
    train_on_ranks(2, arguments(setup, tmp_path / "whole", *options, **steps), **environment)
    assert (tmp_path / "whole" / "validation" / "step-3-0.mp4").stat().st_size > 0
    assert (tmp_path / "whole" / "pytorch_lora_weights.safetensors").exists()
    cut = shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(cut / "checkpoint-3")
    kept = FileSystemReader(cut / "checkpoint-2" / "pytorch_model_fsdp_0").read_metadata().state_dict_metadata
    assert len(kept) == 2 * 2 * 2 * 4
    assert all("lora_" in name for name in kept), "the frozen base should be in no checkpoint"
    train_on_ranks(2, arguments(setup, cut, *options, *LATEST, **steps), **environment)
    assert timeless(metrics_of(cut)) == timeless(metrics_of(tmp_path / "whole"))
    assert metrics_of(cut)[2]["validation_loss"] > 0


def test_ranks_that_do_not_share_their_folder_end_with_what_each_of_them_sees(setup, tmp_path):
    """As on two machines without shared storage: one would resume, the other start afresh."""
    (tmp_path / "run0" / "checkpoint-4").mkdir(parents=True)
    words = arguments(setup, tmp_path / "run", *LATEST)
    with pytest.raises(ProcessExitedException, match="exit code 1"):
        train_on_ranks(2, words, OWN_WORD=str(tmp_path / "run"), ERRORS=str(tmp_path))
    reason = (tmp_path / "0").read_text()
    assert re.search(r"rank 0 on \S+ sees what rank 0 wrote; it finds \S+run0: checkpoint-4", reason)
    assert re.search(r"rank 1 on \S+ does not see what rank 0 wrote; it finds \S+run1: no checkpoint", reason)
    assert not list((tmp_path / "run0").glob(".seen*"))


def test_ranks_that_were_started_with_other_arguments_are_told_which(setup, tmp_path):
    """With other numbers of steps, say, one would wait for the other for ever."""
    words = arguments(setup, tmp_path / "run", "--adam_epsilon", "1e-")
    with pytest.raises(ProcessExitedException, match="exit code 1"):
        train_on_ranks(2, words, OWN_WORD="1e-", ERRORS=str(tmp_path))
    assert (
        "the --adam_epsilon of rank 1 is 0.1 and that of rank 0 is 1.0. Start all ranks"
        in (tmp_path / "0").read_text()
    )


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "said"),
    [
        ("--validation_dataset v", "", "the --validation_dataset of rank 1 is None and that of rank 0 is given."),
        (
            "--bucket_config auto",
            "--bucket_config c",
            "the --bucket_config of rank 1 is given and that of rank 0 is",
        ),
        ("--dataset a --hub_token t", "--dataset b", None),  # copies of their own; who uploads is the main process
    ],
)
def test_each_rank_may_have_copies_of_its_own_but_not_leave_one_out(rank_0, rank_1, said):
    for found in on_ranks(2, difference_of_arguments, [rank_0, rank_1]):
        assert found is None if said is None else said in found


def test_ranks_that_read_different_weights_are_named_before_they_are_sharded_into_one_model(setup, tmp_path):
    """As machines with copies of the pipeline of their own, one of them from another version."""
    for rank in "01":
        shutil.copytree(setup.pipeline, tmp_path / f"pipeline{rank}")
    weights = tmp_path / "pipeline1" / "transformer" / "diffusion_pytorch_model.safetensors"
    values = load_file(weights)
    values["blocks.1.ffn.net.2.bias"] += 0.5
    save_file(values, weights, metadata={"format": "pt"})
    words = arguments(setup, tmp_path / "run", pretrained_model_name_or_path=tmp_path / "pipeline")
    with pytest.raises(ProcessExitedException, match="exit code 1"):
        train_on_ranks(2, words, OWN_WORD=str(tmp_path / "pipeline"), ERRORS=str(tmp_path))
    assert re.search(r"the transformer of rank 1 is \w{16} and that of rank 0 is", (tmp_path / "0").read_text())


@pytest.mark.parametrize(
    ("file", "name", "value", "said"),
    [
        ("scheduler/scheduler_config.json", "shift", 5.0, "the shift of rank 1 is 5.0 and that of rank 0 is 3.0"),
        ("model_index.json", "expand_timesteps", True, "the pipeline's variant of rank 1 is WanVariant(.*=True)"),
        ("transformer/config.json", "eps", 0.1, "the transformer's eps of rank 1 is 0.1 and that of rank 0 is 1e-06"),
    ],
)
def test_ranks_whose_pipelines_are_configured_differently_are_told_how(setup, tmp_path, file, name, value, said):
    """Their losses would be of different objectives or models, and be averaged without a word."""
    for rank in "01":
        shutil.copytree(setup.pipeline, tmp_path / f"pipeline{rank}")
    config = tmp_path / "pipeline1" / file
    config.write_text(json.dumps({**json.loads(config.read_text()), name: value}))
    words = arguments(setup, tmp_path / "run", pretrained_model_name_or_path=tmp_path / "pipeline")
    with pytest.raises(ProcessExitedException, match="exit code 1"):
        train_on_ranks(2, words, OWN_WORD=str(tmp_path / "pipeline"), ERRORS=str(tmp_path))
    assert re.search(said, (tmp_path / "0").read_text())


def on_two_machines(setup, run, *words, port, launcher="accelerate"):
    """What two launchers over loopback said and returned."""
    launchers = []
    for machine in range(2):
        if launcher == "torchrun":  # as docs/training.md has it
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
            command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", RECIPE]
            command = [*map(str, command), *arguments(setup, run)]
            environment = {**environment_of(), **FSDP2}
        else:
            options = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1", *words]
            command, environment = command_of(RECIPE, *arguments(setup, run)), environment_of()
            at = command.index("--main_process_port")
            command[at : at + 2] = [*options, "--main_process_port", str(port), "--machine_rank", str(machine)]
        launchers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    said = [launcher.communicate(timeout=240)[1] for launcher in launchers]
    return said, [launcher.returncode for launcher in launchers]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_two_launchers_on_one_loopback_train_as_two_machines_do(undisturbed, setup, tmp_path, launcher):
    said, codes = on_two_machines(setup, tmp_path, port=free_port(), launcher=launcher)
    assert codes == [0, 0], said
    assert timeless(metrics_of(tmp_path)) == timeless(undisturbed.metrics)


@pytest.mark.slow
def test_two_launchers_that_each_open_a_port_of_their_own_end_with_the_one_they_tried(setup, tmp_path):
    """accelerate's port 0 on two machines; without the timeout they wait for ten minutes."""
    said, codes = on_two_machines(setup, tmp_path, "--rdzv_conf", "timeout=15", port=0)
    assert codes == [1, 1]
    assert "waiting for clients. 1/2 clients joined" in said[0]
    assert re.search(r"timed out after \d+ms while trying to connect to \(127.0.0.1, \d+\)", said[1])
    assert not (tmp_path / "metrics.jsonl").exists()


def is_rank(process):
    try:
        return str(RECIPE) in process.cmdline()
    except psutil.Error:  # gone meanwhile
        return False


@pytest.mark.slow
def test_runs_killed_at_twenty_random_moments_go_on_bit_for_bit(undisturbed, setup, tmp_path):
    """Real launchers, a rank killed after a random time, until the run gets to its end; each ends within a minute."""
    import random

    moments, run, kills = random.Random(0), tmp_path / "run", 0
    command = command_of(RECIPE, *arguments(setup, run, *LATEST, checkpointing_steps=1))
    while kills < 20:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment_of(), stderr=subprocess.PIPE, text=True)
        ranks = []
        while len(ranks) < 2 and launcher.poll() is None:
            time.sleep(0.1)
            ranks = list(filter(is_rank, psutil.Process(launcher.pid).children(recursive=True)))
        time.sleep(moments.uniform(0, 15))
        if launcher.poll() is None:
            moments.choice(ranks).send_signal(signal.SIGKILL)
            begin = time.monotonic()
            _, said = launcher.communicate(timeout=60)
            assert launcher.returncode != 0
            assert time.monotonic() - begin < 60
            assert "exitcode  : -9" in said
            kills += 1
        else:
            assert launcher.returncode == 0, launcher.communicate()[1]
            assert timeless(metrics_of(run)) == timeless(undisturbed.metrics)
            shutil.rmtree(run)
    done = launch(RECIPE, *arguments(setup, run, *LATEST, checkpointing_steps=1))
    assert done.returncode == 0, done.stderr
    assert timeless(metrics_of(run)) == timeless(undisturbed.metrics)


def test_ranks_wait_for_what_the_main_process_does_alone_longer_than_a_collective_may_take():
    assert on_ranks(2, work_alone) == ["made on rank 0"] * 2


def test_held_out_samples_count_once_by_their_tokens_also_where_ranks_have_none_left(tmp_path):
    folder = save_prepared(tmp_path, {"1x4x4": 5, "2x4x8": 2})
    for text_tokens in (0, 12):  # none as in Wan, and as in SD3
        weights = [4 + text_tokens] * 5 + [16 + text_tokens] * 2
        expected = sum(sample * weight for sample, weight in enumerate(weights)) / sum(weights)
        found = on_ranks(2, held_out_loss, str(folder), text_tokens)  # five micro-batches
        assert found == [pytest.approx(expected)] * 2
