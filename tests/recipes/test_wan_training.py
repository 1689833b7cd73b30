"""Does each variant of Wan get what it takes, and is data that it cannot take refused?"""

import importlib.util
import json
import shutil

import pytest
import torch
from data_setup import parse_repeats
from datasets import load_from_disk
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from flow_matching import FlowMatching
from model_setup import load_model_config, load_transformer, prepare_training
from support.accelerators import fresh_accelerate
from support.prepared import save_prepared
from support.recipe_arguments import parse
from support.train_ranks import save_small_transformer
from training_loop import run_micro_step
from validation_videos import check_validation, encode_prompts
from wan_training import MODEL_CLASS, WanVariant, check_dataset, choose_variant, latent_statistics, make_predict

from adaptiveload_hf import UserError, make_accelerator

FLOW = FlowMatching(3.0, "logit_normal", logit_mean=0.0, logit_std=1.0, mode_scale=1.29, seed=0)
WHOLE = WanVariant()
TEXT = {"prompt_embeds": torch.randn(2, 8, 32)}


@pytest.fixture
def dataset(tmp_path):
    return load_from_disk(save_prepared(tmp_path, {"1x4x4": 2, "2x4x4": 1}) / "dataset")


@pytest.fixture
def pipeline_with(small_pipeline, tmp_path):
    """A copy of the small pipeline whose model_index.json says something else."""

    def make(**index):
        folder = shutil.copytree(small_pipeline, tmp_path / "pipeline", ignore=shutil.ignore_patterns("text_*"))
        path = folder / "model_index.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **index}))
        return folder

    return make


def small_model(tmp_path, **changed):
    save_small_transformer(tmp_path / "small", **changed)
    return WanTransformer3DModel.from_pretrained(tmp_path / "small")


def called_with(model, noisy, timestep, batch, variant=WHOLE, **options):
    """What the transformer is called with, and what it returns."""
    seen = {}
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    with fresh_accelerate(ACCELERATE_USE_CPU="true"), torch.no_grad():
        velocity = make_predict(make_accelerator(), model, variant, **options)(noisy, timestep, {**TEXT, **batch})
    return seen, velocity


def test_under_bf16_autocast_the_model_sees_the_timestep_to_a_thousandth(small_pipeline):
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        accelerator, args = make_accelerator(mixed_precision="bf16"), parse(small_pipeline)
        transformer = load_transformer(accelerator, MODEL_CLASS, args)
        model, optimizer, scheduler = prepare_training(accelerator, args, transformer)
        predict = make_predict(accelerator, model, WanVariant())
        seen = []
        model.condition_embedder.timesteps_proj.register_forward_hook(lambda m, i, o: seen.append(i[0]))
        batch = {
            "latent": torch.randn(6, 16, 2, 4, 4),
            "prompt_embeds": torch.randn(6, 8, 32).bfloat16(),
            "sample_index": torch.arange(6),
            "loss_weight": 1.0,
        }
        loss, grad_norm = run_micro_step(
            accelerator, model, optimizer, scheduler, lambda b: FLOW.sample_losses(predict, b, 0), batch, 1.0
        )
    exact = 1000 * FLOW.draw(batch["latent"], 0, [str(sample) for sample in range(6)])[1]
    assert (seen[0] - exact).abs().max() < 1e-3
    assert loss.dtype == torch.float32
    assert grad_norm > 0


def test_an_image_to_video_transformer_gets_mask_and_image_beside_the_noise(tmp_path):
    model = small_model(tmp_path, in_channels=36, image_dim=24)
    noisy, image, embeds = torch.randn(2, 16, 3, 4, 4), torch.randn(2, 16, 3, 4, 4), torch.randn(2, 5, 24)
    batch = {"image_latent": image, "image_embeds": embeds}
    seen, velocity = called_with(model, noisy, torch.tensor([900.0, 20.0]), batch)
    hidden = seen["hidden_states"]
    assert torch.equal(hidden[:, :16], noisy)
    assert torch.equal(hidden[:, 20:], image)
    assert hidden[:, 16:20, 0].eq(1).all() and hidden[:, 16:20, 1:].eq(0).all()
    assert torch.equal(seen["encoder_hidden_states_image"], embeds)
    assert velocity.shape == noisy.shape


def test_ti2v_gets_a_time_for_every_token_and_with_the_first_frame_given_none_for_its_tokens(tmp_path):
    noisy, clean = torch.randn(2, 16, 3, 4, 6), torch.randn(2, 16, 3, 4, 6)
    times, variant = torch.tensor([900.0, 20.0]), WanVariant(time_per_token=True)
    seen, velocity = called_with(small_model(tmp_path), noisy, times, {}, variant)
    assert torch.equal(seen["timestep"], times[:, None].expand(2, 3 * 2 * 3))
    assert velocity.shape == noisy.shape
    options = {"variant": variant, "first_frame_given": True}
    seen, _ = called_with(small_model(tmp_path), noisy, times, {"latent": clean}, **options)
    assert torch.equal(seen["timestep"].view(2, 3, 6)[:, 0], torch.zeros(2, 6))
    assert torch.equal(seen["timestep"].view(2, 3, 6)[:, 1:], times.view(2, 1, 1).expand(2, 2, 6))
    assert torch.equal(seen["hidden_states"][:, :, 0], clean[:, :, 0])
    assert torch.equal(seen["hidden_states"][:, :, 1:], noisy[:, :, 1:])


