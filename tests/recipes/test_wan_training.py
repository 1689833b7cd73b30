"""Is the flow-matching step right, the same for a sample in every schedule, and refused where it could not be?"""

import argparse

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from datasets import load_from_disk
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from flow_matching import FlowMatching, make_flow_matching
from model_setup import (
    describe_run,
    load_transformer,
    load_transformer_config,
    prepare_training,
    refuse_unsafe_sharding,
)
from support.accelerators import FSDP2, fresh_accelerate, one_rank
from support.prepared import save_prepared
from torch.distributed.fsdp import MixedPrecisionPolicy
from training_arguments import add_flow_arguments, add_model_arguments, add_scheduler_arguments
from training_loop import run_micro_step
from wan_training import check_dataset, latent_statistics, wan_predict

from adaptiveload_hf import UserError, make_accelerator

FLOW = FlowMatching(3.0, "logit_normal", logit_mean=0.0, logit_std=1.0, mode_scale=1.29, seed=0)


@pytest.fixture
def arguments(tiny_pipeline):
    def parse(*extra: str):
        parser = argparse.ArgumentParser()
        for add in (add_model_arguments, add_flow_arguments, add_scheduler_arguments):
            add(parser)
        required = ["--pretrained_model_name_or_path", str(tiny_pipeline), "--dataset", "D", "--output_dir", "O"]
        return parser.parse_args([*required, *extra])

    return parse


@pytest.fixture
def dataset(tmp_path):
    return load_from_disk(save_prepared(tmp_path, {"1x4x4": 2, "2x4x4": 1}) / "dataset")


def prepared(accelerator, args):
    return prepare_training(accelerator, args, load_transformer(WanTransformer3DModel, args))


def latents(*samples: int) -> torch.Tensor:
    return torch.zeros(len(samples), 16, 2, 4, 4)


def draw(flow, *samples, epoch=0):
    return flow.draw(latents(*samples), epoch, torch.tensor(samples))


def test_a_sample_gets_the_same_noise_and_sigma_in_every_micro_batch():
    noise, sigma = draw(FLOW, 5, 9, 2)
    alone_noise, alone_sigma = draw(FLOW, 9)
    assert torch.equal(noise[1], alone_noise[0])
    assert torch.equal(sigma[1], alone_sigma[0])


def test_no_two_samples_epochs_or_seeds_share_their_noise():
    other = FlowMatching(3.0, "logit_normal", 0.0, 1.0, 1.29, seed=1)
    noise = torch.cat([draw(FLOW, *range(8))[0], draw(FLOW, *range(8), epoch=1)[0], draw(other, *range(8))[0]])
    distances = torch.cdist(noise.flatten(1), noise.flatten(1))
    assert (distances + 100 * torch.eye(len(noise))).min() > 1


@pytest.mark.parametrize("scheme", ["sigma_sqrt", "logit_normal", "mode", "cosmap", "none"])
def test_sigma_lies_in_its_range_for_every_scheme_and_the_shift_is_applied(scheme):
    plain = draw(FlowMatching(1.0, scheme, 0.0, 1.0, 1.29, 0), *range(50))[1]
    shifted = draw(FlowMatching(5.0, scheme, 0.0, 1.0, 1.29, 0), *range(50))[1]
    assert plain.min() > 0
    assert plain.max() <= 1
    torch.testing.assert_close(shifted, 5 * plain / (1 + 4 * plain))


def test_uniform_sigma_has_mean_one_half_and_a_positive_logit_mean_means_less_noise_as_in_diffusers():
    uniform = draw(FlowMatching(1.0, "none", 0.0, 1.0, 1.29, 0), *range(400))[1]
    assert uniform.mean() == pytest.approx(0.5, abs=0.05)
    skewed = draw(FlowMatching(1.0, "logit_normal", 1.0, 1.0, 1.29, 0), *range(400))[1]
    assert skewed.mean() < 0.4


@pytest.mark.parametrize(("scheme", "weight"), [("none", torch.ones_like), ("sigma_sqrt", lambda s: s**-2)])
def test_the_loss_is_the_weighted_mean_square_of_the_velocity_error(scheme, weight):
    flow = FlowMatching(3.0, scheme, 0.0, 1.0, 1.29, 0)
    latent = torch.randn(3, 16, 2, 4, 4)
    batch = {"latent": latent, "sample_index": torch.arange(3)}
    noise, sigma = flow.draw(latent, 4, batch["sample_index"])
    off = torch.tensor([0.0, 1.0, 2.0]).view(-1, 1, 1, 1, 1)

    def predict(noisy, timestep, given):
        mix = sigma.view(-1, 1, 1, 1, 1)
        torch.testing.assert_close(noisy, (1 - mix) * latent + mix * noise)
        torch.testing.assert_close(timestep, 1000 * sigma)
        assert given is batch
        return noise - latent + off

    losses = flow.sample_losses(predict, batch, 4)
    torch.testing.assert_close(losses, weight(sigma) * torch.tensor([0.0, 1.0, 4.0]))


