"""What the pages of docs/ leave to their reader: a model, an optimizer, a loss."""

import time

import datasets
import torch


def what_the_reader_has(page: str) -> dict:
    """Names that the Python blocks of a page may use without saying where they come from."""
    from diffusers import WanTransformer3DModel

    from adaptiveload_hf import BucketConfig, BucketDataLoader, LatentShape, make_accelerator
    from adaptiveload_hf.buckets.sources import load_prepared

    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 2, "freq_dim": 16}
    model = WanTransformer3DModel(**sizes, in_channels=16, out_channels=16, text_dim=32, rope_max_seq_len=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def losses(model, batch):
        """Of each sample, [B]."""
        latent, text = batch["latent"].float(), batch["prompt_embeds"].float()
        noise, sigma = torch.randn_like(latent), torch.rand(len(latent))
        mix = sigma.view(-1, 1, 1, 1, 1)
        predicted = model((1 - mix) * latent + mix * noise, 1000 * sigma, text, return_dict=False)[0]
        return (predicted - (noise - latent)).square().flatten(1).mean(1)

    def run_micro_step(shape, batch_size):
        time.sleep(2e-4 * batch_size * shape.frames * shape.height * shape.width)  # costs must differ on any machine
        size = (16, shape.frames, shape.height, shape.width)
        batch = {"latent": torch.randn(batch_size, *size), "prompt_embeds": torch.randn(batch_size, 8, 32)}
        return losses(model, batch).mean()

    if page == "README.md":
        return {
            "transformer": model,
            "optimizer": optimizer,
            "training_loss": lambda model, batch: losses(model, batch).mean(),
        }
    if page == "patching.md":
        return {"transformer": model}
    if page == "data.md":
        return {}
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    dataset, config = load_prepared("prepared"), BucketConfig.from_pretrained("config")
    have = {"model": model, "optimizer": optimizer, "dataset": dataset, "config": config}
    if page == "loop.md":
        return {**have, "losses": losses, "checkpoint": None, "epochs": 1}
    if page == "hub.md":
        return {"dataset": dataset, "accelerator": accelerator}
    assert page == "cost-model.md", f"what does a reader of {page} have?"
    sizes = [[16, 1, 60, 104]] * 40 + [[16, 21, 60, 104]] * 8
    return {
        **have,
        "dataset": datasets.Dataset.from_dict({"latent_shape": sizes}),
        "transformer": model,
        "accelerator": accelerator,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "loader": BucketDataLoader(dataset, config, accelerator=accelerator),
        "run_micro_step": run_micro_step,
        "shapes": [LatentShape(1, 4, 4), LatentShape(2, 4, 8)],
    }
