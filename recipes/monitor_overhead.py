"""What share of an optimizer step does TrainingMonitor cost?

accelerate launch --config_file accelerate_configs/single.yaml --main_process_port 0 recipes/monitor_overhead.py \\
    --config recipes/runs/wan2.1_1.3b.json --shape 5x60x104 --output monitor_overhead.json

Epochs with the monitor and without take turns, on the same micro-batch. Without it a step ends as it does in any
trainer that logs its loss: the mean over ranks is read. A third kind of epoch times the monitor alone, after steps
that have ended on all ranks: what it costs at most. Then it times the reading of the mean alone, which a trainer has
without the monitor too.
"""

import argparse
import datetime
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import WanTransformer3DModel

from adaptiveload_hf import BucketConfig, BucketDataLoader, LatentShape, TrainingMonitor, make_accelerator, patch_model
from adaptiveload_hf.buckets.shapes import index_shapes
from adaptiveload_hf.config import current_environment
from adaptiveload_hf.device_memory import wait_for_device
from adaptiveload_hf.distributed import all_ranks_fail_together, model_input_dtype

TEXT_TOKENS = 512


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, required=True, help="config.json of a Wan transformer; the weights are random")
    add("--layers", type=int, help="how many of its layers (default: all)")
    add("--shape", type=LatentShape.parse, default="5x60x104", help="latent shape (default: %(default)s)")
    add("--steps", type=int, default=20, help="optimizer steps of an epoch (default: %(default)s)")
    add("--rounds", type=int, default=3, help="epochs of each kind (default: %(default)s)")
    add("--output", type=Path, help="a JSON file for the numbers")
    return parser.parse_args(argv)


def make_step(accelerator: Accelerator, config: dict, shape: LatentShape):
    """The model, and () -> loss: an optimizer step on one random sample."""
    set_seed(0)
    with accelerator.device:  # random weights are made fastest where they are to be
        model = WanTransformer3DModel.from_config(config)
    patch_model(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
    dtype = model_input_dtype(accelerator)
    latent = torch.randn(1, config["in_channels"], shape.frames, shape.height, shape.width)
    inputs = {
        "hidden_states": latent.to(accelerator.device, dtype),
        "timestep": torch.tensor([500.0], device=accelerator.device),
        "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, config["text_dim"]).to(accelerator.device, dtype),
    }

    def step() -> torch.Tensor:
        loss = model(**inputs, return_dict=False)[0].float().square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def read_mean(accelerator: Accelerator, loss: torch.Tensor) -> float:
    """What any trainer that logs its loss does at the end of a step; it waits for the device."""
    return accelerator.gather(loss[None]).mean().item()


def time_steps(accelerator: Accelerator, loader, step, monitor: TrainingMonitor | None) -> list[float]:
    """Seconds of each optimizer step of an epoch but the first, before which the loader makes its schedule."""
    seconds, since = [], time.perf_counter()
    for _ in monitor or loader:
        loss = step()
        if monitor is None:
            read_mean(accelerator, loss)
        else:
            monitor.micro_step_done(loss)
        now = time.perf_counter()
        seconds.append(now - since)
        since = now
    return seconds[1:]


def time_alone(accelerator: Accelerator, step, monitor: TrainingMonitor) -> tuple[list[float], list[float]]:
    """Seconds of the monitor after each step but the first, and of reading the mean after that.

    The steps have ended on all ranks: there is nothing left that these could hide behind.
    """
    watching, reading = [], []
    for _ in monitor:
        loss = step()
        wait_for_device(accelerator.device)
        accelerator.wait_for_everyone()
        start = time.perf_counter()
        monitor.micro_step_done(loss)
        watched = time.perf_counter()
        read_mean(accelerator, loss)
        watching.append(watched - start)
        reading.append(time.perf_counter() - watched)
    return watching[1:], reading[1:]


def write(path: Path, milliseconds: dict[str, float], steps: int) -> None:
    about = {
        "what": "milliseconds of optimizer steps; of the monitor alone; of reading the mean loss alone; medians",
        "command": shlex.join(["recipes/monitor_overhead.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "environment": current_environment(),
        "steps_of_each_kind": steps,
    }
    path.write_text(json.dumps({**about, "milliseconds": milliseconds}, indent=1) + "\n")


def main():
    args = parse_args()
    accelerator = make_accelerator()
    config = json.loads(args.config.read_text())
    config |= {"num_layers": args.layers or config["num_layers"]}
    with all_ranks_fail_together(accelerator):
        model, step = make_step(accelerator, config, args.shape)
        sizes = np.tile(
            [args.shape.frames, args.shape.height, args.shape.width], (args.steps * accelerator.num_processes, 1)
        )
        rows = [{"number": number} for number in range(len(sizes))]
        loader = BucketDataLoader(
            rows,
            BucketConfig.from_flops(config, batch_sizes={str(args.shape): 1}),
            accelerator=accelerator,
            shapes=index_shapes(sizes),
            collate_fn=lambda rows: {"number": torch.tensor([row["number"] for row in rows])},
        )
        seconds = {kind: [] for kind in ("without", "with", "alone", "reading")}
        for _ in range(args.rounds):
            seconds["without"] += time_steps(accelerator, loader, step, None)
            monitor = TrainingMonitor(accelerator, model, loader)
            seconds["with"] += time_steps(accelerator, loader, step, monitor)
            watching, reading = time_alone(accelerator, step, monitor)
            seconds["alone"] += watching
            seconds["reading"] += reading
            monitor.close()
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        median = {kind: 1e3 * statistics.median(values) for kind, values in seconds.items()}
        for kind, value in median.items():
            print(f"{kind:8} {value:10.3f} ms, median of {len(seconds[kind])}")
        more, alone = median["with"] / median["without"] - 1, median["alone"] / median["without"]
        print(f"of a step: with the monitor {more:+.3%}; the monitor alone {alone:.3%}")
        if args.output is not None:
            write(args.output, median, len(seconds["alone"]))
    accelerator.end_training()


if __name__ == "__main__":
    main()
