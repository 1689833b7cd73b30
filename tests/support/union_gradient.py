"""Gradients of optimizer steps on several ranks beside those of one process on the union of their samples."""

import copy

import torch
from accelerate.utils import ParallelismConfig
from support.image_training import collate, image_loader, losses
from support.tiny_models import tiny_model

from adaptiveload_hf import make_accelerator
from adaptiveload_hf.distributed import strategy_of

# Counts, batch sizes: uneven ranks; and single samples, of which too few are there for the last optimizer step.
DATA = {"uneven": ((24, 14, 9, 6), (5, 3, 2, 1)), "padded": ((6, 4, 3, 2), (1, 1, 1, 1))}


def compare(sizes):
    """The whole matrix of one world: K, normalization and data. `sizes` are those of a ParallelismConfig."""
    accelerator = make_accelerator(parallelism_config=ParallelismConfig(**sizes) if sizes else None)
    model = tiny_model("sd3").double()
    alone = copy.deepcopy(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    found = {}
    for accumulation, data in ((1, "uneven"), (2, "uneven"), (3, "uneven"), (2, "padded")):
        accelerator.gradient_accumulation_steps = accumulation
        for name in ("token", "sample"):
            key = f"K={accumulation} {data} {name}"
            found[key] = difference(accelerator, model, alone, optimizer, data, name)
    return {"strategy": strategy_of(accelerator), "ranks": accelerator.num_processes, "found": found}


def difference(accelerator, model, alone, optimizer, data, normalization):
    """Largest relative difference over the first optimizer step and the last one of an epoch."""
    loader = image_loader(accelerator, *DATA[data], torch.float64, loss_normalization=normalization)
    schedule, worst, checked = loader.schedule, 0.0, 0
    for batch in loader:
        step = batch["micro_step"] // schedule.gradient_accumulation_steps
        if 0 < step < schedule.num_update_steps - 1:
            continue  # every rank skips whole optimizer steps, so their micro-steps still agree
        with accelerator.accumulate(model):
            accelerator.backward(losses(model, batch).mean() * batch["loss_weight"])
            if accelerator.sync_gradients:
                found, checked = gradient(model), checked + 1
                if accelerator.is_main_process:
                    expected = union_gradient(alone, loader.dataset, schedule, step, normalization)
                    worst = max(worst, float((found - expected).norm() / expected.norm()))
            optimizer.zero_grad()
    by_step = schedule.sizes.reshape(-1, schedule.world_size)
    return {
        "difference": worst,
        "steps": checked,
        "uneven": bool((by_step != by_step[:, :1]).any()),
        "padding": int((schedule.loss_weight == 0).sum()),
    }


def gradient(model):
    full = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return torch.cat([g.flatten() for g in full if g is not None])


def union_gradient(model, rows, schedule, update_step, normalization):
    """In one process: the weighted mean over all samples of an optimizer step."""
    group = schedule.world_size * schedule.gradient_accumulation_steps
    model.zero_grad()
    weight_sum = 0.0
    for j in range(update_step * group, (update_step + 1) * group):
        samples = schedule.sample_order[schedule.offsets[j] : schedule.offsets[j + 1]].tolist()
        weight = float(schedule.tokens[j]) if normalization == "token" else 1.0
        if schedule.loss_weight[j] > 0:
            (weight * losses(model, collate([rows[i] for i in samples])).sum()).backward()
            weight_sum += weight * len(samples)
    if normalization == "sample":  # of a step that is expected, not of this one
        weight_sum = len(rows) / schedule.num_update_steps
    return gradient(model) / weight_sum
