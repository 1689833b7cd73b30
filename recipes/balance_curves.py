"""Does dealing micro-batches by cost, or the patch, change what a model learns? A small Wan trained in several ways.

    python recipes/balance_curves.py --samples samples.npz --output curves.json --picture curves.png

Same samples, same first weights, same noise a sample; only the order differs. W virtual data ranks and K micro-steps
in one process: the gradient of an optimizer step is the sum over its W*K micro-batches of loss_weight / (W*K) * mean
loss, which is what ranks that average give. Micro-batches of one shape run as one batch, which changes rounding only.
"""

import argparse
import datetime
import json
import shlex
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import diffusers
import matplotlib.pyplot as plt
import numpy as np
import torch
from diffusers import WanTransformer3DModel
from diffusers.optimization import get_scheduler
from flow_matching import FlowMatching
from make_demo_clips import SAMPLES, draw_scene
from PIL import Image
from schedule_gates import LONGEST, law
from tiny_wan import TEXT_WIDTH, tiny_wan

from adaptiveload_hf import patch_model
from adaptiveload_hf.buckets.plan import make_plan
from adaptiveload_hf.buckets.schedule import schedule_epoch
from adaptiveload_hf.buckets.shapes import LatentShape, TokenGeometry

MODES = ("none", "step", "window:8")  # a balance, and "patched" behind it where the model is
# The class of Wan 2.1 1.3B, which has 30 layers of 12 x 128.
MODELS = {
    "0.3m": {"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 256, "num_layers": 4, "freq_dim": 64},
    "100m": {"num_attention_heads": 8, "attention_head_dim": 128, "ffn_dim": 4096, "num_layers": 6, "freq_dim": 256},
}
CAPTION_TOKENS = 160
HELD_OUT = 8  # every eighth sample of a shape
HELD_OUT_TIME = 0.4  # of a clip
EVALUATIONS = 6
ENCODED_TOGETHER = 16
LEARNING_RATES = {"0.3m": 5e-4, "100m": 2e-4}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Samples:
    """Encoded samples, grouped by shape; sample i of the data is row place[i] of latents[bucket[i]]."""

    shapes: list[LatentShape]
    latents: list[np.ndarray]
    captions: list[np.ndarray]
    bucket: np.ndarray
    place: np.ndarray

    @classmethod
    def load(cls, path: Path) -> "Samples":
        with np.load(path) as saved:
            shapes = [LatentShape.parse(text) for text in saved["shapes"].tolist()]
            latents = [saved[f"latents {shape}"] for shape in shapes]
            captions = [saved[f"captions {shape}"] for shape in shapes]
        counts = [len(rows) for rows in latents]
        bucket, place = np.repeat(np.arange(len(shapes)), counts), np.concatenate([np.arange(n) for n in counts])
        return cls(shapes, latents, captions, bucket, place)

    def batch(self, samples: np.ndarray) -> dict:
        """Samples of one bucket, as FlowMatching takes them."""
        bucket, place = self.bucket[samples[0]], self.place[samples]
        return {
            "latent": torch.from_numpy(self.latents[bucket][place]).to(DEVICE).float(),
            "prompt_embeds": torch.from_numpy(self.captions[bucket][place]).to(DEVICE).float(),
            "sample_index": torch.from_numpy(samples),
        }

    def tokens(self) -> np.ndarray:
        """S of each bucket."""
        return np.array([TokenGeometry().tokens(shape) for shape in self.shapes])


def scene_cutter(folder: Path):
    """(random, held out, frames, height, width) -> a piece of a clip of the folder, and a caption: the clip's name.

    A piece is any part of the picture and of the time; held-out pieces are of the last 40% of a clip, others of the
    rest.
    """
    import av  # where samples were encoded elsewhere it may be missing

    clips = {}
    for file in sorted(folder.iterdir()):
        with av.open(file) as container:
            clips[file.stem] = [frame.to_image() for frame in container.decode(video=0)]

    def cut(random: np.random.Generator, held_out: bool, frames: int, height: int, width: int):
        edges = {name: int(len(clip) * (1 - HELD_OUT_TIME)) for name, clip in clips.items()}
        parts = {name: clip[edges[name] :] if held_out else clip[: edges[name]] for name, clip in clips.items()}
        name = str(random.choice([name for name, part in parts.items() if len(part) >= frames]))
        first = random.integers(len(parts[name]) - frames + 1)
        shown = parts[name][first : first + frames]
        scale = min(shown[0].width / width, shown[0].height / height) * random.uniform(0.5, 1)
        left, top = random.uniform(0, 1, 2) * (shown[0].width - scale * width, shown[0].height - scale * height)
        box = (left, top, left + scale * width, top + scale * height)
        return [each.resize((width, height), Image.Resampling.BICUBIC, box) for each in shown], name

    return cut


@torch.no_grad()
def encode_samples(copies: int, path: Path, clips: Path | None = None) -> None:
    """Encodes moving scenes with a Wan VAE and a UMT5 of tiny width and random weights, and saves them.

    Args:
        copies: how many times as many as make_demo_clips.py writes.
        path: the .npz file that `Samples.load` reads.
        clips: folder of clips that scenes are cut from; None: they are drawn.
    """
    pipe, random = tiny_wan().to(DEVICE), np.random.default_rng(0)
    cut = None if clips is None else scene_cutter(clips)
    groups = {}
    for size, count in SAMPLES.items():
        parts = []
        for first in range(0, count * copies, ENCODED_TOGETHER):
            places = range(first, min(first + ENCODED_TOGETHER, count * copies))
            scenes = [cut(random, i % HELD_OUT == 0, *size) if cut else draw_scene(random, *size) for i in places]
            pixels = np.stack([[np.asarray(picture) for picture in pictures] for pictures, _ in scenes])
            pixels = torch.from_numpy(pixels).to(DEVICE).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
            text = pipe.tokenizer(
                [caption for _, caption in scenes],
                padding="max_length",
                max_length=CAPTION_TOKENS,
                truncation=True,
                return_tensors="pt",
            ).to(DEVICE)
            embeds = pipe.text_encoder(text.input_ids, text.attention_mask).last_hidden_state
            parts.append((pipe.vae.encode(pixels).latent_dist.mode(), embeds * text.attention_mask[:, :, None]))
        latents, captions = (torch.cat(part) for part in zip(*parts))
        groups[LatentShape(*latents.shape[2:])] = latents, captions
    # A VAE of random weights has no statistics in its configuration: those of the data stand in.
    values = torch.cat([latents.transpose(0, 1).flatten(1) for latents, _ in groups.values()], dim=1)
    mean, std = values.mean(1).view(-1, 1, 1, 1), values.std(1).view(-1, 1, 1, 1)
    arrays = {f"latents {shape}": ((latents - mean) / std).half() for shape, (latents, _) in groups.items()}
    arrays |= {f"captions {shape}": captions.half() for shape, (_, captions) in groups.items()}
    arrays = {name: array.cpu().numpy() for name, array in arrays.items()}
    np.savez_compressed(path, shapes=np.array([str(shape) for shape in sorted(groups)]), **arrays)


def make_model(size: str) -> WanTransformer3DModel:
    """Random weights; size: of MODELS."""
    channels = {"in_channels": 16, "out_channels": 16, "text_dim": TEXT_WIDTH, "rope_max_seq_len": 64}
    return WanTransformer3DModel(**MODELS[size], **channels).to(DEVICE)


def optimizer_steps(data: Samples, samples: np.ndarray, run: dict, mode: str, seed: int, steps: int):
    """Yields epoch, and the samples and weights of each optimizer step, as `schedule_epoch` deals them.

    The plan is that of the gates table: its law of cost stretched so that the longest sample here costs as much as the
    longest there, memory for three longest samples, time for one. (The samples here are too short for attention to
    count, so their own cost would make a plain token budget of it.)
    """
    tokens, bucket = data.tokens(), data.bucket[samples]
    cost = law(stretch=LONGEST / tokens.max())
    counts = dict(zip(data.shapes, np.bincount(bucket, minlength=len(tokens)).tolist()))
    group = run["world_size"] * run["gradient_accumulation_steps"]
    target = float(cost.seconds(1, tokens.max()))
    plan = make_plan(counts, cost, m_mem_tokens=3 * int(tokens.max()), target_seconds=target, **run)
    step, epoch = 0, 0
    while True:
        schedule = schedule_epoch(bucket, plan, cost, seed=seed, epoch=epoch, balance=mode, **run)
        weight = np.repeat(schedule.loss_weight / schedule.sizes / group, schedule.sizes)
        edges = schedule.offsets[::group]
        for first, last in pairwise(edges):
            if step == steps:
                return
            yield epoch, samples[schedule.sample_order[first:last]], weight[first:last]
            step += 1
        epoch += 1


def train(path: Path, run: dict, mode: str, seed: int, steps: int, size: str) -> dict:
    """One run; its seed decides the first weights, the order and the noise."""
    balance, _, kernels = mode.partition(" ")
    data = Samples.load(path)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(seed)
    model, flow = make_model(size), FlowMatching(3.0, "logit_normal", 0.0, 1.0, 1.29, seed)
    if kernels:
        patch_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATES[size], betas=(0.9, 0.99))
    rate = get_scheduler("cosine", optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)
    held_out = data.place % HELD_OUT == 0
    evaluations = np.linspace(0, steps, min(EVALUATIONS, steps) + 1).astype(int)[1:]
    curve, by_shape, losses, samples_seen = [], [], [], []
    steps_of_an_epoch = 0
    order = optimizer_steps(data, np.flatnonzero(~held_out), run, balance, seed, steps)
    for step, (epoch, samples, weights) in enumerate(order, start=1):
        losses.append(backward(model, flow, data, epoch, samples, weights))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        samples_seen.append(len(samples))
        steps_of_an_epoch += epoch == 0
        if step in evaluations:
            by_shape = evaluate(data, model, np.flatnonzero(held_out))
            counts = np.bincount(data.bucket[held_out]) * data.tokens()
            curve.append([step, float(np.average(by_shape, weights=counts))])
    return {
        "mode": mode,
        "seed": seed,
        "held_out": curve,
        "held_out_by_shape": dict(zip(map(str, data.shapes), by_shape)),
        "train": losses,
        "steps_of_an_epoch": steps_of_an_epoch,
        "samples_per_optimizer_step": statistics.mean(samples_seen),
    }


