"""How does a folder of pictures, clips and captions become a dataset of latents and caption embeddings for Wan?

python recipes/prepare_dataset.py --instance_data_root clips --output_dir prepared \\
    --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --fps 16 \\
    --video_resolution_buckets 1x480x832 33x480x832 81x480x832

Every file is looked through before anything is encoded, and what cannot be used is listed then. Given again, after an
interruption or when files, captions, buckets or weights have changed, it encodes only what that takes. docs/data.md
describes the folder, the rules and the dataset.
"""

import argparse
import json
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
from fingerprints import FileRecords, describe_changes, digest, fingerprint
from huggingface_hub import snapshot_download
from media import Bucket, Footage, choose_bucket, read
from prepared_rows import EarlierRows, open_earlier, replace_dataset, save_dataset, save_part
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoTokenizer, UMT5EncoderModel

from adaptiveload_hf.buckets.shapes import LatentShape, read_shapes, shape_counts
from adaptiveload_hf.errors import UserError, exit_on_user_error

PROGRAM = "prepare_dataset.py"
SAMPLES_PER_PART = 32  # what an interrupted run loses at most, and what it holds in memory


@dataclass(frozen=True)
class Planned:
    """A sample that can be encoded."""

    file: str
    caption: str
    footage: Footage
    bucket: Bucket
    content: str


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


def pipeline_sizes(pipeline: str) -> tuple[int, int, int]:
    """The VAE's temporal and spatial compression and the transformer's patch in pixels, from the configs alone."""
    try:
        vae = AutoencoderKLWan.load_config(pipeline, subfolder="vae")
        transformer = WanTransformer3DModel.load_config(pipeline, subfolder="transformer")
    except OSError as error:
        raise UserError(f"{pipeline} must be the folder or Hub id of a Wan pipeline: {error}") from error
    if vae.get("_class_name") != "AutoencoderKLWan":
        raise UserError(f"{pipeline} must be a Wan pipeline, but its VAE is {vae.get('_class_name')}.")
    spatial = vae.get("scale_factor_spatial", 8)
    return vae.get("scale_factor_temporal", 4), spatial, spatial * transformer["patch_size"][1]


def pipeline_folder(pipeline: str) -> Path:
    """Where the files of the pipeline's VAE and text encoder are; from the Hub they are downloaded if need be."""
    if Path(pipeline).is_dir():
        return Path(pipeline)
    return Path(snapshot_download(pipeline, allow_patterns=["vae/*", "text_encoder/*", "tokenizer/*"]))


def plan_samples(
    root: Path, listing: Listing, fps: Fraction, buckets: list[Bucket], records: FileRecords
) -> list[Planned]:
    """Looks through every file and chooses its bucket; what cannot be used is refused in the listing."""
    longest = max(bucket.frames for bucket in buckets)
    planned = []
    for file, caption in tqdm(listing.captions.items(), desc="looking through files", unit="file"):
        try:
            content = records.content(root / file)
            footage = records.footage(root / file, content, fps, longest)
            planned.append(Planned(file, caption, footage, choose_bucket(footage, buckets), content))
        except UserError as error:
            listing.refuse(file, str(error))
    return planned


class Encoder:
    """The VAE and text encoder of a Wan pipeline, used as WanPipeline uses them."""

    def __init__(self, pipeline: Path, max_sequence_length: int, text_dtype: torch.dtype):
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


def cut_captions(planned: list[Planned], folder: Path, max_sequence_length: int) -> list[str]:
    """Files whose caption has more tokens than max_sequence_length; WanPipeline cuts them without a word."""
    tokenizer = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
    return [sample.file for sample in planned if len(tokenizer(sample.caption).input_ids) > max_sequence_length]


def encode_sample(root: Path, sample: Planned, row: dict, encoder: Encoder, earlier: EarlierRows) -> dict:
    """Adds to a row its latent and embedding, encoded or from an earlier row; a UserError says why that cannot be."""
    encode = {
        "latent": lambda: encoder.latent(read(root / sample.file, sample.footage, sample.bucket)),
        "prompt_embeds": lambda: encoder.prompt_embeds(sample.caption),
    }
    columns = {}
    for name in encode:
        columns[name] = earlier.tensor(name, row)
        if columns[name] is None:
            tensor = encode[name]()
            if not tensor.isfinite().all():
                raise UserError(f"its {name.replace('prompt_embeds', 'caption embedding')} has NaN or infinity")
            # Arrow has no bfloat16: the raw bytes, read back with torch.frombuffer.
            data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            columns[name] = {name: data, f"{name}_shape": list(tensor.shape), f"{name}_dtype": "bfloat16"}
    return {**row, **columns["latent"], **columns["prompt_embeds"], "latent_normalized": True}


