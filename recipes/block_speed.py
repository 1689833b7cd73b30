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

The contenders take turns, forwards and backwards, each after a collection of young garbage. A time is the median over
the rounds, and the fastest is kept beside it, without waiting for the host between the steps of a round. Peak GiB is
what the allocator handed out above weights and inputs. `worst_gradient` of a contender is the parameter whose gradient
is furthest from eager's, and by how much. The output file is written after each row; what is measured anew replaces
its row of an old one.

In most rows the contenders share a process. Three rows wait for the host, whose times scatter and depend on all that a
process holds or did, such as other models and the code compiled for them. There each contender has a process of its
own with one model, as training has, and the processes take turns on the same GPU, longer ones; these rows come first.
Rows with scattering times have more rounds.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from block_cases import (
    COLUMNS,
    CONTENDERS,
    SHORT,
    WITHOUT_COMPILE,
    Case,
    contenders,
    family_cases,
    model_and_inputs,
    prepare,
    wan,
    wan_cases,
    wan_inputs,
    whole_case,
)
from block_tables import print_tables

from adaptiveload_hf import UserError
from adaptiveload_hf.errors import exit_on_user_error

LEAST_SECONDS = 0.2  # of the timed steps of one turn
LEAST_SECONDS_ALONE = 1.0  # of those of a process that slept while others had their turns, as training never does
# Rows that wait for the host, by part and place: Wan 1.3B at 7,800 and 256 tokens.
HOST_BOUND = (("lora", 0), ("blocks", 0), ("whole", 0))
# Rounds for one of other rows: for those, and for Wan 14B at 32,760 tokens, whose goal is within the scatter of three.
MORE_ROUNDS = {("lora", 0): 3, ("blocks", 0): 3, ("whole", 0): 3, ("blocks", 3): 3}


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


