"""The live pools of kvpool's own tests, for those of this package."""

from __future__ import annotations

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

__all__ = ["MIB", "LivePool", "free_port", "live_pool", "own_pool", "shared_pool", "wait_until"]
