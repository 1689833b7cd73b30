"""How do pictures, clips and captions become a dataset of latents and caption embeddings, for Wan or SD3?

python recipes/prepare_dataset.py --instance_data_root clips --output_dir prepared \\
    --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --fps 16 \\
    --video_resolution_buckets 1x480x832 33x480x832 81x480x832

`accelerate launch --num_processes 8 recipes/prepare_dataset.py ...` divides the work among the GPUs of a machine, or
of several that share output_dir. Every file is checked before anything is encoded, and what cannot be used is listed
then. Run it again after an interruption, or when files, captions, buckets or weights have changed: it encodes only
what is missing. docs/data.md describes the folder, the rules and the dataset.
"""

import argparse
import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import datasets
import torch
from data_folder import REPORT, Listing, list_samples, name_three, printable
from encoders import Family, find_family, load_media_encoder, load_text_encoder, outline, pipeline_folder
from fingerprints import FileRecords, describe_changes, digest, text_digest, write_whole
from hub_rows import unpack_dataset
from media import clips_cut, describe_resizing
from prepared_shards import (
    ShardWriter,
    compact,
    find_stored,
    make_index,
    open_earlier,
    read_tensors,
    replace_dataset,
)
from resolution_buckets import Bucket, automatic_buckets, parse_buckets
from run_folder import check_shared, only_run
from safetensors import safe_open
from safetensors.torch import save
from sample_plan import Planned, look_through, plan_samples, read_sample
from shared_work import check_alike, gather, in_threads, join_processes, on_main, own_share
from tqdm import tqdm
from training_arguments import at_least
from transformers import AutoTokenizer

from adaptiveload_hf.buckets.shapes import LatentShape, read_shapes, shape_counts
from adaptiveload_hf.distributed import all_ranks_fail_together
from adaptiveload_hf.errors import DISK_IS_FULL, UserError, exit_on_user_error
from adaptiveload_hf.tables import say_next

PROGRAM = "prepare_dataset.py"
EMPTY_PROMPT = "empty_prompt_embeds.safetensors"


def cut_captions(planned: list[Planned], tokenizer: Path, max_sequence_length: int) -> list[str]:
    """Files whose caption has more tokens than max_sequence_length; the pipelines cut them without a word."""
    tokenize = AutoTokenizer.from_pretrained(tokenizer)
    captions = {sample.row["caption"] for sample in planned}
    # verbose would warn of errors that the encoder, which cuts, does not have
    long = {caption for caption in captions if len(tokenize(caption, verbose=False).input_ids) > max_sequence_length}
    return [sample.row["file"] for sample in planned if sample.row["caption"] in long]


