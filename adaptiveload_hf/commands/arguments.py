"""Which arguments do several commands take, and what do they stand for?"""

import json
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from ..errors import UserError
from ..tables import say, say_next

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="Bucket config: a folder or a Hub id (user/repo).")]
Dataset = Annotated[str | None, typer.Option(metavar="DATASET", help="Dataset: whatever `adaptiveload scan` accepts.")]
Shapes = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help='Instead of --dataset: JSON {"21x60x104": samples, ...}, or what scan --json prints.'
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id. Default: main.")]
WorldSize = Annotated[int | None, typer.Option(min=1, help="Number of data ranks. Default: as measured.")]
Accumulation = Annotated[int | None, typer.Option(min=1, help="Micro-steps per optimizer step. Default: as measured.")]
MemoryLimit = Annotated[float | None, typer.Option(min=0.1, help="Memory limit per GPU. Default: 90% of its memory.")]
TargetSeconds = Annotated[str, typer.Option(metavar="SECONDS|auto", help="Longest time of a micro-batch.")]
SamplesPerStep = Annotated[
    float | None, typer.Option(min=1, help="Choose that time so that an optimizer step holds about this many samples.")
]
Extrapolate = Annotated[
    bool, typer.Option("--allow-extrapolation", help="Allow shapes outside the measured range of tokens.")
]
PatchSize = Annotated[str, typer.Option(metavar="FxHxW", help="The model's patch size.")]
TextTokens = Annotated[int, typer.Option(min=0, help="Text tokens that join the attention (Wan: 0).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class Samples(NamedTuple):
    """Samples by `LatentShape`, and the frames and pixels that one latent stands for, if it is said."""

    counts: dict
    vae_scale: tuple | None


def load(config, dataset, shapes, revision):
    """(BucketConfig, Samples)."""
    from ..config import BucketConfig
    from ..scan import scan

    if (dataset is None) == (shapes is None):
        raise typer.BadParameter("give either --dataset DATASET or --shapes FILE")
    loaded = BucketConfig.from_pretrained(config, revision=revision)
    known = tuple(loaded.model.get("vae_scale", ()))
    if dataset is None:
        samples = read_samples(shapes)
        return loaded, _of_one_vae(samples._replace(vae_scale=samples.vae_scale or known or None), known, shapes)
    found = scan(dataset)
    for problem in found.problems:
        say(f"not counted: {problem}")
    if found.kind == "clips and pictures":
        say("clips and pictures are counted in the largest shape that they fill; prepare them before training")
    return loaded, _of_one_vae(Samples(found.counts, found.vae_scale), known, dataset)


def _of_one_vae(samples, known, source):
    """The samples, refused if their shapes are of another VAE than that of the config's model."""
    if known and samples.vae_scale != known:
        here, there = (f"{frames} frames and {pixels} pixels" for frames, pixels in (samples.vae_scale, known))
        raise UserError(
            f"A latent of {source} stands for {here}, but for the config's model for {there}. Prepare the data with "
            "that model (recipes/prepare_dataset.py), or give a config of the model they are for."
        )
    return samples


def read_samples(path):
    """Samples of the JSON file that --shapes names."""
    from ..buckets.shapes import LatentShape
    from ..config_file import take_once

    if not path.exists() or path.is_dir():  # a pipe is as good as a file
        raise UserError(f'There is no file {path}. --shapes takes a JSON file such as {{"21x60x104": 120}}.')
    try:
        counts = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=take_once(path))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f'{path} is no JSON ({error}). It must read like {{"21x60x104": 120}}.') from None
    scanned = counts if isinstance(counts, dict) and "shapes" in counts else {"shapes": counts}
    counts, scale = scanned["shapes"], scanned.get("vae_scale", ())
    if not isinstance(counts, dict) or not counts:
        raise UserError(f'{path} must hold a JSON object with shapes, such as {{"21x60x104": 120}}.')
    whole = isinstance(scale, list) and len(scale) == 2 and all(type(n) is int and 0 < n <= 1024 for n in scale)
    if "vae_scale" in scanned and not whole:
        raise UserError(f"{path}: vae_scale is two whole numbers such as [4, 8], but is {scale!r}. Leave it out.")
    for shape, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or not 0 < count < 1 << 31:
            raise UserError(
                f"{path}: the samples of {shape} must be a positive whole number, below 2^31, but are {count!r}."
            )
    return Samples({LatentShape.parse(shape): count for shape, count in counts.items()}, tuple(scale) or None)


def ranks_of(config, world_size, gradient_accumulation_steps):
    """Those given, else those of the measurement, which is said."""
    given = {"world_size": world_size, "gradient_accumulation_steps": gradient_accumulation_steps}
    for name, value in given.items():
        if value is None:
            given[name] = config.environment.get(name)
            option = "--" + name.replace("_", "-")
            if given[name] is None:
                raise UserError(f"The config does not say its {name}. Pass {option}.")
            say(f"{option} {given[name]}, as measured")
    return given


def check_policies(config, policies):
    """No option gives batch sizes, so `fixed` needs those of the config."""
    if "fixed" in policies and not config.batch_sizes:
        raise UserError(
            "--policy fixed takes the config's own batch sizes (adaptiveload count --batch-size), but this config has "
            "none. Take dual, equal_token or equal_time."
        )


def parse_target(text):
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"--target-seconds takes a number or auto, not {text!r}") from None


def source_options(dataset, shapes):
    return ("--dataset", str(dataset)) if dataset is not None else ("--shapes", str(shapes))


def rank_options(ranks):
    return [word for name, value in ranks.items() for word in ("--" + name.replace("_", "-"), str(value))]


def say_next_plan(config, environment, *options):
    """The next command is `plan` on the measured ranks, or where the config does not say them on usual ones."""
    usual = {"world_size": 8, "gradient_accumulation_steps": 1}
    ranks = {name: environment.get(name) or number for name, number in usual.items()}
    say_next("adaptiveload", "plan", config, "--dataset", "DATASET", *rank_options(ranks), *options)


def parse_geometry(patch_size, text_tokens):
    from ..buckets.shapes import TokenGeometry

    try:
        frames, height, width = map(int, patch_size.split("x"))
    except ValueError:
        raise typer.BadParameter(f"--patch-size takes three numbers such as 1x2x2, not {patch_size!r}") from None
    return TokenGeometry((frames, height, width), text_tokens)
