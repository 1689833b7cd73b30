"""Accelerators for tests that stay in pytest's own process; accelerate keeps its state in class attributes."""

import contextlib
import os
import socket

import torch.distributed
from accelerate.state import AcceleratorState, GradientState

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


@contextlib.contextmanager
def fresh_accelerate(**environment: str):
    """A block in which accelerate knows nothing but this environment, as in a process that was just started."""
    ours = ("ACCELERATE_", "FSDP_", "PARALLELISM_")
    launched = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    before = dict(os.environ)
    for name in before:
        if name.startswith(ours) or name in launched:
            del os.environ[name]
    os.environ.update(environment)
    forget_run()
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        forget_run()
        os.environ.clear()
        os.environ.update(before)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def one_rank(**environment: str) -> dict[str, str]:
    """The environment that a launcher gives to its only process."""
    port = str(free_port())
    launched = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {"ACCELERATE_USE_CPU": "true", **launched, **environment}


def forget_run() -> None:
    """As a new process would begin, but for a process group that is there."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
