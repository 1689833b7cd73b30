"""Runs a function as all ranks of a world: fresh processes over gloo, forked from one that has imported torch already.

A rank costs 0.1 seconds instead of the 4 of its imports. Tests of the launchers themselves use support.launch.
"""

import json
import os
import tempfile
import time
from multiprocessing import forkserver, set_forkserver_preload, set_start_method
from pathlib import Path
from unittest import mock

import torch
import torch.multiprocessing

from .accelerators import free_port

_IMPORTED = [
    "accelerate.data_loader",
    "datasets",
    "diffusers.optimization",
    "diffusers.models.transformers.transformer_sd3",
    "diffusers.pipelines.wan.pipeline_wan",
    "peft",
]


def on_ranks(world_size: int, function, *arguments, timeout: float = 120, **environment: str) -> list:
    """What `function(*arguments)` returns on each rank, as JSON has it. The function must be importable by name.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: of the first rank that failed.
        TimeoutError: ranks are still running; they are ended.
    """
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**environment, "WORLD_SIZE": str(world_size), "MASTER_PORT": str(free_port())}
        ranks = torch.multiprocessing.start_processes(
            _run_rank, (environment, folder, function, arguments), world_size, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + timeout
        while not ranks.join(timeout=1):
            if time.monotonic() > deadline:
                for process in ranks.processes:
                    process.kill()
                raise TimeoutError(f"{function.__name__} on {world_size} ranks took more than {timeout} seconds")
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world_size)]


def start_server() -> None:
    """Starts the process that ranks are forked from, unless it runs; a test that may be the first to fork calls it.

    It must see no GPU: diffusers asks for one at its import, and a process forked after that cannot use CUDA.
    """
    set_forkserver_preload(_IMPORTED)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1"):
        forkserver.ensure_running()


def _run_rank(rank, environment, folder, function, arguments) -> None:
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="true")
    set_start_method("fork", force=True)  # of a rank's own workers, as in a process that a launcher starts
    torch.set_num_threads(1)
    found = function(*arguments)
    Path(folder, str(rank)).write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
