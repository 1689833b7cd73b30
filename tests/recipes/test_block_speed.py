"""Does recipes/block_speed.py run its cases, say what it needs, and print what it measured?"""

import json
import sys
import time
from concurrent.futures import Future

import block_cases
import block_speed
import pytest
import torch
from support.tiny_models import tiny_inputs, tiny_model


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the recipe in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run_with(*options):
        monkeypatch.setattr(sys, "argv", ["block_speed.py", *options])
        block_speed.main()

    return run_with


@pytest.fixture
def result():
    def row(model, training, **milliseconds):
        times = {
            name: {"milliseconds": ms, "fastest": ms - 10, "peak_gib": ms / 100} for name, ms in milliseconds.items()
        }
        return {"model": model, "tokens": 7800, "training": training, **times}

    compiled = {"compile, correct": 18.0, "patched + compile": 14.0}
    full = row("Wan 1.3B", "full", eager=20.0, compile=16.0, patched=15.0, **compiled)
    full["compile"]["worst_gradient"] = 46000.0, "blocks.0.scale_shift_table"
    full["patched"]["worst_gradient"] = 0.05, "blocks.0.attn2.to_k.bias"
    whole = row("Wan 1.3B, 30 layers", "full", eager=100.0, patched=80.0)
    longest = {"eager": 48000, "patched": 60000}
    parts = {
        "blocks": [full],
        "whole": [whole],
        "launches": [{"model": "one block", "eager": 200, "patched": 90}],
        "longest": [{"model": "14B", "budget_gib": 30.0, **{name: {"tokens": n} for name, n in longest.items()}}],
    }
    about = {"gpu": "a GPU", "driver": "1", "torch": "2", "diffusers": "3", "peft": "4", "date": "2026-11-30"}
    return {**about, "parts": parts}


def test_without_a_gpu_it_ends_with_what_it_needs(run):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit, match=r"^block_speed.py: error: this measures a GPU, and torch sees none here."):
        run()


def test_a_measured_file_is_printed_as_tables(run, tmp_path, result, capsys):
    (tmp_path / "speed.json").write_text(json.dumps(result))
    run("--input", "speed.json", "--markdown")
    printed = capsys.readouterr().out
    assert "a GPU, driver 1, torch 2, diffusers 3, date 2026-11-30" in printed
    ratios = "0.75 | 0.94 | 0.83 | 0.88"
    assert f"| Wan 1.3B | 7,800 | full | 20.0 | 16.0 | 18.0 | 15.0 | 14.0 | {ratios} |" in printed
    assert "| Wan 1.3B | 7,800 | full | 10.0 | 6.0 | 8.0 | 5.0 | 4.0 | 0.50 | 0.83 | 0.62 | 0.67 |" in printed
    assert f"| Wan 1.3B | 7,800 | full | 0.20 | 0.16 | 0.18 | 0.15 | 0.14 | {ratios} |" in printed
    assert "| Wan 1.3B, 30 layers | 7,800 | full | 100.0 |  |  | 80.0 |  | 0.80 |  |  |  |" in printed
    assert "| Wan 1.3B | 7,800 | full | compile | blocks.0.scale_shift_table | 4.6e+04 |" in printed
    assert printed.count("scale_shift_table") == 1
    assert "| one block | 200 | 90 |" in printed
    assert "| tokens in 30.0 GiB | eager | patched |" in printed
    assert "| 14B | 48,000 (+0%) | 60,000 (+25%) |" in printed


def test_files_of_one_machine_are_printed_and_written_as_one(run, tmp_path, result):
    longest = result["parts"].pop("longest")
    (tmp_path / "early.json").write_text(json.dumps(result))
    result["parts"] = {
        "longest": longest,
        "blocks": [{**result["parts"]["blocks"][0], "patched": {"milliseconds": 1.0, "peak_gib": 1.0}}],
    }
    (tmp_path / "late.json").write_text(json.dumps(result))
    run("--input", "early.json", "late.json", "--output", "all.json")
    parts = json.loads((tmp_path / "all.json").read_text())["parts"]
    assert list(parts) == ["blocks", "whole", "launches", "longest"]
    assert [row["patched"] for row in parts["blocks"]] == [{"milliseconds": 1.0, "peak_gib": 1.0}]
    (tmp_path / "late.json").write_text(json.dumps({**result, "driver": "2"}))
    with pytest.raises(
        SystemExit, match=r"expected files of one machine.* but late.json has {.*'driver': '2'.* anew."
    ):
        run("--input", "early.json", "late.json")


