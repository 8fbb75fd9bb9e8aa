"""A round trip through LMCache's remote backend, with any connector that its configuration names.

Run it in LMCache's virtual environment, with `LMCACHE_CONFIG_FILE` set: `python lmcache_backend.py SEED`.
Chunks of another seed have other keys. It prints one line for each check, `ok: ..` or `FAILED: ..`, and at last
`at its end`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import torch
from lmcache.integration.vllm.utils import lmcache_get_or_create_config
from lmcache.v1.check.utils import EventLoopManager, _get_default_metadata, create_test_key
from lmcache.v1.storage_backend import RemoteBackend
from lmcache.v1.storage_backend.connector import InstrumentedRemoteConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

CHUNKS = 6


def check(what: str, holds: bool) -> None:
    """Prints the result of a check."""
    print(f"{'ok' if holds else 'FAILED'}: {what}", flush=True)


def wait_until_put(backend: RemoteBackend, keys: list[Any]) -> bool:
    """Whether all chunks are put within some seconds."""
    end = time.monotonic() + 20
    while not all(backend.contains(key) for key in keys):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def main() -> None:
    config = lmcache_get_or_create_config()
    metadata = _get_default_metadata("tiny", kv_dtype=torch.bfloat16, obj_size=None)
    loops = EventLoopManager()
    loops.start()
    memory = LocalCPUBackend(config=config, metadata=metadata, dst_device="cpu")
    backend = RemoteBackend(
        config=config,
        metadata=metadata,
        loop=loops.get_loop(),
        local_cpu_backend=memory,
        dst_device="cpu",
    )
    connector = backend.connection
    if isinstance(connector, InstrumentedRemoteConnector):
        connector = connector.getWrappedConnector()
    print(f"the connector is {type(connector).__module__}.{type(connector).__name__}", flush=True)

    seed = sys.argv[1]
    names = [f"{seed} {number}" for number in range(CHUNKS)]
    keys = [create_test_key("tiny", name, kv_dtype=torch.bfloat16) for name in names]
    absent = create_test_key("tiny", f"{seed} absent", kv_dtype=torch.bfloat16)
    shape = list(connector.meta_shapes[0])
    chunks = []
    for number in range(CHUNKS):
        # The last chunk is shorter, like the end of a prompt.
        tokens = shape[2] // 2 if number == CHUNKS - 1 else shape[2]
        cut = torch.Size([*shape[:2], tokens, *shape[3:]])
        chunk = memory.allocate([cut], connector.meta_dtypes, connector.meta_fmt)
        chunk.tensor.copy_(torch.randn(cut))
        chunks.append(chunk)
    sent = [chunk.tensor.clone() for chunk in chunks]

    check("an absent chunk is not there", not backend.contains(absent))
    check("and is got as None", backend.batched_get_blocking([absent]) == [None])
    backend.batched_submit_put_task(keys, chunks)
    check("chunks are put", wait_until_put(backend, keys))
    got = backend.batched_get_blocking([*keys, absent])
    check("all but an absent one are got", all(got[:-1]) and got[-1] is None)
    right = all(
        chunk is not None and chunk.tensor.shape == tensor.shape and torch.equal(chunk.tensor, tensor)
        for chunk, tensor in zip(got[:-1], sent, strict=True)
    )
    check("with the shapes and bytes that were put", right)
    leading = asyncio.run_coroutine_threadsafe(
        connector.batched_async_contains("lookup", [*keys[:3], absent, *keys[3:]]), loops.get_loop()
    )
    check("leading chunks are counted", leading.result(20) == 3)
    for chunk in [*chunks, *got]:
        if chunk is not None:
            chunk.ref_count_down()
    backend.close()
    loops.stop()
    print("at its end", flush=True)


if __name__ == "__main__":
    main()