def predict_with(model: WanTransformer3DModel):
    """The model as FlowMatching calls it; in bfloat16 on a GPU, as a run of `mixed_precision: bf16` does."""

    def predict(noisy, timestep, batch):
        captions = batch["prompt_embeds"].to(model.dtype)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            return model(noisy.to(model.dtype), timestep, captions, return_dict=False)[0]

    return predict


def backward(model, flow: FlowMatching, data: Samples, epoch: int, samples: np.ndarray, weights: np.ndarray) -> float:
    """Adds the gradient of sum(weights * loss) over the samples of an optimizer step; returns that sum."""
    total = torch.zeros((), device=DEVICE)
    for bucket in np.unique(data.bucket[samples]):
        chosen = data.bucket[samples] == bucket
        each = flow.sample_losses(predict_with(model), data.batch(samples[chosen]), epoch)
        loss = (each * torch.from_numpy(weights[chosen]).to(each)).sum()
        loss.backward()
        total += loss.detach()
    return float(total)


@torch.no_grad()
def evaluate(data: Samples, model, samples: np.ndarray) -> list[float]:
    """Mean loss of each shape's held-out samples, with noise that is the same at every step of every run."""
    flow, means = FlowMatching(3.0, "logit_normal", 0.0, 1.0, 1.29, seed=-1), []
    for bucket in range(len(data.shapes)):
        chosen = samples[data.bucket[samples] == bucket]
        means.append(float(flow.sample_losses(predict_with(model), data.batch(chosen), 0).mean()))
    return means


