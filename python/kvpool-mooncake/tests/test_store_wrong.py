"""Wrong use: a store that is not set up or is closed, wrong types, wrong sizes, wrong addresses."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable

import pytest
from mooncake._base import Refusals
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from lent_memory import Memory
from live_pools import LivePool

# Each method with keys, its arguments, and the answer of a store without a pool.
CALLS: list[tuple[str, tuple[object, ...], object]] = [
    ("put", ("k", b"v"), -600),
    ("put_parts", ("k", b"v"), -600),
    ("put_batch", (["k"], [b"v"]), -600),
    ("put_from", ("k", 4096, 1), -600),
    ("batch_put_from", (["k", "l"], [4096, 1], [1, 1]), [-600, -600]),
    ("batch_put_from_multi_buffers", (["k"], [[4096]], [[1]]), [-600]),
    ("put_from_with_metadata", ("k", 4096, 4096, 1, 1), -600),
    ("upsert", ("k", b"v"), -600),
    ("upsert_parts", ("k", b"v"), -600),
    ("upsert_batch", (["k"], [b"v"]), -600),
    ("upsert_from", ("k", 4096, 1), -600),
    ("batch_upsert_from", (["k"], [4096], [1]), [-600]),
    ("get", ("k",), b""),
    ("get_batch", (["k", "l"],), [b"", b""]),
    ("get_buffer", ("k",), None),
    ("batch_get_buffer", (["k"],), [None]),
    ("get_into", ("k", 4096, 1), -600),
    ("batch_get_into", (["k"], [4096], [1]), [-600]),
    ("batch_get_into_multi_buffers", (["k"], [[4096]], [[1]]), [-600]),
    ("get_into_ranges", ([4096], [["k"]], [[[0]]], [[[0]]], [[[1]]]), [[[-600]]]),
    ("get_size", ("k",), -600),
    ("is_exist", ("k",), -600),
    ("batch_is_exist", (["k", "l"],), [-600, -600]),
    ("remove", ("k",), -600),
    ("batch_remove", (["k"],), [-600]),
    ("remove_by_regex", ("k",), -600),
    ("remove_all", (), -600),
    ("batch_replica_clear", (["k"],), []),
    ("get_replica_desc", ("k",), []),
    ("batch_get_replica_desc", (["k"],), {}),
    ("batch_get_session_start", (["k"],), [-600]),
    ("batch_get_into_multi_buffer_ranges", (["k"], [[4096]], [[1]], [[0]]), [-600]),
    ("batch_get_session_end", (["k"],), -600),
    ("batch_put_session_start", (["k"], [1]), [-600]),
    ("batch_put_from_multi_buffer_ranges", (["k"], [[4096]], [[1]], [[0]]), [-600]),
    ("batch_put_session_end", (["k"],), [-600]),
    ("batch_put_session_revoke", (["k"],), [-600]),
    ("register_buffer", (4096, 1), -600),
    ("unregister_buffer", (4096,), -600),
    ("alloc_from_mem_pool", (4096,), 0),
    ("health_check", (), 1),
    ("get_hostname", (), ""),
    ("unmount_segment", (["s"],), -600),
    ("unmount_local_disk_segment", (), -600),
    ("get_offload_rpc_read_count", (), 0),
    ("query_task", ((1, 2),), (None, -1400)),
    ("close", (), 0),
]


@pytest.mark.parametrize(("method", "args", "answer"), CALLS, ids=[call[0] for call in CALLS])
def test_a_store_that_is_not_set_up_answers_and_does_not_crash(
    method: str, args: tuple[object, ...], answer: object
) -> None:
    assert getattr(MooncakeDistributedStore(), method)(*args) == answer


@pytest.mark.parametrize(("method", "args", "answer"), CALLS, ids=[call[0] for call in CALLS])
def test_a_closed_store_answers_the_same(
    connect: Callable[[LivePool], MooncakeDistributedStore],
    shared_pool: LivePool,
    method: str,
    args: tuple[object, ...],
    answer: object,
) -> None:
    store = connect(shared_pool)
    assert store.close() == 0
    assert getattr(store, method)(*args) == answer


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("put", (7, b"v")),
        ("put", (b"k", b"v")),
        ("put", ("k", "text")),
        ("put", ("k", None)),
        ("put", ("k", b"v", "config")),
        ("put_batch", ("keys", [b"v"] * 4)),
        ("put_batch", (["k"], [1])),
        ("put_from", ("k", "address", 1)),
        ("put_from", ("k", 4096, 1.5)),
        ("batch_put_from", (["k"], [None], [1])),
        ("batch_put_from_multi_buffers", (["k"], [4096], [[1]])),
        ("get", (None,)),
        ("get_batch", ("k",)),
        ("get_buffer", (7,)),
        ("get_into", ("k", [], 1)),
        ("get_into_ranges", (4096, [["k"]], [[[0]]], [[[0]]], [[[1]]])),
        ("get_size", (1,)),
        ("is_exist", (1,)),
        ("batch_is_exist", ("k",)),
        ("batch_is_exist", ([1],)),
        ("batch_is_exist", (None,)),
        ("remove", (1,)),
        ("remove_by_regex", (1,)),
        ("register_buffer", ("a", 1)),
        ("unregister_buffer", (None,)),
        ("alloc_from_mem_pool", ("1MB",)),
        ("batch_get_session_start", ("k",)),
        ("batch_put_session_start", (["k"], ["1"])),
        ("unmount_segment", ("s",)),
    ],
)
def test_a_wrong_type_raises(store: MooncakeDistributedStore, method: str, args: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        getattr(store, method)(*args)


@pytest.mark.parametrize(
    ("ptr", "size"), [(0, 8), (-1, 8), (4096, -1), (1 << 70, 8), (4096, 1 << 70), (1 << 63, 8)]
)
def test_an_invalid_address_or_length_is_600(
    store: MooncakeDistributedStore, key: str, ptr: int, size: int
) -> None:
    assert store.put(key, b"x" * 8) == 0
    assert store.get_into(key, ptr, size) == -600
    assert store.put_from(f"{key}-new", ptr, size) == -600
    assert store.batch_get_into_multi_buffers([key], [[ptr]], [[size]]) == [-600]
    assert store.batch_get_into_multi_buffer_ranges([key], [[ptr]], [[size]], [[0]]) == [-600]
    assert store.get_into_ranges([ptr], [[key]], [[[0]]], [[[0]]], [[[size]]]) == [[[-600]]]
    assert store.register_buffer(ptr, size) == -600
    assert store.is_exist(f"{key}-new") == 0


WILD = 0x1000


def test_an_address_without_memory_is_600_in_each_call(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    assert store.put(key, b"x" * 64) == 0
    new, good = f"{key}-new", memory(b"y" * 64)
    assert store.register_buffer(WILD, 64) == -600
    assert store.put_from(new, WILD, 64) == -600
    assert store.upsert_from(key, WILD, 64) == -600
    assert store.put_from_with_metadata(new, WILD, good.ptr, 64, 64) == -600
    assert store.batch_put_from([new, f"{key}-good"], [WILD, good.ptr], [64, 64]) == [-600, 0]
    assert store.batch_upsert_from([key], [WILD], [64]) == [-600]
    assert store.batch_put_from_multi_buffers([new], [[good.ptr, WILD]], [[64, 64]]) == [-600]
    assert store.get_into(key, WILD, 64) == -600
    assert store.batch_get_into([key, key], [WILD, good.ptr], [64, 64]) == [-600, 64]
    assert bytes(good) == b"x" * 64
    assert store.batch_get_into_multi_buffers([key], [[good.ptr, WILD]], [[32, 32]]) == [-600]
    assert store.get_into_ranges([WILD], [[key]], [[[0]]], [[[0]]], [[[8]]]) == [[[-600]]]
    assert store.batch_get_into_multi_buffer_ranges([key], [[WILD]], [[8]], [[0]]) == [-600]
    assert store.batch_put_session_start([new], [64]) == [0]
    assert store.batch_put_from_multi_buffer_ranges([new], [[WILD]], [[64]], [[0]]) == [-600]
    assert store.batch_put_session_revoke([new]) == [0]
    assert store.put_tensor_from(new, WILD, 64) == -600
    assert store.get_tensor_into(key, WILD, 64) is None
    assert store.is_exist(new) == 0
    assert store.get(key) == b"x" * 64


def test_a_refusal_is_a_warning_and_a_miss_is_none(
    connect: Callable[[LivePool], MooncakeDistributedStore],
    shared_pool: LivePool,
    key: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "mooncake"]

    store = connect(shared_pool)
    with caplog.at_level(logging.WARNING, logger="mooncake"):
        assert store.remove(key) == -704
        assert store.get_size(key) == -704
        assert store.put(key, b"x") == 0
        assert store.is_exist(key) == 1
        assert store.remove(key) == -706
        assert not lines()
        for _ in range(3):
            assert store.batch_put_from([f"{key}-new"] * 2, [WILD, WILD], [64, 64]) == [-600, -600]
    (line,) = lines()
    for part in ("batch_put_from", "2 of 2", "-600", "0x1000"):
        assert part in line
    # The reason of an earlier call must not be reported for a later one.
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="mooncake"):
        assert store.put_from(f"{key}-new", -1, 64) == -600
    (line,) = lines()
    assert "0x1000" not in line


def test_a_store_warns_once_in_ten_seconds_of_each_code_and_counts_the_rest() -> None:
    now = 5.0
    refusals = Refusals(lambda: now)
    assert refusals.add(-600, 1) == 0
    assert refusals.add(-800, 7) == 0
    assert refusals.add(-600, 2) is None
    now += 9.9
    assert refusals.add(-600, 3) is None
    now += 0.2
    assert refusals.add(-600, 1) == 5
    assert refusals.add(-600, 1) is None
    assert refusals.add(-800, 1) == 0


def test_memory_that_can_only_be_read_is_put_from_and_not_got_into(
    store: MooncakeDistributedStore, key: str
) -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    memory[:5] = b"hello"
    first = ctypes.c_char.from_buffer(memory)
    at = ctypes.addressof(first)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(at, page, mmap.PROT_READ) == 0
    # The second page can be neither read nor written.
    assert protect(at + page, page, 0) == 0
    assert store.put_from(f"{key}-long", at, 2 * page) == -600
    assert store.register_buffer(at, 2 * page) == -600
    assert store.put_from(key, at, page) == 0
    assert store.get_into(key, at, page) == -600
    ranges = [at, at + page, at], [page, page, -1]
    assert store._native.are_of_host(*ranges, False) == [True, False, False]
    assert store._native.are_of_host(*ranges, True) == [False, False, False]
    assert store.register_buffer(at, page) == 0
    assert store.get_into(key, at, page) == -600
    assert store.unregister_buffer(at) == 0
    assert store.get(key)[:5] == b"hello"
    assert protect(at, 2 * page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    assert store.get_into(key, at, page) == page
    del first
    memory.close()


def test_nothing_to_read_into_is_too_small(store: MooncakeDistributedStore, key: str) -> None:
    assert store.put(key, b"x") == 0
    assert store.get_into(key, 0, 0) == -600
    assert store.put_from(f"{key}-new", 0, 0) == -600
    assert store.register_buffer(4096, 0) == -600


def test_a_key_is_1_to_1024_bytes(store: MooncakeDistributedStore, key: str) -> None:
    longest = key + "x" * (1024 - len(key))
    assert store.put(longest, b"x") == 0
    assert store.get(longest) == b"x"
    for bad in ("", longest + "x", key + "é" * 512, "\ud800"):
        assert store.put(bad, b"x") == -600
        assert store.get(bad) == b""
        assert store.get_size(bad) == -600
        assert store.remove(bad) == -600
        assert store.batch_is_exist([bad, longest, bad]) == [-600, 1, -600]
        assert store.batch_remove([bad, f"{key}-none"]) == [-600, -704]


def test_an_invalid_value_gives_a_code(store: MooncakeDistributedStore) -> None:
    assert store.remove_by_regex("\ud800") == -600
    for number in (-1, 1 << 64, 1 << 80):
        assert store.query_task((0, number)) == (None, -1400)
    assert store.allocate_and_mount_segment("9" * 400 + ".5")["ret"] == -600
    fresh = MooncakeDistributedStore()
    wrong: list[dict[str, object]] = [
        {"local_hostname": "x" * 70},
        {"local_hostname": "one..two"},
        {"local_hostname": "host:" + "9" * 5000},
        {"global_segment_size": "9" * 5000},
        {"global_segment_size": "9" * 400 + ".5"},
        {"tenant_id": "\ud800"},
        {"master_server_addr": "\ud800"},
    ]
    for settings in wrong:
        assert fresh.setup(settings) == -600, settings
    with pytest.raises(TypeError):
        fresh.setup(config="text")  # type: ignore[arg-type]


def test_a_value_over_the_pools_limit_is_600(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    source = memory(16)
    assert store.put_from(key, source.ptr, (1 << 30) + 1) == -600
    assert store.batch_put_session_start([key], [(1 << 30) + 1]) == [-600]


def test_a_configuration_is_a_replicate_config(store: MooncakeDistributedStore, key: str) -> None:
    with pytest.raises(TypeError, match="ReplicateConfig"):
        store.put(key, b"x", {"replica_num": 1})  # type: ignore[arg-type]
    assert store.put(key, b"x", ReplicateConfig()) == 0
