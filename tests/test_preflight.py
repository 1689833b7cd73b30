"""Does a preflight find what would end a run later, and is the run afterwards the one without it?"""

import os
import shutil
from dataclasses import replace

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from support.full_disk import files_of_at_most
from support.launch import ROOT, launch
from support.preflight_runs import SIZES, TinyRun, make_plan, same

from adaptiveload_hf import UserError, make_accelerator
from adaptiveload_hf.device_memory import DeviceMemory


@pytest.fixture
def run():
    yield TinyRun(make_accelerator(gradient_accumulation_steps=2))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("steps_before", [0, 4], ids=["at the start", "resumed"])
def test_a_run_after_a_preflight_is_bit_by_bit_the_run_without(run, tmp_path, steps_before):
    results = []
    for wanted in (True, False):
        run.accelerator.free_memory()
        run = TinyRun(run.accelerator)
        run.train(steps_before)
        if wanted:
            report = run.preflight(checkpoint=tmp_path / "checkpoint")
        results.append(run.train(6))
    assert same(*results)
    assert not (tmp_path / "checkpoint").exists()
    assert f"preflight: {len(SIZES)} buckets, the worst (3x8x8 at batch size 1) with 2 micro-steps" in str(report)
    assert "a checkpoint was saved and loaded" in str(report)
    alone = replace(report, tried=(replace(report.tried[0], micro_steps=1),))
    assert "the worst (3x8x8 at batch size 1) with 1 micro-step; memory not measured" in str(alone)


@pytest.mark.distributed
def test_a_sharded_run_after_a_preflight_is_bit_by_bit_the_run_without(tmp_path):
    done = launch(ROOT / "tests" / "support" / "preflight_runs.py", tmp_path / "checkpoint")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 True True", "1 True True"]


def test_the_worst_bucket_has_a_whole_step_first_and_every_other_one_micro_step(run):
    calls, micro_step = [], run.micro_step

    def watched(shape, batch_size):
        calls.append((str(shape), batch_size))
        return micro_step(shape, batch_size)

    run.micro_step = watched
    gib = {"1x4x4": 1.0, "2x4x8": 7.0, "3x8x8": 5.0, "1x4x8": 3.0}
    run.preflight(plan=make_plan(gib))
    assert calls[:2] == [("2x4x8", 2)] * 2
    assert calls[2:5] == [("3x8x8", 1), ("1x4x8", 3), ("1x4x4", 8)]
    assert len(calls) == 6, "to the end of an optimizer step"
    assert run.accelerator.step == 0


def test_a_bucket_that_does_not_fit_is_named_with_what_was_planned(run):
    def micro_step(shape, batch_size):
        raise torch.OutOfMemoryError("CUDA out of memory")

    run.micro_step = micro_step
    with pytest.raises(UserError, match=r"3x8x8 at batch size 1 does not fit: .*\(5.0 GiB were planned\).*smaller"):
        run.preflight(plan=make_plan(dict.fromkeys(SIZES, 1.0) | {"3x8x8": 5.0}))


def test_a_loss_that_is_not_finite_is_named(run):
    run.micro_step = lambda shape, batch_size: torch.tensor(float("nan"))
    with pytest.raises(UserError, match=r"3x8x8 at batch size 1 has a loss that is not finite \(nan\)"):
        run.preflight()


def test_a_checkpoint_that_does_not_bring_back_the_weights_is_named_and_kept(run, tmp_path):
    run.accelerator.load_state = lambda folder: None
    with pytest.raises(UserError, match=r"checkpoint in .* does not bring back the weights"):
        run.preflight(checkpoint=tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint").exists()


def test_a_checkpoint_that_the_disk_does_not_hold_is_named(run, tmp_path):
    said = r"a checkpoint could not be written to \S+checkpoint, where [\d.]+ GiB are free: .*\. Make room"
    with files_of_at_most(2000), pytest.raises(UserError, match=said):
        run.preflight(checkpoint=tmp_path / "checkpoint")


def test_a_checkpoint_whose_folder_cannot_be_made_is_named(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"a checkpoint could not be written to \S+checkpoint, .*Not a directory"):
        run.preflight(checkpoint=tmp_path / "file" / "folder" / "checkpoint")


def test_a_checkpoint_that_another_machine_is_removing_too_ends_no_run(run, tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoint"

    def unlink(*file, **options):
        monkeypatch.undo()
        shutil.rmtree(checkpoint)  # the other machine is faster
        os.unlink(*file, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    run.preflight(checkpoint=checkpoint)
    assert not checkpoint.exists()


def test_allocator_retries_and_more_memory_than_planned_are_said(run, monkeypatch):
    device = {"peak_gib": 0.0, "reserved_gib": 0.0, "retries": 0}  # stands for a GPU's allocator

    def micro_step(shape, batch_size):
        device["peak_gib"] = 6.0 if batch_size == 8 else 1.0
        device["retries"] += batch_size == 2
        return torch.tensor(0.0)

    monkeypatch.setattr("adaptiveload_hf.preflight.read_device_memory", lambda _: DeviceMemory(**device))
    run.micro_step = micro_step
    report = run.preflight(plan=make_plan(dict.fromkeys(SIZES, 2.0)))
    assert len(report.findings) == 2
    assert "2x4x8 at batch size 2: the allocator had to free its cache 1 times" in str(report)
    assert "1x4x4 at batch size 8: took 6.0 GiB, 200% more than planned (2.0)" in str(report)


def test_graphs_that_are_compiled_for_a_bucket_are_counted(run):
    doubled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    run.micro_step = lambda shape, batch_size: doubled(torch.ones(batch_size)).sum()
    report = run.preflight()
    assert [tried.graphs for tried in report.tried] == [1, 1, 1, 1]
    assert "4 graphs compiled" in str(report)
