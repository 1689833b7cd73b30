"""How long does an epoch of the same samples take on these ranks, scheduled and run in one way and in another?

accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 recipes/compare_schedules.py \\
    --config recipes/runs/wan2.1_1.3b.json --shapes recipes/mixed_shapes.json --samples 200 --bucket_config config \\
    --output_dir compare --arms equal_token/none/eager dual/auto/patched

Random latents of real shapes, made on the device; one model, trained on by every arm in turn. With --predict nothing is
trained: the laws of the bucket configs say what each arm will take.
"""

import argparse
import datetime
import json
import shlex
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import wan_training
from accelerate.utils import gather_object, set_seed
from benchmark_shapes import use_config_alone
from flow_matching import make_flow_matching
from model_setup import describe_run, load_transformer, load_transformer_config, prepare_training
from random_batches import column_sizes, make_random_batches
from schedule_arms import Arm, law_of, predict, scaled, schedule_of
from training_arguments import add_flow_arguments, add_model_arguments
from training_loop import run_micro_step

from adaptiveload_hf import BucketConfig, LatentShape, make_accelerator, patch_model, unpatch_model
from adaptiveload_hf.commands.arguments import read_samples
from adaptiveload_hf.distributed import all_ranks_fail_together, model_input_dtype
from adaptiveload_hf.errors import exit_on_user_error
from adaptiveload_hf.monitor import BlockClock, counted_since, device_counters, repeated_block, seconds_between


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, required=False)
    add_flow_arguments(parser)
    add = parser.add_argument
    add("--config", required=True, help="a Wan transformer's config.json; the weights are random")
    add("--shapes", type=Path, required=True, help='JSON {"21x60x104": samples, ...}')
    add("--samples", type=int, help="about so many in all, in the proportions of --shapes")
    add("--arms", nargs="+", type=Arm.parse, required=True, metavar="POLICY/BALANCE/KERNELS")
    add("--bucket_config", required=True, help="measured with patched blocks; batch sizes and dealing go by it")
    add("--eager_bucket_config", help="measured with eager blocks: what eager arms are predicted by")
    add("--predict", type=int, metavar="RANKS", help="train nothing; predict for so many ranks")
    parser.set_defaults(rank=None, no_patch=True, expert=None)
    return parser.parse_args(argv)


def main():
    args = parse_args()
    laws = {"patched": BucketConfig.from_pretrained(args.bucket_config)}
    if args.eager_bucket_config:
        laws["eager"] = BucketConfig.from_pretrained(args.eager_bucket_config)
    counts = read_samples(args.shapes).counts
    counts = counts if args.samples is None else scaled(counts, args.samples)
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    if args.predict is not None:
        rows = [predict(arm, *plan_arm(args, arm, counts, laws, args.predict), laws) for arm in args.arms]
        write(output / "predicted.json", args, counts, rows, {"world_size": args.predict})
        return print_rows(rows)
    accelerator = make_accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
    )
    with all_ranks_fail_together(accelerator):
        use_config_alone(accelerator, args, output / "pipeline")
        training = Training(accelerator, args)
        rows, environment = [], training.environment
        for arm in args.arms:
            plan, schedule = plan_arm(args, arm, counts, laws, accelerator.num_processes)
            rows.append(
                predict(arm, plan, schedule, laws) | run_arm(training, arm, plan, schedule, law_of(arm, laws))
            )
            if accelerator.is_main_process:  # after each arm, so that a run that is cut short leaves what it has
                write(output / "compare.json", args, counts, rows, environment)
                print_rows(rows[-1:])
        accelerator.wait_for_everyone()
    accelerator.end_training()


def plan_arm(args, arm: Arm, counts, laws, world_size: int):
    return schedule_of(
        arm,
        counts,
        laws["patched"],
        memory_limit_gib=args.memory_limit_gib,
        world_size=world_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        seed=args.seed,
    )


