"""What does dealing bring, and does it still bring it? An epoch of 300,000 samples under each balance mode, simulated.

    python recipes/schedule_gates.py --output recipes/results/schedule_gates.json

Nothing is timed: seconds are the cost law's. Baseline: equal-token batches of one longest sample, dealt at random.
Each row has a floor that it must reach with every seed; a row that does not ends the command with status 1.
"""

import argparse
import datetime
import json
import platform
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adaptiveload_hf.buckets.cost import Roofline
from adaptiveload_hf.buckets.plan import make_plan
from adaptiveload_hf.buckets.schedule import LOSS_NORMALIZATIONS, EpochSchedule, loss_weights, schedule_epoch
from adaptiveload_hf.buckets.shapes import LatentShape, TokenGeometry
from adaptiveload_hf.buckets.simulate import shape_weights, simulate

# Probability of each shape: one row a size, one column a number of latent frames.
FRAMES = (1, 5, 9, 13, 17, 21)
SIZES = {
    (32, 32): (0.30, 0.05, 0.05, 0.04, 0.03, 0.03),
    (60, 104): (0.15, 0.08, 0.07, 0.05, 0.04, 0.03),
    (90, 160): (0.03, 0.02, 0.01, 0.01, 0.005, 0.005),
}
LONGEST = TokenGeometry().tokens(LatentShape(21, 90, 160))
# What flops_cost reads of Wan-AI/Wan2.1-T2V-1.3B-Diffusers' transformer/config.json.
WAN_1_3B = {
    "_class_name": "WanTransformer3DModel",
    "num_layers": 30,
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
    "text_dim": 4096,
    "freq_dim": 256,
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
}


class Row(NamedTuple):
    """A run, and what it must reach with every seed.

    memory: limit of a micro-batch, in longest samples. dealt_by: the cost that dealing goes by; batch sizes and
    seconds are the law's in any case. speedup: over the baseline's epoch.
    """

    world_size: int
    gradient_accumulation_steps: int
    balance: str
    memory: int
    dealt_by: str
    least_efficiency: float
    most_step_cv: float
    least_speedup: float


ROWS = (
    Row(8, 4, "step", 3, "law", 0.957, 0.038, 1.59),
    Row(8, 1, "window:8", 3, "law", 0.980, 0.018, 1.62),
    Row(8, 4, "window:8", 3, "law", 0.993, 0.007, 1.65),
    Row(16, 4, "step", 3, "law", 0.952, 0.038, 1.87),
    Row(64, 4, "window:8", 3, "law", 0.993, 0.006, 2.40),
    Row(64, 1, "auto", 1, "law", 0.88, np.inf, 2.1),
    Row(8, 4, "step", 3, "flops", 0.93, np.inf, 0.0),
    Row(8, 4, "stratified:8", 3, "law", 0.966, 0.024, 1.61),
    Row(64, 4, "stratified:8", 3, "law", 0.955, 0.035, 2.33),
    # With memory for one longest sample costs lie further apart.
    Row(8, 4, "stratified:8", 1, "law", 0.93, 0.06, 1.55),
    # What the others are to be seen beside: batch sizes alone (the paper), and one optimizer step of 64 at B = 1.
    Row(8, 4, "step", 1, "law", 0.0, np.inf, 0.0),
    Row(8, 4, "window:2", 1, "law", 0.0, np.inf, 0.0),
    Row(8, 4, "none", 3, "law", 0.0, np.inf, 0.0),
    Row(16, 4, "none", 3, "law", 0.0, np.inf, 0.0),
    Row(64, 1, "step", 1, "law", 0.0, np.inf, 0.0),
)


def law(stretch: float = 1.0) -> Roofline:
    """max(0.4517, B*(0.3178*s + 0.1515*s**2)) seconds, s = stretch * S / 10,000: a fit to steps of one H200."""
    return Roofline(0.4517, 0.0, 0.3178 * stretch / 1e4, 0.1515 * (stretch / 1e4) ** 2)


