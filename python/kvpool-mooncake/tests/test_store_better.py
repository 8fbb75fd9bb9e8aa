"""Failures around a store, and their effect on its callers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from lent_memory import Memory
from live_pools import MIB, LivePool, live_pool

Connect = Callable[[LivePool], MooncakeDistributedStore]
# The code of an absent object.
MISSING = -704


def test_a_key_seen_by_exist_stays_readable_for_its_lease(tmp_path: Path, connect: Connect) -> None:
    with live_pool(tmp_path, 1, "16MiB", "--lease-ttl=2s") as pool:
        store, other = connect(pool), connect(pool)
        keys = [f"seen-{n}" for n in range(4)]
        assert store.put_batch(keys, [b"s" * MIB] * 4) == 0
        time.sleep(2.1)
        asked = time.monotonic()
        assert store.batch_is_exist(keys) == [1] * 4
        # Puts fill the pool twice within the lease.
        for number in range(32):
            assert other.put(f"filler-{number}", b"f" * MIB) == 0
        assert time.monotonic() - asked < 1.5, "the machine is too slow for this test"
        assert store.get_batch(keys) == [b"s" * MIB] * 4


def test_without_a_lease_the_oldest_go(tmp_path: Path, connect: Connect) -> None:
    with live_pool(tmp_path, 1, "16MiB", "--lease-ttl=100ms") as pool:
        store = connect(pool)
        assert store.put("old", b"s" * MIB) == 0
        time.sleep(0.2)
        for number in range(32):
            assert store.put(f"filler-{number}", b"f" * MIB) == 0
        assert store.is_exist("old") == 0


def test_a_get_that_outlasts_its_lease_renews_it(
    tmp_path: Path, connect: Connect, memory: type[Memory]
) -> None:
    lease = 0.025
    with live_pool(tmp_path, 0, "", f"--lease-ttl={int(lease * 1000)}ms") as pool:
        pool.start_node("320MiB", "--max-held-ratio=1")
        store = connect(pool)
        source, target = memory(os.urandom(MIB) * 256), memory(256 * MIB)
        assert store.put_from("large", source.ptr, source.size) == 0
        longest = 0.0
        for _ in range(5):
            begin = time.monotonic()
            # If the lease were not renewed, every attempt would end after it and would not count.
            assert store.get_into("large", target.ptr, target.size) == target.size
            longest = max(longest, time.monotonic() - begin)
        assert bytes(target) == bytes(source)
        if longest < 1.5 * lease:
            pytest.skip(f"the longest get took {longest:.3f} s, no longer than a lease")


def test_gets_are_right_while_the_pool_is_turned_over(
    tmp_path: Path, connect: Connect, memory: type[Memory]
) -> None:
    with live_pool(tmp_path, 1, "64MiB", "--lease-ttl=300ms") as pool:
        store, other = connect(pool), connect(pool)
        value = os.urandom(16 * MIB)
        assert store.put("long", value) == 0
        stop = threading.Event()

        def fill() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                other.put(f"filler-{number % 1000}-{number}", b"f" * MIB)

        filling = threading.Thread(target=fill)
        filling.start()
        try:
            target = memory(16 * MIB)
            # Each read returns the object, or a miss after an eviction, but never other bytes.
            end, hits = time.monotonic() + 2, 0
            while time.monotonic() < end:
                got = store.get_into("long", target.ptr, target.size)
                if got == MISSING:
                    assert store.put("long", value) == 0
                    continue
                assert got == 16 * MIB
                assert bytes(target) == value
                hits += 1
            assert hits > 0
        finally:
            stop.set()
            filling.join()


def test_a_put_that_finds_the_pool_full_waits_for_room(tmp_path: Path, connect: Connect) -> None:
    with live_pool(tmp_path, 1, "16MiB", "--lease-ttl=1s") as pool:
        store = connect(pool)
        keys = [f"full-{n}" for n in range(14)]
        assert store.put_batch(keys, [b"f" * MIB] * 14) == 0
        assert store.batch_is_exist(keys) == [1] * 14
        # All blocks are leased, so there is no room before the leases have expired.
        begin = time.monotonic()
        assert store.put("late", b"l" * (3 * MIB)) == 0
        assert 0.3 < time.monotonic() - begin < 5
        assert store.get("late") == b"l" * (3 * MIB)


def test_a_put_for_which_no_room_comes_is_200_within_its_time(tmp_path: Path) -> None:
    with live_pool(tmp_path, 1, "16MiB") as pool:
        store = MooncakeDistributedStore()
        config = {"global_segment_size": 0, "master_server_addr": pool.url, "put_timeout_ms": 1000}
        assert store.setup(config) == 0
        pinned = ReplicateConfig(with_hard_pin=True)
        codes = [store.put(f"pinned-{n}", b"f" * MIB, pinned) for n in range(13)]
        assert codes[0] == 0
        begin = time.monotonic()
        assert store.put("more", b"m" * (3 * MIB)) == -200
        assert 0.5 < time.monotonic() - begin < 3
        store.close()


def test_a_loop_of_lookup_and_load_ends_when_the_owner_dies(
    connect: Connect, own_pool: LivePool, memory: type[Memory]
) -> None:
    store = connect(own_pool)
    keys = [f"lost-{n}" for n in range(16)]
    assert store.put_batch(keys, [b"x" * MIB] * 16) == 0
    assert store.batch_is_exist(keys) == [1] * 16
    own_pool.nodes[0].kill()
    targets = [memory(MIB) for _ in keys]
    begin = time.monotonic()
    failed = 0
    # An engine does the same: it looks up, loads the found keys, and looks up again after a failed load.
    while (there := store.batch_is_exist(keys)) != [0] * 16:
        found = [at for at, answer in enumerate(there) if answer == 1]
        answers = store.batch_get_into(
            [keys[at] for at in found], [targets[at].ptr for at in found], [MIB] * len(found)
        )
        assert all(answer < 0 for answer in answers)
        failed += 1
        assert time.monotonic() - begin < 10
    assert failed <= 3
    assert time.monotonic() - begin < 8


def test_the_keys_of_a_dead_owner_miss_within_seconds_for_lookups_alone(
    connect: Connect, own_pool: LivePool
) -> None:
    store, other = connect(own_pool), connect(own_pool)
    assert store.put("lost", b"x" * MIB) == 0
    assert other.is_exist("lost") == 1
    own_pool.nodes[0].kill()
    begin = time.monotonic()
    while other.is_exist("lost") != 0:
        assert time.monotonic() - begin < 10
        time.sleep(0.05)
    # The key can be put again as soon as there is a node.
    own_pool.start_node()
    assert other.put("lost", b"anew") == 0
    assert store.get("lost") == b"anew"


def test_a_second_replica_is_read_when_the_first_ones_node_dies(tmp_path: Path, connect: Connect) -> None:
    with live_pool(tmp_path, 2) as pool:
        store = connect(pool)
        value = os.urandom(MIB)
        assert store.put("twice", value, ReplicateConfig(replica_num=2)) == 0
        assert {replica.node for replica in store.get_replica_desc("twice")} == {"node-0", "node-1"}
        pool.nodes[0].kill()
        begin = time.monotonic()
        assert store.get("twice") == value
        assert time.monotonic() - begin < 6


def test_no_call_outlasts_its_deadline_when_a_node_hangs(
    connect: Connect, own_pool: LivePool, memory: type[Memory]
) -> None:
    store = connect(own_pool)
    assert store.put("hung", b"x" * MIB) == 0
    target = memory(MIB)
    own_pool.nodes[0].hang()
    for call, longest in (
        (lambda: store.get_into("hung", target.ptr, MIB), 7),
        (lambda: store.put("other", b"y" * MIB), 12),
        (lambda: store.is_exist("hung"), 4),
    ):
        begin = time.monotonic()
        call()
        assert time.monotonic() - begin < longest
    own_pool.nodes[0].send(signal.SIGCONT)
    end = time.monotonic() + 10
    while store.get("hung") != b"x" * MIB:
        assert time.monotonic() < end, "a node that speaks again has its objects back"
        time.sleep(0.1)


@pytest.mark.parametrize("method", ["get", "get_batch", "get_buffer", "batch_get_buffer"])
def test_a_get_has_one_deadline_for_the_length_and_the_bytes(
    connect: Connect, own_pool: LivePool, method: str
) -> None:
    assert connect(own_pool).put("hung", b"x" * MIB) == 0
    # A new store has no cached location.
    store = MooncakeDistributedStore()
    settings = {"global_segment_size": 0, "master_server_addr": own_pool.url, "get_timeout_ms": 2000}
    assert store.setup(settings) == 0
    assert own_pool.master
    own_pool.nodes[0].hang()
    own_pool.master.hang()
    # The length takes more than half of the time, and the bytes never arrive.
    resuming = threading.Timer(1.2, own_pool.master.send, (signal.SIGCONT,))
    resuming.start()
    begin = time.monotonic()
    getattr(store, method)(["hung"] if "batch" in method else "hung")
    took = time.monotonic() - begin
    resuming.join()
    assert took < 2.7
    own_pool.nodes[0].send(signal.SIGCONT)
    assert store.close() == 0


# The longest time of each call without a master: its own deadline and a second.
WITHOUT_A_MASTER: list[tuple[str, tuple[object, ...], object, float]] = [
    ("is_exist", ("new",), (-900, -901), 4),
    ("batch_is_exist", (["new", "newer"],), None, 4),
    ("get", ("new",), (b"",), 6),
    ("get_buffer", ("new",), (None,), 6),
    ("get_size", ("new",), (-900, -901), 4),
    ("put", ("new", b"x"), (-800, -900, -901), 11),
    ("remove", ("new",), (-900, -901), 4),
    ("remove_all", (), (-900, -901), 4),
    ("get_replica_desc", ("new",), ([],), 4),
    ("batch_get_session_start", (["new"],), None, 4),
    ("health_check", (), (2,), 4),
]


@pytest.fixture(scope="module")
def masterless(tmp_path_factory: pytest.TempPathFactory):
    """A store whose master has died."""
    with live_pool(tmp_path_factory.mktemp("masterless")) as pool:
        store = MooncakeDistributedStore()
        assert store.setup("localhost", "", 0, 0, "tcp", "", pool.url) == 0
        assert pool.master
        pool.master.kill()
        yield store
        begin = time.monotonic()
        assert store.close() == 0
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("method", "args", "answers", "longest"), WITHOUT_A_MASTER, ids=[c[0] for c in WITHOUT_A_MASTER]
)
def test_without_a_master_each_call_answers_by_its_deadline(
    masterless: MooncakeDistributedStore,
    method: str,
    args: tuple[object, ...],
    answers: object,
    longest: float,
) -> None:
    begin = time.monotonic()
    answer = getattr(masterless, method)(*args)
    assert time.monotonic() - begin < longest
    if isinstance(answers, tuple):
        assert answer in answers
    else:
        assert answer and all(code < 0 for code in answer)


def test_stored_objects_are_present_when_the_master_is_back(connect: Connect, own_pool: LivePool) -> None:
    store = connect(own_pool)
    assert store.put("kept", b"x" * MIB) == 0
    assert own_pool.master
    own_pool.master.kill()
    own_pool.start_master()
    end = time.monotonic() + 10
    while store.get("kept") != b"x" * MIB:
        assert time.monotonic() < end
        time.sleep(0.1)
