"""How is a Wan text-to-video transformer trained on shapes of every size, with all ranks equally loaded?

accelerate launch --config_file accelerate_configs/fsdp2.yaml --main_process_port 0 recipes/train_wan.py \\
    --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --dataset prepared --bucket_config config \\
    --output_dir run --max_train_steps 1000 --gradient_accumulation_steps 2 --resume_from_checkpoint latest
"""

import argparse
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import torch
from accelerate import init_empty_weights
from accelerate.utils import LoggerType, broadcast_object_list, set_seed
from diffusers import WanTransformer3DModel
from tqdm.auto import tqdm
from wan_training import (
    add_flow_arguments,
    add_model_arguments,
    add_scheduler_arguments,
    check_dataset,
    describe_run,
    latent_statistics,
    load_transformer_config,
    make_flow_matching,
    prepare_training,
    run_micro_step,
)

from adaptiveload_hf import BucketConfig, BucketDataLoader, UserError, make_accelerator
from adaptiveload_hf.benchmark import append_line
from adaptiveload_hf.buckets.shapes import load_prepared
from adaptiveload_hf.distributed import all_ranks_fail_together
from adaptiveload_hf.errors import exit_on_user_error


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add_flow_arguments(parser)
    add_scheduler_arguments(parser)
    add = parser.add_argument
    add("--bucket_config", required=True, help="folder that benchmark_shapes.py wrote, or a Hub id")
    add("--num_train_epochs", type=int, default=1)
    add("--max_train_steps", type=int, help="optimizer steps in all; overrides --num_train_epochs")
    add("--balance", default="auto", help="none, step, window:n or auto")
    add("--loss_normalization", choices=["token", "sample", "none"], default="token")
    add("--allow_extrapolation", action="store_true", help="accept shapes outside the measured range of tokens")
    add("--dataloader_num_workers", type=int, default=0)
    add("--checkpointing_steps", type=int, default=500)
    add("--checkpoints_total_limit", type=int, help="keep only the newest so many")
    add("--resume_from_checkpoint", help="'latest', or a checkpoint-<step> folder")
    add("--report_to", choices=["none", *LoggerType.list()], default="tensorboard", help="tracker of accelerate")
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

    # Whatever can be wrong with data and plan shows here, before any weights are read.
    transformer_config = load_transformer_config(args)
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
    model, optimizer, scheduler = prepare_training(accelerator, args, total_steps)
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
    if accelerator.is_main_process:
        model_facts, environment = describe_run(accelerator, args, transformer_config)
        say_start(args, loader, bucket_config.check_environment(environment, model_facts), total_steps)
        say_learning_rate(scheduler, args.learning_rate)
        keep_metrics_until(output_dir / "metrics.jsonl", loader.global_step)
    accelerator.init_trackers("train_wan", config={name: str(value) for name, value in vars(args).items()})

    def run(batch):
        batch = normalize(batch, statistics)
        return run_micro_step(accelerator, model, optimizer, scheduler, flow, batch, loader.epoch, args.max_grad_norm)

    run_steps(accelerator, args, loader, scheduler, run, total_steps)
    save_transformer(accelerator, model, output_dir / "transformer")


def run_steps(accelerator, args, loader, scheduler, run, total_steps: int):
    """The loop: micro-steps, and at every K-th the step's line in metrics.jsonl and perhaps a checkpoint."""
    output_dir = Path(args.output_dir)
    step = loader.global_step
    bar = tqdm(total=total_steps, initial=step, desc="training", disable=not accelerator.is_main_process)
    record = StepRecord()
    while step < total_steps:
        for batch in loader:
            record.data_arrived()
            loss, grad_norm = run(batch)
            record.micro_step_done(loss, batch["micro_step"])
            if not accelerator.sync_gradients:
                continue
            step += 1
            metrics = {
                "step": step,
                "epoch": loader.epoch,
                # Reading the number waits for the step to end, so it comes before the clock is read.
                "loss": accelerator.reduce(torch.stack(record.losses).mean(), "mean").item(),
                "learning_rate": scheduler.get_last_lr()[0],
                "grad_norm": float(grad_norm),
                **record.describe(loader),
            }
            accelerator.log({name: value for name, value in metrics.items() if isinstance(value, float)}, step=step)
            if accelerator.is_main_process:
                append_line(output_dir / "metrics.jsonl", json.dumps(metrics))
                bar.set_postfix_str(status_line(metrics, accelerator.num_processes))
            bar.update()
            if step % args.checkpointing_steps == 0 or step == total_steps:
                save_checkpoint(accelerator, output_dir, step, args.checkpoints_total_limit)
            record = StepRecord()
            if step == total_steps:
                break
    bar.close()