def corpus(samples: int) -> dict[LatentShape, int]:
    """How many samples of each shape, the first one taking what rounding leaves."""
    shapes = [LatentShape(frames, *size) for size in SIZES for frames in FRAMES]
    share = np.concatenate(list(SIZES.values()))
    counts = np.floor(share / share.sum() * samples).astype(int)
    counts[0] += samples - counts.sum()
    return dict(sorted(zip(shapes, counts.tolist())))


def schedules(row: Row, counts: dict[LatentShape, int], seeds):
    """Yields the row's schedule and the baseline's with each seed; every sample is in both once."""
    from adaptiveload_hf.buckets.flops import flops_cost  # brings torch, which those who want `law` alone do not need

    bucket_of_sample = np.repeat(np.arange(len(counts)), list(counts.values()))
    run = {"world_size": row.world_size, "gradient_accumulation_steps": row.gradient_accumulation_steps}
    cost = law() if row.dealt_by == "law" else flops_cost(WAN_1_3B)
    target = float(law().seconds(1, LONGEST))
    plan = make_plan(counts, law(), m_mem_tokens=row.memory * LONGEST, target_seconds=target, **run)
    equal_token = make_plan(counts, law(), policy="equal_token", token_budget=LONGEST, **run)
    for seed in seeds:
        ours = schedule_epoch(bucket_of_sample, plan, cost, balance=row.balance, seed=seed, **run)
        baseline = schedule_epoch(bucket_of_sample, equal_token, law(), balance="none", seed=seed, **run)
        for schedule in (ours, baseline):
            real = np.repeat(schedule.loss_weight > 0, schedule.sizes)
            assert np.array_equal(np.sort(schedule.sample_order[real]), np.arange(len(bucket_of_sample)))
        yield ours, baseline


def measure(row: Row, counts: dict[LatentShape, int], seeds) -> dict:
    """The row's numbers: mean and worst over the seeds, and the shares of the gradient with the last seed."""
    found = []
    for ours, baseline in schedules(row, counts, seeds):
        simulation, before = simulate(ours, law()), simulate(baseline, law())
        found.append(
            (
                simulation.balance_efficiency,
                simulation.step_cv,
                before.epoch_seconds / simulation.epoch_seconds,
                simulation.samples_per_update_step,
                simulation.samples_per_update_step_cv,
                before.samples_per_update_step,
                before.samples_per_update_step_cv,
                shapes_side_by_side(ours, ours.num_update_steps),
                shapes_side_by_side(ours, ours.num_micro_steps),
                token_share_distance(ours),
            )
        )
    efficiency, step_cv, speedup, *others = np.array(found).T
    names = ("samples_per_step", "samples_per_step_cv", "baseline_samples_per_step", "baseline_samples_per_step_cv")
    names += ("shapes_per_step", "shapes_per_micro_step", "token_share_distance")
    return {
        "balance_chosen": ours.balance,
        "efficiency": {"mean": efficiency.mean(), "worst": efficiency.min()},
        "step_cv": {"mean": step_cv.mean(), "worst": step_cv.max()},
        "speedup": {"mean": speedup.mean(), "worst": speedup.min()},
        **dict(zip(names, np.mean(others, axis=1).tolist())),
        "shape_weights": gradient_shares(ours),
        "baseline_shape_weights": gradient_shares(baseline),
    }


def shapes_side_by_side(schedule: EpochSchedule, steps: int) -> float:
    """Mean number of different shapes in a step, the epoch's micro-batches being cut into `steps` of them."""
    buckets = np.sort(schedule.bucket.reshape(steps, -1), axis=1)
    return float(1 + (np.diff(buckets, axis=1) > 0).sum(axis=1).mean())


