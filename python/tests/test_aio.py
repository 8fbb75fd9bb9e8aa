"""The pool with `async def`."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import kvpool
import kvpool.aio
import pytest
from live_pools import LivePool


def test_every_method_answers_as_without_async(shared_pool: LivePool) -> None:
    async def work() -> None:
        namespace = kvpool.Namespace("aio")
        async with await kvpool.aio.Pool.connect(shared_pool.url, namespace=namespace) as pool:
            assert await pool.batch_put(["a", "b", ""], [b"one", b"two", b"x"]) != []
            assert await pool.put("c", b"three") is True
            into = [bytearray(3), bytearray(3)]
            assert await pool.batch_get(["a", "absent"], into) == [3, None]
            assert into[0] == b"one"
            assert await pool.get("c") == b"three"
            assert await pool.get_range("c", 1, 2) == b"hr"
            assert await pool.is_exist(["a", "z"]) == [True, False]
            async with await pool.match_prefix(["a", "b", "z"]) as prefix:
                assert (prefix.blocks, len(prefix.lease)) == (2, 2)
                assert prefix.lease.left > 0 and await prefix.lease.renew() == 0
            view = await pool.get_view("b")
            assert view is not None and bytes(view) == b"two"
            (await pool.register_buffer(bytearray(10))).unregister()
            assert [listed.key async for listed in pool.list("^[ab]$")] != []
            assert (await pool.describe(["c"]))[0] is not None
            assert (await pool.stats()).blocks >= 3
            assert pool.counters()["puts_stored"] == 3 and pool.limits.max_block > 0
            assert await pool.remove(["a"], force=True) == [True]
            assert await pool.remove_matching("^b$", force=True) == (1, 0)
            assert await pool.remove_all(force=True) == (1, 0)
        assert pool.closed
        with pytest.raises(kvpool.ClosedError):
            await pool.get("a")
        await pool.close()

    asyncio.run(work())


def test_a_pool_is_closed_on_another_thread_than_the_loops(shared_pool: LivePool) -> None:
    class Noting:
        """A pool that notes the thread which closes it."""

        def __init__(self) -> None:
            self.pool = kvpool.Pool.connect(shared_pool.url)
            self.closed_by: list[int] = []

        def close(self) -> None:
            self.closed_by.append(threading.get_ident())
            self.pool.close()

        def get(self, key: str, *, timeout: float | None) -> bytes | None:
            return self.pool.get(key, timeout=timeout)

    async def work() -> None:
        noting = Noting()
        pool = kvpool.aio.Pool(noting)  # type: ignore[arg-type]
        await pool.close()
        assert noting.pool.closed and threading.get_ident() not in noting.closed_by
        with pytest.raises(kvpool.ClosedError):
            await pool.get("a")
        await pool.close()

    asyncio.run(work())


def test_calls_run_at_the_same_time(shared_pool: LivePool) -> None:
    async def work() -> None:
        async with await kvpool.aio.Pool.connect(shared_pool.url, threads=16) as pool:
            keys = [f"many-{n}" for n in range(100)]
            puts = [pool.put(key, key.encode()) for key in keys]
            assert await asyncio.gather(*puts) == [True] * 100
            gets = [pool.get(key) for key in keys]
            assert await asyncio.gather(*gets) == [key.encode() for key in keys]

    asyncio.run(work())


def test_the_loop_runs_while_a_call_waits_and_a_plain_one_is_cancelled_at_once(
    own_pool: LivePool,
) -> None:
    async def work() -> None:
        connecting = kvpool.aio.Pool.connect(own_pool.url, control_timeout=1.0)
        async with await connecting as pool:
            assert own_pool.master is not None
            own_pool.master.send(signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.is_exist(["a"]), 0.1)
            assert time.monotonic() - began < 0.8
            own_pool.master.send(signal.SIGCONT)

    asyncio.run(work())


def test_a_cancelled_get_ends_when_its_memory_is_the_callers_again(own_pool: LivePool) -> None:
    size = 32 << 20

    async def work() -> None:
        async with await kvpool.aio.Pool.connect(own_pool.url, transport="tcp") as pool:
            await pool.put("large", b"\x55" * size)
            own_pool.nodes[0].hang()
            target = bytearray(size)
            began = time.monotonic()
            getting = asyncio.create_task(pool.batch_get(["large"], [target], timeout=1.0))
            await asyncio.sleep(0.2)
            getting.cancel()
            await asyncio.sleep(0.1)
            # A second cancellation must not release memory that a transfer may write.
            getting.cancel()
            assert not getting.done()
            with pytest.raises(asyncio.CancelledError):
                await getting
            assert 0.5 < time.monotonic() - began < 3.0
            # The buffer can be resized, so nothing holds it. No transfer writes into it either.
            target[:] = b"\xaa" * size
            target.extend(b"\xaa")
            own_pool.nodes[0].send(signal.SIGCONT)
            await asyncio.sleep(0.3)
            assert target == b"\xaa" * (size + 1)

    asyncio.run(work())


def test_a_call_that_has_not_begun_never_does(own_pool: LivePool) -> None:
    async def work() -> None:
        connecting = kvpool.aio.Pool.connect(own_pool.url, threads=1, put_timeout=1.0)
        async with await connecting as pool:
            assert own_pool.master is not None
            own_pool.master.send(signal.SIGSTOP)
            first = asyncio.create_task(pool.put("first", b"x"))
            second = asyncio.create_task(pool.put("second", b"x", timeout=10.0))
            await asyncio.sleep(0.1)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            own_pool.master.send(signal.SIGCONT)
            await asyncio.wait((first,))
            assert await pool.is_exist(["second"]) == [False]

    asyncio.run(work())
