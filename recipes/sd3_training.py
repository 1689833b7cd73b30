"""What is SD3's own in training: its sequence of image and text tokens, and how latents reach the transformer."""

from typing import NamedTuple

import pyarrow.compute
import torch
from accelerate import Accelerator
from data_setup import check_columns, check_widths
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from model_setup import load_index

from adaptiveload_hf import TokenGeometry, UserError
from adaptiveload_hf.buckets.shapes import read_shapes
from adaptiveload_hf.distributed import model_input_dtype

MODEL_CLASS = SD3Transformer2DModel
PIPELINE_CLASS = StableDiffusion3Pipeline
# The attention of both streams, image and text, as in diffusers' train_dreambooth_lora_sd3.py.
LORA_TARGET_MODULES = [
    *("to_q", "to_k", "to_v", "to_out.0"),
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
]


class SD3Variant(NamedTuple):
    """SD3 and SD3.5 of all sizes have one transformer, for all noise."""

    subfolder: str = "transformer"
    bounds: tuple[float, float] = (0.0, 1.0)  # of sigma


def choose_variant(args) -> SD3Variant:
    """The one there is.

    Raises:
        UserError: no pipeline, one of another transformer, or a flag of Wan's.
    """
    name = args.pretrained_model_name_or_path
    found = load_index(args, "an SD3 pipeline").get("transformer", [None, None])[1]
    if found != MODEL_CLASS.__name__:
        raise UserError(
            f"expected an SD3 pipeline, with the transformer {MODEL_CLASS.__name__}, but {name} has {found}. Wan is "
            "trained by train_wan.py."
        )
    for flag in ("expert", "first_frame_given"):  # benchmark_shapes.py has them
        if getattr(args, flag, None):
            raise UserError(f"--{flag} is for Wan pipelines, but {name} is SD3. Leave it out.")
    return SD3Variant()


def geometry(transformer_config: dict, text_tokens: int) -> TokenGeometry:
    """Tokens of a latent shape; those of the caption join the attention."""
    patch = transformer_config["patch_size"]
    return TokenGeometry((1, patch, patch), text_tokens)


def largest_side(transformer_config: dict) -> int:
    """Latent height or width up to which the transformer knows positions."""
    return transformer_config["patch_size"] * transformer_config["pos_embed_max_size"]


def check_dataset(dataset, transformer_config: dict) -> None:
    """Refuses what this transformer cannot take.

    Raises:
        UserError: clips, pictures beyond its table of positions, latents or embeddings of another width or missing,
            or latents that are not normalised.
    """
    columns = ["latent_shape", "prompt_embeds_shape", "pooled_prompt_embeds_shape"]
    check_columns(dataset, [*columns, "latent_normalized"])
    row = dataset.select_columns(columns)[0]
    check_widths(
        transformer_config,
        (row["latent_shape"][0], "in_channels", "latents"),
        (row["prompt_embeds_shape"][-1], "joint_attention_dim", "caption embeddings"),
        (row["pooled_prompt_embeds_shape"][-1], "pooled_projection_dim", "pooled caption embeddings"),
    )
    most = largest_side(transformer_config)
    for shape in read_shapes(dataset).shapes:
        if shape.frames > 1:
            raise UserError(f"SD3 makes pictures, but the dataset holds clips of {shape}. Prepare it with SD3.")
        if max(shape.height, shape.width) > most:
            raise UserError(
                f"this transformer knows positions up to {most}x{most} of a latent, but the dataset holds {shape}. "
                "Prepare it with smaller resolution buckets."
            )
    normalized = dataset.select_columns(["latent_normalized"]).with_format("arrow")[:]["latent_normalized"]
    if not pyarrow.compute.all(normalized).as_py():
        raise UserError(
            "the dataset holds latents that are not normalised. Prepare it with prepare_dataset.py, which stores "
            "(latent - shift_factor) * scaling_factor of the VAE's configuration."
        )


def make_predict(accelerator: Accelerator, model, variant: SD3Variant):
    """The model as `FlowMatching.sample_losses` calls it: (noisy latent, timestep, batch) -> velocity.

    Args:
        model: prepared.
        variant: the only one.
    """
    dtype = model_input_dtype(accelerator)

    def predict(noisy: torch.Tensor, timestep: torch.Tensor, batch: dict) -> torch.Tensor:
        velocity = model(
            hidden_states=noisy.squeeze(2).to(dtype),  # one frame
            timestep=timestep,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            pooled_projections=batch["pooled_prompt_embeds"].to(dtype),
            return_dict=False,
        )[0]
        return velocity.unsqueeze(2)

    return predict
