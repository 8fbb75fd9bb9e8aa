"""Our backend, made by SGLang's factory, over host memory of SGLang's own.

Run in SGLang's virtual environment: `python sglang_backend.py MASTER`. Prints a line a check, `ok: ..` or
`FAILED: ..`, and at last `at its end`.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

PAGE = 16
PAGES = 8
LAYERS = 2
HEADS = 2
WIDTH = 32


def check(what: str, holds: bool) -> None:
    """Says whether it holds."""
    print(f"{'ok' if holds else 'FAILED'}: {what}", flush=True)


def host_memory() -> MHATokenToKVPoolHost:
    """SGLang's host memory for twice as many pages as are moved, beside a small cache of its own."""
    tokens = 2 * PAGES * PAGE
    keys, values = (
        tuple(torch.zeros(tokens, HEADS, WIDTH) for _ in range(LAYERS)) for _ in range(2)
    )
    addresses = [
        torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)
        for tensors in (keys, values)
    ]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=keys,
            v=values,
            k_data_ptrs=addresses[0],
            v_data_ptrs=addresses[1],
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=WIDTH,
        v_head_dim=WIDTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE,
        "page_first",
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=tokens,
        start_layer=0,
        end_layer=LAYERS,
    )


def backend(master: str, memory: MHATokenToKVPoolHost, rank: int, direct: bool) -> Any:
    """The backend as SGLang makes it for a rank of two."""
    extra = {
        "backend_name": "kvpool",
        "module_path": "kvpool.sglang",
        "class_name": "KvpoolStorage",
        "interface_v1": int(direct),
        "master": master,
    }
    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=2,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="tiny",
        extra_config=extra,
    )
    made = StorageBackendFactory.create_backend("dynamic", config, memory)
    made.register_mem_pool_host(memory)
    return made


def check_pages(master: str) -> None:
    """Pages by their place in host memory, as SGLang moves them with `interface_v1`."""
    memory = host_memory()
    first, other = (backend(master, memory, rank, direct=True) for rank in range(2))
    hashes = [uuid.uuid4().hex * 2 for _ in range(PAGES)]
    sources = torch.arange(PAGES * PAGE)
    targets = sources + PAGES * PAGE
    memory.kv_buffer.copy_(torch.randn(memory.kv_buffer.shape))
    sent = [memory.get_data_page(page * PAGE).clone() for page in range(PAGES)]
    check("nothing is there at first", first.batch_exists(hashes) == 0)
    check("absent pages are not got", not any(first.batch_get_v1(hashes, targets)))
    check("pages are put", first.batch_set_v1(hashes, sources) == [True] * PAGES)
    check("pages that are there are put again", first.batch_set_v1(hashes, sources) == [True] * PAGES)
    check("leading pages are counted", first.batch_exists([*hashes[:3], "absent", *hashes[3:]]) == 3)
    check("another rank has its own", other.batch_exists(hashes) == 0)
    check("pages are got", first.batch_get_v1(hashes, targets) == [True] * PAGES)
    got = [memory.get_data_page((PAGES + page) * PAGE) for page in range(PAGES)]
    check("with the bytes that were put", all(map(torch.equal, sent, got)))
    first.clear()
    check("and are gone once cleared", first.batch_exists(hashes) == 0)


def check_copies(master: str) -> None:
    """Pages as tensors, as SGLang moves them without `interface_v1`."""
    memory = host_memory()
    storage = backend(master, memory, 0, direct=False)
    hashes = [uuid.uuid4().hex * 2 for _ in range(PAGES)]
    pages = [torch.randn_like(memory.get_dummy_flat_data_page()) for _ in hashes]
    room = [memory.get_dummy_flat_data_page() for _ in hashes]
    check("tensors are put", storage.batch_set(hashes, pages))
    got = storage.batch_get([*hashes[:-1], "absent"], room)
    right = all(map(torch.equal, got[:-1], pages[:-1]))
    check("and got, an absent one as None", right and got[-1] is None)
    check("one alone exists", storage.exists(hashes[0]) and not storage.exists("absent"))
    one = storage.set("one", pages[0]) and storage.get("one", room[0])
    check("one alone is put and got", one is not None and torch.equal(one, pages[0]))


def main() -> None:
    check_pages(sys.argv[1])
    check_copies(sys.argv[1])
    print("at its end", flush=True)


if __name__ == "__main__":
    main()
