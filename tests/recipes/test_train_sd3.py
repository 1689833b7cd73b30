"""Does train_sd3.py train SD3 on pictures, whole and as a LoRA, and write what StableDiffusion3Pipeline reads?"""

import json
import sys
from types import SimpleNamespace

import benchmark_shapes
import model_setup
import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from model_setup import load_model_config
from PIL import Image
from safetensors.torch import load_file, save_file
from sd3_training import LORA_TARGET_MODULES, MODEL_CLASS, check_dataset, choose_variant, geometry, make_predict
from support.accelerators import fresh_accelerate
from support.prepared import save_prepared
from support.recipe_arguments import parse
from support.train_ranks import arguments, metrics_of, timeless, train_here, train_on_ranks
from tiny_sd3 import save_tiny_sd3

from adaptiveload_hf import BucketConfig, LatentShape, UserError, make_accelerator
from adaptiveload_hf.buckets.sources import load_prepared
from adaptiveload_hf.environment import read_setup

COUNTS = {"1x4x4": 9, "1x4x8": 8, "1x8x8": 6}
TEXT, POOLED = (77 + 8, 64), 40


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd3")
    dataset = save_prepared(folder / "prepared", COUNTS, text_shape=TEXT, pooled=POOLED)
    empty = {"prompt_embeds": torch.zeros(TEXT), "pooled_prompt_embeds": torch.zeros(POOLED)}
    save_file(empty, dataset / "empty_prompt_embeds.safetensors")
    return SimpleNamespace(
        pipeline=save_tiny_sd3(folder / "pipeline"), dataset=dataset, config="auto", folder=folder / "full"
    )


@pytest.fixture(scope="module")
def full(setup):
    """Measured first, tried first, with validation of both kinds, and a checkpoint every other step."""
    held_out = save_prepared(
        setup.folder.parent / "held_out", {"1x4x4": 2, "1x4x8": 1}, text_shape=TEXT, pooled=POOLED, seed=1
    )
    words = ("--validation_dataset", held_out, "--validation_prompt", "a cat", "a dog", "--validation_steps", 100)
    words += (
        "--validation_resolution",
        "1x32x64",
        "--validation_inference_steps",
        2,
        "--proportion_empty_prompts",
        0.5,
    )
    options = {"max_train_steps": 4, "checkpointing_steps": 2, "report_to": "tensorboard", "preflight": True}
    return train_here(setup, setup.folder, *words, recipe="train_sd3", **options)


def test_all_weights_are_trained_on_measured_buckets_with_validation_and_load_into_the_pipeline(setup, full):
    assert [line["step"] for line in full] == [1, 2, 3, 4]
    assert set(full[-1]["validation_loss_by_shape"]) == {"1x4x4", "1x4x8"}
    config = BucketConfig.from_pretrained(setup.folder / "bucket_config")
    assert config.model["class"] == "SD3Transformer2DModel"
    assert config.geometry.tokens(LatentShape(1, 4, 8)) == 2 * 4 + TEXT[0]
    card = (setup.folder / "README.md").read_text()
    assert "All weights of SD3Transformer2DModel" in card and "[validation/step-4-0.png]" in card
    for number in (0, 1):
        with Image.open(setup.folder / "validation" / f"step-4-{number}.png") as picture:
            assert picture.size == (64, 32)
    events = b"".join(path.read_bytes() for path in setup.folder.rglob("events.out.tfevents*"))
    assert b"validation/0" in events and b"validation/1" in events

    trained = SD3Transformer2DModel.from_pretrained(setup.folder / "transformer")
    start = SD3Transformer2DModel.from_pretrained(setup.pipeline, subfolder="transformer").state_dict()
    assert set(trained.state_dict()) == set(start)
    assert all((value - start[name]).abs().max() < 0.1 for name, value in trained.state_dict().items())
    assert not torch.equal(trained.proj_out.weight, start["proj_out.weight"])
    pipeline = StableDiffusion3Pipeline.from_pretrained(setup.pipeline, transformer=trained)
    pipeline.set_progress_bar_config(disable=True)
    pictures = pipeline("a cat", height=32, width=32, num_inference_steps=2, output_type="pt").images
    assert torch.isfinite(pictures).all()


