"""Run on several ranks by test_loader_distributed.py with MODE and FOLDER; each writes FOLDER/MODE-RANK.json."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from support.bucketed import COST, CountedConfig, NumberedRows, collate_numbers, fixed_plan, mixed_index
from torch.utils.data import DataLoader

from adaptiveload_hf import make_accelerator
from adaptiveload_hf.buckets.sampler import BucketBatchSampler, BucketDataLoader
from adaptiveload_hf.errors import UserError

COUNTS = (50, 22, 13, 7)
SAMPLES = sum(COUNTS)


class OneBadRow(NumberedRows):
    """Refuses the sample that is the first of rank 1."""

    bad = None

    def __getitem__(self, index):
        if index == self.bad:
            raise UserError(f"sample {index} holds a NaN")
        return super().__getitem__(index)


def make_loader(accelerator, dataset=None, **options):
    options = {"shapes": mixed_index(COUNTS), "collate_fn": collate_numbers, **options}
    return BucketDataLoader(dataset or NumberedRows(SAMPLES), CountedConfig(), accelerator=accelerator, **options)


def facts(loader, batch):
    kept = {key: batch[key] for key in ("bucket", "micro_step", "loss_weight")}
    return {**kept, "epoch": loader.epoch, "samples": batch["number"].tolist()}


def train(accelerator, folder):
    """Two epochs with workers, a checkpoint after 3 optimizer steps."""
    model = torch.nn.Linear(1, 1)
    loader = accelerator.prepare(make_loader(accelerator, num_workers=2, persistent_workers=True))
    found = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                found.append({**facts(loader, batch), "sync": accelerator.sync_gradients})
            if loader.global_step == 3 and accelerator.sync_gradients:
                accelerator.wait_for_everyone()
                accelerator.save_state(str(folder / "checkpoint"))
    return {"batches": found, "disagreement": disagreement(accelerator), "plain": plain(accelerator)}


def disagreement(accelerator):
    """What each rank is told when rank 1 alone was started with other arguments."""
    told = {}
    for name, options in (("seed", {"seed": accelerator.process_index}), ("plan", {"target_seconds": 0.2})):
        if name == "plan" and accelerator.process_index == 1:
            options = {"target_seconds": 0.4}
        try:
            make_loader(accelerator, **options)
        except UserError as error:
            told[name] = str(error)
    return told


def plain(accelerator):
    """Two epochs through `accelerator.prepare(DataLoader(batch_sampler=...))`."""
    run = {"world_size": accelerator.num_processes, "gradient_accumulation_steps": 2}
    plan = fixed_plan(COUNTS, (6, 3, 2, 1), *run.values())
    sampler = BucketBatchSampler(
        mixed_index(COUNTS).bucket_of_sample, plan, COST, loss_normalization="none", seed=3, **run
    )
    loader = accelerator.prepare(DataLoader(NumberedRows(SAMPLES), batch_sampler=sampler, collate_fn=collate_numbers))
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([batch["number"].tolist() for batch in loader])
    return epochs


def resume(accelerator, folder):
    """What is left of the first epoch, on another number of ranks and with another K."""
    loader = make_loader(accelerator)
    accelerator.load_state(str(folder / "checkpoint"))
    step = loader.global_step
    return {"first_step": step, "batches": [facts(loader, batch) for batch in loader], "epoch": loader.epoch}


def fail(accelerator, folder):
    """A bad sample on rank 1 alone, while rank 0 goes on to a collective."""
    dataset = OneBadRow(SAMPLES)
    loader = make_loader(accelerator, dataset)
    dataset.bad = int(loader.schedule.micro_batch(0, 1)[0])
    for _ in loader:
        accelerator.wait_for_everyone()


def peers(accelerator, folder):
    """Two ranks of one context-parallel group."""
    loader = make_loader(accelerator)
    return {"world_size": loader.schedule.world_size, "batches": [facts(loader, batch) for batch in loader]}


def main():
    mode, folder = sys.argv[1], Path(sys.argv[2])
    if mode == "peers":  # accelerate builds a mesh on CPU only as FSDP, which make_accelerator switches on there
        accelerator = make_accelerator(gradient_accumulation_steps=2, parallelism_config=ParallelismConfig(cp_size=2))
    else:
        accelerator = Accelerator(gradient_accumulation_steps=1 if mode == "resume" else 2)
    found = {"train": train, "resume": resume, "fail": fail, "peers": peers}[mode](accelerator, folder)
    (folder / f"{mode}-{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
