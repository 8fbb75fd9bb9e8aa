"""Locks on blocks: leases that are renewed until each of their keys is unlocked."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import kvpool
from kvpool._engines.leases import Keeper


@dataclass
class _Owner:
    """One lease: its keys, and the number of its keys that are still locked."""

    pool: kvpool.Pool
    keys: Sequence[str]
    left: int


class Locks:
    """The locks of lookups. A key locked several times must be unlocked as often."""

    def __init__(self) -> None:
        self._keeper = Keeper(self._lease_again)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._of_key: defaultdict[str, deque[str]] = defaultdict(deque)
        self._owners: dict[str, _Owner] = {}

    def look_up(self, pool: kvpool.Pool, keys: Sequence[str]) -> list[bool]:
        """Locks the keys that the pool has. Returns for each key whether it is locked. Locks none if it raises
        kvpool.Error.

        Takes one round trip if all present keys come first, else three.
        """
        present = [False] * len(keys)
        owners: list[str] = []
        try:
            first = self._lease(pool, keys, owners)
            present[:first] = [True] * first
            # The key after the first ones was absent, so it is not asked again.
            rest = range(first + 1, len(keys))
            if rest:
                there = pool.is_exist([keys[at] for at in rest], lease=False)
                again = [at for at, is_there in zip(rest, there, strict=True) if is_there]
                if again:
                    for at in again[: self._lease(pool, [keys[at] for at in again], owners)]:
                        present[at] = True
        except BaseException:
            # The caller learns of no lock, so it would never release these.
            for owner in owners:
                self._give_up(owner)
            raise
        return present

    def unlock(self, keys: Sequence[str]) -> None:
        """Releases one lock of each key. Skips a key without a lock."""
        over = []
        with self._lock:
            for key in keys:
                owners = self._of_key.get(key)
                if not owners:
                    continue
                owner = owners.popleft()
                if not owners:
                    del self._of_key[key]
                self._owners[owner].left -= 1
                if self._owners[owner].left == 0:
                    del self._owners[owner]
                    over.append(owner)
        for owner in over:
            self._keeper.let_go(owner)

    def close(self) -> None:
        """Releases all locks."""
        self._keeper.close()

    def _lease(self, pool: kvpool.Pool, keys: Sequence[str], owners: list[str]) -> int:
        """Locks the leading keys that are present. Returns their number. Adds their owner to `owners`."""
        prefix = pool.match_prefix(keys)
        if prefix.blocks:
            owner = str(next(self._numbers))
            owners.append(owner)
            # The lease is recorded before a caller can unlock its keys. Otherwise nothing would ever release
            # it.
            self._keeper.hold(owner, prefix.lease)
            with self._lock:
                locked = keys[: prefix.blocks]
                self._owners[owner] = _Owner(pool, locked, len(locked))
                for key in locked:
                    self._of_key[key].append(owner)
        return prefix.blocks

    def _give_up(self, owner: str) -> None:
        """Releases all locks of an owner."""
        with self._lock:
            owned = self._owners.pop(owner, None)
            for key in owned.keys if owned is not None else ():
                of_key = self._of_key.get(key)
                if of_key is not None and owner in of_key:
                    of_key.remove(owner)
                    if not of_key:
                        del self._of_key[key]
        self._keeper.let_go(owner)

    def _lease_again(self, owner: str) -> kvpool.Lease | None:
        """Takes a new lease on the leading keys that an owner still locks, because its lease has ended."""
        with self._lock:
            owned = self._owners.get(owner)
            if owned is None:
                return None
            locked = [key for key in owned.keys if owner in self._of_key.get(key, ())]
        prefix = owned.pool.match_prefix(locked)
        return prefix.lease if prefix.blocks else None