def test_a_lora_of_both_streams_goes_on_as_if_undisturbed_and_loads_into_the_pipeline(setup, full, tmp_path):
    def train(run, steps, *extra):
        config = setup.folder / "bucket_config"
        options = {"bucket_config": config, "max_train_steps": steps, "checkpointing_steps": 1}
        return timeless(train_here(setup, tmp_path / run, "--rank", 2, *extra, recipe="train_sd3", **options))

    whole = train("whole", 3)
    train("cut", 1)
    assert train("cut", 3, "--resume_from_checkpoint", "latest") == whole
    kept = load_file(tmp_path / "cut" / "checkpoint-1" / "model.safetensors")
    # The last block has no output projection of the text.
    assert len(kept) == 2 * (2 * len(LORA_TARGET_MODULES) - 1)
    assert all("lora_" in name for name in kept)

    pipeline = StableDiffusion3Pipeline.from_pretrained(setup.pipeline)
    before = {name: value.clone() for name, value in pipeline.transformer.state_dict().items()}
    pipeline.load_lora_weights(tmp_path / "cut")
    after = pipeline.transformer.state_dict()
    moved = {name for name, value in after.items() if "lora_B" in name and bool(value.any())}
    # Nor does what the last block's text asks for reach any output.
    assert len(moved) == 2 * len(LORA_TARGET_MODULES) - 2
    assert all(torch.equal(value, after[name]) for name, value in before.items() if name in after)


@pytest.mark.distributed
def test_two_sharded_ranks_train_it_to_the_weights_that_one_rank_reaches(setup, full, tmp_path):
    """The whole dataset is one optimizer step of four micro-batches, on two ranks or one after the other on one."""
    config = setup.folder / "bucket_config"
    options = {"bucket_config": config, "max_train_steps": 2, "checkpointing_steps": 2, "learning_rate": 1e-4}
    words = ("--batch_sizes", "1x4x4=9", "1x4x8=8", "1x8x8=3", "--adam_epsilon", 1e-3)
    train_on_ranks(2, arguments(setup, tmp_path / "two", *words, **options), recipe="train_sd3")
    metrics = metrics_of(tmp_path / "two")
    assert [len(ranks) for line in metrics for ranks in line["micro_batches"]] == 4 * [2]
    alone = train_here(setup, tmp_path / "one", *words, recipe="train_sd3", **options, gradient_accumulation_steps=4)
    assert [line["samples"] for line in metrics] == [line["samples"] for line in alone] == 2 * [sum(COUNTS.values())]
    assert [line["loss"] for line in metrics] == pytest.approx([line["loss"] for line in alone], rel=1e-5)
    first, second = (SD3Transformer2DModel.from_pretrained(tmp_path / name / "transformer") for name in ("two", "one"))
    for name, value in first.state_dict().items():
        torch.testing.assert_close(value, second.state_dict()[name], rtol=1e-4, atol=2e-6)


def test_the_model_gets_one_frame_the_pooled_caption_and_the_time_as_its_pipeline_gives_them(setup):
    model = SD3Transformer2DModel.from_pretrained(setup.pipeline, subfolder="transformer")
    batch = {"prompt_embeds": torch.randn(2, *TEXT), "pooled_prompt_embeds": torch.randn(2, POOLED)}
    noisy, times = torch.randn(2, 16, 1, 4, 8), torch.tensor([997.3, 20.0])
    with fresh_accelerate(ACCELERATE_USE_CPU="true"), torch.no_grad():
        variant = choose_variant(parse(setup.pipeline, recipe="train_sd3"))
        velocity = make_predict(make_accelerator(), model, variant)(noisy, times, batch)
        expected = model(noisy[:, :, 0], batch["prompt_embeds"], batch["pooled_prompt_embeds"], times).sample
    assert torch.equal(velocity, expected[:, :, None])


def test_a_run_keeps_what_a_law_can_be_fitted_to_its_log_by(setup, full):
    config, kept = BucketConfig.from_pretrained(setup.folder / "bucket_config"), read_setup(setup.folder)
    assert {**config.model, "base_model": str(setup.pipeline)} == kept["model"]
    assert (kept["model"]["text_tokens"], kept["model"]["vae_scale"]) == (TEXT[0], [4, 8])
    assert kept["environment"]["strategy"] == "single"
    for line in full:
        for micro_batch in (each for micro_step in line["micro_batches"] for each in micro_step):
            assert micro_batch["tokens"] == config.geometry.tokens(LatentShape.parse(micro_batch["shape"]))


