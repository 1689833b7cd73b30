"""Folders and tar shards of cached latents, as other trainers write them."""

import io
import json
import tarfile
from pathlib import Path

import torch
from safetensors.torch import save, save_file


def save_musubi(folder, key, latent, embeds=None, *, cut=None, architecture="wan", caption="a cat", **others):
    """What musubi-tuner caches of one clip (`cut`: its "00000-017") or image; `others`: further tensors by key."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    size = "x".join(map(str, latent.shape[1:] if latent.dim() == 4 else (1, *latent.shape[1:])))
    part = f"_{cut}" if cut else ""
    metadata = {"architecture": architecture, "width": "64", "height": "64", "format_version": "1.0.1"}
    if cut:
        metadata["frame_count"] = str(int(cut.split("-")[1]))
    tensors = {f"latents_{size}_{dtype_name(latent)}": latent, **others}
    save_file(tensors, folder / f"{key}{part}_0064x0064_{architecture}.safetensors", metadata=metadata)
    if embeds is not None:
        metadata = {"architecture": architecture, "caption1": caption, "format_version": "1.0.1"}
        save_file(
            {f"varlen_t5_{dtype_name(embeds)}": embeds}, folder / f"{key}_{architecture}_te.safetensors", metadata
        )


def dtype_name(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def sample_members(key, latent, told=None, **others) -> dict[str, bytes]:
    """The two files of one sample in a shard."""
    told = {"caption": f"caption of {key}"} if told is None else told
    return {
        f"{key}.latent.safetensors": save({"latent": latent, **others}),
        f"{key}.json": json.dumps(told).encode(),
    }


def save_shard(path, members: dict[str, bytes] | list[tuple[str, bytes]]) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items() if isinstance(members, dict) else members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def latent(frames=2, value=None, channels=4, dtype=torch.bfloat16):
    """[C, F, 4, 6], random or all of one value."""
    shape = (channels, frames, 4, 6)
    return torch.randn(shape).to(dtype) if value is None else torch.full(shape, float(value), dtype=dtype)
