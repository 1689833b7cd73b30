"""Is what a checkpoint says of a loader whole, and of a format that we read?"""

from __future__ import annotations

import hashlib
import json

from ..errors import UserError

_FORMAT_VERSION = 2


def sealed(state: dict) -> dict:
    """A loader's state with its format and a checksum of all values. Plain values only, as JSON has them."""
    state = {"format_version": _FORMAT_VERSION, **state}
    return {**state, "checksum": _checksum(state)}


def check_whole(state: dict) -> None:
    """Refuses a state that is not as `sealed` returned it: what it trained on would be unknown.

    Raises:
        UserError: another format, or a value was changed, added or lost.
    """
    if state.get("format_version") != _FORMAT_VERSION:
        raise UserError(
            f"Expected a loader state of format {_FORMAT_VERSION}, but found {state.get('format_version')}. "
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
