"""Memory whose first access waits until the test releases it, like memory of a process that the system
stopped."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct

import pytest

_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
"""The number of the system call, by machine."""
_API = 0xAA
_MISSING_PAGES = 1


class StuckMemory:
    """Memory with missing pages: an access waits for `release`."""

    def __init__(self, length: int) -> None:
        """`length`: in bytes, whole pages. Skips the test if the system does not permit it."""
        self._faults = _fault_file()
        self._memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._length = length
        self._is_stuck = True
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        register = bytearray(struct.pack("=4Q", self.address, length, _MISSING_PAGES, 0))
        fcntl.ioctl(self._faults, _ask(0x00, len(register)), register)

    def release(self) -> None:
        """Ends the waits of all accesses, which find zeros."""
        if self._is_stuck:
            zero = bytearray(struct.pack("=3Qq", self.address, self._length, 0, 0))
            fcntl.ioctl(self._faults, _ask(0x04, len(zero)), zero)
            os.close(self._faults)
            self._is_stuck = False

    def read(self) -> bytes:
        """Returns the bytes. Call it only after `release`."""
        return ctypes.string_at(self.address, self._length)


def _fault_file() -> int:
    number = _USERFAULTFD.get(os.uname().machine)
    if number is None:
        pytest.skip(f"the number of userfaultfd is not known for {os.uname().machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    file = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK)
    if file < 0:
        pytest.skip(f"the system does not permit userfaultfd: {os.strerror(ctypes.get_errno())}")
    hello = bytearray(struct.pack("=3Q", _API, 0, 0))
    fcntl.ioctl(file, _ask(0x3F, len(hello)), hello)
    return file


def _ask(number: int, size: int) -> int:
    """Returns an ioctl request that reads and writes `size` bytes."""
    return 3 << 30 | size << 16 | _API << 8 | number
