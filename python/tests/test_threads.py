"""Many threads, several processes, and children made by fork."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import kvpool
import pytest
from live_pools import LivePool

numpy = pytest.importorskip("numpy")


@pytest.fixture
def pool(shared_pool: LivePool) -> Iterator[kvpool.Pool]:
    with kvpool.Pool.connect(shared_pool.url) as pool:
        yield pool


def test_eight_threads_share_one_pool(pool: kvpool.Pool) -> None:
    def work(thread: int) -> int:
        rng = numpy.random.default_rng(thread)
        for round in range(20):
            keys = [f"t{thread}-{round}-{n}" for n in range(8)]
            blocks = rng.integers(0, 256, (8, 65536), dtype="uint8")
            assert pool.batch_put(keys, list(blocks)) == [True] * 8
            back = numpy.zeros_like(blocks)
            assert pool.batch_get(keys, list(back)) == [65536] * 8
            assert (back == blocks).all()
            assert pool.is_exist(keys) == [True] * 8
            with pool.match_prefix(keys) as prefix:
                assert prefix.blocks == 8
            assert pool.get(keys[0]) == blocks[0].tobytes()
            with pool.get_view(keys[1]) as view:
                assert bytes(view) == blocks[1].tobytes()
            assert pool.remove(keys[2:], force=True) == [True] * 6
        return thread

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == list(range(8))


def test_a_pool_closed_under_threads_ends_them_with_closed_errors(shared_pool: LivePool) -> None:
    pool = kvpool.Pool.connect(shared_pool.url)
    ends: list[BaseException] = []

    def work() -> None:
        try:
            for n in itertools.count():
                pool.batch_put([f"closing-{n}"], [b"x" * 1000])
                pool.get(f"closing-{n}")
        except BaseException as error:
            ends.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    pool.close()
    for thread in threads:
        thread.join(10)
    assert [type(end) for end in ends] == [kvpool.ClosedError] * 4


OTHER = """
import sys, kvpool
with kvpool.Pool.connect(sys.argv[1]) as pool:
    target = bytearray(1 << 20)
    assert pool.batch_get(["from-parent"], [target]) == [1 << 20]
    assert target == bytes([7]) * (1 << 20)
    with pool.get_view("from-parent") as view:
        assert bytes(view) == target
    pool.put("from-child", bytes(reversed(range(256))))
"""


ENDING = """
import os, signal, sys, threading, time, kvpool
pool = kvpool.Pool.connect(sys.argv[1], control_timeout=1.0)
pool.put("ending", b"bytes")
seen = memoryview(pool.get_view("ending"))
lease = pool.match_prefix(["ending"]).lease
os.kill(int(sys.argv[2]), signal.SIGSTOP)
threading.Thread(target=pool.is_exist, args=(["ending"],), daemon=True).start()
time.sleep(0.2)
"""


def test_a_process_may_end_with_a_pool_open_and_a_call_under_way(own_pool: LivePool) -> None:
    assert own_pool.master is not None
    master = str(own_pool.master.process.pid)
    command = [sys.executable, "-c", ENDING, own_pool.url, master]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def runs_python_while_the_last_call_ends_the_pool(pool: kvpool.Pool) -> bool:
    """Closes the pool during a get of another thread, which then ends the connection. Returns whether this
    thread has run Python code between the end of the get's work and its return."""
    target = bytearray(1000)
    ended: list[object] = []

    def get() -> None:
        ended.append(pool.batch_get(["closed under"], [target], timeout=0.3))

    getting = threading.Thread(target=get)
    getting.start()
    time.sleep(0.1)
    pool.close()
    has_run = False
    while not ended and not has_run:
        try:
            # Fails while the get has the buffer. It gives the buffer back before it ends the connection.
            target.append(0)
        except BufferError:
            time.sleep(1e-5)
        else:
            has_run = not ended
    getting.join(10)
    return has_run


def test_other_threads_run_while_the_last_call_of_a_closed_pool_ends_it(own_pool: LivePool) -> None:
    with kvpool.Pool.connect(own_pool.url) as pool:
        pool.put("closed under", bytes(1000))
    own_pool.nodes[0].hang()
    interval = sys.getswitchinterval()
    # No thread loses the interpreter's lock before it releases the lock itself.
    sys.setswitchinterval(30)
    try:
        # The client still connects to the node after the get's timeout, so its end takes 0.1 s.
        assert any(
            runs_python_while_the_last_call_ends_the_pool(
                kvpool.Pool.connect(own_pool.url, transport="tcp")
            )
            for _ in range(3)
        )
    finally:
        sys.setswitchinterval(interval)


