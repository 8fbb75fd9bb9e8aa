import sys

import kvpool
import numpy as np

keys = kvpool.chain_keys(kvpool.Namespace(model="llama-8b"), 16, range(100))  # full blocks only
kv = np.arange(len(keys) * 32768, dtype="float32").reshape(len(keys), 32, 1024)

with kvpool.Pool.connect(*sys.argv[1:]) as pool:  # or the master's URL
    pool.batch_put(keys, list(kv), parents=[None, *keys[:-1]])  # True, False or an Error for each
    with pool.match_prefix(keys) as prefix:  # leading blocks present, leased
        back = np.empty_like(kv[: prefix.blocks])
        lengths = pool.batch_get(keys[: prefix.blocks], list(back))  # verified, no copy in between
print(f"{prefix.blocks} blocks of {lengths[0]} bytes, equal: {np.array_equal(back, kv)}")
