"""Bucketed data by counts alone, for tests of plans, schedules and loaders."""

import numpy as np

from adaptiveload_hf.buckets.cost import Roofline
from adaptiveload_hf.buckets.plan import make_plan
from adaptiveload_hf.buckets.shapes import BucketIndex, LatentShape

COST = Roofline(0.05, 0.01, 2e-3, 4e-6)
SHAPES = tuple(LatentShape(f, 4, 4 + 2 * f) for f in (1, 2, 3, 5, 8, 9))


def fixed_plan(counts, batch_sizes, world_size, gradient_accumulation_steps, cost=COST):
    """A plan of `len(counts)` buckets with given batch sizes."""
    return make_plan(
        dict(zip(SHAPES, counts)),
        cost,
        policy="fixed",
        batch_sizes=dict(zip(SHAPES, batch_sizes)),
        world_size=world_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )


def mixed_index(counts, seed=0):
    """`counts` samples of each bucket, in mixed order."""
    order = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    return BucketIndex(SHAPES[: len(counts)], order)


def real(schedule):
    """bool [micro-batches]: which are no padding."""
    return schedule.loss_weight > 0


def segment(schedule, plan, micro_steps, cost=COST):
    """What BucketDataLoader's state says of `micro_steps` trained micro-steps of a schedule."""
    return {
        "world_size": schedule.world_size,
        "gradient_accumulation_steps": schedule.gradient_accumulation_steps,
        "plan": plan.to_dict(),
        "cost_model": {"kind": cost.kind, "parameters": cost.parameters},
        "balance": schedule.balance,
        "micro_steps": micro_steps,
        "digest": schedule.digest,
    }


class CountedConfig:
    """The part of a BucketConfig that a loader uses: a cost model and plans by it."""

    cost_model = COST

    def plan(self, shape_counts, **options):
        limit = {} if options.get("policy") == "fixed" else {"target_seconds": 0.2}
        return make_plan(shape_counts, self.cost_model, **{**limit, **options})


class NumberedRows:
    """Row i is {"number": i}: as a dataset of any size that costs nothing."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return {"number": index}


def collate_numbers(rows):
    import torch

    return {"number": torch.tensor([row["number"] for row in rows]), "draw": torch.rand(len(rows))}


def collate_with_memory(rows):
    """Numbers without tensors, which cost a file each; now and then which worker this is, and its private MiB."""
    from torch.utils.data import get_worker_info

    batch = {"numbers": [row["number"] for row in rows]}
    if rows[0]["number"] % 100 < 2:
        with open("/proc/self/smaps_rollup") as lines:
            kib = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
        batch |= {"mib": kib / 1024, "worker": get_worker_info().id}
    return batch
