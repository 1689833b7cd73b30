"""Is this the only run that writes into its output folder, and do all its ranks write into the same?"""

import fcntl
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from adaptiveload_hf import UserError

WAITS_FOR_STORAGE = 5  # of a second each


@contextmanager
def only_run(accelerator: Accelerator, output_dir: Path, otherwise: str) -> Iterator[None]:
    """Makes and holds the folder, so that no second run, such as a requeued job's, spoils what this one writes.

    The lock ends with the process, however that ends; workers that it has forked do not hold it.

    Args:
        otherwise: what else than to wait one may do, in the words of a refusal.

    Raises:
        UserError: another run holds it, or it cannot be made.
    """
    if not accelerator.is_main_process:
        yield
        return
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir {output_dir} cannot be made a folder: {error}") from None
    with open(output_dir / ".run.lock", "a+") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            lock.flush()
        except (BlockingIOError, PermissionError):
            lock.seek(0)
            raise UserError(
                f"another run ({lock.read()}) is writing to {output_dir}. Wait for it, {otherwise}, or give another "
                "--output_dir."
            ) from None
        except OSError as error:  # some cluster file systems are mounted without locks
            print(f"{output_dir} cannot be locked ({error}): start no second run into it", file=sys.stderr, flush=True)
        yield


def check_shared(accelerator: Accelerator, output_dir: Path, finds: str, checkpoint: Path | None = None) -> None:
    """Refuses folders of each rank's own: what a rank writes there, the main process would never find. A collective.

    Args:
        finds: what this rank sees in output_dir, for the message.
        checkpoint: another folder that all must see.

    Raises:
        UserError: on all ranks, with what each machine sees.
    """
    if accelerator.num_processes == 1:
        return
    token = [f".seen-by-all-{uuid.uuid4().hex}"]
    broadcast_object_list(token)
    mark = output_dir / token[0]
    if accelerator.is_main_process:
        mark.touch()
    accelerator.wait_for_everyone()
    sees = _appears(mark) and (checkpoint is None or checkpoint.is_dir())
    machines = gather_object([(socket.gethostname(), accelerator.process_index, sees, f"{output_dir}: {finds}")])
    if accelerator.is_main_process:
        mark.unlink()
    if not all(seen for _, _, seen, _ in machines):
        lines = [
            f"rank {rank} on {host} {'sees' if seen else 'does not see'} what rank 0 wrote; it finds {found}"
            for host, rank, seen, found in machines
        ]
        raise UserError(
            "all ranks must write into one folder, or what some of them write would be lost, but:\n  "
            + "\n  ".join(lines)
            + "\nGive an --output_dir (and checkpoint) on storage that all machines share."
        )


def _appears(path: Path) -> bool:
    """Whether a file is there within some seconds: network file systems may show it late."""
    for _ in range(WAITS_FOR_STORAGE):
        if path.exists():
            return True
        time.sleep(1)
    return path.exists()
