"""What has the CUDA allocator of this rank handed out, and what is left? On other devices nothing is known."""

import gc
import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceMemory:
    """The allocator's counters since `reset_peak_memory`; zeros where there is no CUDA device.

    peak_gib: most that was handed out. reserved_gib: most that was held, with what fragmentation wastes. retries: how
    often, since the process began, it had to free its cache to serve a request.
    """

    peak_gib: float
    reserved_gib: float
    retries: int


def read_device_memory(device: torch.device) -> DeviceMemory:
    """The counters now."""
    if device.type != "cuda":
        return DeviceMemory(0.0, 0.0, 0)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    return DeviceMemory(peaks[0] / 2**30, peaks[1] / 2**30, retries)


def reset_peak_memory(device: torch.device) -> None:
    """Lets the peaks begin anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def empty_device_cache(device: torch.device) -> None:
    """Gives back what the allocator holds and nothing uses."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def available_gib(device: torch.device) -> float:
    """What this process may hold in all: what it holds and what is free, within its allowed share."""
    if device.type != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction() * total  # it refuses a device without an index
    return min(free + torch.cuda.memory_reserved(device), share) / 2**30


def wait_for_device(device: torch.device) -> None:
    """Returns when all work that was launched is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
