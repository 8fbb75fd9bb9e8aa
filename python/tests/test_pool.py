"""Every method of the pool and its results, with a live pool."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import time
from collections.abc import Iterator

import kvpool
import pytest
from live_pools import LivePool

MIB = 1 << 20

_names = itertools.count()


@pytest.fixture
def pool(shared_pool: LivePool) -> Iterator[kvpool.Pool]:
    """A connection in a namespace of its own."""
    namespace = kvpool.Namespace(f"test-pool-{next(_names)}")
    with kvpool.Pool.connect(shared_pool.url, namespace=namespace) as pool:
        yield pool


def test_a_put_returns_whether_it_stored_or_found_the_block(pool: kvpool.Pool) -> None:
    assert pool.put("a", b"first") is True
    assert pool.put("a", b"other") is False
    assert pool.get("a") == b"first"


def test_an_upsert_writes_a_new_version(pool: kvpool.Pool) -> None:
    pool.put("a", b"first")
    before = pool.describe(["a"])[0]
    assert pool.put("a", b"second, longer", upsert=True) is True
    assert pool.get("a") == b"second, longer"
    after = pool.describe(["a"])[0]
    assert before is not None and after is not None
    assert (after.length, after.version > before.version) == (14, True)


def test_a_repeated_key_of_an_upsert_is_stored_each_time(pool: kvpool.Pool) -> None:
    assert pool.batch_put(["a", "a"], [b"aaa", b"bbb"], upsert=True) == [True, True]
    assert pool.get("a") == b"bbb"


def test_a_block_whose_buffers_overlap_is_refused(pool: kvpool.Pool) -> None:
    block = bytes(range(100))
    pool.put("a", block)
    memory, other = bytearray(100), bytearray(100)
    parts = [memoryview(memory)[:60], memoryview(memory)[40:]]
    refused, found = pool.batch_get(["a", "a"], [parts, [memoryview(other)[:60], memoryview(other)[60:]]])
    assert isinstance(refused, kvpool.InvalidArgumentError) and "overlap" in str(refused)
    assert found == 100 and other == block and not any(memory)


def test_a_miss_is_a_value(pool: kvpool.Pool) -> None:
    assert pool.get("absent") is None
    assert pool.get_range("absent", 0, 1) is None
    assert pool.get_view("absent") is None
    assert pool.batch_get(["absent"], [bytearray(8)]) == [None]
    assert pool.is_exist(["absent"]) == [False]
    assert pool.describe(["absent"]) == [None]
    assert pool.remove(["absent"]) == [False]
    assert pool.match_prefix(["absent"]).blocks == 0


def test_a_batch_answers_each_key_in_order(pool: kvpool.Pool) -> None:
    blocks = [bytes([n]) * (n + 1) for n in range(40)]
    keys = [f"block-{n}" for n in range(40)]
    assert pool.batch_put(keys, blocks) == [True] * 40
    assert pool.batch_put([*keys[:2], "new"], [b"x"] * 3) == [False, False, True]
    into = [bytearray(64) for _ in range(41)]
    lengths = pool.batch_get([*keys, "absent"], into)
    assert lengths == [*range(1, 41), None]
    assert all(target[: len(block)] == block for target, block in zip(into, blocks))
    assert all(not any(target[len(block) :]) for target, block in zip(into, blocks))


def test_empty_batches_are_answered(pool: kvpool.Pool) -> None:
    assert pool.batch_put([], []) == []
    assert pool.batch_get([], []) == []
    assert pool.is_exist([]) == []
    assert pool.describe([]) == []
    assert pool.remove([]) == []
    prefix = pool.match_prefix([])
    assert (prefix.blocks, len(prefix.lease)) == (0, 0)


def test_duplicates_of_a_key_are_each_served(pool: kvpool.Pool) -> None:
    assert pool.batch_put(["twin", "twin"], [b"one", b"two"]) == [True, False]
    into = [bytearray(3), bytearray(3)]
    assert pool.batch_get(["twin", "twin"], into) == [3, 3]
    assert into == [b"one", b"one"]


def test_one_bad_key_never_fails_its_neighbours(pool: kvpool.Pool) -> None:
    keys: list[str | bytes] = ["good", "", "x" * 1025, b"short", "\ud800", "fine"]
    outcomes = pool.batch_put(keys, [b"bytes"] * 6)
    assert [outcomes[0], outcomes[5]] == [True, True]
    into = [bytearray(5) for _ in keys]
    found = pool.batch_get(keys, into)
    assert [found[0], found[5]] == [5, 5]
    for outcome in [*outcomes[1:5], *found[1:5], *pool.remove(keys)[1:5]]:
        assert isinstance(outcome, kvpool.InvalidArgumentError)
        assert (outcome.code, outcome.is_retryable) == ("invalid_argument", False)


def test_one_bad_block_never_fails_its_neighbours(pool: kvpool.Pool) -> None:
    length = pool.limits.max_block + 1
    # The pages of this buffer are never touched.
    memory = mmap.mmap(-1, length)
    too_large = (ctypes.addressof(ctypes.c_char.from_buffer(memory)), length)
    outcomes = pool.batch_put(["a", "empty", "huge", "b"], [b"1", b"", too_large, b"2"])
    assert [outcomes[0], outcomes[3]] == [True, True]
    assert isinstance(outcomes[1], kvpool.InvalidArgumentError)
    assert isinstance(outcomes[2], kvpool.InvalidArgumentError)
    assert outcomes[2].code == "too_large"
    small, large = bytearray(0), bytearray(1)
    found = pool.batch_get(["a", "b"], [small, large])
    assert isinstance(found[0], kvpool.InvalidArgumentError) and "0 bytes" in str(found[0])
    assert found[1] == 1


def test_single_calls_raise_the_errors_that_batches_return(pool: kvpool.Pool) -> None:
    with pytest.raises(kvpool.InvalidArgumentError):
        pool.put("", b"x")
    with pytest.raises(ValueError, match="at least one byte"):
        pool.put("empty", b"")
    with pytest.raises(kvpool.Error):
        pool.get("x" * 1025)
    with pytest.raises(ValueError, match=r"keys\[1\]"):
        pool.is_exist(["fine", ""])


def test_keys_are_texts_and_digests(pool: kvpool.Pool) -> None:
    digest = bytes(range(32))
    keys: list[str | bytes] = ["plain", "präfix/ключ", "x" * 1024, digest, f"p@{'ab' * 32}@s"]
    blocks = [str(key).encode() for key in keys]
    assert pool.batch_put(keys, blocks) == [True] * 5
    assert [pool.get(key) for key in keys] == blocks
    # A digest and its 64 hex digits are one key.
    assert pool.is_exist([digest.hex()]) == [True]


def test_subclasses_of_str_and_bytes_are_keys(pool: kvpool.Pool) -> None:
    class Text(str):
        pass

    class Digest(bytes):
        pass

    keys: list[str | bytes] = [Text("text of a kind"), Digest(range(100, 132))]
    assert pool.batch_put(keys, [b"1", b"2"]) == [True, True]
    assert pool.is_exist(keys) == [True, True]
    assert pool.is_exist(["text of a kind", bytes(range(100, 132))]) == [True, True]


def test_queries_raise_for_an_invalid_key(pool: kvpool.Pool) -> None:
    for wrong in (None, 7, bytearray(32), ["fine"]):
        with pytest.raises(TypeError, match="a key is a str or 32 bytes"):
            pool.is_exist(["fine", wrong])  # type: ignore[list-item]
    for bad in (b"short", "\ud800"):
        with pytest.raises(kvpool.InvalidArgumentError, match=r"keys\[1\]"):
            pool.match_prefix(["fine", bad])


def test_a_range_is_part_of_its_block(pool: kvpool.Pool) -> None:
    block = bytes(n % 251 for n in range(200_000))
    pool.put("long", block)
    for offset, length in [(0, 200_000), (65_530, 20), (199_999, 1), (1, 131_072)]:
        assert pool.get_range("long", offset, length) == block[offset : offset + length]
    for offset, length in [(199_999, 2), (200_001, 1), (2**64 - 1, 10)]:
        with pytest.raises(kvpool.InvalidArgumentError) as raised:
            pool.get_range("long", offset, length)
        assert raised.value.code == "out_of_range"
    with pytest.raises(ValueError, match="limit"):
        pool.get_range("long", 0, 1 << 62)
    with pytest.raises(kvpool.InvalidArgumentError, match="offset"):
        pool.get_range("long", -1, 1)


def test_a_prefix_ends_at_the_first_gap_and_is_leased(pool: kvpool.Pool) -> None:
    keys = kvpool.chain_keys(kvpool.Namespace(), 4, range(40))
    parents = [None, *keys[:-1]]
    pool.batch_put(keys[:7], [b"kv"] * 7, parents=parents[:7])
    pool.put(keys[8], b"kv")
    with pool.match_prefix(keys) as prefix:
        assert prefix.blocks == 7
        assert len(prefix.lease) == 7
        assert 0 < prefix.lease.left <= pool.limits.lease_ttl
        refused = pool.remove(keys[:1])[0]
        assert isinstance(refused, kvpool.LeasedError) and refused.is_retryable
        assert prefix.lease.renew() == 0
    assert prefix.lease.left == 0
    assert pool.remove(keys[:1]) == [True]
    prefix.lease.release()
    with pytest.raises(kvpool.ClosedError):
        prefix.lease.renew()


def test_a_prefix_without_a_lease_leases_nothing(pool: kvpool.Pool) -> None:
    pool.put("a", b"x")
    prefix = pool.match_prefix(["a"], lease=False)
    assert (prefix.blocks, len(prefix.lease), prefix.lease.left) == (1, 0, 0)
    assert pool.remove(["a"]) == [True]


def test_is_exist_leases_by_default(pool: kvpool.Pool) -> None:
    pool.batch_put(["a", "b"], [b"1", b"2"])
    assert pool.is_exist(["a", "b", "c"], lease=False) == [True, True, False]
    assert pool.is_exist(["b"]) == [True]
    gone, kept = pool.remove(["a", "b"])
    assert gone is True
    assert isinstance(kept, kvpool.LeasedError)
    assert pool.remove(["b"], force=True) == [True]


def test_a_get_that_releases_keeps_no_lease(pool: kvpool.Pool) -> None:
    pool.put("a", b"bytes")
    assert pool.batch_get(["a"], [bytearray(5)], release=True) == [5]
    assert pool.remove(["a"]) == [True]


def test_matching_blocks_are_listed_and_removed(pool: kvpool.Pool) -> None:
    keys = [f"m-{n:04}" for n in range(30)]
    pool.batch_put([*keys, "other"], [b"four"] * 31)
    assert sorted(listed.key for listed in pool.list("^m-")) == keys
    listed = next(pool.list("other"))
    assert (listed.length, listed.replicas, listed.leased, listed.pinned) == (4, 1, False, False)
    assert len(list(pool.list())) == 31
    assert pool.remove_matching("^m-000") == (10, 0)
    pool.is_exist(["m-0010"])
    assert pool.remove_all() == (20, 1)
    assert pool.remove_all(force=True) == (1, 0)
    assert list(pool.list()) == []
    with pytest.raises(kvpool.Error):
        pool.remove_matching("(")


def test_namespaces_keep_blocks_apart(pool: kvpool.Pool, shared_pool: LivePool) -> None:
    pool.put("a", b"mine")
    with kvpool.Pool.connect(shared_pool.url, namespace=kvpool.Namespace("others")) as other:
        assert other.get("a") is None
        assert other.remove_all() == (0, 0)
    assert pool.get("a") == b"mine"


def test_a_description_has_the_places_and_the_protection_of_a_block(pool: kvpool.Pool) -> None:
    pool.put("pinned", b"12345", hard_pin=True)
    pool.put("soft", b"123", soft_pin=60.0, preferred_node="node-0", prefer_same_host=True)
    pinned, soft = pool.describe(["pinned", "soft"])
    assert pinned is not None and soft is not None
    assert (pinned.length, pinned.hard_pin, soft.hard_pin) == (5, True, False)
    assert 50 < soft.soft_pin_left <= 60 and pinned.soft_pin_left == 0
    (replica,) = soft.replicas
    assert (replica.node, replica.state) == ("node-0", "live")
    assert "length=5" in repr(pinned)


def test_stats_and_limits_are_reported(pool: kvpool.Pool) -> None:
    pool.put("a", b"bytes")
    pool.get("a")
    counters = pool.counters()
    assert (counters["puts_stored"], counters["hits"]) == (1, 1)
    latencies = pool.latencies()
    assert {"get", "put", "Reserve", "Commit"} <= latencies.keys()
    put = latencies["put"]
    assert put["count"] == 1 == sum(count for _, count in put["buckets"])
    assert 0 < put["seconds"] < 60 and put["buckets"][-1][0] is None
    stats = pool.stats()
    assert stats.blocks >= 1 and stats.capacity == 256 * MIB
    (node,) = stats.nodes
    assert (node.name, node.state) == ("node-0", "live")
    assert sum(segment.capacity for segment in node.segments) == stats.capacity
    assert pool.limits.max_block > MIB and pool.limits.lease_ttl > 0


def test_invalid_values_are_refused(pool: kvpool.Pool, shared_pool: LivePool) -> None:
    for timeout in (-1.0, float("nan"), float("inf"), 1e9):
        with pytest.raises(kvpool.InvalidArgumentError, match="seconds"):
            pool.get("a", timeout=timeout)
    with pytest.raises(ValueError, match="replicas"):
        pool.put("a", b"x", replicas=0)
    with pytest.raises(ValueError, match="as many"):
        pool.batch_put(["a"], [])
    with pytest.raises(ValueError, match="as many"):
        pool.batch_get([], [bytearray(1)])
    with pytest.raises(ValueError, match="parents"):
        pool.batch_put(["a"], [b"x"], parents=[None, None])
    with pytest.raises(ValueError, match="transport"):
        kvpool.Pool.connect(shared_pool.url, transport="pigeon")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="master"):
        kvpool.Pool.connect("not a url")
    with pytest.raises(ValueError, match="master"):
        kvpool.Pool.connect([])
    assert pool.get("a") is None


def test_a_master_needs_no_scheme_and_may_come_from_the_environment(
    shared_pool: LivePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = shared_pool.url.removeprefix("http://")
    with kvpool.Pool.connect(bare) as pool:
        # This node is of the same build.
        assert {node.version for node in pool.stats().nodes} == {kvpool.__version__}
    monkeypatch.setenv("KVPOOL_MASTER", bare)
    with kvpool.Pool.connect() as pool:
        assert pool.stats().nodes
    monkeypatch.setenv("KVPOOL_MASTER", "")
    with pytest.raises(ValueError, match="KVPOOL_MASTER"):
        kvpool.Pool.connect()


def test_a_wrong_type_raises_and_changes_nothing(pool: kvpool.Pool) -> None:
    wrong = [
        lambda: pool.batch_put(["a", 7], [b"1", b"2"]),
        lambda: pool.batch_put(["a", "b"], [b"1", "text"]),
        lambda: pool.batch_put(["a", "b"], [b"1", 7]),
        lambda: pool.batch_put("ab", [b"1", b"2"]),
        lambda: pool.batch_put(["a"], b"1"),
        lambda: pool.batch_put(["a", "b"], [b"1", [b"2", None]]),
        lambda: pool.batch_put(["a", "b"], [b"1", b"2"], parents=[None, 3]),
        lambda: pool.batch_put(7, 8),
        lambda: pool.put("a", None),
        lambda: pool.get(None),
        lambda: pool.get("a", timeout="soon"),
        lambda: pool.is_exist("ab"),
        lambda: pool.is_exist([bytearray(32)]),
        lambda: pool.list(3),
        lambda: kvpool.Pool(),
        lambda: kvpool.Pool.connect(3),
        lambda: kvpool.Pool.connect([3]),
        lambda: kvpool.Pool.connect(namespace="text"),
        lambda: kvpool.Lease(),
        lambda: kvpool.View(),
    ]
    for call in wrong:
        with pytest.raises(TypeError):
            call()
    assert pool.is_exist(["a", "b"]) == [False, False]


def test_a_closed_pool_raises(shared_pool: LivePool) -> None:
    with kvpool.Pool.connect(shared_pool.url) as pool:
        pool.put("a", b"x")
        listing = pool.list()
        prefix = pool.match_prefix(["a"])
    assert pool.closed and "closed" in repr(pool)
    pool.close()
    calls = [
        lambda: pool.batch_put([], []),
        lambda: pool.put("a", b"x"),
        lambda: pool.batch_get([], []),
        lambda: pool.get("a"),
        lambda: pool.get_range("a", 0, 1),
        lambda: pool.get_view("a"),
        lambda: pool.is_exist(["a"]),
        lambda: pool.match_prefix(["a"]),
        lambda: pool.register_buffer(bytearray(1)),
        lambda: pool.remove(["a"]),
        lambda: pool.remove_matching(""),
        lambda: pool.remove_all(),
        lambda: pool.list(),
        lambda: pool.describe(["a"]),
        lambda: pool.stats(),
        lambda: pool.counters(),
        lambda: pool.limits,
        lambda: next(listing),
        prefix.lease.renew,
        prefix.lease.release,
    ]
    for call in calls:
        with pytest.raises(kvpool.ClosedError) as raised:
            call()
        assert raised.value.code == "closed"


def test_a_put_into_a_full_pool_fails_by_its_timeout(own_pool: LivePool) -> None:
    with kvpool.Pool.connect(own_pool.url) as pool:
        filling = pool.batch_put(
            [f"pinned-{n}" for n in range(64)], [bytes(4 * MIB)] * 64, hard_pin=True, timeout=3.0
        )
        assert True in filling
        began = time.monotonic()
        with pytest.raises(kvpool.FullError) as raised:
            pool.put("more", bytes(64 * MIB), timeout=0.5)
        assert time.monotonic() - began < 3
        assert (raised.value.code, raised.value.is_retryable) == ("full", True)
