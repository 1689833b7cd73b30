"""How do all ranks begin their program anew, after one of them cannot take part in a collective any more?"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.distributed import DistError, TCPStore

from .errors import UserError

_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 60


@contextlib.contextmanager
def all_ranks_restart_together(
    accelerator: Accelerator, keep: Callable[[str], None]
) -> Iterator[Callable[[str], NoReturn]]:
    """Inside, a rank that ran out of memory can let all ranks start again from the first line of their program.

    The others stand in a collective that will never end. A thread of each rank watches a store of its own for the
    wish, and replaces the process by the same command (`exec`: the process id stays, so that the launcher notices
    nothing), with a new port to meet at. What the GPU held is given back with the old process.
    (The launcher's `--max_restarts` does not do it: under NCCL the new processes found the old ones' entries.)

    Args:
        accelerator: the run's.
        keep: called on the main process with the note before anything restarts; must leave a trace by which the
            program goes another way next time.

    Yields:
        restart(note): never returns.

    Raises:
        UserError: (by restart) the other ranks do not answer, so all have to end.
    """
    store = _open_store(accelerator)
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(store, accelerator, keep, over), daemon=True)
    watcher.start()

    def restart(note: str):
        store.compare_set("note", "", note)
        time.sleep(_PATIENCE_SECONDS)
        raise UserError("this rank ran out of memory, and the main process does not answer. Start the command again.")

    try:
        yield restart
        accelerator.wait_for_everyone()  # the store lives in the main process
    finally:
        over.set()
        watcher.join()


def _open_store(accelerator: Accelerator) -> TCPStore:
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if accelerator.is_main_process:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        broadcast_object_list([store.port])
        return store
    port = broadcast_object_list([None])[0]
    return TCPStore(host, port, is_master=False, wait_for_workers=False)


def _watch(store: TCPStore, accelerator: Accelerator, keep: Callable[[str], None], over: threading.Event) -> None:
    try:
        while not over.wait(_POLL_SECONDS):
            if store.check(["note"]):
                _begin_again(store, accelerator, keep)
    except DistError:
        return  # the main process is gone; what ended it ends this rank too


def _begin_again(store: TCPStore, accelerator: Accelerator, keep: Callable[[str], None]) -> None:
    if accelerator.is_main_process:
        keep(store.get("note").decode())
        store.set("port", str(_free_port()))
    os.environ["MASTER_PORT"] = store.get("port").decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the launcher's store holds the first start's entries
    # A rank that leaves breaks the collectives of the others, whose watchers must know by then.
    _wait_for(store, "knows", accelerator.num_processes)
    if accelerator.is_main_process:
        _wait_for(store, "left", accelerator.num_processes)  # the store goes with this process
    else:
        store.add("left", 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _wait_for(store: TCPStore, name: str, ranks: int) -> None:
    """Until every rank came here, or patience ends."""
    come, last = store.add(name, 1), time.monotonic() + _PATIENCE_SECONDS
    while come < ranks and time.monotonic() < last:
        time.sleep(_POLL_SECONDS)
        come = store.add(name, 0)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]
