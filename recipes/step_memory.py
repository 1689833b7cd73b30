"""What memory and time does a step take with and without the patch and the checkpoint?

accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 recipes/step_memory.py \\
    --config recipes/runs/wan2.1_14b.json --num_layers 36 --points 1x60x104=1 21x60x104=1 --output_dir wan_14b

Random weights and latents. Short steps vary with the host: `--kernels eager patched eager patched` takes turns.
`--memory_limit_gib 48` leaves each process what a card of 48 GiB has: the last points say what does not fit any more.
"""

import argparse
import datetime
import itertools
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
from data_setup import parse_batch_sizes
from random_training import KERNELS, RandomTraining, add_training_arguments

from adaptiveload_hf import LatentShape, TokenGeometry, UserError, make_accelerator
from adaptiveload_hf.device_memory import empty_device_cache, read_device_memory, reset_peak_memory, wait_for_device
from adaptiveload_hf.distributed import all_ranks_fail_together
from adaptiveload_hf.errors import exit_on_user_error


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training_arguments(parser)
    add = parser.add_argument
    add("--points", nargs="+", required=True, metavar="SHAPE=B", help="such as 21x60x104=1, the smallest first")
    add("--kernels", nargs="+", choices=KERNELS, default=["eager", "patched"])
    add("--both_checkpointings", action="store_true",
        help="with and without diffusers' own; not where the launch configuration checkpoints")  # fmt: skip
    add("--repeats", type=int, default=2, help="timed optimizer steps")
    return parser.parse_args(argv)


def main():
    args = parse_args()
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    points = [(LatentShape.parse(shape), size) for shape, size in parse_batch_sizes(args.points).items()]
    accelerator = make_accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
    )
    with all_ranks_fail_together(accelerator):
        training, rows = RandomTraining(accelerator, args), []
        limit_memory(accelerator.device, args.memory_limit_gib)
        for checkpointing, kernels in itertools.product(checkpointings(args), args.kernels):
            set_checkpointing(training, checkpointing)
            with training.kernels(kernels):
                training.warm_up(kernels, points)
                for point in points:
                    row = measure(training, *point, args.repeats)
                    rows.append({"kernels": kernels, "checkpointing": checkpointing, **row})
                    if row["oom"] and accelerator.num_processes > 1:
                        write(output, training, rows)
                        raise UserError(
                            f"out of memory: {row['shape']}={row['batch_size']}, {kernels}. The other ranks wait for "
                            "this one inside the step, so the run ends here, and what comes after is not tried. What "
                            f"was measured is in {output}."
                        )
            if accelerator.is_main_process:
                write(output, training, rows)
        accelerator.wait_for_everyone()
    accelerator.end_training()


def limit_memory(device: torch.device, gib: float | None) -> None:
    """PyTorch may hold so much of this GPU; a request for more runs out of memory, as on a smaller card.

    Raises:
        UserError: there is no GPU, or a smaller one.
    """
    if gib is None:
        return
    total = torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else 0.0
    if gib > total:
        raise UserError(f"--memory_limit_gib {gib:g}: each process needs a GPU with more, but found {total:.1f} GiB.")
    torch.cuda.set_per_process_memory_fraction(gib / total, device)


def checkpointings(args) -> list[bool | None]:
    """None: as the launch configuration has it."""
    return [True, False] if args.both_checkpointings else [None]


def set_checkpointing(training: RandomTraining, wanted: bool | None) -> None:
    if wanted is not None:
        model = training.accelerator.unwrap_model(training.model)
        model.enable_gradient_checkpointing() if wanted else model.disable_gradient_checkpointing()


def measure(training: RandomTraining, shape: LatentShape, size: int, repeats: int) -> dict:
    """Peak GiB of the fullest rank and seconds of an optimizer step; `oom` where one process had too little memory."""
    accelerator = training.accelerator
    device, seconds, oom = accelerator.device, [], False
    empty_device_cache(device)
    reset_peak_memory(device)
    for _ in range(repeats):
        wait_for_device(device)
        start = time.perf_counter()
        try:
            training.whole_step(shape, size)
        except torch.OutOfMemoryError:
            oom = True
            training.model.zero_grad()
            break
        wait_for_device(device)
        seconds.append(time.perf_counter() - start)
    memory = read_device_memory(device)
    times = (min(seconds), statistics.median(seconds)) if seconds else (0.0, 0.0)
    found = torch.tensor([memory.peak_gib, memory.reserved_gib, *times], device=device)[None]
    # Whoever ran out of memory finds no other rank in the gathering.
    peak_gib, reserved_gib, least, median = (found if oom else accelerator.gather(found)).amax(0).tolist()
    row = {"shape": str(shape), "batch_size": size, "tokens": TokenGeometry().tokens(shape), "oom": oom}
    row |= {"seconds": least, "median_seconds": median, "peak_gib": peak_gib, "reserved_gib": reserved_gib}
    if accelerator.is_main_process:
        print(row, flush=True)
    return row


def write(folder: Path, training: RandomTraining, rows: list[dict]) -> None:
    about = {
        "command": shlex.join(["recipes/step_memory.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "environment": training.environment,
    }
    # Ranks that run out of memory do so at the same moment.
    own = folder / f"step_memory.{training.accelerator.process_index}.json"
    own.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    own.replace(folder / "step_memory.json")


if __name__ == "__main__":
    with exit_on_user_error("step_memory.py"):
        main()