class Training:
    """One sharded model and its optimizer, on whose blocks any kernels can be put."""

    def __init__(self, accelerator, args):
        set_seed(args.seed)  # the same on all ranks: FSDP2 shards what each rank holds and broadcasts nothing
        self.accelerator, self.args = accelerator, args
        self.config = load_transformer_config(wan_training.MODEL_CLASS, args)
        with accelerator.device:  # random weights are made fastest where they are to be
            transformer = load_transformer(accelerator, wan_training.MODEL_CLASS, args)
        self.model, self.optimizer, self.scheduler = prepare_training(accelerator, args, transformer)
        self.flow = make_flow_matching(args)
        self.predict = wan_training.make_predict(accelerator, self.model, wan_training.WanVariant())
        self.random_batch = make_random_batches(column_sizes(None, self.config), accelerator.device)
        model, environment = describe_run(accelerator, args, wan_training.MODEL_CLASS, self.config)
        environment.pop("patched")
        self.environment = {"model": model["class"], **environment}

    def micro_step(self, shape: LatentShape, samples: np.ndarray, loss_weight: float) -> None:
        batch = self.random_batch(shape, len(samples))
        batch |= {"sample_index": torch.from_numpy(samples), "loss_weight": loss_weight}

        def losses(batch):
            return self.flow.sample_losses(self.predict, batch, 0)

        parts = (self.accelerator, self.model, self.optimizer, self.scheduler)
        run_micro_step(*parts, losses, batch, self.args.max_grad_norm)

    @contextmanager
    def kernels(self, name: str):
        """The blocks run on these inside the `with`."""
        blocks = innermost_blocks(self.model)
        if name == "patched":
            report = patch_model(self.model)
            if self.accelerator.is_main_process:
                print(report, file=sys.stderr)
        if name == "compiled":
            # Each block by itself, as diffusers' compile_repeated_blocks does, but inside FSDP's hooks and the
            # checkpoint, which would break its graph. Dynamic from the start: a graph a shape would take minutes.
            for block in blocks:
                block.forward = torch.compile(block.forward, dynamic=True)
        yield
        if name == "patched":
            unpatch_model(self.model)
        if name == "compiled":
            for block in blocks:
                del block.forward
            torch._dynamo.reset()


def innermost_blocks(model) -> list[torch.nn.Module]:
    return [module for module in model.modules() if "WanTransformerBlock" in type(module).__name__]


def warm_up(training: Training, arm: Arm, plan, schedule) -> None:
    """Every (shape, B) of the arm once, unless eager kernels have seen it; the largest and the smallest always.

    Attention's plans are made, and graphs compiled, at the first call of a size. A model of one unsharded block makes
    the plans as well as the whole one, in a thirtieth of the time; graphs need the real one.
    """
    pairs = np.unique(np.stack([schedule.bucket, schedule.sizes]), axis=1).T.tolist()
    pairs.sort(key=lambda pair: pair[1] * plan.buckets[pair[0]].tokens)
    if arm.kernels != "compiled":
        config = training.config | {"num_layers": 1}
        with training.accelerator.device:
            block = wan_training.MODEL_CLASS.from_config(config).train()
        block.to(model_input_dtype(training.accelerator))
        predict_small = wan_training.make_predict(training.accelerator, block, wan_training.WanVariant())
        for bucket, size in pairs:
            batch = training.random_batch(plan.buckets[bucket].shape, size)
            predict_small(batch["latent"], torch.ones(size, device=batch["latent"].device), batch).sum().backward()
        pairs = [pairs[-1], pairs[0]]
    for bucket, size in pairs:
        for _ in range(schedule.gradient_accumulation_steps):
            training.micro_step(plan.buckets[bucket].shape, np.arange(size), 1.0)


