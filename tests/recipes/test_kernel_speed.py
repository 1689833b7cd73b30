"""Does recipes/kernel_speed.py say what it needs, and are its committed numbers whole?"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import kernel_cases
import kernel_speed
import pytest
import torch
from kernel_cases import CASES, Case
from kernel_report import goals_of
from kernel_timing import Measured
from support.adaln_cases import relative_error

ROOT = Path(__file__).parent.parent.parent


def test_without_a_gpu_it_ends_with_what_it_needs():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = [sys.executable, ROOT / "recipes" / "kernel_speed.py"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("kernel_speed.py: error: This measures a CUDA GPU, but torch finds none here.")


RESULTS = sorted((ROOT / "recipes" / "results").glob("kernel_speed_*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_committed_numbers_name_where_they_come_from_and_are_possible(path):
    result = json.loads(path.read_text())
    assert all(result[key] for key in ("gpu", "driver", "torch", "cuda", "triton", "python", "date", "command"))
    rows = {(row["op"], row["shape"], row["modulation"], row["direction"]): row for row in result["rows"]}
    cases = [(c.op, "x".join(map(str, c.shape)), c.modulation) for c in CASES]
    assert rows.keys() == {(*case, direction) for case in cases for direction in ("forward", "backward")}
    # Least bytes cannot move much faster than a copy, unless the data sat in the cache; small shapes do.
    for row in rows.values():
        assert {"Triton", "eager"} <= row["roof"].keys()
        assert all(0 < fraction < 1.1 for fraction in row["roof"].values()), row


def run_on_a_file(tmp_path, *options):
    command = [sys.executable, ROOT / "recipes" / "kernel_speed.py", *options]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)


@pytest.fixture
def result_file(tmp_path):
    row = {"op": "gate_residual", "shape": "2x8x64", "modulation": "float32", "least_bytes": 10**6, "goal": 0.9}
    times = {"CUDA": 250.04, "eager": 12.34}
    row |= {"microseconds": times, "roof": {"CUDA": 0.934, "eager": 0.1}, "bytes_kept_an_element": {"CUDA": 2.0}}
    row["microseconds_by_placement"] = {"CUDA": [250.0, 250.04, 262.5], "eager": [12.34] * 3}
    result = {"gpu": "a GPU", "driver": "1", "torch": "2", "triton": "3", "copy_terabytes_per_second": 4.2}
    result["rows"] = [{**row, "direction": direction} for direction in ("forward", "backward")]
    result["small_rows"] = []
    result["host_microseconds"] = [{"op": "gate_residual", "contender": "CUDA", "forward": 20.0, "backward": 30.0}]
    (tmp_path / "speed.json").write_text(json.dumps(result))
    return tmp_path / "speed.json"


def test_an_earlier_run_becomes_a_table_a_page_and_a_picture(result_file):
    plain = run_on_a_file(result_file.parent, "--input", "speed.json", "--picture", "made/roof.png")
    assert plain.returncode == 0, plain.stderr
    assert "a GPU, driver 1, torch 2, Triton 3, copy 4.20 TB/s" in plain.stdout
    assert "host, gate_residual, CUDA: forward 20.0 us, backward 30.0 us" in plain.stdout
    assert "slowest placement over fastest, gate_residual 2x8x64 float32 forward, CUDA: 1.050" in plain.stdout
    goal = "met     gate_residual 2x8x64 float32 forward, share of the roof: >= 0.9 wanted, 0.934 found"
    assert goal in plain.stdout and plain.stdout.endswith("goals met: 2 of 2\n")
    assert (result_file.parent / "made" / "roof.png").read_bytes().startswith(b"\x89PNG")
    page = run_on_a_file(result_file.parent, "--input", "speed.json", "--markdown").stdout.splitlines()
    assert page[0] == "| operation | B x S x D | modulation | direction | goal | CUDA | eager |"
    assert page[2] == "| gate_residual | 2x8x64 | float32 | forward | 0.90 | 250 (0.93) | 12.3 (0.10) |"


def test_every_kind_of_goal_is_judged_and_named():
    row = {"op": "layer_norm_modulate", "shape": "2x32768x5120", "modulation": "float32", "goal": 0.95}
    row |= {"direction": "forward", "microseconds": {"CUDA": 10.0, "eager": 119.0, "torch.compile": 11.0}}
    row |= {"roof": {"CUDA": 0.96, "Triton": 0.74}, "bytes_kept_an_element": {"CUDA": 2.0, "eager": 10.0}}
    small = {**row, "shape": "1x256x1536", "least_bytes": 4 * 10**6, "microseconds": {"CUDA": 3.8}}
    host = [{"op": "gate_residual", "contender": name, "forward": us, "backward": us} for name, us in HOST]
    result = {"rows": [row], "small_rows": [small], "copy_terabytes_per_second": 1.0, "host_microseconds": host}
    found = {goal.name: (goal.wanted, goal.found, goal.met) for goal in goals_of(result)}
    name = "layer_norm_modulate 2x32768x5120 float32 forward, "
    assert found.pop(name + "share of the roof") == (">= 0.95", "0.96", True)
    assert found.pop(name + "Triton, share of the roof") == (">= 0.75", "0.74", False)
    assert found.pop(name + "times as fast as eager") == (">= 12", "11.9", False)
    assert found.pop(name + "times as fast as torch.compile") == (">= 1", "1.1", True)
    assert found.pop(name + "kept less than eager") == (">= 0.79", "0.8", True)
    # A copy of 4 MB at 1 TB/s takes 4 us, more than the 2.5 us that count at least.
    assert found.pop("layer_norm_modulate 1x256x1536 float32 forward, microseconds") == ("<= 6", "3.8", True)
    assert found.pop("gate_residual forward, host time over eager's") == ("<= 0.7", "0.75", False)
    assert list(found) == ["gate_residual backward, host time over eager's"]


HOST = (("CUDA", 30.0), ("eager", 40.0))


def test_a_run_that_is_stopped_has_saved_the_rows_it_measured(monkeypatch):
    rows, saved = [], []

    def measure(case, contender):
        if case.shape[1] == 3:
            raise KeyboardInterrupt
        return Measured([1e-6, 4e-6, 2e-6], [3e-6, 3e-6, 3e-6], 2.0)

    monkeypatch.setattr(kernel_speed, "measure", measure)
    cases = [Case("gate_residual", (1, tokens, 8)) for tokens in (2, 3)]
    with pytest.raises(KeyboardInterrupt):
        kernel_speed.measure_rows(cases, ("eager",), 96e6, rows, lambda: saved.append(len(rows)))
    assert saved == [2] and [row["direction"] for row in rows] == ["forward", "backward"]
    assert rows[0]["microseconds"] == {"eager": 2.0} and rows[0]["roof"] == {"eager": 0.5}
    assert rows[0]["microseconds_by_placement"] == {"eager": [1.0, 4.0, 2.0]}


def test_an_input_that_is_not_there_is_named(tmp_path):
    done = run_on_a_file(tmp_path, "--input", "nothing.json")
    assert done.returncode == 1
    assert done.stderr == "kernel_speed.py: error: --input nothing.json is not a file. Pass what --output wrote.\n"


def test_least_bytes_are_what_each_op_reads_and_writes():
    per_element = {c: tuple(b / (c.shape[0] * c.shape[1] * c.shape[2]) for b in c.least_bytes) for c in CASES}
    assert per_element[Case("gate_residual", (2, 32768, 5120), goals=(0.95, 0.90))] == (6, 6)
    assert Case("gate_residual", (1, 1, 1), "frozen").least_bytes == (6, 4)
    assert Case("layer_norm_modulate", (1, 2, 8), "per token").least_bytes == (8 * 16, 10 * 16)
    assert Case("rms_norm_rope", (1, 2, 128)).least_bytes == (4 * 256 + 2048, 6 * 256 + 2048)
    assert Case("rms_norm_rope", (1, 2, 128), "each head", head=64).least_bytes == (4 * 256 + 1024, 6 * 256 + 1024)
    assert Case("rms_norm_rope", (1, 2, 128), "not turned", head=64).least_bytes == (4 * 256, 6 * 256)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_eager_expression_computes_what_the_op_computes(case, monkeypatch):
    monkeypatch.setattr(kernel_cases, "DEVICE", "cpu")
    small = replace(case, shape=(case.shape[0], 6, 2 * case.head))
    arguments, found = kernel_cases.make_arguments(small), []
    options = {"heads": 2} if case.op == "rms_norm_rope" else {}
    for prepare in (kernel_cases.eager_of(small), kernel_cases.fused(case.op, "auto", **options)):
        call, wanted = prepare(**arguments)
        outputs = call() if isinstance(call(), tuple) else (call(),)
        gradients = torch.autograd.grad(outputs, wanted, [torch.ones_like(output) for output in outputs])
        found.append([*outputs, *gradients])
    for eager, ours in zip(*found):
        assert relative_error(ours.flatten(), eager.flatten().double()) < 1e-2
