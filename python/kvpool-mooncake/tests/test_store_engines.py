"""The call sequences of the engines' connectors, as they make them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mooncake.store import (
    MooncakeDistributedStore,
    MooncakeHostMemAllocator,
    ObjectDataType,
    ReplicateConfig,
    bind_to_numa_node,
)
from lent_memory import Memory
from live_pools import MIB, LivePool, live_pool


@pytest.fixture
def new() -> Iterator[Callable[[], MooncakeDistributedStore]]:
    """Makes stores that are not set up. They are closed after the test."""
    stores: list[MooncakeDistributedStore] = []

    def make() -> MooncakeDistributedStore:
        stores.append(MooncakeDistributedStore())
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def vllm_key(number: int, rank: int = 0) -> str:
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return f"model@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0@{digest}"


def test_vllms_store_connector(
    new: Callable[[], MooncakeDistributedStore], shared_pool: LivePool, tmp_path: Path, memory: type[Memory]
) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"127.0.0.1:{shared_pool.port}",
                "protocol": "tcp",
                "device_name": "",
                "mode": "standalone-store",
                "global_segment_size": 0,
                "local_buffer_size": 16 * MIB,
            }
        )
    )
    config = json.loads(file.read_text())
    store, second = new(), new()
    for engine in (store, second):
        code = engine.setup(
            "127.0.0.1",
            config["metadata_server"],
            config["global_segment_size"],
            config["local_buffer_size"],
            config["protocol"],
            config["device_name"],
            config["master_server_address"],
            tenant_id="default",
        )
        assert code == 0
    # Eight blocks of four layers. Each layer has a place of its own in one registered cache.
    cache = memory(os.urandom(8 * 4 * 16_384))
    assert store.register_buffer(cache.ptr, cache.size) == 0
    keys = [vllm_key(n) for n in range(8)]
    addresses = [[cache.ptr + (layer * 8 + n) * 16_384 for layer in range(4)] for n in range(8)]
    sizes = [[16_384] * 4] * 8
    assert store.batch_is_exist(keys) == [0] * 8
    how = ReplicateConfig()
    assert hasattr(how, "preferred_segment") and hasattr(how, "group_ids")
    how.preferred_segment = store.get_hostname()
    how.group_ids = ["request-1"]
    assert store.batch_put_from_multi_buffers(keys, addresses, sizes, how) == [0] * 8
    assert store.batch_put_from_multi_buffers(keys, addresses, sizes, how) == [0] * 8

    other = memory(cache.size)
    assert second.register_buffer(other.ptr, other.size) == 0
    assert second.batch_is_exist([*keys, vllm_key(99)]) == [1] * 8 + [0]
    described = second.batch_get_replica_desc(keys)
    for key in keys:
        (replica,) = described[key]
        assert replica.is_memory_replica()
        assert not replica.is_disk_replica() and not replica.is_local_disk_replica()
    targets = [[address - cache.ptr + other.ptr for address in of_key] for of_key in addresses]
    answers = second.batch_get_into_multi_buffers(
        [*keys, vllm_key(99)], [*targets, targets[0]], [*sizes, sizes[0]]
    )
    assert answers == [4 * 16_384] * 8 + [-704]
    assert bytes(other) == bytes(cache)
    assert store.remove_all(force=True) >= 8
    assert second.batch_is_exist(keys) == [0] * 8
    assert store.close() == 0


def test_vllms_embedding_cache(
    new: Callable[[], MooncakeDistributedStore], shared_pool: LivePool, memory: type[Memory]
) -> None:
    store = new()
    config = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "0",
        "local_buffer_size": "16MB",
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": f"127.0.0.1:{shared_pool.port}",
    }
    assert store.setup(config) == 0
    how = ReplicateConfig()
    how.data_type = ObjectDataType.TENSOR
    value, target = memory(os.urandom(100_000)), memory(100_000)
    for buffer in (value, target):
        assert store.register_buffer(buffer.ptr, buffer.size) == 0
    assert store.batch_put_from(["embedding"], [value.ptr], [value.size], how) == [0]
    assert store.batch_get_into(["embedding"], [target.ptr], [target.size]) == [100_000]
    assert bytes(target) == bytes(value)
    for buffer in (value, target):
        assert store.unregister_buffer(buffer.ptr) == 0
    assert store.close() == 0


def test_lmcaches_connector(
    new: Callable[[], MooncakeDistributedStore], shared_pool: LivePool, memory: type[Memory]
) -> None:
    store = new()
    config = {
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 0,
        "local_buffer_size": 16 * MIB,
        "protocol": "tcp",
        "device_name": "",
        "master_server_address": f"127.0.0.1:{shared_pool.port}",
        "transfer_timeout": 1,
        "storage_root_dir": "",
    }
    assert store.setup(config) == 0
    bind_to_numa_node(0)
    how = ReplicateConfig()
    how.replica_num = 1
    how.preferred_segment = store.get_hostname()
    keys = [f"model@1@0@{n:016x}@bfloat16@tag%v" for n in range(4)]
    pool = memory(os.urandom(4 * 50_000))
    assert store.register_buffer(pool.ptr, pool.size) == 0
    pointers = [pool.ptr + n * 50_000 for n in range(4)]
    assert store.is_exist(keys[0]) == 0
    assert store.batch_put_from(keys[:3], pointers[:3], [50_000] * 3, how) == [0] * 3
    assert store.put_from(keys[3], pointers[3], 50_000, how) == 0
    assert store.is_exist(keys[0]) == 1
    assert store.batch_is_exist(keys) == [1] * 4
    handles = store.batch_get_buffer([*keys, "model@1@0@none@bfloat16"])
    assert handles[-1] is None
    for number, handle in enumerate(handles[:4]):
        assert handle is not None
        assert memoryview(handle) == bytes(pool)[number * 50_000 : (number + 1) * 50_000]
    target = memory(pool.size)
    assert (
        store.batch_get_into(keys, [target.ptr + n * 50_000 for n in range(4)], [50_000] * 4) == [50_000] * 4
    )
    assert bytes(target) == bytes(pool)
    # The remote connector writes metadata before the data.
    assert store.put_parts(f"{keys[0]}m", b"\x01" * 28, memoryview(bytes(pool))[:1000]) == 0
    handle = store.get_buffer(f"{keys[0]}m")
    assert handle is not None
    assert bytes(handle) == b"\x01" * 28 + bytes(pool)[:1000]
    assert store.unregister_buffer(pool.ptr) == 0
    assert store.close() == 0


def test_sglangs_backend(
    new: Callable[[], MooncakeDistributedStore], tmp_path: Path, memory: type[Memory]
) -> None:
    with live_pool(tmp_path, 0) as pool:
        store = new()
        master = f"127.0.0.1:{pool.port}"
        code = store.setup(
            "127.0.0.1",
            "P2PHANDSHAKE",
            268435456,
            16 * MIB,
            "tcp",
            "",
            master,
            None,
            enable_ssd_offload=False,
            ssd_offload_path="",
            tenant_id="default",
        )
        assert code == 0
        assert store.put("warm-up", b"\x00" * 4096) == 0
        assert store.is_exist("warm-up") == 1
        assert store.get("warm-up") == b"\x00" * 4096

        allocator = MooncakeHostMemAllocator()
        size = 8 * MIB
        base = allocator.alloc(size)
        assert base > 0
        assert store.register_buffer(base, size) == 0
        source = memory(os.urandom(size // 2))
        keys = [f"{n:064x}_0_k" for n in range(8)]
        page = size // 16
        from_pages = [source.ptr + n * page for n in range(8)]
        to_pages = [base + n * page for n in range(8)]
        assert store.batch_put_from(keys, from_pages, [page] * 8) == [0] * 8
        assert store.batch_is_exist(keys) == [1] * 8
        assert store.batch_get_into(keys, to_pages, [page] * 8) == [page] * 8
        # Keys are put in parts, and read layer by layer in a session.
        parted = [f"{key}-parts" for key in keys]
        halves = [[start, start + page // 2] for start in from_pages]
        assert store.batch_put_from_multi_buffers(parted, halves, [[page // 2] * 2] * 8) == [0] * 8
        into = [[start, start + page // 2] for start in to_pages]
        assert store.batch_get_into_multi_buffers(parted, into, [[page // 2] * 2] * 8) == [page] * 8
        assert store.batch_get_session_start(parted) == [0] * 8
        for layer in range(4):
            length, offset = page // 4, layer * page // 4
            ranges = [[start + offset] for start in to_pages]
            answers = store.batch_get_into_multi_buffer_ranges(parted, ranges, [[length]] * 8, [[offset]] * 8)
            assert answers == [length] * 8
        assert store.batch_get_session_end(parted) == 0
        got = memory(size // 2)
        assert store.batch_get_into(parted, [got.ptr + n * page for n in range(8)], [page] * 8) == [page] * 8
        assert bytes(got) == bytes(source)
        assert isinstance(store.remove_all(), int)
        assert store.unregister_buffer(base) == 0
        assert allocator.free(base) == 0


def test_sglangs_dummy_client(
    new: Callable[[], MooncakeDistributedStore], shared_pool: LivePool, memory: type[Memory]
) -> None:
    store = new()
    assert store.setup_dummy(64 * MIB, 16 * MIB, f"127.0.0.1:{shared_pool.port}") == 0
    allocator = MooncakeHostMemAllocator()
    base = allocator.alloc(MIB)
    assert store.register_buffer(base, MIB) == 0
    assert store.put("dummy", b"d" * MIB) == 0
    assert store.batch_get_into(["dummy"], [base], [MIB]) == [MIB]
    assert store.batch_put_from(["dummy-2"], [base], [MIB]) == [0]
    assert store.get("dummy-2") == b"d" * MIB
    assert store.unregister_buffer(base) == 0
    assert allocator.free(base) == 0


def test_vllm_ascends_backend(
    new: Callable[[], MooncakeDistributedStore], own_pool: LivePool, memory: type[Memory]
) -> None:
    store = new()
    code = store.setup(
        local_hostname="127.0.0.1",
        metadata_server="P2PHANDSHAKE",
        global_segment_size="64MB",
        local_buffer_size="16MB",
        protocol="ascend",
        rdma_devices="",
        master_server_addr=f"127.0.0.1:{own_pool.port}",
        engine=object(),
        enable_ssd_offload=False,
        ssd_offload_path="",
    )
    assert code == 0
    how = ReplicateConfig()
    how.preferred_segment = store.get_hostname()
    how.prefer_alloc_in_same_node = True
    cache = memory(os.urandom(64_000))
    assert store.register_buffer(cache.ptr, cache.size) == 0
    keys = [vllm_key(n, rank=3) for n in range(4)]
    pointers = [[cache.ptr + n * 16_000 + part * 8_000 for part in range(2)] for n in range(4)]
    sizes = [[8_000] * 2] * 4
    assert store.batch_is_exist(keys) == [0] * 4
    assert store.batch_put_from_multi_buffers(keys, pointers, sizes, how) == [0] * 4
    nodes = {replica.node for of_key in store.batch_get_replica_desc(keys).values() for replica in of_key}
    assert nodes == {store.get_hostname()}
    before = bytes(cache)
    assert store.batch_get_into_multi_buffers(keys, pointers, sizes) == [16_000] * 4
    assert bytes(cache) == before
