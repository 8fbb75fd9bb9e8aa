"""Leases that are kept from a lookup until the found blocks are loaded."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import kvpool

logger = logging.getLogger(__name__)

_LOOK = 0.2
"""How often leases are checked, in seconds."""


class Renewable(Protocol):
    """The part of a lease that `Keeper` uses; `kvpool.Lease` has it."""

    @property
    def left(self) -> float: ...

    def renew(self) -> int: ...

    def release(self) -> None: ...


class Keeper:
    """Renews and releases leases on its own thread, so that the scheduler never waits for the master.

    Without `again`, the keeper drops a lease that has lost a block. With `again`, it keeps the lease until the
    lease has ended. Then `again(owner)` returns the owner's next lease, or None. `again` runs on the keeper's
    thread, and may raise kvpool.Error.
    """

    def __init__(self, again: Callable[[str], Renewable | None] | None = None) -> None:
        self._again = again
        self._changed = threading.Condition()
        self._held: dict[str, tuple[Renewable, float]] = {}
        self._over: list[Renewable] = []
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvpool-leases", daemon=True)
        self._thread.start()

    def hold(self, owner: str, lease: Renewable) -> None:
        """Renews `lease` until `let_go`. Releases the earlier lease of `owner`."""
        with self._changed:
            self._drop(owner)
            self._held[owner] = (lease, lease.left)
            self._changed.notify()

    def let_go(self, owner: str) -> None:
        """Releases the lease of `owner` soon, on the keeper's thread."""
        with self._changed:
            self._drop(owner)

    def release(self, lease: Renewable) -> None:
        """Releases a lease without an owner soon, on the keeper's thread."""
        with self._changed:
            self._over.append(lease)
            self._changed.notify()

    def holds(self, owner: str) -> bool:
        """Whether all blocks of `owner`'s lease are still leased."""
        with self._changed:
            held = self._held.get(owner)
        return held is not None and held[0].left > 0

    def close(self) -> None:
        """Releases all leases. Waits only a short time."""
        with self._changed:
            for owner in list(self._held):
                self._drop(owner)
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=2.0)

    def _drop(self, owner: str) -> None:
        held = self._held.pop(owner, None)
        if held is not None:
            self._over.append(held[0])
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._over and not self._closed:
                    # Without a lease the thread sleeps without a timeout.
                    self._changed.wait(_LOOK if self._held else None)
                over, self._over = self._over, []
                due = [
                    (owner, lease)
                    for owner, (lease, whole) in self._held.items()
                    if lease.left < whole / 2
                ]
                closed = self._closed
            for lease in over:
                self._release(lease)
            for owner, lease in due:
                self._renew(owner, lease)
            if closed:
                return

    def _release(self, lease: Renewable) -> None:
        try:
            lease.release()
        except kvpool.Error as error:
            logger.debug("a lease was left to run out: %s", error)
        except BaseException:
            # Every exception is caught: this thread serves the leases of all owners.
            logger.exception("a lease was left to run out")

    def _renew(self, owner: str, lease: Renewable) -> None:
        lost = 0
        began = time.monotonic()
        try:
            lost = lease.renew()
        except kvpool.Error as error:
            # The next check tries again while the lease runs.
            logger.debug("a lease was not renewed in %.1f s: %s", time.monotonic() - began, error)
        except BaseException:
            # As in `_release`.
            logger.exception("a lease was not renewed")
        is_whole = not lost or self._again is not None
        if is_whole and lease.left > 0:
            return
        following = self._following(owner)
        with self._changed:
            held = self._held.get(owner)
            if held is not None and held[0] is lease:
                self._drop(owner)
                if following is not None:
                    self._held[owner] = (following, following.left)
                    following = None
            if following is not None:
                # The owner let the lease go meanwhile.
                self._over.append(following)
            self._changed.notify()

    def _following(self, owner: str) -> Renewable | None:
        if self._again is None:
            return None
        try:
            return self._again(owner)
        except kvpool.Error as error:
            logger.warning("a lease that ended was not taken again: %s", error)
            return None
        except BaseException:
            # As in `_release`.
            logger.exception("a lease that ended was not taken again")
            return None
