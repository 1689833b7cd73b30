"""How long do blocks take forward and backward, and how much memory: eager, torch.compile, patched, and both?

    python recipes/block_speed.py --output recipes/results/block_speed.json
    python recipes/block_speed.py --only blocks lora --quick
    python recipes/block_speed.py --input recipes/results/block_speed.json --markdown     # tables of docs/patching.md
    python recipes/block_speed.py --input monday.json later.json --output both.json

Real diffusers models of real widths with a few layers, bfloat16, random latents. `blocks`: two Wan layers, all
parameters trained, no checkpointing, and torch.compile a second time without what computes wrong gradients in some of
its versions (pytorch#193061), "compile, correct"; `lora`: the same with rank 32 on attention and the rest frozen;
`families`: SD3.5, Flux and HunyuanVideo. `whole`: 30 layers of 1.3B with checkpointing on a tiny input, which is the
host's time. `longest`: what fits into the memory that eager needs for 48,000 tokens. `launches`: kernels a block.

The contenders take turns in one process, forwards and backwards, each after a collection of young garbage. A time is
the median over the rounds, and the fastest is kept beside it, without waiting for the host between the steps of a
round. Three rows wait for the host, whose times scatter and depend on what a process did before: they come first, each
in a process of its own, and have six times as many rounds (`whole`: four). Peak GiB is what the allocator handed out
above weights and inputs. The output file is written after each row; what is measured anew replaces its row of an old
one. `worst_gradient` of a contender is the parameter whose gradient is furthest from eager's, and by how much.
"""

import argparse
import datetime
import gc
import json
import multiprocessing
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from block_cases import CONTENDERS, CORRECT, Case, add_lora, contenders, family_cases, wan, wan_cases, wan_inputs

from adaptiveload_hf import UserError
from adaptiveload_hf.errors import exit_on_user_error

LEAST_SECONDS = 0.2  # of the steps of one round
# Rows that wait for the host, by part and place: Wan 1.3B at 7,800 and 256 tokens; and their rounds for one of others.
HOST_BOUND = {("lora", 0): 6, ("blocks", 0): 6, ("whole", 0): 4}
WITHOUT_COMPILE = ("eager", "patched")
COLUMNS = (*CONTENDERS[:2], CORRECT, *CONTENDERS[2:])
SHORT = 48_000  # tokens at which eager's memory is the budget


def say(text: str):
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------ one contender


def step_of(model: torch.nn.Module, inputs: dict):
    """A function that runs forward and backward. It drops gradients as an optimizer does, from a list of parameters:
    to find them anew takes the host 0.2 ms for two layers with LoRA."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step():
        for parameter in trained:
            parameter.grad = None
        model(**inputs, return_dict=False)[0].square().mean().backward()

    return step


def peak_gib(model: torch.nn.Module, inputs: dict) -> float:
    """Of one step, above weights and inputs."""
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step_of(model, inputs)()
    torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def milliseconds(step, calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def kernels(step) -> int:
    """That one step launches, copies and fills not counted."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    on_gpu = [event for event in profile.key_averages() if event.device_type.name == "CUDA"]
    return sum(event.count for event in on_gpu if not event.key.startswith(("Memcpy", "Memset")))


def worst_gradient(model: torch.nn.Module, expected: torch.nn.Module) -> tuple[float, str]:
    """The largest relative distance of a parameter's gradient from that in another model, and the parameter's name.

    Relative to 1e-4 of the longest gradient at least: what is shorter, as of biases of keys, is rounding.
    """
    truths = {name: p.grad.float() for name, p in expected.named_parameters() if p.grad is not None}
    floor = 1e-4 * max(truth.norm().item() for truth in truths.values())
    found = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name in truths:
            distance = (parameter.grad.float() - truths[name]).norm().nan_to_num(torch.inf).item()
            found.append((distance / max(truths[name].norm().item(), floor), name))
    return max(found)


def compare(models: dict[str, torch.nn.Module], inputs: dict, rounds: int) -> dict:
    """Milliseconds of a step, median and fastest, its peak GiB, and how far its gradients are from those of the first,
    for each contender; and the rounds.

    They take turns, each with an untimed step first: after another's step the GPU has another temperature and clock.
    Young garbage is collected before, or some would pay for what others left.
    """
    steps = {name: step_of(model, inputs) for name, model in models.items()}
    worst, first = {}, next(iter(models.values()))
    for name, step in steps.items():
        step()
        step()
        worst[name] = worst_gradient(models[name], first)
    peaks = {name: peak_gib(model, inputs) for name, model in models.items()}
    once = {name: milliseconds(step, 1) for name, step in steps.items()}
    calls = {name: max(1, round(1e3 * LEAST_SECONDS / once[name])) for name in steps}
    times, turns = {name: [] for name in steps}, list(steps)
    for _ in range(rounds):
        for name in turns:
            gc.collect(1)
            steps[name]()
            times[name].append(milliseconds(steps[name], calls[name]))
        turns.reverse()
    found = {
        name: {
            **{"milliseconds": statistics.median(of), "fastest": min(of)},
            **{"peak_gib": peaks[name], "worst_gradient": worst[name]},
        }
        for name, of in times.items()
    }
    return {"rounds": rounds, **found}


