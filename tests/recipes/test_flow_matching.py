"""Is what a sample learns from right, the same in every schedule, and never shared?"""

from types import SimpleNamespace

import pytest
import torch
from flow_matching import FlowMatching, make_flow_matching, occurrence_names
from support.recipe_arguments import parse
from validation import sample_latents

from adaptiveload_hf import UserError

FLOW = FlowMatching(3.0, "logit_normal", logit_mean=0.0, logit_std=1.0, mode_scale=1.29, seed=0)


def flow(shift=1.0, scheme="logit_normal", mean=0.0, seed=0, **options):
    return FlowMatching(shift, scheme, mean, 1.0, 1.29, seed, **options)


def draw(flow, *samples, epoch=0, size=(2, 4, 4)):
    return flow.draw(torch.zeros(len(samples), 16, *size), epoch, [str(sample) for sample in samples])


def test_a_sample_gets_the_same_noise_and_sigma_in_every_micro_batch():
    noise, sigma = draw(FLOW, 5, 9, 2)
    alone_noise, alone_sigma = draw(FLOW, 9)
    assert torch.equal(noise[1], alone_noise[0])
    assert torch.equal(sigma[1], alone_sigma[0])


def test_no_two_samples_epochs_or_seeds_share_their_noise():
    noise = torch.cat(
        [draw(FLOW, *range(8))[0], draw(FLOW, *range(8), epoch=1)[0], draw(flow(3.0, seed=1), *range(8))[0]]
    )
    distances = torch.cdist(noise.flatten(1), noise.flatten(1))
    assert (distances + 100 * torch.eye(len(noise))).min() > 1


def test_a_sample_that_comes_twice_in_an_epoch_has_other_noise_and_another_sigma_the_second_time():
    batch = {"sample_index": torch.tensor([3, 3, 5]), "occurrence": torch.tensor([1, 0, 0])}
    (first, second, other), sigma = draw(FLOW, *occurrence_names(batch))
    assert len(set(sigma.tolist())) == 3
    assert min(torch.dist(first, second), torch.dist(first, other)) > 1
    assert torch.equal(second, draw(FLOW, 3)[0][0]), "the last time is that of a sample that comes once"


def test_no_two_samples_share_their_sigma():
    assert len(set(draw(FLOW, *range(200))[1].tolist())) == 200


@pytest.mark.parametrize("scheme", ["sigma_sqrt", "logit_normal", "mode", "cosmap", "none"])
def test_sigma_lies_in_its_range_for_every_scheme_and_the_shift_is_applied(scheme):
    plain = draw(flow(1.0, scheme), *range(50))[1]
    shifted = draw(flow(5.0, scheme), *range(50))[1]
    assert plain.min() > 0
    assert plain.max() <= 1
    torch.testing.assert_close(shifted, 5 * plain / (1 + 4 * plain))


def test_uniform_sigma_has_mean_one_half_and_a_positive_logit_mean_means_less_noise_as_in_diffusers():
    assert draw(flow(scheme="none"), *range(400))[1].mean() == pytest.approx(0.5, abs=0.05)
    assert draw(flow(mean=1.0), *range(400))[1].mean() < 0.4


def test_a_latent_of_four_times_the_size_has_twice_the_shift():
    by_size = flow(3.0, shift_size=2 * 4 * 4)
    assert torch.equal(draw(by_size, *range(20))[1], draw(flow(3.0), *range(20))[1])
    torch.testing.assert_close(draw(by_size, *range(20), size=(2, 8, 8))[1], draw(flow(6.0), *range(20))[1])


