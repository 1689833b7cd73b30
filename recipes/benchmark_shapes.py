"""What does a training step of this model cost on these ranks, for each shape of this dataset? Writes a bucket config.

accelerate launch --config_file accelerate_configs/fsdp2.yaml --main_process_port 0 recipes/benchmark_shapes.py \\
    --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --dataset prepared --output_dir config \\
    --gradient_accumulation_steps 2
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import sd3_training
import wan_training
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from data_setup import parse_batch_sizes, parse_repeats
from flow_matching import make_flow_matching
from lora import add_lora_arguments
from model_setup import (
    describe_run,
    gradient_gib,
    load_index,
    load_model_config,
    load_transformer,
    prepare_training,
    refuse_unsafe_sharding,
)
from publishing import find_repository
from random_batches import column_sizes, make_random_batches
from training_arguments import add_flow_arguments, add_model_arguments, compare_arguments
from training_loop import run_micro_step

from adaptiveload_hf import BucketConfig, LatentShape, TokenGeometry, UserError, fit_cost_model, make_accelerator
from adaptiveload_hf.benchmark import measure_shapes, measure_steps
from adaptiveload_hf.buckets.cost import PowerLaw
from adaptiveload_hf.buckets.fit import SURE_POINTS, describe_measurements, find_outliers
from adaptiveload_hf.buckets.plan import make_plan
from adaptiveload_hf.buckets.points import Point
from adaptiveload_hf.buckets.ranks import compare_ranks
from adaptiveload_hf.buckets.shapes import leave_out_absent, read_shapes, shape_counts
from adaptiveload_hf.buckets.sources import load_prepared
from adaptiveload_hf.commands.arguments import read_samples
from adaptiveload_hf.commands.plan import plan
from adaptiveload_hf.commands.simulate import simulate
from adaptiveload_hf.distributed import all_ranks_fail_together
from adaptiveload_hf.environment import freed_gradients_gib, refuse_other_geometry, save_setup
from adaptiveload_hf.errors import exit_on_user_error, options_as_flags
from adaptiveload_hf.scan import vae_scale_of_channels

# By the class of the pipeline's transformer: the module with what is its own.
FAMILIES = {family.MODEL_CLASS.__name__: family for family in (wan_training, sd3_training)}
LEAST_POINTS = 5
LONGEST_CHECK_SECONDS = 60  # of steps with the largest planned micro-batch; a longer one is left to the run


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, required=False)
    for add_arguments in (add_lora_arguments, add_flow_arguments, wan_training.add_wan_arguments):
        add_arguments(parser)
    add = parser.add_argument
    add("--config", help="instead of a pipeline: a transformer's config.json or its folder, with random weights")
    add("--shapes", type=Path, help='instead of a dataset: JSON {"21x60x104": samples, ...}; a range is two of them')
    add(
        "--max_points",
        type=int,
        default=12,
        help=f"most (shape, batch size) pairs to time; under {SURE_POINTS} the law is a guess",
    )
    add("--points", nargs="+", metavar="SHAPE=B", help="time these, such as 21x60x104=1, instead of choosing")
    add("--push_to_hub", action="store_true", help="upload the bucket config and its card")
    add("--hub_model_id", help="user/repo (default: the name of --output_dir in your own namespace)")
    add("--hub_token", help="token for the Hub (default: that of `hf auth login`)")
    args = parser.parse_args(argv)
    if (args.pretrained_model_name_or_path is None) == (args.config is None):
        parser.error("give either --pretrained_model_name_or_path PIPELINE or --config CONFIG")
    if (args.dataset is None) == (args.shapes is None):
        parser.error("give either --dataset PREPARED or --shapes FILE")
    if args.max_points < LEAST_POINTS:
        parser.error(f"--max_points must be at least {LEAST_POINTS} to tell any law, but it is {args.max_points}")
    return args


def main():
    args = parse_args()
    accelerator = make_accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
    )
    with all_ranks_fail_together(accelerator), options_as_flags(vars(args)):
        compare_arguments(args)
        output_dir = Path(args.output_dir)
        if args.config is not None:
            use_config_alone(accelerator, args, output_dir / "pipeline")
        dataset = None if args.dataset is None else load_prepared(args.dataset)
        counts = read_samples(args.shapes).counts if dataset is None else shape_counts(read_shapes(dataset))
        # One by one, since a shape may come with several batch sizes.
        points = [item for word in args.points or () for item in parse_batch_sizes([word]).items()]
        repository = find_repository(accelerator, args)
        config = benchmark(accelerator, args, dataset, counts, output_dir, args.max_points, points)
        if accelerator.is_main_process:
            show(args, config)
            if repository is not None:
                config.save_pretrained(output_dir, push_to_hub=True, repo_id=repository, token=args.hub_token)
        accelerator.wait_for_everyone()
    accelerator.end_training()


def bucket_config_for(accelerator, args, dataset) -> BucketConfig:
    """That of --bucket_config; "auto" is measured on the first start, kept in the run's folder, and found there again.

    What was allocated for it is given back, and the random numbers begin anew, so that the run is the one that would
    have been started with the finished folder. What the run is, is kept beside its metrics, so that a law can be
    fitted to them.

    Raises:
        UserError: a config of a model that makes other tokens of a sample.
    """
    folder = args.bucket_config
    if folder == "auto":
        folder = Path(args.output_dir) / "bucket_config"
        if not broadcast_object_list([(folder / "bucket_config.json").exists()])[0]:
            repeats = parse_repeats(args.repeats, dataset)
            counts = shape_counts(leave_out_absent(read_shapes(dataset), repeats), repeats)
            benchmark(accelerator, args, dataset, counts, folder)
            accelerator.free_memory()
            set_seed(args.seed)
        accelerator.wait_for_everyone()
    config, setup = BucketConfig.from_pretrained(folder), find_setup(accelerator, args, dataset)
    refuse_other_geometry(config.model, setup.model)
    if accelerator.is_main_process:
        save_setup(Path(args.output_dir), setup.model, setup.environment)
    return config


class Setup(NamedTuple):
    """What is measured or trained. sizes: of `column_sizes`; model, environment: those of a bucket config."""

    family: Any
    sizes: dict
    geometry: TokenGeometry
    model: dict
    environment: dict


def find_setup(accelerator, args, dataset) -> Setup:
    """From the pipeline's configuration and the dataset, if there is one. A collective.

    Raises:
        UserError: a dataset of another model, or ranks that have read different configurations, as machines with
            pipelines of their own may.
    """
    family = family_of(args)
    variant = family.choose_variant(args)
    transformer_config = load_model_config(family.MODEL_CLASS, args, variant.subfolder)
    facts = {f"transformer's {name}": value for name, value in transformer_config.items()}
    compare_ranks({"pipeline's variant": variant, **facts})
    if dataset is not None:
        family.check_dataset(dataset, transformer_config)
    sizes = column_sizes(dataset, transformer_config)
    geometry = family.geometry(transformer_config, sizes["prompt_embeds"][0])
    model, environment = describe_run(accelerator, args, family.MODEL_CLASS, transformer_config)
    model |= {"patch_size": list(geometry.patch_size), "text_tokens": geometry.text_tokens}
    model |= {"vae_scale": list(vae_scale_of_channels(sizes["latent"][0]))}
    return Setup(family, sizes, geometry, model, environment)


def benchmark(accelerator, args, dataset, counts, output_dir: Path, max_points=12, points=()) -> BucketConfig:
    """Measures, fits, plans, measures the plan's largest micro-batch too, and saves.

    Args:
        args: of the trainer or of this recipe.
        dataset: prepared, or None.
        counts: samples of each shape.
        output_dir: folder of the bucket config.
        max_points: most points to measure.
        points: (shape, batch size) pairs that alone are measured, as they are written; none: chosen for the shapes.

    Returns:
        The config, the same on all ranks.
    """
    set_seed(args.seed)  # the same on all ranks: FSDP2 shards what each rank holds and broadcasts nothing
    refuse_unsafe_sharding(accelerator, args.gradient_checkpointing, args.rank is not None)
    family, sizes, geometry, model_facts, environment = find_setup(accelerator, args, dataset)
    args.lora_target_modules = args.lora_target_modules or family.LORA_TARGET_MODULES
    check_options(accelerator, args, counts, geometry)
    if accelerator.is_main_process:
        keep_one_setup(output_dir, {"model": model_facts, "environment": environment})

    run_step, kept_gib = make_run_step(accelerator, args, family, sizes)
    environment["gradient_gib"] = max(gather_object([kept_gib]))
    path = output_dir / "measurements.jsonl"
    freed_gib = freed_gradients_gib(environment)
    measurements = measure(accelerator, run_step, counts, geometry, path, max_points, freed_gib, points)

    def plan_from(measurements) -> BucketConfig:
        config = BucketConfig.from_measurements(
            measurements, model=model_facts, environment=environment, geometry=geometry
        )
        config.example_plan = config.plan(
            counts,
            world_size=accelerator.num_processes,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            memory_limit_gib=args.memory_limit_gib,
        )
        return config

    config = plan_from(measurements)
    # Ranks on unlike GPUs would plan apart, and each wait for the others at a point of its own.
    largest = None if points else unmeasured_largest(config, args.gradient_accumulation_steps)
    largest = broadcast_object_list([largest])[0]
    if largest is not None:
        measurements = measure_steps(accelerator, run_step, [largest], output_path=path)
        if accelerator.is_main_process:
            say_check(config, largest, measurements)
        config = plan_from(measurements)
    if accelerator.is_main_process:
        config.save_pretrained(output_dir)
    return config


def check_options(accelerator, args, counts, geometry):
    """Raises what would be wrong with the plan under any law: before minutes of measuring, not after."""
    make_plan(
        counts,
        PowerLaw(a=0.0, b=1.0, p=1.0),
        geometry=geometry,
        world_size=accelerator.num_processes,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        balance=getattr(args, "balance", "auto"),  # benchmark_shapes.py plans for no order, and has no sizes given
        batch_sizes=parse_batch_sizes(getattr(args, "batch_sizes", None)),
        memory_limit_gib=args.memory_limit_gib if accelerator.device.type == "cpu" else None,  # where none is measured
    )


def measure(accelerator, run_step, counts, geometry, path: Path, max_points: int, freed_gib: float, points) -> list:
    """The given points, or such as show the law of these shapes; one is kept for the plan's largest micro-batch."""
    if not points:
        options = {"max_points": max_points - 1, "freed_gib": freed_gib, "output_path": path}
        return measure_shapes(accelerator, run_step, counts, geometry, **options)
    shapes = [(LatentShape.parse(shape), size) for shape, size in points]
    given = [Point(shape, geometry.tokens(shape), size) for shape, size in shapes]
    return measure_steps(accelerator, run_step, given, output_path=path)


