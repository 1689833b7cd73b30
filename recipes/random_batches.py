"""What does a micro-batch of a given shape look like to the model, when nothing but its size matters?"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from shared_work import on_main

from adaptiveload_hf import LatentShape
from adaptiveload_hf.preflight import preflight

_AS_LATENT = ("latent", "image_latent")  # these have the micro-batch's own shape
# Length of a caption where no dataset says otherwise.
_WAN_TEXT_TOKENS = 512
_SD3_TEXT_TOKENS = 77 + 256  # CLIP and T5

# Options that a preflight does not depend on, or that are not to be written.
_NOT_TRIED = {"resume_from_checkpoint", "max_train_steps", "num_train_epochs", "hub_token"}


def column_sizes(dataset, transformer_config: dict) -> dict[str, list[int]]:
    """The size of each tensor of a sample; of those that have the shape's sizes, the channels alone.

    Args:
        dataset: prepared, or None: then the sizes that prepare_dataset.py would write.
    """
    if dataset is not None:
        names = [name for name in dataset.column_names if name.endswith("_shape")]
        sizes = {name.removesuffix("_shape"): size for name, size in dataset.select_columns(names)[0].items() if size}
        return {name: size[:1] if name in _AS_LATENT else size for name, size in sizes.items()}
    channels = [transformer_config["out_channels"]]
    if "pooled_projection_dim" in transformer_config:  # SD3
        embeds = [_SD3_TEXT_TOKENS, transformer_config["joint_attention_dim"]]
        pooled = [transformer_config["pooled_projection_dim"]]
        return {"latent": channels, "prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    sizes = {"latent": channels, "prompt_embeds": [_WAN_TEXT_TOKENS, transformer_config["text_dim"]]}
    if transformer_config["in_channels"] > channels[0]:
        sizes["image_latent"] = channels
    if transformer_config["image_dim"] is not None:
        sizes["image_embeds"] = [257, transformer_config["image_dim"]]
    return sizes


def make_random_batches(sizes: dict[str, list[int]], device: torch.device):
    """(shape, batch size) -> a micro-batch of random numbers, as the loader would hand it out.

    Args:
        sizes: of `column_sizes`.
    """

    def random_batch(shape: LatentShape, batch_size: int) -> dict:
        batch = {
            name: torch.randn(
                batch_size,
                *size,
                *((shape.frames, shape.height, shape.width) if name in _AS_LATENT else ()),
                device=device,
            )
            for name, size in sizes.items()
        }
        indices = torch.arange(batch_size)
        return {**batch, "latent_normalized": True, "sample_index": indices, "loss_weight": 1.0}

    return random_batch


def try_buckets(
    accelerator: Accelerator, args, environment: dict, sizes: dict, run, plan, model, optimizer, scheduler
) -> None:
    """The preflight of a training run: its own micro-step on random micro-batches of each bucket, and a checkpoint.

    A resumed run leaves it out if one with the same options, environment and plan has passed it in this folder.

    Args:
        environment: of `describe_run`.
        sizes: of `column_sizes`.
        run: (batch) -> what `run_micro_step` returns.
        plan: the loader's.
    """
    output_dir = Path(args.output_dir)
    options = {name: str(value) for name, value in vars(args).items() if name not in _NOT_TRIED}
    passing = json.dumps({"options": options, "environment": environment, "plan": plan.to_dict()}, sort_keys=True)
    passed = output_dir / "preflight.json"
    if args.resume_from_checkpoint and on_main(accelerator, lambda: passed.exists() and passed.read_text() == passing):
        if accelerator.is_main_process:
            print(f"preflight: passed before, as {passed} says", file=sys.stderr, flush=True)
        return
    random_batch = make_random_batches(sizes, accelerator.device)

    def run_micro_step(shape: LatentShape, batch_size: int) -> torch.Tensor:
        return run(random_batch(shape, batch_size))[0]

    report = preflight(
        accelerator,
        run_micro_step,
        plan,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        checkpoint=output_dir / "partial-checkpoint-preflight",
    )
    if accelerator.is_main_process:
        print(report, file=sys.stderr, flush=True)
        passed.write_text(passing)
