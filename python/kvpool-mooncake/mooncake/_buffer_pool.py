"""Reuse of registered memory."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mooncake._memory import MooncakeHostMemAllocator
from mooncake._settings import PAGE

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore


class BufferLeaseView:
    """The bytes of a lease. The lease cannot be released while a memoryview of the bytes lives."""

    def __init__(self, lease: BufferLease) -> None:
        # Only objects of a new class take weak references and attributes.
        window: Any = type("_Window", (ctypes.c_ubyte * lease.size,), {})
        self._window = window.from_address(lease.ptr) if lease.size else window()
        self._window.lease = lease

    @property
    def buffer(self) -> memoryview:
        """The bytes, readable and writable."""
        return memoryview(self._window).cast("B")


class BufferLease:
    """A buffer that is on loan from a pool, until `release` or the end of its `with` block."""

    def __init__(self, pool: BufferPool, ptr: int, size: int) -> None:
        self._pool: BufferPool | None = pool
        self._ptr = ptr
        self._size = size
        self._views: list[weakref.ref[Any]] = []

    @property
    def ptr(self) -> int:
        """The address. Raises RuntimeError after the release."""
        if self._pool is None:
            raise RuntimeError("the buffer lease is closed")
        return self._ptr

    @property
    def size(self) -> int:
        """The requested length in bytes."""
        return self._size

    @property
    def buffer(self) -> memoryview:
        """The bytes, readable and writable. Raises RuntimeError after the release."""
        view = BufferLeaseView(self)
        self._views.append(weakref.ref(view._window))
        return view.buffer

    def release(self) -> None:
        """Returns the buffer to its pool. Raises RuntimeError while a memoryview of it lives. A second call
        does nothing."""
        if any(view() is not None for view in self._views):
            raise RuntimeError("the buffer has exported views, and is not released")
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._take_back(self._ptr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # Each view holds its lease, so no view is left here. An object whose constructor failed has no `_pool`.
        self._views = []
        if hasattr(self, "_pool"):
            self.release()


def _pages(size: int) -> int:
    """Rounds a size up to whole pages, in bytes."""
    return -(-size // PAGE) * PAGE


class BufferPool:
    """Buffers registered with a store and reused.

    The pool's limit is `max_bytes`, but at least the store's local buffer. With a `max_bytes` of 0 it is twice
    the local buffer. Without a local buffer the pool then has no limit. A request gets the smallest idle buffer
    that is large enough, or a new buffer of at least `min_size_class` bytes. Buffers and the limit are whole
    pages. The limit counts whole buffers, not the requested bytes.
    """

    def __init__(
        self,
        store: MooncakeDistributedStore,
        max_bytes: int = 0,
        min_size_class: int = 64 << 10,
        max_size_class: int | None = None,
        alignment: int = 8 << 20,
        block_on_exhaustion: bool = True,
        default_timeout: float | None = None,
        max_regions: int | None = None,
        prewarm_size: int | None = None,
        prewarm_count: int = 0,
    ) -> None:
        """`max_size_class` has no effect. Raises RuntimeError for an invalid value, or without a store."""
        if store is None or not hasattr(store, "register_buffer"):
            raise RuntimeError("a BufferPool needs a MooncakeDistributedStore")
        if min_size_class < 1 or max_bytes < 0:
            raise RuntimeError(f"min_size_class {min_size_class} and max_bytes {max_bytes} must be positive")
        if alignment < 8 or alignment & (alignment - 1):
            raise RuntimeError(f"the alignment {alignment} is no power of two from 8 on")
        settings = getattr(store, "_settings", None)
        local = settings.buffer_size if settings is not None else 0
        self._store = store
        self._limit = _pages(max(max_bytes, local) if max_bytes else 2 * local)
        self._smallest = min(min_size_class, self._limit or min_size_class)
        self._waits = block_on_exhaustion
        self._patience = default_timeout
        self._max_regions = max_regions
        self._memory = MooncakeHostMemAllocator()
        self._changed = threading.Condition()
        self._capacities: dict[int, int] = {}
        self._free: dict[int, int] = {}
        # The capacities of the buffers that are lent.
        self._lent: dict[int, int] = {}
        self._closed = False
        if prewarm_size is not None:
            self.prewarm(prewarm_size, prewarm_count)

    def acquire(self, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """Returns a buffer of `size` bytes.

        While the limit is reached, the call waits for `timeout` seconds, or without a timeout as long as
        necessary. Raises RuntimeError at the timeout, for a size over the limit, and in a closed pool. With
        `block` False it does not wait and raises RuntimeError.
        """
        waits = self._waits if block is None else block
        seconds = self._patience if timeout is None else timeout
        if seconds is not None and seconds < 0:
            raise RuntimeError(f"the timeout {seconds} is negative")
        if size < 0 or size >= 1 << 63 or (self._limit and size > self._limit):
            raise RuntimeError(f"a buffer of {size} bytes exceeds the pool's capacity of {self._limit}")
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while True:
                if self._closed:
                    raise RuntimeError("the buffer pool is closed")
                if self._has_room(size):
                    return BufferLease(self, self._lend(size), size)
                if not waits:
                    raise RuntimeError("the buffer pool is exhausted")
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise RuntimeError(f"the buffer pool was exhausted for {seconds} s: timed out")
                self._changed.wait(left)

    # The original has this second name.
    buffer = acquire

    def prewarm(self, size: int, count: int) -> None:
        """Makes `count` idle buffers of `size` bytes, as far as the limit allows."""
        with self._changed:
            for _ in range(count):
                capacity = self._capacity(size)
                if self._limit and sum(self._capacities.values()) + capacity > self._limit:
                    return
                ptr = self._grow(capacity)
                self._free[ptr] = capacity

    def close(self) -> None:
        """Frees the pool's memory. Raises RuntimeError while a buffer is lent."""
        with self._changed:
            if self._lent:
                raise RuntimeError(f"the pool has {len(self._lent)} active leases, and is not closed")
            self._closed = True
            self._changed.notify_all()
            for ptr in list(self._free):
                self._drop(ptr)

    def _has_room(self, size: int) -> bool:
        if self._max_regions is not None and len(self._lent) >= self._max_regions:
            return False
        if not self._limit or any(has >= size for has in self._free.values()):
            return True
        return sum(self._lent.values()) + self._capacity(size) <= self._limit

    def _capacity(self, size: int) -> int:
        return _pages(max(size, self._smallest))

    def _lend(self, size: int) -> int:
        fitting = [(has, ptr) for ptr, has in self._free.items() if has >= size]
        if fitting:
            capacity, ptr = min(fitting)
            del self._free[ptr]
        else:
            capacity = self._capacity(size)
            # Idle buffers that are too small are freed for a buffer that fits.
            for idle in list(self._free):
                if self._limit and sum(self._capacities.values()) + capacity > self._limit:
                    self._drop(idle)
            ptr = self._grow(capacity)
        self._lent[ptr] = capacity
        return ptr

    def _grow(self, capacity: int) -> int:
        ptr = self._memory.alloc(capacity)
        if ptr == 0:
            raise RuntimeError(f"there is no memory of {capacity} bytes")
        code = self._store.register_buffer(ptr, capacity)
        if code != 0:
            self._memory.free(ptr)
            raise RuntimeError(f"memory of {capacity} bytes cannot be registered: {code}")
        self._capacities[ptr] = capacity
        return ptr

    def _drop(self, ptr: int) -> None:
        self._free.pop(ptr, None)
        del self._capacities[ptr]
        try:
            self._store.unregister_buffer(ptr)
        except RuntimeError:
            self._memory.keep(ptr)
            raise
        if ptr in getattr(self._store, "_in_use", ()):
            self._memory.keep(ptr)
        else:
            self._memory.free(ptr)

    def _take_back(self, ptr: int) -> None:
        with self._changed:
            if self._lent.pop(ptr, None) is not None:
                self._free[ptr] = self._capacities[ptr]
                self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
