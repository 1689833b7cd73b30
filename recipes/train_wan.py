"""How is a Wan text-to-video transformer trained on shapes of every size, with all ranks equally loaded?

accelerate launch --config_file accelerate_configs/fsdp2.yaml --main_process_port 0 recipes/train_wan.py \\
    --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --dataset prepared --bucket_config config \\
    --output_dir run --max_train_steps 1000 --gradient_accumulation_steps 2 --resume_from_checkpoint latest
"""

import argparse
from pathlib import Path

from accelerate.utils import set_seed
from checkpoints import find_checkpoint, keep_metrics_until
from diffusers import WanTransformer3DModel
from flow_matching import make_flow_matching
from model_setup import (
    describe_run,
    load_transformer,
    load_transformer_config,
    prepare_training,
    refuse_unsafe_sharding,
    save_transformer,
)
from training_arguments import (
    add_flow_arguments,
    add_model_arguments,
    add_run_arguments,
    add_scheduler_arguments,
)
from training_loop import run_micro_step, run_steps, say_start
from wan_training import check_dataset, latent_statistics, normalize, wan_predict

from adaptiveload_hf import BucketConfig, BucketDataLoader, make_accelerator
from adaptiveload_hf.buckets.sources import load_prepared
from adaptiveload_hf.distributed import all_ranks_fail_together
from adaptiveload_hf.errors import exit_on_user_error


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for add_arguments in (add_model_arguments, add_flow_arguments, add_scheduler_arguments, add_run_arguments):
        add_arguments(parser)
    return parser.parse_args(argv)


def main():
    args = parse_args()
    accelerator = make_accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with=None if args.report_to == "none" else args.report_to,
        project_dir=args.output_dir,
    )
    with all_ranks_fail_together(accelerator):
        train(accelerator, args)
        accelerator.wait_for_everyone()
    accelerator.end_training()


def train(accelerator, args):
    set_seed(args.seed)  # the same on all ranks: FSDP2 shards what each rank holds and broadcasts nothing
    output_dir = Path(args.output_dir)
    checkpoint = find_checkpoint(accelerator, output_dir, args.resume_from_checkpoint)

    # Whatever can be wrong with launch, data and plan shows here, before any weights are read.
    refuse_unsafe_sharding(accelerator, args.gradient_checkpointing)
    transformer_config = load_transformer_config(WanTransformer3DModel, args)
    flow = make_flow_matching(args)
    dataset = load_prepared(args.dataset)
    check_dataset(dataset, transformer_config)
    statistics = latent_statistics(args, dataset)
    bucket_config = BucketConfig.from_pretrained(args.bucket_config)
    loader = BucketDataLoader(
        dataset,
        bucket_config,
        accelerator=accelerator,
        num_workers=args.dataloader_num_workers,
        seed=args.seed,
        balance=args.balance,
        loss_normalization=args.loss_normalization,
        memory_limit_gib=args.memory_limit_gib,
        allow_extrapolation=args.allow_extrapolation,
    )
    if checkpoint is not None:
        loader.load_checkpoint(checkpoint)  # other ranks or another plan leave another number of steps
    total_steps = args.max_train_steps or loader.num_update_steps(args.num_train_epochs)
    transformer = load_transformer(WanTransformer3DModel, args)
    model, optimizer, scheduler = prepare_training(accelerator, args, transformer, total_steps)
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
    if accelerator.is_main_process:
        model_facts, environment = describe_run(accelerator, args, WanTransformer3DModel, transformer_config)
        say_start(args, loader, scheduler, bucket_config.check_environment(environment, model_facts), total_steps)
        keep_metrics_until(output_dir / "metrics.jsonl", loader.global_step)
    accelerator.init_trackers("train_wan", config={name: str(value) for name, value in vars(args).items()})

    predict = wan_predict(accelerator, model)

    def losses(batch):
        return flow.sample_losses(predict, normalize(batch, statistics), loader.epoch)

    def run(batch):
        return run_micro_step(accelerator, model, optimizer, scheduler, losses, batch, args.max_grad_norm)

    run_steps(accelerator, args, loader, scheduler, run, total_steps)
    save_transformer(accelerator, model, output_dir / "transformer")


if __name__ == "__main__":
    with exit_on_user_error("train_wan.py"):
        main()