# ----------------------------------------------------------------------------------------------- parts


def measure_case(case: Case, rounds: int, names: tuple[str, ...] = CONTENDERS) -> dict:
    say(f"{case.name}, {case.tokens} tokens, {case.training}")
    model, inputs = case.make()
    if case.training == "LoRA":
        add_lora(model)
    row = {"model": case.name, "tokens": case.tokens, "training": case.training}
    row |= compare(contenders(model, names), inputs, rounds)
    clean_up()
    return row


def measure_whole(rounds: int) -> dict:
    """30 layers of 1.3B, 256 tokens, checkpointing."""
    say("whole model")
    model, inputs = wan("1.3B", 30), wan_inputs((1, 32, 32))
    model.enable_gradient_checkpointing()
    row = {"model": "Wan 1.3B, 30 layers", "tokens": 256, "training": "full, checkpointing"}
    row |= compare(contenders(model, WITHOUT_COMPILE), inputs, rounds)
    clean_up()
    return row


def measure_launches(_: int) -> dict:
    """Kernels of a forward and backward of one more block of 1.3B."""
    say("launches")
    inputs, counts = wan_inputs((5, 60, 104)), []
    for layers in (1, 2):
        models = contenders(wan("1.3B", layers), WITHOUT_COMPILE)
        counts.append({name: kernels(step_of(model, inputs)) for name, model in models.items()})
        clean_up()
    return {"model": "Wan 1.3B, one block", **{name: counts[1][name] - counts[0][name] for name in WITHOUT_COMPILE}}


def measure_longest(_: int) -> dict:
    """Tokens that fit into eager's memory for SHORT, for two layers of 14B, in steps of 500."""
    say("longest")
    model, row = wan("14B", 2), {"model": "Wan 14B, 2 layers"}
    for name in WITHOUT_COMPILE:
        (other,) = contenders(model, (name,)).values()
        low = high = SHORT
        peaks = {SHORT: peak_of_tokens(other, SHORT)}
        if name == "eager":
            row["budget_gib"] = peaks[SHORT]
        else:
            high = 2 * SHORT
            peaks[high] = peak_of_tokens(other, high)
            slope = (peaks[high] - peaks[SHORT]) / SHORT
            low = int(SHORT + (row["budget_gib"] - peaks[SHORT]) / slope) // 500 * 500
            while peak_of_tokens(other, low) > row["budget_gib"]:
                low -= 500
        row[name] = {"tokens": low, "peak_gib_at_48000": peaks[SHORT]}
        del other
        clean_up()
    return row


