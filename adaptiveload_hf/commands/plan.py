"""`adaptiveload plan`: how many samples of each shape go into one micro-batch?"""

import inspect
from typing import Annotated

import typer

from ..errors import as_flags
from ..tables import in_unit, print_json, print_table, say, say_next
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
    TargetSeconds,
    WorldSize,
    check_policies,
    load,
    parse_target,
    rank_options,
    ranks_of,
    source_options,
)


def plan(
    config: Config,
    dataset: Dataset = None,
    shapes: Shapes = None,
    revision: Revision = None,
    world_size: WorldSize = None,
    gradient_accumulation_steps: Accumulation = None,
    memory_limit_gib: MemoryLimit = None,
    target_seconds: TargetSeconds = "auto",
    samples_per_step: SamplesPerStep = None,
    balance: Annotated[
        str, typer.Option(help="Balance that training will use: none, step, stratified:n, window:n, auto.")
    ] = "auto",
    policy: Annotated[
        str | None,
        typer.Option(help="dual, equal_token, equal_time, or fixed: the config's own B, the default if it has any."),
    ] = None,
    allow_extrapolation: Extrapolate = False,
    as_json: AsJson = False,
):
    """Choose the batch size of each bucket.

    \b
    Example:
      adaptiveload plan config --dataset prepared --world-size 8 --gradient-accumulation-steps 2
    """
    loaded, samples = load(config, dataset, shapes, revision)
    check_policies(loaded, [policy])
    ranks = ranks_of(loaded, world_size, gradient_accumulation_steps)
    made = loaded.plan(
        samples.counts,
        **ranks,
        balance=balance,
        memory_limit_gib=memory_limit_gib,
        target_seconds=parse_target(target_seconds),
        samples_per_step=samples_per_step,
        policy=policy,
        allow_extrapolation=allow_extrapolation,
    )
    unit = loaded.cost_model.unit
    if as_json:
        print_json(in_unit(made.to_dict(), unit))
    else:
        header = ("shape", "pixels", "tokens", "samples", "batch size", unit, "GiB", "bound by")
        print_table(header, [_bucket_row(bucket, samples.vae_scale) for bucket in made.buckets])
    for finding in made.findings:
        say(as_flags(finding, inspect.signature(plan).parameters, "-"))
    options = [*source_options(dataset, shapes), *rank_options(ranks)]
    options += ["--memory-limit-gib", f"{memory_limit_gib:g}"] if memory_limit_gib is not None else []
    options += ["--balance", balance] if balance != "auto" else []
    options += ["--revision", revision] if revision is not None else []
    options += ["--samples-per-step", f"{samples_per_step:g}"] if samples_per_step is not None else []
    options += ["--allow-extrapolation"] if allow_extrapolation else []
    say_next("adaptiveload", "simulate", config, *options)


def _bucket_row(bucket, vae_scale):
    gib = "-" if bucket.gib is None else f"{bucket.gib:.1f}"
    pixels = "-" if vae_scale is None else bucket.shape.pixels(*vae_scale)  # neither samples nor config say it
    sizes = bucket.shape, pixels, bucket.tokens, bucket.count, bucket.batch_size
    return *sizes, f"{bucket.seconds:.4g}", gib, bucket.bound_by
