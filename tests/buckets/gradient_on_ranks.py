"""Run on 2 ranks by test_loader_distributed.py: compares their gradient with that of one process on the union.

Argument: a folder; writes RANK.json with the relative difference per loss normalization.
"""

import copy
import json
import sys
from pathlib import Path

import torch
from accelerate.utils import set_seed
from support.bucketed import CountedConfig, mixed_index

from adaptiveload_hf import make_accelerator
from adaptiveload_hf.buckets.sampler import BucketDataLoader
from adaptiveload_hf.distributed import strategy_of

COUNTS = (50, 22, 13, 7)


class Rows:
    """Row i: an input and a target whose size and spread differ from bucket to bucket."""

    def __init__(self, bucket_of_sample):
        self.bucket_of_sample = bucket_of_sample

    def __len__(self):
        return len(self.bucket_of_sample)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        scale = 1.0 + self.bucket_of_sample[index]
        x, y = torch.randn(2, 6, generator=generator, dtype=torch.float64) * scale
        return {"x": x, "y": y}


def collate(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in ("x", "y")}


def losses(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean(dim=1)


def gradient(model):
    full = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return torch.cat([g.flatten() for g in full])


def union_gradient(model, rows, schedule, update_step, normalization):
    """In one process: the weighted mean over all samples of an optimizer step."""
    group = schedule.world_size * schedule.gradient_accumulation_steps
    total = weight_sum = 0.0
    for j in range(update_step * group, (update_step + 1) * group):
        samples = schedule.sample_order[schedule.offsets[j] : schedule.offsets[j + 1]].tolist()
        weight = float(schedule.tokens[j]) if normalization == "token" else 1.0
        if schedule.loss_weight[j] > 0:
            total = total + weight * losses(model, collate([rows[i] for i in samples])).sum()
            weight_sum += weight * len(samples)
    if normalization == "sample":
        weight_sum = len(rows) / schedule.num_update_steps
    model.zero_grad()
    (total / weight_sum).backward()
    return gradient(model)


def difference(accelerator, model, alone, optimizer, normalization):
    """Largest relative difference over the first optimizer steps of an epoch."""
    index = mixed_index(COUNTS)
    rows = Rows(index.bucket_of_sample)
    loader = BucketDataLoader(
        rows,
        CountedConfig(),
        accelerator=accelerator,
        shapes=index,
        collate_fn=collate,
        loss_normalization=normalization,
    )
    worst, uneven = 0.0, False
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(losses(model, batch).mean() * batch["loss_weight"])
            if accelerator.sync_gradients:
                expected = union_gradient(alone, rows, loader.schedule, loader.global_step - 1, normalization)
                worst = max(worst, float((gradient(model) - expected).norm() / expected.norm()))
            optimizer.zero_grad()
        sizes = loader.schedule.sizes.reshape(-1, accelerator.num_processes)[batch["micro_step"]]
        uneven |= bool((sizes != sizes[0]).any())
    return {"difference": worst, "uneven": uneven, "update_steps": loader.global_step}


def main():
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 6)).double()
    alone = copy.deepcopy(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    found = {name: difference(accelerator, model, alone, optimizer, name) for name in ("token", "sample")}
    found |= {"strategy": strategy_of(accelerator), "ranks": accelerator.num_processes}
    Path(sys.argv[1], f"{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
