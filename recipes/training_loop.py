"""What happens in every optimizer step of a run: micro-steps, the step's line in metrics.jsonl, checkpoints."""

import json
import math
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from checkpoints import named_if_not_written, save_checkpoint
from data_setup import parse_batch_sizes
from stopping import out_of_memory, resume_command, stop_requests, validation_out_of_memory
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm

from adaptiveload_hf import TrainingMonitor, UserError
from adaptiveload_hf.benchmark import append_line
from adaptiveload_hf.errors import as_flags
from adaptiveload_hf.scan import vae_scale_of


def run_steps(accelerator: Accelerator, args, model, loader, scheduler, run, total_steps: int, validators) -> bool:
    """The loop: micro-steps, and at every K-th the step's line in metrics.jsonl and perhaps a checkpoint.

    Args:
        args: of `add_run_arguments` and `add_validation_arguments`, and `output_dir`.
        model: as `accelerator.prepare` returned it.
        loader: BucketDataLoader.
        run: (batch) -> what `run_micro_step` returns.
        total_steps: optimizer steps of the whole run.
        validators: (step) -> values to add to the step's line, every --validation_steps and at the end; on all ranks.

    Returns:
        Whether all steps are done; else it was asked to stop, and a checkpoint holds where.

    Raises:
        UserError: too little memory, or too many steps whose gradient is not finite.
    """
    output_dir = Path(args.output_dir)
    stop_file = output_dir / "STOP" if accelerator.is_main_process else None
    step, skipped = loader.global_step, 0
    bar = tqdm(total=total_steps, initial=step, desc="training", disable=not accelerator.is_main_process)
    with stop_requests(stop_file) as stop_wanted, bar:
        monitor, done = TrainingMonitor(accelerator, model, loader), []
        while step < total_steps:
            for batch in monitor:
                try:
                    loss, grad_norm = run(batch)
                except torch.OutOfMemoryError:
                    raise _out_of_memory(accelerator, loader, batch, args) from None
                done.append((loss, batch["sample_index"].tolist()))
                measured = monitor.micro_step_done(loss, flag=stop_wanted())
                if measured is None:
                    continue
                step += 1
                loss, stop = measured["loss"], measured.pop("flag")
                # With float16 an infinite gradient is how the scaler finds its scale; there the loss decides.
                if not math.isfinite(grad_norm if accelerator.scaler is None else loss):
                    skipped += 1
                    _skip(accelerator, loader, done, step, skipped, args.max_skipped_steps)
                rates = {"learning_rate": scheduler.get_last_lr()[0], "grad_norm": grad_norm, "skipped_steps": skipped}
                metrics = _finite({"step": step, "epoch": loader.epoch, **measured, **rates})
                _write(accelerator, output_dir, metrics)
                _show(metrics, monitor.status_line(measured), bar)
                finished = step == total_steps
                if stop or finished or step % args.checkpointing_steps == 0:
                    save_checkpoint(accelerator, model, output_dir, step, args)
                # Last: it may run out of memory, or take longer than who asked to stop will wait.
                if finished or (step % args.validation_steps == 0 and not stop):
                    for validate in validators:
                        bar.set_description("validating")  # a clip may take minutes
                        try:
                            validated = _finite(validate(step))
                        except torch.OutOfMemoryError:
                            raise validation_out_of_memory(accelerator, step) from None
                        if validated:
                            _complete(accelerator, output_dir, metrics, validated)
                            metrics |= validated
                    bar.set_description("training")
                if stop or finished:
                    break
                done = []
            if stop:
                break
        monitor.close()
    if stop_file is not None:
        stop_file.unlink(missing_ok=True)  # one that came with the last step must not end the next run
    if step < total_steps and accelerator.is_main_process:
        say(f"stopped after step {step} of {total_steps}, as asked; to go on:\n{resume_command()}")
    return step >= total_steps


def run_micro_step(accelerator: Accelerator, model, optimizer, scheduler, losses, batch: dict, max_grad_norm: float):
    """Forward and backward of one micro-batch; every K-th call also clips and steps.

    A gradient that is not finite changes nothing but the learning rate's schedule. It is seen in its norm, which is
    the same on all ranks, so they agree without asking each other.

    Args:
        losses: (batch) -> the loss of each sample, [B].
        batch: what `losses` needs, and `loss_weight`, the float that makes averaging over ranks and micro-steps exact.

    Returns:
        The weighted loss, a scalar tensor whose mean over the W*K micro-batches is the optimizer step's loss, and
        the gradient's norm before clipping, a float (None between optimizer steps).
    """
    grad_norm = None
    with accelerator.accumulate(model):
        loss = losses(batch).mean() * batch["loss_weight"]
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
            # In torch 2.9 float() of a sharded norm is this rank's part of it.
            grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        # With float16 the scaler itself leaves such a step out, and must be told, to scale less.
        if grad_norm is not None and not math.isfinite(grad_norm) and accelerator.scaler is None:
            optimizer.zero_grad()
        optimizer.step()  # without gradients it changes nothing, but is made: a checkpoint's loader goes on after it
        if accelerator.sync_gradients:
            scheduler.step()
        optimizer.zero_grad()
    return loss.detach(), grad_norm


