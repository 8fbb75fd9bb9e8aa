"""Memory of the host: the allocator, the buffer pool, and NUMA nodes."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time

import pytest
from mooncake.store import (
    BufferPool,
    MooncakeDistributedStore,
    MooncakeHostMemAllocator,
    bind_to_numa_node,
    get_alloc_func_addr,
    get_free_func_addr,
)
from live_pools import MIB, LivePool


def test_allocated_memory_is_whole_pages_that_can_be_written() -> None:
    allocator = MooncakeHostMemAllocator()
    first, second = allocator.alloc(MIB), allocator.alloc(1)
    assert first % 4096 == second % 4096 == 0
    assert first != second
    ctypes.memset(first, 7, MIB)
    assert ctypes.string_at(first + MIB - 1, 1) == b"\x07"
    assert allocator.free(first) == 0
    assert allocator.free(first) == -600
    assert allocator.free(12345) == -600
    assert allocator.free(second) == 0


@pytest.mark.parametrize("size", [0, -1, 1 << 62, 1 << 80])
def test_impossible_memory_has_the_address_0(size: int) -> None:
    assert MooncakeHostMemAllocator().alloc(size) == 0


def test_the_memory_pool_of_a_store_is_registered_and_used(store: MooncakeDistributedStore, key: str) -> None:
    address = store.alloc_from_mem_pool(MIB)
    assert address > 0
    ctypes.memset(address, 3, MIB)
    assert store.put_from(key, address, MIB) == 0
    assert store.get(key) == b"\x03" * MIB
    assert store.alloc_from_mem_pool(0) == 0


def test_a_store_that_closes_frees_no_memory_that_a_call_uses(own_pool: LivePool, key: str) -> None:
    store = MooncakeDistributedStore()
    settings = {"global_segment_size": 0, "master_server_addr": own_pool.url, "get_timeout_ms": 3000}
    assert store.setup(settings) == 0
    address = store.alloc_from_mem_pool(MIB)
    assert store.put_from(key, address, MIB) == 0
    own_pool.nodes[0].hang()
    getting = threading.Thread(target=store.get_into, args=(key, address, MIB))
    getting.start()
    time.sleep(0.5)
    assert getting.is_alive()
    assert store.close() == 0
    # The memory is freed only now.
    getting.join(1)
    assert not getting.is_alive()


def test_pooled_buffers_are_used_again(store: MooncakeDistributedStore, key: str) -> None:
    with BufferPool(store) as pool:
        with pool.acquire(MIB) as lease:
            lease.buffer[:5] = b"hello"
            first = lease.ptr
            assert store.put_from(key, lease.ptr, 5) == 0
        assert store.get(key) == b"hello"
        with pool.buffer(MIB - 1) as lease:
            assert lease.ptr == first
            assert (lease.size, len(lease.buffer)) == (MIB - 1, MIB - 1)
        with pytest.raises(RuntimeError, match="closed"):
            lease.ptr
        assert len(pool.acquire(0).buffer) == 0


def test_a_buffer_pool_keeps_to_its_limit(store: MooncakeDistributedStore) -> None:
    # The store's local buffer is 16 MiB, and no limit is smaller.
    pool = BufferPool(store, max_bytes=MIB)
    one, two = pool.acquire(8 * MIB), pool.acquire(8 * MIB)
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(1, block=False)
    with pytest.raises(RuntimeError, match="timed out"):
        pool.acquire(1, timeout=0.1)
    with pytest.raises(RuntimeError, match="capacity"):
        pool.acquire(17 * MIB)
    waiting: list[int] = []
    thread = threading.Thread(target=lambda: waiting.append(pool.acquire(1).size))
    thread.start()
    one.release()
    one.release()
    thread.join(5)
    assert waiting == [1]
    with pytest.raises(RuntimeError, match="active leases"):
        pool.close()
    two.release()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.acquire(1)


def test_the_limit_of_a_buffer_pool_counts_whole_buffers(store: MooncakeDistributedStore) -> None:
    # Four buffers of the smallest size fill the limit of 16 MiB, whatever size is requested.
    pool = BufferPool(store, max_bytes=1, min_size_class=4 * MIB, block_on_exhaustion=False)
    leases = [pool.acquire(1) for _ in range(4)]
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(1)
    leases.pop().release()
    # The idle buffer is reused, and is freed for a buffer that does not fit into it.
    leases.append(pool.acquire(4 * MIB))
    leases.pop().release()
    leases.pop().release()
    leases.append(pool.acquire(5 * MIB))
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(4 * MIB)
    for lease in leases:
        lease.release()
    pool.close()


def test_a_lease_waits_for_the_end_of_its_views(store: MooncakeDistributedStore) -> None:
    pool = BufferPool(store, max_regions=1, block_on_exhaustion=False, prewarm_size=MIB, prewarm_count=2)
    lease = pool.acquire(4)
    view = lease.buffer
    view[:] = b"test"
    with pytest.raises(RuntimeError, match="exported views"):
        lease.release()
    part = view[1:]
    del view
    with pytest.raises(RuntimeError, match="exported views"):
        lease.release()
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(1)
    assert bytes(part) == b"est"
    del part, lease
    # A lease without a reference is released.
    pool.acquire(1).release()
    pool.close()


@pytest.mark.parametrize("wrong", [{"alignment": 12345}, {"min_size_class": 0}, {"max_bytes": -1}])
def test_an_invalid_buffer_pool_is_refused(store: MooncakeDistributedStore, wrong: dict[str, int]) -> None:
    with pytest.raises(RuntimeError):
        BufferPool(store, **wrong)
    with pytest.raises(RuntimeError):
        BufferPool(None)  # type: ignore[arg-type]


def test_the_allocator_has_functions_for_other_libraries() -> None:
    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(get_alloc_func_addr())
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(get_free_func_addr())
    memory = alloc(MIB)
    assert memory % 4096 == 0
    ctypes.memset(memory, 1, MIB)
    free(memory)


def test_a_thread_is_bound_to_a_present_node(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    try:
        with caplog.at_level(logging.WARNING, logger="mooncake"):
            bind_to_numa_node(4095)
        assert "4095" in caplog.text
        assert os.sched_getaffinity(0) == before
        if not os.path.exists("/sys/devices/system/node/node0"):
            pytest.skip("this host says nothing of NUMA nodes")
        bind_to_numa_node(0)
        assert os.sched_getaffinity(0) <= before
    finally:
        os.sched_setaffinity(0, before)
    with pytest.raises(TypeError):
        bind_to_numa_node("0")  # type: ignore[arg-type]
