"""What does a run refuse by name before it reads any weights, and what does it survive?"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import train_wan
from caption_dropout import make_caption_dropout
from data_setup import parse_batch_sizes, parse_repeats
from safetensors.torch import save_file
from stopping import resume_command
from support.launch import ROOT
from support.prepared import save_config, save_prepared
from support.recipe_arguments import parse
from support.train_ranks import COUNTS, timeless, train_here

from adaptiveload_hf import UserError
from adaptiveload_hf.buckets.sources import load_prepared


@pytest.fixture(scope="module")
def setup(small_pipeline, tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    return SimpleNamespace(
        pipeline=small_pipeline,
        dataset=save_prepared(folder / "prepared", COUNTS),
        config=save_config(folder / "config", COUNTS, memory=True),
    )


def test_a_folder_that_holds_a_run_is_not_written_over(setup, tmp_path):
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(UserError, match=r"already holds a run \(checkpoint-4\)\. Pass --resume_from"):
        train_here(setup, tmp_path)


def test_an_unknown_tracker_is_wrong_usage(setup, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_here(setup, tmp_path, "--report_to", "paper")
    assert "invalid choice: 'paper'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--max_train_steps -3", "--max_train_steps: must be at least 1, but it is -3"),
        ("--checkpointing_steps 0", "--checkpointing_steps: must be at least 1, but it is 0"),
        ("--seed 4294967296", "--seed: must be at least 0, below 4294967296, but it is 4294967296"),
        ("--rank 0", "--rank: must be at least 1, but it is 0"),
        ("--learning_rate nan", "--learning_rate: must be at least 0.0, but it is nan"),
        ("--shift 0", "--shift: must be more than 0.0, but it is 0"),
        ("--validation_resolution 480x832", "two numbers. Write a still as '1x480x832'"),
        ("--adam_beta1 2", "--adam_beta1: must be at least 0.0, below 1.0, but it is 2"),
        ("--rank 4 --lora_alpha 0", "--lora_alpha: must be more than 0.0, but it is 0"),
        ("--proportion_empty_prompts nan", "--proportion_empty_prompts: must be at least 0.0, but it is nan"),
        ("--max_grad_norm 0", "--max_grad_norm: must be more than 0.0, but it is 0"),
        ("--dataloader_num_workers two", "--dataloader_num_workers: invalid int value: 'two'"),
        # It would be taken for --hub_token, and stay in the command that is printed for a resume.
        ("--hub_tok hf_secret", "unrecognized arguments: --hub_tok"),
    ],
)
def test_a_word_that_makes_no_sense_is_wrong_usage(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse("PIPELINE", *words.split())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lora_alpha 8", "--lora_alpha is for a LoRA, but without --rank all weights are trained"),
        ("--lora_target_modules to_q", "--lora_target_modules is for a LoRA, but without --rank"),
        ("--lr_warmup_steps 9", "--lr_scheduler constant has no warm-up, but --lr_warmup_steps is 9. Pass"),
        ("--hub_model_id me/it", "--hub_model_id me/it says where to, but nothing is uploaded without --push_to_hub"),
    ],
)
def test_an_option_that_does_nothing_without_another_is_refused(setup, tmp_path, words, said):
    with pytest.raises(UserError, match=said):
        train_here(setup, tmp_path / "run", *words.split())


def test_a_tracker_that_is_not_installed_is_named_and_not_left_out(setup, tmp_path, monkeypatch):
    monkeypatch.setattr("training_arguments.get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(
        UserError, match=r"--report_to wandb: it is not installed; here are tensorboard\. `pip install"
    ):
        train_here(setup, tmp_path / "run", report_to="wandb")


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(setup, tmp_path):
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(UserError, match=r"checkpoint-9: no such folder; .* holds checkpoint-4"):
        train_here(setup, tmp_path, "--resume_from_checkpoint", "checkpoint-9")


def test_a_shape_outside_the_measured_range_is_refused(setup, tmp_path):
    larger = save_prepared(tmp_path / "larger", {**COUNTS, "9x8x8": 4})
    with pytest.raises(UserError, match=r"9x8x8.*, or pass --allow_extrapolation to trust"):
        train_here(setup, tmp_path / "run", dataset=larger)


def test_a_bucket_that_does_not_fit_into_memory_is_refused(setup, tmp_path):
    with pytest.raises(UserError, match="5x4x8"):
        train_here(setup, tmp_path / "run", "--memory_limit_gib", 1.3)


def test_fewer_samples_than_an_optimizer_step_needs_are_refused(setup, tmp_path):
    few = save_prepared(tmp_path / "few", {"1x4x4": 3})
    with pytest.raises(UserError, match="at least one sample for each of"):
        train_here(setup, tmp_path / "run", dataset=few, gradient_accumulation_steps=4)


def test_caption_dropout_without_the_empty_caption_is_refused_before_the_first_step(setup, tmp_path):
    with pytest.raises(UserError, match=r"there is no .*empty_prompt_embeds\.safetensors\. Give the prepare_dataset"):
        train_here(setup, tmp_path / "run", "--proportion_empty_prompts", 0.1)
    damaged = shutil.copytree(setup.dataset, tmp_path / "damaged")
    (damaged / "empty_prompt_embeds.safetensors").write_bytes(b"half a file")
    with pytest.raises(UserError, match=r"empty_prompt_embeds\.safetensors is damaged: .*Remove it, and give"):
        train_here(setup, tmp_path / "run", "--proportion_empty_prompts", 0.1, dataset=damaged)
    for lost in ({"prompt_embeds": torch.zeros(9, 32)}, {}):  # of other captions, or of no such tensor
        save_file(lost, damaged / "empty_prompt_embeds.safetensors")
        said = r"empty_prompt_embeds\.safetensors holds .* the dataset are \{'prompt_embeds': \[8, 32\]\}\. Remove it"
        with pytest.raises(UserError, match=said):
            train_here(setup, tmp_path / "run", "--proportion_empty_prompts", 0.1, dataset=damaged)
    with pytest.raises(UserError, match=r"between 0 and 1, but it is 1\.5"):
        train_here(setup, tmp_path / "run", "--proportion_empty_prompts", 1.5)


def test_captions_are_dropped_in_the_share_that_was_asked_the_same_ones_in_any_batch(tmp_path):
    empty = {"prompt_embeds": torch.full((8, 4), 7.0), "pooled_prompt_embeds": torch.full((3,), 5.0)}
    save_file(empty, tmp_path / "empty_prompt_embeds.safetensors")
    sizes = {"latent": [1], **{name: list(tensor.shape) for name, tensor in empty.items()}}
    drop = make_caption_dropout(0.25, tmp_path, seed=0, sizes=sizes)
    samples = torch.arange(400)
    batch = {
        "latent": torch.zeros(400, 1),
        "prompt_embeds": torch.zeros(400, 8, 4).bfloat16(),
        "pooled_prompt_embeds": torch.zeros(400, 3),
        "sample_index": samples,
    }
    dropped = drop(batch, 0)["prompt_embeds"].eq(7).flatten(1).all(1)
    assert torch.equal(dropped, drop(batch, 0)["pooled_prompt_embeds"].eq(5).all(1))
    assert dropped.float().mean().item() == pytest.approx(0.25, abs=0.06)
    part = {name: value[100:103] for name, value in batch.items()}
    assert torch.equal(drop(part, 0)["prompt_embeds"].eq(7).flatten(1).all(1), dropped[100:103])
    assert not torch.equal(drop(batch, 1)["prompt_embeds"].eq(7).flatten(1).all(1), dropped)
    assert drop(batch, 0)["prompt_embeds"].dtype == torch.bfloat16
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "state.json").touch()
    make_caption_dropout(0.25, tmp_path / "dataset", seed=0, sizes=sizes)  # load_prepared takes either folder


def nan_in_steps(monkeypatch, *micro_steps):
    """The loss of these micro-steps, counted over the run, is NaN."""
    done, original = [], train_wan.run_micro_step

    def run(accelerator, model, optimizer, scheduler, losses, batch, norm):
        done.append(None)
        factor = float("nan") if len(done) in micro_steps else 1.0
        return original(accelerator, model, optimizer, scheduler, lambda b: factor * losses(b), batch, norm)

    monkeypatch.setattr(train_wan, "run_micro_step", run)


def test_a_step_whose_loss_is_nan_is_skipped_counted_and_its_samples_are_named(setup, tmp_path, monkeypatch, capsys):
    nan_in_steps(monkeypatch, 4)
    metrics = train_here(setup, tmp_path / "run", max_train_steps=4)
    assert [line["skipped_steps"] for line in metrics] == [0, 1, 1, 1]
    assert [line["loss"] is None for line in metrics] == [False, True, False, False]
    said = capsys.readouterr().err
    assert "step 2 is skipped (1 so far): the loss is not finite in micro-batches with the samples " in said
    named = said[said.index("with the samples ") :].splitlines()[0]
    assert named.count(".mp4)") == metrics[1]["micro_batches"][1][0]["batch_size"]


@pytest.mark.parametrize("first_steps", [2, 3], ids=["last step", "step within"])
def test_a_run_goes_on_after_a_skipped_step_as_if_it_had_not_stopped(setup, tmp_path, monkeypatch, first_steps):
    nan_in_steps(monkeypatch, 4)
    options = {"checkpointing_steps": 1, "learning_rate": 0.01}
    warmup = ("--lr_scheduler", "constant_with_warmup", "--lr_warmup_steps", 4)
    straight = train_here(setup, tmp_path / "straight", *warmup, max_train_steps=4, **options)
    monkeypatch.undo()
    nan_in_steps(monkeypatch, 4)
    train_here(setup, tmp_path / "run", *warmup, max_train_steps=first_steps, **options)
    for path in (tmp_path / "run").glob("checkpoint-3"):
        shutil.rmtree(path)
    monkeypatch.undo()
    latest = ("--resume_from_checkpoint", "latest")
    resumed = train_here(setup, tmp_path / "run", *warmup, *latest, max_train_steps=4, **options)
    for line in (*straight, *resumed):
        line.pop("skipped_steps")  # a resumed run counts anew
    assert timeless(resumed) == timeless(straight)


def test_a_run_ends_at_the_last_step_it_may_skip(setup, tmp_path, monkeypatch):
    nan_in_steps(monkeypatch, *range(3, 100))
    with pytest.raises(UserError, match=r"step 3: the loss is not finite.*mp4\).*2 steps were skipped"):
        train_here(setup, tmp_path / "run", "--max_skipped_steps", 2)


def test_out_of_memory_names_rank_bucket_and_sizes_and_a_command_that_goes_on(setup, tmp_path, monkeypatch):
    def run(accelerator, model, optimizer, scheduler, losses, batch, norm):
        if batch["bucket"] == "1x4x4":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(accelerator, model, optimizer, scheduler, losses, batch, norm)

    original = train_wan.run_micro_step
    monkeypatch.setattr(train_wan, "run_micro_step", run)
    with pytest.raises(UserError) as caught:
        train_here(setup, tmp_path / "run", "--batch_sizes", "1x4x8=2")
    said = str(caught.value)
    assert "out of memory on rank 0: bucket 1x4x4, B = " in said
    assert "GiB predicted" in said and "0.0 GiB reserved" in said
    words = said.split("train_wan.py ")[1].split()
    smaller = words[words.index("--batch_sizes") + 1 :]
    assert smaller[0] == "1x4x8=2"
    monkeypatch.setattr(train_wan, "run_micro_step", original)
    metrics = train_here(setup, tmp_path / "run", "--batch_sizes", *smaller, max_train_steps=20)
    most = int(smaller[1].removeprefix("1x4x4="))
    assert most < int(said.split("bucket 1x4x4, B = ")[1].split(",")[0])
    assert max(b["batch_size"] for m in metrics for step in m["micro_batches"] for b in step) <= max(most, 2)


def test_out_of_memory_in_a_validation_names_it_and_keeps_the_checkpoint_of_its_step(setup, tmp_path, monkeypatch):
    def validate(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train_wan, "make_held_out_loss", lambda *_: validate)
    options = ("--validation_dataset", setup.dataset, "--validation_steps", 2)
    with pytest.raises(UserError, match="out of memory on rank 0 in the validation of step 2") as caught:
        train_here(setup, tmp_path / "run", *options, checkpointing_steps=2)
    assert "--resume_from_checkpoint latest" in str(caught.value)
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


def test_a_resume_command_replaces_options_and_keeps_the_others(monkeypatch):
    monkeypatch.setattr(
        "sys.argv",
        ["train_wan.py", "--a", "1", "--batch_sizes", "x=1", "y=2", "--hub_token", "hf_secret", "--b", "two words"],
    )
    command = resume_command(batch_sizes=["z=3"])
    assert command.endswith("train_wan.py --a 1 --b 'two words' --resume_from_checkpoint latest --batch_sizes z=3")


def test_a_resume_command_begins_with_the_launchers_own(tmp_path):
    launcher, script = tmp_path / "accelerate", tmp_path / "train.py"
    launcher.write_text("import subprocess, sys\nsubprocess.run([sys.executable, *sys.argv[-3:]], check=True)")
    script.write_text("from stopping import resume_command\nprint(resume_command())")
    words = ["launch", "--config_file", "a b.yaml", str(script), "--seed", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "recipes")))}

    def said(*command):
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    rest = f"{script} --seed 1 --resume_from_checkpoint latest"
    assert said(sys.executable, str(launcher), *words) == f"accelerate launch --config_file 'a b.yaml' {rest}"
    unbuffered = (sys.executable, "-u", str(launcher))
    own = " ".join([Path(sys.executable).name, *unbuffered[1:]])
    assert said(*unbuffered, *words) == f"{own} launch --config_file 'a b.yaml' {rest}"
    assert said(sys.executable, *words[3:]) == f"python {rest}"
    wrapped = ["timeout", "60", sys.executable]  # what else may stand there is kept as it is
    assert said(*wrapped, *words[3:]) == f"{' '.join(wrapped)} {rest}"


def test_files_are_repeated_by_pattern_with_other_noise_each_time_and_in_another_schedule_the_same(setup, tmp_path):
    """An epoch's summed loss at a learning rate of zero is that of its (sample, noise) pairs."""
    files = load_prepared(setup.dataset)
    assert parse_repeats(["*=0.5", "1?.mp4=3"], files).tolist() == [3.0 if 10 <= i < 20 else 0.5 for i in range(48)]
    for word in ("2", "*=two", "*=-1", "*=inf", "=2"):
        with pytest.raises(UserError, match=rf"PATTERN=N, such as 'photos/\*=0.5', but found '{re.escape(word)}'"):
            parse_repeats([word], files)
    with pytest.raises(UserError, match=r"no file of the dataset fits 'a/\*'; they are named like '0.mp4'"):
        parse_repeats(["a/*=2"], files)

    def epoch_loss(name, *words, **changed):
        words = ("--num_train_epochs", 1, "--proportion_empty_prompts", 0, *words)
        options = {"learning_rate": 0.0, "max_train_steps": None, "checkpointing_steps": 100, **changed}
        metrics = train_here(setup, tmp_path / name, *words, **options)
        tokens = sum(line["tokens"] for line in metrics)
        return sum(line["samples"] for line in metrics), sum(
            line["loss"] * line["tokens"] for line in metrics
        ) / tokens

    once = epoch_loss("once")
    twice = epoch_loss("twice", "--repeats", "*=2")
    other = epoch_loss("other", "--repeats", "*=2", balance="none", gradient_accumulation_steps=1)
    assert (once[0], twice[0]) == (48, 96)
    assert abs(twice[1] / once[1] - 1) > 1e-4, "the repeats had the same noise"
    assert other == pytest.approx(twice, rel=1e-5)


def test_batch_sizes_of_another_form_are_refused():
    assert parse_batch_sizes(["21x60x104=1"]) == {"21x60x104": 1}
    for word in ("21x60x104", "21x60x104=0", "21x60x104=²"):
        with pytest.raises(UserError, match=rf"SHAPE=B, with B from 1 on, such as 21x60x104=1, but found '{word}'"):
            parse_batch_sizes([word])