class StepRecord:
    """What one optimizer step took and held; starts with the wait for its first batch."""

    def __init__(self):
        self.start = self.waiting_since = time.perf_counter()
        self.data_wait_seconds = 0.0
        self.losses: list[torch.Tensor] = []
        self.micro_steps: list[int] = []

    def data_arrived(self):
        self.data_wait_seconds += time.perf_counter() - self.waiting_since

    def micro_step_done(self, loss: torch.Tensor, micro_step: int):
        self.losses.append(loss)
        self.micro_steps.append(micro_step)
        self.waiting_since = time.perf_counter()

    def describe(self, loader) -> dict:
        """Counts over all ranks, from the schedule, without asking them; seconds are this rank's."""
        seconds = time.perf_counter() - self.start
        schedule, world_size = loader.schedule, loader.schedule.world_size
        micro_batches = [range(step * world_size, (step + 1) * world_size) for step in self.micro_steps]
        flat = [j for ranks in micro_batches for j in ranks]
        sizes = schedule.sizes[flat] * (schedule.loss_weight[flat] > 0)  # weight 0 marks padding
        samples, tokens = int(sizes.sum()), int((sizes * schedule.tokens[flat]).sum())
        cost = schedule.cost[flat].reshape(-1, world_size)
        return {
            "seconds": seconds,
            "samples": samples,
            "tokens": tokens,
            "samples_per_second": samples / seconds,
            "tokens_per_second": tokens / seconds,
            "balance_efficiency": float(cost.mean(1).sum() / cost.max(1).sum()),
            "data_wait_seconds": self.data_wait_seconds,
            "micro_batches": [
                [
                    {
                        "shape": str(loader.plan.buckets[schedule.bucket[j]].shape),
                        "batch_size": int(schedule.sizes[j]),
                    }
                    for j in ranks
                ]
                for ranks in micro_batches
            ],
        }


def status_line(metrics: dict, world_size: int) -> str:
    return (
        f"loss {metrics['loss']:.4f} | {metrics['seconds']:.2f} s | {metrics['samples_per_second']:.2f} samples/s | "
        f"{metrics['tokens_per_second'] / world_size:.0f} tokens/s/rank | "
        f"balance {metrics['balance_efficiency']:.3f} | data wait {metrics['data_wait_seconds']:.3f} s"
    )


def normalize(batch: dict, statistics) -> dict:
    """Latents as the transformer knows them; `statistics` is None where the dataset holds them so."""
    if statistics is None or batch["latent_normalized"]:
        return batch
    mean, std = (value.to(batch["latent"].device) for value in statistics)
    return {**batch, "latent": (batch["latent"].float() - mean) / std}


def checkpoints_in(output_dir: Path) -> dict[int, Path]:
    """Whole checkpoints by step; one that was cut short still has its temporary name."""
    found = {re.fullmatch(r"checkpoint-(\d+)", path.name): path for path in output_dir.glob("checkpoint-*")}
    return {int(match[1]): path for match, path in sorted(found.items(), key=lambda x: str(x[1])) if match}


