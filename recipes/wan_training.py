"""What is Wan's own in training: its variants, its latents and how they reach the transformer."""

from dataclasses import dataclass

import pyarrow.compute
import torch
from accelerate import Accelerator
from data_setup import check_columns, check_widths
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from model_setup import load_index, load_part
from wrapped_model import unwrapped

from adaptiveload_hf import TokenGeometry, UserError
from adaptiveload_hf.buckets.ranks import compare_ranks
from adaptiveload_hf.distributed import model_input_dtype

MODEL_CLASS = WanTransformer3DModel
PIPELINE_CLASS = WanPipeline
LORA_TARGET_MODULES = ["to_q", "to_k", "to_v", "to_out.0"]


def add_wan_arguments(parser) -> None:
    """Wan's variants."""
    add = parser.add_argument
    add("--expert", choices=["high_noise", "low_noise"], help="which of the two transformers of Wan 2.2 A14B to train")
    add("--first_frame_given", action="store_true",
        help="Wan 2.2 TI2V: learn to continue from a given first frame")  # fmt: skip


@dataclass(frozen=True)
class WanVariant:
    """Which transformer of a Wan pipeline is trained, on which noise, and how it is told the time."""

    subfolder: str = "transformer"
    bounds: tuple[float, float] = (0.0, 1.0)  # of sigma
    time_per_token: bool = False


def choose_variant(args) -> WanVariant:
    """From the pipeline's model_index.json and the arguments.

    Raises:
        UserError: a pipeline of two experts without --expert, or a flag that this pipeline has no use for.
    """
    index = load_index(args, "a Wan pipeline")
    boundary, name = index.get("boundary_ratio"), args.pretrained_model_name_or_path
    if boundary is not None and args.expert is None:
        raise UserError(
            f"{name} has two transformers, one for sigma from {boundary} up and one for less. Pass --expert "
            "high_noise or --expert low_noise, and train them one after the other."
        )
    if boundary is None and args.expert is not None:
        raise UserError(f"--expert is for pipelines with two transformers, but {name} has one. Leave it out.")
    if args.first_frame_given and not index.get("expand_timesteps"):
        raise UserError(
            f"--first_frame_given is for Wan 2.2 TI2V, whose timestep differs from token to token, but {name} is not. "
            "Image-to-video transformers of 36 channels get the first frame without it."
        )
    if args.expert == "low_noise":
        return WanVariant("transformer_2", (0.0, boundary))
    return WanVariant("transformer", (boundary or 0.0, 1.0), bool(index.get("expand_timesteps")))


def geometry(transformer_config: dict, text_tokens: int) -> TokenGeometry:
    """Tokens of a latent shape; those of the caption are attended to, and are no part of the sequence."""
    return TokenGeometry(tuple(transformer_config["patch_size"]))


def needs_image(transformer_config: dict) -> bool:
    """Whether this is an image-to-video transformer: it takes mask and image latent beside the noisy one."""
    return transformer_config["in_channels"] == 2 * transformer_config["out_channels"] + 4


def check_dataset(dataset, transformer_config: dict) -> None:
    """Refuses latents or captions of another width than the transformer's, or without the image it needs.

    Raises:
        UserError: naming both widths, or the columns that are missing.
    """
    check_columns(dataset, ["latent_shape", "latent_normalized", "prompt_embeds_shape"])
    row = dataset.select_columns(["latent_shape", "prompt_embeds_shape"])[0]
    image = needs_image(transformer_config)
    check_widths(
        transformer_config,
        (row["latent_shape"][0], "out_channels" if image else "in_channels", "latents"),
        (row["prompt_embeds_shape"][-1], "text_dim", "caption embeddings"),
    )
    wanted = ["image_latent_shape"] if image else []
    wanted += ["image_embeds_shape"] if image and transformer_config["image_dim"] else []
    missing = [name for name in wanted if name not in dataset.column_names]
    if missing:
        raise UserError(
            f"this transformer makes clips from images, but the dataset has no {' and no '.join(missing)}. Prepare it "
            "with this pipeline: prepare_dataset.py then stores each first frame's latent and embedding too."
        )


def latent_statistics(args, *datasets) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Mean and std, [C, 1, 1, 1] each, to normalise latents with; None where all datasets hold normalised ones.

    Raises:
        UserError: some latents are not normalised and the pipeline has no VAE configuration to do it with, or ranks
            have read different ones.
    """
    statistics = _read_statistics(args, datasets)
    compare_ranks({"latents' mean and std": statistics})
    return statistics and tuple(torch.tensor(values).view(-1, 1, 1, 1) for values in statistics)


def _read_statistics(args, datasets) -> list[list[float]] | None:
    columns = [dataset.select_columns(["latent_normalized"]).with_format("arrow")[:] for dataset in datasets]
    if all(pyarrow.compute.all(column["latent_normalized"]).as_py() for column in columns):
        return None
    config = load_part(AutoencoderKLWan, args, "vae")
    if "latents_mean" not in config or "latents_std" not in config:
        raise UserError(
            "the dataset holds latents that are not normalised, and the VAE configuration has no latents_mean and "
            "latents_std. Prepare the dataset again with recipes/prepare_dataset.py, which stores normalised ones."
        )
    return [config["latents_mean"], config["latents_std"]]


def normalize(batch: dict, statistics) -> dict:
    """Latents as the transformer knows them; `statistics` is None where the dataset holds them so."""
    if statistics is None or batch["latent_normalized"]:
        return batch
    mean, std = (value.to(batch["latent"].device) for value in statistics)
    return {**batch, "latent": (batch["latent"].float() - mean) / std}


def make_predict(accelerator: Accelerator, model, variant: WanVariant, first_frame_given: bool = False):
    """The model as `FlowMatching.sample_losses` calls it: (noisy latent, timestep, batch) -> velocity.

    Args:
        model: prepared.
        first_frame_given: the first latent frame of clips is the batch's own, at timestep 0.
    """
    dtype, config = model_input_dtype(accelerator), unwrapped(accelerator, model).config

    def predict(noisy: torch.Tensor, timestep: torch.Tensor, batch: dict) -> torch.Tensor:
        given = first_frame_given and noisy.shape[2] > 1
        if given:
            noisy = torch.cat([batch["latent"][:, :, :1].to(noisy.dtype), noisy[:, :, 1:]], dim=2)
        if variant.time_per_token:
            frames, rest = _tokens(noisy.shape[2:], config.patch_size)
            timestep = timestep.view(-1, 1, 1).repeat(1, frames, rest)
            if given:
                timestep[:, 0] = 0
            timestep = timestep.flatten(1)
        extra = {}
        if needs_image(config):
            mask = torch.zeros_like(noisy[:, :4])
            mask[:, :, 0] = 1  # the image is the first latent frame
            noisy = torch.cat([noisy, mask, batch["image_latent"].to(noisy.dtype)], dim=1)
        if config.image_dim is not None:
            extra["encoder_hidden_states_image"] = batch["image_embeds"].to(dtype)
        return model(
            hidden_states=noisy.to(dtype),
            timestep=timestep,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            return_dict=False,
            **extra,
        )[0]

    return predict


def _tokens(sizes, patch_size) -> tuple[int, int]:
    """Frames of tokens, and tokens in each."""
    frames, height, width = (size // patch for size, patch in zip(sizes, patch_size))
    return frames, height * width
