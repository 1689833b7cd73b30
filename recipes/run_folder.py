"""Is this the only run that writes into its output folder?"""

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator

from adaptiveload_hf import UserError


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
