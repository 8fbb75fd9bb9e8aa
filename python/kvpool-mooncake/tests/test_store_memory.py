"""Memory of the host: the allocator, the buffer pool, and NUMA nodes."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time

import pytest
from mooncake.store import BufferPool, MooncakeDistributedStore, MooncakeHostMemAllocator, bind_to_numa_node
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
def test_memory_that_cannot_be_has_the_address_0(size: int) -> None:
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
    own_pool.nodes[0].send(signal.SIGSTOP)
    getting = threading.Thread(target=store.get_into, args=(key, address, MIB))
    getting.start()
    time.sleep(0.5)
    assert getting.is_alive()
    assert store.close() == 0
    # Only now is the memory gone.
    getting.join(1)
    assert not getting.is_alive()


def test_pooled_buffers_are_used_again(store: MooncakeDistributedStore, key: str) -> None:
    with BufferPool(store, max_bytes=4 * MIB) as pool:
        with pool.acquire(MIB) as buffer:
            buffer.view()[:5] = b"hello"
            first = buffer.ptr
            assert store.put_from(key, buffer.ptr, 5) == 0
        assert store.get(key) == b"hello"
        with pool.acquire(MIB - 1) as buffer:
            assert buffer.ptr == first
            assert len(buffer.view()) == MIB - 1
        assert pool.total_bytes == MIB


def test_a_buffer_pool_keeps_to_its_limit(store: MooncakeDistributedStore) -> None:
    pool = BufferPool(store, max_bytes=2 * MIB)
    one, two = pool.acquire(MIB), pool.acquire(MIB)
    with pytest.raises(MemoryError, match="limit"):
        pool.acquire(1)
    one.release()
    one.release()
    # An idle buffer that is too small makes room for one that fits.
    two.release()
    large = pool.acquire(2 * MIB)
    assert pool.total_bytes == 2 * MIB
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.acquire(1)
    large.release()
    assert pool.total_bytes == 0
    with pytest.raises(ValueError):
        BufferPool(store, max_bytes=-1)


def test_a_thread_is_bound_to_a_node_that_is_there(caplog: pytest.LogCaptureFixture) -> None:
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
