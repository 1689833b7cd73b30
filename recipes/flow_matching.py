"""What does a flow-matching model learn from a sample: which noise, which timestep, which loss?"""

import hashlib
import math
from dataclasses import dataclass

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from model_setup import load_part

from adaptiveload_hf import UserError
from adaptiveload_hf.buckets.ranks import compare_ranks

MOST_DRAWS = 10_000  # for one sigma within bounds: enough for a share of 1e-3


@dataclass(frozen=True)
class FlowMatching:
    """The flow-matching loss, with noise and timestep that depend on nothing but (seed, epoch, sample, occurrence).

    x_sigma = (1 - sigma) * latent + sigma * noise, target = noise - latent, timestep = 1000 * sigma, with
    sigma = shift * (1 - u) / (1 + (shift - 1) * (1 - u)) and u drawn as in diffusers' scripts.
    Runs with another schedule, number of ranks or accumulation see each sample with the same noise, and no two
    samples share it, nor do the occurrences of one that is repeated.

    shift_size: F*H*W of the latent that `shift` is meant for; another gets shift * sqrt(its size / shift_size). None:
        the same shift for all.
    bounds: of sigma, after the shift: the timesteps of one of two experts. Draws outside are drawn again.
    first_frame_given: clips learn what follows their first latent frame, which `predict` gets clean; it has no loss.

    Source: Esser et al., Scaling Rectified Flow Transformers (SD3), section 3, and 5.3.2 for shift by size; diffusers'
    train_dreambooth_sd3.py, except that sigma is continuous instead of one of 1000 steps.
    """

    shift: float
    weighting_scheme: str
    logit_mean: float
    logit_std: float
    mode_scale: float
    seed: int
    shift_size: int | None = None
    bounds: tuple[float, float] = (0.0, 1.0)
    first_frame_given: bool = False

    def shift_of(self, sizes: tuple[int, int, int]) -> float:
        """The shift for a latent of F, H, W."""
        return self.shift * (1 if self.shift_size is None else math.sqrt(math.prod(sizes) / self.shift_size))

    def draw(self, latent: torch.Tensor, epoch: int, names: list[str]):
        """Noise and sigma of a micro-batch.

        Args:
            latent: [B, C, F, H, W]; only its shape and device count.
            epoch: of the schedule.
            names: from `occurrence_names`.

        Returns:
            noise, float32 [B, C, F, H, W], and sigma, float32 [B], in (0, 1].
        """
        shift = self.shift_of(latent.shape[2:])
        generator = torch.Generator(latent.device)
        noises, sigmas = [], []
        for name in names:
            key = hashlib.blake2b(f"{self.seed}/{epoch}/{name}".encode(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(key, "little"))
            noises.append(torch.randn(latent.shape[1:], device=latent.device, generator=generator))
            # Sigma on the CPU, from a generator of its own: a GPU would have to be waited for at each draw.
            sigmas.append(self._draw_sigma(shift, torch.Generator().manual_seed(int.from_bytes(key[::-1], "little"))))
        return torch.stack(noises), torch.tensor(sigmas).to(latent.device, non_blocking=True)

    def _draw_sigma(self, shift: float, generator: torch.Generator) -> float:
        low, high = self.bounds
        options = {"logit_mean": self.logit_mean, "logit_std": self.logit_std, "mode_scale": self.mode_scale}
        for _ in range(MOST_DRAWS):
            u = compute_density_for_timestep_sampling(self.weighting_scheme, 1, generator=generator, **options)
            # diffusers' scripts look u up in timesteps that fall from 1000 to 1, so its sigma is 1 - u.
            sigma = 1 - u.item()
            sigma = shift * sigma / (1 + (shift - 1) * sigma)
            if low <= sigma < high or sigma == high == 1:
                return sigma
        raise UserError(
            f"{self.weighting_scheme} with shift {shift:g} draws hardly any sigma from {low:g} to {high:g}, this "
            "expert's. Choose another --weighting_scheme, --logit_mean or --shift."
        )

    def sample_losses(self, predict, batch: dict, epoch: int) -> torch.Tensor:
        """Loss of each sample of a micro-batch, float32 [B].

        Args:
            predict: (noisy latent float32 [B, C, F, H, W], timestep float32 [B], batch) -> the model's velocity, of
                the latent's shape. The timestep stays float32, for bf16 would turn 997.3 into 996.
            batch: `latent` [B, C, F, H, W] normalised, what `occurrence_names` reads, and what `predict` needs.
            epoch: of the schedule.
        """
        latent = batch["latent"].float()
        noise, sigma = self.draw(latent, epoch, occurrence_names(batch))
        mix = sigma.view(-1, *[1] * (latent.ndim - 1))
        prediction = predict((1 - mix) * latent + mix * noise, 1000 * sigma, batch)
        error = (prediction.float() - (noise - latent)).square()
        if self.first_frame_given and latent.shape[2] > 1:
            error = error[:, :, 1:]
        error = error.flatten(1).mean(1)
        return compute_loss_weighting_for_sd3(self.weighting_scheme, sigma) * error


def occurrence_names(batch: dict) -> list[str]:
    """What the random numbers of each sample of a micro-batch are keyed by: "7", or "7/1" where it comes once more.

    Args:
        batch: `sample_index` int64 [B], and `occurrence` int64 [B] where samples may be repeated.
    """
    samples = batch["sample_index"].tolist()
    occurrences = batch["occurrence"].tolist() if "occurrence" in batch else [0] * len(samples)
    return [f"{sample}/{more}" if more else str(sample) for sample, more in zip(samples, occurrences)]


def make_flow_matching(args, bounds: tuple[float, float] = (0.0, 1.0), first_frame_given: bool = False):
    """A `FlowMatching` from the arguments, alike on all ranks; the shift is the pipeline's scheduler's unless given.

    It becomes `args.shift` then, so that a checkpoint tells which it was.

    Raises:
        UserError: no shift there, or ranks have read different ones.
    """
    if args.shift is None:
        config = load_part(FlowMatchEulerDiscreteScheduler, args, "scheduler")
        args.shift = config.get("flow_shift", config.get("shift"))
        if args.shift is None:
            raise UserError(
                f"the scheduler of {args.pretrained_model_name_or_path} has neither `shift` nor `flow_shift`. "
                "Pass --shift (Wan uses 3.0 for 480p and 5.0 for 720p)."
            )
    shape = args.shift_shape
    flow = FlowMatching(
        args.shift,
        args.weighting_scheme,
        args.logit_mean,
        args.logit_std,
        args.mode_scale,
        args.seed,
        None if shape is None else shape.frames * shape.height * shape.width,
        bounds,
        first_frame_given,
    )
    compare_ranks(vars(flow))
    return flow
