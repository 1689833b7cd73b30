"""What does `adaptiveload fit | plan | simulate | report` parse, call and print? Tables on stdout, words on stderr."""

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .errors import UserError, exit_on_user_error
from .tables import print_json, print_table, say, say_next

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
SamplesPerStep = Annotated[
    float | None, typer.Option(min=1, help="Choose that time such that an optimizer step holds about so many samples.")
]
Extrapolate = Annotated[bool, typer.Option(help="Allow shapes outside the measured range of tokens.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

_COLUMNS = {  # key of `simulate --json` -> (column, format); those that a row lacks are left out
    "policy": ("policy", "{}"),
    "balance": ("balance", "{}"),
    "world_size": ("W", "{}"),
    "gradient_accumulation_steps": ("K", "{}"),
    "epoch_seconds": ("epoch s", "{:.4g}"),
    "ideal_seconds": ("ideal s", "{:.4g}"),
    "epoch_relative_cost": ("epoch relative cost", "{:.4g}"),
    "ideal_relative_cost": ("ideal relative cost", "{:.4g}"),
    "balance_efficiency": ("efficiency", "{:.1%}"),
    "step_cv": ("step CV", "{:.3f}"),
    "compute_cv": ("compute CV", "{:.3f}"),
    "samples_per_second": ("samples/s", "{:.4g}"),
    "tokens_per_second": ("tokens/s", "{:.4g}"),
    "samples_per_update_step": ("samples/step", "{:.1f}"),
    "samples_per_update_step_cv": ("their CV", "{:.2f}"),
    "gain_from_batch_sizes": ("by sizes", "{:.2f}x"),
    "gain_from_dealing": ("by dealing", "{:.2f}x"),
    "gain": ("gain", "{:.2f}x"),
}


def main():
    """Run the command line; a UserError ends it with one line and status 1."""
    sys.stdout.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *_, **__: say(f"adaptiveload: warning: {message}")
    with exit_on_user_error("adaptiveload"):
        app()


@app.command()
def fit(
    output: Annotated[Path, typer.Option(metavar="CONFIG", help="Folder for the bucket config.")],
    measurements: Annotated[
        Path | None, typer.Argument(metavar="[MEASUREMENTS]", help="measurements.jsonl of a benchmark.")
    ] = None,
    from_log: Annotated[
        Path | None, typer.Option(metavar="LOG", help="Instead: metrics.jsonl of a training run.")
    ] = None,
    patch_size: Annotated[str, typer.Option(metavar="FxHxW", help="The model's patch size.")] = "1x2x2",
    text_tokens: Annotated[int, typer.Option(min=0, help="Text tokens that join the attention (Wan: 0).")] = 0,
    as_json: AsJson = False,
):
    """Fit the cost and memory laws to measurements, or the cost to a training run, and write a bucket config.

    Model and set-up are taken over from a bucket_config.json beside the measurements or the log, if there is one.

    \b
    Example:
      adaptiveload fit config/measurements.jsonl --output config
      adaptiveload fit --from-log run/metrics.jsonl --output refitted
    """
    from .buckets.fit import describe_measurements
    from .config import BucketConfig
    from .config_file import CONFIG_FILE

    if (measurements is None) == (from_log is None):
        raise typer.BadParameter("give either MEASUREMENTS or --from-log LOG")
    source = measurements or from_log
    origin = {"model": {}, "environment": {}, "geometry": _geometry(patch_size, text_tokens)}
    if source.with_name(CONFIG_FILE).is_file():
        known = BucketConfig.from_pretrained(source.parent)
        origin = {"model": known.model, "environment": known.environment, "geometry": known.geometry}
    if from_log is None:
        measured, fitted = _fit_measurements(source)
    else:
        measured, fitted, ranks = _fit_log(source, origin["geometry"])
        origin["environment"] = {**origin["environment"], **ranks}
    config = BucketConfig.from_measurements(measured, fit=fitted, **origin)
    config.save_pretrained(output)
    _print_fit(config, fitted, describe_measurements(measured) if from_log is None else [], as_json)
    kind = "measurements" if from_log is None else "optimizer steps"
    say(f"{len(fitted.steps.names)} {kind} fitted; the bucket config is in {output}")
    say_next("adaptiveload", "plan", str(output), "--dataset", "PREPARED", "--world-size", "8")


@app.command()
def plan(
    config: Config,
    dataset: Dataset = None,
    shapes: Shapes = None,
    world_size: WorldSize = None,
    gradient_accumulation_steps: Accumulation = None,
    memory_limit_gib: MemoryLimit = None,
    target_seconds: TargetSeconds = "auto",
    samples_per_step: SamplesPerStep = None,
    policy: Annotated[
        str | None, typer.Option(help="dual, equal_token, equal_time or fixed. Default: dual, or the config's own B.")
    ] = None,
    allow_extrapolation: Extrapolate = False,
    as_json: AsJson = False,
):
    """Choose the batch size of each bucket.

    \b
    Example:
      adaptiveload plan config --dataset prepared --world-size 8 --gradient-accumulation-steps 2
    """
    loaded, counts = _load(config, dataset, shapes)
    ranks = _ranks(loaded, world_size, gradient_accumulation_steps)
    made = loaded.plan(
        counts,
        **ranks,
        memory_limit_gib=memory_limit_gib,
        target_seconds=_target(target_seconds),
        samples_per_step=samples_per_step,
        policy=policy,
        allow_extrapolation=allow_extrapolation,
    )
    unit = loaded.cost_model.unit
    if as_json:
        print_json(_in_unit(made.to_dict(), unit))
    else:
        header = ("shape", "pixels", "tokens", "samples", "batch size", unit, "GiB", "bound by")
        print_table(header, [_bucket_row(bucket) for bucket in made.buckets])
    for finding in made.findings:
        say(finding)
    options = [*_source(dataset, shapes), *_rank_options(ranks)]
    options += ["--memory-limit-gib", f"{memory_limit_gib:g}"] if memory_limit_gib is not None else []
    options += ["--samples-per-step", f"{samples_per_step:g}"] if samples_per_step is not None else []
    options += ["--allow-extrapolation"] if allow_extrapolation else []
    say_next("adaptiveload", "simulate", config, *options)


@app.command()
def simulate(
    config: Config,
    dataset: Dataset = None,
    shapes: Shapes = None,
    world_size: Annotated[list[int] | None, typer.Option(min=1, help="Data ranks; may be repeated.")] = None,
    gradient_accumulation_steps: Annotated[
        list[int] | None, typer.Option(min=1, help="Micro-steps in an optimizer step; may be repeated.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="dual, equal_token, equal_time, fixed; repeatable.")] = None,
    balance: Annotated[list[str] | None, typer.Option(help="none, step, window:n, auto; may be repeated.")] = None,
    memory_limit_gib: MemoryLimit = None,
    target_seconds: TargetSeconds = "auto",
    samples_per_step: SamplesPerStep = None,
    allow_extrapolation: Extrapolate = False,
    as_json: AsJson = False,
):
    """Predict an epoch, and what batch sizes and dealing each bring to it.

    The gains are ratios of epoch times against equal-token batches (or the config's own batch sizes) dealt at random:
    "by sizes" is what this policy's batch sizes bring when dealt at random, "by dealing" what dealing them by cost
    brings on top, and "gain" is the product.

    \b
    Example:
      adaptiveload simulate config --dataset prepared --world-size 8 --world-size 16 --balance none --balance window:8
    """
    from .buckets.simulate import BALANCES

    loaded, counts = _load(config, dataset, shapes)
    ranks = _ranks(loaded, world_size or None, gradient_accumulation_steps or None)
    world_sizes, accumulations = (n if isinstance(n, list) else [n] for n in ranks.values())
    rows = loaded.compare(
        counts,
        policies=policy or None,
        balances=balance or BALANCES,
        world_sizes=world_sizes,
        accumulations=accumulations,
        memory_limit_gib=memory_limit_gib,
        target_seconds=_target(target_seconds),
        samples_per_step=samples_per_step,
        allow_extrapolation=allow_extrapolation,
    )
    rows = [_in_unit(_simulation(row), loaded.cost_model.unit) for row in rows]
    if as_json:
        print_json(rows)
    else:
        columns = [name for name in _COLUMNS if name in rows[0]]
        print_table([_COLUMNS[n][0] for n in columns], [[_COLUMNS[n][1].format(r[n]) for n in columns] for r in rows])
    recipe = ("accelerate", "launch", "recipes/train_wan.py", "--bucket_config", config, "--output_dir", "run")
    data = ("--dataset", str(dataset or "PREPARED"), "--pretrained_model_name_or_path", "PIPELINE")
    say_next(*recipe, *data, "--gradient_accumulation_steps", str(accumulations[0]))


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
    say("next: open the report in a browser")
    print(output)


def _load(config, dataset, shapes):
    """(BucketConfig, samples by shape)."""
    from .buckets import shapes as reading
    from .config import BucketConfig

    if (dataset is None) == (shapes is None):
        raise typer.BadParameter("give either --dataset PREPARED or --shapes FILE")
    loaded = BucketConfig.from_pretrained(config)
    if dataset is not None:
        counts = reading.shape_counts(reading.read_shapes(reading.load_prepared(dataset)))
    else:
        counts = _read_counts(shapes)
    return loaded, counts


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
        if not isinstance(count, int) or isinstance(count, bool) or not 0 < count < 1 << 31:
            raise UserError(
                f"{path}: the samples of {shape} must be a positive whole number, below 2^31, but are {count!r}."
            )
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
            say(f"{option} {given[name]}, as measured")
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


def _fit_measurements(path):
    """(measurements, CostFit) of a benchmark; broken lines are said."""
    from .buckets.cost import read_measurements
    from .buckets.fit import fit_cost_model

    measured, problems = read_measurements(path)
    for problem in problems:
        warnings.warn(f"{problem} The other lines are used.", stacklevel=1)
    return measured, fit_cost_model(measured)


def _fit_log(path, geometry):
    """(measurements, CostFit, ranks and accumulation) of a training run; what is left out is said."""
    from .buckets.training_log import apportion_seconds, fit_training_log, read_training_log

    log = read_training_log(path, geometry)
    for reason in log.left_out:
        say(reason)
    fitted = fit_training_log(log)
    _, accumulation, world_size = log.shapes.shape
    ranks = {"world_size": world_size, "gradient_accumulation_steps": accumulation}
    return apportion_seconds(log, fitted), fitted, ranks


def _print_fit(config, fitted, findings, as_json):
    """The laws, how sure their parameters are, and on stderr what strays and what is to be known."""
    from .buckets.fit import find_outliers, parameter_confidence

    laws = {"cost_model": config.config["cost_model"], "power_law": config.config["power_law"]}
    confidence, outliers = parameter_confidence(fitted), find_outliers(fitted)
    if as_json:
        details = {"confidence": confidence, "outliers": list(map(asdict, outliers)), "findings": findings}
        counts = {"memory_model": config.config["memory_model"], "measurements": len(config.measurements)}
        print_json({**laws, **counts, **details})
    else:
        print_table(("law", "kind", "parameters", "median error", "largest", "left out"), _law_rows(laws))
        print()
        rows = [(name, f"{fitted.model.parameters[name]:.4g}", f"{low:.4g}", f"{high:.4g}")
                for name, (low, high) in confidence.items()]  # fmt: skip
        print_table(("parameter of the law used", "value", "90% from", "to"), rows)
    for words in (*outliers, *findings):
        say(str(words))


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


def _simulation(row):
    """One row of `simulate`, flat."""
    ranks = {"world_size": row.world_size, "gradient_accumulation_steps": row.gradient_accumulation_steps}
    gains = {"gain_from_batch_sizes": row.from_batch_sizes, "gain_from_dealing": row.from_dealing, "gain": row.gain}
    return {"policy": row.policy, "balance": row.balance, **ranks, **asdict(row.simulation), **gains}


def _in_unit(fields, unit):
    """The same for JSON; where the cost is no time, no key says seconds, and nothing is per second."""
    if unit == "seconds":
        return fields
    if isinstance(fields, list):
        return [_in_unit(item, unit) for item in fields]
    if not isinstance(fields, dict):
        return fields
    renamed = {name: _in_unit(value, unit) for name, value in fields.items() if not name.endswith("_per_second")}
    return {name.replace("seconds", unit.replace(" ", "_")): value for name, value in renamed.items()}


def _source(dataset, shapes):
    return ("--dataset", str(dataset)) if dataset is not None else ("--shapes", str(shapes))


def _rank_options(ranks):
    return [word for name, value in ranks.items() for word in ("--" + name.replace("_", "-"), str(value))]
