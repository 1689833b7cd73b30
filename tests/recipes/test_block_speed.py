"""Does recipes/block_speed.py run its cases, say what it needs, and print what it measured?"""

import json
import subprocess
import sys
from pathlib import Path

import block_cases
import block_speed
import pytest
import torch
from support.tiny_models import tiny_inputs, tiny_model

ROOT = Path(__file__).parents[2]


def run_in(folder, *options):
    command = [sys.executable, ROOT / "recipes" / "block_speed.py", *options]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)


@pytest.fixture
def result():
    def row(model, training, **milliseconds):
        times = {name: {"milliseconds": ms, "peak_gib": ms / 100} for name, ms in milliseconds.items()}
        return {"model": model, "tokens": 7800, "training": training, **times}

    full = row("Wan 1.3B", "full", eager=20.0, compile=16.0, patched=15.0, **{"patched + compile": 14.0})
    whole = row("Wan 1.3B, 30 layers", "full", eager=100.0, patched=80.0)
    longest = {"eager": 48000, "patched": 60000}
    parts = {
        "blocks": [full],
        "whole": [whole],
        "launches": [{"model": "one block", "eager": 200, "patched": 90}],
        "longest": [{"model": "14B", "budget_gib": 30.0, **{name: {"tokens": n} for name, n in longest.items()}}],
    }
    about = {"gpu": "a GPU", "driver": "1", "torch": "2", "diffusers": "3", "peft": "4", "date": "2026-11-30"}
    return {**about, "parts": {name: {"rows": rows} for name, rows in parts.items()}}


def test_without_a_gpu_it_ends_with_what_it_needs(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run_in(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("block_speed.py: error: this measures a GPU, and torch sees none here.")


def test_a_measured_file_is_printed_as_tables(tmp_path, result):
    (tmp_path / "speed.json").write_text(json.dumps(result))
    done = run_in(tmp_path, "--input", "speed.json", "--markdown")
    assert done.returncode == 0, done.stderr
    assert "a GPU, driver 1, torch 2, diffusers 3, date 2026-11-30" in done.stdout
    ratios = "0.75 | 0.94 | 0.88"
    assert f"| Wan 1.3B | 7,800 | full | 20.0 | 16.0 | 15.0 | 14.0 | {ratios} |" in done.stdout
    assert f"| Wan 1.3B | 7,800 | full | 0.20 | 0.16 | 0.15 | 0.14 | {ratios} |" in done.stdout
    assert "| Wan 1.3B, 30 layers | 7,800 | full | 100.0 |  | 80.0 |  | 0.80 |  |  |" in done.stdout
    assert "| one block | 200 | 90 |" in done.stdout
    assert "| tokens in 30.0 GiB | eager | patched |" in done.stdout
    assert "| 14B | 48,000 (+0%) | 60,000 (+25%) |" in done.stdout


def rows_until_it_fails(rounds):
    yield {"rounds": rounds}
    raise ZeroDivisionError


def test_a_part_measured_anew_keeps_the_others_of_the_same_machine(tmp_path, result, monkeypatch):
    output = tmp_path / "results" / "speed.json"
    about = {name: value for name, value in result.items() if name != "parts"}
    monkeypatch.setattr(block_speed, "environment", lambda: about)
    monkeypatch.setitem(block_speed.PARTS, "lora", lambda rounds: [{"rounds": rounds}])
    block_speed.measure(["lora"], 3, output)
    output.write_text(json.dumps({**json.loads(output.read_text()), "parts": result["parts"]}))
    found = block_speed.measure(["lora"], 3, output)
    assert json.loads(output.read_text()) == found
    assert found["parts"].keys() == {*result["parts"], "lora"}
    assert found["parts"]["lora"]["rows"] == [{"rounds": 3}]
    monkeypatch.setitem(block_speed.PARTS, "whole", rows_until_it_fails)
    with pytest.raises(ZeroDivisionError):
        block_speed.measure(["whole"], 3, output)
    assert json.loads(output.read_text())["parts"]["whole"]["rows"] == [{"rounds": 3}]
    monkeypatch.setattr(block_speed, "environment", lambda: {**about, "driver": "another"})
    assert block_speed.measure(["lora"], 3, output)["parts"].keys() == {"lora"}


@pytest.mark.parametrize("case", [*block_cases.wan_cases("full"), *block_cases.family_cases()], ids=lambda c: c.name)
def test_models_take_their_inputs(case, monkeypatch):
    """Of their real sizes, without data: shapes and dtypes alone."""
    on_meta = torch.device("meta")
    monkeypatch.setattr(block_cases, "DEVICE", on_meta)
    model, inputs = case.make()
    block_speed.step_of(model, inputs)()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_lora_trains_the_adapters_on_attention_alone():
    model = tiny_model("wan")
    block_cases.add_lora(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 4 * 2
    assert all("lora" in name and "attn" in name for name in trained)


def test_each_contender_is_a_copy_prepared_as_its_name_says(monkeypatch):
    compiled = []
    monkeypatch.setattr(block_cases, "compile_blocks", compiled.append)
    models = block_cases.contenders(tiny_model("wan"))
    is_patched = {name: "forward" in vars(model.blocks[0]) for name, model in models.items()}
    assert is_patched == {"eager": False, "compile": False, "patched": True, "patched + compile": True}
    assert compiled == [models["compile"], models["patched + compile"]]
    outputs = [model(**tiny_inputs("wan"), return_dict=False)[0] for model in models.values()]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-4, atol=1e-4)
