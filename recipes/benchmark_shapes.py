"""What does a training step of this model cost on these ranks, for each shape of this dataset? Writes a bucket config.

accelerate launch --config_file accelerate_configs/fsdp2.yaml --main_process_port 0 recipes/benchmark_shapes.py \\
    --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --dataset prepared --output_dir config \\
    --gradient_accumulation_steps 2
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate.utils import set_seed
from flow_matching import make_flow_matching
from lora import add_lora_arguments
from model_setup import (
    describe_run,
    load_transformer,
    load_transformer_config,
    prepare_training,
    refuse_unsafe_sharding,
)
from training_arguments import add_flow_arguments, add_model_arguments
from training_loop import run_micro_step
from wan_training import MODEL_CLASS, add_wan_arguments, check_dataset, choose_variant, geometry, make_predict

from adaptiveload_hf import (
    BucketConfig,
    LatentShape,
    UserError,
    fit_cost_model,
    make_accelerator,
)
from adaptiveload_hf.benchmark import measure_shapes
from adaptiveload_hf.buckets.shapes import read_shapes, shape_counts
from adaptiveload_hf.buckets.sources import load_prepared
from adaptiveload_hf.commands.plan import plan
from adaptiveload_hf.commands.simulate import simulate
from adaptiveload_hf.distributed import all_ranks_fail_together
from adaptiveload_hf.errors import exit_on_user_error


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for add_arguments in (add_model_arguments, add_lora_arguments, add_flow_arguments, add_wan_arguments):
        add_arguments(parser)
    parser.add_argument("--max_points", type=int, default=12, help="(shape, batch size) pairs to time")
    parser.add_argument("--push_to_hub", action="store_true")
    parser.add_argument("--hub_model_id", help="repository, default: the name of --output_dir")
    parser.add_argument("--hub_token")
    return parser.parse_args(argv)


def main():
    args = parse_args()
    accelerator = make_accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
    )
    with all_ranks_fail_together(accelerator):
        benchmark(accelerator, args)
        accelerator.wait_for_everyone()
    accelerator.end_training()


def benchmark(accelerator, args):
    set_seed(args.seed)  # the same on all ranks: FSDP2 shards what each rank holds and broadcasts nothing
    refuse_unsafe_sharding(accelerator, args.gradient_checkpointing)
    dataset = load_prepared(args.dataset)
    transformer_config = load_transformer_config(MODEL_CLASS, args, choose_variant(args).subfolder)
    check_dataset(dataset, transformer_config)
    counts = shape_counts(read_shapes(dataset))
    model_facts, environment = describe_run(accelerator, args, MODEL_CLASS, transformer_config)
    output_dir = Path(args.output_dir)
    if accelerator.is_main_process:
        keep_one_setup(output_dir, {"model": model_facts, "environment": environment})

    run_step = make_run_step(accelerator, args, dataset)
    path = output_dir / "measurements.jsonl"
    measurements = measure_shapes(
        accelerator, run_step, counts, geometry(transformer_config), max_points=args.max_points, output_path=path
    )

    if accelerator.is_main_process:
        config = BucketConfig.from_measurements(
            measurements, model=model_facts, environment=environment, geometry=geometry(transformer_config)
        )
        config.example_plan = config.plan(
            counts,
            world_size=accelerator.num_processes,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            memory_limit_gib=args.memory_limit_gib,
        )
        config.save_pretrained(output_dir)
        show(args, measurements, accelerator.num_processes)
        if args.push_to_hub:
            print(config.push_to_hub(args.hub_model_id or output_dir.resolve().name, token=args.hub_token))


def make_run_step(accelerator, args, dataset):
    """The real optimizer step, on random latents: forward, loss, backward and K micro-steps, clip, AdamW."""
    variant = choose_variant(args)
    transformer = load_transformer(accelerator, MODEL_CLASS, args, variant.subfolder)
    model, optimizer, scheduler = prepare_training(accelerator, args, transformer)
    flow, predict = make_flow_matching(args, variant.bounds), make_predict(accelerator, model, variant)
    row = dataset.select_columns(["latent_shape", "prompt_embeds_shape"])[0]
    channels, text_shape = row["latent_shape"][0], row["prompt_embeds_shape"]

    def losses(batch):
        return flow.sample_losses(predict, batch, epoch=0)

    def run_step(shape: LatentShape, batch_size: int):
        model.zero_grad()
        size = (channels, shape.frames, shape.height, shape.width)
        batch = {
            "latent": torch.randn(batch_size, *size, device=accelerator.device),
            "prompt_embeds": torch.randn(batch_size, *text_shape, device=accelerator.device),
            "sample_index": torch.arange(batch_size),
            "loss_weight": 1.0,
        }
        for _ in range(args.gradient_accumulation_steps):
            run_micro_step(accelerator, model, optimizer, scheduler, losses, batch, args.max_grad_norm)

    return run_step


def keep_one_setup(output_dir: Path, setup: dict):
    """Points of another model or set-up must not be mixed in when a benchmark goes on.

    Raises:
        UserError: the folder was begun with another set-up; names what differs.
    """
    path = output_dir / "benchmark_setup.json"
    if path.exists():
        earlier = json.loads(path.read_text())
        differences = [
            f"{part}.{name}: {earlier[part].get(name)} there, {value} now"
            for part, values in setup.items()
            for name, value in values.items()
            if earlier[part].get(name) != value
        ]
        if differences:
            raise UserError(
                f"{output_dir} holds measurements of another set-up:\n  " + "\n  ".join(differences) + "\nChoose "
                "another --output_dir, or remove that folder to measure again."
            )
    output_dir.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(setup, indent=2) + "\n")


def show(args, measurements, world_size: int):
    """The fits, the plan and what it is predicted to gain, as tables; the last line is the next command."""
    fit = fit_cost_model(measurements)
    for kind, candidate in fit.candidates.items():
        errors = (candidate.median_error, candidate.max_error, candidate.leave_one_out_error)
        print(
            f"{kind}: error median {errors[0]:.1%}, largest {errors[1]:.1%}, on shapes left out {errors[2]:.1%}"
            + (" (used)" if candidate.model == fit.model else "")
        )
    options = {"dataset": Path(args.dataset), "memory_limit_gib": args.memory_limit_gib}
    accumulation = args.gradient_accumulation_steps
    plan(args.output_dir, world_size=world_size, gradient_accumulation_steps=accumulation, **options)
    simulate(args.output_dir, world_size=[world_size], gradient_accumulation_steps=[accumulation], **options)


if __name__ == "__main__":
    with exit_on_user_error("benchmark_shapes.py"):
        main()
