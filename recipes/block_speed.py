"""How long do two Wan layers take forward and backward, and how much memory: eager, torch.compile and patched?

    python recipes/block_speed.py --output recipes/results/block_speed.json

Real WanTransformer3DModel of 1.3B or 14B width with two layers, bfloat16 weights as `from_pretrained` loads them
(norms and modulation tables in float32), no checkpointing, random latents. All variants run in one process, on one
GPU; times are the median of device events. Peak GiB is what the allocator handed out above the weights.
"""

import argparse
import datetime
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import diffusers
import torch
from diffusers import WanTransformer3DModel

from adaptiveload_hf import UserError, patch_model, unpatch_model
from adaptiveload_hf.errors import exit_on_user_error

WIDTHS = {"1.3B": (12, 8960), "14B": (40, 13824)}  # heads of 128, width of the feed-forward
LATENTS = {7800: (5, 60, 104), 32760: (21, 60, 104)}
REPEATS = 9


def build(width: str) -> WanTransformer3DModel:
    """Two layers with weights that are random everywhere, so that nothing is multiplied by zero."""
    heads, ffn = WIDTHS[width]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = WanTransformer3DModel(num_attention_heads=heads, attention_head_dim=128, ffn_dim=ffn, num_layers=2)
    for name, parameter in model.named_parameters():
        keep = any(part in name for part in WanTransformer3DModel._keep_in_fp32_modules)
        parameter.data = parameter.data if keep else parameter.data.bfloat16()
    return model.train()


def measure(model: WanTransformer3DModel, tokens: int) -> dict:
    """Milliseconds of forward + backward, GiB above the weights, and kernels launched."""
    latent = torch.randn(1, 16, *LATENTS[tokens], device="cuda", dtype=torch.bfloat16)
    text = torch.randn(1, 512, 4096, device="cuda", dtype=torch.bfloat16)
    timestep = torch.tensor([500.0], device="cuda")

    def step():
        model.zero_grad(set_to_none=True)
        model(latent, timestep, text, return_dict=False)[0].square().mean().backward()

    for _ in range(3):
        step()
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    weights = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    peak = (torch.cuda.max_memory_allocated() - weights) / 2**30
    return {"milliseconds": statistics.median(times), "peak_gib": peak, "kernels": count_kernels(step)}


def count_kernels(step) -> int:
    """Kernels that one forward and backward launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.device_type.name == "CUDA")


def compare(width: str, tokens: int) -> dict:
    model = build(width)
    row = {"width": width, "tokens": tokens, "eager": measure(model, tokens)}
    patch_model(model)
    row["patched"] = measure(model, tokens)
    unpatch_model(model)
    model.compile_repeated_blocks()
    row["compile"] = measure(model, tokens)
    torch.compiler.reset()
    return row


def driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the numbers as JSON")
    args = parser.parse_args()
    with exit_on_user_error("block_speed.py"):
        if not torch.cuda.is_available():
            raise UserError("this measures a GPU, and torch sees none here. Run it on a machine with one.")
        rows = []
        print("width  tokens    eager ms  patched ms  compile ms    eager GiB  patched GiB  compile GiB")
        for width in WIDTHS:
            for tokens in LATENTS:
                rows.append(compare(width, tokens))
                parts = [rows[-1][name] for name in ("eager", "patched", "compile")]
                times = "  ".join(f"{part['milliseconds']:10.1f}" for part in parts)
                memory = "  ".join(f"{part['peak_gib']:11.2f}" for part in parts)
                print(f"{width:5}  {tokens:6}  {times}  {memory}", flush=True)
        if args.output:
            about = {
                "gpu": torch.cuda.get_device_name(),
                "driver": driver(),
                "torch": torch.__version__,
                "diffusers": diffusers.__version__,
                "date": datetime.date.today().isoformat(),
                "command": shlex.join(["python", *sys.argv]),
            }
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
