"""How long does a call take on the GPU, and on the host?

Calls are captured in a CUDA graph, so that the host does not count; it is measured apart. Every call reads cold
memory: enough buffers are rotated to exceed the L2 cache several times, filled with random numbers.

A kernel's time depends on where its buffers lie. So each measurement is repeated on fresh buffers at other, random
places, and within it every call of the graph writes to memory of its own. All of it is carved out of memory that was
taken from the driver once, before anything else ran, as a training run takes it. Memory that was given back and taken
again (`torch.cuda.empty_cache`) is slower, on an H200 by up to 10%, for all kernels but a copy.
"""

import random
import statistics
import time
from dataclasses import dataclass

import torch
from kernel_cases import Case, Contender, make_arguments

PLACEMENTS = 3
CALLS = 4
REPLAYS = 5
HOST_ROUNDS, HOST_CALLS = 21, 100
# The GPU idles this long before a graph starts, while the host hands over the graph and the event at its end.
PAUSE_CYCLES = 200_000
SPACER_MIB = 256
_HELD = []  # a graph and a tensor that keep what `reserve` took


@dataclass(frozen=True)
class Measured:
    """Seconds of one call at each placement (none: not measured), and bytes an element that are kept after forward."""

    forward: list[float]
    backward: list[float]
    kept: float


def reserve(gib: int):
    """Takes `gib`, or a quarter of a smaller GPU, from the driver for tensors, and again for graphs, a pool apart.

    Memory belongs to the stream that it was taken on. So one stream, on which graphs can be captured, does everything.
    """
    size = min(gib << 30, torch.cuda.get_device_properties(0).total_memory // 4)
    torch.cuda.set_stream(torch.cuda.Stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        torch.empty(size, device="cuda", dtype=torch.uint8)[:1].zero_()
    torch.empty(size, device="cuda", dtype=torch.uint8)
    # Capturing a graph gives back memory of which nothing is in use; this is large enough to lie in it.
    _HELD.extend((graph, torch.empty(2 << 20, device="cuda", dtype=torch.uint8)))


def _spacer() -> torch.Tensor:
    """Memory in the way: what is allocated next lies elsewhere."""
    return torch.empty(random.randrange(1, SPACER_MIB) << 20, device="cuda", dtype=torch.uint8)


def seconds_of_graph(call, sets: int, calls: int) -> float:
    """Median seconds of one of `calls` calls in a CUDA graph; call(i) works on buffers i and returns what it made."""
    for i in range(sets):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_HELD[0].pool(), stream=torch.cuda.current_stream()):
        kept = [_spacer(), *(call(i % sets) for i in range(calls))]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    seconds = []
    for _ in range(REPLAYS):
        torch.cuda._sleep(PAUSE_CYCLES)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / calls)
    del kept, graph
    return statistics.median(seconds)


def copy_bandwidth() -> float:
    """Bytes a second that a large device copy reads and writes. Not in a graph: there it runs on a slower engine."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(PLACEMENTS):
        keep = _spacer()
        source = torch.randn(1 << 28, device="cuda")
        target = torch.empty_like(source)
        for _ in range(REPLAYS):
            torch.cuda._sleep(PAUSE_CYCLES)
            start.record()
            for _ in range(8):
                target.copy_(source)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3 / 8)
        nbytes = source.nbytes
        del keep, source, target
    return 2 * nbytes / statistics.median(seconds)


def prepare(case: Case, contender: Contender):
    """(call, its wanted tensors, outputs, gradients of its outputs) on fresh buffers."""
    call, wanted = contender(**make_arguments(case))
    outputs = call()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return call, wanted, outputs, [torch.randn_like(output) for output in outputs]


def differentiate(wanted, outputs, gradients):
    return torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True)


def measure(case: Case, contender: Contender, directions: int = 2) -> Measured:
    """Times of a case at PLACEMENTS places; of forward alone with directions = 1."""
    found = []
    for _ in range(PLACEMENTS):
        keep = _spacer()
        found.append(_measure_here(case, contender, directions))
        del keep
    forward, backward, kept = zip(*found)
    return Measured(list(forward), list(backward) if directions == 2 else [], kept[0])


def _measure_here(case: Case, contender: Contender, directions: int) -> tuple[float, float, float]:
    elements = case.shape[0] * case.shape[1] * case.shape[2]
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = max(1, -(-4 * cache // (4 * elements)))
    prepared = [prepare(case, contender) for _ in range(sets)]

    def forward(i):
        return prepared[i][0]()

    def backward(i):
        return differentiate(*prepared[i][1:])

    calls = max(CALLS, sets)
    with torch.no_grad():
        forward_seconds = seconds_of_graph(forward, sets, calls)
    backward_seconds = seconds_of_graph(backward, sets, calls) if directions == 2 else 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    alive = forward(0)
    kept = (torch.cuda.memory_allocated() - before) / elements
    del alive
    return forward_seconds, backward_seconds, kept


def host_microseconds(calls: dict) -> dict:
    """Median time that the host needs for one of each call. They take turns: what slows the host slows all of them."""
    found = {name: [] for name in calls}
    for _ in range(HOST_ROUNDS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            found[name].append((time.perf_counter() - start) / HOST_CALLS)
    return {name: statistics.median(each) * 1e6 for name, each in found.items()}
