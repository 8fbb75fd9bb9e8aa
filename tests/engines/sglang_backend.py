"""kvpool's backend, made by SGLang's factory, over SGLang's own host memory.

Run it in SGLang's virtual environment: `python sglang_backend.py MASTER`. It prints one line for each check,
`ok: ..` or `FAILED: ..`, and at last `at its end`.
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
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

PAGE = 16
PAGES = 8
LAYERS = 2
HEADS = 2
WIDTH = 32


def check(what: str, holds: bool) -> None:
    """Prints the result of a check."""
    print(f"{'ok' if holds else 'FAILED'}: {what}", flush=True)


def host_memory() -> MHATokenToKVPoolHost:
    """Makes SGLang's host memory for twice as many pages as are moved, beside a small cache of its own."""
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
    """Makes the backend as SGLang does for one rank of two."""
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
    """Moves pages by their place in host memory, as SGLang does with `interface_v1`."""
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
    """Moves pages as tensors, as SGLang does without `interface_v1`."""
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


def check_side_pools(master: str, direct: bool) -> None:
    """Models with several kinds of cache: SGLang names the pages of each kind beside the pages of the KV
    cache."""
    way = "by place" if direct else "as copies"
    memory, window, state = host_memory(), host_memory(), host_memory()
    storage, other = (backend(master, memory, rank, direct) for rank in range(2))
    for each in (storage, other):
        for name, pool in ((PoolName.KV, memory), (PoolName.SWA, window), (PoolName.MAMBA, state)):
            each.register_mem_host_pool_v2(pool, name)
    hashes = [uuid.uuid4().hex * 2 for _ in range(PAGES)]
    sources = torch.arange(PAGES * PAGE)
    targets = sources + PAGES * PAGE
    for pool in (memory, window, state):
        pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))

    def of(name: PoolName, indices: Any, keys: list[str], policy: Any = PoolHitPolicy.ALL_PAGES) -> PoolTransfer:
        return PoolTransfer(name=name, host_indices=indices, keys=keys, hit_policy=policy)

    # All pages of the window, and only the fourth and fifth pages of the state.
    part = slice(3 * PAGE, 5 * PAGE)
    sent = [of(PoolName.SWA, sources, hashes), of(PoolName.MAMBA, sources[part], hashes[3:5])]
    put = storage.batch_set_v2([of(PoolName.KV, sources, hashes), *sent])
    check(f"pages of three kinds are put {way}", all(map(all, put.values())) and len(put) == 3)
    trailing = PoolHitPolicy.TRAILING_PAGES
    asked = [of(PoolName.SWA, None, hashes[-2:], trailing), of(PoolName.MAMBA, None, hashes[-1:], trailing)]
    found = storage.batch_exists_v2(hashes, asked)
    check("a prefix ends where the state is", found.kv_hit_pages == 5)
    check("and every such end is told", found.restorable_prefix_pages == [4, 5])
    counts = {PoolName.KV: PAGES, PoolName.SWA: PAGES, PoolName.MAMBA: 5}
    check("each kind is counted", found.extra_pool_hit_pages == counts)
    every = storage.batch_exists_v2(hashes, [of(PoolName.MAMBA, None, hashes)])
    check("a kind that needs all its pages has none", every.kv_hit_pages == 0)
    check("without other kinds the pages alone count", storage.batch_exists_v2(hashes).kv_hit_pages == PAGES)
    check("another rank has its own", other.batch_exists_v2(hashes, asked).kv_hit_pages == 0)
    got = storage.batch_get_v2(
        [
            of(PoolName.KV, targets, hashes),
            of(PoolName.SWA, targets, hashes),
            of(PoolName.MAMBA, targets[:PAGE], hashes[3:4]),
        ]
    )
    check("they are got", all(map(all, got.values())) and len(got[PoolName.SWA]) == PAGES)

    def same(pool: Any, source: int, target: int) -> bool:
        return torch.equal(pool.get_data_page(source * PAGE), pool.get_data_page(target * PAGE))

    moved = all(same(pool, page, PAGES + page) for pool in (memory, window) for page in range(PAGES))
    check("with the bytes that were put, each kind its own", moved and same(state, 3, PAGES))
    absent = storage.batch_get_v2([of(PoolName.MAMBA, targets[: 2 * PAGE], hashes[4:6])])
    check("a page that is not there is not got", absent[PoolName.MAMBA] == [True, False])
    short = storage.batch_set_v2([of(PoolName.SWA, sources[:PAGE], hashes)])
    check("pages without a place are not put", short[PoolName.SWA] == [False] * PAGES)
    storage.clear()
    check("and are gone once cleared", storage.batch_exists_v2(hashes).kv_hit_pages == 0)


def main() -> None:
    check_pages(sys.argv[1])
    check_side_pools(sys.argv[1], direct=True)
    check_side_pools(sys.argv[1], direct=False)
    check_copies(sys.argv[1])
    print("at its end", flush=True)


if __name__ == "__main__":
    main()
