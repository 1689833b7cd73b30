"""`adaptiveload report`: how do fit, plan, load of the ranks and a run look?"""

import warnings
from pathlib import Path
from typing import Annotated

import typer

from ..tables import say
from .arguments import Accumulation, WorldSize, ranks_of


def report(
    config: Annotated[str, typer.Option(metavar="CONFIG", help="Bucket config: a folder or a Hub id.")],
    dataset: Annotated[Path, typer.Option(metavar="PREPARED", help="Output folder of prepare_dataset.py.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The HTML file to write.")],
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="Output folder of a training run.")] = None,
    world_size: WorldSize = None,
    gradient_accumulation_steps: Accumulation = None,
):
    """Write one HTML file: cost fit, bucket table, load of the ranks before and after, loss.

    \b
    Example:
      adaptiveload report --config config --dataset prepared --run run --output report.html
    """
    from ..buckets.shapes import read_shapes
    from ..buckets.sources import load_prepared
    from ..config import BucketConfig
    from ..report import write_report

    loaded = BucketConfig.from_pretrained(config)
    ranks = ranks_of(loaded, world_size, gradient_accumulation_steps)
    for problem in write_report(output, loaded, read_shapes(load_prepared(dataset)), run=run, **ranks):
        warnings.warn(problem, stacklevel=1)
    say("next: open the report in a browser")
    print(output)
