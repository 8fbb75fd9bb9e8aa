"""What is open when the process ends."""

from __future__ import annotations

import contextlib
import weakref
from typing import TypeVar

# How often the set is listed while other threads change it.
_ATTEMPTS = 100

_T = TypeVar("_T")


def still_open(opened: weakref.WeakSet[_T]) -> list[_T]:
    """The members of the set, which other threads may change meanwhile. Empty if they do not stop."""
    for _ in range(_ATTEMPTS):
        # The set raises this if it changes meanwhile.
        with contextlib.suppress(RuntimeError):
            return list(opened)
    return []