def encode_missing(
    root: Path,
    missing: list[tuple[Planned, dict]],
    encoder: Encoder,
    earlier: EarlierRows,
    work: Path,
    listing: Listing,
    records: FileRecords,
):
    """Encodes samples and saves them in parts that are whole or not there; `earlier` has them then."""
    rows = []
    for number, (sample, row) in enumerate(tqdm(missing, desc="encoding", unit="sample"), start=1):
        try:
            row = encode_sample(root, sample, row, encoder, earlier)
            if records.has_changed(root / sample.file):
                raise UserError("it was changed while this ran; give the same command again")
            earlier.remember(row)
            rows.append(row)
        except UserError as error:
            listing.refuse(sample.file, str(error))
        if rows and (len(rows) == SAMPLES_PER_PART or number == len(missing)):
            earlier.add(save_part(rows, work))
            rows = []


def write_report(output_dir: Path, dataset: datasets.Dataset, listing: Listing, changes: dict, cut: list[str]):
    """Writes prepare_report.json and returns its samples per latent shape."""
    counts = shape_counts(read_shapes(dataset))
    report = {
        "samples": len(dataset),
        **changes,
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


def needs_empty_prompt(path: Path, text_encoder: str) -> bool:
    """Whether the embedding of the empty caption is missing, or another text encoder's."""
    if not path.exists():
        return True
    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("text_encoder") != text_encoder


def prepare(args: argparse.Namespace):
    """Does the whole work; the arguments are those of the command line."""
    root, output_dir = args.instance_data_root, args.output_dir
    if args.max_sequence_length < 1:
        raise UserError(f"--max_sequence_length must be 1 or more, but it is {args.max_sequence_length}.")
    fps = parse_fps(args.fps)
    temporal, spatial, pixel_step = pipeline_sizes(args.pretrained_model_name_or_path)
    buckets = parse_buckets(args.video_resolution_buckets, temporal, pixel_step)
    listing, records = list_samples(root), FileRecords(output_dir / "prepare_files.json")
    planned = plan_samples(root, listing, fps, buckets, records)
    print(f"{len(planned)} samples can be used, {len(listing.refused)} refused", file=sys.stderr)
    if not planned:
        raise UserError(f"{root} has no picture or clip that can be used. Expected at least one; see docs/data.md.")
    before, earlier = open_earlier(output_dir, root, [sample.file for sample in planned], args.overwrite)

    folder = pipeline_folder(args.pretrained_model_name_or_path)
    vae = records.folders(folder, ["vae"])
    text_encoder = records.folders(folder, ["text_encoder", "tokenizer"])
    text_encoder = digest([text_encoder, args.max_sequence_length, args.mixed_precision])
    records.save()
    rows = [
        {
            "file": sample.file,
            "caption": sample.caption,
            "fingerprint": fingerprint(sample.content, sample.footage, sample.bucket, vae, text_encoder),
        }
        for sample in planned
    ]
    missing = [pair for pair in zip(planned, rows) if earlier.position(pair[1]) is None]
    print(f"{len(missing)} samples to encode, {len(rows) - len(missing)} are there", file=sys.stderr)
    empty_prompt = output_dir / "empty_prompt_embeds.safetensors"
    if missing or needs_empty_prompt(empty_prompt, text_encoder):
        text_dtype = torch.bfloat16 if args.mixed_precision == "bf16" else torch.float32
        encoder = Encoder(folder, args.max_sequence_length, text_dtype)
        encode_missing(root, missing, encoder, earlier, output_dir / "unfinished", listing, records)
        rows = [row for row in rows if earlier.position(row) is not None]
        if not rows:
            raise UserError("No sample could be encoded, for the reasons listed above.")
        tensors = {"prompt_embeds": encoder.prompt_embeds("")}
        save_file(tensors, empty_prompt, metadata={"text_encoder": text_encoder})
    changes = describe_changes(before, rows, listing.refused)
    order = [earlier.position(row) for row in rows]
    same = before is not None and order == list(range(len(before)))
    dataset = before if same else save_dataset(output_dir, order, earlier)
    counts = write_report(
        output_dir, dataset, listing, changes, cut_captions(planned, folder, args.max_sequence_length)
    )
    if not same:
        replace_dataset(output_dir)
    shutil.rmtree(output_dir / "unfinished", ignore_errors=True)
    print_changes(changes)
    print_buckets(counts, output_dir, temporal, spatial)


def print_changes(changes: dict):
    for name in ("redone", "removed"):
        for entry in changes[name]:
            print(f"{name} {entry['file']}: {entry['reason']}", file=sys.stderr)
    numbers = (changes["kept"], changes["added"], len(changes["redone"]), len(changes["removed"]))
    print("{} samples kept, {} added, {} redone, {} removed".format(*numbers), file=sys.stderr)


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
        help="replace a dataset in output_dir that is not of these files, or not of this version of the recipe",
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
