"""How long, and how large, is the schedule of an epoch of up to 10 million samples on 1,024 ranks?

    python recipes/schedule_speed.py --output recipes/results/schedule_speed.json

200 buckets, 4 accumulation steps, balance "auto". Each size runs several times, each time in a fresh process; the
fastest counts, since other work on the machine can only slow a run down (all runs are in the JSON). Peak memory is the
whole process's: the interpreter, the imports and the caller's array of buckets included.
"""

import argparse
import datetime
import json
import platform
import resource
import shlex
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from schedule_gates import LONGEST, law

from adaptiveload_hf.buckets.plan import make_plan
from adaptiveload_hf.buckets.schedule import schedule_epoch
from adaptiveload_hf.buckets.shapes import LatentShape

RUN = {"world_size": 1024, "gradient_accumulation_steps": 4}
SIZES = ((32, 32), (40, 60), (30, 52), (48, 80), (52, 60), (60, 60), (60, 104), (64, 64), (80, 120), (90, 160))
SHAPES = sorted(LatentShape(frames, *size) for size in SIZES for frames in range(1, 21))


def measure(samples: int) -> dict:
    """One run: seconds of plan and schedule, microseconds to the next batch of a rank, peak GiB of this process."""
    random = np.random.default_rng(0)
    share = random.dirichlet(np.ones(len(SHAPES)))
    bucket_of_sample = random.choice(len(SHAPES), samples, p=share).astype(np.uint8)
    counts = dict(zip(SHAPES, np.bincount(bucket_of_sample, minlength=len(SHAPES)).tolist()))
    start = time.perf_counter()
    plan = make_plan(counts, law(), m_mem_tokens=3 * LONGEST, **RUN)
    planned = time.perf_counter()
    schedule = schedule_epoch(bucket_of_sample, plan, law(), **RUN)
    scheduled = time.perf_counter()
    batches = sum(1 for _ in schedule.rank_batches(rank=511, first_micro_step=0))
    dealt = time.perf_counter()
    return {
        "samples": samples,
        "plan_seconds": planned - start,
        "schedule_seconds": scheduled - planned,
        "next_batch_microseconds": 1e6 * (dealt - scheduled) / batches,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "micro_batches": len(schedule.bucket),
        "balance_chosen": schedule.balance,
    }


def fastest(runs: list[dict]) -> dict:
    """The least of every time, the most memory."""
    times = {name: min(run[name] for run in runs) for name in runs[0] if name.endswith("seconds")}
    return {**runs[0], **times, "peak_gib": max(run["peak_gib"] for run in runs)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--repeats", type=int, default=5, help="runs of each size")
    parser.add_argument("--output", type=Path, help="also write the numbers as JSON")
    args = parser.parse_args()
    rows = []
    print("   samples   plan s  schedule s  ns/sample  next batch us  peak GiB")
    for samples in args.samples:
        with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            runs = pool.map(measure, [samples] * args.repeats, chunksize=1)
        best = fastest(runs)
        rows.append({**best, "runs": runs})
        print(
            f"{samples:10,} {best['plan_seconds']:8.3f} {best['schedule_seconds']:11.3f} "
            f"{1e9 * best['schedule_seconds'] / samples:10.1f} {best['next_batch_microseconds']:14.2f} "
            f"{best['peak_gib']:9.2f}",
            flush=True,
        )
    if args.output:
        processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        about = {
            "cpu": f"{len(processor)} x {processor[0].partition(': ')[2]}",
            "numpy": np.__version__,
            "python": platform.python_version(),
            "date": datetime.date.today().isoformat(),
            "command": shlex.join(["python", *sys.argv]),
        }
        args.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
