"""Parts of objects, and sessions."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from lent_memory import Memory
from live_pools import MIB, LivePool, live_pool, wait_until

CHUNK = 64 << 10


def test_fragments_of_several_objects_are_gathered(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    one, two = os.urandom(3 * CHUNK), os.urandom(1000)
    assert store.put_batch([f"{key}-1", f"{key}-2"], [one, two]) == 0
    first, second = memory(200), memory(CHUNK + 50)
    answers = store.get_into_ranges(
        [first.ptr, second.ptr],
        [[f"{key}-1", f"{key}-2"], [f"{key}-2", f"{key}-1"]],
        [[[0, 20], [8]], [[4], [40]]],
        [[[1, CHUNK - 1], [2]], [[0], [CHUNK - 7]]],
        [[[4, 3], [5]], [[6], [CHUNK]]],
    )
    assert answers == [[[4, 3], [5]], [[6], [CHUNK]]]
    expected = bytearray(200)
    expected[0:4], expected[20:23], expected[8:13] = one[1:5], one[CHUNK - 1 : CHUNK + 2], two[2:7]
    assert bytes(first) == expected
    assert bytes(second)[4:10] == two[:6]
    assert bytes(second)[40 : 40 + CHUNK] == one[CHUNK - 7 : 2 * CHUNK - 7]


def test_each_fragment_answers_for_itself(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    value = os.urandom(1000)
    assert store.put(key, value) == 0
    target = memory(3000)
    answers = store.get_into_ranges(
        [target.ptr],
        [[key, f"{key}-none", key, ""]],
        # The last fragments of the first key are contiguous and reach beyond the end of the object.
        [[[0, 990, 1000], [1100], [1200], [0]]],
        [[[0, 980, 990], [0], [1000], [0]]],
        [[[10, 10, 11], [10], [1], [1]]],
    )
    assert answers == [[[10, 10, -600], [-704], [-600], [-600]]]
    assert bytes(target)[990:1000] == value[980:990]


def test_fragments_that_follow_each_other_in_the_object_may_overlap_in_memory(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    value = os.urandom(1000)
    assert store.put(key, value) == 0
    target = memory(100)
    answers = store.get_into_ranges(
        [target.ptr], [[key]], [[[0, 5, 50]]], [[[100, 110, 120]]], [[[10, 10, 10]]]
    )
    assert answers == [[[10, 10, 10]]]
    assert bytes(target)[:5] == value[100:105]
    assert bytes(target)[10:15] == value[115:120]
    assert bytes(target)[50:60] == value[120:130]


def test_shapes_that_do_not_match_are_600_where_they_do_not(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    assert store.put(key, b"0123456789") == 0
    target = memory(10)
    good = store.get_into_ranges(
        [target.ptr, target.ptr, target.ptr],
        [[key], [key, key], [key, key]],
        [[[0]], [[0]], [[0, 1], [5]]],
        [[[0]], [[0]], [[0], [5]]],
        [[[1]], [[1]], [[1], [5]]],
    )
    assert good == [[[1]], [[-600]], [[-600], [5]]]
    assert store.get_into_ranges([target.ptr], [], [], [], []) == [[[-600]]]
    assert store.get_into_ranges([], [], [], [], []) == []
    assert store.get_into_ranges([target.ptr], [[key]], [[[-1]]], [[[0]]], [[[1]]]) == [[[-600]]]


def test_a_get_session_is_started_read_and_ended(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    keys = [f"{key}-{n}" for n in range(4)]
    values = [os.urandom(3 * CHUNK + n) for n in range(4)]
    assert store.put_batch(keys, values) == 0
    assert store.batch_get_session_start(keys) == [0] * 4
    targets = [[memory(CHUNK), memory(100), memory(50)] for _ in keys]
    pointers = [[m.ptr for m in of_key] for of_key in targets]
    sizes = [[m.size for m in of_key] for of_key in targets]
    offsets = [[0, CHUNK, 2 * CHUNK - 25]] * 4
    answers = store.batch_get_into_multi_buffer_ranges(keys, pointers, sizes, offsets)
    assert answers == [CHUNK + 150] * 4
    for value, of_key in zip(values, targets):
        at_offsets = [value[at : at + m.size] for at, m in zip(offsets[0], of_key)]
        assert [bytes(m) for m in of_key] == at_offsets
    assert store.batch_get_session_end(keys) == 0
    assert store.batch_get_session_end(keys) == -704


def test_a_session_of_an_absent_key_is_704(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    assert store.put(key, b"x" * 10) == 0
    assert store.batch_get_session_start([key, f"{key}-none", ""]) == [0, -704, -600]
    target = memory(10)
    answers = store.batch_get_into_multi_buffer_ranges(
        [key, f"{key}-none", key, key], [[target.ptr]] * 4, [[10], [10], [11], []], [[0]] * 4
    )
    assert answers == [10, -704, -600, -600]
    assert store.batch_get_session_end([key, f"{key}-none", ""]) == -704


def test_a_session_of_any_length_keeps_its_objects(
    tmp_path: Path, connect: Callable[[LivePool], MooncakeDistributedStore]
) -> None:
    with live_pool(tmp_path, 1, "16MiB", "--lease-ttl=400ms") as pool:
        store, other = connect(pool), connect(pool)
        assert store.put("kept", b"k" * MIB) == 0
        assert store.put("not", b"n" * MIB) == 0
        assert store.batch_get_session_start(["kept"]) == [0]
        end = time.monotonic() + 2
        number = 0
        # For the time of ten leases, the pool is filled repeatedly.
        while time.monotonic() < end:
            number += 1
            assert other.put(f"filler-{number}", b"f" * MIB) == 0
        assert number > 30
        assert store.get("kept") == b"k" * MIB
        assert store.get("not") == b""
        assert other.remove("kept") == -706
        assert store.batch_get_session_end(["kept"]) == 0
        time.sleep(0.6)
        assert other.remove("kept") == 0


def test_each_key_of_a_session_is_released_at_its_own_end(
    own_pool: LivePool, connect: Callable[[LivePool], MooncakeDistributedStore]
) -> None:
    store, other = connect(own_pool), connect(own_pool)
    keys = [f"session-{n}" for n in range(4)]
    assert store.put_batch(keys, [b"x"] * 4) == 0
    assert store.batch_get_session_start(keys) == [0] * 4
    # A second session of the first key, begun by a start of its own.
    assert store.batch_get_session_start(keys[:1]) == [0]
    assert store.batch_get_session_end(keys[:3]) == 0
    assert other.batch_remove(keys) == [-706, 0, 0, -706]
    assert store.batch_get_session_end([keys[3], keys[0]]) == 0
    assert other.batch_remove([keys[0], keys[3]]) == [0, 0]


def test_a_session_takes_its_lease_anew_that_ran_out(
    tmp_path: Path, connect: Callable[[LivePool], MooncakeDistributedStore]
) -> None:
    with live_pool(tmp_path, 1, "16MiB", "--lease-ttl=400ms") as pool:
        store, other = connect(pool), connect(pool)
        assert store.put("kept", b"k" * MIB) == 0
        assert store.batch_get_session_start(["kept"]) == [0]
        assert pool.master
        pool.master.send(signal.SIGSTOP)
        time.sleep(1.5)
        pool.master.send(signal.SIGCONT)

        def is_leased() -> bool:
            described = pool.kvctl("describe", "kept")
            assert isinstance(described, dict)
            return bool(described["lease_left_seconds"] > 0)

        wait_until(is_leased, 10, "a lease")
        time.sleep(1)
        assert is_leased()
        assert other.remove("kept") == -706
        assert store.batch_get_session_end(["kept"]) == 0


def test_a_session_ends_while_the_keeper_waits_for_the_master(
    own_pool: LivePool, connect: Callable[[LivePool], MooncakeDistributedStore]
) -> None:
    store, other = connect(own_pool), connect(own_pool)
    assert store.put_batch(["one", "two"], [b"1", b"2"]) == 0
    assert store.batch_get_session_start(["one", "two"]) == [0, 0]
    assert own_pool.master
    own_pool.master.send(signal.SIGSTOP)
    # A renewal begins at least once a second, and waits for its answer for 3 s.
    time.sleep(1.3)
    ended: list[int] = []
    ending = threading.Thread(target=lambda: ended.append(store.batch_get_session_end(["one"])))
    ending.start()
    ending.join(1.5)
    # The master still answers no call.
    in_time = list(ended)
    own_pool.master.send(signal.SIGCONT)
    ending.join()
    assert in_time == [0]
    # The keeper does not renew the lease of the ended session. It keeps the other lease.
    wait_until(lambda: other.remove("one") == 0, 30, "the end of the lease")
    assert other.remove("two") == -706
    assert store.batch_get_session_end(["two"]) == 0


def test_nothing_of_a_put_session_is_visible_before_its_end(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    keys = [f"{key}-{n}" for n in range(2)]
    values = [os.urandom(5000), os.urandom(7000)]
    assert store.batch_put_session_start(keys, [5000, 7000], ReplicateConfig()) == [0, 0]
    assert store.batch_put_session_start(keys[:1], [5000]) == [-714]
    parts = [(memory(value[:1000]), memory(value[1000:])) for value in values]
    answers = store.batch_put_from_multi_buffer_ranges(
        keys,
        [[tail.ptr, head.ptr] for head, tail in parts],
        [[tail.size, head.size] for head, tail in parts],
        [[1000, 0], [1000, 0]],
    )
    assert answers == [5000, 7000]
    assert store.batch_is_exist(keys) == [0, 0]
    assert store.remove(keys[0]) == -703
    assert store.batch_put_session_end(keys) == [0, 0]
    assert store.get_batch(keys) == values
    assert store.batch_put_session_end(keys) == [-704, -704]


def test_a_revoked_or_incomplete_put_session_leaves_nothing(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    keys = [f"{key}-{n}" for n in range(3)]
    assert store.batch_put_session_start(keys, [10, 10, 10]) == [0, 0, 0]
    half = memory(b"01234")
    writes = store.batch_put_from_multi_buffer_ranges(
        [*keys, f"{key}-none"],
        [[half.ptr], [half.ptr, half.ptr], [half.ptr], [half.ptr]],
        [[5], [5, 5], [5], [5]],
        [[0], [0, 5], [6], [0]],
    )
    assert writes == [5, 10, -600, -704]
    assert store.batch_put_session_revoke([keys[1], f"{key}-none"]) == [0, -704]
    assert store.batch_put_session_end(keys) == [-700, -704, -700]
    assert store.batch_is_exist(keys) == [0, 0, 0]
    # The keys are free again.
    assert store.put(keys[0], b"x") == 0


@pytest.mark.parametrize("size", [0, -1, (1 << 30) + 1])
def test_a_put_session_has_a_size_that_can_be(store: MooncakeDistributedStore, key: str, size: int) -> None:
    assert store.batch_put_session_start([key], [size]) == [-600]


def test_a_fragment_does_not_leave_the_registered_range_of_its_buffer(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    assert store.put(key, b"0123456789") == 0
    place = memory(b"_" * 32)
    assert store.register_buffer(place.ptr, 16) == 0
    answers = store.get_into_ranges([place.ptr], [[key]], [[[0, 12, 13]]], [[[0, 0, 0]]], [[[4, 4, 4]]])
    assert answers == [[[4, 4, -600]]]
    assert bytes(place) == b"0123" + b"_" * 8 + b"0123" + b"_" * 16
    assert store.unregister_buffer(place.ptr) == 0
    # Without a registration the caller is responsible for the end.
    assert store.get_into_ranges([place.ptr], [[key]], [[[13]]], [[[0]]], [[[4]]]) == [[[4]]]


def test_all_fragments_of_a_call_have_one_deadline(
    own_pool: LivePool, connect: Callable[[LivePool], MooncakeDistributedStore], memory: type[Memory]
) -> None:
    keys = [f"fragment-{n}" for n in range(20)]
    assert connect(own_pool).put_batch(keys, [b"x"] * 20) == 0
    # A new store has no cached locations.
    store = MooncakeDistributedStore()
    settings = {"global_segment_size": 0, "master_server_addr": own_pool.url, "get_timeout_ms": 1000}
    assert store.setup(settings) == 0
    place = memory(20)
    assert own_pool.master
    own_pool.master.send(signal.SIGSTOP)
    try:
        began = time.monotonic()
        answers = store.get_into_ranges(
            [place.ptr], [keys], [[[n] for n in range(20)]], [[[0]] * 20], [[[1]] * 20]
        )
        took = time.monotonic() - began
    finally:
        own_pool.master.send(signal.SIGCONT)
    assert all(code < 0 for (code,) in answers[0])
    # Four reads are in progress at a time. With a deadline for each, 20 reads take five times as long.
    assert 0.9 < took < 2.5
    store.close()


def test_the_fragments_of_one_object_are_of_one_put(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    parts = 32
    assert store.put(key, bytes(MIB)) == 0
    ended = threading.Event()

    def replace() -> None:
        for number in itertools.cycle(range(256)):
            if ended.is_set():
                return
            assert store.upsert(key, bytes([number]) * MIB) == 0

    replacing = threading.Thread(target=replace)
    replacing.start()
    target = memory(parts)
    whole = 0
    try:
        for _ in range(100):
            # The fragments are apart, so that each is a read of its own.
            from_each = [at * (MIB // parts) for at in range(parts)]
            to_each, lengths = list(range(parts)), [1] * parts
            answers = store.get_into_ranges([target.ptr], [[key]], [[to_each]], [[from_each]], [[lengths]])
            if answers == [[[1] * parts]]:
                whole += 1
                assert len(set(bytes(target))) == 1, "a mixture of two objects"
            else:
                assert set(answers[0][0]) == {-800}
    finally:
        ended.set()
        replacing.join()
    assert whole > 0
