"""A loop of your own: ranks with equal work, two micro-steps an optimizer step, FSDP2, exact resume.

accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/examples/accelerate_loop.py \\
    PIPELINE prepared config run 1000
The same command with more steps goes on from the last checkpoint, also on another number of GPUs.
"""

import shutil
import sys
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from diffusers.optimization import get_scheduler

from adaptiveload_hf import (
    BucketConfig,
    BucketDataLoader,
    load_prepared,
    make_accelerator,
    model_input_dtype,
    patch_model,
)


def mean_loss(model, batch: dict, dtype: torch.dtype) -> torch.Tensor:
    """Flow matching: from somewhere between latent and noise, which way is the noise?"""
    latent, caption = batch["latent"].float(), batch["prompt_embeds"].to(dtype)
    noise, sigma = torch.randn_like(latent), torch.rand(len(latent), device=latent.device)
    mix = sigma.view(-1, 1, 1, 1, 1)
    noisy = ((1 - mix) * latent + mix * noise).to(dtype)
    predicted = model(noisy, 1000 * sigma, caption, return_dict=False)[0]
    return (predicted.float() - (noise - latent)).square().mean()


def save(accelerator, output_dir: str, step: int) -> None:
    """Under another name until it is whole, so that a run that is killed meanwhile goes on from the one before."""
    partial = Path(output_dir, f"partial-{step}")
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        whole = Path(output_dir, f"checkpoint-{step}")
        shutil.rmtree(whole, ignore_errors=True)  # there if its step was left out, and was made after a resume
        partial.rename(whole)


def main():
    pipeline, dataset, bucket_config, output_dir, steps = sys.argv[1:]
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(accelerator.process_index)  # each rank its own noise; checkpoints hold where it stands

    model = WanTransformer3DModel.from_pretrained(pipeline, subfolder="transformer")
    patch_model(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    scheduler = accelerator.prepare(get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=10))
    config = BucketConfig.from_pretrained(bucket_config)  # a folder or a Hub id
    loader = BucketDataLoader(load_prepared(dataset), config, accelerator=accelerator)
    checkpoints = sorted(Path(output_dir).glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    if checkpoints:
        accelerator.load_state(checkpoints[-1])  # model, optimizer, schedule, random numbers and the loader's place

    while loader.global_step < int(steps):
        for batch in loader:  # an epoch, or what is left of it
            with accelerator.accumulate(model):
                loss = mean_loss(model, batch, model_input_dtype(accelerator)) * batch["loss_weight"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
                accelerator.print(f"step {loader.global_step}: {batch['bucket']} on rank 0, loss {loss.item():.6f}")
                if loader.global_step % 500 == 0 or loader.global_step == int(steps):
                    save(accelerator, output_dir, loader.global_step)
                if loader.global_step == int(steps):
                    break


if __name__ == "__main__":
    main()
