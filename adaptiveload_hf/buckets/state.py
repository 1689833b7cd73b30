"""How does a loader's state get into accelerate's checkpoints and out again, and is it whole?"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import UserError

_FORMAT_VERSION = 2


def register(accelerator, loader):
    """Has accelerate save and load a loader as long as it is in use. Returns how accelerate knows it.

    Weakly: in a reference cycle the garbage collector would close the workers' queues before the workers are told to
    stop, and dropping a loader would take 5 seconds a worker.
    """
    objects = accelerator._custom_objects

    def forget(gone):
        objects[:] = [kept for kept in objects if kept is not gone]

    registered = weakref.proxy(loader, forget)
    accelerator.register_for_checkpointing(registered)
    return registered


def call_after_updates(method: Callable[[], None]) -> None:
    """Calls a method after every step that an optimizer of this process makes, as long as its object is in use.

    It is their word that counts: a loop may call save_state anywhere, and accelerate knows where a micro-step begins.
    """
    known = weakref.WeakMethod(method)

    def call(*_) -> None:
        if (found := known()) is not None:
            found()

    weakref.finalize(method.__self__, register_optimizer_step_post_hook(call).remove)


def read_state(accelerator, registered, folder: str | Path) -> dict:
    """The state of a registered loader in a folder that `accelerator.save_state` wrote.

    Raises:
        UserError: there is none, or its file is damaged.
    """
    number = [known is registered for known in accelerator._custom_objects].index(True)
    file = Path(folder, f"custom_checkpoint_{number}.pkl")
    try:
        return torch.load(file, weights_only=True)
    # A flipped bit can make torch's unpickler, which checks little, raise any of the last three.
    except (OSError, EOFError, RuntimeError, UnpicklingError, ValueError, LookupError, TypeError) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise UserError(f"Expected a loader's state in {file}: {reason}. Use another checkpoint.") from None


def sealed(state: dict) -> dict:
    """A loader's state with its format and a checksum of all values. Plain values only, as JSON has them."""
    state = {"format_version": _FORMAT_VERSION, **state}
    return {**state, "checksum": _checksum(state)}


def check_whole(state: dict) -> None:
    """Refuses a state that is not as `sealed` returned it: what it trained on would be unknown.

    Raises:
        UserError: another format, or a value was changed, added or lost.
    """
    if not isinstance(state, dict) or "format_version" not in state:
        found = f"a dict of {', '.join(map(str, state))[:80]}" if isinstance(state, dict) else type(state).__name__
        raise UserError(
            f"Expected a loader state of format {_FORMAT_VERSION}, but found {found}. accelerate only counts what is "
            "registered: make loaders and call register_for_checkpointing in the order of the run that saved."
        )
    if (version := state["format_version"]) != _FORMAT_VERSION:
        raise UserError(
            f"Expected a loader state of format {_FORMAT_VERSION}, but found {version}. "
            "Resume with the version of adaptiveload_hf that wrote it."
        )
    expected, found = state.get("checksum"), _checksum(state)
    if found != expected:
        raise UserError(
            f"The loader's state is not as it was saved: expected checksum {expected}, found {found}. Which samples "
            "it trained on is unknown: resume from another checkpoint."
        )


def _checksum(state: dict) -> str:
    text = json.dumps({key: value for key, value in state.items() if key != "checksum"}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