def test_equal_times_for_all_tokens_are_the_same_as_one_time(tmp_path):
    model, noisy, times = small_model(tmp_path), torch.randn(2, 16, 2, 4, 4), torch.tensor([900.0, 20.0])
    _, one = called_with(model, noisy, times, {})
    _, many = called_with(model, noisy, times, {}, WanVariant(time_per_token=True))
    torch.testing.assert_close(one, many)


def test_an_expert_is_chosen_where_there_are_two_and_only_there(small_pipeline, pipeline_with):
    assert choose_variant(parse(small_pipeline)) == WanVariant()
    with pytest.raises(UserError, match="--expert is for pipelines with two transformers"):
        choose_variant(parse(small_pipeline, "--expert", "low_noise"))
    two = pipeline_with(boundary_ratio=0.875)
    with pytest.raises(UserError, match=r"has two transformers, one for sigma from 0.875 up"):
        choose_variant(parse(two))
    assert choose_variant(parse(two, "--expert", "high_noise")) == WanVariant("transformer", (0.875, 1.0))
    assert choose_variant(parse(two, "--expert", "low_noise")) == WanVariant("transformer_2", (0.0, 0.875))


def test_a_first_frame_is_given_to_ti2v_alone(small_pipeline, pipeline_with):
    with pytest.raises(UserError, match=r"--first_frame_given is for Wan 2\.2 TI2V"):
        choose_variant(parse(small_pipeline, "--first_frame_given"))
    assert choose_variant(parse(pipeline_with(expand_timesteps=True), "--first_frame_given")).time_per_token


def test_the_prompts_of_a_validation_are_as_long_as_the_captions_trained_on(small_pipeline):
    args = parse(small_pipeline, "--validation_prompt", "a cat")
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        embeds = encode_prompts(make_accelerator(), args, 300)
    assert [embed.shape[:2] for embed in embeds] == [(1, 300), (1, 300)]


def test_clips_are_not_sampled_from_transformers_that_alone_cannot(small_pipeline):
    config, prompt = load_model_config(MODEL_CLASS, parse(small_pipeline)), ("--validation_prompt", "a cat")
    check_validation(parse(small_pipeline, *prompt), WanVariant(), config)
    with pytest.raises(UserError, match="needs a first frame"):
        check_validation(parse(small_pipeline, *prompt), WanVariant(), {**config, "in_channels": 36})
    with pytest.raises(UserError, match="one of two experts"):
        check_validation(parse(small_pipeline, *prompt), WanVariant("transformer_2", (0.0, 0.9)), config)
    odd = parse(small_pipeline, *prompt, "--validation_resolution", "5x30x30")
    with pytest.raises(UserError, match=r"needs 4n\+1 frames and multiples of 16 pixels, but it is 5x30x30"):
        check_validation(odd, WanVariant(), config)


def test_validation_clips_without_pyav_are_refused_before_weights_are_read(small_pipeline, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--validation_prompt writes clips, which needs PyAV\. .*pip install av"):
        check_validation(parse(small_pipeline, "--validation_prompt", "a cat"), WanVariant(), {})


def test_a_folder_that_is_no_pipeline_is_named(tmp_path):
    with pytest.raises(UserError, match=r"with the folder 'transformer', but"):
        load_model_config(MODEL_CLASS, parse(tmp_path))
    with pytest.raises(UserError, match=r"with model_index.json, but"):
        choose_variant(parse(tmp_path))


def test_latents_captions_and_images_that_do_not_fit_are_refused(small_pipeline, dataset):
    config = load_model_config(MODEL_CLASS, parse(small_pipeline))
    check_dataset(dataset, config)
    with pytest.raises(UserError, match=r"latents of width 48 \(in_channels\), but the dataset holds width 16"):
        check_dataset(dataset, {**config, "in_channels": 48, "out_channels": 48})
    with pytest.raises(UserError, match=r"caption embeddings of width 4096 \(text_dim\), but .* width 32"):
        check_dataset(dataset, {**config, "text_dim": 4096})
    with pytest.raises(UserError, match=r"has no image_latent_shape and no image_embeds_shape"):
        check_dataset(dataset, {**config, "in_channels": 36, "image_dim": 1280})


def test_a_dataset_without_the_columns_of_a_prepared_one_is_refused_with_those_it_has(small_pipeline, dataset):
    config = load_model_config(MODEL_CLASS, parse(small_pipeline))
    said = r"has no column latent_normalized and no prompt_embeds_shape, but .*caption, file\. Prepare one with"
    with pytest.raises(UserError, match=said):
        check_dataset(dataset.remove_columns(["latent_normalized", "prompt_embeds_shape"]), config)
    with pytest.raises(UserError, match="the dataset has no column file, but latent, "):
        parse_repeats(["*=2"], dataset.remove_columns(["file"]))


def test_latents_that_are_not_normalised_take_the_statistics_of_the_vae(small_pipeline, dataset, tmp_path):
    assert latent_statistics(parse(small_pipeline), dataset) is None
    raw = load_from_disk(save_prepared(tmp_path / "raw", {"1x4x4": 2}, normalized=False) / "dataset")
    mean, std = latent_statistics(parse(small_pipeline), raw)
    assert mean.flatten().tolist() == pytest.approx(AutoencoderKLWan().config.latents_mean)
    assert std.shape == (16, 1, 1, 1)
    assert torch.equal(latent_statistics(parse(small_pipeline), dataset, raw)[0], mean)
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    with pytest.raises(UserError, match="the VAE configuration has no latents_mean"):
        latent_statistics(parse(tmp_path), raw)
