"""Leases that are kept from a lookup until the found blocks are loaded."""

from __future__ import annotations

import logging
import threading
import time
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
    """Renews and releases leases on its own thread, so that the scheduler never waits for the master."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[str, tuple[Renewable, float]] = {}
        self._over: list[Renewable] = []
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvpool-leases", daemon=True)
        self._thread.start()

    def hold(self, owner: str, lease: Renewable) -> None:
        """Renews `lease` until `let_go`; releases the lease that `owner` had before."""
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
        """Releases all leases; waits a short time at most."""
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
                    # Sleep without a timeout while no lease is held.
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

    def _renew(self, owner: str, lease: Renewable) -> None:
        # A lease that was not renewed completely is dropped: the next lookup asks the master again.
        lost = 1
        began = time.monotonic()
        try:
            lost = lease.renew()
        except kvpool.Error as error:
            logger.debug("a lease was not renewed in %.1f s: %s", time.monotonic() - began, error)
        if lost:
            with self._changed:
                held = self._held.get(owner)
                if held is not None and held[0] is lease:
                    self._drop(owner)
