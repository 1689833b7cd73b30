"""How fast are the fused ops on this GPU, beside eager, torch.compile, other kernels, and what the memory allows?

    python recipes/kernel_speed.py --output recipes/results/kernel_speed.json --picture kernel_speed.png
    python recipes/kernel_speed.py --quick          # ours and eager in half a minute, on a smaller GPU, too
    python recipes/kernel_speed.py --input recipes/results/kernel_speed.json --markdown   # table of docs/kernels.md

Every figure is the median over three placements of its buffers in memory; kernel_timing.py says how a call is timed.
"roof" is the least bytes that the op must move, over the time, over the bandwidth of a plain device copy in the same
run. "plainest", beside small work, is a kernel that reads and writes as much but reduces nothing (kernel_floor.py).
What torch.compile and Triton need to compile is compiled first, in several processes. --output is written row by
row: a run that is stopped leaves what it has measured. `pip install liger-kernel nvidia-cudnn-frontend` adds those two
to the table.
"""

import argparse
import datetime
import functools
import importlib.util
import json
import os
import queue
import shlex
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import torch
import torch._functorch.config
import torch._inductor.config
from kernel_cases import CASES, QUICK_CASES, SMALL_CASES, Case, contenders
from kernel_report import COLUMNS, DIRECTIONS, draw, print_markdown, print_table
from kernel_timing import Measured, copy_bandwidth, differentiate, host_microseconds, measure, prepare, reserve

from adaptiveload_hf import UserError
from adaptiveload_hf.adaln import ops
from adaptiveload_hf.errors import exit_on_user_error

# A backward call is repeated on one forward call, which compiled code that reuses its buffers does not allow.
torch._functorch.config.donated_buffer = False
OURS_AND_EAGER = ("CUDA", "Triton", "eager")
SMALL_COLUMNS = (*OURS_AND_EAGER, "plainest")
RESERVED_GIB, QUICK_RESERVED_GIB, CUDNN_RESERVED_GIB = 16, 3, 6  # for tensors, and again for graphs
CUDNN_SECONDS = 20  # for one case, the first with the start of its process
_STARTED = time.monotonic()


def say(text: str):
    print(f"{time.monotonic() - _STARTED:4.0f} s  {text}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------- measuring


def measure_rows(cases, names, bandwidth: float, rows: list[dict], save):
    """Appends one dict a case and direction to `rows`: microseconds, share of the roof, bytes kept, by contender."""
    for case in cases:
        say(case.name)
        found = {}
        for name, contender in contenders(case).items():
            if name in names and name != "cuDNN":
                torch.compiler.reset()
                found[name] = measure(case, contender)
        for i, direction in enumerate(DIRECTIONS):
            rows.append({
                "op": case.op,
                "shape": "x".join(map(str, case.shape)),
                "modulation": case.modulation,
                "direction": direction,
                "goal": case.goals[i],
                "least_bytes": case.least_bytes[i],
                "microseconds": {},
                "microseconds_by_placement": {},
                "roof": {},
                "bytes_kept_an_element": {},
            })  # fmt: skip
            for name, measured in found.items():
                add_column(rows[-1], name, measured, bandwidth)
        save()


def add_column(row: dict, name: str, measured: Measured, bandwidth: float):
    seconds = measured.forward if row["direction"] == "forward" else measured.backward
    if not seconds:
        return
    row["microseconds"][name] = statistics.median(seconds) * 1e6
    row["microseconds_by_placement"][name] = [each * 1e6 for each in seconds]
    row["roof"][name] = row["least_bytes"] / statistics.median(seconds) / bandwidth
    row["bytes_kept_an_element"][name] = measured.kept


def add_cudnn(cases, bandwidth: float, rows: list[dict], save):
    """cuDNN's column, from a process of its own: its front end has been seen to abort and to hang.

    Forward alone: making the plan for backward did not end within 35 s on an H200 (front end 1.14.1, cuDNN 9.19).
    """
    cases = [case for case in cases if "cuDNN" in contenders(case)]
    context = get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_measure_cudnn, args=(cases, answers), daemon=True)
    process.start()
    for case in cases:
        say(f"{case.name}: cuDNN")
        try:
            measured = answers.get(timeout=CUDNN_SECONDS)
        except queue.Empty:
            say(f"cuDNN gave no answer within {CUDNN_SECONDS} s: its column ends here.")
            break
        if isinstance(measured, str):
            say(f"cuDNN is left out of this row: {measured}")
            continue
        for row in rows:
            if (row["op"], row["shape"], row["modulation"]) == (case.op, "x".join(map(str, case.shape)), "float32"):
                add_column(row, "cuDNN", measured, bandwidth)
        save()
    process.kill()


