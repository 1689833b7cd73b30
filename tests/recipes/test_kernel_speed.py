"""Does recipes/kernel_speed.py say what it needs, and are its committed numbers whole?"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent


def test_without_a_gpu_it_ends_with_what_it_needs():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = [sys.executable, ROOT / "recipes" / "kernel_speed.py"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("kernel_speed.py: error: This measures a CUDA GPU, but torch finds none here.")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes" / "results").glob("kernel_speed_*.json")), ids=lambda p: p.stem
)
def test_committed_numbers_name_where_they_come_from_and_are_possible(path):
    result = json.loads(path.read_text())
    assert all(result[key] for key in ("gpu", "driver", "torch", "cuda", "python", "date", "command"))
    assert {(row["op"], row["direction"]) for row in result["rows"]} == {
        (op, direction) for op in ("layer_norm_modulate", "gate_residual") for direction in ("forward", "backward")
    }
    # Least bytes cannot move much faster than a copy, unless the data sat in the cache; small shapes do.
    large = [row for row in result["rows"] if row["shape"].startswith("2x32768x")]
    assert large
    assert all(0 < fraction < 1.1 for row in large for fraction in row["roof"].values())
