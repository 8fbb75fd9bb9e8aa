"""Views: blocks read in place, and how long they stay."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import kvpool
import pytest
from live_pools import LivePool

MIB = 1 << 20
numpy = pytest.importorskip("numpy")


@pytest.fixture
def pool(shared_pool: LivePool) -> Iterator[kvpool.Pool]:
    with kvpool.Pool.connect(shared_pool.url) as pool:
        yield pool


def test_a_view_is_the_block_in_place_and_read_only(pool: kvpool.Pool) -> None:
    block = numpy.arange(MIB // 4, dtype="uint32")
    pool.put("view", block)
    before = pool.counters()
    with pool.get_view("view") as view:
        assert (len(view), view.version > 0, view.released) == (MIB, True, False)
        seen = numpy.frombuffer(view, "uint32")
        assert (seen == block).all()
        memory = memoryview(view)
        assert (memory.readonly, memory.nbytes, memory.contiguous) == (True, MIB, True)
        assert bytes(view) == block.tobytes()
        with pytest.raises((ValueError, TypeError)):
            seen[0] = 1
        with pytest.raises(TypeError):
            memory[0] = 1
        with pytest.raises(BufferError, match="2 buffers"):
            view.release()
        again = pool.get_view("view", verify=False)
        assert numpy.frombuffer(again, "uint32").ctypes.data == seen.ctypes.data
        del seen
        memory.release()
    after = pool.counters()
    assert after["views"] - before["views"] == 2
    # The block was verified once and never copied.
    assert after["shm_read_bytes"] - before["shm_read_bytes"] == MIB
    assert view.released
    view.release()
    with pytest.raises(kvpool.ClosedError):
        memoryview(view)


def test_a_view_can_be_put_again(pool: kvpool.Pool) -> None:
    pool.put("source", b"some bytes")
    with pool.get_view("source") as view:
        assert pool.put("copy", view) is True
        (failed,) = pool.batch_get(["source"], [view])
        assert isinstance(failed, kvpool.InvalidArgumentError)
    assert pool.get("copy") == b"some bytes"


def test_views_stay_byte_exact_while_the_pool_is_filled_over_and_after_it_is_closed(
    make_pool: Callable[..., LivePool],
) -> None:
    live = make_pool(1, "64MiB")
    pool = kvpool.Pool.connect(live.url)
    blocks = [numpy.full(MIB, n, "uint8") for n in range(8)]
    keys = [f"kept-{n}" for n in range(8)]
    assert pool.batch_put(keys, blocks) == [True] * 8
    views = [pool.get_view(key) for key in keys]
    arrays = [numpy.frombuffer(view, "uint8") for view in views]
    pool.remove(keys, force=True)
    for round in range(4):
        fresh = [f"fill-{round}-{n}" for n in range(48)]
        outcomes = pool.batch_put(fresh, [numpy.full(MIB, 200 + round, "uint8")] * 48)
        assert True in outcomes
    assert live.kvctl("status")
    assert pool.is_exist(keys) == [False] * 8
    pool.close()
    with kvpool.Pool.connect(live.url) as other:
        other.batch_put([f"last-{n}" for n in range(48)], [numpy.full(MIB, 99, "uint8")] * 48)
        for array, block in zip(arrays, blocks):
            assert (array == block).all()
        del array, arrays
        for view in views:
            view.release()
        assert all(view.released for view in views)


def test_a_view_without_references_releases_its_memory(
    make_pool: Callable[..., LivePool],
) -> None:
    live = make_pool(1, "16MiB")
    with kvpool.Pool.connect(live.url) as pool:
        for n in range(40):
            assert pool.put(f"block-{n}", bytes(2 * MIB), timeout=10.0) is True
            array = numpy.frombuffer(pool.get_view(f"block-{n}"), "uint8")
            assert not array.any()
            del array
            gc.collect()


def test_a_block_out_of_reach_has_no_view(shared_pool: LivePool) -> None:
    with kvpool.Pool.connect(shared_pool.url, transport="tcp") as pool:
        pool.put("remote", b"bytes")
        with pytest.raises(kvpool.UnreachableError):
            pool.get_view("remote", timeout=1.0)
