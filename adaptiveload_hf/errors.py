"""What does this package raise when the caller can put something right?"""

import sys
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake that the caller can mend. The message says what was expected, what was found and what to do."""


def mistake_in(error: BaseException | None) -> str | None:
    """What the caller can mend of it, in words: a UserError, or a path that cannot be used; None if it is neither."""
    if isinstance(error, OSError) and error.filename is not None:  # those of the network have none
        return f"{error}. Give another path, or make this one usable."
    return str(error) if isinstance(error, UserError) else None


@contextmanager
def exit_on_user_error(program: str):
    """Turns a UserError or a path that cannot be used into `<program>: error: <message>` on stderr and exit status 1.

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
