"""A connector that makes kvpool the shared KV cache of vLLM.

```
vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvpoolConnector", "kv_role": "kv_both",
  "kv_connector_module_path": "kvpool.vllm", "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"master": "http://10.0.0.1:7070"}}'
```

Modules:

- `scheduler` looks up the blocks of a prompt in the pool, and keeps leases on them until they are loaded;
- `lookups` sends the lookups beside vLLM's own scheduler;
- `worker` moves blocks between vLLM's memory and the pool;
- `keys` names blocks;
- `settings` lists the settings in `kv_connector_extra_config`;
- `connector` contains the class that vLLM loads. It needs vLLM; the other modules do not.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvpoolConnector"]


def __getattr__(name: str) -> Any:
    # Only vLLM uses the connector, so vLLM is imported only at its use.
    if name == "KvpoolConnector":
        from kvpool.vllm.connector import KvpoolConnector

        return KvpoolConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
