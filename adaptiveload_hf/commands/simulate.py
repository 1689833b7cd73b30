"""`adaptiveload simulate`: how long would an epoch take, and what do batch sizes and balancing each gain?"""

import itertools
from dataclasses import asdict
from typing import Annotated

import typer

from ..tables import in_unit, print_json, print_table, say, say_next
from .arguments import (
    AsJson,
    Config,
    Dataset,
    Extrapolate,
    MemoryLimit,
    Revision,
    SamplesPerStep,
    Shapes,
    TargetSeconds,
    check_policies,
    load,
    parse_target,
    ranks_of,
)

_RECIPES = {"SD3Transformer2DModel": "train_sd3.py", "WanTransformer3DModel": "train_wan.py"}
_LAUNCH_CONFIGS = ("single", "ddp", "fsdp2", "hsdp", "cpu")  # files in accelerate_configs/
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
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "samples_per_update_step": ("samples/step", "{:.1f}"),
    "samples_per_update_step_cv": ("their CV", "{:.2f}"),
    "gain_from_batch_sizes": ("by sizes", "{:.2f}x"),
    "gain_from_dealing": ("by balance", "{:.2f}x"),
    "gain": ("gain", "{:.2f}x"),
}


def simulate(
    config: Config,
    dataset: Dataset = None,
    shapes: Shapes = None,
    revision: Revision = None,
    world_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of data ranks; repeatable. Default: as measured.")
    ] = None,
    gradient_accumulation_steps: Annotated[
        list[int] | None, typer.Option(min=1, help="Micro-steps per optimizer step; repeatable. Default: as measured.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="dual, equal_token, equal_time, or fixed: the config's own B; repeatable."),
    ] = None,
    balance: Annotated[
        list[str] | None, typer.Option(help="none, step, stratified:n, window:n, auto; repeatable.")
    ] = None,
    memory_limit_gib: MemoryLimit = None,
    target_seconds: TargetSeconds = "auto",
    samples_per_step: SamplesPerStep = None,
    allow_extrapolation: Extrapolate = False,
    as_json: AsJson = False,
):
    """Predict an epoch, and what sizes and balancing each gain.

    Gains are ratios of epoch times. The baseline is equal-token batches (or the config's own) in random order. "by
    sizes" is the gain of this policy's batch sizes in random order, "by balance" what balancing them by cost gains on
    top, and "gain" the product.

    \b
    Example:
      adaptiveload simulate config --dataset prepared --world-size 8 --world-size 16 --balance none --balance window:8
    """
    from ..buckets.simulate import BALANCES

    loaded, samples = load(config, dataset, shapes, revision)
    check_policies(loaded, policy or [])
    ranks = ranks_of(loaded, world_size or None, gradient_accumulation_steps or None)
    world_sizes, accumulations = (n if isinstance(n, list) else [n] for n in ranks.values())
    rows = loaded.compare(
        samples.counts,
        policies=policy or None,
        balances=balance or BALANCES,
        world_sizes=world_sizes,
        accumulations=accumulations,
        memory_limit_gib=memory_limit_gib,
        target_seconds=parse_target(target_seconds),
        samples_per_step=samples_per_step,
        allow_extrapolation=allow_extrapolation,
    )
    rows = [in_unit(_simulation(row), loaded.cost_model.unit) for row in rows]
    if as_json:
        print_json(rows)
    else:
        columns = [name for name in _COLUMNS if name in rows[0]]
        print_table([_COLUMNS[n][0] for n in columns], [[_COLUMNS[n][1].format(r[n]) for n in columns] for r in rows])
    found = [loaded.assumptions(*pair, memory_limit_gib) for pair in itertools.product(world_sizes, accumulations)]
    for finding in dict.fromkeys(itertools.chain.from_iterable(found)):
        say(finding)
    options = ["--gradient_accumulation_steps", str(accumulations[0])]
    options += ["--balance", *balance] if balance and len(balance) == 1 else []
    options += ["--memory_limit_gib", f"{memory_limit_gib:g}"] if memory_limit_gib is not None else []
    options += ["--allow_extrapolation"] if allow_extrapolation else []
    recipe = _RECIPES.get(loaded.model.get("class", "WanTransformer3DModel"))
    if recipe:
        say_next(*_train_command(recipe, config, loaded, dataset, world_sizes[0]), *options)
    else:
        loader = f'BucketDataLoader(dataset, BucketConfig.from_pretrained("{config}"), accelerator=accelerator)'
        say(f"next: in your own loop (no recipe trains this model): {loader}")


def _train_command(recipe, config, loaded, dataset, world_size):
    strategy, launch = loaded.environment.get("strategy"), []
    on_cpu = loaded.environment.get("gpu", "unknown") is None
    if strategy == "fsdp2" and on_cpu:
        strategy = "cpu"
    elif strategy == "single" and world_size > 1:
        strategy = "fsdp2"
    if strategy in _LAUNCH_CONFIGS:
        launch = ["--config_file", f"accelerate_configs/{strategy}.yaml", "--num_processes", str(world_size)]
    recipe = [f"recipes/{recipe}", "--bucket_config", config, "--output_dir", "run"]
    model = ["--pretrained_model_name_or_path", loaded.model.get("base_model") or "PIPELINE"]
    return ["accelerate", "launch", *launch, *recipe, *model, "--dataset", str(dataset or "PREPARED")]


def _simulation(row):
    """One row of `simulate`, flat."""
    ranks = {"world_size": row.world_size, "gradient_accumulation_steps": row.gradient_accumulation_steps}
    gains = {"gain_from_batch_sizes": row.from_batch_sizes, "gain_from_dealing": row.from_dealing, "gain": row.gain}
    return {"policy": row.policy, "balance": row.balance, **ranks, **asdict(row.simulation), **gains}
