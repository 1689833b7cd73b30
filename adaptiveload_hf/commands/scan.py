"""`adaptiveload scan`: which shapes does a dataset hold, and how many samples of each?"""

from typing import Annotated

import typer

from ..errors import UserError
from ..tables import print_json, print_table, say, say_next
from .arguments import AsJson, PatchSize, TextTokens, parse_geometry

_MOST_BUCKETS = 8  # with more shapes, prepare_dataset.py chooses few that fit the data


def scan(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="Folder, tar file, or Hub id of a dataset.")],
    fps: Annotated[float, typer.Option(min=0.1, help="Frames per second at which clips are sampled.")] = 16.0,
    patch_size: PatchSize = "1x2x2",
    text_tokens: TextTokens = 0,
    as_json: AsJson = False,
):
    """Count the samples of each shape in a dataset.

    DATASET is a prepared dataset, cached latents, tar shards, clips, or a dataset on the Hub; only headers are read.
    `plan`, `simulate` and `report` take the output of --json as --shapes FILE. Clips and pictures are counted in the
    largest shape that they fill: 4n+1 frames, at most 81, multiples of 16 pixels.

    \b
    Example:
      adaptiveload scan prepared
      adaptiveload scan clips --fps 24
      adaptiveload scan user/latents --json > shapes.json
    """
    from ..scan import scan as scan_source

    geometry = parse_geometry(patch_size, text_tokens)
    found = scan_source(dataset, fps=fps)
    rows = [_row(shape, count, found, geometry) for shape, count in found.counts.items()]
    samples = sum(found.counts.values())
    for problem in found.problems:
        # A name may hold line ends and what steers a terminal.
        say(f"not counted: {problem if problem.isprintable() else ascii(problem)[1:-1]}")
    if as_json:
        shapes = {str(shape): count for shape, count in found.counts.items()}
        facts = {"kind": found.kind, "samples": samples, "vae_scale": found.vae_scale, "shapes": shapes}
        print_json({**facts, "buckets": rows, "problems": list(found.problems)})
    else:
        cells = [
            (row["shape"], row["pixels"], row["tokens"] or "-", row["samples"], f"{row['samples'] / samples:.1%}")
            for row in rows
        ]
        print_table(("shape", "pixels", "tokens", "samples", "share"), cells)
    not_counted = f", {len(found.problems)} files not counted" if found.problems else ""
    say(f"{found.kind}: {samples} samples in {len(rows)} shapes{not_counted}")
    if not all(row["tokens"] for row in rows):
        say(f"-: no multiple of the patch size {patch_size}")
    _say_next(dataset, found, rows)


def _row(shape, count, found, geometry):
    try:
        tokens = geometry.tokens(shape)
    except UserError:
        tokens = None
    return {"shape": str(shape), "pixels": shape.pixels(*found.vae_scale), "tokens": tokens, "samples": count}


def _say_next(dataset, found, rows):
    model = ("--pretrained_model_name_or_path", "PIPELINE")
    if found.kind == "clips and pictures":
        sizes = [row["pixels"] for row in rows] if len(rows) <= _MOST_BUCKETS else ["auto"]
        folders = ("--instance_data_root", dataset, "--output_dir", "prepared")
        say_next("python", "recipes/prepare_dataset.py", *folders, *model, "--video_resolution_buckets", *sizes)
    elif found.kind == "prepared dataset":
        folders = ("--dataset", dataset, "--output_dir", "config")
        launch = ("--config_file", "accelerate_configs/fsdp2.yaml", "--num_processes", "GPUS")
        say_next("accelerate", "launch", *launch, "recipes/benchmark_shapes.py", *folders, *model)
    else:
        say_next("adaptiveload", "plan", "CONFIG", "--dataset", dataset, "--world-size", "8")
