"""What does the model make of a few captions now? Pictures by SD3's VAE, as png and in the tracker."""

import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL
from encoders import find_family, load_text_encoder, pipeline_folder
from model_setup import load_model_config
from PIL import Image
from sd3_training import largest_side
from shared_work import on_main
from validation import latent_sizes, sample_latents

from adaptiveload_hf import UserError
from adaptiveload_hf.buckets.plan import BucketPlan


def check_validation(args, transformer_config: dict) -> None:
    """Refuses a size that cannot be made.

    Raises:
        UserError: --validation_resolution is no picture of this VAE and transformer.
    """
    size = args.validation_resolution
    if not args.validation_prompt or size is None:
        return
    vae = load_model_config(AutoencoderKL, args, "vae")
    spatial = 2 ** (len(vae["block_out_channels"]) - 1)
    step, most = spatial * transformer_config["patch_size"], spatial * largest_side(transformer_config)
    if size.frames != 1 or any(side % step or side > most for side in (size.height, size.width)):
        raise UserError(
            f"--validation_resolution needs 1 frame and multiples of {step} pixels up to {most}, such as 1x512x512, "
            f"but it is {size}."
        )


def encode_prompts(accelerator: Accelerator, args, text_tokens: int) -> list[dict[str, torch.Tensor]]:
    """Embeddings of --validation_prompt and, last, of the empty caption, on the CPU of every rank; first dimension 1.

    To be called before the transformer is loaded: the text encoders are as large, and are gone when this returns.

    Args:
        text_tokens: of the dataset's captions, whose length the model is trained for.
    """

    def encode_all():
        family = find_family(args.pretrained_model_name_or_path, args.revision)
        folder = pipeline_folder(args.pretrained_model_name_or_path, family, args.revision)
        # CLIP's 77 rows come first.
        encode = load_text_encoder(folder, family, accelerator.device, torch.bfloat16, text_tokens - 77)
        captions = (*args.validation_prompt, "")
        return [{name: tensor[None] for name, tensor in encode(caption).items()} for caption in captions]

    return on_main(accelerator, encode_all)


def make_validation_pictures(accelerator: Accelerator, args, predict, flow, embeds: list[dict], plan: BucketPlan):
    """(step) -> {}: samples a picture for each caption and saves it as validation/step-<step>-<number>.png.

    Args:
        predict, flow: as in `sample_latents`.
        embeds: from `encode_prompts`.
        plan: of the training; its largest bucket is the size of the pictures where none is given.
    """
    vae = AutoencoderKL.from_pretrained(
        args.pretrained_model_name_or_path, subfolder="vae", revision=args.revision, dtype=torch.float32
    ).requires_grad_(False)
    spatial = 2 ** (len(vae.config.block_out_channels) - 1)
    shape = (vae.config.latent_channels, *latent_sizes(args.validation_resolution, (1, spatial), plan))
    captions = [{name: tensor.to(accelerator.device) for name, tensor in embed.items()} for embed in embeds]

    def make(step: int) -> dict:
        for number, prompt in enumerate(captions[:-1]):
            latent = sample_latents(predict, flow, prompt, captions[-1], shape, accelerator.device, args)
            if accelerator.is_main_process:
                picture = _decode(vae, latent, accelerator.device)
                path = Path(args.output_dir, "validation", f"step-{step}-{number}.png")
                path.parent.mkdir(exist_ok=True)
                Image.fromarray(picture).save(path)
                _track(accelerator, path, picture, f"validation/{number}", step)
        return {}

    return make


@torch.no_grad()
def _decode(vae, latent: torch.Tensor, device) -> np.ndarray:
    """uint8 [H, W, 3]; the VAE is on the device no longer than this takes."""
    vae.to(device)
    latent = latent.squeeze(2) / vae.config.scaling_factor + vae.config.shift_factor
    picture = vae.decode(latent, return_dict=False)[0]
    vae.to("cpu")
    return ((picture[0].clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0).cpu().numpy()


def _track(accelerator: Accelerator, path: Path, picture: np.ndarray, name: str, step: int) -> None:
    """Shows it in tensorboard, wandb and trackio; others have no place for it."""
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.writer.add_image(name, picture, step, dataformats="HWC")
        elif tracker.name in ("wandb", "trackio"):
            image = sys.modules[tracker.name].Image(str(path))
            accelerator.get_tracker(tracker.name).log({name: image}, step=step)
