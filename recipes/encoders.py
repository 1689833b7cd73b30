"""How do the pipelines of Wan (text or image to video) and SD3 make latents of frames, and embeddings of captions?"""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from huggingface_hub import snapshot_download
from PIL import Image
from resolution_buckets import Grid
from transformers import (
    AutoTokenizer,
    CLIPTextModelWithProjection,
    CLIPVisionModel,
    T5EncoderModel,
    UMT5EncoderModel,
)

from adaptiveload_hf.errors import UserError

TENSORS = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """What is to be known of a pipeline before its weights are read.

    vae, transformer: names of their classes. media_parts, text_parts: folders of what makes latents, and embeddings.
    grid, spatial: legal sizes, and the VAE's spatial compression. max_sequence_length: of captions, by default.
    first_frame: whether the transformer is also given the latent of the first frame.
    """

    vae: str
    media_parts: tuple[str, ...]
    text_parts: tuple[str, ...]
    tokenizer: str
    grid: Grid
    spatial: int
    max_sequence_length: int
    first_frame: bool = False


def find_family(pipeline: str, revision: str | None = None) -> Family:
    """Reads a pipeline's family from the configs of its VAE and transformer alone.

    Args:
        pipeline: folder or Hub id.
        revision: branch, tag or commit of the Hub id.

    Raises:
        UserError: no such pipeline, or neither Wan nor SD3.
    """
    try:
        vae = AutoencoderKLWan.load_config(pipeline, subfolder="vae", revision=revision)
        transformer = WanTransformer3DModel.load_config(pipeline, subfolder="transformer", revision=revision)
    except OSError as error:
        raise UserError(f"{pipeline} must be the folder or Hub id of a Wan or SD3 pipeline: {error}") from error
    found = (vae.get("_class_name"), transformer.get("_class_name"))
    if found == ("AutoencoderKLWan", "WanTransformer3DModel"):
        spatial = vae.get("scale_factor_spatial") or 8
        first_frame = transformer["in_channels"] == 2 * vae.get("z_dim", 16) + 4
        image_parts = ("image_encoder", "image_processor") if first_frame and transformer.get("image_dim") else ()
        return Family(
            vae=found[0],
            media_parts=("vae", *image_parts),
            text_parts=("text_encoder", "tokenizer"),
            tokenizer="tokenizer",
            grid=Grid(vae.get("scale_factor_temporal") or 4, spatial * transformer["patch_size"][1]),
            spatial=spatial,
            max_sequence_length=512,
            first_frame=first_frame,
        )
    if found == ("AutoencoderKL", "SD3Transformer2DModel"):
        spatial = 2 ** (len(vae["block_out_channels"]) - 1)
        names = [f"{part}{number}" for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")]
        return Family(
            vae=found[0],
            media_parts=("vae",),
            text_parts=tuple(names),
            tokenizer="tokenizer_3",
            grid=Grid(0, spatial * transformer["patch_size"]),
            spatial=spatial,
            max_sequence_length=256,
        )
    raise UserError(
        f"{pipeline} must be a Wan or SD3 pipeline, but its VAE and transformer are {found[0]} and {found[1]}."
    )


def pipeline_folder(pipeline: str, family: Family, revision: str | None = None) -> Path:
    """Where the files of the pipeline's VAE and text encoders are; from the Hub they are downloaded if need be."""
    parts = family.media_parts + family.text_parts
    folder = Path(pipeline)
    if not folder.is_dir():
        folder = Path(snapshot_download(pipeline, revision=revision, allow_patterns=[f"{part}/*" for part in parts]))
    for part in parts:
        if not (folder / part).is_dir():
            raise UserError(f"{pipeline} has no {part}/, which its captions or latents are made with. Add it.")
    return folder


def outline(folder: Path, family: Family) -> str:
    """Hash of the configs' and weights' names, sizes and first and last bytes, in which two versions differ."""
    sha256 = hashlib.sha256()
    for part in family.media_parts + family.text_parts:
        files = (path for path in (folder / part).rglob("*") if path.suffix in (".json", ".safetensors"))
        for path in sorted(files):
            size = path.stat().st_size
            sha256.update(f"{path.relative_to(folder).as_posix()} {size}".encode())
            with open(path, "rb") as stream:
                sha256.update(stream.read(1 << 16))
                stream.seek(max(0, size - (1 << 16)))
                sha256.update(stream.read())
    return sha256.hexdigest()[:16]


def load_media_encoder(folder: Path, family: Family, device: torch.device) -> Callable[[np.ndarray], TENSORS]:
    """Loads what makes latents.

    Returns:
        A function of uint8 [F, H, W, 3] that gives, in bf16, `latent` [C, F', H', W'], normalised as the pipeline's
        transformer knows it, from the mode of the VAE's posterior; with family.first_frame also `image_latent`, the
        latent of the first frame followed by grey ones, and image_embeds [L, E] if there is an image encoder.
    """
    # The VAE stays in float32, as diffusers advises for Wan: it loses detail in bf16. SD3's is as good there.
    kind = AutoencoderKLWan if family.vae == "AutoencoderKLWan" else AutoencoderKL
    vae = kind.from_pretrained(folder, subfolder="vae", dtype=torch.float32).to(device)
    embed_image = load_image_encoder(folder, device) if "image_encoder" in family.media_parts else None

    @torch.no_grad()
    def encode(sample: np.ndarray) -> TENSORS:
        pixels = torch.from_numpy(sample).to(device).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        tensors = {"latent": normalized_latent(vae, pixels)}
        if family.first_frame:
            first_only = torch.zeros_like(pixels)
            first_only[:, :, 0] = pixels[:, :, 0]
            tensors["image_latent"] = normalized_latent(vae, first_only)
        if embed_image:
            tensors["image_embeds"] = embed_image(sample[0])
        return {name: tensor.to("cpu", torch.bfloat16) for name, tensor in tensors.items()}

    return encode


def normalized_latent(vae, pixels: torch.Tensor) -> torch.Tensor:
    """[C, F', H', W'] of [1, 3, F, H, W] in -1..1: (mode - mean) / std per channel for Wan; SD3's F is 1."""
    if isinstance(vae, AutoencoderKL):
        latent = vae.encode(pixels[:, :, 0]).latent_dist.mode()
        return ((latent - vae.config.shift_factor) * vae.config.scaling_factor)[0, :, None]
    mean, std = (
        torch.tensor(values, device=pixels.device).view(-1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (vae.encode(pixels).latent_dist.mode()[0] - mean) / std


def load_image_encoder(folder: Path, device: torch.device) -> Callable[[np.ndarray], torch.Tensor]:
    """[L, E] of uint8 [H, W, 3], as WanImageToVideoPipeline.encode_image gives it."""
    from transformers import AutoImageProcessor  # here: it warns where torchvision is not installed

    processor = AutoImageProcessor.from_pretrained(folder, subfolder="image_processor")
    encoder = CLIPVisionModel.from_pretrained(folder, subfolder="image_encoder", dtype=torch.float32).to(device)

    def embed(frame: np.ndarray) -> torch.Tensor:
        image = processor(images=Image.fromarray(frame), return_tensors="pt").to(device)
        return encoder(**image, output_hidden_states=True).hidden_states[-2][0]

    return embed


def load_text_encoder(
    folder: Path, family: Family, device: torch.device, dtype: torch.dtype, max_sequence_length: int
) -> Callable[[str], TENSORS]:
    """Loads what makes caption embeddings.

    Returns:
        A function of a caption that gives, in bf16, `prompt_embeds` [L, E] without the rows of zeros at Wan's end,
        and for SD3 pooled_prompt_embeds [E'], as the pipeline's own encode_prompt makes them.
    """
    parts = {
        part: (AutoTokenizer if part.startswith("tokenizer") else text_encoder_class(folder / part)).from_pretrained(
            folder, subfolder=part, **({} if part.startswith("tokenizer") else {"dtype": dtype})
        )
        for part in family.text_parts
    }
    if family.vae == "AutoencoderKLWan":
        kind, more = WanPipeline, {}
    else:
        from diffusers import StableDiffusion3Pipeline as kind  # here: it warns where torchvision is not installed

        more = {"prompt_2": None, "prompt_3": None}
    # It warns three times of a caption that is cut; the report lists these under captions_cut.
    logging.getLogger(kind.__module__).setLevel(logging.ERROR)
    pipe = kind(vae=None, transformer=None, scheduler=FlowMatchEulerDiscreteScheduler(), **parts).to(device)

    @torch.no_grad()
    def encode(caption: str) -> TENSORS:
        embeds = pipe.encode_prompt(
            caption,
            **more,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
            device=device,
        )
        prompt_embeds = embeds[0][0].to("cpu", torch.bfloat16)
        if kind is not WanPipeline:
            return {"prompt_embeds": prompt_embeds, "pooled_prompt_embeds": embeds[2][0].to("cpu", torch.bfloat16)}
        filled = prompt_embeds.any(dim=1).nonzero()
        return {"prompt_embeds": prompt_embeds[: int(filled[-1]) + 1 if len(filled) else 1]}

    return encode


def text_encoder_class(part: Path):
    """The class that a text encoder's own config names."""
    classes = {kind.__name__: kind for kind in (UMT5EncoderModel, T5EncoderModel, CLIPTextModelWithProjection)}
    (name,) = json.loads((part / "config.json").read_text(encoding="utf-8"))["architectures"]
    if name not in classes:
        raise UserError(f"{part} must be one of {', '.join(classes)}, but it is {name}.")
    return classes[name]
