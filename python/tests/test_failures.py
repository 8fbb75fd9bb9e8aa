"""The errors of callers when processes of the pool die or hang."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable

import kvpool
import pytest
from live_pools import LivePool

MIB = 1 << 20


def test_connecting_to_an_absent_master_ends_by_its_timeout(make_pool: Callable[..., LivePool]) -> None:
    live = make_pool(0)
    assert live.master is not None
    live.master.kill()
    began = time.monotonic()
    with pytest.raises(kvpool.ConnectError) as raised:
        kvpool.Pool.connect(live.url, timeout=0.5)
    assert time.monotonic() - began < 3
    assert isinstance(raised.value, ConnectionError) and raised.value.is_retryable


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_calls_end_by_their_deadline_when_the_master_is_gone(
    own_pool: LivePool, how: signal.Signals
) -> None:
    times = {"control_timeout": 0.5, "put_timeout": 0.5, "get_timeout": 0.5}
    with kvpool.Pool.connect(own_pool.url, **times) as pool:
        pool.put("known", b"bytes")
        assert own_pool.master is not None
        own_pool.master.send(how)
        time.sleep(0.1)
        calls: list[Callable[[], object]] = [
            lambda: pool.put("new", b"x"),
            lambda: pool.get("unknown"),
            lambda: pool.get_range("unknown", 0, 1),
            lambda: pool.get_view("unknown"),
            lambda: pool.is_exist(["known"]),
            lambda: pool.match_prefix(["known"]),
            lambda: pool.remove(["known"]),
            lambda: pool.describe(["known"]),
            lambda: pool.stats(),
            lambda: list(pool.list()),
        ]
        for call in calls:
            began = time.monotonic()
            with pytest.raises(kvpool.Error) as raised:
                call()
            assert time.monotonic() - began < 2.5
            assert raised.value.is_retryable
            assert isinstance(raised.value, (kvpool.UnreachableError, kvpool.DeadlineError))
        (outcome,) = pool.batch_get(["unknown"], [bytearray(1)])
        assert isinstance(outcome, kvpool.Error)


def test_a_dead_node_fails_its_own_blocks_only(make_pool: Callable[..., LivePool]) -> None:
    live = make_pool(2)
    with kvpool.Pool.connect(live.url) as pool:
        keys = [f"b-{n}" for n in range(8)]
        for n, key in enumerate(keys):
            assert pool.put(key, bytes([n]) * 1000, preferred_node=f"node-{n % 2}") is True
        nodes = [described.replicas[0].node for described in pool.describe(keys) if described]
        assert nodes == ["node-0", "node-1"] * 4
        live.nodes[1].kill()
        into = [bytearray(1000) for _ in keys]
        began = time.monotonic()
        found = pool.batch_get(keys, into, timeout=2.0)
        assert time.monotonic() - began < 4
        for n, outcome in enumerate(found):
            if n % 2 == 0:
                assert outcome == 1000 and into[n] == bytes([n]) * 1000
            else:
                assert outcome is None or isinstance(outcome, kvpool.Error)
        assert pool.put("after", b"x", preferred_node="node-1", timeout=5.0) is True


def test_a_replica_answers_for_a_dead_node(make_pool: Callable[..., LivePool]) -> None:
    live = make_pool(2)
    with kvpool.Pool.connect(live.url) as pool:
        pool.put("twice", b"bytes", replicas=2)
        (described,) = pool.describe(["twice"])
        assert described is not None and len(described.replicas) == 2
        live.nodes[0].kill()
        assert pool.get("twice", timeout=5.0) == b"bytes"


def test_memory_is_not_touched_after_a_call_that_timed_out(own_pool: LivePool) -> None:
    size = 64 * MIB
    source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    source[:] = os.urandom(size)
    with kvpool.Pool.connect(own_pool.url, transport="tcp") as pool:
        assert pool.put("large", source) is True
        node = own_pool.nodes[0]
        touched_after = 0
        for attempt in range(12):
            target[:] = bytes(size)
            stopping = threading.Timer(0.001 * attempt, node.send, (signal.SIGSTOP,))
            stopping.start()
            (outcome,) = pool.batch_get(["large"], [target], timeout=0.5)
            stopping.join()
            before = bytes(target)
            touched_after += outcome != size and any(before)
            target[:] = b"\xaa" * size
            node.send(signal.SIGCONT)
            time.sleep(0.3)
            assert target[:] == b"\xaa" * size
        # The node was stopped within a transfer at least once, or the test shows nothing.
        assert touched_after > 0
        assert pool.get("large", timeout=10.0) == source[:]


def test_memory_may_be_unmapped_after_a_call_that_timed_out(own_pool: LivePool) -> None:
    size = 32 * MIB
    with kvpool.Pool.connect(own_pool.url, transport="tcp") as pool:
        pool.put("large", bytes(size))
        own_pool.nodes[0].hang()
        target = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(target))
        (outcome,) = pool.batch_get(["large"], [(address, size)], timeout=0.5)
        assert isinstance(outcome, kvpool.DeadlineError) and isinstance(outcome, TimeoutError)
        target.close()
        own_pool.nodes[0].send(signal.SIGCONT)
        time.sleep(0.5)
        assert pool.get("large", timeout=10.0) == bytes(size)


def test_an_interrupt_is_raised_when_the_call_under_way_has_ended(own_pool: LivePool) -> None:
    with kvpool.Pool.connect(own_pool.url, control_timeout=1.0) as pool:
        assert own_pool.master is not None
        own_pool.master.send(signal.SIGSTOP)
        # A process in the background of a shell ignores this signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            interrupting = threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,))
            interrupting.start()
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                pool.is_exist(["a"])
            assert time.monotonic() - began < 3
            interrupting.join()
        finally:
            signal.signal(signal.SIGINT, before)


def test_errors_can_be_sent_to_other_processes(own_pool: LivePool) -> None:
    import copy
    import pickle

    with kvpool.Pool.connect(own_pool.url) as pool:
        (error,) = pool.batch_put([""], [b"x"])
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(same) is type(error) is kvpool.InvalidArgumentError
        assert (str(same), same.code) == (str(error), error.code)
