"""Leases that are kept from a lookup until what was found is loaded."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

import kvpool

logger = logging.getLogger(__name__)

_LOOK = 0.2
"""How often leases are looked at, in seconds."""


class Renewable(Protocol):
    """What [`Keeper`] needs of a lease: `kvpool.Lease` is one."""

    @property
    def left(self) -> float: ...

    def renew(self) -> int: ...

    def release(self) -> None: ...


class Keeper:
    """Renews and releases leases on a thread of its own, so that the scheduler never waits for that."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[str, tuple[Renewable, float]] = {}
        self._over: list[Renewable] = []
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvpool-leases", daemon=True)
        self._thread.start()

    def hold(self, owner: str, lease: Renewable) -> None:
        """Keeps `lease` alive until it is let go; one that `owner` had before is let go."""
        with self._changed:
            self._drop(owner)
            self._held[owner] = (lease, lease.left)
            self._changed.notify()

    def let_go(self, owner: str) -> None:
        """Releases what `owner` holds, soon."""
        with self._changed:
            self._drop(owner)

    def release(self, lease: Renewable) -> None:
        """Releases a lease that nobody holds, soon."""
        with self._changed:
            self._over.append(lease)
            self._changed.notify()

    def holds(self, owner: str) -> bool:
        """Whether all that `owner`'s lease covered is leased still."""
        with self._changed:
            held = self._held.get(owner)
        return held is not None and held[0].left > 0

    def close(self) -> None:
        """Releases everything, waiting for it a moment at most."""
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
                    # Nothing is looked at while nothing is held.
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
        # What cannot be renewed, or not whole, is no longer held: the next lookup asks anew.
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
