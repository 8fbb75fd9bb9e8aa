"""Ctrl-C, and other signals, while a call waits for the pool."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import kvpool
import numpy as np
import pytest
from live_pools import LivePool

# The time that the calls would wait without a signal, and the latest end of an interrupted call. On an idle
# machine the interruption takes a tenth of a second.
LONG = 60.0
SOON = 15.0


@pytest.fixture(autouse=True)
def ctrl_c_counts() -> Iterator[None]:
    """Restores Ctrl-C: a shell starts background jobs with Ctrl-C ignored, and Python keeps that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupted(number: signal.Signals = signal.SIGINT, after: float = 0.4) -> Iterator[None]:
    """Sends this process a signal while the block runs."""
    timer = threading.Timer(after, os.kill, (os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def must_be_interrupted(call: Callable[[], object]) -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupted():
        call()
        # If the call returns codes, the exception comes directly after it.
        time.sleep(0.01)
    assert time.monotonic() - began < SOON


def connected(live: LivePool) -> kvpool.Pool:
    return kvpool.Pool.connect(live.url, put_timeout=LONG, get_timeout=LONG, control_timeout=LONG)


@pytest.fixture
def full_pool(make_pool: Callable[..., LivePool]) -> LivePool:
    """A pool without room for a put, because all its blocks are pinned."""
    live = make_pool(1, "16MiB")
    with kvpool.Pool.connect(live.url) as pool:
        while True:
            try:
                pool.put(f"pinned-{time.monotonic_ns()}", bytes(1 << 20), hard_pin=True, timeout=0.2)
            except kvpool.Error:
                return live


def test_a_put_that_waits_for_room_ends_with_ctrl_c(full_pool: LivePool) -> None:
    with connected(full_pool) as pool:
        block = bytearray(4 << 20)
        must_be_interrupted(lambda: pool.put("new", block))
        must_be_interrupted(lambda: pool.batch_put(["a", "b"], [block, block]))
        # The memory belongs to the caller again: it can be resized, which needs that no transfer uses it.
        block.clear()
        # The pool is unchanged.
        assert pool.is_exist(["new", "a"]) == [False, False]


def test_a_handler_that_raises_nothing_runs_at_once_and_the_call_goes_on(full_pool: LivePool) -> None:
    ran: list[float] = []
    before = signal.signal(signal.SIGUSR1, lambda _number, _frame: ran.append(time.monotonic()))
    try:
        with connected(full_pool) as pool, interrupted(signal.SIGUSR1):
            began = time.monotonic()
            with pytest.raises(kvpool.Error):
                pool.put("new", bytes(4 << 20), timeout=SOON)
            ended = time.monotonic()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(ran) == 1 and ran[0] - began < SOON / 2
    assert ended - began >= SOON - 1


def test_every_call_that_waits_for_the_master_ends_with_ctrl_c(own_pool: LivePool) -> None:
    with connected(own_pool) as pool:
        pool.put("known", b"bytes")
        lease = pool.match_prefix(["known"]).lease
        assert own_pool.master is not None
        calls: list[Callable[[], object]] = [
            lambda: pool.put("new", b"x"),
            lambda: pool.get("unknown"),
            lambda: pool.batch_get(["unknown"], [bytearray(1)]),
            lambda: pool.get_range("unknown", 0, 1),
            lambda: pool.get_view("unknown"),
            lambda: pool.is_exist(["known"]),
            lambda: pool.match_prefix(["known"]),
            lambda: pool.remove(["known"]),
            lambda: pool.describe(["known"]),
            lambda: pool.stats(),
            lambda: list(pool.list()),
            lambda: lease.renew(),
            lambda: kvpool.Pool.connect(own_pool.url, timeout=LONG),
        ]
        own_pool.master.hang()
        try:
            for call in calls:
                must_be_interrupted(call)
        finally:
            own_pool.master.send(signal.SIGCONT)
        assert pool.put("after", b"it works on") is True


def test_no_byte_comes_into_memory_that_an_interrupted_call_gave_back(
    make_pool: Callable[..., LivePool],
) -> None:
    """The node stops within a block, for longer than a call normally waits for its memory."""
    live = make_pool(1, "512MiB")
    # One of two attempts may take half of it, which is more than the ten seconds of grace.
    timeout = 28.0
    keys = [f"large-{number}" for number in range(4)]
    length = 64 << 20
    with kvpool.Pool.connect(live.url, transport="tcp", put_timeout=LONG) as pool:
        for key in keys:
            pool.put(key, b"\x07" * length)
        memory = np.zeros((len(keys), length), dtype="uint8")

        def stop_in_the_middle() -> None:
            while not memory[:, :: 1 << 20].any():
                time.sleep(0.0002)
            live.nodes[0].hang()
            os.kill(os.getpid(), signal.SIGINT)

        stopper = threading.Thread(target=stop_in_the_middle)
        with pytest.raises(KeyboardInterrupt):
            stopper.start()
            pool.batch_get(keys, [(part.ctypes.data, length) for part in memory], timeout=timeout)
            time.sleep(0.01)
        assert not memory.all(), "the bytes were there before the node stopped: this test shows nothing"
        memory[:] = 0
        live.nodes[0].send(signal.SIGCONT)
        time.sleep(1.0)
        assert not memory.any()


def test_other_threads_calls_go_on_when_the_main_thread_is_interrupted(full_pool: LivePool) -> None:
    with connected(full_pool) as pool:
        outcomes: list[object] = []

        def ask() -> None:
            outcomes.extend(pool.is_exist(["new"]) for _ in range(50))

        other = threading.Thread(target=ask)
        with pytest.raises(KeyboardInterrupt), interrupted():
            other.start()
            pool.put("new", bytes(4 << 20))
        other.join(LONG)
        assert outcomes == [[False]] * 50


@pytest.mark.parametrize("replicas", [0, -1, 2**32, 2**200, 1000])
def test_an_invalid_number_of_replicas_is_refused(shared_pool: LivePool, replicas: int) -> None:
    with kvpool.Pool.connect(shared_pool.url) as pool:
        key = f"replicas-{replicas % 1000}"
        for put in (
            lambda: pool.put(key, b"x", replicas=replicas),
            lambda: pool.batch_put([key], [b"x"], replicas=replicas),
        ):
            with pytest.raises(kvpool.InvalidArgumentError, match="replicas") as raised:
                put()
            assert isinstance(raised.value, ValueError)
        assert pool.is_exist([key]) == [False]
        with pytest.raises(TypeError):
            pool.put(key, b"x", replicas="1")  # type: ignore[arg-type]


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1), (2**64, 1), (0, 2**64), (2**63, 2**63)])
def test_an_invalid_range_is_refused(shared_pool: LivePool, offset: int, length: int) -> None:
    with kvpool.Pool.connect(shared_pool.url) as pool:
        pool.put("whole", b"0123456789")
        with pytest.raises(kvpool.InvalidArgumentError):
            pool.get_range("whole", offset, length)
        assert pool.get_range("whole", 1, 2) == b"12"
