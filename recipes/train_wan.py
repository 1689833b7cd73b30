"""How is a Wan transformer trained on shapes of every size, with all ranks equally loaded?

accelerate launch --config_file accelerate_configs/fsdp2.yaml --main_process_port 0 recipes/train_wan.py \\
    --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --dataset prepared --bucket_config config \\
    --output_dir run --max_train_steps 1000 --gradient_accumulation_steps 2 --resume_from_checkpoint latest

All weights, or with --rank a LoRA; text-to-video, image-to-video, TI2V, and either expert of Wan 2.2 A14B.
"""

import argparse
from pathlib import Path

from accelerate.utils import ProjectConfiguration, set_seed
from benchmark_shapes import bucket_config_for
from caption_dropout import make_caption_dropout
from checkpoints import find_checkpoint, keep_metrics_until, load_checkpoint
from data_setup import make_loader
from flow_matching import make_flow_matching
from lora import add_lora_arguments
from model_setup import (
    describe_run,
    load_model_config,
    load_transformer,
    prepare_training,
    refuse_unsafe_sharding,
    save_result,
)
from publishing import add_hub_arguments, find_repository, publish
from random_batches import column_sizes, try_buckets
from run_folder import only_run
from shared_work import others_wait
from stopping import drop_earlier_request
from training_arguments import (
    add_flow_arguments,
    add_model_arguments,
    add_run_arguments,
    add_scheduler_arguments,
    add_validation_arguments,
    check_arguments,
    make_parser,
)
from training_loop import init_trackers, run_micro_step, run_steps, say_start
from validation import make_held_out_loss
from validation_videos import check_validation, encode_prompts, make_validation_videos
from wan_training import (
    LORA_TARGET_MODULES,
    MODEL_CLASS,
    PIPELINE_CLASS,
    add_wan_arguments,
    check_dataset,
    choose_variant,
    latent_statistics,
    make_predict,
    normalize,
)

from adaptiveload_hf import make_accelerator
from adaptiveload_hf.buckets.sources import load_prepared
from adaptiveload_hf.distributed import all_ranks_fail_together
from adaptiveload_hf.errors import exit_on_user_error, options_as_flags


def parse_args(argv=None) -> argparse.Namespace:
    parser = make_parser(
        __doc__,
        add_model_arguments,
        add_wan_arguments,
        add_lora_arguments,
        add_flow_arguments,
        add_scheduler_arguments,
        add_run_arguments,
        add_validation_arguments,
        add_hub_arguments,
    )
    parser.set_defaults(lora_target_modules=LORA_TARGET_MODULES)
    return parser.parse_args(argv)


def main():
    args = parse_args()
    accelerator = make_accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with=None if args.report_to == "none" else args.report_to,
        project_config=ProjectConfiguration(args.output_dir, logging_dir=Path(args.output_dir, args.logging_dir)),
    )
    otherwise = f"stop it with `touch {Path(args.output_dir, 'STOP')}`"
    only = only_run(accelerator, Path(args.output_dir), otherwise)
    with all_ranks_fail_together(accelerator), only, options_as_flags(vars(args)):
        train(accelerator, args)
        accelerator.wait_for_everyone()
    accelerator.end_training()


def train(accelerator, args):
    check_arguments(args, LORA_TARGET_MODULES)
    set_seed(args.seed)  # the same on all ranks: FSDP2 shards what each rank holds and broadcasts nothing
    output_dir = Path(args.output_dir)
    drop_earlier_request(accelerator, output_dir)
    checkpoint = find_checkpoint(accelerator, output_dir, args.resume_from_checkpoint)

    # Whatever can be wrong with launch, data and plan shows here, before any weights are read.
    refuse_unsafe_sharding(accelerator, args.gradient_checkpointing, args.rank is not None)
    variant = choose_variant(args)
    transformer_config = load_model_config(MODEL_CLASS, args, variant.subfolder)
    flow = make_flow_matching(args, variant.bounds, args.first_frame_given)
    check_validation(args, variant, transformer_config)
    dataset = load_checked(args.dataset, transformer_config)
    held_out = load_checked(args.validation_dataset, transformer_config) if args.validation_dataset else None
    sizes = column_sizes(dataset, transformer_config)
    statistics = latent_statistics(args, *filter(None, (dataset, held_out)))
    drop_captions = make_caption_dropout(args.proportion_empty_prompts, args.dataset, args.seed, sizes)
    repository = find_repository(accelerator, args)
    bucket_config = bucket_config_for(accelerator, args, dataset)
    loader, total_steps = make_loader(accelerator, args, dataset, bucket_config, checkpoint)

    prompts = encode_prompts(accelerator, args, sizes["prompt_embeds"][0]) if args.validation_prompt else None
    transformer = load_transformer(accelerator, MODEL_CLASS, args, variant.subfolder)
    model, optimizer, scheduler = prepare_training(accelerator, args, transformer, total_steps)
    if checkpoint is not None:
        load_checkpoint(accelerator, model, optimizer, scheduler, checkpoint, args)
    model_facts, environment = describe_run(accelerator, args, MODEL_CLASS, transformer_config)
    if accelerator.is_main_process:
        say_start(args, loader, bucket_config.check_environment(environment, model_facts), total_steps)
        keep_metrics_until(output_dir / "metrics.jsonl", loader.global_step)
    init_trackers(accelerator, "train_wan", args)

    predict = make_predict(accelerator, model, variant, args.first_frame_given)

    def losses(batch):
        batch = drop_captions(normalize(batch, statistics), loader.epoch)
        return flow.sample_losses(predict, batch, loader.epoch)

    def held_out_losses(flow, batch):
        return flow.sample_losses(predict, normalize(batch, statistics), 0)

    def run(batch):
        return run_micro_step(accelerator, model, optimizer, scheduler, losses, batch, args.max_grad_norm)

    if not args.no_preflight:
        try_buckets(accelerator, args, environment, sizes, run, loader.plan, model, optimizer, scheduler)
    validators = []
    if held_out is not None:
        geometry = bucket_config.geometry
        validators.append(make_held_out_loss(accelerator, held_out, loader, geometry, flow, held_out_losses))
    if prompts is not None:
        channels = transformer_config["out_channels"]
        validators.append(make_validation_videos(accelerator, args, predict, flow, channels, prompts, loader.plan))
    if not run_steps(accelerator, args, model, loader, scheduler, run, total_steps, validators):
        return  # asked to stop; a checkpoint says where
    with others_wait(accelerator):
        save_result(accelerator, args, model, PIPELINE_CLASS, variant.subfolder)
        if accelerator.is_main_process:
            publish(args, repository, loader, MODEL_CLASS, variant.subfolder, environment)


def load_checked(folder, transformer_config):
    dataset = load_prepared(folder)
    check_dataset(dataset, transformer_config)
    return dataset


if __name__ == "__main__":
    with exit_on_user_error("train_wan.py"):
        main()
