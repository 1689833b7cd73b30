"""Image latents of several sizes and the loss of a tiny SD3 on them: a small real model, float64 throughout if asked.

SD3 because nothing in it is cast to float32 (Wan's norms are), and FSDP2 shards its blocks.
"""

import torch
from support.bucketed import CountedConfig, mixed_index

from adaptiveload_hf.buckets.loader import BucketDataLoader

_INPUTS = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")


class Images:
    """Row i: an image latent, its text and target; width and spread differ from bucket to bucket."""

    def __init__(self, index, dtype):
        self.index, self.dtype = index, dtype

    def __len__(self):
        return len(self.index.bucket_of_sample)

    def __getitem__(self, i):
        bucket = self.index.bucket_of_sample[i]
        shape = self.index.shapes[bucket]
        generator = torch.Generator().manual_seed(i)

        def normal(*size):
            return torch.randn(size, generator=generator, dtype=self.dtype) * (1 + bucket)

        return {
            "hidden_states": normal(4, shape.height, shape.width),
            "target": normal(4, shape.height, shape.width),
            "encoder_hidden_states": normal(5, 32),
            "pooled_projections": normal(16),
            "timestep": torch.tensor(7 * i % 1000),
        }


def collate(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != "sample_index"}


def losses(model, batch):
    """Of each sample of a batch."""
    output = model(**{name: batch[name] for name in _INPUTS}, return_dict=False)[0]
    return (output - batch["target"]).square().flatten(1).mean(dim=1)


def image_loader(accelerator, counts, batch_sizes, dtype=torch.float32, collate_fn=collate, **options):
    """A loader of `counts` images a bucket, in micro-batches of at most these sizes."""
    index = mixed_index(counts)
    return BucketDataLoader(
        Images(index, dtype),
        CountedConfig(),
        accelerator=accelerator,
        shapes=index,
        collate_fn=collate_fn,
        policy="fixed",
        batch_sizes=dict(zip(index.shapes, batch_sizes)),
        **options,
    )


def samples_that_count(batch):
    """Sample indices of a batch, none of padding."""
    return batch["sample_index"].tolist() if batch["loss_weight"] > 0 else []