def test_under_bf16_autocast_the_model_sees_the_timestep_to_a_thousandth(tiny_pipeline, arguments):
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        accelerator = make_accelerator(mixed_precision="bf16")
        model, optimizer, scheduler = prepared(accelerator, arguments())
        predict = wan_predict(accelerator, model)
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
    exact = 1000 * FLOW.draw(batch["latent"], 0, batch["sample_index"])[1]
    assert (seen[0] - exact).abs().max() < 1e-3
    assert loss.dtype == torch.float32
    assert float(grad_norm) > 0


def test_the_shift_is_the_pipelines_unless_given(arguments, tmp_path):
    assert make_flow_matching(arguments()).shift == 3.0
    assert make_flow_matching(arguments("--shift", "5")).shift == 5.0
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "DDIMScheduler"}')
    with pytest.raises(UserError, match=r"neither `shift` nor `flow_shift`\. Pass --shift"):
        make_flow_matching(arguments("--pretrained_model_name_or_path", str(tmp_path)))


def test_a_folder_that_is_no_pipeline_is_named(arguments, tmp_path):
    with pytest.raises(UserError, match=r"with the folder 'transformer', but"):
        load_transformer_config(WanTransformer3DModel, arguments("--pretrained_model_name_or_path", str(tmp_path)))


def test_latents_and_captions_of_another_width_are_refused(arguments, dataset):
    config = load_transformer_config(WanTransformer3DModel, arguments())
    check_dataset(dataset, config)
    with pytest.raises(UserError, match=r"latents of width 36 \(in_channels\), but the dataset holds width 16"):
        check_dataset(dataset, {**config, "in_channels": 36})
    with pytest.raises(UserError, match=r"caption embeddings of width 4096 \(text_dim\), but .* width 32"):
        check_dataset(dataset, {**config, "text_dim": 4096})


def test_latents_that_are_not_normalised_take_the_statistics_of_the_vae(arguments, dataset, tmp_path):
    assert latent_statistics(arguments(), dataset) is None
    raw = load_from_disk(save_prepared(tmp_path / "raw", {"1x4x4": 2}, normalized=False) / "dataset")
    mean, std = latent_statistics(arguments(), raw)
    assert mean.flatten().tolist() == pytest.approx(AutoencoderKLWan().config.latents_mean)
    assert std.shape == (16, 1, 1, 1)
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    with pytest.raises(UserError, match="the VAE configuration has no latents_mean"):
        latent_statistics(arguments("--pretrained_model_name_or_path", str(tmp_path)), raw)


def test_a_run_describes_what_its_seconds_hold_for(arguments):
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        args = arguments("--gradient_checkpointing", "--no_patch")
        config = load_transformer_config(WanTransformer3DModel, args)
        model, environment = describe_run(
            make_accelerator(gradient_accumulation_steps=2), args, WanTransformer3DModel, config
        )
        deeper, _ = describe_run(make_accelerator(), args, WanTransformer3DModel, {**config, "num_layers": 5})
    assert model["class"] == "WanTransformer3DModel"
    assert model["config_hash"] != deeper["config_hash"]
    assert (environment["world_size"], environment["strategy"], environment["dtype"]) == (1, "single", "float32")
    assert (environment["patched"], environment["activation_checkpointing"]) == (False, True)
    assert environment["gradient_accumulation_steps"] == 2


@pytest.mark.parametrize(
    ("variables", "flags", "message"),
    [
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, [], "has fsdp_cpu_ram_efficient_loading: true"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, ["--gradient_checkpointing"], "checkpointed twice"),
    ],
)
def test_fsdp_settings_that_fail_in_the_first_step_are_refused(arguments, variables, flags, message):
    with fresh_accelerate(**one_rank(**{**FSDP2, **variables})), pytest.raises(UserError, match=message):
        refuse_unsafe_sharding(make_accelerator(), arguments(*flags).gradient_checkpointing)


def test_checkpointing_under_a_policy_that_casts_inputs_is_refused_by_name(arguments):
    with fresh_accelerate(**one_rank(**FSDP2)):
        plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy(torch.bfloat16))
        accelerator = make_accelerator(fsdp_plugin=plugin)
        with pytest.raises(UserError, match=r"cast_forward_inputs=True.*fsdp_activation_checkpointing: true"):
            refuse_unsafe_sharding(accelerator, gradient_checkpointing=True)


def test_from_scratch_takes_the_configuration_but_not_the_weights(arguments, tiny_pipeline):
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        torch.manual_seed(1)
        model = prepared(make_accelerator(), arguments("--from_scratch", "--no_patch"))[0]
    saved = WanTransformer3DModel.from_pretrained(tiny_pipeline, subfolder="transformer")
    assert dict(model.config).items() >= {"num_layers": saved.config.num_layers}.items()
    assert not torch.equal(model.proj_out.weight, saved.proj_out.weight)
