"""How do some samples lose their caption, so that the model learns to be guided away from none?"""

import hashlib
import os
from pathlib import Path

import torch
from flow_matching import occurrence_names
from safetensors import SafetensorError
from safetensors.torch import load_file

from adaptiveload_hf import UserError


def make_caption_dropout(proportion: float, dataset_dir, seed: int, sizes: dict[str, list[int]]):
    """(batch, epoch) -> batch, in which a share of the samples has the embedding of the empty caption.

    Which ones depends on (seed, epoch, sample, occurrence) alone, as their noise does.

    Args:
        proportion: of samples, 0 to 1.
        dataset_dir: output_dir of prepare_dataset.py, or the folder dataset in it; empty_prompt_embeds.safetensors
            is in the former.
        sizes: of the samples' tensors, by name.

    Raises:
        UserError: no share of samples, or no such file, or a damaged one, or one of other captions' sizes.
    """
    if not 0 <= proportion <= 1:
        raise UserError(f"--proportion_empty_prompts is between 0 and 1, but it is {proportion}.")
    if proportion == 0:
        return lambda batch, epoch: batch
    folder = Path(dataset_dir)
    if (folder / "state.json").exists():  # the folder `dataset` in it, which is accepted too
        folder = Path(os.path.abspath(folder)).parent
    path = folder / "empty_prompt_embeds.safetensors"
    if not path.exists():
        raise UserError(
            f"--proportion_empty_prompts needs the embedding of the empty caption, but there is no {path}. Give the "
            "prepare_dataset.py command of this dataset again: it adds what is missing."
        )
    try:
        empty = load_file(path)
    except SafetensorError as error:
        raise UserError(
            f"{path} is damaged: {error}. Remove it, and give the prepare_dataset.py command again."
        ) from None
    wanted = {name: list(size) for name, size in sizes.items() if "prompt" in name}
    found = {name: list(tensor.shape) for name, tensor in empty.items()}
    if found != wanted:  # one of several that stays as it was would still tell the caption
        raise UserError(
            f"{path} holds {found}, but the captions of the dataset are {wanted}. Remove it, and give the "
            "prepare_dataset.py command of this dataset again."
        )

    def drop(batch: dict, epoch: int) -> dict:
        dropped = torch.tensor(
            [_draw(seed, epoch, name) < proportion for name in occurrence_names(batch)],
            device=batch["latent"].device,
        )
        replaced = {}
        for name, tensor in empty.items():
            given = batch[name]
            mask = dropped.view(-1, *[1] * tensor.ndim)
            replaced[name] = torch.where(mask, tensor.to(given.device, given.dtype), given)
        return {**batch, **replaced}

    return drop


def _draw(seed: int, epoch: int, name: str) -> float:
    """Uniform in [0, 1)."""
    key = hashlib.blake2b(f"caption/{seed}/{epoch}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "little") / 2**64