def make_run_step(accelerator, args, family, sizes: dict):
    """The real optimizer step, on random latents: forward, loss, backward and K micro-steps, clip, AdamW.

    Returns:
        The function of shape and batch size, and the GiB of the gradients that a rank may keep between micro-steps.
    """
    variant = family.choose_variant(args)
    transformer = load_transformer(accelerator, family.MODEL_CLASS, args, variant.subfolder)
    model, optimizer, scheduler = prepare_training(accelerator, args, transformer)
    flow, predict = make_flow_matching(args, variant.bounds), family.make_predict(accelerator, model, variant)
    random_batch = make_random_batches(sizes, accelerator.device)

    def losses(batch):
        return flow.sample_losses(predict, batch, epoch=0)

    def run_step(shape: LatentShape, batch_size: int):
        model.zero_grad()
        batch = random_batch(shape, batch_size)
        for _ in range(args.gradient_accumulation_steps):
            run_micro_step(accelerator, model, optimizer, scheduler, losses, batch, args.max_grad_norm)

    return run_step, gradient_gib(model)


def family_of(args):
    """The module with what is the own of the pipeline's transformer.

    Raises:
        UserError: no pipeline there, or one of another transformer.
    """
    name = args.pretrained_model_name_or_path
    found = load_index(args, "a pipeline").get("transformer", [None, None])[1]
    if found not in FAMILIES:
        raise UserError(
            f"{name} has the transformer {found}, but only {', '.join(FAMILIES)} have recipes. Time your own loop "
            "with adaptiveload_hf.benchmark.measure_shapes (docs/cost-model.md)."
        )
    return FAMILIES[found]


