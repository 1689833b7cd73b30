"""How does a folder of pictures, clips and captions become a dataset of latents and caption embeddings for Wan?

python recipes/prepare_dataset.py --instance_data_root clips --output_dir prepared \\
    --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --fps 16 \\
    --video_resolution_buckets 1x480x832 33x480x832 81x480x832

Every file is looked through before anything is encoded, and what cannot be used is listed then. An interrupted run
goes on when the same command is given again. docs/data.md describes the folder, the rules and the dataset.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import datasets
import torch
from data_folder import Listing, list_samples
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from media import Bucket, Footage, choose_bucket, look, read
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoTokenizer, UMT5EncoderModel

from adaptiveload_hf.buckets.shapes import LatentShape, read_shapes, shape_counts
from adaptiveload_hf.errors import UserError, exit_on_user_error

PROGRAM = "prepare_dataset.py"
SAMPLES_PER_PART = 32  # what an interrupted run loses at most, and what it holds in memory
FEATURES = datasets.Features(
    {
        "latent": datasets.Value("large_binary"),
        "latent_shape": datasets.List(datasets.Value("int32")),
        "latent_dtype": datasets.Value("string"),
        "latent_normalized": datasets.Value("bool"),
        "prompt_embeds": datasets.Value("large_binary"),
        "prompt_embeds_shape": datasets.List(datasets.Value("int32")),
        "prompt_embeds_dtype": datasets.Value("string"),
        "caption": datasets.Value("string"),
        "file": datasets.Value("string"),
    }
)


@dataclass(frozen=True)
class Planned:
    """A sample that can be encoded."""

    file: str
    caption: str
    footage: Footage
    bucket: Bucket


def parse_buckets(words: list[str], frame_step: int, pixel_step: int) -> list[Bucket]:
    """Reads buckets like 81x480x832, in frames and pixels.

    Args:
        words: as given on the command line.
        frame_step: the VAE's temporal compression; frames must be a multiple of it plus 1.
        pixel_step: the VAE's spatial compression times the transformer's patch; heights and widths are multiples.

    Returns:
        The buckets, each once.

    Raises:
        UserError: all illegal ones, each with the nearest legal one.
    """
    buckets, illegal = [], []
    for word in words:
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", word)
        if not match:
            hint = f", as 1x{word} for stills" if re.fullmatch(r"\d+x\d+", word) else ", as 81x480x832"
            raise UserError(f"A bucket is written frames x height x width in pixels{hint}, but it is {word!r}.")
        bucket = Bucket(*map(int, match.groups()))
        legal = Bucket(
            max(round((bucket.frames - 1) / frame_step), 0) * frame_step + 1,
            max(round(bucket.height / pixel_step), 1) * pixel_step,
            max(round(bucket.width / pixel_step), 1) * pixel_step,
        )
        if bucket != legal:
            illegal.append(f"{bucket} (nearest: {legal})")
        buckets.append(bucket)
    if illegal:
        raise UserError(
            f"This model needs {frame_step}n+1 frames, and multiples of {pixel_step} pixels as height and width. "
            f"Not so: {', '.join(illegal)}."
        )
    return list(dict.fromkeys(buckets))


def bucket_steps(pipeline: str) -> tuple[int, int]:
    """Frame and pixel step of the legal buckets, from the VAE's and transformer's configs alone."""
    try:
        vae = AutoencoderKLWan.load_config(pipeline, subfolder="vae")
        transformer = WanTransformer3DModel.load_config(pipeline, subfolder="transformer")
    except OSError as error:
        raise UserError(f"{pipeline} must be the folder or Hub id of a Wan pipeline: {error}") from error
    if vae.get("_class_name") != "AutoencoderKLWan":
        raise UserError(f"{pipeline} must be a Wan pipeline, but its VAE is {vae.get('_class_name')}.")
    return vae.get("scale_factor_temporal", 4), vae.get("scale_factor_spatial", 8) * transformer["patch_size"][1]


def plan_samples(root: Path, listing: Listing, fps: Fraction, buckets: list[Bucket]) -> list[Planned]:
    """Looks through every file and chooses its bucket; what cannot be used is refused in the listing."""
    longest = max(bucket.frames for bucket in buckets)
    planned = []
    for file, caption in tqdm(listing.captions.items(), desc="looking through files", unit="file"):
        try:
            footage = look(root / file, fps, longest)
            planned.append(Planned(file, caption, footage, choose_bucket(footage, buckets)))
        except UserError as error:
            listing.refuse(file, str(error))
    return planned


class Encoder:
    """The VAE and text encoder of a Wan pipeline, used as WanPipeline uses them."""

    def __init__(self, pipeline: str, max_sequence_length: int, text_dtype: torch.dtype):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.pipe = WanPipeline(
            tokenizer=AutoTokenizer.from_pretrained(pipeline, subfolder="tokenizer"),
            text_encoder=UMT5EncoderModel.from_pretrained(pipeline, subfolder="text_encoder", dtype=text_dtype),
            # The VAE stays in float32, as diffusers advises for Wan: it loses detail in bf16.
            vae=AutoencoderKLWan.from_pretrained(pipeline, subfolder="vae", torch_dtype=torch.float32),
            scheduler=FlowMatchEulerDiscreteScheduler(),
        ).to(self.device)
        self.max_sequence_length = max_sequence_length
        config = self.pipe.vae.config
        self.mean, self.std = (
            torch.tensor(values, device=self.device).view(1, -1, 1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )

    @torch.no_grad()
    def latent(self, sample) -> torch.Tensor:
        """Normalised latent bf16 [C, F, H, W] of uint8 [F, H, W, 3]: (mode of the posterior - mean) / std."""
        pixels = torch.from_numpy(sample).to(self.device).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        latent = (self.pipe.vae.encode(pixels).latent_dist.mode() - self.mean) / self.std
        return latent[0].to("cpu", torch.bfloat16)

    @torch.no_grad()
    def prompt_embeds(self, caption: str) -> torch.Tensor:
        """bf16 [max_sequence_length, E], zero after the caption's end."""
        embeds, _ = self.pipe.encode_prompt(
            caption,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=self.device,
        )
        return embeds[0].to("cpu", torch.bfloat16)

    def cut_captions(self, planned: list[Planned]) -> list[str]:
        """Files whose caption has more tokens than max_sequence_length; WanPipeline cuts them without a word."""
        lengths = [len(self.pipe.tokenizer(sample.caption).input_ids) for sample in planned]
        return [sample.file for sample, length in zip(planned, lengths) if length > self.max_sequence_length]


