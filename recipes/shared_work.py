"""How do the processes of one launch, and the threads of each, share a list of work?"""

import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch.distributed.distributed_c10d import _get_default_store

from adaptiveload_hf import make_accelerator
from adaptiveload_hf.errors import UserError


def join_processes() -> Accelerator:
    """The Accelerator of a launch whose processes may work for days before they meet again."""
    return make_accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=30))])


@contextmanager
def others_wait(accelerator: Accelerator) -> Iterator[None]:
    """A block that the main process may work in for hours, for the others leave it only after it.

    NCCL ends a run whose ranks have waited for 600 seconds, which the upload of a large model may take. Asking the
    launcher's store has no such limit, and needs no other port or backend.
    """
    # A key of its own: the store outlives processes that the launcher starts again, and keeps theirs.
    key = broadcast_object_list([uuid.uuid4().hex])[0]
    yield
    if accelerator.num_processes > 1:
        store = _get_default_store()
        store.set(key, "") if accelerator.is_main_process else store.wait([key], timedelta(days=30))


def own_share(accelerator: Accelerator, items: Sequence) -> list:
    """Every W-th item, so that neighbours of about equal cost are dealt evenly."""
    return list(items[accelerator.process_index :: accelerator.num_processes])


def gather(accelerator: Accelerator, value) -> list:
    """The values of all processes, on each, by rank."""
    return gather_object([value])


def check_alike(accelerator: Accelerator, mine: dict[str, str]):
    """Ends all processes if one has another value than the main one: half of the samples would be of another kind.

    Args:
        mine: what this process has, by what it is called.

    Raises:
        UserError: with the process and both values.
    """
    main, *others = gather(accelerator, mine)
    for rank, other in enumerate(others, start=1):
        for name, value in main.items():
            if other[name] != value:
                raise UserError(
                    f"the {name} of rank {rank} is {other[name]} and that of rank 0 is {value}, but all must make "
                    "samples of one kind. Start them with the same arguments and the same pipeline."
                )


def on_main(accelerator: Accelerator, function: Callable):
    """What the function returns on the main process, on all of them."""
    result = [None]
    with others_wait(accelerator):
        if accelerator.is_main_process:
            result = [function()]
    return broadcast_object_list(result)[0]


def in_threads(accelerator: Accelerator, function: Callable, items: Iterable, ahead: int = 4) -> Iterator[tuple]:
    """Calls the function in threads, for decoding and hashing, which do not hold Python's lock.

    Args:
        accelerator: says how many processes share this machine's cores.
        function: called with each item.
        items: taken as results are.
        ahead: at most so many results wait to be taken.

    Yields:
        (item, what the function returned or the UserError that it raised), in the items' order.
    """

    def call(item):
        try:
            return function(item)
        except UserError as error:
            return error

    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    pool = ThreadPoolExecutor(max(1, min(ahead, len(os.sched_getaffinity(0)) // processes)))
    waiting = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(call, item)))
            if len(waiting) > ahead:
                done, result = waiting.popleft()
                yield done, result.result()
        for done, result in waiting:
            yield done, result.result()
    finally:
        pool.shutdown(cancel_futures=True)
