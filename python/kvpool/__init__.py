"""A distributed pool for the KV cache of large language models.

    with kvpool.Pool.connect("http://127.0.0.1:7070") as pool:
        keys = kvpool.chain_keys(namespace, 16, tokens)
        prefix = pool.match_prefix(keys)             # leading blocks present, leased
        pool.batch_get(keys[: prefix.blocks], kv)    # into numpy arrays, tensors, bytearrays

`kvpool.aio` has the same with `async def`.
"""

from kvpool._native import (
    Description,
    Lease,
    Limits,
    Listed,
    Listing,
    Namespace,
    Node,
    Pool,
    Prefix,
    Registration,
    Replica,
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
    "Namespace",
    "Node",
    "Pool",
    "Prefix",
    "Registration",
    "Replica",
    "Segment",
    "Stats",
    "UnreachableError",
    "View",
    "__version__",
    "chain_keys",
]
