"""Lookups beside the scheduler, which polls for the answer."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence

import kvpool
from kvpool._engines.connection import Connection
from kvpool._engines.leases import Keeper
from kvpool._engines.threads import started

_THREADS = 2
"""The number of lookups that run at a time. Two, so that a lookup that hangs does not delay the next."""

_WHAT = "looking up a prompt"
"""The name of the call in the log."""

_Answer = concurrent.futures.Future[kvpool.Prefix | None]


class Lookups:
    """Asks the pool on its own threads, at most one lookup at a time for each request.

    All lookups of one step together delay the scheduler for at most `patience` seconds. A lookup ends by the
    connection's `control_timeout`, and a timeout counts as a miss. If a request no longer wants the answer, its
    lease is released.
    """

    def __init__(self, connection: Connection, keeper: Keeper, patience: float):
        self._connection = connection
        self._keeper = keeper
        self._patience = patience
        self._left = patience
        self._threads = started(_THREADS, "kvpool-lookup")
        self._asked: dict[str, tuple[int, _Answer]] = {}

    def begin_step(self) -> None:
        """Starts a step, in which the lookups may again delay the scheduler for the whole `patience`."""
        self._left = self._patience

    def ask(
        self, request: str, units: int, keys: Callable[[], Sequence[str]]
    ) -> tuple[bool, kvpool.Prefix | None]:
        """Returns whether the lookup of `units` units has an answer, and the answer. The answer is `None`
        without a pool and after a failure.

        `keys` returns the keys of the lookup. The first call starts the lookup. The call that returns the
        answer forgets the lookup.
        """
        asked = self._asked.get(request)
        if asked is not None and asked[0] != units:
            self.forget(request)
            asked = None
        if asked is None:
            chain = keys()
            try:
                asked = units, self._threads.submit(self._look_up, chain)
            except RuntimeError as error:
                # This is closed.
                self._connection.failed(_WHAT, error)
                return True, None
            self._asked[request] = asked
        answer = asked[1]
        began = time.monotonic()
        concurrent.futures.wait([answer], max(self._left, 0.0))
        self._left -= time.monotonic() - began
        if not answer.done():
            return False, None
        del self._asked[request]
        failure = answer.exception()
        if failure is not None:
            # It must not leave the scheduler's thread.
            self._connection.failed(_WHAT, failure)
            return True, None
        return True, answer.result()

    def forget(self, request: str) -> None:
        """Drops the lookup of this request."""
        asked = self._asked.pop(request, None)
        if asked is not None and not asked[1].cancel():
            asked[1].add_done_callback(self._give_back)

    def forget_all(self) -> None:
        """Drops all lookups. Lookups in progress end on their own."""
        for request in list(self._asked):
            self.forget(request)

    def close(self) -> None:
        """Drops all lookups, and takes no more."""
        self.forget_all()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _look_up(self, keys: Sequence[str]) -> kvpool.Prefix | None:
        return self._connection.call(_WHAT, None, lambda pool: pool.match_prefix(keys))

    def _give_back(self, answer: _Answer) -> None:
        if not answer.cancelled() and answer.exception() is None:
            found = answer.result()
            if found is not None:
                self._keeper.release(found.lease)