def encode(accelerator, work: list[tuple], load_encoder, get_input, output_dir: Path, unit: str) -> dict[str, str]:
    """Encodes this process's share of (key, item) into shards.

    Args:
        accelerator: of the launch.
        work: all that is to be encoded, the same on all processes.
        load_encoder: gives the function from input to tensors; called only where there is work.
        get_input: item -> input, in threads; a UserError says why it cannot be.
        output_dir: has the shards.
        unit: of the progress bar.

    Returns:
        Of all processes, key -> why it could not be encoded.
    """
    mine, failures, writer = own_share(accelerator, work), {}, ShardWriter(output_dir / "shards")
    if mine:
        encoder = load_encoder()
    share = f" (1 of {accelerator.num_processes} shares)" if accelerator.num_processes > 1 else ""
    inputs = in_threads(accelerator, lambda pair: get_input(pair[1]), mine)
    unseen = not accelerator.is_main_process or not mine
    for (key, _), found in tqdm(inputs, desc=f"encoding{share}", total=len(mine), unit=unit, disable=unseen):
        if isinstance(found, UserError):
            failures[key] = str(found)
            continue
        tensors = encoder(found)
        bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if bad:
            failures[key] = f"its {' and '.join(bad)} has NaN or infinity"
        else:
            writer.add(key, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    return {key: reason for of_rank in gather(accelerator, failures) for key, reason in of_rank.items()}


def needs_empty_prompt(path: Path, text_key: str) -> bool:
    """Whether the embedding of the empty caption is missing, or another text encoder's."""
    if not path.exists():
        return True
    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("text_encoder") != text_key


def save_empty_prompt(path: Path, tensors: dict[str, torch.Tensor], prompt_rows: int, text_key: str):
    """Writes the empty caption's embedding with as many rows as a sample's has when it is read."""
    embeds = tensors["prompt_embeds"]
    tensors["prompt_embeds"] = torch.cat(
        [embeds, embeds.new_zeros(max(prompt_rows - len(embeds), 0), embeds.shape[1])]
    )
    write_whole(path, save(tensors, metadata={"text_encoder": text_key}))


def prepare(args: argparse.Namespace, accelerator):
    """Does the whole work; the arguments are those of the command line."""
    fps = parse_fps(args.fps)
    family = find_family(args.pretrained_model_name_or_path, args.revision)
    if args.max_sequence_length is None:
        args.max_sequence_length = family.max_sequence_length
    if (args.instance_data_root is None) == (args.dataset_name is None):
        raise UserError("Give either --instance_data_root, a folder, or --dataset_name, a dataset of the Hub.")
    buckets = parse_buckets(args.video_resolution_buckets, family.grid)
    with only_run(accelerator, args.output_dir, "start one run on several GPUs with `accelerate launch`"):
        shards = len(list((args.output_dir / "shards").glob("*.tar")))
        check_shared(accelerator, args.output_dir, f"{shards} shards")
        own = {"instance_data_root", "output_dir", "pretrained_model_name_or_path"}
        check_alike(accelerator, {f"--{name}": str(value) for name, value in vars(args).items() if name not in own})
        encode_dataset(args, accelerator, family, fps, buckets)


def list_source(args: argparse.Namespace) -> tuple[Path, Listing]:
    """The folder that the samples' files are in, and what it holds."""
    if args.dataset_name is not None:
        folder = args.output_dir / "media"
        listing = unpack_dataset(
            args.dataset_name, args.dataset_config_name, args.video_column, args.caption_column, folder
        )
        return folder, listing
    root = args.instance_data_root
    return root, list_samples(root, args.video_column or "file_name", args.caption_column)


@dataclass(frozen=True)
class Plan:
    """The samples, the dataset of earlier runs, what embeddings are found by, and what is missing."""

    planned: list[Planned]
    before: datasets.Dataset | None
    text_key: str
    media: list[tuple[str, Planned]]
    captions: list[tuple[str, str]]


def make_plan(args, family: Family, folder: Path, planned_by, records: FileRecords, listing: Listing) -> Plan:
    """Compares what there is to encode with what is there.

    Args:
        args: of the command line.
        family, folder: of the pipeline.
        planned_by: (media key, text key) -> the samples.
        records, listing: of this run.
    """
    media_key = digest([records.folders(folder, family.media_parts), family.first_frame])
    text_key = digest([records.folders(folder, family.text_parts), args.max_sequence_length, args.mixed_precision])
    records.take([records.drain()])
    records.save(finished=True)
    planned = planned_by(media_key, text_key)
    print(f"{len(planned)} samples can be used, {len(listing.refused)} refused", file=sys.stderr)
    listing.say_what_is_missing({sample.row["file"] for sample in planned})
    source = str(args.instance_data_root or args.dataset_name)
    if not planned:
        raise UserError(f"{source} has no picture or clip that can be used. Expected at least one; see docs/data.md.")
    before = open_earlier(args.output_dir, source, [sample.row["file"] for sample in planned], args.overwrite)
    stored = find_stored(args.output_dir, before)
    media = {sample.keys["latent"]: sample for sample in planned if sample.keys["latent"] not in stored}
    captions = {sample.keys["text"]: sample.row["caption"] for sample in planned}
    if needs_empty_prompt(args.output_dir / EMPTY_PROMPT, text_key):
        captions[text_digest("", text_key)] = ""
    captions = [(key, caption) for key, caption in captions.items() if key not in stored]
    missing = sum(sample.keys["latent"] in media for sample in planned)
    print(f"{missing} samples and {len(captions)} captions to encode", file=sys.stderr)
    return Plan(planned, before, text_key, sorted(media.items(), key=lambda pair: pair[1].bucket), captions)


def encode_dataset(args, accelerator, family: Family, fps: Fraction, buckets: list[Bucket] | None):
    """All that needs output_dir."""
    root, listing = on_main(accelerator, lambda: list_source(args))
    records = FileRecords(args.output_dir / "prepare_files.json")
    largest = Bucket(args.max_num_frames, args.height, args.width)
    longest = largest.frames if buckets is None else max(bucket.frames for bucket in buckets)
    seen = look_through(accelerator, root, listing, fps, longest, records)
    if buckets is None:
        buckets = automatic_buckets([found.footage for found in seen], family.grid, largest)
    with accelerator.main_process_first():
        folder = pipeline_folder(args.pretrained_model_name_or_path, family, args.revision)
    check_alike(accelerator, {"pipeline": outline(folder, family)})  # machines may have copies of their own
    plan = None
    if accelerator.is_main_process:
        plan = make_plan(args, family, folder, partial(plan_samples, seen, listing, buckets, fps), records, listing)
    media, captions = on_main(accelerator, lambda: (plan.media, plan.captions))

    def load_texts():
        dtype = torch.bfloat16 if args.mixed_precision == "bf16" else torch.float32
        return load_text_encoder(folder, family, accelerator.device, dtype, args.max_sequence_length)

    def load_media():
        return load_media_encoder(folder, family, accelerator.device)

    # One after the other, so that a GPU holds either the text encoders or the VAE.
    failures = encode(accelerator, captions, load_texts, lambda caption: caption, args.output_dir, "caption")
    failures |= encode(accelerator, media, load_media, partial(read_sample, root), args.output_dir, "sample")
    if accelerator.is_main_process:
        finish(args, family, folder, plan, listing, failures)
    accelerator.wait_for_everyone()


def finish(args, family: Family, folder: Path, plan: Plan, listing: Listing, failures: dict[str, str]):
    """Makes what is encoded the dataset, and reports."""
    output_dir, stored = args.output_dir, find_stored(args.output_dir, plan.before)
    kept = []
    for sample in plan.planned:
        reasons = [failures.get(key, "it was not encoded") for key in sample.keys.values() if key not in stored]
        if reasons:
            listing.refuse(sample.row["file"], "; ".join(reasons))
        else:
            kept.append(sample)
    if not kept:
        raise UserError("No sample could be encoded, for the reasons listed above.")
    if needs_empty_prompt(output_dir / EMPTY_PROMPT, plan.text_key):
        key = text_digest("", plan.text_key)
        if key not in stored:
            raise UserError(f"The empty caption could not be encoded: {failures[key]}.")
        tensors = read_tensors(output_dir, stored[key])
        save_empty_prompt(output_dir / EMPTY_PROMPT, tensors, args.max_sequence_length, plan.text_key)
    rows = [sample.row for sample in kept]
    changes = describe_changes(plan.before, rows, listing.refused)
    places = compact(output_dir, {key for sample in kept for key in sample.keys.values()}, stored)
    index = make_index(rows, places, args.max_sequence_length)
    cut = cut_captions(kept, folder / family.tokenizer, args.max_sequence_length)
    seen = [(sample.row["file"], sample.seen.footage, sample.bucket) for sample in kept]
    resized, shortened = describe_resizing(seen), clips_cut(seen)
    used = {row["file"] for row in rows}
    listing.without_caption = [file for file in listing.without_caption if file in used]
    more = {**changes, "resized": resized, "clips_cut": shortened, "captions_cut": cut}
    counts = write_report(output_dir, index, listing, more)
    replace_dataset(output_dir, index, plan.before)
    print_changes(changes)
    if cut:
        print(f"captions cut to {args.max_sequence_length} tokens: {name_three(cut)}", file=sys.stderr)
    print_resizing(resized["enlarged"], resized["cropped_by_a_third"])
    if shortened:
        print(
            f"more than a third of their frames is left over: {name_three(shortened)}. Only their start is used. Cut "
            "them into shorter clips, or give longer buckets (for auto a larger --max_num_frames).",
            file=sys.stderr,
        )
    print_buckets(counts, family)
    print(f"{len(index)} samples in {output_dir / 'dataset'}, report in {output_dir / REPORT}", file=sys.stderr)
    say_next("adaptiveload", "scan", str(output_dir))


def write_report(output_dir: Path, index: datasets.Dataset, listing: Listing, more: dict) -> dict[LatentShape, int]:
    """Writes prepare_report.json and returns its samples per latent shape."""
    counts = shape_counts(read_shapes(index))
    report = {
        "samples": len(index),
        **more,
        "refused": listing.refused,
        "buckets": {str(shape): count for shape, count in counts.items()},
        "without_caption": listing.without_caption,
        "texts_without_file": listing.texts_without_file,
        "hidden_files": listing.hidden,
        "other_files": dict(listing.other_files),
    }
    write_whole(output_dir / REPORT, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())
    return counts


def print_changes(changes: dict):
    for name in ("redone", "removed"):
        for entry in changes[name]:
            print(f"{name} {printable(entry['file'])}: {entry['reason']}", file=sys.stderr)
    numbers = (changes["kept"], changes["added"], len(changes["redone"]), len(changes["removed"]))
    print("{} samples kept, {} added, {} redone, {} removed".format(*numbers), file=sys.stderr)


def print_resizing(enlarged: list[str], most_cropped: list[str]):
    """Automatic buckets follow --height and --width, not the files, and spare none for a few upright clips among many
    wide ones: the first are blurred, of the others what is in them may be lost.
    """
    if enlarged:
        print(
            f"enlarged to fill their bucket: {name_three(enlarged)}. Smaller buckets, or for auto a lower --height "
            "and --width, would keep their size.",
            file=sys.stderr,
        )
    if most_cropped:
        print(
            f"more than a third of their picture is cut away: {name_three(most_cropped)}. A bucket of their aspect "
            "ratio would keep it.",
            file=sys.stderr,
        )


def print_buckets(counts: dict[LatentShape, int], family: Family):
    print(f"{'latent shape':>12} {'pixels':>14} {'samples':>8}")
    for shape, count in counts.items():
        print(f"{shape!s:>12} {shape.pixels(family.grid.frame_step, family.spatial):>14} {count:>8}")


def parse_fps(text: str) -> Fraction:
    """Reads 16, 23.976 or 30000/1001."""
    try:
        fps = Fraction(text)
    except (ValueError, ZeroDivisionError):
        fps = Fraction(0)
    if fps <= 0:
        raise UserError(f"--fps must be a positive number such as 16, 23.976 or 30000/1001, but it is {text}.")
    return fps


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--instance_data_root", type=Path, help="folder of pictures, clips and captions")
    add("--dataset_name", help="instead of a folder: a Hub dataset, whose split train has images or videos")
    add("--dataset_config_name", help="configuration of the Hub dataset")
    add("--video_column", help="its column of images or videos; of metadata files: of file names (file_name)")
    add("--caption_column", default="text", help="column of captions, of either (default: %(default)s)")
    add("--output_dir", type=Path, required=True, help="folder for dataset/, shards/ and a report")
    add("--pretrained_model_name_or_path", required=True, help="folder or Hub id of a Wan or SD3 pipeline")
    add("--revision", help="branch, tag or commit of the Hub id; train with the same one")
    add("--fps", default="16", help="frames per second to sample, as 23.976 or 30000/1001 (default: %(default)s)")
    add(
        "--video_resolution_buckets",
        nargs="+",
        default=["auto"],
        metavar="FxHxW",
        help="in frames and pixels; auto (the default) chooses from the data within the next three",
    )
    add("--max_num_frames", type=at_least(1), default=81, help="longest automatic bucket (default: %(default)s)")
    add(
        "--height",
        type=at_least(1),
        default=480,
        help="times --width: most pixels of automatic buckets (default: %(default)s)",
    )
    add("--width", type=at_least(1), default=832, help="see --height (default: %(default)s)")
    add("--max_sequence_length", type=at_least(1),
        help="tokens of a caption, as for the pipeline (default: Wan 512, SD3 256)")  # fmt: skip
    add("--mixed_precision", choices=["no", "bf16"], default="no", help="bf16 runs the text encoders in bfloat16")
    add(
        "--overwrite",
        action="store_true",
        help="replace a dataset in output_dir most of whose files are gone, or of an earlier version of the recipe",
    )
    return parser.parse_args()


def main():
    args = parse_args()
    datasets.disable_progress_bars()
    with exit_on_user_error(PROGRAM):
        accelerator = join_processes()
        try:
            with all_ranks_fail_together(accelerator), disk_errors_named(args.output_dir):
                prepare(args, accelerator)
        except KeyboardInterrupt:
            print(f"{PROGRAM}: interrupted; the same command goes on from here", file=sys.stderr)
            sys.exit(130)
    accelerator.end_training()


@contextmanager
def disk_errors_named(output_dir: Path):
    """Turns a disk that is full into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_IS_FULL:
            raise
        raise UserError(
            f"{output_dir} cannot be written: {error.strerror or error}. What is encoded is kept: make room and give "
            "the same command again."
        ) from error


if __name__ == "__main__":
    main()
