"""A distributed pool for the KV cache of large language models.

A pool stores immutable blocks of bytes under keys, on store nodes of one cluster. Inference engines put
the KV cache of computed tokens and get it again, from any host. Start a pool with the command `kvmaster`
and one `kvstore-node` on each host; the wheel contains both.

```python
import kvpool, numpy as np

keys = kvpool.chain_keys(kvpool.Namespace(model="llama-8b"), 16, range(100))   # 6 keys of 32 bytes
kv = np.zeros((len(keys), 32, 1024), dtype="float32")                          # one row is one block

with kvpool.Pool.connect("http://127.0.0.1:7070") as pool:
    pool.batch_put(keys, list(kv), parents=[None, *keys[:-1]])   # [True, ...]; False: was present
    with pool.match_prefix(keys) as prefix:                      # leading blocks present, leased
        back = np.empty_like(kv[: prefix.blocks])
        lengths = pool.batch_get(keys[: prefix.blocks], list(back))   # bytes of each block, or None
```

Read this first:

- A key is a str of 1 byte to 1 KiB in UTF-8, or a digest of 32 bytes from `chain_keys`.
- A block is one contiguous buffer or a sequence of buffers: bytes, numpy arrays, torch tensors,
  `(address, length)` pairs. Lengths and offsets are in bytes, times in seconds.
- A batch returns one result for each key, in order; a failed key has an `Error` in its place. Calls for
  one key raise the Error. A miss is not an error: it is None or False.
- A get returns only bytes that match the checksum of the put. A present block may be evicted at any
  time unless a lease or a pin protects it.
- Match on `Error.code` or on the subclasses, not on messages. `Error.is_retryable` says whether the same
  call may succeed later.

`kvpool.aio` has the same classes with `async def`. `kvpool.vllm`, `kvpool.lmcache` and `kvpool.sglang`
are connectors for these engines.
"""

from kvpool._native import (
    Description,
    Lease,
    Limits,
    Listed,
    Listing,
    Namespace,
    NamespaceInfo,
    Node,
    Pool,
    Prefix,
    Registration,
    Replica,
    ReplicaTask,
    Segment,
    Stats,
    View,
    __version__,
    chain_keys,
)
from kvpool.errors import (
    ClosedError,
    ConnectError,
    DeadlineError,
    Error,
    ForkedError,
    FullError,
    InvalidArgumentError,
    LeasedError,
    MemoryInUseError,
    UnreachableError,
)

__all__ = [
    "ClosedError",
    "ConnectError",
    "DeadlineError",
    "Description",
    "Error",
    "ForkedError",
    "FullError",
    "InvalidArgumentError",
    "Lease",
    "LeasedError",
    "Limits",
    "Listed",
    "Listing",
    "MemoryInUseError",
    "Namespace",
    "NamespaceInfo",
    "Node",
    "Pool",
    "Prefix",
    "Registration",
    "Replica",
    "ReplicaTask",
    "Segment",
    "Stats",
    "UnreachableError",
    "View",
    "__version__",
    "chain_keys",
]