def peak_of_tokens(model: torch.nn.Module, tokens: int) -> float:
    inputs = wan_inputs((tokens // 500, 40, 50))
    step_of(model, inputs)()
    return peak_gib(model, inputs)


def clean_up():
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


# Of each part what measures its rows, given the number of rounds.
PARTS = {
    "blocks": [partial(measure_case, case, names=COLUMNS) for case in wan_cases("full")],
    "lora": [partial(measure_case, case) for case in wan_cases("LoRA")],
    "families": [partial(measure_case, case) for case in family_cases()],
    "whole": [measure_whole],
    "longest": [measure_longest],
    "launches": [measure_launches],  # last: what profiles stays attached and slows every launch
}


def measure_row(part: str, place: int, rounds: int) -> dict:
    return PARTS[part][place](rounds * HOST_BOUND.get((part, place), 1))


def measured_rows(parts: list[str], rounds: int) -> Iterator[tuple[str, dict]]:
    """(part, row) of all rows, those that wait for the host first."""
    rows = [(part, place) for part in PARTS if part in parts for place in range(len(PARTS[part]))]
    spawn = multiprocessing.get_context("spawn")
    own = {row: ProcessPoolExecutor(1, spawn) for row in rows if row in HOST_BOUND}
    for started in [process.submit(int) for process in own.values()]:  # all import now, none while another measures
        started.result()
    for row, process in own.items():
        with process:
            yield row[0], process.submit(measure_row, *row, rounds).result()
    for row in rows:
        if row not in own:
            yield row[0], measure_row(*row, rounds)


# ---------------------------------------------------------------------------------------------- tables


def tables(result: dict) -> list[list[list[str]]]:
    """Rows of cells, the first one the head: times, memory, wrong gradients, launches, longest. What was not measured
    is left out."""
    parts = result["parts"]
    timed = [row for name in ("blocks", "lora", "families", "whole") for row in parts.get(name, [])]
    found = [compared(timed, *about) for about in (("milliseconds", "ms", ".1f"), ("peak_gib", "GiB", ".2f")) if timed]
    if wrong := wrong_gradients(timed):
        found.append([["wrong gradients", "tokens", "training", "of", "worst", "off by"], *wrong])
    for row in parts.get("launches", []):
        counts = [str(row[name]) for name in WITHOUT_COMPILE]
        found.append([["kernels", *WITHOUT_COMPILE], [row["model"], *counts]])
    for row in parts.get("longest", []):
        longest = [f"{row[name]['tokens']:,} ({row[name]['tokens'] / SHORT - 1:+.0%})" for name in WITHOUT_COMPILE]
        found.append([[f"tokens in {row['budget_gib']:.1f} GiB", *WITHOUT_COMPILE], [row["model"], *longest]])
    return found


def compared(rows: list[dict], key: str, unit: str, form: str) -> list[list[str]]:
    """What each contender needs, and the ratios that the gates are about."""
    ratios = (("patched", "eager"), ("patched", "compile"), ("patched", CORRECT), ("patched + compile", "compile"))
    lines = [[unit, "tokens", "training", *COLUMNS, *(f"{one} / {other}" for one, other in ratios)]]
    for row in rows:
        values = {name: row[name][key] for name in COLUMNS if name in row}
        cells = [format(values[name], form) if name in values else "" for name in COLUMNS]
        cells += [
            f"{values[one] / values[other]:.2f}" if {one, other} <= values.keys() else "" for one, other in ratios
        ]
        lines.append([row["model"], f"{row['tokens']:,}", row["training"], *cells])
    return lines


def wrong_gradients(rows: list[dict]) -> list[list[str]]:
    """Contenders of which a parameter's gradient is further from eager's than rounding takes it."""
    lines = []
    for row in rows:
        for name in (name for name in COLUMNS if "worst_gradient" in row.get(name, {})):
            error, parameter = row[name]["worst_gradient"]
            if error > 0.1:
                lines.append([row["model"], f"{row['tokens']:,}", row["training"], name, parameter, f"{error:.2g}"])
    return lines


def print_tables(result: dict, markdown: bool):
    about = ", ".join(f"{name} {result[name]}" for name in ("driver", "torch", "diffusers", "date"))
    print(f"{result['gpu']}, {about}")
    for lines in tables(result):
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        if markdown:
            lines = [lines[0], ["---"] * len(widths), *lines[1:]]
        print()
        for line in lines:
            padded = [
                text.rjust(width) if i else text.ljust(width) for i, (text, width) in enumerate(zip(line, widths))
            ]
            print(f"| {' | '.join(line)} |" if markdown else "  ".join(padded))


# ------------------------------------------------------------------------------------------------ main


def environment() -> dict:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip(),
        "torch": torch.__version__,
        **{package: version(package) for package in ("diffusers", "peft")},
        "date": datetime.date.today().isoformat(),
    }


def measure(parts: list[str], rounds: int, output: Path | None) -> dict:
    """Rows measured now; those of an existing file stay if it is of the same machine, versions and day."""
    result = {**environment(), "parts": {}}
    if output is not None and output.exists():
        before = json.loads(output.read_text())
        if about(before) == about(result):
            result["parts"] = before["parts"]
    command = shlex.join(["python", *sys.argv])
    for part, row in measured_rows(parts, rounds):
        put(result, part, {"rounds": rounds, **row, "command": command})
        say(json.dumps(row))  # and after each row a whole file: a later one may fail or run into a time limit
        write(result, output)
    return result


def merged(files: list[Path]) -> dict:
    """The rows of several files, of two the later one.

    Raises:
        UserError: they were measured on other machines, with other versions or on another day.
    """
    results = [json.loads(file.read_text()) for file in files]
    for file, other in zip(files, results):
        if about(other) != about(results[0]):
            raise UserError(
                f"expected files of one machine, its versions and one day, as {files[0]}: {about(results[0])}, but "
                f"{file} has {about(other)}. Measure all parts anew."
            )
        for name, rows in other["parts"].items():
            for row in rows:
                put(results[0], name, row)
    return results[0]


def about(result: dict) -> dict:
    return {key: value for key, value in result.items() if key != "parts"}


def put(result: dict, part: str, row: dict):
    """Add a row, in place of the one of the same model, tokens and training if there is one."""
    rows = result["parts"].setdefault(part, [])
    found = [i for i, old in enumerate(rows) if all(old.get(k) == row.get(k) for k in ("model", "tokens", "training"))]
    place = found[0] if found else len(rows)
    rows[place : place + 1] = [row]


def write(result: dict, output: Path | None):
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--quick", action="store_true", help="a third of the rounds")
    parser.add_argument("--output", type=Path, help="also write the numbers as JSON, after each row")
    parser.add_argument(
        "--input", type=Path, nargs="+", help="measure nothing, print the tables of such files together"
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    args = parser.parse_args()
    with exit_on_user_error("block_speed.py"):
        if args.input is not None:
            result = merged(args.input)
            write(result, args.output)
        elif not torch.cuda.is_available():
            raise UserError("this measures a GPU, and torch sees none here. Run it on a machine with one.")
        else:
            result = measure(args.only, 1 if args.quick else 3, args.output)
        print_tables(result, args.markdown)


if __name__ == "__main__":
    main()