def use_config_alone(accelerator, args, folder: Path):
    """Makes a pipeline folder of one transformer's configuration, for random weights."""
    path = Path(args.config)
    path = path / "config.json" if path.is_dir() else path
    if accelerator.is_main_process:
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            transformer = ["diffusers", config["_class_name"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--config takes the config.json of a diffusers transformer, or its folder, but {args.config}: {error}"
            ) from None
        parts = {
            "model_index.json": {"_class_name": "DiffusionPipeline", "transformer": transformer},
            "transformer/config.json": config,
            # No step costs more or less for it.
            "scheduler/scheduler_config.json": {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
        }
        for name, values in parts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(values, indent=2) + "\n")
    accelerator.wait_for_everyone()
    args.pretrained_model_name_or_path, args.from_scratch = str(folder), True


def keep_one_setup(output_dir: Path, setup: dict):
    """Points of another model or set-up must not be mixed in when a benchmark goes on.

    Which model it is says the hash of its configuration; the same folder may be spelled in many ways.

    Raises:
        UserError: the folder was begun with another set-up; names what differs.
    """
    path = output_dir / "benchmark_setup.json"
    if path.exists():
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            differences = [
                f"{part}.{name}: {earlier[part][name]} there, {value} now"
                for part, values in setup.items()
                for name, value in values.items()
                if name != "base_model" and earlier[part].get(name, value) != value
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} should say what the measurements beside it were made with, but it is damaged ({error!r}). "
                "Choose another --output_dir, or remove that folder to measure again."
            ) from None
        if differences:
            raise UserError(
                f"{output_dir} holds measurements of another set-up:\n  " + "\n  ".join(differences) + "\nChoose "
                "another --output_dir, or remove that folder to measure again."
            )
    output_dir.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(setup, indent=2) + "\n")


