"""Training on several ranks that stops, dies and goes on: its losses, samples and learning rates."""

import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from diffusers.optimization import get_scheduler
from support.accelerators import forget_run
from support.image_training import image_loader, losses, samples_that_count
from support.tiny_models import tiny_model

from adaptiveload_hf import make_accelerator
from adaptiveload_hf.errors import UserError

COUNTS, BATCH_SIZES = (12, 7, 5, 3), (5, 3, 2, 1)
EPOCHS = 2
BASE_RATE = 1e-3


def prepare(accelerator, batch_sizes=BATCH_SIZES, **options):
    """Model, optimizer and loader; then each rank draws its own noise."""
    set_seed(0)
    model = tiny_model("sd3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_RATE)
    loader = image_loader(accelerator, COUNTS, batch_sizes, **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    set_seed(1, device_specific=True)
    return model, optimizer, loader


def run_step(accelerator, model, optimizer, batch):
    """One micro-step with noise from the global generator, as training draws it. Returns the loss."""
    with accelerator.accumulate(model):
        batch["hidden_states"] = batch["hidden_states"] + torch.randn_like(batch["hidden_states"])
        loss = losses(model, batch).mean()
        accelerator.backward(loss * batch["loss_weight"])
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def save(accelerator, folder):
    accelerator.wait_for_everyone()
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()


def run_variants(folder, variants, accumulation, mode, stop=None):
    """[epoch, micro-step, loss] of every micro-step, for each variant of loader options.

    mode: "whole" trains EPOCHS; "killed" saves after `stop` optimizer steps and goes one micro-step further, in whose
    middle rank 1 of the last variant dies; "resumed" trains from there to the end.
    """
    found = []
    for number, options in enumerate(variants):
        forget_run()
        accelerator = make_accelerator(gradient_accumulation_steps=accumulation)
        model, optimizer, loader = prepare(accelerator, **options)
        checkpoint = Path(folder, str(number))
        if mode == "resumed":
            accelerator.load_state(str(checkpoint))
        steps = []
        for batch in over_epochs(loader):
            steps.append([loader.epoch, batch["micro_step"], run_step(accelerator, model, optimizer, batch)])
            if mode == "killed" and loader.global_step == stop:
                if not accelerator.sync_gradients:
                    break
                save(accelerator, checkpoint)
        found.append(steps)
    if mode == "killed" and accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return found


def over_epochs(loader):
    while loader.epoch < EPOCHS:
        yield from loader


def run_phase(folder, before, after, accumulation, batch_sizes, stop):
    """Part of one epoch: from checkpoint `before` for `stop` optimizer steps, saved as `after`, or else to the end.

    Returns the samples that this rank really got, in order, and where training stood.
    """
    accelerator = make_accelerator(gradient_accumulation_steps=accumulation)
    model, optimizer, loader = prepare(accelerator, batch_sizes)
    if before:
        accelerator.load_state(str(Path(folder, before)))
    began, got = loader.global_step, []
    for batch in loader:
        run_step(accelerator, model, optimizer, batch)
        got.append(samples_that_count(batch))
        if accelerator.sync_gradients and loader.global_step - began == stop:
            save(accelerator, Path(folder, after))
            break
    return {"samples": got, "began": began, "epoch": loader.epoch, "global_step": loader.global_step}


def run_rates(folder, stepping, accumulation, stop=None):
    """The learning rate of every optimizer step: until `stop`, saved there, or from there to the end of EPOCHS.

    stepping: "loop" as make_accelerator has it; "accelerate" and "split_batches" as accelerate's own Accelerator.
    """
    forget_run()
    if stepping == "loop":
        accelerator = make_accelerator(gradient_accumulation_steps=accumulation)
    else:
        split = DataLoaderConfiguration(split_batches=stepping == "split_batches")
        accelerator = Accelerator(gradient_accumulation_steps=accumulation, dataloader_config=split)
    model, optimizer, loader = prepare(accelerator)
    steps = loader.global_step_after(EPOCHS)
    checkpoint = Path(folder, stepping)
    if resumed := stop is None:
        loader.load_checkpoint(checkpoint)
        steps = loader.global_step_after(EPOCHS)
    counted = accelerator.num_processes if stepping == "accelerate" else 1
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps * counted)
    scheduler = accelerator.prepare(scheduler)
    try:
        if resumed:
            accelerator.load_state(str(checkpoint))
    except UserError as error:
        return {"refused": str(error)}
    rates = []
    for batch in over_epochs(loader):
        run_step(accelerator, model, optimizer, batch)
        if accelerator.sync_gradients:
            rates.append([loader.global_step - 1, optimizer.param_groups[0]["lr"]])
        if accelerator.sync_gradients or stepping != "loop":
            scheduler.step()
        if accelerator.sync_gradients and loader.global_step == stop:
            save(accelerator, checkpoint)
            break
    return {"steps": steps, "rates": rates, "last": scheduler.get_last_lr()[0]}