def row_maker(model, milliseconds):
    return lambda: {"model": model, "milliseconds": milliseconds}


def test_each_row_is_written_at_once_and_replaces_its_like_of_the_same_machine(tmp_path, result, monkeypatch):
    output = tmp_path / "results" / "speed.json"
    about = {name: value for name, value in result.items() if name != "parts"}
    monkeypatch.setattr(block_speed, "environment", lambda: about)
    monkeypatch.setattr(block_speed, "OTHERS", {"longest": row_maker("Wan", 1), "launches": row_maker("X", 1)})
    found = block_speed.measure(["longest", "launches"], 3, output)
    assert json.loads(output.read_text()) == found
    output.write_text(json.dumps({**found, "parts": {**result["parts"], **found["parts"]}}))
    monkeypatch.setattr(block_speed, "OTHERS", {"longest": row_maker("Wan", 2), "launches": lambda: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        block_speed.measure(["longest", "launches"], 1, output)
    parts = json.loads(output.read_text())["parts"]
    assert parts.keys() == {*result["parts"]}
    assert [(row["model"], row["milliseconds"]) for row in parts["longest"] + parts["launches"]] == [
        ("Wan", 2),
        ("X", 1),
    ]
    monkeypatch.setattr(block_speed, "environment", lambda: {**about, "driver": "another"})
    monkeypatch.setitem(block_speed.OTHERS, "longest", row_maker("Wan", 1))
    assert block_speed.measure(["longest"], 3, output)["parts"].keys() == {"longest"}


class Process:
    """Stands for a process: what is submitted to it runs at once."""

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self):
        self.ended = True


def test_rows_that_wait_for_the_host_come_first_in_processes_of_their_own_and_with_more_rounds(monkeypatch):
    apart, together, started = [], [], []
    monkeypatch.setattr(block_speed, "ProcessPoolExecutor", lambda *_: started.append(Process()) or started[-1])
    monkeypatch.setattr(block_speed, "measure_apart", lambda *row: apart.append((row, len(together))) or {})
    monkeypatch.setattr(block_speed, "measure_together", lambda *row: together.append(row) or {})
    monkeypatch.setattr(block_speed, "OTHERS", dict.fromkeys(block_speed.OTHERS, dict))
    found = [part for part, _ in block_speed.measured_rows([*block_speed.CASES, *block_speed.OTHERS], 3)]
    assert found[:3] == ["lora", "blocks", "whole"] and found[-2:] == ["longest", "launches"]
    assert [row[:3] for row, _ in apart] == [("lora", 0, 9), ("blocks", 0, 9), ("whole", 0, 9)]
    assert all(measured == 0 for _, measured in apart)
    assert [tuple(row[3]) for row, _ in apart] == [block_cases.CONTENDERS, block_cases.COLUMNS, ("eager", "patched")]
    assert len({id(process) for row, _ in apart for process in row[3].values()}) == len(started) == 11
    assert all(process.ended for process in started)
    assert together[:3] == [("blocks", 1, 3), ("blocks", 2, 3), ("blocks", 3, 9)]
    assert len(together) == sum(map(len, block_speed.CASES.values())) - 3


def test_the_rows_with_more_rounds_are_the_short_ones_of_the_small_model_and_the_longest_of_the_large_one():
    cases = [block_speed.CASES[part][place][0] for part, place in block_speed.MORE_ROUNDS]
    sizes = [("Wan 1.3B", 7800), ("Wan 1.3B", 7800), ("Wan 1.3B, 30 layers", 256), ("Wan 14B", 32760)]
    assert [(case.name, case.tokens) for case in cases] == sizes


class Clocks:
    """What block_speed.py reads of a GPU, on a CPU: a clock, and a peak of 3 GiB."""

    def __init__(self, **_):
        pass

    def record(self):
        self.seconds = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1e3 * (other.seconds - self.seconds)


def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Clocks)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 4 * 2**30)
    monkeypatch.setattr(block_speed, "LEAST_SECONDS", 0.01)
    monkeypatch.setattr(block_speed, "LEAST_SECONDS_ALONE", 0.02)


