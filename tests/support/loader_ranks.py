"""What BucketDataLoader and a prepared DataLoader hand out on several ranks, and what they refuse."""

import contextlib
import io
import time
from pathlib import Path

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from support.accelerators import forget_run
from support.bucketed import COST, CountedConfig, NumberedRows, collate_numbers, fixed_plan, mixed_index
from torch.utils.data import DataLoader

from adaptiveload_hf import make_accelerator
from adaptiveload_hf.buckets import ranks
from adaptiveload_hf.buckets.cost import PowerLaw
from adaptiveload_hf.buckets.loader import BucketDataLoader
from adaptiveload_hf.buckets.plan import make_plan
from adaptiveload_hf.buckets.ranks import data_rank_and_size
from adaptiveload_hf.buckets.sampler import BucketBatchSampler
from adaptiveload_hf.buckets.shapes import TokenGeometry
from adaptiveload_hf.errors import UserError

COUNTS = (50, 22, 13, 7)
BATCH_SIZES = (6, 3, 2, 1)
SAMPLES = sum(COUNTS)


class OtherCost(CountedConfig):
    cost_model = PowerLaw(0.1, 1e-3, 1.3)

    def plan(self, shape_counts, **options):
        return CountedConfig().plan(shape_counts, **options)


class OtherTokens(CountedConfig):
    """As a config of a model with text tokens: the same batch sizes, matched by other costs."""

    def plan(self, shape_counts, **options):
        sizes = {str(bucket.shape): bucket.batch_size for bucket in super().plan(shape_counts, **options).buckets}
        given = {"policy": "fixed", "batch_sizes": sizes}
        return make_plan(shape_counts, COST, **{**options, **given}, geometry=TokenGeometry((1, 2, 2), 900))


def make_loader(accelerator, dataset=None, config=None, **options):
    options = {"shapes": mixed_index(COUNTS), "collate_fn": collate_numbers, **options}
    rows = dataset or NumberedRows(SAMPLES)
    return BucketDataLoader(rows, config or CountedConfig(), accelerator=accelerator, **options)


def make_plain(accelerator, world_size, accumulation):
    """A prepared DataLoader over the sampler's micro-batches, and the sampler."""
    plan = fixed_plan(COUNTS, BATCH_SIZES, world_size, accumulation)
    run = {"world_size": world_size, "gradient_accumulation_steps": accumulation}
    index = mixed_index(COUNTS).bucket_of_sample
    sampler = BucketBatchSampler(index, plan, COST, loss_normalization="none", seed=3, **run)
    loader = DataLoader(NumberedRows(SAMPLES), batch_sampler=sampler, collate_fn=collate_numbers)
    return accelerator.prepare(loader), sampler


def facts(loader, batch):
    kept = {key: batch[key] for key in ("bucket", "micro_step", "loss_weight")}
    return {**kept, "epoch": loader.epoch, "samples": batch["number"].tolist(), "draws": batch["draw"].tolist()}


def share(folder):
    """Two epochs with workers, a checkpoint after 3 optimizer steps; then two epochs of a prepared DataLoader."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    loader = accelerator.prepare(make_loader(accelerator, num_workers=2, persistent_workers=True))
    found = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                found.append({**facts(loader, batch), "sync": accelerator.sync_gradients})
            if loader.global_step == 3 and accelerator.sync_gradients:
                accelerator.wait_for_everyone()
                accelerator.save_state(str(Path(folder, "checkpoint")))
    plain, epochs = make_plain(accelerator, accelerator.num_processes, 2)[0], []
    for epoch in range(2):
        plain.set_epoch(epoch)
        epochs.append([batch["number"].tolist() for batch in plain])
    return {"batches": found, "plain": epochs}


def finish(folder):
    """What is left of the first epoch, on another number of ranks and with another K."""
    accelerator = Accelerator()
    loader = make_loader(accelerator)
    accelerator.load_state(str(Path(folder, "checkpoint")))
    step = loader.global_step
    return {"first_step": step, "batches": [facts(loader, batch) for batch in loader], "epoch": loader.epoch}


def plain_mistakes(runs):
    """What a prepared DataLoader says when its sampler was made for these (W, K), while accelerate has K = 2."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    told = []
    for world_size, accumulation in runs:
        loader, _ = make_plain(accelerator, world_size, accumulation)
        try:
            told.append(sum(len(batch["number"]) for batch in loader))
        except UserError as error:
            told.append(str(error))
    return told


