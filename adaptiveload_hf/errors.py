"""What does this package raise when the caller can put something right?"""

import errno
import sys
from contextlib import contextmanager

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
