"""What goes wrong, as exceptions.

Each has a stable `code`, which programs match on, and says whether the same call may succeed later. The
subclasses are the ones that callers tell apart; a code without one of its own is an `Error`.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ClosedError",
    "ConnectError",
    "DeadlineError",
    "Error",
    "ForkedError",
    "FullError",
    "InvalidArgumentError",
    "LeasedError",
    "UnreachableError",
]


class Error(Exception):
    """An operation, or one key of it, failed.

    `code` is the stable name of what happened: those of the pool, such as `full`, `leased`,
    `unreachable`, `deadline_exceeded`, `checksum_mismatch`; and two of this package's own, `closed` and
    `forked`. `is_retryable` says whether the same call may succeed later with nothing changed by the
    caller. A miss is no error.
    """

    code: str
    is_retryable: bool

    def __init__(self, message: str, code: str = "internal", is_retryable: bool = False) -> None:
        # Only the message goes up: an OSError would take a second argument for something of its own.
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
    """A value that cannot be: a key over 1 KiB, an empty or too large block, memory that is read-only
    where it must be written, a range outside its block."""


class ConnectError(Error, ConnectionError):
    """`Pool.connect` found no master that let it in."""


class UnreachableError(Error, ConnectionError):
    """The master or the node cannot be reached, or is on its way out."""


class DeadlineError(Error, TimeoutError):
    """The deadline passed."""


class FullError(Error):
    """No room, and none could be made within the timeout."""


class LeasedError(Error):
    """A lease or a pin protects the block; `force` would override it."""


class ClosedError(Error):
    """The pool was closed before the call."""


class ForkedError(Error):
    """The pool was connected by another process: a child made by fork connects for itself."""


_OF_CODE: dict[str, type[Error]] = {
    "invalid_argument": InvalidArgumentError,
    "too_large": InvalidArgumentError,
    "out_of_range": InvalidArgumentError,
    "unreachable": UnreachableError,
    "not_leader": UnreachableError,
    "draining": UnreachableError,
    "deadline_exceeded": DeadlineError,
    "full": FullError,
    "leased": LeasedError,
    "closed": ClosedError,
    "forked": ForkedError,
}


def _of(code: str, message: str, is_retryable: bool, connecting: bool) -> Error:
    """The exception of a code; the native half makes all of them here."""
    kind = _OF_CODE.get(code, Error)
    if connecting and kind is not InvalidArgumentError:
        kind = ConnectError
    return kind(message, code, is_retryable)