def encode_sample(root: Path, planned: Planned, encoder: Encoder) -> dict:
    """One row of the dataset; a UserError says why there is none."""
    latent = encoder.latent(read(root / planned.file, planned.footage, planned.bucket))
    embeds = encoder.prompt_embeds(planned.caption)
    for name, tensor in (("latent", latent), ("caption's embedding", embeds)):
        if not tensor.isfinite().all():
            raise UserError(f"its {name} has NaN or infinity")
    row = {"latent_normalized": True, "caption": planned.caption, "file": planned.file}
    for name, tensor in (("latent", latent), ("prompt_embeds", embeds)):
        # Arrow has no bfloat16: the raw bytes, read back with torch.frombuffer.
        row[name] = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        row[f"{name}_shape"] = list(tensor.shape)
        row[f"{name}_dtype"] = "bfloat16"
    return row


def encode_parts(root: Path, planned: list[Planned], encoder: Encoder, work: Path) -> tuple[list[Path], list[dict]]:
    """Encodes all samples in parts that are whole or not there; those that an earlier run left are kept.

    Returns:
        The folders of the parts' rows, and the refused samples.
    """
    folders, refused = [], []
    with tqdm(total=len(planned), desc="encoding", unit="sample") as progress:
        for start in range(0, len(planned), SAMPLES_PER_PART):
            samples = planned[start : start + SAMPLES_PER_PART]
            folder = work / f"part-{start // SAMPLES_PER_PART:06d}"
            if not folder.exists():
                write_part(root, samples, encoder, folder, progress)
            else:
                progress.update(len(samples))
            if (folder / "rows").exists():
                folders.append(folder / "rows")
            refused += json.loads((folder / "refused.json").read_text(encoding="utf-8"))
    return folders, refused


