"""How long does an epoch of the same samples take on these ranks, scheduled and run in one way and in another?

accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 recipes/compare_schedules.py \\
    --config recipes/runs/wan2.1_1.3b.json --shapes recipes/mixed_shapes.json --samples 200 --bucket_config config \\
    --m_mem_tokens 65520 --output_dir compare --arms equal_token/none/eager dual/auto/patched

Random latents of real shapes, made on the device; one model, trained by every arm in turn. With --predict nothing is
trained: the laws of the bucket configs say what each arm will take. With --replay one process times every (shape, B)
of the arms once, and the epochs are put together from that: ranks without what they say to each other.
"""

import argparse
import datetime
import json
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import gather_object
from random_training import RandomTraining, add_training_arguments
from schedule_arms import Arm, law_of, listed, predict, scaled, schedule_of
from schedule_replay import replayed_ranks, time_sizes
from training_arguments import at_least

from adaptiveload_hf import BucketConfig, LatentShape, make_accelerator
from adaptiveload_hf.commands.arguments import read_samples
from adaptiveload_hf.device_memory import read_device_memory, wait_for_device
from adaptiveload_hf.distributed import all_ranks_fail_together
from adaptiveload_hf.errors import exit_on_user_error
from adaptiveload_hf.monitor import BlockClock, counted_since, device_counters, repeated_block, seconds_between


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training_arguments(parser)
    add = parser.add_argument
    add("--shapes", type=Path, required=True, help='JSON {"21x60x104": samples, ...}')
    add("--samples", type=at_least(1), help="about this many in all, in the proportions of --shapes")
    add(
        "--m_mem_tokens",
        type=at_least(1),
        required=True,
        help="tokens of a micro-batch that memory allows, in every arm",
    )
    add("--arms", nargs="+", type=Arm.parse, required=True, metavar="POLICY/BALANCE/KERNELS")
    add("--bucket_config", required=True, help="measured with patched blocks; batch sizes and dealing go by it")
    add("--eager_bucket_config", help="measured with eager blocks: what eager arms are predicted by")
    ways = parser.add_mutually_exclusive_group()
    ranks = {"type": at_least(1), "metavar": "RANKS"}
    ways.add_argument("--predict", **ranks, help="train nothing; predict for this many ranks")
    ways.add_argument("--replay", **ranks, nargs="+", help="on one process, for this many ranks")
    return parser.parse_args(argv)


def main():
    args = parse_args()
    laws = {"patched": BucketConfig.from_pretrained(args.bucket_config)}
    if args.eager_bucket_config:
        laws["eager"] = BucketConfig.from_pretrained(args.eager_bucket_config)
    counts = read_samples(args.shapes).counts
    counts = counts if args.samples is None else scaled(counts, args.samples)
    for kernels, law in laws.items():
        say_extrapolated(kernels, law, counts)
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    if args.replay is not None:
        replay(args, counts, laws, output)
    elif args.predict is None:
        run(args, counts, laws, output)
    else:
        rows = [predict(arm, *plan_arm(args, arm, counts, laws, args.predict), laws) for arm in args.arms]
        write(output / "predicted.json", args, counts, rows, {"world_size": args.predict})
        print_rows(rows)


def say_extrapolated(kernels: str, law: BucketConfig, counts: dict[LatentShape, int]) -> None:
    """Which shapes are shorter or longer than any that the law was measured with."""
    measured = [m.tokens for m in law.measurements if not m.oom]
    tokens = {shape: law.geometry.tokens(shape) for shape in counts}
    outside = [
        f"{shape} (S = {s})" for shape, s in tokens.items() if measured and not min(measured) <= s <= max(measured)
    ]
    if outside:
        print(
            f"The law of {kernels} blocks was measured from S = {min(measured)} to {max(measured)}; predictions for "
            f"{', '.join(outside)} are extrapolated.",
            file=sys.stderr,
        )


def run(args, counts, laws, output: Path) -> None:
    """Trains every arm; what is done is written after each, so that a run that is cut short leaves it."""
    accelerator = make_accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
    )
    with all_ranks_fail_together(accelerator):
        training, rows = RandomTraining(accelerator, args), []
        for arm in args.arms:
            plan, schedule = plan_arm(args, arm, counts, laws, accelerator.num_processes)
            measured = run_arm(training, arm, plan, schedule, law_of(arm, laws))
            rows.append(predict(arm, plan, schedule, laws) | measured)
            if accelerator.is_main_process:
                write(output / "compare.json", args, counts, rows, training.environment)
                print_rows(rows[-1:])
        accelerator.wait_for_everyone()
    accelerator.end_training()