def parallel(sizes):
    """Batches of an epoch under a ParallelismConfig, by our loader and by a prepared DataLoader."""
    accelerator = make_accelerator(gradient_accumulation_steps=2, parallelism_config=ParallelismConfig(**sizes))
    rank, world_size = data_rank_and_size(accelerator)
    loader = make_loader(accelerator)
    plain, sampler = make_plain(accelerator, world_size, 2)
    return {
        "place": dict(
            zip(accelerator.torch_device_mesh.mesh_dim_names, accelerator.torch_device_mesh.get_coordinate())
        ),
        "rank": rank,
        "world_size": loader.schedule.world_size,
        "batches": [facts(loader, batch) for batch in loader],
        "plain": [batch["number"].tolist() for batch in plain] == list(sampler.for_rank(rank)),
        "refused": plain_mistakes_under(accelerator),
    }


def plain_mistakes_under(accelerator):
    """A sampler made for all processes, where some are peers."""
    try:
        next(iter(make_plain(accelerator, accelerator.num_processes, 2)[0]))
    except UserError as error:
        return str(error)


def files(order):
    """The same shapes in the same order, of other files."""
    return datasets.Dataset.from_dict({"number": list(range(SAMPLES)), "file": [f"{i}.mp4" for i in order]})


def disagreements():
    """What each rank is told when rank 1 alone was started, or went on, otherwise than rank 0."""
    odd = Accelerator().process_index == 1
    ways = {
        "dataset": {"shapes": mixed_index(COUNTS, seed=int(odd))},
        "files": {"dataset": files(range(SAMPLES)[:: -1 if odd else 1])},
        "repeats": {"repeats": torch.full((SAMPLES,), 1 + 0.5 * odd).numpy()},
        "seed": {"seed": int(odd)},
        "gradient_accumulation_steps": {},
        "plan": {"batch_sizes": {"1x4x6": 3 + odd}},
        "cost_model": {"config": OtherCost() if odd else CountedConfig()},
        "balance": {"balance": "step" if odd else "none"},
        "loss_normalization": {"loss_normalization": "sample" if odd else "token"},
        "order": {"config": OtherTokens() if odd else CountedConfig(), "balance": "window:2"},
        "epoch": {},
        "first_micro_step": {},
    }
    told = {}
    for way, options in ways.items():
        forget_run()
        accelerator = Accelerator(gradient_accumulation_steps=3 if odd and way.startswith("gradient") else 2)
        try:
            loader = make_loader(accelerator, **options)
            if way == "epoch" and odd:
                loader.set_epoch(4)
            if way == "first_micro_step":
                next(batch for batch in loader if batch["micro_step"] == 3)
                state = loader.state_dict()
                loader.set_epoch(1)
                loader.set_epoch(0)
                if odd:
                    loader.load_state_dict(state)
            next(iter(loader))
        except UserError as error:
            told[way] = str(error)
    return told


def one_rank_is_late():
    """What is said on a rank that waits for another, which in the end comes."""
    ranks._LONG_WAIT_SECONDS = 0.2
    accelerator = Accelerator()
    time.sleep(accelerator.process_index)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        make_loader(accelerator)
    return said.getvalue()


def one_rank_without_data():
    """Rank 1 fails before the ranks compare anything; rank 0 waits for it."""
    accelerator = Accelerator()
    rows = NumberedRows(SAMPLES - accelerator.process_index)
    make_loader(accelerator, rows)
