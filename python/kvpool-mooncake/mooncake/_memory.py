"""Host memory for blocks, and the binding of a thread to cores."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from pathlib import Path

from mooncake import _codes

_log = logging.getLogger("mooncake")

# This memory is never freed, because bytes may still arrive in it.
_kept: list[tuple[mmap.mmap, ctypes.c_char]] = []


class MooncakeHostMemAllocator:
    """Page-aligned memory, by address. At its end the allocator frees all memory that is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[int, tuple[mmap.mmap, ctypes.c_char]] = {}

    def alloc(self, size: int) -> int:
        """Returns the address of `size` new bytes, all zero; 0 on failure."""
        if size <= 0:
            return 0
        try:
            block = mmap.mmap(-1, size)
        except (OSError, OverflowError, ValueError) as error:
            _log.error("no memory of %d bytes: %s", size, error)
            return 0
        first = ctypes.c_char.from_buffer(block)
        address = ctypes.addressof(first)
        with self._lock:
            self._blocks[address] = (block, first)
        return address

    def free(self, ptr: int) -> int:
        """Frees memory of `alloc`. Returns 0, or -600 for any other address."""
        with self._lock:
            found = self._blocks.pop(ptr, None)
        if found is None:
            return _codes.PARAMETERS
        block, first = found
        # The mapping can be closed only after the last reference to its memory is gone.
        del found, first
        block.close()
        return _codes.OK

    def keep(self, ptr: int) -> bool:
        """Keeps this memory of `alloc` for ever, because a transfer still uses it. Returns False for any other
        address."""
        with self._lock:
            found = self._blocks.pop(ptr, None)
        if found is not None:
            _log.warning("memory at %#x is still in use, and is never freed", ptr)
            _kept.append(found)
        return found is not None

    def free_all(self) -> None:
        """Frees all memory."""
        for ptr in list(self._blocks):
            self.free(ptr)


def bind_to_numa_node(node: int) -> None:
    """Runs this thread on the cores of a NUMA node. Memory that the thread touches first is then on that node.

    Without such a node the call changes nothing and logs that.
    """
    if not isinstance(node, int):
        raise TypeError(f"node must be an int, not {type(node).__name__}")
    cores: set[int] = set()
    try:
        text = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().strip()
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
        # A container may be restricted to some of the node's cores.
        os.sched_setaffinity(0, cores & os.sched_getaffinity(0) or cores)
    except (OSError, ValueError) as error:
        _log.warning("not bound to NUMA node %d: %s", node, error)


def get_alloc_func_addr() -> int:
    """The address of a C function `void *(size_t)` for page-aligned memory: `valloc` of the C library."""
    return _address_of("valloc")


def get_free_func_addr() -> int:
    """The address of a C function `void (void *)` that frees that memory: `free` of the C library."""
    return _address_of("free")


def _address_of(name: str) -> int:
    return ctypes.cast(ctypes.CDLL(None)[name], ctypes.c_void_p).value or 0