class Contender:
    """A prepared model, its inputs, and what a step takes."""

    def __init__(self, model: torch.nn.Module, inputs: dict):
        self.model, self.step, self.calls = model, step_of(model, inputs), 0
        self.step()
        self.step()
        self.peak_gib = peak_gib(model, inputs)

    def turn(self, least_seconds: float) -> float:
        """Milliseconds of a step, after a few untimed ones: another's turn left the GPU at another temperature and
        clock, and the host's caches with its data. Young garbage is collected before, or some would pay for what
        others left."""
        gc.collect(1)
        for _ in range(1 + self.calls // 4):
            self.step()
        self.calls = self.calls or max(1, round(1e3 * least_seconds / milliseconds(self.step, 1)))
        return milliseconds(self.step, self.calls)


def times_in_turns(turns: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each gave in each round."""
    times, names = {name: [] for name in turns}, list(turns)
    for _ in range(rounds):
        for name in names:
            times[name].append(turns[name]())
        names.reverse()
    return times


# ----------------------------------------------------------------------------------------------- parts


def measure_together(part: str, place: int, rounds: int) -> dict:
    """A row whose contenders share this process."""
    case, names = CASES[part][place]
    say(f"{case.name}, {case.tokens} tokens, {case.training}")
    model, inputs = model_and_inputs(case)
    found = {name: Contender(other, inputs) for name, other in contenders(model, names).items()}
    times = times_in_turns({name: partial(other.turn, LEAST_SECONDS) for name, other in found.items()}, rounds)
    eager = found["eager"].model
    facts = {name: (other.peak_gib, worst_gradient(other.model, eager)) for name, other in found.items()}
    del model, found, eager
    clean_up()
    return row_of(case, times, facts)


def measure_apart(part: str, place: int, rounds: int, processes: dict[str, ProcessPoolExecutor]) -> dict:
    """A row each of whose contenders has a process of its own. They are prepared side by side, and then take turns."""
    case, names = CASES[part][place]
    say(f"{case.name}, {case.tokens} tokens, {case.training}, {len(names)} processes")
    for prepared in [processes[name].submit(prepare_alone, part, place, name) for name in names]:
        prepared.result()
    turns = {name: lambda process=processes[name]: process.submit(turn_alone).result() for name in names}
    times = times_in_turns(turns, rounds)
    return row_of(case, times, {name: processes[name].submit(facts_alone, part, place).result() for name in names})


alone: list[Contender] = []  # the only one of this process, where each has its own


def prepare_alone(part: str, place: int, name: str):
    model, inputs = model_and_inputs(CASES[part][place][0])
    prepare(model, name)
    alone.append(Contender(model, inputs))


def turn_alone() -> float:
    return alone[0].turn(LEAST_SECONDS_ALONE)


def facts_alone(part: str, place: int) -> tuple[float, tuple[float, str]]:
    """Peak GiB and worst gradient. Only now eager's model is here, too, made from the same seed."""
    eager, inputs = model_and_inputs(CASES[part][place][0])
    step_of(eager, inputs)()
    return alone[0].peak_gib, worst_gradient(alone[0].model, eager)


def row_of(case: Case, times: dict[str, list[float]], facts: dict[str, tuple[float, tuple[float, str]]]) -> dict:
    found = {
        name: {
            **{"milliseconds": statistics.median(of), "fastest": min(of), "turns": [round(each, 2) for each in of]},
            **{"peak_gib": facts[name][0], "worst_gradient": facts[name][1]},
        }
        for name, of in times.items()
    }
    rounds = len(times["eager"])
    return {"model": case.name, "tokens": case.tokens, "training": case.training, "rounds": rounds, **found}


def measure_launches() -> dict:
    """Kernels of a forward and backward of one more block of 1.3B."""
    say("launches")
    inputs, counts = wan_inputs((5, 60, 104)), []
    for layers in (1, 2):
        models = contenders(wan("1.3B", layers), WITHOUT_COMPILE)
        counts.append({name: kernels(step_of(model, inputs)) for name, model in models.items()})
        clean_up()
    return {"model": "Wan 1.3B, one block", **{name: counts[1][name] - counts[0][name] for name in WITHOUT_COMPILE}}


def measure_longest() -> dict:
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


# The rows of each part that are about contenders, and their names.
CASES = {
    "blocks": [(case, COLUMNS) for case in wan_cases("full")],
    "lora": [(case, CONTENDERS) for case in wan_cases("LoRA")],
    "families": [(case, CONTENDERS) for case in family_cases()],
    "whole": [(whole_case(), WITHOUT_COMPILE)],
}
# The others; launches last: what profiles stays attached and slows every launch.
OTHERS = {"longest": measure_longest, "launches": measure_launches}


def measured_rows(parts: list[str], rounds: int) -> Iterator[tuple[str, dict]]:
    """(part, row) of all rows, those that wait for the host first."""
    rows = [(part, place) for part in CASES if part in parts for place in range(len(CASES[part]))]
    spawn = multiprocessing.get_context("spawn")
    own = {
        (part, place): {name: ProcessPoolExecutor(1, spawn) for name in CASES[part][place][1]}
        for part, place in HOST_BOUND
        if part in parts
    }
    for started in [process.submit(int) for processes in own.values() for process in processes.values()]:
        started.result()  # all import now, none while another measures
    for row, processes in own.items():
        yield row[0], measure_apart(*row, rounds * MORE_ROUNDS[row], processes)
        for process in processes.values():
            process.shutdown()
    for row in rows:
        if row not in own:
            yield row[0], measure_together(*row, rounds * MORE_ROUNDS.get(row, 1))
    for part in OTHERS:
        if part in parts:
            yield part, OTHERS[part]()


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
        put(result, part, {**row, "command": command})
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
    parser.add_argument(
        "--only", nargs="+", choices=(*CASES, *OTHERS), default=[*CASES, *OTHERS], help="parts to measure"
    )
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
