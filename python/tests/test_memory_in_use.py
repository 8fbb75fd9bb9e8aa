"""A transfer still uses a call's memory long after the call has ended: no caller may take the memory for
free."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Iterator

import kvpool
import pytest
from kvpool._engines.connection import Connection
from kvpool._engines.settings import PoolSettings
from live_pools import LivePool
from stuck_memory import StuckMemory

LENGTH = 1 << 20
BLOCK = bytes(n % 251 for n in range(LENGTH))


@pytest.fixture
def memory() -> Iterator[StuckMemory]:
    memory = StuckMemory(LENGTH)
    yield memory
    memory.release()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_memory_that_a_transfer_still_uses_is_named_by_an_error_that_can_wait(
    shared_pool: LivePool, memory: StuckMemory, transport: str
) -> None:
    key = f"in use over {transport}"
    with kvpool.Pool.connect(shared_pool.url, transport=transport) as pool:
        pool.put(key, BLOCK)
        with pytest.raises(kvpool.MemoryInUseError) as raised:
            pool.batch_get([key], [(memory.address, LENGTH)], timeout=0.5)
        error = raised.value
        assert (error.code, error.is_retryable) == ("memory_in_use", False)
        assert not error.wait(0.2)
        assert not pickle.loads(pickle.dumps(error)).wait()
        memory.release()
        assert error.wait(10)
        assert error.wait()
        # No byte arrives any more, so the bytes written now stay.
        assert pool.batch_get([key], [(memory.address, LENGTH)]) == [LENGTH]
        assert memory.read() == BLOCK


def test_memory_is_unregistered_for_no_thread_before_its_transfers_have_ended(
    shared_pool: LivePool, memory: StuckMemory
) -> None:
    with kvpool.Pool.connect(shared_pool.url) as pool:
        pool.put("registered", BLOCK)
        registration = pool.register_buffer((memory.address, LENGTH))

        def get() -> None:
            with contextlib.suppress(kvpool.Error):
                pool.batch_get(["registered"], [(memory.address, LENGTH)], timeout=0.5)

        getting = threading.Thread(target=get, daemon=True)
        getting.start()
        time.sleep(0.3)
        ending = [threading.Thread(target=registration.unregister, daemon=True) for _ in range(2)]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join(0.5)
            assert thread.is_alive(), "its caller would free the memory"
        memory.release()
        for thread in [getting, *ending]:
            thread.join(10)
            assert not thread.is_alive()
        registration.unregister()
        pool.register_buffer((memory.address, LENGTH)).unregister()


def test_an_engine_gets_its_memory_back_when_no_transfer_uses_it_any_more(
    shared_pool: LivePool, memory: StuckMemory
) -> None:
    with kvpool.Pool.connect(shared_pool.url) as pool:
        pool.put("of an engine", BLOCK)
    connection = Connection(PoolSettings(master=shared_pool.url, get_timeout=0.5))
    failed = threading.Event()
    says = connection._log
    connection._log = lambda *call: (says(*call), failed.set())  # type: ignore[method-assign]
    answers: list[object] = []

    def load() -> None:
        into = [(memory.address, LENGTH)]
        answers.append(
            connection.call("loading", "computed again", lambda pool: pool.batch_get(["of an engine"], into))
        )

    thread = threading.Thread(target=load)
    thread.start()
    assert failed.wait(20)
    thread.join(0.5)
    assert not answers, "the engine would write the memory while a transfer does"
    memory.release()
    thread.join(10)
    assert answers == ["computed again"]
    assert connection.failures == 1
    connection.close()