def run_arm(training: Training, arm: Arm, plan, schedule, cost) -> dict:
    """One epoch of the schedule, after a warm-up that is not timed.

    Args:
        cost: the law of the arm's kernels, or None.

    Returns:
        The arm's numbers, the same on all ranks.
    """
    accelerator, on_gpu = training.accelerator, training.accelerator.device.type == "cuda"
    rank, world_size = accelerator.process_index, schedule.world_size
    clock = BlockClock(on_gpu)
    with training.kernels(arm.kernels):
        warming_since = time.perf_counter()
        warm_up(training, arm, plan, schedule)
        hooks = clock.attach(repeated_block(training.model))
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        counters, blocks, moments = device_counters(), [], []
        accelerator.wait_for_everyone()
        wait_for_device(accelerator.device)
        start = time.perf_counter()
        for micro_step in range(schedule.num_micro_steps):
            j = micro_step * world_size + rank
            moments.append(clock.now())
            clock.arm()
            training.micro_step(
                plan.buckets[schedule.bucket[j]].shape,
                schedule.micro_batch(micro_step, rank),
                float(schedule.loss_weight[j]),
            )
            blocks.append(clock.take())
        moments.append(clock.now())
        wait_for_device(accelerator.device)
        accelerator.wait_for_everyone()
        seconds = time.perf_counter() - start
        for hook in hooks:
            hook.remove()
    mine = {
        "seconds": seconds,
        "block_seconds": [seconds_between(pair) for pair in blocks],
        "starts": [seconds_between((moments[0], moment)) for moment in moments],
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        **counted_since(counters),
    }
    return describe(gather_object([mine]), schedule, plan, cost) | {"warm_up_seconds": start - warming_since}


def wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def describe(ranks: list[dict], schedule, plan, cost) -> dict:
    """What was measured, from what each rank saw."""
    world_size = schedule.world_size
    seconds = max(rank["seconds"] for rank in ranks)
    blocks = np.array([rank["block_seconds"] for rank in ranks]).T  # [micro-steps, ranks]
    samples = np.where(schedule.loss_weight > 0, schedule.sizes, 0)
    found = {
        "seconds": seconds,
        "samples_per_second": float(samples.sum() / seconds),
        "tokens_per_second": float((samples * schedule.tokens).sum() / seconds),
        "measured_balance_efficiency": float(blocks.mean(1).sum() / blocks.max(1).sum()),
        "measured_block_cv": float((blocks.std(1) / blocks.mean(1)).mean()),
        "block_seconds_of_ranks": blocks.sum(0).tolist(),
    }
    if cost is not None:
        solo = cost.seconds(schedule.sizes, schedule.tokens).reshape(-1, world_size)
        found["achieved_efficiency"] = float(solo.mean(1).sum() / seconds)
        found["prediction_error"] = float(solo.max(1).sum() / seconds - 1)
    for name in ("peak_allocated_gib", "peak_reserved_gib", "allocator_retries", "recompiles"):
        found[name] = max(rank[name] for rank in ranks)
    shapes = [str(plan.buckets[bucket].shape) for bucket in schedule.bucket]
    lines = zip(shapes, schedule.sizes.tolist(), blocks.flatten().tolist())
    found["micro_batches"] = [[shape, size, round(block, 6)] for shape, size, block in lines]  # rank by rank
    found["starts"] = [[round(moment, 4) for moment in rank["starts"]] for rank in ranks]
    return found


def write(path: Path, args, counts, rows: list[dict], environment: dict) -> None:
    about = {
        "command": shlex.join(["recipes/compare_schedules.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "environment": environment,
        "samples": {str(shape): count for shape, count in counts.items()},
    }
    path.write_text(json.dumps({**about, "arms": rows}) + "\n")


def print_rows(rows: list[dict]) -> None:
    for row in rows:
        words = [f"{row['arm']} ({row['balance']}): {row['samples']} samples in {row['micro_steps']} micro-steps"]
        if row["predicted"]:
            words.append(f"predicted {row['predicted']['epoch_seconds']:.2f} s")
        words.append(f"step CV {row['predicted_step_cv']:.3f}, efficiency {row['predicted_balance_efficiency']:.3f}")
        if "seconds" in row:
            words.append(f"measured {row['seconds']:.2f} s, {row['samples_per_second']:.2f} samples/s")
            words.append(f"blocks' balance {row['measured_balance_efficiency']:.3f}")
            words.append(f"{row['peak_allocated_gib']:.1f} GiB, {row['allocator_retries']} retries")
            words.append(f"{row['recompiles']} recompiles, warmed up in {row['warm_up_seconds']:.1f} s")
        if "achieved_efficiency" in row:
            words.append(f"achieved {row['achieved_efficiency']:.3f}, error {row['prediction_error']:+.1%}")
        print("; ".join(words), flush=True)


if __name__ == "__main__":
    with exit_on_user_error("compare_schedules.py"):
        main()
