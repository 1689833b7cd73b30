"""On two GPUs, over NCCL: is a run measured, trained, killed and resumed as its documentation says?"""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from support.launch import ROOT, environment_of
from support.prepared import save_prepared
from support.train_ranks import COUNTS, metrics_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")


def start(recipe: str, *words):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", 2, "--main_process_port", 0]
    config = ["--config_file", ROOT / "accelerate_configs" / "fsdp2.yaml"]
    command = [str(word) for word in (*launcher, *config, ROOT / "recipes" / recipe, *words)]
    environment = environment_of() | {"CUDA_VISIBLE_DEVICES": GPUS}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def end(launcher, seconds: float = 120) -> str:
    """What it said on stderr until it ended."""
    try:
        return launcher.communicate(timeout=seconds)[1]
    finally:
        launcher.kill()


def test_a_run_is_measured_trained_killed_within_a_minute_and_goes_on_as_the_undisturbed_one(small_pipeline, tmp_path):
    dataset, config = save_prepared(tmp_path / "prepared", COUNTS), tmp_path / "config"
    model = ["--pretrained_model_name_or_path", small_pipeline, "--dataset", dataset]
    model += ["--gradient_accumulation_steps", 2]
    benchmark = start("benchmark_shapes.py", *model, "--output_dir", config, "--max_points", 5)
    said = end(benchmark)
    assert benchmark.returncode == 0, said

    steps = ["--max_train_steps", 30, "--checkpointing_steps", 3, "--report_to", "none", "--learning_rate", 1e-3]
    words = [*model, "--bucket_config", config, *steps, "--resume_from_checkpoint", "latest", "--output_dir"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    runs = [start("train_wan.py", *words, folder) for folder in (whole, cut)]
    while runs[1].poll() is None and not (cut / "checkpoint-3").exists():
        time.sleep(0.01)
    ranks = [child for child in psutil.Process(runs[1].pid).children() if "train_wan.py" in " ".join(child.cmdline())]
    ranks[-1].send_signal(signal.SIGKILL)
    said = end(runs[1], seconds=60)
    assert runs[1].returncode == 1
    assert "Signal 9 (SIGKILL)" in said
    assert not any(rank.is_running() for rank in ranks)
    said = end(runs[0])
    assert runs[0].returncode == 0, said
    resumed = start("train_wan.py", *words, cut)
    said = end(resumed)
    assert resumed.returncode == 0, said

    undisturbed, found = metrics_of(whole), metrics_of(cut)
    assert [line["step"] for line in found] == list(range(1, 31))
    assert [line["micro_batches"] for line in found] == [line["micro_batches"] for line in undisturbed]
    # Attention adds its gradients up in an order of its own each time.
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in undisturbed], rel=1e-4)
