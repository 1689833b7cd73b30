"""`adaptiveload report`: how do cost, plan, load of the ranks and a run look?"""

import warnings
from pathlib import Path
from typing import Annotated

import typer

from ..tables import print_json, say_next
from .arguments import (
    Accumulation,
    AsJson,
    Config,
    Dataset,
    Extrapolate,
    MemoryLimit,
    Revision,
    SamplesPerStep,
    Shapes,
    WorldSize,
    load,
    ranks_of,
)


def report(
    config: Config,
    output: Annotated[Path, typer.Option(metavar="FILE", help="The HTML file to write.")],
    dataset: Dataset = None,
    shapes: Shapes = None,
    revision: Revision = None,
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="Output folder of a training run.")] = None,
    world_size: WorldSize = None,
    gradient_accumulation_steps: Accumulation = None,
    memory_limit_gib: MemoryLimit = None,
    samples_per_step: SamplesPerStep = None,
    allow_extrapolation: Extrapolate = False,
    as_json: AsJson = False,
):
    """Write one HTML page about cost, plan, ranks and a run.

    It shows the load of the ranks before and after, the bucket table, the cost fit, and the progress of a run. The
    pictures are in the page, and as PNG files in a folder beside it.

    \b
    Example:
      adaptiveload report config --dataset prepared --run run --output report.html
    """
    from ..report import write_report

    loaded, samples = load(config, dataset, shapes, revision)
    ranks = ranks_of(loaded, world_size, gradient_accumulation_steps)
    limits = {"memory_limit_gib": memory_limit_gib, "samples_per_step": samples_per_step}
    options = {**ranks, **limits, "allow_extrapolation": allow_extrapolation}
    written, problems = write_report(output, loaded, samples.counts, run=run, vae_scale=samples.vae_scale, **options)
    for problem in problems:
        warnings.warn(problem, stacklevel=1)
    if as_json:
        print_json({"files": [str(path) for path in written], "problems": problems})
    else:
        print(*written, sep="\n")
    say_next("python", "-m", "webbrowser", str(output.resolve()))