def test_a_sample_is_made_with_the_shift_that_its_size_is_trained_with():
    asked = SimpleNamespace(validation_inference_steps=4, guidance_scale=1)

    def timesteps(flow, height):
        seen = []

        def predict(noisy, timestep, batch):
            seen.append(timestep.item())
            return torch.zeros_like(noisy)

        before = torch.random.get_rng_state()
        sample_latents(predict, flow, {}, {}, (16, 2, height, 4), "cpu", asked)
        assert torch.equal(torch.random.get_rng_state(), before), "a sample must not move the training"
        return seen

    assert timesteps(flow(3.0, shift_size=2 * 4 * 4), 16) == timesteps(flow(6.0), 16) != timesteps(flow(3.0), 16)


@pytest.mark.parametrize("scheme", ["sigma_sqrt", "logit_normal", "mode", "cosmap", "none"])
def test_the_two_experts_share_the_noise_levels_at_the_boundary_as_it_is_after_the_shift(scheme):
    whole, high, low = (
        draw(flow(5.0, scheme, bounds=bounds), *range(300))[1] for bounds in ((0.0, 1.0), (0.875, 1.0), (0.0, 0.875))
    )
    assert high.min() >= 0.875
    assert low.max() < 0.875
    # What the whole range gives one expert anyway is left as it is; only the rest is drawn again.
    assert torch.equal(high[whole >= 0.875], whole[whole >= 0.875])
    assert torch.equal(low[whole < 0.875], whole[whole < 0.875])
    assert high.mean().item() == pytest.approx(whole[whole >= 0.875].mean().item(), abs=0.02)


def test_an_expert_whose_noise_levels_are_hardly_ever_drawn_is_refused():
    with pytest.raises(UserError, match=r"draws hardly any sigma from 0.999 to 1, this expert's"):
        draw(flow(mean=30.0, bounds=(0.999, 1.0)), 0)


@pytest.mark.parametrize(("scheme", "weight"), [("none", torch.ones_like), ("sigma_sqrt", lambda s: s**-2)])
def test_the_loss_is_the_weighted_mean_square_of_the_velocity_error(scheme, weight):
    matching, latent = flow(3.0, scheme), torch.randn(3, 16, 2, 4, 4)
    batch = {"latent": latent, "sample_index": torch.arange(3)}
    noise, sigma = matching.draw(latent, 4, ["0", "1", "2"])
    off = torch.tensor([0.0, 1.0, 2.0]).view(-1, 1, 1, 1, 1)

    def predict(noisy, timestep, given):
        mix = sigma.view(-1, 1, 1, 1, 1)
        torch.testing.assert_close(noisy, (1 - mix) * latent + mix * noise)
        torch.testing.assert_close(timestep, 1000 * sigma)
        assert given is batch
        return noise - latent + off

    losses = matching.sample_losses(predict, batch, 4)
    torch.testing.assert_close(losses, weight(sigma) * torch.tensor([0.0, 1.0, 4.0]))


@pytest.mark.parametrize(("frames", "counted"), [(3, 4.0), (1, 1.0)])
def test_a_first_frame_that_is_given_has_no_loss_but_a_still_has(frames, counted):
    matching, latent = flow(scheme="none", first_frame_given=True), torch.randn(2, 16, frames, 4, 4)
    batch = {"latent": latent, "sample_index": torch.arange(2)}
    error = torch.full_like(latent, 2.0)
    error[:, :, 0] = 1.0
    losses = matching.sample_losses(lambda *_: matching.draw(latent, 0, ["0", "1"])[0] - latent + error, batch, 0)
    torch.testing.assert_close(losses, torch.full((2,), counted))


def test_the_shift_is_the_pipelines_unless_given(tiny_pipeline, tmp_path):
    assert make_flow_matching(parse(tiny_pipeline)).shift == 3.0
    assert make_flow_matching(parse(tiny_pipeline, "--shift", "5")).shift == 5.0
    assert make_flow_matching(parse(tiny_pipeline, "--shift_shape", "2x4x4")).shift_size == 32
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "DDIMScheduler"}')
    with pytest.raises(UserError, match=r"neither `shift` nor `flow_shift`\. Pass --shift"):
        make_flow_matching(parse(tmp_path))
