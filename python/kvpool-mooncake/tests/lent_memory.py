"""Memory by its address, as engines pass it."""

from __future__ import annotations

import ctypes


class Memory:
    """Memory by its address, as engines have it."""

    def __init__(self, content: bytes | int) -> None:
        size = content if isinstance(content, int) else len(content)
        self._block = (ctypes.c_ubyte * size)()
        if isinstance(content, bytes):
            ctypes.memmove(self._block, content, size)
        self.size = size
        self.ptr = ctypes.addressof(self._block)

    def __bytes__(self) -> bytes:
        return bytes(self._block)
