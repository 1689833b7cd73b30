"""Do the virtual ranks of recipes/balance_curves.py train on what real ranks would, and are its numbers whole?"""

import json
from pathlib import Path

import balance_curves
import numpy as np
import pytest
import torch
from balance_curves import (
    MODES,
    Samples,
    draw_picture,
    encode_samples,
    optimizer_steps,
    scene_cutter,
    summarize,
    train,
)
from diffusers import WanTransformer3DModel
from flow_matching import FlowMatching
from support.clips import write_clip
from tiny_wan import TEXT_WIDTH

from adaptiveload_hf.buckets.shapes import LatentShape

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "recipes" / "results").glob("balance_curves_*.json"))


@pytest.fixture(autouse=True)
def small_model(monkeypatch):
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 1, "freq_dim": 16}
    channels = {"in_channels": 16, "out_channels": 16, "text_dim": TEXT_WIDTH, "rope_max_seq_len": 64}
    monkeypatch.setattr(balance_curves, "make_model", lambda size: WanTransformer3DModel(**sizes, **channels))


RUN = {"world_size": 8, "gradient_accumulation_steps": 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """300 samples of three small shapes, random numbers for latents."""
    path = tmp_path_factory.mktemp("samples") / "samples.npz"
    shapes, counts = [LatentShape(1, 2, 2), LatentShape(1, 4, 4), LatentShape(3, 4, 4)], (160, 100, 40)
    random = np.random.default_rng(0)
    arrays = {}
    for shape, n in zip(shapes, counts):
        arrays[f"latents {shape}"] = random.standard_normal(
            (n, 16, shape.frames, shape.height, shape.width), np.float32
        )
        arrays[f"captions {shape}"] = random.standard_normal((n, 3, TEXT_WIDTH), np.float32)
    np.savez(path, shapes=[str(shape) for shape in shapes], **arrays)
    return path


@pytest.fixture(scope="module")
def data(path):
    return Samples.load(path)


def test_every_step_weighs_its_samples_by_their_tokens(data):
    tokens, everyone = data.tokens(), np.arange(len(data.bucket))
    steps = [step for step in optimizer_steps(data, everyone, RUN, "window:8", 0, steps=9) if step[0] == 0]
    assert sorted(np.concatenate([samples for _, samples, weights in steps])) == everyone.tolist()
    for _, samples, weights in steps:
        work = tokens[data.bucket[samples]]
        assert weights == pytest.approx(work / work.sum())


def test_step_holds_the_same_samples_as_none_and_a_window_does_not(data):
    everyone = np.arange(len(data.bucket))
    first = {mode: next(optimizer_steps(data, everyone, RUN, mode, 0, steps=1))[1] for mode in MODES}
    assert sorted(first["step"]) == sorted(first["none"])
    assert first["step"].tolist() != first["none"].tolist()
    assert sorted(first["window:8"]) != sorted(first["none"])


def test_gradient_of_merged_micro_batches_is_that_of_the_ranks_micro_batches(data, monkeypatch):
    schedules, original = [], balance_curves.schedule_epoch

    def schedule_epoch(*args, **options):
        schedules.append(original(*args, **options))
        return schedules[-1]

    monkeypatch.setattr(balance_curves, "schedule_epoch", schedule_epoch)
    _, samples, weights = next(optimizer_steps(data, np.arange(len(data.bucket)), RUN, "none", 0, steps=1))
    torch.manual_seed(0)
    model, flow = balance_curves.make_model("0.3m").double(), FlowMatching(3.0, "logit_normal", 0.0, 1.0, 1.29, 0)
    merged = balance_curves.backward(model, flow, data, 0, samples, weights)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    losses = []
    for j in range(32):
        batch = data.batch(schedules[0].micro_batch(j // 8, j % 8))
        each = flow.sample_losses(balance_curves.predict_with(model), batch, 0)
        loss = each.mean() * schedules[0].loss_weight[j] / 32
        loss.backward()
        losses.append(loss.item())
    assert merged == pytest.approx(sum(losses), rel=1e-5)
    for parameter, gradient in zip(model.parameters(), expected):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-7)


def test_none_and_step_train_the_same_model_and_all_modes_are_summarized(path, tmp_path):
    modes = (*MODES, "none patched")
    runs = [train(path, RUN, mode, seed=0, steps=2, size="0.3m") for mode in modes]
    summary = summarize(runs)
    assert tuple(summary) == modes
    assert summary["none"]["differences_from_none"] == [0]
    assert summary["step"]["largest_relative_difference_from_none"] < 2e-6
    assert 0 < summary["none patched"]["largest_relative_difference_from_none"] < 1e-4
    assert summary["window:8"]["largest_relative_difference_from_none"] > 2e-5
    assert all(len(run["train"]) == 2 and run["held_out"][-1][0] == 2 for run in runs)
    draw_picture(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_drawn_samples_are_encoded_shape_by_shape_and_normalised(monkeypatch, tmp_path):
    monkeypatch.setattr(balance_curves, "SAMPLES", {(5, 32, 32): 2, (1, 32, 32): 3})
    encode_samples(copies=2, path=tmp_path / "samples.npz")
    data = Samples.load(tmp_path / "samples.npz")
    assert [str(shape) for shape in data.shapes] == ["1x4x4", "2x4x4"]
    assert [len(latents) for latents in data.latents] == [6, 4]
    values = np.concatenate([latents.swapaxes(0, 1).reshape(16, -1) for latents in data.latents], axis=1)
    assert values.astype(float).mean(1) == pytest.approx(0, abs=1e-3)
    assert values.astype(float).std(1) == pytest.approx(1, rel=0.01)
    assert data.captions[0].shape == (6, 160, TEXT_WIDTH)


def test_held_out_pieces_are_of_the_end_of_a_clip_and_short_clips_are_left_out(tmp_path):
    write_clip(tmp_path / "long.mp4", [np.full((48, 64, 3), 10 * i, np.uint8) for i in range(20)])
    write_clip(tmp_path / "short.mp4", [np.full((48, 64, 3), 250, np.uint8)] * 4)
    cut, random = scene_cutter(tmp_path), np.random.default_rng(0)
    for held_out, (earliest, latest) in ((False, (0, 7)), (True, (12, 15))):
        for _ in range(20):
            pictures, caption = cut(random, held_out, 5, 16, 32)
            shown = [np.asarray(picture).mean() / 10 for picture in pictures]
            assert caption == "long" and pictures[0].size == (32, 16)
            assert np.diff(shown) == pytest.approx(1, abs=0.4)
            assert earliest - 0.4 < shown[0] < latest + 0.4
    assert {cut(random, True, 1, 16, 32)[1] for _ in range(20)} == {"long", "short"}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_curves_are_whole(path):
    result = json.loads(path.read_text())
    assert all(result[key] for key in ("device", "torch", "diffusers", "date", "command"))
    seeds = {run["seed"] for run in result["runs"]}
    assert {(run["mode"], run["seed"]) for run in result["runs"]} == {(m, s) for m in result["summary"] for s in seeds}
    assert len(seeds) >= 3
    for mode, row in result["summary"].items():
        finals = [run["held_out"][-1][1] for run in result["runs"] if run["mode"] == mode]
        assert row["mean"] == pytest.approx(np.mean(finals))
