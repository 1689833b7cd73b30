"""Does recipes/monitor_overhead.py time steps with the monitor, without it, and the monitor alone?"""

import json
import re
import sys

import monitor_overhead
import pytest
from support.accelerators import fresh_accelerate


def test_the_monitor_is_timed_beside_a_small_model(small_pipeline, tmp_path, monkeypatch, capsys):
    config = small_pipeline / "transformer" / "config.json"
    words = ["--config", config, "--layers", 1, "--shape", "1x4x4", "--steps", 4, "--rounds", 1]
    words += ["--output", tmp_path / "overhead.json"]
    monkeypatch.setattr(sys, "argv", ["monitor_overhead.py", *map(str, words)])
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        monitor_overhead.main()
    said = capsys.readouterr().out
    times = {kind: float(ms) for kind, ms in re.findall(r"(\w+) +([\d.]+) ms, median of 3", said)}
    assert set(times) == {"without", "with", "alone", "reading"}
    assert times["reading"] > 0
    assert 0 < times["alone"] < times["with"]
    written = json.loads((tmp_path / "overhead.json").read_text())
    assert written["milliseconds"] == pytest.approx(times, abs=1e-3)
    assert written["command"].startswith(f"recipes/monitor_overhead.py --config {config} --layers 1")
    share = float(re.search(r"the monitor alone ([\d.]+)%", said)[1]) / 100
    assert share == pytest.approx(times["alone"] / times["without"], rel=0.05)
    assert json.loads(config.read_text())["num_layers"] == 2, "--layers is for this run alone"
