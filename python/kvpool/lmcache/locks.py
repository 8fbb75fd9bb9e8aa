"""Locks on blocks: leases that are renewed until each of their keys is unlocked."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Sequence

import kvpool
from kvpool._engines.leases import Keeper


class Locks:
    """The locks of lookups. A key locked several times must be unlocked as often."""

    def __init__(self) -> None:
        self._keeper = Keeper()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._of_key: defaultdict[str, deque[str]] = defaultdict(deque)
        self._left: dict[str, int] = {}

    def look_up(self, pool: kvpool.Pool, keys: Sequence[str]) -> list[bool]:
        """Returns which of the keys the pool has, and locks these. Raises kvpool.Error.

        Takes one round trip if all present keys come first, else three.
        """
        present = [False] * len(keys)
        first = self._lease(pool, keys)
        present[:first] = [True] * first
        # Do not ask again for a key that was absent.
        rest = range(first + 1, len(keys))
        if rest:
            there = pool.is_exist([keys[at] for at in rest], lease=False)
            again = [at for at, is_there in zip(rest, there, strict=True) if is_there]
            if again:
                for at in again[: self._lease(pool, [keys[at] for at in again])]:
                    present[at] = True
        return present

    def unlock(self, keys: Sequence[str]) -> None:
        """Releases one lock of each key; skips a key without a lock."""
        over = []
        with self._lock:
            for key in keys:
                owners = self._of_key.get(key)
                if not owners:
                    continue
                owner = owners.popleft()
                if not owners:
                    del self._of_key[key]
                self._left[owner] -= 1
                if self._left[owner] == 0:
                    del self._left[owner]
                    over.append(owner)
        for owner in over:
            self._keeper.let_go(owner)

    def close(self) -> None:
        """Releases all locks."""
        self._keeper.close()

    def _lease(self, pool: kvpool.Pool, keys: Sequence[str]) -> int:
        """Locks the leading keys that are present; returns how many."""
        prefix = pool.match_prefix(keys)
        if prefix.blocks:
            owner = str(next(self._numbers))
            # Record the lease before a caller can unlock it, or nothing would ever release it.
            self._keeper.hold(owner, prefix.lease)
            with self._lock:
                self._left[owner] = prefix.blocks
                for key in keys[: prefix.blocks]:
                    self._of_key[key].append(owner)
        return prefix.blocks
