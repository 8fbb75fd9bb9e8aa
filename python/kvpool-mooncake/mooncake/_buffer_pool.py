"""Reuse of registered memory."""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mooncake._memory import MooncakeHostMemAllocator
from mooncake._settings import PAGE

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore


class PooledBuffer:
    """A buffer that is on loan from a pool, until `release` or the end of its `with` block."""

    def __init__(self, pool: BufferPool, ptr: int, size: int, capacity: int) -> None:
        self._pool = pool
        self.ptr = ptr
        self.size = size
        self.capacity = capacity

    def view(self) -> memoryview:
        """The bytes, to be read and written. Good until the buffer is released."""
        return memoryview((ctypes.c_ubyte * self.size).from_address(self.ptr)).cast("B")

    def release(self) -> None:
        """Gives the buffer back."""
        self._pool.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class BufferPool:
    """Buffers registered with a store and reused, `max_bytes` in all (0: no limit).

    Sizes are rounded up to `alignment`. A request gets the smallest returned buffer that is large
    enough.
    """

    def __init__(self, store: MooncakeDistributedStore, max_bytes: int = 0, alignment: int = PAGE) -> None:
        if max_bytes < 0 or alignment < 1:
            raise ValueError(f"max_bytes {max_bytes} or alignment {alignment} is out of range")
        self._store = store
        self._max_bytes = max_bytes
        self._alignment = -(-alignment // PAGE) * PAGE
        self._memory = MooncakeHostMemAllocator()
        self._lock = threading.Lock()
        self._capacities: dict[int, int] = {}
        self._free: dict[int, int] = {}
        self._lent: set[int] = set()
        self._closed = False

    @property
    def total_bytes(self) -> int:
        """The pool's buffers, lent or not."""
        with self._lock:
            return sum(self._capacities.values())

    def acquire(self, size: int) -> PooledBuffer:
        """A buffer of `size` bytes. Raises MemoryError when the pool's limit or memory is exhausted."""
        if size <= 0:
            raise ValueError(f"a buffer of {size} bytes is none")
        capacity = -(-size // self._alignment) * self._alignment
        with self._lock:
            if self._closed:
                raise RuntimeError("the buffer pool is closed")
            fitting = [(has, ptr) for ptr, has in self._free.items() if has >= capacity]
            if fitting:
                capacity, ptr = min(fitting)
                del self._free[ptr]
            else:
                ptr = self._grow(capacity)
            self._lent.add(ptr)
        return PooledBuffer(self, ptr, size, capacity)

    def _grow(self, capacity: int) -> int:
        for idle in list(self._free):
            if not self._max_bytes or sum(self._capacities.values()) + capacity <= self._max_bytes:
                break
            self._drop(idle)
        if self._max_bytes and sum(self._capacities.values()) + capacity > self._max_bytes:
            raise MemoryError(f"the pool's limit of {self._max_bytes} bytes leaves none of {capacity}")
        ptr = self._memory.alloc(capacity)
        if ptr == 0:
            raise MemoryError(f"there is no memory of {capacity} bytes")
        code = self._store.register_buffer(ptr, capacity)
        if code != 0:
            self._memory.free(ptr)
            raise MemoryError(f"memory of {capacity} bytes cannot be registered: {code}")
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
        self._memory.free(ptr)

    def release(self, buffer: PooledBuffer) -> None:
        """Takes a buffer back. A second return has no effect."""
        with self._lock:
            if buffer.ptr not in self._lent:
                return
            self._lent.remove(buffer.ptr)
            self._free[buffer.ptr] = self._capacities[buffer.ptr]
            if self._closed:
                self._drop(buffer.ptr)

    def close(self) -> None:
        """Frees unused buffers now and lent buffers when they are returned."""
        with self._lock:
            self._closed = True
            for ptr in list(self._free):
                self._drop(ptr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