def _measure_cudnn(cases, answers):
    reserve(CUDNN_RESERVED_GIB)
    for case in cases:
        try:
            answers.put(measure(case, contenders(case)["cuDNN"], directions=1))
        except RuntimeError as error:
            answers.put(str(error))


def measure_host() -> list[dict]:
    """Host time of ours and of eager, on tensors too small to matter, all on one stream as in training."""
    calls = {}
    for case in (Case("layer_norm_modulate", (1, 16, 64)), Case("gate_residual", (1, 16, 64))):
        for name, contender in contenders(case).items():
            if name in OURS_AND_EAGER:
                call, *operands = prepare(case, contender)
                both = (call, functools.partial(differentiate, *operands))
                calls |= {(case.op, name, direction): each for direction, each in zip(DIRECTIONS, both)}
    times = host_microseconds(calls)
    names = dict.fromkeys((op, name) for op, name, _ in calls)
    return [{"op": op, "contender": name, **{d: times[op, name, d] for d in DIRECTIONS}} for op, name in names]


# -------------------------------------------------------------------------------------- compiling ahead


def compile_ahead(tasks):
    """Fill the caches of Triton and Inductor in several processes: one after the other it would take minutes."""
    free_gib = torch.cuda.mem_get_info()[0] >> 30
    workers = max(1, min(len(os.sched_getaffinity(0)) - 2, free_gib // 9))  # a case needs up to 8 GiB
    say(f"compiling for {len(tasks)} measurements in {workers} processes")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # of the processes started here
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile_one, *zip(*tasks)))
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]


def _compile_one(case: Case, name: str):
    contender = contenders(case).get(name)
    if contender is not None:
        call, *operands = prepare(case, contender)
        differentiate(*operands)
        with torch.no_grad():
            call()
        torch.cuda.synchronize()
        torch.compiler.reset()
        del call, operands
        torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------------- results


def environment() -> dict:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    peers = {"liger_kernel": "liger-kernel", "cudnn": "nvidia-cudnn-frontend"}
    peers = [package for name, package in peers.items() if importlib.util.find_spec(name) is not None]
    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "peers": {package: version(package) for package in peers},
        "mix_order_reduction": getattr(torch._inductor.config.triton, "mix_order_reduction", None),
        "python": sys.version.split()[0],
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
    }


def measure_all(quick: bool, output: Path | None) -> dict:
    if not torch.cuda.is_available():
        raise UserError("This measures a CUDA GPU, but torch finds none here. Run it on a machine that has one.")
    if importlib.util.find_spec("triton") is None:
        raise UserError("The Triton kernels are measured too, but Triton is not installed. `pip install triton`.")
    if ops.extension_missing_reason() is not None:
        say(f"No CUDA column: {ops.extension_missing_reason()}.")
    torch.manual_seed(0)
    cases, names = (QUICK_CASES, OURS_AND_EAGER) if quick else (CASES, COLUMNS)
    compiled = [name for name in ("torch.compile", "Triton", "liger") if name in names]  # what takes longest first
    small_cases = () if quick else SMALL_CASES
    reserve(QUICK_RESERVED_GIB if quick else RESERVED_GIB)
    compile_ahead([(c, name) for name in compiled for c in cases] + [(c, "Triton") for c in small_cases])
    bandwidth = copy_bandwidth()
    result = {
        **environment(),
        "copy_terabytes_per_second": bandwidth / 1e12,
        "l2_bytes": torch.cuda.get_device_properties(0).L2_cache_size,
        "host_microseconds": measure_host(),
        "rows": [],
        "small_rows": [],
    }

    def save():
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(result, indent=1) + "\n")

    measure_rows(small_cases, SMALL_COLUMNS, bandwidth, result["small_rows"], save)
    measure_rows(cases, names, bandwidth, result["rows"], save)
    if "cuDNN" in names and importlib.util.find_spec("cudnn") is not None:
        add_cudnn(cases, bandwidth, result["rows"], save)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one width, no torch.compile, no others: 30 seconds")
    parser.add_argument("--output", type=Path, help="JSON file to write the numbers to")
    parser.add_argument("--picture", type=Path, help="roofline to draw (.png, .svg)")
    parser.add_argument("--input", type=Path, help="JSON file of an earlier run: nothing is measured")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page instead")
    options = parser.parse_args()
    if options.input is None:
        result = measure_all(options.quick, options.output)
    elif options.input.is_file():
        result = json.loads(options.input.read_text())
    else:
        raise UserError(f"--input {options.input} is not a file. Pass what --output wrote.")
    if options.picture is not None:
        draw(result, options.picture)
    (print_markdown if options.markdown else print_table)(result)


if __name__ == "__main__":
    with exit_on_user_error("kernel_speed.py"):
        main()
