"""kvpool for SGLang 0.5.23: the storage of its hierarchical cache, and a back end of its disaggregation.

- `storage`: `KvpoolStorage`, for `--hicache-storage-backend dynamic`;
- `plugin`: the entry point that adds `--disaggregation-transfer-backend kvpool` when SGLang starts;
- `handoff`: the classes of that back end.

`storage` and `handoff` need SGLang, which is imported only at their first use.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvpoolStorage"]


def __getattr__(name: str) -> Any:
    if name == "KvpoolStorage":
        from kvpool.sglang.storage import KvpoolStorage

        return KvpoolStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
