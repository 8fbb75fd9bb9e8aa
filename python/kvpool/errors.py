"""The exceptions of kvpool.

Each exception has a stable `code` for programs to match on. The subclasses are the codes that callers usually
handle separately. Every other code raises a plain `Error`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool._native import MemoryUse

__all__ = [
    "ClosedError",
    "ConnectError",
    "DeadlineError",
    "Error",
    "ForkedError",
    "FullError",
    "InvalidArgumentError",
    "LeasedError",
    "MemoryInUseError",
    "UnreachableError",
]


class Error(Exception):
    """An operation, or one key of it, failed.

    `code`: a stable name, such as `full`, `leased`, `unreachable`, `deadline_exceeded` or `checksum_mismatch`.
    Three codes come only from this package: `closed`, `forked` and `memory_in_use`. `is_retryable`: whether the
    same call may succeed later without a change by the caller. A miss is not an error.
    """

    code: str
    is_retryable: bool

    def __init__(self, message: str, code: str = "internal", is_retryable: bool = False) -> None:
        # Only the message goes to the base class: OSError would interpret a second argument.
        super().__init__(message)
        self.code = code
        self.is_retryable = is_retryable

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else self.code

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r}, code={self.code!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.code, self.is_retryable)


class InvalidArgumentError(Error, ValueError):
    """An invalid value: a key over 1 KiB, an empty or too large block, read-only memory for a get, or a
    range outside its block. Also a block that no quota of its namespace takes."""


class ConnectError(Error, ConnectionError):
    """`Pool.connect` failed: no master accepted the client."""


class UnreachableError(Error, ConnectionError):
    """The master or the store node cannot be reached, does not lead, or is draining."""


class DeadlineError(Error, TimeoutError):
    """The call's timeout passed."""


class FullError(Error):
    """The pool or a quota of the namespace is full, and no room came free within the timeout."""


class LeasedError(Error):
    """A lease or a pin protects the block; remove it with `force=True`."""


class ClosedError(Error):
    """The pool was closed before the call."""


class ForkedError(Error):
    """The pool belongs to the parent process, or the parent had pools open at the fork: connect only after the
    fork."""


class MemoryInUseError(Error):
    """The call has ended, and a transfer still uses its memory 10 seconds after the call's timeout.

    Bytes may still be written to that memory or read from it. Do not free or reuse it before `wait` has
    returned True. The cause may be a process that was stopped or that lacks memory.
    """

    _use: MemoryUse | None = None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until no transfer uses the memory, for `timeout` seconds at most; without a limit if None.

        Returns whether no transfer uses the memory any more. A copy of the exception, for example by pickle,
        cannot wait: it returns False at once.
        """
        use = self._use
        if use is None:
            return False
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = 1.0 if end is None else end - time.monotonic()
            # The wait runs in steps, so that signal handlers can run.
            if use.has_ended(min(max(left, 0.0), 1.0)):
                return True
            if left <= 0.0:
                return False


_OF_CODE: dict[str, type[Error]] = {
    "invalid_argument": InvalidArgumentError,
    "too_large": InvalidArgumentError,
    "over_quota": InvalidArgumentError,
    "out_of_range": InvalidArgumentError,
    "unreachable": UnreachableError,
    "not_leader": UnreachableError,
    "draining": UnreachableError,
    "deadline_exceeded": DeadlineError,
    "full": FullError,
    "memory_quota": FullError,
    "blocks_quota": FullError,
    "leased": LeasedError,
    "closed": ClosedError,
    "forked": ForkedError,
    "memory_in_use": MemoryInUseError,
}


def _of(
    code: str, message: str, is_retryable: bool, connecting: bool, memory_use: MemoryUse | None
) -> Error:
    """Makes the exception of a code. The native module makes all its exceptions here."""
    kind = _OF_CODE.get(code, Error)
    if connecting and kind is not InvalidArgumentError:
        kind = ConnectError
    error = kind(message, code, is_retryable)
    if isinstance(error, MemoryInUseError):
        error._use = memory_use
    return error