def unmeasured_largest(config: BucketConfig, gradient_accumulation_steps: int) -> Point | None:
    """Of the plan's micro-batches whose steps are not too long the one with the most tokens, if larger than measured.

    Steps of the longest shapes may take a minute each; those are left to the preflight.
    """
    longest = LONGEST_CHECK_SECONDS / (3 * gradient_accumulation_steps)
    points = [Point(b.shape, b.tokens, b.batch_size) for b in config.example_plan.buckets if b.seconds <= longest]
    largest = max(points, key=lambda point: point.all_tokens, default=None)
    known = max(m.batch_size * m.tokens for m in config.measurements if not m.oom)
    return None if largest is None or largest.all_tokens <= known else largest


def say_check(config: BucketConfig, point: Point, measurements: list):
    """How well seconds and memory of the largest planned micro-batch were predicted before it was measured."""
    name = f"largest planned micro-batch, {point.shape} at batch size {point.batch_size}"
    measured = [m for m in measurements if (m.shape, m.batch_size) == (str(point.shape), point.batch_size)]
    if not measured or measured[0].oom:
        print(f"{name}: does not fit, and is planned smaller", file=sys.stderr)
        return
    words = f"{name}: {measured[0].seconds:.3g} s"
    words += f" ({float(config.cost_model.seconds(point.batch_size, point.tokens)):.3g} predicted)"
    if config.memory_model is not None:
        gib = float(config.memory_model.gib(point.batch_size, point.tokens))
        words += f", {measured[0].peak_gib:.2f} GiB ({gib:.2f} predicted)"
    print(words, file=sys.stderr)


def show(args, config: BucketConfig):
    """The fits, what strays, the plan and what it is predicted to gain; the last line is the next command."""
    fit = fit_cost_model(config.measurements)
    for kind, candidate in fit.candidates.items():
        errors = (candidate.median_error, candidate.max_error, candidate.leave_one_out_error)
        print(
            f"{kind}: error median {errors[0]:.1%}, largest {errors[1]:.1%}, on shapes left out {errors[2]:.1%}"
            + (" (used)" if candidate.model == fit.model else "")
        )
    print("the paper's law: " + ", ".join(f"{name} = {value:.4g}" for name, value in fit.power_law.parameters.items()))
    environment = config.environment
    for words in (*find_outliers(fit), *describe_measurements(config.measurements, freed_gradients_gib(environment))):
        print(words, file=sys.stderr)
    source = {"shapes": args.shapes} if args.dataset is None else {"dataset": Path(args.dataset)}
    options = {**source, "memory_limit_gib": args.memory_limit_gib}
    ranks, accumulation = environment["world_size"], environment["gradient_accumulation_steps"]
    plan(args.output_dir, world_size=ranks, gradient_accumulation_steps=accumulation, **options)
    simulate(args.output_dir, world_size=[ranks], gradient_accumulation_steps=[accumulation], **options)


if __name__ == "__main__":
    with exit_on_user_error("benchmark_shapes.py"):
        main()
