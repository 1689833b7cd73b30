"""How fast are the fused ops on this GPU, beside eager, torch.compile, other kernels, and what the memory allows?

    python recipes/kernel_speed.py --output recipes/results/kernel_speed.json --picture kernel_speed.png
    python recipes/kernel_speed.py --quick          # ours and eager in half a minute, on a smaller GPU, too
    python recipes/kernel_speed.py --input recipes/results/kernel_speed.json --markdown   # table of docs/kernels.md

Every call reads cold memory: enough buffers are rotated to exceed the L2 cache several times, filled with random
numbers. Calls are captured in a CUDA graph, so that the host does not count; its time is measured apart. "roof" is the
least bytes that the op must move, over the time, over the bandwidth of a plain device copy in the same run. What
torch.compile and Triton need to compile is compiled first, in several processes. `pip install liger-kernel
nvidia-cudnn-frontend` adds those two to the table.
"""

import argparse
import datetime
import importlib.util
import json
import os
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
from kernel_cases import CASES, QUICK_CASES, SMALL_CASES, Case, Contender, contenders, make_arguments

from adaptiveload_hf import UserError
from adaptiveload_hf.adaln import ops
from adaptiveload_hf.errors import exit_on_user_error

# A backward call is repeated on one forward call, which compiled code that reuses its buffers does not allow.
torch._functorch.config.donated_buffer = False
REPLAYS = 7
DIRECTIONS = ("forward", "backward")
OURS_AND_EAGER = ("CUDA", "Triton", "eager")
COLUMNS = ("CUDA", "Triton", "eager", "torch.compile", "liger", "cuDNN")


def say(text: str):
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ timing


def seconds_of_graph(call, sets: int, calls: int) -> float:
    """Median seconds of one of `calls` calls in a CUDA graph; call(i) works on buffers i and returns what it made."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(sets):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        # Kept alive, so that every call writes to memory of its own.
        kept = [call(i % sets) for i in range(calls)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    seconds = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / calls)
    del kept, graph
    return statistics.median(seconds)


def copy_bandwidth() -> float:
    """Bytes a second that a large device copy reads and writes. Not in a graph: there it runs on a slower engine."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(REPLAYS):
        start.record()
        for _ in range(8):
            target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / 8)
    return 2 * source.nbytes / statistics.median(seconds)


def prepare(case: Case, contender: Contender):
    """(call, its wanted tensors, gradients of its outputs) on fresh buffers."""
    call, wanted = contender(**make_arguments(case))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(
        stream
    ):  # backward runs on the stream of its forward, which a graph must be able to capture
        outputs = call()
    torch.cuda.synchronize()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return call, wanted, outputs, [torch.randn_like(output) for output in outputs]


def differentiate(wanted, outputs, gradients):
    return torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True)


