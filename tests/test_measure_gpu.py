"""On a GPU: is memory measured and kept within, is running out of it survived, and does a preflight leave no trace?"""

import os

import pytest
import torch
from support.accelerators import fresh_accelerate
from support.launch import ROOT, launch
from support.preflight_runs import TinyRun

from adaptiveload_hf import LatentShape, make_accelerator
from adaptiveload_hf.benchmark import Point, measure_steps
from adaptiveload_hf.device_memory import available_gib

pytestmark = pytest.mark.gpu
TOKENS = 1 << 20  # of 4 bytes


@pytest.fixture
def accelerator():
    with fresh_accelerate():
        yield make_accelerator(gradient_accumulation_steps=2)
    torch.cuda.set_per_process_memory_fraction(1.0)


def run_step(shape, batch_size):
    """Takes batch_size x 64 MiB for a moment."""
    torch.ones(batch_size, 16 * TOKENS, device="cuda").sum().item()


def points(*batch_sizes):
    return [Point(LatentShape(1, 2048, 2048), TOKENS, batch_size) for batch_size in batch_sizes]


def test_peak_and_reserved_memory_are_those_of_each_point(accelerator):
    held = torch.cuda.memory_allocated() / 2**30  # of tests before
    found = measure_steps(accelerator, run_step, points(1, 4, 16))
    for measured in found:
        assert measured.peak_gib - held == pytest.approx(measured.batch_size / 16, abs=0.05)
        assert measured.peak_gib <= measured.reserved_gib <= 1.1 * measured.peak_gib + 0.1


def test_a_point_beyond_the_allowed_share_of_memory_is_foreseen(accelerator, capsys):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2**30 / total)
    assert available_gib(torch.device("cuda")) == pytest.approx(1.0, rel=0.01)
    found = measure_steps(accelerator, run_step, points(1, 4, 32))
    assert [m.batch_size for m in found] == [1, 4]
    assert "with batch size 32 is left out: it would need 2 GiB of 1" in capsys.readouterr().err


def test_running_out_of_memory_all_the_same_is_a_bound_after_which_smaller_points_go_on(accelerator, monkeypatch):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2**30 / total)
    monkeypatch.setattr("adaptiveload_hf.benchmark._predicted_gib", lambda *_: 0.0)
    found = measure_steps(accelerator, run_step, points(1, 32, 4))
    assert [(m.batch_size, m.oom) for m in found] == [(1, False), (32, True), (4, False)]


def test_a_preflight_brings_back_weights_optimizer_and_random_numbers_bit_by_bit(accelerator, tmp_path):
    run = TinyRun(accelerator)
    run.train(2)

    def state():
        moments = [value.clone() for state in run.optimizer.state.values() for value in state.values()]
        weights = [p.detach().clone() for p in run.model.parameters()]
        return [*weights, *moments, torch.cuda.get_rng_state(), torch.get_rng_state()]

    before = state()
    report = run.preflight(checkpoint=tmp_path / "checkpoint")
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    assert all(tried.peak_gib > 0 for tried in report.tried)


def test_a_sharded_bfloat16_run_after_a_preflight_is_bit_by_bit_the_run_without(tmp_path):
    ranks = min(2, torch.cuda.device_count())
    config = (ROOT / "accelerate_configs" / "fsdp2.yaml").read_text()
    (tmp_path / "fsdp2.yaml").write_text(config.replace("num_processes: 8", f"num_processes: {ranks}"))
    done = launch(
        ROOT / "tests" / "support" / "preflight_runs.py",
        tmp_path / "checkpoint",
        config=tmp_path / "fsdp2.yaml",
        CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0,1"),
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} True True" for rank in range(ranks)]
