"""Does a run on one rank train what it should, resume, write what others read, and refuse what cannot be right?"""

import json
import math
import re
import shutil
import signal
import sys
import warnings
from types import SimpleNamespace

import prepare_dataset
import pytest
import torch
import train_wan
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file
from stopping import stop_requests
from support.clips import real_clips
from support.prepared import save_config, save_prepared
from support.train_ranks import COUNTS, arguments, metrics_of, timeless, train_here

from adaptiveload_hf.buckets.shapes import TokenGeometry, read_shapes
from adaptiveload_hf.buckets.sources import load_prepared
from adaptiveload_hf.buckets.training_log import read_training_log


@pytest.fixture(scope="module")
def straight(setup):
    """14 optimizer steps, over the end of the first epoch, with a checkpoint every other step and a tracker."""
    run = setup.folder / "straight"
    options = {"max_train_steps": 14, "checkpointing_steps": 2, "report_to": "tensorboard"}
    # Two prompts: tensorboard refuses lists among the hyperparameters.
    captions = ("--validation_prompt", "a cat", "a dog", "--guidance_scale", 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*torch_dtype.* is deprecated")
        metrics = train_here(
            setup, run, *captions, "--validation_inference_steps", 2, "--validation_steps", 9, **options
        )
    return SimpleNamespace(folder=run, metrics=metrics)


def change_of(trained, start) -> float:
    return max(float((a - b).abs().max().detach()) for a, b in zip(trained.parameters(), start.parameters()))


def test_a_run_trains_every_sample_once_an_epoch_and_writes_a_line_a_step(straight):
    metrics = straight.metrics
    assert [line["step"] for line in metrics] == list(range(1, 15))
    first_epoch = [line for line in metrics if line["epoch"] == 0]
    assert 0 < len(first_epoch) < 14, "the run should go over an epoch's end"
    seen = dict.fromkeys(COUNTS, 0)
    for line in first_epoch:
        for micro_step in line["micro_batches"]:
            for micro_batch in micro_step:
                seen[micro_batch["shape"]] += micro_batch["batch_size"]
    assert seen == COUNTS
    for line in metrics:
        assert line["samples_per_second"] == pytest.approx(line["samples"] / line["seconds"])
        assert 0 <= line["data_wait_seconds"] <= line["seconds"]
        assert line["learning_rate"] == 1e-3
        assert line["skipped_steps"] == 0
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert list(straight.folder.rglob("logs/**/events.out.tfevents*")), "no tensorboard file"


def test_the_cost_fit_reads_every_line_that_a_run_writes(straight, tmp_path):
    lines = [
        json.dumps({**line, "data_wait_seconds": 0.0}) for line in straight.metrics
    ]  # steps as short as these wait
    (tmp_path / "metrics.jsonl").write_text("\n".join(2 * lines) + "\n")
    log = read_training_log(tmp_path / "metrics.jsonl", TokenGeometry((1, 2, 2)))
    assert not [reason for reason in log.left_out if "line" in reason]
    assert set(log.shapes.flat) <= set(COUNTS)
    known = {f"step {line['step']}": line["seconds"] for line in straight.metrics}
    assert [known[name] for name in log.steps.names] == log.steps.seconds.tolist()


def test_a_clip_is_sampled_for_every_validation_prompt_and_reaches_the_tracker(straight):
    import av

    clips = sorted(path.name for path in (straight.folder / "validation").iterdir())
    assert clips == ["step-14-0.mp4", "step-14-1.mp4", "step-9-0.mp4", "step-9-1.mp4"]
    with av.open(str(straight.folder / "validation" / clips[0])) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert [frame.shape for frame in frames] == 17 * [(32, 64, 3)], "the largest bucket's, 5x4x8"
    events = b"".join(path.read_bytes() for path in straight.folder.rglob("events.out.tfevents*"))
    assert b"validation/0" in events and b"validation/1" in events


def test_the_trained_transformer_loads_alone_and_into_the_pipeline(straight, setup):
    transformer = WanTransformer3DModel.from_pretrained(straight.folder / "transformer")
    start = WanTransformer3DModel.from_pretrained(setup.pipeline, subfolder="transformer")
    assert transformer.config.num_layers == start.config.num_layers
    assert set(transformer.state_dict()) == set(start.state_dict())
    assert 1e-3 < change_of(transformer, start) < 0.1
    pipeline = WanPipeline.from_pretrained(setup.pipeline, transformer=transformer)
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline("a cat", height=16, width=16, num_frames=5, num_inference_steps=2, output_type="pt").frames
    assert torch.isfinite(frames).all()


def test_validation_does_not_move_the_training(straight, setup, tmp_path, capsys):
    """Nor does the tracker, and a checkpoint changes nothing either: the same losses bit for bit without them."""
    held_out = save_prepared(tmp_path / "held_out", {"1x4x4": 5, "5x4x8": 2, "3x4x4": 1}, seed=1)
    options = ("--validation_dataset", held_out, "--validation_steps", 2)
    metrics = train_here(setup, tmp_path / "run", *options, max_train_steps=5, checkpointing_steps=100)
    bars = re.findall(r"(\w+): +\d+%\|[^|]*\| (\d)/5", capsys.readouterr().err)
    assert ("validating", "2") in bars and bars[-1] == ("training", "5"), "or a long one would look like a hang"
    validated = [{name: line.pop(name) for name in list(line) if "validation" in name} for line in metrics]
    assert timeless(metrics) == timeless(straight.metrics)[:5]
    assert [bool(values) for values in validated] == [False, True, False, True, True]
    assert set(validated[1]["validation_loss_by_shape"]) == {"1x4x4", "5x4x8", "3x4x4"}
    again = train_here(setup, tmp_path / "frozen", *options, max_train_steps=4, learning_rate=0.0, seed=7)
    (other,) = train_here(setup, tmp_path / "other", *options, max_train_steps=1, learning_rate=0.0, seed=8)
    fixed = [line["validation_loss_by_shape"] for line in (again[1], again[3], other)]
    assert fixed[0] == fixed[1] == fixed[2], "the noise of held-out samples should stay, in every run"


def test_resume_goes_on_from_the_newest_whole_checkpoint(straight, setup, tmp_path, capsys):
    run = shutil.copytree(straight.folder, tmp_path / "run")
    for step in (10, 12, 14):
        (run / f"checkpoint-{step}").rename(run / f"partial-checkpoint-{step}")
    latest = ("--resume_from_checkpoint", "latest")
    again = train_here(setup, run, *latest, max_train_steps=11, checkpointing_steps=100)
    assert timeless(again) == timeless(straight.metrics)[:11]
    said = capsys.readouterr().err
    assert "as given, not the checkpoint's" not in said
    assert "optimizer steps 8 of 11 done" in said
    epoch = [line for line in straight.metrics if line["epoch"] == straight.metrics[8]["epoch"]]
    left = [line["samples"] for line in epoch if line["step"] > 8]
    assert f"  epoch {epoch[0]['epoch']}: {sum(left)} samples not yet seen, in {len(left)} optimizer steps\n" in said
    assert len(left) < len(epoch), "the run should go on inside an epoch"
    assert "| 8/11 [" in said, "the bar should begin where the run does"
    assert not list(run.glob("partial-*")), "what a killed save left should be gone"


def test_a_bucket_config_of_another_setup_is_named_with_what_differs(setup, tmp_path, capsys):
    config = shutil.copytree(setup.config, tmp_path / "config")
    values = json.loads((config / "bucket_config.json").read_text())
    values["environment"]["lora"] = True
    (config / "bucket_config.json").write_text(json.dumps(values))
    train_here(setup, tmp_path / "run", max_train_steps=1, bucket_config=config)
    said = capsys.readouterr().err
    assert "its times and batch sizes may not fit this run:\n    lora: measured with True, here False\n" in said


def test_a_lora_trains_and_saves_the_adapter_alone_goes_on_and_loads_into_the_pipeline(setup, tmp_path, capsys):
    rank = ("--rank", 2, "--lora_target_modules", "to_q", "ffn.net.2")
    options = {"max_train_steps": 4, "checkpointing_steps": 2}
    whole = train_here(setup, tmp_path / "whole", *rank, **options)
    cut = tmp_path / "cut"
    assert timeless(train_here(setup, cut, *rank, **{**options, "max_train_steps": 2})) == timeless(whole)[:2]
    kept = load_file(cut / "checkpoint-2" / "model.safetensors")
    assert len(kept) == 2 * (2 + 1) * 2
    assert all("lora_" in name for name in kept)
    resumed = train_here(setup, cut, *rank, "--resume_from_checkpoint", "latest", **options)
    assert timeless(resumed) == timeless(whole)

    pipeline = WanPipeline.from_pretrained(setup.pipeline)
    before = {name: value.clone() for name, value in pipeline.transformer.state_dict().items()}
    pipeline.load_lora_weights(cut)
    after = pipeline.transformer.state_dict()
    assert sum("lora_B" in name and bool(value.abs().max() > 0) for name, value in after.items()) == 6
    assert all(torch.equal(value, after[name]) for name, value in before.items() if name in after)
    assert pipeline.transformer.peft_config["default_0"].r == 2


def ask_to_stop(monkeypatch, run):
    """Before the first step, as soon as the run has said how."""
    init_trackers = train_wan.init_trackers
    monkeypatch.setattr(train_wan, "init_trackers", lambda *rest: (run / "STOP").touch() or init_trackers(*rest))


def test_a_run_stops_at_the_next_step_when_asked_and_goes_on_as_if_it_had_not(
    straight, setup, tmp_path, capsys, monkeypatch
):
    run = tmp_path / "run"
    ask_to_stop(monkeypatch, run)
    looks = ("--validation_dataset", setup.dataset, "--validation_steps", 1)
    (only,) = train_here(setup, run, *looks, max_train_steps=5, checkpointing_steps=100)
    assert "validation_loss" not in only, "who stops it may soon kill it: the checkpoint comes first"
    said = capsys.readouterr().err
    assert "stopped after step 1 of 5, as asked" in said
    assert not (run / "STOP").exists()
    assert not (run / "transformer").exists()
    words = said[said.index("train_wan.py --") :].split()[1:]
    assert words[-2:] == ["--resume_from_checkpoint", "latest"]
    assert words[:-2] == arguments(setup, run, *looks, max_train_steps=5, checkpointing_steps=100)
    monkeypatch.undo()
    (run / "STOP").touch()
    resumed = train_here(setup, run, *words[-2:], max_train_steps=5, checkpointing_steps=100)
    assert timeless(resumed) == timeless(straight.metrics)[:5]
    assert f"removed {run / 'STOP'}, which an earlier run left" in capsys.readouterr().err


def test_a_stop_that_comes_with_the_last_step_leaves_nothing_out_and_is_not_kept_for_the_next_run(
    setup, tmp_path, monkeypatch
):
    ask_to_stop(monkeypatch, tmp_path)
    (only,) = train_here(setup, tmp_path, "--validation_dataset", setup.dataset, max_train_steps=1)
    assert "validation_loss" in only
    assert (tmp_path / "transformer").exists()
    assert (tmp_path / "checkpoint-1").exists()
    assert not (tmp_path / "STOP").exists()


def test_a_validation_that_fails_or_is_killed_costs_no_training_and_no_line(setup, tmp_path, monkeypatch):
    def fails(step):
        left = [line["step"] for line in metrics_of(tmp_path)], (tmp_path / "checkpoint-1").exists()
        assert left == ([1], True), "what a SIGKILL would leave"
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(train_wan, "make_held_out_loss", lambda *_: fails)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        train_here(setup, tmp_path, "--validation_dataset", setup.dataset, max_train_steps=1)
    monkeypatch.undo()
    lines = train_here(setup, tmp_path, "--resume_from_checkpoint", "latest", max_train_steps=2)
    assert [line["step"] for line in lines] == [1, 2]


def test_a_validation_without_a_finite_loss_leaves_a_line_that_every_json_reader_takes(setup, tmp_path, monkeypatch):
    lost = {"validation_loss": math.nan, "validation_loss_by_shape": {"1x4x4": 2.0, "5x4x8": math.inf}}
    monkeypatch.setattr(train_wan, "make_held_out_loss", lambda *_: lambda step: lost)
    train_here(setup, tmp_path, "--validation_dataset", setup.dataset, max_train_steps=1, report_to="tensorboard")
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert [line["validation_loss"], *line["validation_loss_by_shape"].values()] == [None, 2.0, None]


def test_the_learning_rate_reaches_its_end_at_the_last_step(setup, tmp_path):
    schedule = ("--lr_scheduler", "linear", "--lr_warmup_steps", 1)
    metrics = train_here(setup, tmp_path, *schedule, max_train_steps=5)
    assert [line["learning_rate"] for line in metrics] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0])


