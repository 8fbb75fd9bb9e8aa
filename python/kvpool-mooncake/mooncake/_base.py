"""The common base of the parts of `MooncakeDistributedStore`."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvpool._native import ObjectStore
from mooncake import _codes
from mooncake._settings import node_name
from mooncake._types import How, ReplicateConfig, how_to_put

log = logging.getLogger("mooncake")

# Callers expect these failures, so they give no warning: an absent key, and a key under lease.
_EXPECTED: Final = frozenset((_codes.NOT_FOUND, _codes.LEASED))
# The seconds between two warnings with one code.
_QUIET: Final = 10.0
# The reasons for which a call is refused before it reaches the native store.
NOT_SET_UP: Final = "the store is not set up, or is closed"
LENGTHS_DIFFER: Final = "the lists differ in length"
BAD_CONFIG: Final = "the ReplicateConfig has a value out of range"

Data = TypeVar("Data")


class Refusals:
    """Chooses the refusals that a store logs: the first with each code, then one in 10 seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # By code: the time of the last warning, and the number of refusals left out since.
        self._codes: dict[int, tuple[float | None, int]] = {}

    def add(self, code: int, count: int) -> int | None:
        """Counts refusals. Returns the number left out since the last warning if a warning is due, else
        `None`."""
        now = self._clock()
        with self._lock:
            last, left_out = self._codes.get(code, (None, 0))
            if last is not None and now - last < _QUIET:
                self._codes[code] = (last, left_out + count)
                return None
            self._codes[code] = (now, 0)
            return left_out


class StoreBase:
    """A store, set up or not."""

    def __init__(self) -> None:
        self._native = ObjectStore()
        # The lengths of registered ranges, by address.
        self._registered: dict[int, int] = {}
        # The addresses of memory that a transfer still used when the store was closed.
        self._in_use: set[int] = set()
        self._refusals = Refusals()

    def _room_at(self, address: int) -> int | None:
        """The bytes from an address to the end of its registered range; `None` outside of every range."""
        for start, length in list(self._registered.items()):
            if start <= address < start + length:
                return start + length - address
        return None

    @staticmethod
    def _how(config: ReplicateConfig | None) -> How | None:
        return how_to_put(config, node_name)

    def _said(self, what: str, code: int) -> int:
        """Returns the code. Logs a failure with its reason."""
        if code < 0:
            self._log_failures(what, [code])
        return code

    def _all_said(self, what: str, answers: list[int]) -> list[int]:
        """Returns the codes. Logs the failures among them, with the reason of the first."""
        if min(answers, default=0) < 0:
            self._log_failures(what, answers)
        return answers

    def _got(self, what: str, found: tuple[Data, list[int]]) -> Data:
        """Returns the data of a call whose caller gets no codes. Logs the failures among its codes."""
        data, answers = found
        self._all_said(what, answers)
        return data

    def _log_failures(self, what: str, answers: Sequence[int], reason: str = "") -> None:
        """Logs each code below 0 with a reason. By default this is the reason of this thread's last native
        call."""
        failed = Counter(code for code in answers if code < 0)
        if failed.keys() <= _EXPECTED and not log.isEnabledFor(logging.DEBUG):
            return
        reason = reason or self._native.last_error()
        for code, count in failed.items():
            self._log_code(what, code, count, len(answers), reason)

    def _log_code(self, what: str, code: int, count: int, asked: int, reason: str) -> None:
        left_out = None if code in _EXPECTED else self._refusals.add(code, count)
        log.log(
            logging.DEBUG if left_out is None else logging.WARNING,
            "%s: %d of %d failed with %d: %s%s",
            what,
            count,
            asked,
            code,
            reason or _codes.meaning(code),
            f" ({left_out} failures with {code} were left out before)" if left_out else "",
        )

    @staticmethod
    def _one(answers: list[int]) -> int:
        """The result of a batch of one."""
        return answers[0] if answers else _codes.PARAMETERS

    def _refused(self, what: str, keys: Sequence[object], reason: str) -> list[int]:
        """Logs a batch that is refused before it reaches the native store. Returns one code for each key."""
        answers = [_codes.PARAMETERS] * len(keys)
        self._log_failures(what, answers, reason)
        return answers

    def _refuse_key(self, what: str, key: str, reason: object) -> int:
        """Logs a key that is refused by this store's own code. Returns its code."""
        return self._refuse(what, f"{key}: {reason}")

    def _refuse(self, what: str, reason: str, code: int = _codes.PARAMETERS) -> int:
        """Logs a call that is refused before it reaches the native store. Returns its code."""
        self._log_failures(what, [code], reason)
        return code
