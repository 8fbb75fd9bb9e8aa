"""Threads, processes, forks and asyncio."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mooncake.store import MooncakeDistributedStore, MooncakeDistributedStoreAsync
from lent_memory import Memory
from live_pools import MIB, LivePool

Connect = Callable[[LivePool], MooncakeDistributedStore]


def test_eight_threads_share_a_store(store: MooncakeDistributedStore, key: str, memory: type[Memory]) -> None:
    def work(thread: int) -> None:
        for turn in range(20):
            name = f"{key}-{thread}-{turn}"
            value = os.urandom(10_000 + turn)
            target = memory(20_000)
            assert store.put(name, value) == 0
            assert store.batch_is_exist([name, f"{name}-none"]) == [1, 0]
            assert store.batch_get_into([name], [target.ptr], [target.size]) == [len(value)]
            assert bytes(target)[: len(value)] == value
            assert store.get(name) == value
            handle = store.get_buffer(name)
            assert handle is not None and bytes(handle) == value
            assert store.remove(name, force=True) == 0

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, thread) for thread in range(8)]:
            done.result()


def test_eight_threads_that_put_one_key_leave_one_value(store: MooncakeDistributedStore, key: str) -> None:
    values = [bytes([thread]) * MIB for thread in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda value: store.put(key, value), values)) == [0] * 8
    assert store.get(key) in values


def test_other_threads_run_while_a_call_waits(connect: Connect, own_pool: LivePool) -> None:
    store = connect(own_pool)
    assert own_pool.master
    own_pool.master.kill()
    turns = 0
    waiting = threading.Thread(target=store.is_exist, args=("k",))
    waiting.start()
    while waiting.is_alive():
        turns += 1
        time.sleep(0.01)
    assert turns > 20


def test_a_store_may_be_closed_while_threads_use_it(
    connect: Connect, shared_pool: LivePool, key: str
) -> None:
    store = connect(shared_pool)
    assert store.put(key, b"x" * MIB) == 0

    def work() -> None:
        for _ in range(200):
            assert store.get(key) in (b"x" * MIB, b"")
            assert store.is_exist(key) in (1, -600)

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(work) for _ in range(4)]
        time.sleep(0.05)
        assert store.close() == 0
        for done in running:
            done.result()
    assert store.get(key) == b""


OTHER_PROCESS = """
import sys
from mooncake.store import MooncakeDistributedStore

url, key = sys.argv[1:]
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", url) == 0
assert store.put(key, key.encode() * 1000) == 0
assert store.get(f"{key}-back") == b"from the parent"
assert store.close() == 0
"""


def test_two_processes_see_each_others_objects(
    store: MooncakeDistributedStore, shared_pool: LivePool, key: str
) -> None:
    assert store.put(f"{key}-back", b"from the parent") == 0
    run = [sys.executable, "-c", OTHER_PROCESS, shared_pool.url, key]
    done = subprocess.run(run, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert store.get(key) == key.encode() * 1000


FORKING = """
import gc, os, sys
from mooncake.store import MooncakeDistributedStore

def setup():
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", "16MB", 0, "tcp", "", sys.argv[1]) == 0
    return store

store = setup()
assert store.put("forked", b"parent") == 0
assert store.batch_get_session_start(["forked"]) == [0]
handle = store.get_buffer("forked")
assert handle.in_place
child = os.fork()
if child == 0:
    calls = lambda: store.get("forked"), lambda: store.is_exist("forked"), store.close, store.remove_all
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            assert "fork" in str(error), error
        else:
            sys.exit("a store was used in a fork")
    try:
        bytes(handle)
    except BufferError:
        assert handle.ptr() == 0
    else:
        sys.exit("a buffer was read in a fork")
    # What the parent made is left alone as the child ends.
    del store, handle
    gc.collect()
    try:
        setup()
    except RuntimeError as error:
        assert "fork" in str(error), error
    else:
        sys.exit("a store was set up in the fork of a process that had one")
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert bytes(handle) == b"parent"
assert store.get("forked") == b"parent"
assert store.remove("forked") == -706
del handle
assert store.close() == 0

# Once it has none, its children may have stores of their own.
child = os.fork()
if child == 0:
    own = setup()
    assert own.put("child", b"x") == 0 and own.get("child") == b"x"
    assert own.close() == 0
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_store_in_a_fork_raises_and_the_parents_store_works_on(shared_pool: LivePool) -> None:
    run = [sys.executable, "-c", FORKING, shared_pool.url]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_process_may_end_with_a_store_and_a_segment_open(shared_pool: LivePool) -> None:
    code = (
        "import sys; from mooncake.store import *; s = MooncakeDistributedStore(); "
        "assert s.setup('localhost', '', '16MB', 0, 'tcp', '', sys.argv[1]) == 0; "
        "assert s.put('left', b'x') == 0; h = s.get_buffer('left')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, shared_pool.url], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_every_method_has_a_form_to_be_awaited(shared_pool: LivePool, key: str) -> None:
    async def work() -> None:
        store = MooncakeDistributedStoreAsync()
        config = {"global_segment_size": 0, "master_server_addr": shared_pool.url}
        assert await store.async_setup(config) == 0
        keys = [f"{key}-{n}" for n in range(8)]
        puts = [store.async_put(name, name.encode() * 100) for name in keys]
        assert await asyncio.gather(*puts) == [0] * 8
        assert await store.async_batch_is_exist([*keys, "none"]) == [1] * 8 + [0]
        gets = await asyncio.gather(*[store.async_get(name) for name in keys])
        assert gets == [name.encode() * 100 for name in keys]
        assert store.get(keys[0]) == gets[0]
        assert not hasattr(store, "async_nothing") and not hasattr(store, "nothing")
        assert await store.async_close() == 0

    asyncio.run(work())


def test_the_loop_runs_on_while_an_awaited_call_waits(own_pool: LivePool) -> None:
    async def work() -> int:
        store = MooncakeDistributedStoreAsync()
        assert await store.async_setup({"global_segment_size": 0, "master_server_addr": own_pool.url}) == 0
        assert own_pool.master
        own_pool.master.kill()
        asking = asyncio.create_task(store.async_is_exist("k"))
        turns = 0
        while not asking.done():
            turns += 1
            await asyncio.sleep(0.01)
        assert await asking < 0
        await store.async_close()
        return turns

    assert asyncio.run(work()) > 20
