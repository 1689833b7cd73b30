"""How fast are the fused ops on this GPU, beside eager, torch.compile and what the memory allows?

    python recipes/kernel_speed.py --output recipes/results/kernel_speed.json

Every call reads cold memory: enough buffers are rotated to exceed the L2 cache several times, filled with random
numbers. Calls are captured in a CUDA graph, so that the host does not count; its time is measured apart. "roof" is the
least bytes that the op must move, over the time, over the bandwidth of a plain device copy in the same run.
"""

import argparse
import datetime
import json
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from adaptiveload_hf import UserError
from adaptiveload_hf.adaln import ops, reference
from adaptiveload_hf.errors import exit_on_user_error

EPS = 1e-6
SHAPES = [(2, 32768, 5120), (2, 32768, 3072), (2, 32768, 2432), (2, 32768, 1536), (2, 8192, 5120), (4, 4096, 1536)]
SMALL_TOKENS = (256, 1024, 4096)
REPLAYS = 7


def eager_wan_norm(x, scale, shift):
    return (F.layer_norm(x.float(), (x.shape[-1],), None, None, EPS) * (1 + scale) + shift).type_as(x)


def eager_sd3_norm(x, scale, shift):
    return F.layer_norm(x, (x.shape[-1],), None, None, EPS) * (1 + scale) + shift


def eager_wan_gate(x, y, gate):
    return (x.float() + y * gate).type_as(x)


def eager_sd3_gate(x, y, gate):
    return x + gate * y


def reference_norm(x, scale, shift):
    return reference.layer_norm_modulate(x, scale, shift, out_dtype=x.dtype)


def fused_norm(x, scale, shift):
    return ops.layer_norm_modulate(x, scale, shift, out_dtype=x.dtype)


def reference_gate(x, y, gate):
    return reference.gate_residual(x, y, gate, out_dtype=x.dtype)


def fused_gate(x, y, gate):
    return ops.gate_residual(x, y, gate, out_dtype=x.dtype)


# op -> (least bytes an element in bfloat16 forward, backward; functions by name; is the second operand an activation?)
OPS = {
    "layer_norm_modulate": (
        (4, 6),
        {
            "cuda": fused_norm,
            "reference": reference_norm,
            "eager, Wan": eager_wan_norm,
            "eager, SD3": eager_sd3_norm,
            "compile": torch.compile(eager_wan_norm, dynamic=False),
        },
    ),
    "gate_residual": (
        (6, 6),
        {
            "cuda": fused_gate,
            "reference": reference_gate,
            "eager, Wan": eager_wan_gate,
            "eager, SD3": eager_sd3_gate,
            "compile": torch.compile(eager_wan_gate, dynamic=False),
        },
    ),
}


def modulation(batch, width, index, dtype, frozen):
    """A chunk of a block's [B, 6, D], as diffusers passes it."""
    chunk = torch.randn(batch, 6, width, device="cuda").mul_(0.3).to(dtype).chunk(6, dim=1)[index]
    return chunk.detach().requires_grad_(not frozen)


def make_arguments(op, shape, dtype, frozen):
    batch, _, width = shape
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
    first = modulation(batch, width, 1, dtype, frozen)
    if op == "gate_residual":
        return x, torch.randn_like(x).requires_grad_(), first
    return x, first, modulation(batch, width, 0, dtype, frozen)


def seconds_of_graph(call, sets, calls):
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


