"""Does recipes/schedule_speed.py measure what it says, and do its committed numbers keep the promise?"""

import json
import subprocess
import sys
from pathlib import Path

from schedule_speed import fastest

ROOT = Path(__file__).parents[2]


def test_a_small_epoch_is_measured_in_fresh_processes(tmp_path):
    output = tmp_path / "speed.json"
    command = [sys.executable, ROOT / "recipes" / "schedule_speed.py", "--samples", "30000", "--repeats", "2"]
    subprocess.run([*command, "--output", output], check=True, capture_output=True)
    result = json.loads(output.read_text())
    assert all(result[key] for key in ("cpu", "numpy", "python", "date", "command"))
    (row,) = result["rows"]
    assert row["micro_batches"] % 4096 == 0
    assert len(row["runs"]) == 2
    assert row["next_batch_microseconds"] > 0
    assert 0 < row["peak_gib"] < 0.3


def test_the_fastest_run_counts_and_the_largest_memory():
    runs = [
        {"samples": 9, "plan_seconds": 2.0, "next_batch_microseconds": 5.0, "peak_gib": 0.1},
        {"samples": 9, "plan_seconds": 1.0, "next_batch_microseconds": 7.0, "peak_gib": 0.2},
    ]
    assert fastest(runs) == {"samples": 9, "plan_seconds": 1.0, "next_batch_microseconds": 5.0, "peak_gib": 0.2}


def test_committed_numbers_keep_the_promise():
    result = json.loads((ROOT / "recipes" / "results" / "schedule_speed.json").read_text())
    assert [row["samples"] for row in result["rows"]] == [100_000, 1_000_000, 10_000_000]
    for row in result["rows"]:
        assert row["plan_seconds"] + row["schedule_seconds"] <= 5
        assert row["next_batch_microseconds"] <= 50
        assert row["peak_gib"] <= 0.8
