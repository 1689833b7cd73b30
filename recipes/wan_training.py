"""What is Wan's own in training: its latents and how they reach the transformer."""

import pyarrow.compute
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKLWan
from model_setup import load_part

from adaptiveload_hf import UserError
from adaptiveload_hf.distributed import model_input_dtype


def check_dataset(dataset, transformer_config: dict) -> None:
    """Refuses latents or captions of another width than the transformer's.

    Raises:
        UserError: naming both widths.
    """
    row = dataset.select_columns(["latent_shape", "prompt_embeds_shape"])[0]
    for found, name, what in (
        (row["latent_shape"][0], "in_channels", "latents"),
        (row["prompt_embeds_shape"][-1], "text_dim", "caption embeddings"),
    ):
        if found != transformer_config[name]:
            raise UserError(
                f"the transformer takes {what} of width {transformer_config[name]} ({name}), but the dataset holds "
                f"width {found}. Prepare the dataset with this pipeline, or train the text-to-video transformer."
            )


def latent_statistics(args, dataset) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Mean and std, [C, 1, 1, 1] each, to normalise latents with; None where the dataset holds normalised ones.

    Raises:
        UserError: some latents are not normalised and the pipeline has no VAE configuration to do it with.
    """
    normalized = dataset.select_columns(["latent_normalized"]).with_format("arrow")[:]["latent_normalized"]
    if pyarrow.compute.all(normalized).as_py():
        return None
    config = load_part(AutoencoderKLWan, args, "vae")
    if "latents_mean" not in config or "latents_std" not in config:
        raise UserError(
            "the dataset holds latents that are not normalised, and the VAE configuration has no latents_mean and "
            "latents_std. Prepare the dataset again with recipes/prepare_dataset.py, which stores normalised ones."
        )
    return tuple(torch.tensor(config[name]).view(-1, 1, 1, 1) for name in ("latents_mean", "latents_std"))


def normalize(batch: dict, statistics) -> dict:
    """Latents as the transformer knows them; `statistics` is None where the dataset holds them so."""
    if statistics is None or batch["latent_normalized"]:
        return batch
    mean, std = (value.to(batch["latent"].device) for value in statistics)
    return {**batch, "latent": (batch["latent"].float() - mean) / std}


def wan_predict(accelerator: Accelerator, model):
    """The model as `FlowMatching.sample_losses` calls it: (noisy latent, timestep, batch) -> velocity."""
    dtype = model_input_dtype(accelerator)

    def predict(noisy: torch.Tensor, timestep: torch.Tensor, batch: dict) -> torch.Tensor:
        return model(
            hidden_states=noisy.to(dtype),
            timestep=timestep,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            return_dict=False,
        )[0]

    return predict