def test_a_bucket_config_of_captions_of_another_length_is_refused(setup, tmp_path):
    sizes = dict.fromkeys(COUNTS, 1)
    counted = BucketConfig.from_flops(setup.pipeline / "transformer", batch_sizes=sizes, text_tokens=9)
    counted.save_pretrained(tmp_path / "counted")
    said = r"of another geometry \(model text_tokens: measured with 9, here 85\)"
    with pytest.raises(UserError, match=said):
        train_here(setup, tmp_path / "run", recipe="train_sd3", bucket_config=tmp_path / "counted")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_sd3_cannot_take_is_refused(setup, tmp_path):
    args = parse(setup.pipeline, recipe="train_sd3")
    config, dataset = load_model_config(MODEL_CLASS, args), load_prepared(setup.dataset)
    check_dataset(dataset, config)
    assert geometry(config, 85).tokens(LatentShape(1, 8, 8)) == 16 + 85
    for name in ("in_channels", "joint_attention_dim", "pooled_projection_dim"):
        with pytest.raises(UserError, match=rf"of width 7 \({name}\), but the dataset holds"):
            check_dataset(dataset, {**config, name: 7})
    with pytest.raises(UserError, match="positions up to 6x6 of a latent, but the dataset holds 1x4x8"):
        check_dataset(dataset, {**config, "pos_embed_max_size": 3})

    def saved(name, shape, **changed):
        return load_prepared(save_prepared(tmp_path / name, {shape: 1}, text_shape=TEXT, **changed))

    with pytest.raises(UserError, match=r"has no column pooled_prompt_embeds_shape, but .* Prepare one with"):
        check_dataset(saved("without", "1x4x4"), config)
    with pytest.raises(UserError, match="SD3 makes pictures, but the dataset holds clips of 2x4x4"):
        check_dataset(saved("clips", "2x4x4", pooled=POOLED), config)
    with pytest.raises(UserError, match="latents that are not normalised"):
        check_dataset(saved("raw", "1x4x4", pooled=POOLED, normalized=False), config)


def test_a_pipeline_that_is_no_sd3_and_flags_of_wan_are_refused(setup, tmp_path):
    with pytest.raises(UserError, match=r"expected an SD3 pipeline .* with model_index.json, but"):
        choose_variant(parse(tmp_path, recipe="train_sd3"))
    with pytest.raises(UserError, match="--expert is for Wan pipelines"):
        choose_variant(parse(setup.pipeline, "--expert", "low_noise"))
    (tmp_path / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", "WanTransformer3DModel"]}))
    with pytest.raises(UserError, match=r"has WanTransformer3DModel. Wan is trained by train_wan.py"):
        choose_variant(parse(tmp_path, recipe="train_sd3"))


@pytest.mark.parametrize("resolution", ["1x24x32", "5x32x32", "1x32x1552"])
def test_pictures_of_a_size_that_cannot_be_made_are_refused_at_the_start(setup, tmp_path, resolution):
    words = ("--validation_prompt", "a cat", "--validation_resolution", resolution, "--dataset", "not read before")
    message = rf"needs 1 frame and multiples of 16 pixels up to 1536, .* but it is {resolution}\."
    with pytest.raises(UserError, match=message):
        train_here(setup, tmp_path, *words, recipe="train_sd3", max_train_steps=1)


def test_a_config_of_sd3_and_a_file_of_shapes_are_enough_to_time_its_lora(setup, tmp_path, monkeypatch, capsys):
    (tmp_path / "shapes.json").write_text(json.dumps({"1x4x4": 40, "1x8x8": 30}))
    words = ["--config", setup.pipeline / "transformer", "--shapes", tmp_path / "shapes.json", "--max_points", 5]
    words += ["--output_dir", tmp_path / "config", "--rank", 2]
    monkeypatch.setattr(sys, "argv", ["benchmark_shapes.py", *map(str, words)])
    targets, add_lora = [], model_setup.add_lora

    def seen(model, args):
        targets.append(args.lora_target_modules)
        add_lora(model, args)

    monkeypatch.setattr(model_setup, "add_lora", seen)
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        benchmark_shapes.main()
    config = BucketConfig.from_pretrained(tmp_path / "config")
    assert config.geometry.text_tokens == 77 + 256
    assert config.environment["lora"] is True
    assert targets == [LORA_TARGET_MODULES]
    assert "recipes/train_sd3.py" in capsys.readouterr().err.splitlines()[-1]