def write_part(root: Path, samples: list[Planned], encoder: Encoder, folder: Path, progress: tqdm):
    rows, refused = [], []
    for sample in samples:
        try:
            rows.append(encode_sample(root, sample, encoder))
        except UserError as error:
            refused.append({"file": sample.file, "reason": str(error)})
        progress.update()
    unfinished = folder.with_name("unfinished-part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    if rows:
        columns = {name: [row[name] for row in rows] for name in FEATURES}
        datasets.Dataset.from_dict(columns, features=FEATURES).save_to_disk(unfinished / "rows")
    (unfinished / "refused.json").write_text(json.dumps(refused), encoding="utf-8")
    os.replace(unfinished, folder)


def open_work(output_dir: Path, key: str, overwrite: bool) -> Path:
    """The folder of this run's unfinished work, made or found again. That of other runs is an error, or dropped."""
    work = output_dir / f"unfinished-{key[:16]}"
    for other in set(output_dir.glob("unfinished-*")) - {work}:
        if not overwrite:
            raise UserError(
                f"{other} was left by a run with other options, files, captions or weights. "
                "Repeat that run to finish it, or give --overwrite to drop its work."
            )
        shutil.rmtree(other)
    work.mkdir(parents=True, exist_ok=True)
    return work


def write_report(output_dir: Path, kept: datasets.Dataset, listing: Listing, cut: list[str]) -> dict[LatentShape, int]:
    """Writes prepare_report.json and returns its samples per latent shape."""
    counts = shape_counts(read_shapes(kept))
    report = {
        "kept": len(kept),
        "refused": listing.refused,
        "buckets": {str(shape): count for shape, count in counts.items()},
        "without_caption": listing.without_caption,
        "captions_cut": cut,
        "hidden_files": listing.hidden,
        "other_files": dict(listing.other_files),
    }
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (output_dir / "prepare_report.json").write_text(text + "\n", encoding="utf-8")
    return counts


def prepare(args: argparse.Namespace):
    """Does the whole work; the arguments are those of the command line."""
    root, output_dir = args.instance_data_root, args.output_dir
    if args.max_sequence_length < 1:
        raise UserError(f"--max_sequence_length must be 1 or more, but it is {args.max_sequence_length}.")
    fps = parse_fps(args.fps)
    buckets = parse_buckets(args.video_resolution_buckets, *bucket_steps(args.pretrained_model_name_or_path))
    if (output_dir / "dataset").exists() and not args.overwrite:
        raise UserError(f"{output_dir / 'dataset'} is there already. Give another --output_dir, or --overwrite.")
    listing = list_samples(root)
    planned = plan_samples(root, listing, fps, buckets)
    print(f"{len(planned)} samples can be used, {len(listing.refused)} refused", file=sys.stderr)
    if not planned:
        raise UserError(f"{root} has no picture or clip that can be used. Expected at least one; see docs/data.md.")
    work = open_work(output_dir, run_key(args, planned), args.overwrite)
    text_dtype = torch.bfloat16 if args.mixed_precision == "bf16" else torch.float32
    encoder = Encoder(args.pretrained_model_name_or_path, args.max_sequence_length, text_dtype)
    parts, refused = encode_parts(root, planned, encoder, work)
    for entry in refused:
        listing.refuse(**entry)
    if not parts:
        shutil.rmtree(work)
        raise UserError("No sample could be encoded, for the reasons listed above.")
    dataset = datasets.concatenate_datasets([datasets.load_from_disk(part) for part in parts])
    datasets.enable_progress_bars()
    dataset.save_to_disk(work / "dataset")
    counts = write_report(output_dir, dataset, listing, encoder.cut_captions(planned))
    save_file({"prompt_embeds": encoder.prompt_embeds("")}, output_dir / "empty_prompt_embeds.safetensors")
    # The dataset appears last and at once: where it is, all of it is there.
    shutil.rmtree(output_dir / "dataset", ignore_errors=True)
    os.replace(work / "dataset", output_dir / "dataset")
    shutil.rmtree(work)
    print_buckets(counts, output_dir, encoder.pipe.vae_scale_factor_temporal, encoder.pipe.vae_scale_factor_spatial)


def run_key(args: argparse.Namespace, planned: list[Planned]) -> str:
    """Digest of what must be the same for unfinished work to be gone on with: options, captions, files and weights."""
    options = {name: str(value) for name, value in vars(args).items() if name not in ("output_dir", "overwrite")}
    files = [args.instance_data_root / sample.file for sample in planned]
    files += sorted(path for path in Path(args.pretrained_model_name_or_path).rglob("*") if path.is_file())
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    captions = [(sample.caption, str(sample.bucket)) for sample in planned]
    return hashlib.sha256(json.dumps([options, stats, captions, SAMPLES_PER_PART]).encode()).hexdigest()


def print_buckets(counts: dict[LatentShape, int], output_dir: Path, frame_step: int, spatial: int):
    print(f"{'latent shape':>12} {'pixels':>14} {'samples':>8}")
    for shape, count in counts.items():
        print(f"{shape!s:>12} {shape.pixels(frame_step, spatial):>14} {count:>8}")
    print(
        f"{sum(counts.values())} samples in {output_dir / 'dataset'}, report in {output_dir / 'prepare_report.json'}"
    )


def parse_fps(text: str) -> Fraction:
    """Reads 16, 23.976 or 30000/1001."""
    try:
        fps = Fraction(text)
    except (ValueError, ZeroDivisionError):
        fps = Fraction(0)
    if fps <= 0:
        raise UserError(f"--fps must be a positive number such as 16, 23.976 or 30000/1001, but it is {text}.")
    return fps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--instance_data_root", type=Path, required=True, help="folder of pictures, clips and captions")
    add("--output_dir", type=Path, required=True, help="gets dataset/, prepare_report.json, empty_prompt_embeds")
    add("--pretrained_model_name_or_path", required=True, help="folder or Hub id of a Wan pipeline")
    add("--fps", required=True, help="frames a second of the samples: 16, 23.976 or 30000/1001")
    add("--video_resolution_buckets", nargs="+", required=True, metavar="FxHxW", help="in frames and pixels")
    add("--max_sequence_length", type=int, default=512, help="tokens of a caption, as WanPipeline's (default: 512)")
    add("--mixed_precision", choices=["no", "bf16"], default="no", help="bf16 runs the text encoder in bfloat16")
    add(
        "--overwrite",
        action="store_true",
        help="replace the dataset that is in output_dir, and the work of an unfinished run with other options",
    )
    args = parser.parse_args()
    datasets.disable_progress_bars()
    with exit_on_user_error(PROGRAM):
        try:
            prepare(args)
        except KeyboardInterrupt:
            print(f"{PROGRAM}: interrupted; the same command goes on from here", file=sys.stderr)
            sys.exit(130)


if __name__ == "__main__":
    main()