def replay(args, counts, laws, output: Path) -> None:
    """Times every (shape, B) of the arms; what is done is written after each kind of kernels."""
    training = RandomTraining(make_accelerator(mixed_precision=args.mixed_precision), args)
    rows = []
    for kernels in dict.fromkeys(arm.kernels for arm in args.arms):
        arms = [arm for arm in args.arms if arm.kernels == kernels]
        made = [(arm, *plan_arm(args, arm, counts, laws, ranks)) for ranks in args.replay for arm in arms]
        sizes = {size: None for _, plan, schedule in made for size in distinct_sizes(plan, schedule)}
        sizes = sorted(sizes, key=lambda size: size[1] * laws["patched"].geometry.tokens(size[0]))
        counters, warming_since = device_counters(), time.perf_counter()
        with training.kernels(kernels):
            timed = time_sizes(training, kernels, sizes)
        spent, counted = time.perf_counter() - warming_since - sum(timed.values()), counted_since(counters)
        for arm, plan, schedule in made:
            ranks = replayed_ranks(training, plan, schedule, timed, counted)
            measured = describe(ranks, schedule, plan, law_of(arm, laws))
            rows.append(predict(arm, plan, schedule, laws) | measured | {"warm_up_seconds": spent})
            print_rows(rows[-1:])
        write(output / "replay.json", args, counts, rows, training.environment)


def plan_arm(args, arm: Arm, counts, laws, world_size: int):
    return schedule_of(
        arm,
        counts,
        laws["patched"],
        m_mem_tokens=args.m_mem_tokens,
        world_size=world_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        seed=args.seed,
    )


def distinct_sizes(plan, schedule) -> list[tuple[LatentShape, int]]:
    """Every (shape, B) of the schedule, the fewest tokens first."""
    pairs = np.unique(np.stack([schedule.bucket, schedule.sizes]), axis=1).T.tolist()
    pairs.sort(key=lambda pair: pair[1] * plan.buckets[pair[0]].tokens)
    return [(plan.buckets[bucket].shape, size) for bucket, size in pairs]


def run_arm(training: RandomTraining, arm: Arm, plan, schedule, cost) -> dict:
    """One epoch of the schedule, after a warm-up that is not timed.

    Args:
        cost: the law of the arm's kernels, or None.

    Returns:
        The arm's numbers, the same on all ranks.
    """
    accelerator = training.accelerator
    rank, world_size = accelerator.process_index, schedule.world_size
    clock = BlockClock(accelerator.device.type == "cuda")
    with training.kernels(arm.kernels):
        warming_since = time.perf_counter()
        training.warm_up(arm.kernels, distinct_sizes(plan, schedule))
        hooks = clock.attach(repeated_block(training.model))
        counters, blocks, moments, reserved = device_counters(), [], [], []
        accelerator.wait_for_everyone()
        wait_for_device(accelerator.device)
        start = time.perf_counter()
        for micro_step in range(schedule.num_micro_steps):
            j = micro_step * world_size + rank
            moments.append(clock.now())
            clock.arm()
            training.micro_step(
                plan.buckets[schedule.bucket[j]].shape,
                torch.from_numpy(schedule.micro_batch(micro_step, rank)),
                float(schedule.loss_weight[j]),
            )
            blocks.append(clock.take())
            reserved.append(read_device_memory(accelerator.device).reserved_gib)
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
        "reserved_gib": reserved,
        "peak_gib": read_device_memory(accelerator.device).peak_gib,
        **counted_since(counters),
    }
    return describe(gather_object([mine]), schedule, plan, cost) | {"warm_up_seconds": start - warming_since}


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
    for name in ("peak_gib", "peak_reserved_gib", "allocator_retries", "recompiles"):
        found[name] = max(rank[name] for rank in ranks)
    found["reserved_gib"] = np.max([rank["reserved_gib"] for rank in ranks], axis=0).round(3).tolist()
    found["micro_batches"] = listed(plan, schedule, blocks)
    found["starts"] = [[round(moment, 4) for moment in rank["starts"]] for rank in ranks]
    return found


def write(path: Path, args, counts, rows: list[dict], environment: dict) -> None:
    about = {
        "command": shlex.join(["recipes/compare_schedules.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "m_mem_tokens": args.m_mem_tokens,
        "environment": environment,
        "samples": {str(shape): count for shape, count in counts.items()},
    }
    path.write_text(json.dumps({**about, "arms": rows}) + "\n")


def print_rows(rows: list[dict]) -> None:
    for row in rows:
        words = [f"{row['arm']} ({row['balance']}, {row['ranks']} ranks)"]
        words.append(f"{row['samples']} samples in {row['micro_steps']} micro-steps")
        if row["predicted"]:
            words.append(f"predicted {row['predicted']['epoch_seconds']:.2f} s")
        words.append(f"step CV {row['predicted_step_cv']:.3f}, efficiency {row['predicted_balance_efficiency']:.3f}")
        words.append(f"{row['shapes_per_step']:.1f} shapes a step, mix {row['token_share_distance']:.2f}")
        if "seconds" in row:
            words.append(f"measured {row['seconds']:.2f} s, {row['samples_per_second']:.2f} samples/s")
            words.append(f"blocks' balance {row['measured_balance_efficiency']:.3f}")
            words.append(f"{row['peak_gib']:.1f} GiB, {row['allocator_retries']} retries")
            words.append(f"{row['recompiles']} recompiles, warmed up in {row['warm_up_seconds']:.1f} s")
        if "achieved_efficiency" in row:
            words.append(f"achieved {row['achieved_efficiency']:.3f}, error {row['prediction_error']:+.1%}")
        print("; ".join(words), flush=True)


if __name__ == "__main__":
    with exit_on_user_error("compare_schedules.py"):
        main()