def measure(case: Case, contender: Contender) -> tuple[float, float, float]:
    """Seconds of a forward and of a backward call, and bytes an element that exist after forward because of it."""
    elements = case.shape[0] * case.shape[1] * case.shape[2]
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = max(1, -(-4 * cache // (4 * elements)))
    prepared = [prepare(case, contender) for _ in range(sets)]

    def forward(i):
        return prepared[i][0]()

    def backward(i):
        return differentiate(*prepared[i][1:])

    with torch.no_grad():
        forward_seconds = seconds_of_graph(forward, sets, max(2, sets))
    backward_seconds = seconds_of_graph(backward, sets, max(2, sets))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    alive = forward(0)
    kept = (torch.cuda.memory_allocated() - before) / elements
    del alive
    return forward_seconds, backward_seconds, kept


def measure_rows(cases, names, bandwidth: float) -> list[dict]:
    """One dict a case and direction: microseconds, share of the roof and bytes kept, by contender."""
    rows = []
    apart = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    for case in cases:
        found = {}
        for name, contender in contenders(case).items():
            if name in names:
                say(f"{case.name}: {name}")
                torch.compiler.reset()
                measured = _measure_apart(apart, case, name) if name == "cuDNN" else measure(case, contender)
                found |= {} if measured is None else {name: measured}
                torch.cuda.empty_cache()
        for i, direction in enumerate(DIRECTIONS):
            rows.append({
                "op": case.op,
                "shape": "x".join(map(str, case.shape)),
                "modulation": case.modulation,
                "direction": direction,
                "goal": case.goals[i],
                "least_bytes": case.least_bytes[i],
                "microseconds": {name: m[i] * 1e6 for name, m in found.items()},
                "roof": {name: case.least_bytes[i] / m[i] / bandwidth for name, m in found.items()},
                "bytes_kept_an_element": {name: m[2] for name, m in found.items()},
            })  # fmt: skip
    apart.shutdown()
    return rows


def _measure_apart(pool: ProcessPoolExecutor, case: Case, name: str) -> tuple[float, float, float] | None:
    """`measure` in another process, or None: cuDNN's front end has been seen to abort its process."""
    try:
        return pool.submit(_measure_by_name, case, name).result()
    except RuntimeError as error:  # also what a pool raises whose process is gone
        say(f"{name} is left out of this row: {error}")
        return None


def _measure_by_name(case: Case, name: str) -> tuple[float, float, float]:
    found = measure(case, contenders(case)[name])
    torch.cuda.empty_cache()
    return found


def host_microseconds() -> list[dict]:
    """Time that the host needs for one forward and one backward call, on tensors too small to matter."""
    rows = []
    for case in (Case("layer_norm_modulate", (1, 16, 64)), Case("gate_residual", (1, 16, 64))):
        for name, contender in contenders(case).items():
            if name in OURS_AND_EAGER:
                call, *operands = prepare(case, contender)
                times = (_host_time(call), _host_time(lambda operands=operands: differentiate(*operands)))
                rows.append({"op": case.op, "contender": name, **dict(zip(DIRECTIONS, times))})
    return rows


def _host_time(call, calls: int = 200) -> float:
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls)
    return min(found) * 1e6


# -------------------------------------------------------------------------------------- compiling ahead


def compile_ahead(cases, names):
    """Fill the caches of Triton and Inductor in several processes: one after the other it would take minutes."""
    # What takes longest first.
    tasks = [(case, name) for name in ("torch.compile", "Triton", "liger") if name in names for case in cases]
    memory_gib = torch.cuda.get_device_properties(0).total_memory >> 30
    workers = max(1, min(len(os.sched_getaffinity(0)) - 2, memory_gib // 9))  # a case needs up to 8 GiB
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


def measure_all(quick: bool) -> dict:
    if not torch.cuda.is_available():
        raise UserError("This measures a CUDA GPU, but torch finds none here. Run it on a machine that has one.")
    if importlib.util.find_spec("triton") is None:
        raise UserError("The Triton kernels are measured too, but Triton is not installed. `pip install triton`.")
    if ops.extension_missing_reason() is not None:
        say(f"No CUDA column: {ops.extension_missing_reason()}.")
    torch.manual_seed(0)
    cases, names = (QUICK_CASES, OURS_AND_EAGER) if quick else (CASES, COLUMNS)
    compile_ahead(cases, names)
    bandwidth = copy_bandwidth()
    return {
        **environment(),
        "copy_terabytes_per_second": bandwidth / 1e12,
        "l2_bytes": torch.cuda.get_device_properties(0).L2_cache_size,
        "rows": measure_rows(cases, names, bandwidth),
        "small_rows": [] if quick else measure_rows(SMALL_CASES, OURS_AND_EAGER, bandwidth),
        "host_microseconds": host_microseconds(),
    }


def table_of(result: dict) -> list[list[str]]:
    """Cells, the head first: microseconds and, in brackets, the share of the roof."""
    names = [name for name in COLUMNS if any(name in row["roof"] for row in result["rows"])]
    lines = [["operation", "B x S x D", "modulation", "direction", "goal", *names]]
    for row in [*result["rows"], *result["small_rows"]]:
        cells = [
            row["op"],
            row["shape"],
            row["modulation"],
            row["direction"],
            f"{row['goal']:.2f}" if row["goal"] else "",
        ]
        for name in names:
            microseconds = row["microseconds"].get(name)
            digits = 0 if microseconds is not None and microseconds >= 100 else 1
            cells.append("" if microseconds is None else f"{microseconds:.{digits}f} ({row['roof'][name]:.2f})")
        lines.append(cells)
    return lines


def print_table(result: dict):
    print(f"{result['gpu']}, driver {result['driver']}, torch {result['torch']}, Triton {result['triton']}, "
          f"copy {result['copy_terabytes_per_second']:.2f} TB/s")  # fmt: skip
    lines = table_of(result)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    for row in result["rows"]:
        if row["direction"] == "forward":
            kept = ", ".join(f"{name} {size:.2f}" for name, size in row["bytes_kept_an_element"].items())
            print(f"bytes an element after forward, {row['op']} {row['shape']} {row['modulation']}: {kept}")
    for row in result["host_microseconds"]:
        times = f"forward {row['forward']:.1f} us, backward {row['backward']:.1f} us"
        print(f"host, {row['op']}, {row['contender']}: {times}")


def print_markdown(result: dict):
    for i, line in enumerate(table_of(result)):
        print("| " + " | ".join(line) + " |")
        if i == 0:
            print("|" + "---|" * len(line))


def draw(result: dict, path: Path):
    """Achieved bandwidth on the least bytes over those bytes, under the line that a copy reaches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    copy = result["copy_terabytes_per_second"]
    axes.axhline(copy, color="0.3", linewidth=1)
    axes.annotate("device copy", (0.01, copy), xycoords=("axes fraction", "data"), va="bottom", fontsize=9)
    rows = [*result["rows"], *result["small_rows"]]
    names = [name for name in COLUMNS if any(name in row["roof"] for row in rows)]
    for index, name in enumerate(names):
        for direction, marker in zip(DIRECTIONS, "ov"):
            points = [row for row in rows if row["direction"] == direction and name in row["roof"]]
            label = name if direction == "forward" else None
            sizes = [row["least_bytes"] / 1e9 for row in points]
            axes.plot(sizes, [row["roof"][name] * copy for row in points], marker, color=f"C{index}", label=label,
                      markersize=5, linestyle="none", alpha=0.8)  # fmt: skip
    axes.set(xscale="log", xlabel="least bytes of the call, GB", ylabel="TB/s on the least bytes", ylim=(0, None))
    axes.set_title(f"{result['gpu']}: circles forward, triangles backward", fontsize=10)
    axes.legend(ncols=2, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one width, no torch.compile, no others: 30 seconds")
    parser.add_argument("--output", type=Path, help="JSON file to write the numbers to")
    parser.add_argument("--picture", type=Path, help="roofline to draw (.png, .svg)")
    parser.add_argument("--input", type=Path, help="JSON file of an earlier run: nothing is measured")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page instead")
    options = parser.parse_args()
    if options.input is None:
        result = measure_all(options.quick)
    elif options.input.is_file():
        result = json.loads(options.input.read_text())
    else:
        raise UserError(f"--input {options.input} is not a file. Pass what --output wrote.")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    if options.picture is not None:
        draw(result, options.picture)
    (print_markdown if options.markdown else print_table)(result)


if __name__ == "__main__":
    with exit_on_user_error("kernel_speed.py"):
        main()
