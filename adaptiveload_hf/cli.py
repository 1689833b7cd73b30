"""What does `adaptiveload fit | plan | simulate | report` parse, call and print? Tables on stdout, words on stderr."""

import json
import shlex
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .errors import UserError, exit_on_user_error

app = typer.Typer(
    help="Fit what a training step costs, plan batch sizes, predict the gain, and look at a run.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="Bucket config: a folder or a Hub id (user/repo).")]
Dataset = Annotated[Path | None, typer.Option(metavar="PREPARED", help="Output folder of prepare_dataset.py.")]
Shapes = Annotated[Path | None, typer.Option(metavar="FILE", help='Instead: JSON {"21x60x104": samples, ...}.')]
WorldSize = Annotated[int | None, typer.Option(min=1, help="Data ranks. Default: those of the measurement.")]
Accumulation = Annotated[
    int | None, typer.Option(min=1, help="Micro-steps in an optimizer step. Default: those of the measurement.")
]
MemoryLimit = Annotated[float | None, typer.Option(min=0.1, help="Default: 90% of the measured GPU's memory.")]
TargetSeconds = Annotated[str, typer.Option(metavar="SECONDS|auto", help="Largest time of a micro-batch.")]
Extrapolate = Annotated[bool, typer.Option(help="Allow shapes outside the measured range of tokens.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main():
    """Run the command line; a UserError ends it with one line and status 1."""
    sys.stdout.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *_, **__: _say(f"adaptiveload: warning: {message}")
    with exit_on_user_error("adaptiveload"):
        app()


@app.command()
def fit(
    measurements: Annotated[Path, typer.Argument(metavar="MEASUREMENTS", help="measurements.jsonl of a benchmark.")],
    output: Annotated[Path, typer.Option(metavar="CONFIG", help="Folder for the bucket config.")],
    patch_size: Annotated[str, typer.Option(metavar="FxHxW", help="The model's patch size.")] = "1x2x2",
    text_tokens: Annotated[int, typer.Option(min=0, help="Text tokens that join the attention (Wan: 0).")] = 0,
    as_json: AsJson = False,
):
    """Fit the cost and memory laws to measurements and write a bucket config.

    Model and set-up are taken over from a bucket_config.json beside the measurements, if there is one.

    \b
    Example:
      adaptiveload fit config/measurements.jsonl --output config
    """
    from .buckets.cost import read_measurements
    from .config import BucketConfig
    from .config_file import CONFIG_FILE

    measured, problems = read_measurements(measurements)
    for problem in problems:
        warnings.warn(f"{problem} The other lines are used.", stacklevel=1)
    origin = {"model": {}, "environment": {}}
    if measurements.with_name(CONFIG_FILE).is_file():
        known = BucketConfig.from_pretrained(measurements.parent)
        origin = {"model": known.model, "environment": known.environment}
        geometry = known.geometry
    else:
        geometry = _geometry(patch_size, text_tokens)
    config = BucketConfig.from_measurements(measured, geometry=geometry, **origin)
    config.save_pretrained(output)
    laws = {"cost_model": config.config["cost_model"], "power_law": config.config["power_law"]}
    if as_json:
        _print_json({**laws, "memory_model": config.config["memory_model"], "measurements": len(measured)})
    else:
        _print_table(("law", "kind", "parameters", "median error", "largest", "left out"), _law_rows(laws))
    _say(f"{len(measured)} measurements fitted; the bucket config is in {output}")
    _say_next("adaptiveload", "plan", str(output), "--dataset", "PREPARED", "--world-size", "8")


@app.command()
def plan(
    config: Config,
    dataset: Dataset = None,
    shapes: Shapes = None,
    world_size: WorldSize = None,
    gradient_accumulation_steps: Accumulation = None,
    memory_limit_gib: MemoryLimit = None,
    target_seconds: TargetSeconds = "auto",
    policy: Annotated[str, typer.Option(help="dual, or a baseline: equal_token, equal_time.")] = "dual",
    allow_extrapolation: Extrapolate = False,
    as_json: AsJson = False,
):
    """Choose the batch size of each bucket.

    \b
    Example:
      adaptiveload plan config --dataset prepared --world-size 8 --gradient-accumulation-steps 2
    """
    loaded, counts, ranks = _load(config, dataset, shapes, world_size, gradient_accumulation_steps)
    made = loaded.plan(
        counts,
        **ranks,
        memory_limit_gib=memory_limit_gib,
        target_seconds=_target(target_seconds),
        policy=policy,
        allow_extrapolation=allow_extrapolation,
    )
    if as_json:
        _print_json(made.to_dict())
    else:
        header = ("shape", "pixels", "tokens", "samples", "batch size", "seconds", "GiB", "bound by")
        _print_table(header, [_bucket_row(bucket) for bucket in made.buckets])
    for finding in made.findings:
        _say(finding)
    options = [*_source(dataset, shapes), *_rank_options(ranks)]
    options += ["--memory-limit-gib", f"{memory_limit_gib:g}"] if memory_limit_gib is not None else []
    options += ["--allow-extrapolation"] if allow_extrapolation else []
    _say_next("adaptiveload", "simulate", config, *options)


@app.command()
def simulate(
    config: Config,
    dataset: Dataset = None,
    shapes: Shapes = None,
    world_size: WorldSize = None,
    gradient_accumulation_steps: Accumulation = None,
    memory_limit_gib: MemoryLimit = None,
    target_seconds: TargetSeconds = "auto",
    allow_extrapolation: Extrapolate = False,
    as_json: AsJson = False,
):
    """Predict an epoch under equal-token batches dealt at random and under planned ones dealt by cost.

    \b
    Example:
      adaptiveload simulate config --dataset prepared --world-size 8 --gradient-accumulation-steps 2
    """
    loaded, counts, ranks = _load(config, dataset, shapes, world_size, gradient_accumulation_steps)
    compared = loaded.compare(
        counts,
        **ranks,
        memory_limit_gib=memory_limit_gib,
        target_seconds=_target(target_seconds),
        allow_extrapolation=allow_extrapolation,
    )
    # "auto" may have chosen a mode that has its own row already.
    rows = {(row.policy, row.balance): row for row in compared}.values()
    if as_json:
        _print_json([{"policy": row.policy, "balance": row.balance, **asdict(row.simulation)} for row in rows])
    else:
        header = ("policy", "balance", "epoch s", "efficiency", "step CV", "compute CV", "samples/s", "tokens/s")
        _print_table(header, [_simulation_row(row) for row in rows])
    accumulation = ("--gradient_accumulation_steps", str(ranks["gradient_accumulation_steps"]))
    recipe = ("accelerate", "launch", "recipes/train_wan.py", "--bucket_config", config, "--output_dir", "run")
    data = ("--dataset", str(dataset or "PREPARED"), "--pretrained_model_name_or_path", "PIPELINE")
    _say_next(*recipe, *data, *accumulation)


@app.command()
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
    from .buckets.shapes import load_prepared, read_shapes
    from .config import BucketConfig
    from .report import write_report

    loaded = BucketConfig.from_pretrained(config)
    ranks = _ranks(loaded, world_size, gradient_accumulation_steps)
    for problem in write_report(output, loaded, read_shapes(load_prepared(dataset)), run=run, **ranks):
        warnings.warn(problem, stacklevel=1)
    _say("next: open the report in a browser")
    print(output)


def _load(config, dataset, shapes, world_size, gradient_accumulation_steps):
    """(BucketConfig, samples by shape, {world_size, gradient_accumulation_steps})."""
    from .buckets import shapes as reading
    from .config import BucketConfig

    if (dataset is None) == (shapes is None):
        raise typer.BadParameter("give either --dataset PREPARED or --shapes FILE")
    loaded = BucketConfig.from_pretrained(config)
    if dataset is not None:
        counts = reading.shape_counts(reading.read_shapes(reading.load_prepared(dataset)))
    else:
        counts = _read_counts(shapes)
    return loaded, counts, _ranks(loaded, world_size, gradient_accumulation_steps)


def _read_counts(path):
    from .buckets.shapes import LatentShape

    if not path.is_file():
        raise UserError(f'There is no file {path}. --shapes takes a JSON file such as {{"21x60x104": 120}}.')
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f'{path} is no JSON ({error}). It must read like {{"21x60x104": 120}}.') from None
    if not isinstance(counts, dict) or not counts:
        raise UserError(f'{path} must hold a JSON object with shapes, such as {{"21x60x104": 120}}.')
    for shape, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UserError(f"{path}: the samples of {shape} must be a positive whole number, but are {count!r}.")
    return {LatentShape.parse(shape): count for shape, count in counts.items()}


def _ranks(config, world_size, gradient_accumulation_steps):
    """Those given, else those of the measurement, which is said."""
    given = {"world_size": world_size, "gradient_accumulation_steps": gradient_accumulation_steps}
    for name, value in given.items():
        if value is None:
            given[name] = config.environment.get(name)
            option = "--" + name.replace("_", "-")
            if given[name] is None:
                raise UserError(f"The config does not say its {name}. Pass {option}.")
            _say(f"{option} {given[name]}, as measured")
    return given


def _target(text):
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"--target-seconds takes a number or auto, not {text!r}") from None


def _geometry(patch_size, text_tokens):
    from .buckets.shapes import TokenGeometry

    try:
        frames, height, width = map(int, patch_size.split("x"))
    except ValueError:
        raise typer.BadParameter(f"--patch-size takes three numbers such as 1x2x2, not {patch_size!r}") from None
    return TokenGeometry((frames, height, width), text_tokens)


def _law_rows(laws):
    for name, law in laws.items():
        parameters = ", ".join(f"{key} {value:.4g}" for key, value in law["parameters"].items())
        yield (
            "used" if name == "cost_model" else "paper",
            law["kind"],
            parameters,
            *(f"{law['errors'][key]:.1%}" for key in ("median", "max", "leave_one_out")),
        )


def _bucket_row(bucket):
    gib = "-" if bucket.gib is None else f"{bucket.gib:.1f}"
    seconds = f"{bucket.seconds:.4g}"
    shape = bucket.shape
    return shape, shape.pixels(), bucket.tokens, bucket.count, bucket.batch_size, seconds, gib, bucket.bound_by


def _simulation_row(row):
    simulation = row.simulation
    return (
        row.policy,
        row.balance,
        f"{simulation.epoch_seconds:.4g}",
        f"{simulation.balance_efficiency:.1%}",
        f"{simulation.step_cv:.3f}",
        f"{simulation.compute_cv:.3f}",
        f"{simulation.samples_per_second:.4g}",
        f"{simulation.tokens_per_second:.4g}",
    )


def _source(dataset, shapes):
    return ("--dataset", str(dataset)) if dataset is not None else ("--shapes", str(shapes))


def _rank_options(ranks):
    return [word for name, value in ranks.items() for word in ("--" + name.replace("_", "-"), str(value))]


def _print_json(value):
    print(json.dumps(value, indent=2, allow_nan=False))


def _print_table(header, rows):
    """A table; on a terminal too narrow for it one line a cell. Nothing is folded or cut off."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = [[str(cell) for cell in row] for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, no_wrap=True, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    width = console.measure(table, options=console.options.update(max_width=1000)).maximum
    if sys.stdout.isatty() and console.width < width:
        widest = max(map(len, header))
        for row in rows:
            print(*(f"{name:{widest}}  {cell}" for name, cell in zip(header, row)), sep="\n", end="\n\n")
    else:
        console.width = width
        console.print(table)


def _say(words):
    print(words, file=sys.stderr)


def _say_next(*words):
    _say("next: " + shlex.join(words))
