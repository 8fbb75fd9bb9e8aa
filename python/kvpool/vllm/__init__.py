"""A connector that makes kvpool the shared KV cache of vLLM.

```
vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvpoolConnector", "kv_role": "kv_both",
  "kv_connector_module_path": "kvpool.vllm", "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"master": "http://10.0.0.1:7070"}}'
```

What it does, and where: `scheduler` asks the pool how much of a prompt it has, beside vLLM's own scheduler
(`lookups`), and keeps leases on it until it is loaded; `worker` moves blocks between vLLM's memory and the pool; `keys` names blocks;
`settings` lists what `kv_connector_extra_config` may hold. Those need no vLLM; `connector` is what vLLM
loads, and does.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvpoolConnector"]


def __getattr__(name: str) -> Any:
    # vLLM itself is imported only when somebody asks for the connector, which is vLLM.
    if name == "KvpoolConnector":
        from kvpool.vllm.connector import KvpoolConnector

        return KvpoolConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