def copy_bandwidth():
    """Bytes a second that a large device copy reads and writes. Not in a graph: there it runs on a slower engine."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(REPLAYS):
        start.record()
        for _ in range(4):
            target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / 4)
    return 2 * source.nbytes / statistics.median(seconds)


def measure(function, op, shape, dtype, frozen):
    """Seconds of one forward and one backward call."""
    elements = shape[0] * shape[1] * shape[2]
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = max(1, -(-4 * cache // (4 * elements)))
    calls = max(2, sets)
    arguments = [make_arguments(op, shape, dtype, frozen) for _ in range(sets)]
    grads = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]

    with torch.no_grad():
        forward = seconds_of_graph(lambda i: function(*arguments[i]), sets, calls)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        outputs = [function(*arguments[i]) for i in range(sets)]
    torch.cuda.synchronize()

    def backward(i):
        wanted = [a for a in arguments[i] if a.requires_grad]
        return torch.autograd.grad(outputs[i], wanted, grads[i], retain_graph=True)

    return forward, seconds_of_graph(backward, sets, calls)


def measure_rows(bandwidth, shapes, implementations, progress):
    """One dict a row of the table: op, shape, direction, microseconds by implementation, roof of the CUDA kernel."""
    rows = []
    cases = [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
    for op, (least_bytes, functions) in OPS.items():
        for shape in shapes:
            for dtype, frozen in cases:
                found = {}
                for name, function in functions.items():
                    eager_dtype = torch.bfloat16 if "SD3" in name else torch.float32
                    wanted = name == "cuda" or (name in implementations and eager_dtype == dtype and not frozen)
                    if wanted:
                        progress(f"{op} {shape} {str(dtype)[6:]}{' frozen' if frozen else ''}: {name}")
                        torch.compiler.reset()
                        found[name] = measure(function, op, shape, dtype, frozen)
                        torch.cuda.empty_cache()
                for direction in (0, 1):
                    per_element = least_bytes[direction] - (2 if frozen and direction and op == "gate_residual" else 0)
                    least = per_element * shape[0] * shape[1] * shape[2]
                    rows.append({
                        "op": op,
                        "shape": "x".join(map(str, shape)),
                        "modulation": str(dtype)[6:] + (", frozen" if frozen else ""),
                        "direction": ("forward", "backward")[direction],
                        "microseconds": {name: pair[direction] * 1e6 for name, pair in found.items()},
                        "roof": {name: least / pair[direction] / bandwidth for name, pair in found.items()},
                    })  # fmt: skip
    return rows


def host_microseconds(function, op, calls=300):
    """Time that the host needs for one forward and one backward call, on tensors too small to matter."""
    arguments = make_arguments(op, (1, 16, 64), torch.float32, False)
    grad = torch.randn(1, 16, 64, device="cuda", dtype=torch.bfloat16)
    found = []
    output = function(*arguments)
    for call in (lambda: function(*arguments),
                 lambda: torch.autograd.grad(output, arguments, grad, retain_graph=True)):  # fmt: skip
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) / calls)
        found.append(min(times) * 1e6)
    return {"forward": found[0], "backward": found[1]}


def environment():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
    }


def print_table(result):
    print(f"{result['gpu']}, driver {result['driver']}, torch {result['torch']}")
    print(f"copy: {result['copy_terabytes_per_second']:.2f} TB/s")
    names = list(OPS["gate_residual"][1])
    head = " ".join(f"{name + ', us':>14}" for name in names)
    print(f"{'op':20} {'shape':14} {'modulation':16} {'':8} {'roof':>5} {head}")
    for row in result["rows"]:
        times = " ".join(f"{row['microseconds'].get(n, float('nan')):14.1f}" for n in names).replace("nan", "  -")
        start = f"{row['op']:20} {row['shape']:14} {row['modulation']:16} {row['direction']:8}"
        print(f"{start} {row['roof'].get('cuda', float('nan')):5.2f} {times}")
    for op, by_name in result["host_microseconds"].items():
        for name, both in by_name.items():
            print(f"host, {op}, {name}: forward {both['forward']:.1f} us, backward {both['backward']:.1f} us")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write the numbers to")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("This measures a CUDA GPU, but torch finds none here. Run it on a machine that has one.")
    if ops.extension_missing_reason() is not None:
        raise UserError(
            f"The CUDA kernels are what is measured, but they are missing: {ops.extension_missing_reason()}."
        )
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()

    def progress(text):
        print(text, file=sys.stderr, flush=True)

    everything = set(OPS["gate_residual"][1])
    rows = measure_rows(bandwidth, SHAPES, everything, progress)
    small = [(1, tokens, 1536) for tokens in SMALL_TOKENS]
    rows += measure_rows(bandwidth, small, {"eager, Wan"}, progress)
    host = {
        op: {name: host_microseconds(functions[name], op) for name in ("cuda", "eager, Wan")}
        for op, (_, functions) in OPS.items()
    }
    result = {
        **environment(),
        "copy_terabytes_per_second": bandwidth / 1e12,
        "l2_bytes": torch.cuda.get_device_properties(0).L2_cache_size,
        "rows": rows,
        "host_microseconds": host,
    }
    print_table(result)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    with exit_on_user_error("kernel_speed.py"):
        main()