def _skip(accelerator: Accelerator, loader, done: list[tuple], step: int, skipped: int, most: int) -> None:
    """Names the samples behind a gradient that is not finite; ends the run at the `most`-th such step.

    done: loss and sample indices of this rank's micro-batches.
    """
    mine = [sample for loss, samples in done if not torch.isfinite(loss) for sample in samples]
    bad = sorted(set(gather_object(mine)))
    if not bad:
        what = "the gradient is not finite, though every loss is: lower --learning_rate or --max_grad_norm"
    else:
        files = loader.dataset.select_columns(["file"]) if "file" in loader.dataset.column_names else None
        names = [str(sample) if files is None else f"{sample} ({files[sample]['file']})" for sample in bad]
        what = f"the loss is not finite in micro-batches with the samples {', '.join(names)}"
    if skipped >= most:
        raise UserError(
            f"step {step}: {what}. {skipped} steps were skipped for such a reason; --max_skipped_steps is {most}. "
            "Take those samples out of the dataset, or resume from an earlier checkpoint with a lower learning rate."
        )
    if accelerator.is_main_process:
        say(f"step {step} is skipped ({skipped} so far): {what}")


def _out_of_memory(accelerator: Accelerator, loader, batch: dict, args) -> UserError:
    reserved = torch.cuda.max_memory_reserved() / 2**30 if accelerator.device.type == "cuda" else 0.0
    return out_of_memory(accelerator, loader, batch, reserved, parse_batch_sizes(args.batch_sizes))


def _finite(values: dict) -> dict:
    """None for each number that is not finite: JSON has no NaN."""

    def finite(value):
        if isinstance(value, dict):
            return _finite(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: finite(value) for name, value in values.items()}


def _numbers(values: dict) -> dict[str, float]:
    """What a tracker draws."""
    return {name: value for name, value in values.items() if isinstance(value, float)}


def _write(accelerator: Accelerator, output_dir: Path, metrics: dict) -> None:
    """The step's line, in metrics.jsonl and in the tracker."""
    if accelerator.is_main_process:
        with _named_metrics(output_dir, metrics) as lines:
            append_line(lines, json.dumps(metrics))
    accelerator.log(_numbers(metrics), metrics["step"])


def _complete(accelerator: Accelerator, output_dir: Path, metrics: dict, validated: dict) -> None:
    """Adds to the step's line, the last one, what was validated after its checkpoint."""
    if accelerator.is_main_process:
        before, line = (json.dumps(each).encode() + b"\n" for each in (metrics, metrics | validated))
        with _named_metrics(output_dir, metrics) as lines, open(lines, "r+b") as file:
            file.seek(-len(before), os.SEEK_END)
            file.write(line)  # never shorter: a thousand ranks' lines are too many to write again
            file.flush()
            os.fsync(file.fileno())
    by_shape = {f"validation_loss/{name}": x for name, x in validated.get("validation_loss_by_shape", {}).items()}
    accelerator.log(_numbers(validated | by_shape), metrics["step"])


@contextmanager
def _named_metrics(output_dir: Path, metrics: dict):
    lines = output_dir / "metrics.jsonl"
    with named_if_not_written(f"the metrics of step {metrics['step']}", lines, output_dir):
        yield lines


def _show(metrics: dict, status: str, bar) -> None:
    """What is new, beside the progress bar."""
    bar.set_postfix_str(status)
    bar.update()
    if not bar.disable:
        for finding in metrics["findings"]:
            say(finding)


def init_trackers(accelerator: Accelerator, name: str, args) -> None:
    """Starts the tracker with the run's arguments, as text, for some refuse lists and None; a token is kept out."""
    config = {key: str(value) for key, value in vars(args).items() if not key.endswith("token")}
    accelerator.init_trackers(name, config=config)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def say_start(args, loader, differences: list[str], total_steps: int) -> None:
    """What is about to be trained; for the main process.

    Args:
        differences: of this run from the one that the bucket config was measured in.
    """
    say("***** Running training *****")
    plan, schedule = loader.plan, loader.schedule
    say(f"  samples {sum(bucket.count for bucket in plan.buckets)} in {len(plan.buckets)} buckets")
    say(f"  ranks {schedule.world_size}, gradient accumulation steps {args.gradient_accumulation_steps}")
    say(f"  optimizer steps {loader.global_step} of {total_steps} done")
    left = len(loader) // args.gradient_accumulation_steps
    say(f"  epoch {loader.epoch}: {len(schedule.unseen())} samples not yet seen, in {left} optimizer steps")
    say(f"  balance {schedule.balance}, loss normalization {args.loss_normalization}")
    scale = vae_scale_of(loader.dataset)
    for bucket in plan.buckets:
        pixels = bucket.shape.pixels(*scale)
        say(f"  {bucket.shape} ({pixels} pixels): {bucket.count} samples, B = {bucket.batch_size}")
    for finding in (*plan.findings, *schedule.findings):
        say(f"  {as_flags(finding, vars(args))}")
    if differences:
        say("  The bucket config is of another set-up, so its times and batch sizes may not fit this run:")
    for difference in differences:
        say(f"    {difference}")
    if loader.global_step >= total_steps:
        say("  nothing is left to train: --max_train_steps or --num_train_epochs ends here; the result is saved")
    say(f"  to stop with a checkpoint: touch {Path(args.output_dir, 'STOP')}")