def test_a_contender_alone_in_its_process_gives_what_one_beside_others_gives(monkeypatch):
    """Time aside. Eager's gradients are those of a model that was made anew from the seed."""
    on_a_cpu(monkeypatch)
    monkeypatch.setattr(block_cases, "DEVICE", "cpu")
    monkeypatch.setattr(block_cases, "WIDTHS", {"1.3B": (1, 64)})
    case = block_cases.Case(
        "tiny", 16, lambda: (block_cases.wan("1.3B", 1), block_cases.wan_inputs((1, 8, 8))), "LoRA"
    )
    monkeypatch.setitem(block_speed.CASES, "lora", [(case, block_cases.WITHOUT_COMPILE)])
    rows = [block_speed.measure_together("lora", 0, 2)]
    found = {}
    for name in block_cases.WITHOUT_COMPILE:
        monkeypatch.setattr(block_speed, "alone", [])
        block_speed.prepare_alone("lora", 0, name)
        found[name] = [block_speed.turn_alone(), block_speed.turn_alone()], block_speed.facts_alone("lora", 0)
    times, facts = ({name: both[place] for name, both in found.items()} for place in (0, 1))
    rows.append(block_speed.row_of(case, times, facts))
    assert {name for row in rows for name in row if isinstance(row[name], dict)} == {"eager", "patched"}
    for name in block_cases.WITHOUT_COMPILE:
        assert rows[0][name]["worst_gradient"] == rows[1][name]["worst_gradient"]
        assert [row[name]["peak_gib"] for row in rows] == [3, 3]
        assert all(0 < row[name]["fastest"] <= row[name]["milliseconds"] for row in rows)
        assert [len(row[name]["turns"]) for row in rows] == [2, 2]
    assert rows[0]["eager"]["worst_gradient"][0] == 0 < rows[0]["patched"]["worst_gradient"][0] < 0.05
    assert {row["rounds"] for row in rows} == {2}


def test_contenders_take_turns_forwards_and_backwards():
    order = []
    times = block_speed.times_in_turns({name: lambda name=name: order.append(name) or len(order) for name in "ab"}, 3)
    assert "".join(order) == "abbaab"
    assert times == {"a": [1, 4, 5], "b": [2, 3, 6]}


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
    monkeypatch.setattr(block_cases, "compile_blocks", lambda model, options: compiled.append((model, options)))
    models = block_cases.contenders(tiny_model("wan"), block_speed.COLUMNS)
    patched = [name for name, model in models.items() if "forward" in vars(model.blocks[0])]
    assert patched == ["patched", "patched + compile"]
    off = {"triton.mix_order_reduction": False}
    names = [("compile", {}), ("compile, correct", off), ("patched + compile", {})]
    assert compiled == [(models[name], options) for name, options in names]
    outputs = [model(**tiny_inputs("wan"), return_dict=False)[0] for model in models.values()]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-4, atol=1e-4)


def test_the_parameter_whose_gradient_is_furthest_off_is_named():
    model, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    for linear in (model, other):
        linear.weight.grad, linear.bias.grad = torch.ones(3, 2), torch.zeros(3)
    assert block_speed.worst_gradient(model, other)[0] == 0
    model.weight.grad[0] = 3.0
    error, name = block_speed.worst_gradient(model, other)
    assert name == "weight" and error == pytest.approx((8 / 6) ** 0.5)
    model.bias.grad[1] = torch.nan
    assert block_speed.worst_gradient(model, other) == (torch.inf, "bias")
