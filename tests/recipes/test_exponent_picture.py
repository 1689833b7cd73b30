"""Does the picture of the two laws show something, and refuse what holds no law?"""

import sys

import exponent_picture
import numpy as np
import pytest
from PIL import Image
from support.launch import ROOT

from adaptiveload_hf import UserError


def draw(monkeypatch, measurements, output):
    monkeypatch.setattr(sys, "argv", ["", "--measurements", str(measurements), "--output", str(output)])
    exponent_picture.main()


def test_both_laws_are_drawn_in_their_colours(tmp_path, monkeypatch):
    draw(monkeypatch, ROOT / "tests" / "data" / "h200_wan_steps.jsonl", tmp_path / "picture.png")
    pixels = np.asarray(Image.open(tmp_path / "picture.png").convert("RGB")).reshape(-1, 3)
    for colour in ((0, 114, 178), (230, 159, 0)):
        assert (np.abs(pixels - np.array(colour)).max(axis=1) < 12).sum() > 500


def test_measurements_of_one_shape_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "measurements.jsonl"
    path.write_text('{"shape": "1x8x8", "tokens": 16, "batch_size": 1, "seconds": 1.0, "peak_gib": 0.0}\n')
    with pytest.raises(UserError, match="at least two shapes"):
        draw(monkeypatch, path, tmp_path / "picture.png")
