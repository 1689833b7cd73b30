"""How does a run end early without losing work, and with which command does it go on?"""

import contextlib
import os
import shlex
import signal
import sys
from pathlib import Path

import psutil
from accelerate import Accelerator

from adaptiveload_hf import UserError


def drop_earlier_request(accelerator: Accelerator, output_dir: Path) -> None:
    """Removes the STOP file that a run left which was killed before it looked: it was not meant for this one."""
    if accelerator.is_main_process and (output_dir / "STOP").exists():
        (output_dir / "STOP").unlink()
        print(f"removed {output_dir / 'STOP'}, which an earlier run left", file=sys.stderr, flush=True)


@contextlib.contextmanager
def stop_requests(stop_file: Path | None):
    """A block in which SIGTERM, the first Ctrl-C and a file ask for a stop instead of killing.

    Args:
        stop_file: None where another rank looks for it: a thousand that ask at every micro-step burden a file server.

    Yields:
        () -> bool: whether this process was asked. The ranks agree on it in `run_steps`.
    """
    heard = []

    def hear(number, frame):
        if number == signal.SIGINT and number in heard:
            raise KeyboardInterrupt
        heard.append(number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(heard) or (stop_file is not None and stop_file.exists())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def resume_command(**changed: list[str]) -> str:
    """The command that started this process, going on from the latest checkpoint; `changed` are options to replace.

    A token is left out, for the command is printed.
    """
    changed = {"resume_from_checkpoint": ["latest"], **changed}
    words, dropping = [], False
    for word in sys.argv:
        if word.startswith("--"):
            dropping = word[2:].partition("=")[0] in {*changed, "hub_token"}
        if not dropping:
            words.append(word)
    for name, values in changed.items():
        words += [f"--{name}", *values]
    return shlex.join([*_launcher(), *words])


def _launcher() -> list[str]:
    """What stands before the script in the launcher's own command: `accelerate launch --config_file ...`."""
    try:
        words = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        words = []
    if sys.argv[0] not in words:
        return ["python"]
    words = words[: words.index(sys.argv[0])]
    if len(words) < 2 or not Path(words[0]).name.startswith("python"):
        return words  # `uv run`, or `timeout 3600 python`
    python, program, *options = words
    # `python /env/bin/accelerate launch` is what `accelerate launch` has become.
    own_option = program.startswith("-")  # -m, or -u before it
    return [Path(python).name, program, *options] if own_option else [Path(program).name, *options]


def out_of_memory(
    accelerator, loader, batch: dict, reserved_gib: float, batch_sizes: dict[str, int] | None
) -> UserError:
    """What to say when a micro-batch did not fit: where, what was predicted, and how to go on.

    Args:
        reserved_gib: what the allocator held.
        batch_sizes: those given by hand already, if any.
    """
    shape, batch_size = batch["bucket"], len(batch["sample_index"])
    bucket = next(bucket for bucket in loader.plan.buckets if str(bucket.shape) == shape)
    predicted = "no prediction" if bucket.gib is None else f"{bucket.gib:.1f} GiB predicted"
    said = (
        f"out of memory on rank {accelerator.process_index}: bucket {shape}, B = {batch_size}, {predicted} "
        f"(for B = {bucket.batch_size}), {reserved_gib:.1f} GiB reserved. "
    )
    if batch_size == 1:
        return UserError(
            f"{said}It does not fit even alone: use more GPUs, activation checkpointing, or a dataset without this "
            "shape."
        )
    smaller = {**(batch_sizes or {}), shape: max(1, int(0.8 * batch_size))}
    words = [f"{name}={size}" for name, size in smaller.items()]
    return UserError(f"{said}Go on with a smaller batch there:\n{resume_command(batch_sizes=words)}")


def validation_out_of_memory(accelerator, step: int) -> UserError:
    """What to say when a step is trained, but too little memory is left to validate it."""
    return UserError(
        f"out of memory on rank {accelerator.process_index} in the validation of step {step}. Go on with a smaller "
        "--validation_resolution, without --validation_prompt, or with smaller samples in --validation_dataset:\n"
        f"{resume_command()}"
    )