def token_share_distance(schedule: EpochSchedule) -> float:
    """How far an optimizer step's mix is from the epoch's: sum over shapes of (share - epoch's)**2 / epoch's, mean."""
    steps, shapes = schedule.num_update_steps, schedule.bucket.max() + 1
    step = np.repeat(np.arange(steps), len(schedule.bucket) // steps)
    tokens = np.where(schedule.loss_weight > 0, schedule.sizes, 0) * schedule.tokens
    found = np.bincount(step * shapes + schedule.bucket, tokens, steps * shapes).reshape(steps, shapes)
    epoch = found.sum(axis=0) / found.sum()
    shares = found / found.sum(axis=1, keepdims=True)
    return float(((shares - epoch) ** 2 / epoch).sum(axis=1).mean())


def gradient_shares(schedule: EpochSchedule) -> dict[str, list[float]]:
    """What share of an epoch's gradient each shape has under each loss normalization."""
    samples = np.where(schedule.loss_weight > 0, schedule.sizes, 0)
    run = schedule.world_size, schedule.gradient_accumulation_steps
    return {
        name: shape_weights(replace(schedule, loss_weight=loss_weights(name, samples, schedule.tokens, *run))).tolist()
        for name in LOSS_NORMALIZATIONS
    }


def missed(row: Row, found: dict) -> list[str]:
    """Which of the row's floors some seed did not reach."""
    reached = {
        "efficiency": found["efficiency"]["worst"] >= row.least_efficiency,
        "step CV": found["step_cv"]["worst"] <= row.most_step_cv,
        "speed-up": found["speedup"]["worst"] >= row.least_speedup,
    }
    return [name for name, is_reached in reached.items() if not is_reached]


def print_rows(results: list[tuple[Row, dict]]):
    print(
        " W  K  balance    memory  dealt by   efficiency      step CV        speed-up      samples a step  shapes in  "
        "mix\n"
        "                                   mean   worst    mean   worst    mean   worst    mean      CV  step micro"
    )
    for row, found in results:
        pairs = [found[name] for name in ("efficiency", "step_cv", "speedup")]
        numbers = "  ".join(f"{pair['mean']:6.4f} {pair['worst']:6.4f}" for pair in pairs)
        print(
            f"{row.world_size:2} {row.gradient_accumulation_steps:2}  {found['balance_chosen']:12} {row.memory}    "
            f"{row.dealt_by:8} {numbers}  {found['samples_per_step']:7.1f}  {found['samples_per_step_cv']:6.3f}  "
            f"{found['shapes_per_step']:5.1f} {found['shapes_per_micro_step']:5.1f}  "
            f"{found['token_share_distance']:5.3f}"
        )


def print_weights(counts: dict[LatentShape, int], found: dict):
    """The table of one row: what each shape weighs in the gradient of an epoch."""
    tokens = np.array([TokenGeometry().tokens(shape) for shape in counts])
    samples = np.array(list(counts.values()))
    baseline, ours = found["baseline_shape_weights"], found["shape_weights"]
    print("\nshare of      samples   tokens   gradient: baseline,     ours,     ours,     ours,")
    print("                                             none     none    token   sample")
    columns = [samples / samples.sum(), samples * tokens / (samples @ tokens), baseline["none"]]
    columns += [ours[name] for name in ("none", "token", "sample")]
    for shape, *shares in zip(counts, *columns):
        first, second, *others = [f"{share:8.2%}" for share in shares]
        print(f"{shape!s:12} {first} {second}           {' '.join(others)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=300_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the numbers as JSON")
    args = parser.parse_args()
    counts = corpus(args.samples)
    results = [(row, measure(row, counts, range(args.seeds))) for row in ROWS]
    print_rows(results)
    print_weights(counts, results[0][1])
    if args.output:
        about = {
            "what": "predicted by the cost law, not measured on GPUs",
            "numpy": np.__version__,
            "python": platform.python_version(),
            "date": datetime.date.today().isoformat(),
            "command": shlex.join(["python", *sys.argv]),
            "samples": {str(shape): count for shape, count in counts.items()},
        }
        rows = [{**row._asdict(), **found} for row, found in results]
        for row in rows:
            row["most_step_cv"] = None if np.isinf(row["most_step_cv"]) else row["most_step_cv"]
        args.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    misses = [
        f"W = {row.world_size}, {row.balance}: {', '.join(missed(row, found))}"
        for row, found in results
        if missed(row, found)
    ]
    if misses:
        sys.exit(f"schedule_gates.py: with some seed a row misses its floor. {'; '.join(misses)}")


if __name__ == "__main__":
    main()
