"""What happens in every optimizer step of a run: micro-steps, the step's line in metrics.jsonl, checkpoints."""

import json
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from checkpoints import save_checkpoint
from tqdm.auto import tqdm

from adaptiveload_hf.benchmark import append_line


def run_steps(accelerator: Accelerator, args, loader, scheduler, run, total_steps: int) -> None:
    """The loop: micro-steps, and at every K-th the step's line in metrics.jsonl and perhaps a checkpoint.

    Args:
        args: of `add_run_arguments`, and `output_dir`.
        loader: BucketDataLoader.
        run: (batch) -> what `run_micro_step` returns.
        total_steps: optimizer steps of the whole run.
    """
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


def run_micro_step(accelerator: Accelerator, model, optimizer, scheduler, losses, batch: dict, max_grad_norm: float):
    """Forward and backward of one micro-batch; every K-th call also clips and steps.

    Args:
        losses: (batch) -> the loss of each sample, [B].
        batch: what `losses` needs, and `loss_weight`, the float that makes averaging over ranks and micro-steps exact.

    Returns:
        The weighted loss, a scalar tensor whose mean over the W*K micro-batches is the optimizer step's loss, and
        the gradient's norm before clipping (None between optimizer steps).
    """
    grad_norm = None
    with accelerator.accumulate(model):
        loss = losses(batch).mean() * batch["loss_weight"]
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        if accelerator.sync_gradients:
            scheduler.step()
        optimizer.zero_grad()
    return loss.detach(), grad_norm


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


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def say_start(args, loader, scheduler, differences: list[str], total_steps: int) -> None:
    """What is about to be trained; for the main process.

    Args:
        differences: of this run from the one that the bucket config was measured in.
    """
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
    in_use = scheduler.scheduler.base_lrs[0]
    if in_use != args.learning_rate:  # a checkpoint brings its own learning rate back
        say(f"  learning rate {in_use} of the checkpoint is used, not --learning_rate {args.learning_rate}")
