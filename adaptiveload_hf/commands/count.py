"""`adaptiveload count`: what does a step cost in proportion, by the FLOPs of the model's config?"""

import re
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UserError
from ..tables import print_json, print_table, say, say_next
from .arguments import AsJson


def count(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Transformer or pipeline: folder, config.json or Hub id.")
    ],
    output: Annotated[Path, typer.Option(metavar="CONFIG", help="Folder for the bucket config.")],
    batch_size: Annotated[
        list[str] | None,
        typer.Option(metavar="SHAPE=B", help="Batch size that your training uses, as the plan; repeatable."),
    ] = None,
    text_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens of the prompt. Default: the model family's usual number.")
    ] = None,
    as_json: AsJson = False,
):
    """Write a bucket config without any measurement.

    The cost is proportional to the FLOPs of a transformer's config. That is enough to balance ranks, but predicts no
    seconds or GiB.

    \b
    Example:
      adaptiveload count Wan-AI/Wan2.1-T2V-1.3B-Diffusers --output counted --batch-size 1x60x104=16 \\
        --batch-size 21x60x104=1
    """
    from ..config import BucketConfig

    sizes = _parse_batch_sizes(batch_size or ())
    config = BucketConfig.from_flops(_config_path(model), batch_sizes=sizes or None, text_tokens=text_tokens)
    config.save_pretrained(output)
    law = config.cost_model.parameters
    if as_json:
        print_json({"model": config.model, "cost_model": config.config["cost_model"], "batch_sizes": sizes})
    else:
        header = ("model", "kind", *law)
        print_table(header, [(config.model["class"], config.cost_model.kind, *(f"{n:.4g}" for n in law.values()))])
    say(f"counted, not measured; the bucket config is in {output}")
    ranks = ("--world-size", "8", "--gradient-accumulation-steps", "1")
    say_next("adaptiveload", "simulate", str(output), "--dataset", "DATASET", *ranks)


def _parse_batch_sizes(options):
    sizes = {}
    for words in options:
        shape, _, size = words.partition("=")
        if not re.fullmatch("[0-9]{1,10}", size) or int(size) < 1:
            raise UserError(f"--batch-size takes a shape and a number, such as 21x60x104=1, but found {words[:80]!r}.")
        if shape in sizes:
            raise UserError(f"--batch-size was given twice for {shape}: {sizes[shape]} and {size}. Keep one.")
        sizes[shape] = int(size)
    return sizes


def _config_path(model):
    """The folder with the transformer's config.json; of a Hub id only that file is fetched."""
    from ..hub import download

    folder = Path(model)
    if not folder.exists():
        folder = download(model, ["config.json", "transformer/config.json"], revision=None)
    folder = folder.parent if folder.is_file() else folder
    return folder / "transformer" if (folder / "transformer" / "config.json").is_file() else folder