def test_two_processes_share_blocks(pool: kvpool.Pool, shared_pool: LivePool) -> None:
    pool.put("from-parent", bytes([7]) * (1 << 20))
    subprocess.run([sys.executable, "-c", OTHER, shared_pool.url], check=True, timeout=60)
    assert pool.get("from-child") == bytes(reversed(range(256)))


def test_other_threads_run_while_a_call_waits(own_pool: LivePool) -> None:
    with kvpool.Pool.connect(own_pool.url, control_timeout=1.0) as pool:
        assert own_pool.master is not None
        own_pool.master.send(signal.SIGSTOP)
        done = threading.Event()

        def ask() -> None:
            with pytest.raises(kvpool.Error):
                pool.is_exist(["a"])
            done.set()

        asking = threading.Thread(target=ask)
        asking.start()
        began, longest, last = time.monotonic(), 0.0, time.monotonic()
        while not done.is_set():
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        waited = time.monotonic() - began
        asking.join()
        # With the lock held, the counting thread would have stood still during the whole call.
        assert waited > 0.8 and longest < waited / 2


def test_a_lease_that_is_released_during_its_renewal_is_given_back(own_pool: LivePool) -> None:
    with kvpool.Pool.connect(own_pool.url) as pool:
        pool.put("leased", b"bytes")
        lease = pool.match_prefix(["leased"]).lease
        assert own_pool.master is not None
        own_pool.master.hang()
        raised: list[BaseException] = []

        def renew() -> None:
            try:
                lease.renew()
            except kvpool.Error as error:
                raised.append(error)

        renewing = threading.Thread(target=renew)
        renewing.start()
        time.sleep(0.3)
        assert len(lease) == 1 and lease.left > 0
        lease.release()
        assert (len(lease), lease.left) == (0, 0)
        own_pool.master.send(signal.SIGCONT)
        renewing.join(10)
        (error,) = raised
        assert isinstance(error, kvpool.ClosedError)
        (listed,) = pool.list()
        assert not listed.leased


def in_a_child(work: Callable[[], None]) -> int:
    """Runs `work` in a child made by fork. Returns its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            # The child ends without the handlers that the parent registered for its own end.
            os._exit(code)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def test_a_child_made_by_fork_uses_nothing_of_its_parents(
    pool: kvpool.Pool, shared_pool: LivePool
) -> None:
    pool.put("forked", b"bytes")
    view = pool.get_view("forked")
    prefix = pool.match_prefix(["forked"])
    listing = pool.list()
    registration = pool.register_buffer(bytearray(100))

    def child() -> None:
        calls: list[Callable[[], object]] = [
            lambda: pool.get("forked"),
            lambda: pool.batch_get(["forked"], [bytearray(5)]),
            lambda: pool.is_exist(["forked"]),
            lambda: pool.stats(),
            lambda: pool.limits,
            lambda: pool.register_buffer(bytearray(1)),
            lambda: memoryview(view),
            lambda: next(listing),
            prefix.lease.renew,
            prefix.lease.release,
            lambda: prefix.lease.left,
            view.release,
            registration.unregister,
        ]
        for call in calls:
            with pytest.raises(kvpool.ForkedError) as raised:
                call()
            assert raised.value.code == "forked"
        assert pool.closed
        pool.close()
        # The child's memory has the locks of the parent's threads: an error is better than an abort.
        with pytest.raises(kvpool.ForkedError, match="had connections"):
            kvpool.Pool.connect(shared_pool.url)

    assert in_a_child(child) == 0
    assert bytes(view) == b"bytes"
    assert pool.get("forked") == b"bytes"
    assert prefix.lease.renew() == 0


def test_a_child_that_drops_inherited_objects_disturbs_no_other_process(
    shared_pool: LivePool,
) -> None:
    pool = kvpool.Pool.connect(shared_pool.url)
    pool.put("dropped", b"bytes")
    held = [pool, pool.get_view("dropped"), pool.match_prefix(["dropped"]), pool.list()]

    def child() -> None:
        nonlocal pool
        del pool
        held.clear()

    assert in_a_child(child) == 0
    assert bytes(held[1]) == b"bytes" == pool.get("dropped")
    pool.close()
