"""Transfers that use memory for longer than their calls may take: no caller may take the memory for free."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from live_pools import MIB, LivePool
from mooncake.store import BufferPool, MooncakeDistributedStore
from stuck_memory import StuckMemory


@pytest.fixture
def memory() -> Iterator[StuckMemory]:
    memory = StuckMemory(MIB)
    yield memory
    memory.release()


@pytest.fixture
def impatient(shared_pool: LivePool) -> Iterator[MooncakeDistributedStore]:
    """A store whose gets and puts may take half a second."""
    store = MooncakeDistributedStore()
    times = {"get_timeout_ms": 500, "put_timeout_ms": 500}
    settings = {"global_segment_size": 0, "master_server_addr": shared_pool.url, **times}
    assert store.setup(settings) == 0
    yield store
    store.close()


class Call(threading.Thread):
    """A call in a thread of its own, with its answer."""

    def __init__(self, call: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.answer: int | None = None
        self.start()

    def run(self) -> None:
        self.answer = self._call()


def test_a_call_ends_when_no_transfer_uses_its_memory(
    impatient: MooncakeDistributedStore, memory: StuckMemory, key: str
) -> None:
    assert impatient.put(key, b"x" * MIB) == 0
    getting = Call(lambda: impatient.get_into(key, memory.address, MIB))
    # Calls wait silently for 10 s after their deadline.
    getting.join(12)
    assert getting.is_alive(), "its caller would use the memory again"
    memory.release()
    getting.join(10)
    assert getting.answer is not None and getting.answer < 0
    assert impatient.get_into(key, memory.address, MIB) == MIB


def test_memory_that_was_registered_twice_is_unregistered_when_no_transfer_uses_it(
    impatient: MooncakeDistributedStore, memory: StuckMemory, key: str
) -> None:
    assert impatient.put(key, b"x" * MIB) == 0
    assert impatient.register_buffer(memory.address, MIB) == 0
    getting = Call(lambda: impatient.get_into(key, memory.address, MIB))
    time.sleep(0.3)
    assert impatient.register_buffer(memory.address, MIB) == 0
    # Both threads wait, whichever comes first.
    endings = [Call(lambda: impatient.unregister_buffer(memory.address)) for _ in range(2)]
    for ending in endings:
        ending.join(1)
        assert ending.is_alive(), "its caller would free the memory"
    memory.release()
    for ending in endings:
        ending.join(10)
        assert ending.answer == 0
    getting.join(10)
    assert not getting.is_alive()
    assert impatient.unregister_buffer(memory.address) == -600


def test_a_closing_store_names_the_memory_in_use(
    impatient: MooncakeDistributedStore, memory: StuckMemory, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert impatient.put(key, b"x" * MIB) == 0
    assert impatient.register_buffer(memory.address, MIB) == 0
    getting = Call(lambda: impatient.get_into(key, memory.address, MIB))
    time.sleep(0.3)
    assert impatient.close() == -800
    assert f"{memory.address:#x}" in caplog.text
    memory.release()
    getting.join(10)
    assert not getting.is_alive()


def test_a_buffer_pool_keeps_memory_that_was_used_when_its_store_was_closed(
    impatient: MooncakeDistributedStore, key: str
) -> None:
    pool = BufferPool(impatient)
    with pool.acquire(MIB) as lease:
        address = lease.ptr
    # The test above shows that `close` notes this memory.
    impatient._in_use.add(address)
    assert impatient.close() == 0
    pool.close()
    ctypes.memset(address, 1, MIB)
