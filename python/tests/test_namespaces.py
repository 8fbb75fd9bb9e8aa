"""Namespaces with quotas and limits, created, changed, watched and deleted from Python."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import kvpool
import kvpool.aio
import pytest
from live_pools import LivePool, live_pool

MIB = 1 << 20


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    with live_pool(tmp_path_factory.mktemp("pool"), 1) as pool:
        yield pool


@pytest.fixture
def pool(live: LivePool) -> Iterator[kvpool.Pool]:
    with kvpool.Pool.connect(live.url) as pool:
        yield pool
        for one in pool.namespaces():
            if one.name != "default":
                pool.delete_namespace(one.name, blocks=True)


def test_a_namespace_has_its_settings_and_counts_its_blocks(live: LivePool, pool: kvpool.Pool) -> None:
    team = kvpool.Namespace("team-a", model="llama", dtype="bf16", parallel_rank="0/2", salt="x")
    settings = {"memory_hard": 8 * MIB, "guaranteed": 2 * MIB, "priority": 7}
    assert pool.create_namespace(team, settings) is True
    assert pool.create_namespace(team) is False
    made = pool.namespace("team-a")
    assert (made.name, made.model, made.dtype, made.parallel_rank, made.salt) == ("team-a", "llama", "bf16", "0/2", "x")
    assert (made.settings, made.memory, made.blocks, made.open_puts) == (settings, 0, 0, 0)
    with kvpool.Pool.connect(live.url, namespace=team) as other:
        assert other.batch_put(["a", "b"], [bytes(MIB)] * 2) == [True, True]
    used = pool.namespace("team-a")
    assert (used.memory, used.blocks, used.copies, used.media) == (2 * MIB, 2, 0, 0)
    assert [one.name for one in pool.namespaces()] == ["default", "team-a"]
    assert "name=\"team-a\"" in repr(used)


def test_a_hard_quota_set_from_python_holds(live: LivePool, pool: kvpool.Pool) -> None:
    team = kvpool.Namespace("small")
    pool.create_namespace(team, {"memory_hard": 4 * MIB})
    with kvpool.Pool.connect(live.url, namespace=team) as other:
        for number in range(12):
            assert other.put(f"block-{number}", bytes([number]) * MIB)
            assert pool.namespace("small").memory <= 4 * MIB
        assert other.get("block-11") == bytes([11]) * MIB
        assert other.get("block-0") is None
        begun = time.monotonic()
        with pytest.raises(kvpool.InvalidArgumentError) as raised:
            other.put("larger than the quota", bytes(5 * MIB), timeout=60)
        assert time.monotonic() - begun < 30, "no time makes the quota larger"
    assert raised.value.code == "over_quota" and not raised.value.is_retryable
    assert str(5 * MIB) in str(raised.value) and str(4 * MIB) in str(raised.value)


def test_settings_change_and_end(pool: kvpool.Pool) -> None:
    pool.create_namespace(kvpool.Namespace("team-b"), {"memory_hard": 4 * MIB, "priority": 2})
    changed = pool.change_namespace("team-b", {"priority": None, "requests_per_second": 500})
    assert changed.settings == {"memory_hard": 4 * MIB, "requests_per_second": 500}
    assert pool.namespace("team-b").settings == changed.settings


def test_a_namespace_with_blocks_is_deleted_with_them_only(live: LivePool, pool: kvpool.Pool) -> None:
    with kvpool.Pool.connect(live.url, namespace=kvpool.Namespace("team-c")) as other:
        other.put("a", b"bytes")
    with pytest.raises(kvpool.Error) as raised:
        pool.delete_namespace("team-c")
    assert raised.value.code == "namespace_in_use"
    assert pool.namespace("team-c").blocks == 1
    assert pool.delete_namespace("team-c", blocks=True) == 1
    with pytest.raises(kvpool.Error) as raised:
        pool.namespace("team-c")
    assert raised.value.code == "unknown_namespace"


def test_a_namespace_that_was_made_again_has_no_block_of_the_former_one(live: LivePool) -> None:
    again = kvpool.Namespace("again")
    with kvpool.Pool.connect(live.url, namespace=again) as pool:
        pool.put("a", b"bytes")
        assert pool.get("a") == b"bytes"
        assert pool.delete_namespace(again.name, blocks=True) == 1
        pool.create_namespace(again)
        assert pool.get("a") is None
        pool.delete_namespace(again.name)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda p: p.create_namespace(kvpool.Namespace("bad"), {"memory": 1}), "invalid_argument"),
        (lambda p: p.create_namespace(kvpool.Namespace("bad"), {"priority": 10}), "invalid_argument"),
        (lambda p: p.create_namespace(kvpool.Namespace("bad"), {"priority": -1}), "invalid_argument"),
        (lambda p: p.create_namespace(kvpool.Namespace("bad"), {"priority": 1 << 70}), "invalid_argument"),
        (lambda p: p.change_namespace("nobody", {"priority": 3}), "unknown_namespace"),
        (lambda p: p.change_namespace("default", {"colour": None}), "invalid_argument"),
        (lambda p: p.delete_namespace("nobody"), "unknown_namespace"),
        (lambda p: p.delete_namespace("default"), "invalid_argument"),
    ],
)
def test_bad_arguments_change_nothing(pool: kvpool.Pool, call: Callable[[kvpool.Pool], object], code: str) -> None:
    before = [repr(one) for one in pool.namespaces()]
    with pytest.raises(kvpool.Error) as raised:
        call(pool)
    assert raised.value.code == code
    assert [repr(one) for one in pool.namespaces()] == before


def test_the_calls_have_an_async_form(live: LivePool, pool: kvpool.Pool) -> None:
    async def work() -> None:
        async with await kvpool.aio.Pool.connect(live.url) as other:
            assert await other.create_namespace(kvpool.Namespace("later"), {"priority": 1}) is True
            changed = await other.change_namespace("later", {"priority": 3})
            assert changed.settings == (await other.namespace("later")).settings == {"priority": 3}
            assert [one.name for one in await other.namespaces()] == ["default", "later"]
            assert await other.delete_namespace("later") == 0

    asyncio.run(work())
    assert [one.name for one in pool.namespaces()] == ["default"]
