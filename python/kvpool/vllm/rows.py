"""Runs of rows from one allocation. The allocation is made, pinned and registered once."""

from __future__ import annotations

import collections
import threading


class Rows:
    """A run of adjacent rows. It returns to the pool of rows when this object is garbage."""

    def __init__(self, start: int, count: int, returned: collections.deque[tuple[int, int]]):
        self.start = start
        self.count = count
        self._returned = returned

    def __del__(self) -> None:
        # A lock could deadlock: the garbage collector may run this inside `take`.
        self._returned.append((self.start, self.count))


class RowPool:
    """The free rows of an allocation. Threads may share it."""

    def __init__(self, rows: int):
        self._lock = threading.Lock()
        self._free = [(0, rows)] if rows else []
        self._returned: collections.deque[tuple[int, int]] = collections.deque()

    def take(self, count: int) -> Rows | None:
        """Returns the first free run of `count` rows; `None` without one."""
        with self._lock:
            self._take_back()
            for at, (start, free) in enumerate(self._free):
                if free >= count > 0:
                    rest = [(start + count, free - count)] if free > count else []
                    self._free[at : at + 1] = rest
                    return Rows(start, count, self._returned)
        return None

    def _take_back(self) -> None:
        """Frees returned rows and joins adjacent runs."""
        if not self._returned:
            return
        while self._returned:
            self._free.append(self._returned.popleft())
        whole: list[tuple[int, int]] = []
        for start, count in sorted(self._free):
            if whole and sum(whole[-1]) == start:
                whole[-1] = (whole[-1][0], whole[-1][1] + count)
            else:
                whole.append((start, count))
        self._free = whole
