"""What does this package raise when the caller can put something right?"""

import sys
from contextlib import contextmanager

# A path that the caller gave is taken, lies under a file, or may not be written.
_PATH_ERRORS = (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


class UserError(ValueError):
    """A mistake that the caller can mend. The message says what was expected, what was found and what to do."""


@contextmanager
def exit_on_user_error(program: str):
    """Turns a UserError or an unusable path into `<program>: error: <message>` on stderr and exit status 1.

    Args:
        program: the name to print, as in `with exit_on_user_error("train_wan.py"): main()`.

    Raises:
        SystemExit: on one of these; anything else passes through with its traceback.
    """
    try:
        yield
    except UserError as error:
        sys.exit(f"{program}: error: {error}")
    except _PATH_ERRORS as error:
        sys.exit(f"{program}: error: {error}. Give another path, or make this one usable.")
