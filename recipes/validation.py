"""How well does the model do on samples it does not train on, shape by shape, and what does it make of a caption?"""

from collections import defaultdict
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from diffusers import FlowMatchEulerDiscreteScheduler
from flow_matching import FlowMatching

from adaptiveload_hf import LatentShape, TokenGeometry
from adaptiveload_hf.buckets.collate import collate_prepared
from adaptiveload_hf.buckets.plan import BucketPlan
from adaptiveload_hf.buckets.ranks import compare_ranks
from adaptiveload_hf.buckets.shapes import dataset_fingerprint, read_shapes


def make_held_out_loss(accelerator: Accelerator, dataset, loader, geometry: TokenGeometry, flow: FlowMatching, losses):
    """(step) -> the loss of held-out samples, with noise and timesteps that are the same at every step of every run.

    All ranks must call it together, and all do equally many forwards. It draws nothing from a global generator, so
    training goes on as if it had not been.

    Args:
        dataset: prepared, like the training's.
        loader: its plan's batch sizes are used, 1 for shapes it does not know.
        geometry: of the training: shape to tokens, by which a sample weighs.
        flow: of the training; its seed is not used.
        losses: (flow, batch) -> loss of each sample, [B].

    Returns:
        A function that returns `validation_loss` (mean over tokens, as training weighs them by default) and
        `validation_loss_by_shape`.
    """
    index = read_shapes(dataset)
    # Ranks with other samples would do another number of forwards, and wait for each other at the end.
    compare_ranks({"validation dataset": dataset_fingerprint(dataset, index)})
    sizes = {str(b.shape): b.batch_size for b in loader.plan.buckets}
    samples = defaultdict(list)
    for sample, bucket in enumerate(index.bucket_of_sample.tolist()):
        samples[bucket].append(sample)
    micro_batches = []
    for bucket, members in sorted(samples.items()):
        size = sizes.get(str(index.shapes[bucket]), 1)
        micro_batches += [(bucket, members[i : i + size]) for i in range(0, len(members), size)]
    world_size = accelerator.num_processes
    # Under FSDP every forward is a meeting of all ranks: those that have none left repeat their first, uncounted.
    rounds = -(-len(micro_batches) // world_size)
    fixed = replace(flow, seed="held out")
    tokens = torch.tensor([geometry.tokens(shape) for shape in index.shapes])

    @torch.no_grad()
    def evaluate(step: int) -> dict:
        sums = torch.zeros(len(index.shapes), 2, dtype=torch.float64)
        for turn in range(rounds):
            position = turn * world_size + accelerator.process_index
            bucket, members = micro_batches[position % len(micro_batches)]
            batch = collate_prepared([dataset[sample] for sample in members])
            batch = send_to_device(batch, accelerator.device)
            each = losses(fixed, {**batch, "sample_index": torch.tensor(members)})
            if position < len(micro_batches):
                sums[bucket] += torch.tensor([float(each.sum()), len(members)], dtype=torch.float64)
        sums = accelerator.reduce(sums.to(accelerator.device), "sum").cpu()
        means = (sums[:, 0] / sums[:, 1]).tolist()
        return {
            "validation_loss": float((sums[:, 0] * tokens).sum() / (sums[:, 1] * tokens).sum()),
            "validation_loss_by_shape": {str(shape): mean for shape, mean in zip(index.shapes, means)},
        }

    return evaluate


def latent_sizes(pixels: LatentShape | None, scale: tuple[int, int], plan: BucketPlan) -> tuple[int, int, int]:
    """F, H, W of the latents to sample: those of `pixels`, or without it of the largest bucket that is trained on.

    scale: frames and pixels that one latent stands for.
    """
    if pixels is None:
        largest = max(plan.buckets, key=lambda bucket: bucket.tokens).shape
        return largest.frames, largest.height, largest.width
    return (pixels.frames - 1) // scale[0] + 1, pixels.height // scale[1], pixels.width // scale[1]


@torch.no_grad()
def sample_latents(predict, flow: FlowMatching, prompt: dict, empty: dict, shape, device, args) -> torch.Tensor:
    """One latent by Euler steps with classifier-free guidance, from noise of a fixed seed.

    All ranks must call it together: under FSDP each forward is a meeting. Each does the whole work and gets the same.

    Args:
        predict: as `FlowMatching.sample_losses` takes it.
        prompt, empty: what `predict` reads from a batch, for the caption and for the empty one; first dimension 1.
        shape: (C, F, H, W).
        args: validation_inference_steps and guidance_scale.

    Returns:
        float32 [1, C, F, H, W].
    """
    scheduler = FlowMatchEulerDiscreteScheduler(shift=flow.shift_of(shape[1:]))
    scheduler.set_timesteps(args.validation_inference_steps, device=device)
    latent = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    for timestep in scheduler.timesteps:
        times = timestep.float().expand(1)
        velocity = predict(latent, times, {**prompt, "latent": latent}).float()
        if args.guidance_scale != 1:
            without = predict(latent, times, {**empty, "latent": latent}).float()
            velocity = without + args.guidance_scale * (velocity - without)
        latent = scheduler.step(velocity, timestep, latent, return_dict=False)[0]
    return latent