def test_gradients_are_clipped_to_the_norm_that_is_given_and_logged_as_they_were(straight, setup, tmp_path):
    """Adam's first step forgets how large a gradient is, unless it is far below epsilon."""
    options = ("--max_grad_norm", 1e-12, "--adam_weight_decay", 0)
    (only,) = train_here(setup, tmp_path, *options, max_train_steps=1)
    assert only["grad_norm"] == straight.metrics[0]["grad_norm"] > 1e-3
    start = WanTransformer3DModel.from_pretrained(setup.pipeline, subfolder="transformer")
    assert 0 < change_of(WanTransformer3DModel.from_pretrained(tmp_path / "transformer"), start) < 1e-6


def test_the_first_ctrl_c_asks_for_a_stop_and_the_second_ends_the_run():
    before = signal.getsignal(signal.SIGINT)
    with stop_requests(None) as wanted:
        signal.raise_signal(signal.SIGTERM)  # as a launcher passes on: it asks for the same, and is not counted
        signal.raise_signal(signal.SIGINT)
        assert wanted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with stop_requests(None) as wanted:
        assert not wanted()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_epoch_that_is_resumed_under_another_accumulation_is_trained_to_its_end_and_no_further(setup, tmp_path):
    linear = ("--lr_scheduler", "linear", "--no_patch", "--from_scratch")
    train_here(setup, tmp_path, *linear, max_train_steps=3, checkpointing_steps=2)
    rest = ("--resume_from_checkpoint", "checkpoint-2", "--num_train_epochs", 1)
    metrics = train_here(setup, tmp_path, *linear, *rest, max_train_steps=None, gradient_accumulation_steps=1)
    assert {line["epoch"] for line in metrics} == {0}
    assert sum(line["samples"] for line in metrics) == sum(COUNTS.values())
    rates = [line["learning_rate"] for line in metrics]
    assert rates[-1] == 0 and min(rates[:-1]) > 0


