"""The live pools of kvpool's own tests, for those of this package, and memory as engines have it."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

_SHARED = Path(__file__).parents[2] / "tests" / "conftest.py"


def _load(name: str = "kvpool_live_pools") -> None:
    spec = importlib.util.spec_from_file_location(name, _SHARED)
    assert spec and spec.loader, f"{_SHARED} is missing"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


_load()

from kvpool_live_pools import (  # noqa: E402
    MIB,
    LivePool,
    free_port,
    live_pool,
    own_pool,
    shared_pool,
    wait_until,
)

__all__ = ["MIB", "LivePool", "Memory", "free_port", "live_pool", "own_pool", "shared_pool", "wait_until"]


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