def summarize(runs: list[dict]) -> dict:
    """Final held-out loss of each mode, its difference from `none` seed by seed, and how far apart the curves are."""
    modes = dict.fromkeys(run["mode"] for run in runs)
    final = {mode: {run["seed"]: run["held_out"][-1][1] for run in runs if run["mode"] == mode} for mode in modes}
    curves = {(run["mode"], run["seed"]): np.array(run["held_out"])[:, 1] for run in runs}
    summary = {}
    for mode, by_seed in final.items():
        differences = [by_seed[seed] - final["none"][seed] for seed in by_seed]
        apart = max(np.abs(curves[mode, seed] / curves["none", seed] - 1).max() for seed in by_seed)
        summary[mode] = {
            "mean": statistics.mean(by_seed.values()),
            "std_over_seeds": statistics.stdev(by_seed.values()) if len(by_seed) > 1 else None,
            "differences_from_none": differences,
            "largest_relative_difference_from_none": float(apart),
        }
    return summary


def draw_picture(runs: list[dict], path: Path):
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    colors, styles = ("tab:gray", "tab:blue", "tab:orange", "tab:green"), ("-", "--", "-", "--")
    for mode, color, style in zip(dict.fromkeys(run["mode"] for run in runs), colors, styles):
        curves = np.array([run["held_out"] for run in runs if run["mode"] == mode])
        steps, losses = curves[0, :, 0], curves[:, :, 1]
        axes.plot(steps, losses.mean(0), style, color=color, label=mode)
        axes.fill_between(steps, losses.min(0), losses.max(0), color=color, alpha=0.2, linewidth=0)
    axes.set(xlabel="optimizer step", ylabel="held-out loss (token mean)", yscale="log")
    axes.legend(title="balance (mean; band: all seeds)", frameon=False)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--samples", type=Path, required=True, help=".npz of encoded samples; made if it is not there")
    add("--copies", type=int, default=64, help="how many to make, in times of the 62 of make_demo_clips.py")
    add("--clips", type=Path, help="folder of clips that samples are cut from; default: they are drawn")
    add("--world_size", type=int, default=4, help="W: virtual data ranks")
    add("--gradient_accumulation_steps", type=int, default=4, help="K")
    add("--seeds", type=int, default=3)
    add("--modes", nargs="+", default=MODES, help='such as none "none patched" "window:8 patched", none first')
    add("--model", choices=MODELS, default="0.3m", help="parameters")
    add("--steps", type=int, default=72, help="optimizer steps a run")
    add("--processes", type=int, default=1, help="runs at the same time; OMP_NUM_THREADS is each one's")
    add("--output", type=Path, required=True, help="JSON of all runs")
    add("--picture", type=Path, help="PNG of the curves")
    args = parser.parse_args()
    if not args.samples.exists():
        encode_samples(args.copies, args.samples, args.clips)
    run = {"world_size": args.world_size, "gradient_accumulation_steps": args.gradient_accumulation_steps}
    jobs = [
        (args.samples, run, mode, seed, args.steps, args.model) for seed in range(args.seeds) for mode in args.modes
    ]
    about = {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "samples": len(Samples.load(args.samples).bucket),
        "parameters": sum(parameter.numel() for parameter in make_model(args.model).parameters()),
        **run,
    }
    runs = []
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        for done in pool.map(train, *zip(*jobs)):  # written after each, so that one that is cut short leaves it
            runs.append(done)
            summary = summarize(runs)
            args.output.write_text(json.dumps({**about, "summary": summary, "runs": runs}, indent=1) + "\n")
    if args.picture:
        draw_picture(runs, args.picture)
    print("mode              held-out loss, mean +- sd over seeds   largest difference from none on the curve")
    for mode, row in summary.items():
        spread = "" if row["std_over_seeds"] is None else f" +- {row['std_over_seeds']:.5f}"
        print(f"{mode:17} {row['mean']:.5f}{spread}   {row['largest_relative_difference_from_none']:.1e}")


if __name__ == "__main__":
    main()
