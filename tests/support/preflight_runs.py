"""A tiny run whose steps can be compared bit by bit, with and without a preflight before them.

As a script on several ranks: prints, rank by rank, whether a run that began with a preflight is the one without.
"""

import random
import sys

import numpy as np
import torch
from accelerate.utils import set_seed
from diffusers import WanTransformer3DModel

from adaptiveload_hf import LatentShape, make_accelerator
from adaptiveload_hf.buckets.plan import Bucket, BucketPlan
from adaptiveload_hf.distributed import model_input_dtype
from adaptiveload_hf.preflight import preflight

SIZES = {"1x4x4": 8, "2x4x8": 2, "3x8x8": 1, "1x4x8": 3}


def make_plan(gib=None) -> BucketPlan:
    """SIZES as a plan; gib: predicted, by shape."""
    buckets = []
    for name, size in SIZES.items():
        shape = LatentShape.parse(name)
        tokens = shape.frames * shape.height * shape.width // 4
        buckets.append(Bucket(shape, tokens, 9, size, 0.1, gib and gib[name], "memory"))
    return BucketPlan("dual", None, None, tuple(buckets))


class TinyRun:
    """Wan's transformer with one block, AdamW and a schedule, prepared; noise comes from torch's own generator."""

    def __init__(self, accelerator):
        self.accelerator = accelerator
        set_seed(0)
        model = WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=32,
            ffn_dim=48,
            num_layers=1,
            rope_max_seq_len=32,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.scheduler = accelerator.prepare(model, optimizer, schedule)
        set_seed(1, device_specific=True)

    def micro_step(self, shape: LatentShape, batch_size: int) -> torch.Tensor:
        with self.accelerator.accumulate(self.model):
            like = {"device": self.accelerator.device, "dtype": model_input_dtype(self.accelerator)}
            latent = torch.randn(batch_size, 4, shape.frames, shape.height, shape.width, **like)
            text = torch.randn(batch_size, 7, 16, **like)
            time = torch.full((batch_size,), 500.0, device=self.accelerator.device)
            predicted = self.model(latent, timestep=time, encoder_hidden_states=text, return_dict=False)[0]
            loss = (predicted - latent).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            if self.accelerator.sync_gradients:
                self.scheduler.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def preflight(self, **options):
        return preflight(
            self.accelerator,
            self.micro_step,
            options.pop("plan", make_plan()),
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            **options,
        )

    def train(self, steps: int) -> list:
        """Everything that a preflight could have moved, after so many micro-steps."""
        shapes = [LatentShape.parse(name) for name in SIZES]
        losses = [self.micro_step(shapes[step % len(shapes)], 2).item() for step in range(steps)]
        weights = [getattr(p, "_local_tensor", p).detach().clone() for p in self.model.parameters()]
        draws = random.random(), np.random.rand(), torch.rand(1).item()
        return [losses, weights, draws, self.scheduler.get_last_lr(), self.accelerator.step]


def same(one: list, other: list) -> bool:
    """Whether two results of `TinyRun.train` are equal bit by bit."""
    weights = all(torch.equal(a, b) for a, b in zip(one[1], other[1]))
    return weights and [one[0], *one[2:]] == [other[0], *other[2:]]


def main():
    torch.use_deterministic_algorithms(True)
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    results = []
    for wanted in (True, False):
        run = TinyRun(accelerator)
        run.train(2)
        if wanted:
            run.preflight(checkpoint=sys.argv[1])
        results.append(run.train(6))
        accelerator.free_memory()
    sys.stdout.write(f"{accelerator.process_index} {same(*results)} {results[0][0][0] != results[0][0][1]}\n")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
