"""An output folder that another process holds, as recipes/run_folder.py has it."""

import subprocess
import sys
from contextlib import contextmanager

HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "a+")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("process 7 on it", file=lock, end="", flush=True)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def folder_of_another_run(folder):
    """At the end the other process is killed."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", HOLDER, str(folder / ".run.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"held\n"
            yield
        finally:
            other.kill()
