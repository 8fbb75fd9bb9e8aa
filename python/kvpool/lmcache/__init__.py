"""kvpool as storage for LMCache: an L2 adapter for its server, and a remote connector.

```
lmcache ... --l2-adapter '{"type": "plugin", "module_path": "kvpool.lmcache",
  "class_name": "KvpoolL2Adapter", "adapter_params": {"master": "http://10.0.0.1:7070"}}'
```

The settings are the fields of `kvpool._engines.settings.PoolSettings`, and `salt`. The adapter also has
`serde`. LMCache is imported only at the first use of one of the classes. Written for the interface of LMCache
0.5.6.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvpoolConnector", "KvpoolL2Adapter"]


def __getattr__(name: str) -> Any:
    if name == "KvpoolL2Adapter":
        from kvpool.lmcache.l2 import KvpoolL2Adapter

        return KvpoolL2Adapter
    if name == "KvpoolConnector":
        from kvpool.lmcache.remote import KvpoolConnector

        return KvpoolConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