def find_checkpoint(accelerator, output_dir: Path, wanted: str | None) -> Path | None:
    """The checkpoint to resume from, the same on all ranks; None starts afresh.

    Raises:
        UserError: `wanted` is not there; or nothing is wanted and the folder already holds a run.
    """
    found: list[str | None] = [None]
    if accelerator.is_main_process:
        output_dir.mkdir(parents=True, exist_ok=True)
        present = checkpoints_in(output_dir)
        names = ", ".join(path.name for path in present.values()) or "none"
        if wanted is None and present:
            raise UserError(
                f"{output_dir} already holds a run ({names}). Pass --resume_from_checkpoint latest to go on with it, "
                "or another --output_dir."
            )
        if wanted == "latest":
            if present:
                found[0] = str(present[max(present)])
            else:
                say(f"no checkpoint in {output_dir} yet: starting afresh")
        elif wanted is not None:
            path = next((p for p in (Path(wanted), output_dir / wanted) if p.is_dir()), None)
            if path is None:
                raise UserError(
                    f"--resume_from_checkpoint {wanted}: no such folder; {output_dir} holds {names}. Pass one of "
                    "them, or 'latest'."
                )
            found[0] = str(path)
    broadcast_object_list(found)
    return None if found[0] is None else Path(found[0])


def save_checkpoint(accelerator, output_dir: Path, step: int, total_limit: int | None):
    """Saves under a temporary name and renames, so that a save that is killed never becomes `latest`."""
    whole, partial = output_dir / f"checkpoint-{step}", output_dir / f"partial-checkpoint-{step}"
    if accelerator.is_main_process:
        for cut_short in output_dir.glob("partial-checkpoint-*"):
            shutil.rmtree(cut_short)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if whole.exists():  # of a run that was resumed from further back
            shutil.rmtree(whole)
        os.replace(partial, whole)
        present = checkpoints_in(output_dir)
        for old in sorted(present)[: -total_limit if total_limit else 0]:
            shutil.rmtree(present[old])
    accelerator.wait_for_everyone()


def save_transformer(accelerator, model, folder: Path):
    """Saves the whole transformer in float32, as `WanTransformer3DModel.from_pretrained(folder)` loads it."""
    state_dict = accelerator.get_state_dict(model)  # gathers: all ranks take part
    if accelerator.is_main_process:
        with init_empty_weights():
            transformer = WanTransformer3DModel.from_config(accelerator.unwrap_model(model).config)
        transformer.load_state_dict(state_dict, assign=True)
        transformer.save_pretrained(folder)
        say(f"the trained transformer is in {folder}")


def keep_metrics_until(path: Path, step: int):
    """Drops the lines of steps that are about to be done again, so that each step has one line."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    if len(kept) < len(lines):
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept))
        os.replace(partial, path)


def say(text: str):
    print(text, file=sys.stderr, flush=True)


def say_start(args, loader, differences: list[str], total_steps: int):
    """What is about to be trained, on the main process."""
    say("***** Running training *****")
    plan, schedule = loader.plan, loader.schedule
    say(f"  samples {sum(bucket.count for bucket in plan.buckets)} in {len(plan.buckets)} buckets")
    say(f"  ranks {schedule.world_size}, gradient accumulation steps {args.gradient_accumulation_steps}")
    say(f"  optimizer steps {loader.global_step} of {total_steps} done, {schedule.num_update_steps} an epoch")
    say(f"  epoch {loader.epoch}: {len(schedule.unseen())} samples not yet seen")
    say(f"  balance {schedule.balance}, loss normalization {args.loss_normalization}")
    for bucket in plan.buckets:
        say(f"  {bucket.shape} ({bucket.shape.pixels()} pixels): {bucket.count} samples, B = {bucket.batch_size}")
    for finding in (*plan.findings, *schedule.findings):
        say(f"  {finding}")
    for difference in differences:
        say(f"  bucket config, {difference}")


def say_learning_rate(scheduler, asked: float):
    """A checkpoint brings its own learning rate back."""
    in_use = scheduler.scheduler.base_lrs[0]
    if in_use != asked:
        say(f"  learning rate {in_use} of the checkpoint is used, not --learning_rate {asked}")


if __name__ == "__main__":
    with exit_on_user_error("train_wan.py"):
        main()
