"""Is each variant of Wan trained on clips that were prepared with its own pipeline?"""

import json
import sys
from types import SimpleNamespace

import numpy as np
import prepare_dataset
import pytest
from diffusers import WanTransformer3DModel
from make_demo_clips import write_clip
from PIL import Image
from support.prepared import save_config
from support.train_ranks import train_here
from tiny_wan import save_tiny_wan

from adaptiveload_hf.buckets.shapes import read_shapes
from adaptiveload_hf.buckets.sources import load_prepared


@pytest.fixture
def clips(tmp_path):
    folder = tmp_path / "clips"
    folder.mkdir()
    pictures = np.random.default_rng(0).integers(0, 255, (3, 9, 64, 64, 3), dtype=np.uint8)
    for number, frames in enumerate(pictures):
        write_clip(folder / f"{number}.mp4", [Image.fromarray(frame) for frame in frames])
        (folder / f"{number}.txt").write_text(f"clip {number}")
    return folder


@pytest.mark.parametrize(
    ("kind", "words", "saved"),
    [
        ("i2v", [], "transformer"),
        ("ti2v", ["--first_frame_given"], "transformer"),
        ("t2v", ["--expert", "low_noise"], "transformer_2"),
    ],
)
def test_a_variant_is_prepared_for_and_trained(clips, tmp_path, monkeypatch, capsys, kind, words, saved):
    pipeline, prepared = save_tiny_wan(tmp_path / "pipeline", kind=kind), tmp_path / "prepared"
    if saved == "transformer_2":
        (pipeline / "transformer").rename(pipeline / "transformer_2")
        index = json.loads((pipeline / "model_index.json").read_text())
        (pipeline / "model_index.json").write_text(json.dumps({**index, "boundary_ratio": 0.875}))
        (pipeline / "transformer").symlink_to(pipeline / "transformer_2")
    prepare = ["--instance_data_root", clips, "--output_dir", prepared, "--pretrained_model_name_or_path", pipeline]
    prepare += ["--fps", 16, "--max_sequence_length", 16, "--video_resolution_buckets", "9x64x64"]
    monkeypatch.setattr(sys, "argv", ["prepare_dataset.py", *map(str, prepare)])
    prepare_dataset.main()
    shapes = [str(shape) for shape in read_shapes(load_prepared(prepared)).shapes]
    setup = SimpleNamespace(
        pipeline=pipeline,
        dataset=prepared,
        config=save_config(tmp_path / "config", ["1x2x2", "1x4x4", "5x8x8", *shapes]),
    )
    metrics = train_here(setup, tmp_path / "run", *words, max_train_steps=1, gradient_accumulation_steps=1)
    assert metrics[0]["loss"] > 0 and metrics[0]["grad_norm"] > 0
    assert "(9x64x64 pixels): 3 samples, B = " in capsys.readouterr().err
    trained = WanTransformer3DModel.from_pretrained(tmp_path / "run" / saved)
    start = WanTransformer3DModel.from_pretrained(pipeline, subfolder=saved)
    assert trained.config.in_channels == start.config.in_channels
    assert any((a != b).any() for a, b in zip(trained.parameters(), start.parameters()))
    card = (tmp_path / "run" / "README.md").read_text()
    assert f"pipe = {'WanImageToVideoPipeline' if kind == 'i2v' else 'WanPipeline'}.from_pretrained(" in card
