"""What does the model make of a few captions now? Clips by Wan's VAE, as mp4 and in the tracker."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKLWan, WanPipeline
from make_demo_clips import write_clip
from model_setup import load_model_config
from PIL import Image
from shared_work import on_main
from validation import latent_sizes, sample_latents
from wan_training import WanVariant, needs_image

from adaptiveload_hf import UserError
from adaptiveload_hf.buckets.plan import BucketPlan


def check_validation(args, variant: WanVariant, transformer_config: dict) -> None:
    """Refuses samples that this transformer alone cannot make.

    Raises:
        UserError: --validation_prompt with an image-to-video transformer, with one of two experts or without PyAV, or
            a --validation_resolution that is no size of this VAE.
    """
    if not args.validation_prompt:
        return
    if importlib.util.find_spec("av") is None:
        raise UserError("--validation_prompt writes clips, which needs PyAV. Install it: pip install av")
    if needs_image(transformer_config) or args.first_frame_given:
        raise UserError("--validation_prompt samples from captions alone, but this transformer needs a first frame.")
    if variant.bounds != (0.0, 1.0):
        raise UserError(
            "--validation_prompt needs a transformer for all noise, but one of two experts is trained. Use "
            "--validation_dataset here, and sample with WanPipeline once both are there."
        )
    vae, size = load_model_config(AutoencoderKLWan, args, "vae"), args.validation_resolution
    temporal, spatial = vae["scale_factor_temporal"], 2 * vae["scale_factor_spatial"]
    if size is not None and ((size.frames - 1) % temporal or size.height % spatial or size.width % spatial):
        raise UserError(
            f"--validation_resolution needs {temporal}n+1 frames and multiples of {spatial} pixels, but it is {size}."
        )


def encode_prompts(accelerator: Accelerator, args, text_tokens: int) -> list[torch.Tensor]:
    """Embeddings of --validation_prompt and, last, of the empty caption, [1, L, E] each, on the CPU of every rank.

    To be called before the transformer is loaded: the text encoder is as large, and is gone when this returns.

    Args:
        text_tokens: L, of the dataset's captions. Rows of zeros at the end are attended to, so their number counts.
    """

    def encode():
        parts = {"transformer": None, "vae": None}
        if "transformer_2" in WanPipeline.load_config(args.pretrained_model_name_or_path, revision=args.revision):
            parts["transformer_2"] = None
        pipe = WanPipeline.from_pretrained(
            args.pretrained_model_name_or_path, revision=args.revision, dtype=torch.bfloat16, **parts
        ).to(accelerator.device)
        with torch.no_grad():
            return [
                pipe.encode_prompt(
                    prompt,
                    do_classifier_free_guidance=False,
                    max_sequence_length=text_tokens,
                    device=accelerator.device,
                )[0].cpu()
                for prompt in (*args.validation_prompt, "")
            ]

    return on_main(accelerator, encode)


def make_validation_videos(
    accelerator: Accelerator, args, predict, flow, channels: int, embeds: list[torch.Tensor], plan: BucketPlan
):
    """(step) -> {}: samples a clip for each caption and saves it as validation/step-<step>-<number>.mp4.

    Args:
        predict, flow: as in `sample_latents`.
        channels: of the latent.
        embeds: from `encode_prompts`.
        plan: of the training; its largest bucket is the size of the clips where none is given.
    """
    vae = AutoencoderKLWan.from_pretrained(
        args.pretrained_model_name_or_path, subfolder="vae", revision=args.revision, dtype=torch.float32
    ).requires_grad_(False)
    scale = (vae.config.scale_factor_temporal, vae.config.scale_factor_spatial)
    shape = (channels, *latent_sizes(args.validation_resolution, scale, plan))
    captions = [{"prompt_embeds": embed.to(accelerator.device)} for embed in embeds]

    def make(step: int) -> dict:
        for number, prompt in enumerate(captions[:-1]):
            latent = sample_latents(predict, flow, prompt, captions[-1], shape, accelerator.device, args)
            if accelerator.is_main_process:
                frames = _decode(vae, latent, accelerator.device)
                path = Path(args.output_dir, "validation", f"step-{step}-{number}.mp4")
                path.parent.mkdir(exist_ok=True)
                write_clip(path, [Image.fromarray(frame) for frame in frames])
                _track(accelerator, path, frames, f"validation/{number}", step)
        return {}

    return make


@torch.no_grad()
def _decode(vae, latent: torch.Tensor, device) -> np.ndarray:
    """uint8 [F, H, W, 3]; the VAE is on the device no longer than this takes."""
    vae.to(device)
    statistics = (vae.config.latents_mean, vae.config.latents_std)
    mean, std = (torch.tensor(values, device=device).view(1, -1, 1, 1, 1) for values in statistics)
    video = vae.decode(latent * std + mean, return_dict=False)[0]
    vae.to("cpu")
    return ((video[0].clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).cpu().numpy()


def _track(accelerator: Accelerator, path: Path, frames: np.ndarray, name: str, step: int) -> None:
    """tensorboard gets the first, middle and last frame, wandb and trackio the clip; others have no place for it."""
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            chosen = frames[[0, len(frames) // 2, len(frames) - 1]]
            tracker.writer.add_images(name, chosen, step, dataformats="NHWC")
        elif tracker.name in ("wandb", "trackio"):
            video = sys.modules[tracker.name].Video(str(path))
            accelerator.get_tracker(tracker.name).log({name: video}, step=step)
