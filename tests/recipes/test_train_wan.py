"""Does a run train, survive a kill bit for bit, load back, and refuse what cannot be right?"""

import json
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import prepare_dataset
import psutil
import pytest
import torch
import train_wan
from diffusers import WanPipeline, WanTransformer3DModel
from support.accelerators import fresh_accelerate
from support.clips import real_clips
from support.launch import CPU_CONFIG, ROOT, command_of, environment_of, launch
from support.prepared import save_config, save_prepared

from adaptiveload_hf import UserError
from adaptiveload_hf.buckets.shapes import TokenGeometry, read_shapes
from adaptiveload_hf.buckets.sources import load_prepared
from adaptiveload_hf.buckets.training_log import read_training_log

RECIPE = ROOT / "recipes" / "train_wan.py"
COUNTS = {"1x4x4": 17, "1x4x8": 9, "2x4x8": 8, "5x4x8": 14}
TIMES = {"seconds", "samples_per_second", "tokens_per_second", "data_wait_seconds"}


@pytest.fixture(scope="module")
def setup(tiny_pipeline, tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    return SimpleNamespace(
        pipeline=tiny_pipeline,
        dataset=save_prepared(folder / "prepared", COUNTS),
        config=save_config(folder / "config", COUNTS),
        folder=folder,
    )


def arguments(setup, output_dir, *extra, **changed):
    """The command line of a run; `changed` replaces a value or, with None, leaves it out; `extra` is appended."""
    values = {
        "pretrained_model_name_or_path": setup.pipeline,
        "dataset": setup.dataset,
        "bucket_config": setup.config,
        "output_dir": output_dir,
        "gradient_accumulation_steps": 2,
        "max_train_steps": 8,
        "checkpointing_steps": 4,
        "learning_rate": 1e-3,
        **changed,
    }
    given = {f"--{name}": value for name, value in values.items() if value is not None}
    return [str(word) for option in given.items() for word in option] + list(map(str, extra))


def train_here(setup, output_dir, *extra, **changed):
    """The whole recipe in this process, on one rank."""
    sys.argv[1:] = arguments(setup, output_dir, *extra, **changed)
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        train_wan.main()
    return metrics_of(output_dir)


@pytest.fixture(autouse=True)
def keep_argv(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_wan.py"])


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(metrics):
    return [{name: value for name, value in line.items() if name not in TIMES} for line in metrics]


@pytest.fixture(scope="module")
def undisturbed(setup):
    """8 optimizer steps on two FSDP2 ranks, over the end of the first epoch, keeping the newest checkpoint."""
    run = setup.folder / "undisturbed"
    done = launch(RECIPE, *arguments(setup, run, "--checkpoints_total_limit", 1))
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(folder=run, stderr=done.stderr, metrics=metrics_of(run))


@pytest.mark.distributed
def test_a_run_trains_every_sample_once_an_epoch_and_says_what_it_does(undisturbed):
    metrics = undisturbed.metrics
    assert [line["step"] for line in metrics] == list(range(1, 9))
    first_epoch = [line for line in metrics if line["epoch"] == 0]
    assert 0 < len(first_epoch) < 8, "the run should go over an epoch's end"
    seen = dict.fromkeys(COUNTS, 0)
    for line in first_epoch:
        assert len(line["micro_batches"]) == 2
        for micro_step in line["micro_batches"]:
            assert len(micro_step) == 2
            for micro_batch in micro_step:
                seen[micro_batch["shape"]] += micro_batch["batch_size"]
    assert seen == COUNTS
    assert sum(line["samples"] for line in first_epoch) == sum(COUNTS.values())
    for line in metrics:
        assert 0 < line["balance_efficiency"] <= 1
        assert line["samples_per_second"] == pytest.approx(line["samples"] / line["seconds"])
        assert 0 <= line["data_wait_seconds"] <= line["seconds"]
        assert line["learning_rate"] == 1e-3
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert "***** Running training *****" in undisturbed.stderr
    assert "WanTransformerBlock" in undisturbed.stderr, "the patch report"
    assert list(undisturbed.folder.rglob("events.out.tfevents*")), "no tensorboard file"


@pytest.mark.distributed
def test_the_cost_fit_reads_every_line_that_a_run_writes(undisturbed, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(4 * (undisturbed.folder / "metrics.jsonl").read_text())
    log = read_training_log(tmp_path / "metrics.jsonl", TokenGeometry((1, 2, 2)))
    assert not [reason for reason in log.left_out if "line" in reason]
    assert log.shapes.shape[1:] == (2, 2)
    assert set(log.shapes.flat) <= set(COUNTS)
    known = {f"step {line['step']}": line["seconds"] - line["data_wait_seconds"] for line in undisturbed.metrics}
    assert [known[name] for name in log.steps.names] == log.steps.seconds.tolist()


@pytest.mark.distributed
def test_the_newest_checkpoint_alone_is_kept(undisturbed):
    assert [path.name for path in undisturbed.folder.glob("*checkpoint*")] == ["checkpoint-8"]


@pytest.mark.distributed
def test_the_trained_transformer_loads_alone_and_into_the_pipeline(undisturbed, setup):
    transformer = WanTransformer3DModel.from_pretrained(undisturbed.folder / "transformer")
    start = WanTransformer3DModel.from_pretrained(setup.pipeline, subfolder="transformer")
    assert transformer.config.num_layers == start.config.num_layers
    assert set(transformer.state_dict()) == set(start.state_dict())
    change = max((a - b).abs().max() for a, b in zip(transformer.parameters(), start.parameters()))
    assert 1e-3 < change < 0.1
    pipeline = WanPipeline.from_pretrained(setup.pipeline, transformer=transformer)
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline("a cat", height=16, width=16, num_frames=5, num_inference_steps=2, output_type="pt").frames
    assert torch.isfinite(frames).all()


@pytest.mark.distributed
def test_a_run_whose_rank_is_killed_goes_on_bit_for_bit(undisturbed, setup):
    run = setup.folder / "killed"
    options = ("--checkpoints_total_limit", 1, "--resume_from_checkpoint", "latest")
    command = command_of(RECIPE, *arguments(setup, run, *options), config=CPU_CONFIG)
    launcher = subprocess.Popen(command, cwd=ROOT, env=environment_of(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists() or len(metrics_of(run)) < 5:
        assert time.monotonic() < deadline, "no fifth step within a minute"
        time.sleep(0.02)
    ranks = [p for p in psutil.Process(launcher.pid).children(recursive=True) if str(RECIPE) in p.cmdline()]
    max(ranks, key=lambda process: process.pid).kill()
    begin = time.monotonic()
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert time.monotonic() - begin < 60
    assert "exitcode  : -9" in stderr
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-4"]

    (run / "partial-checkpoint-8").mkdir(exist_ok=True)  # as a kill during a save leaves it
    done = launch(RECIPE, *arguments(setup, run, *options))
    assert done.returncode == 0, done.stderr
    assert "optimizer steps 4 of 8 done" in done.stderr
    unseen = sum(step["samples"] for step in undisturbed.metrics[4:] if step["epoch"] == 0)
    assert unseen > 0
    assert f"epoch 0: {unseen} samples not yet seen" in done.stderr
    assert timeless(metrics_of(run)) == timeless(undisturbed.metrics)
    assert [path.name for path in run.glob("*checkpoint-*")] == ["checkpoint-8"]


@pytest.mark.distributed
def test_a_bad_latent_on_one_rank_ends_all_ranks_and_names_the_sample(setup, tmp_path):
    bad = save_prepared(tmp_path / "bad", COUNTS, nan_in=30)
    begin = time.monotonic()
    done = launch(RECIPE, *arguments(setup, tmp_path / "run", dataset=bad))
    assert time.monotonic() - begin < 60
    assert done.returncode != 0
    assert "latent of sample 30 (30.mp4) has NaN or infinite values" in done.stderr


def test_resume_goes_on_from_the_newest_whole_checkpoint_and_says_which_learning_rate_counts(setup, tmp_path, capsys):
    straight = train_here(setup, tmp_path / "straight", max_train_steps=6, checkpointing_steps=2)
    resumed = tmp_path / "resumed"
    train_here(setup, resumed, "--resume_from_checkpoint", "latest", max_train_steps=5, checkpointing_steps=2)
    assert "starting afresh" in capsys.readouterr().err
    (resumed / "partial-checkpoint-6").mkdir()
    latest = ("--resume_from_checkpoint", "checkpoint-4")
    again = train_here(setup, resumed, *latest, max_train_steps=6, checkpointing_steps=2, learning_rate=5e-4)
    assert timeless(again) == timeless(straight)
    assert "learning rate 0.001 of the checkpoint is used, not --learning_rate 0.0005" in capsys.readouterr().err


def test_the_learning_rate_reaches_its_end_at_the_last_step(setup, tmp_path):
    schedule = ("--lr_scheduler", "linear", "--lr_warmup_steps", 1, "--report_to", "none")
    metrics = train_here(setup, tmp_path, *schedule, max_train_steps=5)
    assert [line["learning_rate"] for line in metrics] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0])


def test_an_epoch_is_trained_where_no_number_of_steps_is_given(setup, tmp_path):
    metrics = train_here(
        setup, tmp_path, "--num_train_epochs", 1, "--no_patch", "--from_scratch", max_train_steps=None
    )
    assert sum(line["samples"] for line in metrics) == sum(COUNTS.values())


def test_an_epoch_that_is_resumed_under_another_accumulation_is_trained_to_its_end_and_no_further(setup, tmp_path):
    linear = ("--lr_scheduler", "linear", "--report_to", "none")
    train_here(setup, tmp_path, *linear, max_train_steps=3, checkpointing_steps=2)
    rest = ("--resume_from_checkpoint", "checkpoint-2", "--num_train_epochs", 1)
    metrics = train_here(setup, tmp_path, *linear, *rest, max_train_steps=None, gradient_accumulation_steps=1)
    assert {line["epoch"] for line in metrics} == {0}
    assert sum(line["samples"] for line in metrics) == sum(COUNTS.values())
    rates = [line["learning_rate"] for line in metrics]
    assert rates[-1] == 0 and min(rates[:-1]) > 0


def test_the_loss_of_a_sample_does_not_depend_on_the_schedule(setup, tmp_path):
    """With a learning rate of zero, an epoch's summed loss is the same under any dealing and accumulation."""
    frozen = {"learning_rate": 0.0, "max_train_steps": 100}

    def epoch_loss(name, **changed):
        words = ["--num_train_epochs", "1", "--loss_normalization", "token", "--report_to", "none"]
        metrics = train_here(setup, tmp_path / name, *words, **{**frozen, **changed})
        first = [line for line in metrics if line["epoch"] == 0]
        assert sum(line["samples"] for line in first) == sum(COUNTS.values())
        return sum(line["loss"] * line["tokens"] for line in first) / sum(line["tokens"] for line in first)

    dealt = epoch_loss("dealt", balance="window:2", max_train_steps=12)
    random = epoch_loss("random", balance="none", gradient_accumulation_steps=1, max_train_steps=24)
    assert dealt == pytest.approx(random, rel=1e-5)


def test_real_clips_are_prepared_trained_on_and_resumed(tiny_pipeline, tmp_path, monkeypatch):
    clips, prepared = tmp_path / "clips", tmp_path / "prepared"
    clips.mkdir()
    for name, path in real_clips().items():
        shutil.copy(path, clips / f"{name}.mp4")
        (clips / f"{name}.txt").write_text(f"a real clip called {name}")
    words = ["--instance_data_root", clips, "--output_dir", prepared, "--pretrained_model_name_or_path", tiny_pipeline]
    words += [
        "--fps",
        "25",
        "--max_sequence_length",
        "32",
        "--video_resolution_buckets",
        "1x32x48",
        "9x32x48",
        "17x32x48",
    ]
    monkeypatch.setattr(sys, "argv", ["prepare_dataset.py", *map(str, words)])
    prepare_dataset.main()
    shapes = [str(shape) for shape in read_shapes(load_prepared(prepared)).shapes]

    paths = SimpleNamespace(
        pipeline=tiny_pipeline, dataset=prepared, config=save_config(tmp_path / "config", ["1x4x6", *shapes])
    )
    options = {"max_train_steps": 2, "checkpointing_steps": 1}
    straight = train_here(paths, tmp_path / "straight", **options)
    train_here(paths, tmp_path / "run", **{**options, "max_train_steps": 1})
    resumed = train_here(paths, tmp_path / "run", "--resume_from_checkpoint", "latest", **options)
    assert timeless(resumed) == timeless(straight)
    assert sum(line["samples"] for line in straight if line["epoch"] == 0) == len(load_prepared(prepared))
    assert all(line["loss"] > 0 for line in straight)


def test_resuming_on_another_dataset_is_refused(setup, tmp_path):
    train_here(setup, tmp_path / "run", max_train_steps=4)
    other = save_prepared(tmp_path / "other", {**COUNTS, "1x4x4": 18})
    with pytest.raises(UserError, match="trained on another dataset"):
        train_here(setup, tmp_path / "run", "--resume_from_checkpoint", "latest", dataset=other)


def test_a_folder_that_holds_a_run_is_not_written_over(setup, tmp_path):
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(UserError, match=r"already holds a run \(checkpoint-4\)\. Pass --resume_from"):
        train_here(setup, tmp_path)


def test_an_unknown_tracker_is_wrong_usage(setup, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_here(setup, tmp_path, "--report_to", "paper")
    assert "invalid choice: 'paper'" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(setup, tmp_path):
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(UserError, match=r"checkpoint-9: no such folder; .* holds checkpoint-4"):
        train_here(setup, tmp_path, "--resume_from_checkpoint", "checkpoint-9")


def test_a_shape_outside_the_measured_range_is_refused(setup, tmp_path):
    larger = save_prepared(tmp_path / "larger", {**COUNTS, "9x8x8": 4})
    with pytest.raises(UserError, match="9x8x8"):
        train_here(setup, tmp_path / "run", dataset=larger)


def test_a_bucket_that_does_not_fit_into_memory_is_refused(setup, tmp_path):
    config = save_config(tmp_path / "config", COUNTS, memory=True)
    with pytest.raises(UserError, match="5x4x8"):
        train_here(setup, tmp_path / "run", "--memory_limit_gib", 1.3, bucket_config=config)


def test_fewer_samples_than_an_optimizer_step_needs_are_refused(setup, tmp_path):
    few = save_prepared(tmp_path / "few", {"1x4x4": 3})
    with pytest.raises(UserError, match="at least one sample for each of"):
        train_here(setup, tmp_path / "run", dataset=few, gradient_accumulation_steps=4)
