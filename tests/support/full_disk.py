"""A disk that is full, for tests of what is said then."""

import contextlib
import resource


@contextlib.contextmanager
def files_of_at_most(size: int):
    """Inside, no file of this process grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
