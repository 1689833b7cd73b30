"""A small real run under TrainingMonitor, on several ranks."""

import itertools
import time

import torch
from support.image_training import collate, image_loader, losses
from support.tiny_models import tiny_model

from adaptiveload_hf import TrainingMonitor, make_accelerator

COUNTS, BATCH_SIZES = (40, 960), (1, 80)  # one is light, 80 are heavy


def train(slow_rank=None, data_wait_seconds=0.0):
    """Two epochs; every step's metrics, the losses of this rank, and what is left on the model afterwards.

    data_wait_seconds: that each rank takes to read every second micro-batch, ranks in turn.
    """
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    model = tiny_model("sd3")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    if accelerator.process_index == slow_rank:
        inner = accelerator.unwrap_model(model).transformer_blocks[0].attn
        inner.register_forward_pre_hook(lambda *_: time.sleep(0.01))
    turns = itertools.cycle([data_wait_seconds, 0.0] if accelerator.process_index == 0 else [0.0, data_wait_seconds])

    def collate_slowly(rows):
        time.sleep(next(turns))
        return collate(rows)

    loader = image_loader(accelerator, COUNTS, BATCH_SIZES, balance="none", collate_fn=collate_slowly)
    hooks_before = hooks_of(model)
    monitor = TrainingMonitor(accelerator, model, loader)
    found, own, starts = [], [], []
    while loader.epoch < 2:
        for batch in monitor:
            starts.append(time.perf_counter())
            with accelerator.accumulate(model):
                loss = losses(model, batch).mean() * batch["loss_weight"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            own.append(loss.item())
            metrics = monitor.micro_step_done(loss, flag=accelerator.process_index == 1 and len(found) == 3)
            if metrics is not None:
                found.append({**metrics, "line": monitor.status_line(metrics)})
                counted = {name: value for name, value in metrics.items() if name != "predicted_seconds"}
                found[-1]["line_of_counted"] = monitor.status_line(counted)
    monitor.close()
    hooks = {"hooks_before": hooks_before, "hooks": hooks_of(model)}
    return {"steps": found, "losses": own, "seconds": time.perf_counter() - starts[0], **hooks}


def hooks_of(model):
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())
