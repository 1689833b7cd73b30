"""`adaptiveload fit`: which laws do measurements, or the steps of a training run, follow?"""

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UserError
from ..tables import print_json, print_table, say
from .arguments import AsJson, parse_geometry, say_next_plan

_POOR = 0.25  # median error of a law; of the demo's steps on two busy CPU cores it was 0.011, on H200s less


def fit(
    output: Annotated[Path, typer.Option(metavar="CONFIG", help="Folder for the bucket config.")],
    measurements: Annotated[
        Path | None, typer.Argument(metavar="[MEASUREMENTS]", help="measurements.jsonl of a benchmark.")
    ] = None,
    from_log: Annotated[
        Path | None, typer.Option(metavar="LOG", help="Instead of MEASUREMENTS: metrics.jsonl of a training run.")
    ] = None,
    patch_size: Annotated[
        str | None,
        typer.Option(metavar="FxHxW", help="The model's patch size. Default: as the set-up says, or 1x2x2."),
    ] = None,
    text_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Text tokens that join the attention. Default: as the set-up says, or 0, as in Wan."),
    ] = None,
    as_json: AsJson = False,
):
    """Fit what a step costs, and write a bucket config.

    Measurements give the cost and memory laws; the steps of a training run give the cost law only. Model and set-up
    come from the bucket_config.json beside the measurements, or the run_setup.json (or bucket_config.json) beside
    the log, if there is one.

    \b
    Example:
      adaptiveload fit config/measurements.jsonl --output config
      adaptiveload fit --from-log run/metrics.jsonl --output refitted
    """
    from ..buckets.fit import describe_measurements
    from ..config import BucketConfig
    from ..environment import freed_gradients_gib

    if (measurements is None) == (from_log is None):
        raise typer.BadParameter("give either MEASUREMENTS or --from-log LOG")
    source = measurements or from_log
    setup = _setup_beside(source, from_log is not None)
    geometry, said = _geometry(setup["model"], patch_size, text_tokens)
    if from_log is None:
        measured, fitted = _fit_measurements(source)
    else:
        measured, fitted, ranks = _fit_log(source, geometry, said)
        setup["environment"] = {**setup["environment"], **ranks}
    config = BucketConfig.from_measurements(measured, fit=fitted, geometry=geometry, **setup)
    config.save_pretrained(output)
    freed_gib = freed_gradients_gib(config.environment)
    _print_fit(config, fitted, describe_measurements(measured, freed_gib) if from_log is None else [], as_json)
    kind = "measurements" if from_log is None else "optimizer steps"
    say(f"{len(fitted.steps.names)} {kind} fitted; the bucket config is in {output}")
    say_next_plan(str(output), config.environment)


def _setup_beside(source, is_log):
    """model, environment and origin of what was measured, as far as files beside it say."""
    from ..config import BucketConfig
    from ..config_file import CONFIG_FILE
    from ..environment import read_setup

    origin = "training_log" if is_log else "benchmark"
    if is_log and (setup := read_setup(source.parent)):
        return {**setup, "origin": origin}
    if not (source.parent / CONFIG_FILE).is_file():
        return {"model": {}, "environment": {}, "origin": origin}
    known = BucketConfig.from_pretrained(source.parent)
    origin = known.origin if known.origin == "training_log" else origin
    return {"model": known.model, "environment": known.environment, "origin": origin}


def _geometry(model, patch_size, text_tokens):
    """(TokenGeometry of the model, whether the set-up or an option says it, so that it is no guess)."""
    known = {"patch_size": "x".join(map(str, model.get("patch_size", []))), "text_tokens": model.get("text_tokens")}
    for name, given in (("patch_size", patch_size), ("text_tokens", text_tokens)):
        if given is not None and known[name] not in (None, "", given):
            raise UserError(
                f"--{name.replace('_', '-')} is {given}, but the set-up beside the file says {known[name]}. Leave it "
                "out, or move the file away from a set-up that is not its own."
            )
    said = bool(model.get("patch_size")) or patch_size is not None or text_tokens is not None
    text = known["text_tokens"] if text_tokens is None else text_tokens
    return parse_geometry(patch_size or known["patch_size"] or "1x2x2", text or 0), said


def _fit_measurements(path):
    """(measurements, CostFit) of a benchmark; broken lines are said."""
    from ..buckets.cost import read_measurements
    from ..buckets.fit import fit_cost_model

    measured, problems = read_measurements(path)
    if problems and not measured:
        raise UserError(
            f"{problems[0]} Not one line of it is a measurement. Give the measurements.jsonl of a benchmark; the "
            "metrics.jsonl of a training run is given by --from-log."
        )
    for problem in problems:
        warnings.warn(f"{problem} The other lines are used.", stacklevel=1)
    return measured, fit_cost_model(measured)


def _fit_log(path, geometry, said):
    """(measurements, CostFit, ranks and accumulation) of a training run; what is left out is said."""
    from ..buckets.training_log import apportion_seconds, fit_training_log, read_training_log

    log = read_training_log(path, geometry)
    if not (said or log.says_tokens):
        raise UserError(
            f"Neither {path} nor a file beside it says how many tokens its shapes have, by which laws are fitted and "
            "samples weighed. Pass --patch-size and --text-tokens of the model (Wan: 1x2x2 and 0)."
        )
    for reason in log.left_out:
        say(reason)
    fitted = fit_training_log(log)
    _, accumulation, world_size = log.shapes.shape
    ranks = {"world_size": world_size, "gradient_accumulation_steps": accumulation}
    return apportion_seconds(log, fitted), fitted, ranks


def _print_fit(config, fitted, findings, as_json):
    """The laws, how sure their parameters are, and on stderr what strays and what is to be known."""
    from ..buckets.fit import find_outliers, parameter_confidence

    laws = {"cost_model": config.config["cost_model"], "power_law": config.config["power_law"]}
    confidence, outliers = parameter_confidence(fitted), find_outliers(fitted)
    if (error := laws["cost_model"]["errors"]["median"]) > _POOR:
        findings = [
            *findings,
            f"No law fits: half of these steps miss the best by {error:.0%} or more, so plans by it are guesses. Keep "
            "the lines of one set-up, with seconds in all of them, or measure again on machines that do nothing else.",
        ]
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
