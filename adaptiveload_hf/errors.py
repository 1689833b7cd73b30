"""What does this package raise when the caller can put something right?"""

import errno
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_PLAN_OPTIONS = {"allow_extrapolation", "batch_sizes", "gradient_accumulation_steps", "memory_limit_gib"}
_PLAN_OPTIONS |= {"samples_per_step", "target_seconds", "world_size"}
DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class UserError(ValueError):
    """A mistake that the caller can fix. The message says what was expected, what was found and what to do."""


def mistake_in(error: BaseException | None) -> str | None:
    """What the caller can fix, in words: a UserError, a path that cannot be used, a full disk; else None."""
    if isinstance(error, OSError) and error.errno in DISK_IS_FULL:  # names no file where a write fails
        return f"{error}. Make room, or give a path on another disk."
    if isinstance(error, OSError) and error.filename is not None:  # those of the network have none
        return f"{error}. Give another path, or make this one usable."
    return str(error) if isinstance(error, UserError) else None


def first_of(names: Iterable, separator: str = ", ", most: int = 8) -> str:
    """The first names, and how many more there are: a dataset may have thousands of shapes."""
    names = list(map(str, names))
    more = [f"{len(names) - most:,} more"] if len(names) > most else []
    return separator.join(names[: most if more else None] + more)


def as_flags(words: str, command_options: Iterable[str], dash: str = "_") -> str:
    """Words of a plan, in which its options are named by the flags of the command that says them.

    Args:
        command_options: Python names of all that the command takes; what it does not take stays as it is.
        dash: between the words of a flag.
    """
    known = sorted(_PLAN_OPTIONS & set(command_options))
    # Not where it is a key, as in environment.world_size, or a flag already.
    names = rf"(?<![\w.'\"/-])(?:{'|'.join(known)})(?!\.?\w|/)"
    return re.sub(names, lambda name: "--" + name[0].replace("_", dash), words) if known else words


@contextmanager
def options_as_flags(command_options: Iterable[str], dash: str = "_") -> Iterator[None]:
    """A block, or a function that it decorates, whose UserErrors are said with `as_flags`."""
    try:
        yield
    except UserError as error:
        error.args = (as_flags(str(error), command_options, dash),)
        raise


@contextmanager
def exit_on_user_error(program: str):
    """Turns a UserError, a path that cannot be used or a full disk into `<program>: error: <message>`, status 1.

    Args:
        program: the name to print, as in `with exit_on_user_error("train_wan.py"): main()`.

    Raises:
        SystemExit: on one of these; anything else passes through with its traceback.
    """
    try:
        yield
    except (UserError, OSError) as error:
        if (words := mistake_in(error)) is None:
            raise
        sys.exit(f"{program}: error: {words}")