def test_the_loss_of_a_sample_does_not_depend_on_the_schedule(setup, tmp_path):
    """With a learning rate of zero, an epoch's summed loss is the same under any dealing and accumulation."""

    def epoch_loss(name, **changed):
        words = ["--num_train_epochs", "1", "--loss_normalization", "token", "--proportion_empty_prompts", "0"]
        options = {"learning_rate": 0.0, "max_train_steps": None, "checkpointing_steps": 100, **changed}
        metrics = train_here(setup, tmp_path / name, *words, **options)
        assert sum(line["samples"] for line in metrics) == sum(COUNTS.values())
        return sum(line["loss"] * line["tokens"] for line in metrics) / sum(line["tokens"] for line in metrics)

    dealt = epoch_loss("dealt", balance="window:2")
    random = epoch_loss("random", balance="none", gradient_accumulation_steps=1)
    assert dealt == pytest.approx(random, rel=1e-5)


def test_real_clips_are_prepared_trained_on_without_captions_and_resumed(small_pipeline, tmp_path, monkeypatch):
    clips, prepared = tmp_path / "clips", tmp_path / "prepared"
    clips.mkdir()
    for name, path in real_clips().items():
        shutil.copy(path, clips / f"{name}.mp4")
        (clips / f"{name}.txt").write_text(f"a real clip called {name}")
    words = [
        "--instance_data_root",
        clips,
        "--output_dir",
        prepared,
        "--pretrained_model_name_or_path",
        small_pipeline,
    ]
    words += ["--fps", 25, "--max_sequence_length", 32, "--video_resolution_buckets", "1x32x48", "9x32x48", "17x32x48"]
    monkeypatch.setattr(sys, "argv", ["prepare_dataset.py", *map(str, words)])
    prepare_dataset.main()
    shapes = [str(shape) for shape in read_shapes(load_prepared(prepared)).shapes]

    paths = SimpleNamespace(
        pipeline=small_pipeline, dataset=prepared, config=save_config(tmp_path / "config", ["1x4x6", *shapes])
    )
    options = {"max_train_steps": 2, "checkpointing_steps": 1, "proportion_empty_prompts": 1.0}
    straight = train_here(paths, tmp_path / "straight", **options)
    train_here(paths, tmp_path / "run", **{**options, "max_train_steps": 1})
    resumed = train_here(paths, tmp_path / "run", "--resume_from_checkpoint", "latest", **options)
    assert timeless(resumed) == timeless(straight)
    assert sum(line["samples"] for line in straight if line["epoch"] == 0) == len(load_prepared(prepared))
    assert all(line["loss"] > 0 for line in straight)
