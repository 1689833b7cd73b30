"""What share of an optimizer step does TrainingMonitor cost?

accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 --main_process_port 0 \\
    recipes/monitor_overhead.py --config recipes/runs/wan2.1_1.3b.json --shape 5x60x104

Epochs with the monitor and without take turns, on the same micro-batch. Without it a step ends as it does in any
trainer that logs its loss: the mean over ranks is read. A third kind of epoch times the monitor alone, after steps
that have ended on all ranks: what it costs at most.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import WanTransformer3DModel

from adaptiveload_hf import BucketConfig, BucketDataLoader, LatentShape, TrainingMonitor, make_accelerator, patch_model
from adaptiveload_hf.buckets.shapes import index_shapes
from adaptiveload_hf.device_memory import wait_for_device
from adaptiveload_hf.distributed import all_ranks_fail_together, model_input_dtype

TEXT_TOKENS = 512
KINDS = ("without", "with", "alone")


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, required=True, help="config.json of a Wan transformer; the weights are random")
    add("--layers", type=int, help="so many of its layers (default: all)")
    add("--shape", type=LatentShape.parse, default="5x60x104", help="latent shape (default: %(default)s)")
    add("--steps", type=int, default=20, help="optimizer steps of an epoch (default: %(default)s)")
    add("--rounds", type=int, default=3, help="epochs of each kind (default: %(default)s)")
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


def time_epoch(accelerator: Accelerator, loader, step, model, kind: str) -> list[float]:
    """Seconds of each optimizer step but the first, before which the loader makes its schedule.

    kind: "without" or "with" the monitor; or "alone": only the monitor's own seconds, after a step that has ended on
        all ranks, when there is nothing left that they could hide behind.
    """
    monitor = None if kind == "without" else TrainingMonitor(accelerator, model, loader)
    seconds, since = [], time.perf_counter()
    for _ in monitor or loader:
        loss = step()
        if kind == "alone":
            wait_for_device(accelerator.device)
            accelerator.wait_for_everyone()
            since = time.perf_counter()
        if monitor is None:
            accelerator.gather(loss[None]).mean().item()
        else:
            monitor.micro_step_done(loss)
        now = time.perf_counter()
        seconds.append(now - since)
        since = now
    if monitor is not None:
        monitor.close()
    return seconds[1:]


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
        seconds = {kind: [] for kind in KINDS}
        for epoch in range(args.rounds * len(KINDS)):
            kind = KINDS[epoch % len(KINDS)]
            seconds[kind] += time_epoch(accelerator, loader, step, model, kind)
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        median = {kind: statistics.median(values) for kind, values in seconds.items()}
        for kind, value in median.items():
            print(f"{kind:8} {1e3 * value:10.3f} ms, median of {len(seconds[kind])}")
        more, alone = median["with"] / median["without"] - 1, median["alone"] / median["without"]
        print(f"of a step: with the monitor {more:+.3%}; the monitor alone {alone:.3%}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
