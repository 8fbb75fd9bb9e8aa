"""Objects: the results of puts, gets, queries and removals."""

from __future__ import annotations

import os

import numpy as np
import pytest
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from lent_memory import Memory
from live_pools import MIB


def test_a_value_comes_back_as_it_was_put(store: MooncakeDistributedStore, key: str) -> None:
    for number, size in enumerate((1, 4096, 65_537, 3 * MIB + 5)):
        value = os.urandom(size)
        assert store.put(f"{key}-{number}", value) == 0
        assert store.get(f"{key}-{number}") == value
        assert store.get_size(f"{key}-{number}") == size


def test_a_put_of_a_present_key_succeeds_and_keeps_the_old_bytes(
    store: MooncakeDistributedStore, key: str
) -> None:
    assert store.put(key, b"old") == 0
    assert store.put(key, b"newer") == 0
    assert store.get(key) == b"old"


def test_an_upsert_replaces_the_bytes(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    assert store.upsert(key, b"one") == 0
    assert store.get(key) == b"one"
    assert store.upsert(key, b"second") == 0
    assert store.get(key) == b"second"
    assert store.upsert_parts(key, b"th", b"ird") == 0
    assert store.get(key) == b"third"
    assert store.upsert_batch([key], [b"4th"]) == 0
    assert store.get(key) == b"4th"
    fifth = memory(b"the fifth")
    assert store.upsert_from(key, fifth.ptr, fifth.size) == 0
    assert store.batch_upsert_from([key], [fifth.ptr], [fifth.size]) == [0]
    assert store.get(key) == b"the fifth"


def test_values_may_be_any_bytes_in_one_piece(store: MooncakeDistributedStore, key: str) -> None:
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    for number, value in enumerate((b"ab", bytearray(b"ab"), memoryview(b"xaby")[1:3], array)):
        assert store.put(f"{key}-{number}", value) == 0
    assert store.get_batch([f"{key}-{n}" for n in range(4)]) == [b"ab", b"ab", b"ab", array.tobytes()]
    with pytest.raises(BufferError):
        store.put(key, array[:, ::2])


def test_parts_are_put_one_after_the_other(store: MooncakeDistributedStore, key: str) -> None:
    assert store.put_parts(key, b"meta", b"", bytearray(b"data"), config=ReplicateConfig()) == 0
    assert store.get(key) == b"metadata"
    assert store.put_parts(f"{key}-none") == -600


def test_a_batch_of_puts_answers_the_first_error(store: MooncakeDistributedStore, key: str) -> None:
    keys = [f"{key}-{n}" for n in range(3)]
    assert store.put_batch(keys, [b"a", b"bb", b"ccc"]) == 0
    assert store.get_batch([*keys, f"{key}-none", keys[0]]) == [b"a", b"bb", b"ccc", b"", b"a"]
    # Only the bad item fails.
    assert store.put_batch([f"{key}-x", "", f"{key}-y"], [b"x", b"?", b"y"]) == -600
    assert store.get_batch([f"{key}-x", f"{key}-y"]) == [b"x", b"y"]
    assert store.put_batch(keys, [b"a"]) == -600
    assert store.put_batch([], []) == 0


def test_an_empty_value_is_refused(store: MooncakeDistributedStore, key: str) -> None:
    assert store.put(key, b"") == -600
    assert store.is_exist(key) == 0


def test_a_miss_is_empty_bytes_and_704(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    target = memory(16)
    assert store.get(key) == b""
    assert store.get_batch([key, key]) == [b"", b""]
    assert store.get_buffer(key) is None
    assert store.batch_get_buffer([key]) == [None]
    assert store.get_into(key, target.ptr, 16) == -704
    assert store.get_size(key) == -704
    assert store.is_exist(key) == 0
    assert store.remove(key) == -704
    assert store.get_replica_desc(key) == []


def test_memory_is_put_and_got_by_its_address(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    source, target = memory(os.urandom(MIB)), memory(MIB + 7)
    assert store.register_buffer(source.ptr, source.size) == 0
    assert store.register_buffer(target.ptr, target.size) == 0
    assert store.put_from(key, source.ptr, source.size) == 0
    assert store.get_into(key, target.ptr, target.size) == MIB
    assert bytes(target)[:MIB] == bytes(source)
    # A buffer may have the exact length, but not less.
    assert store.get_into(key, target.ptr + 7, MIB) == MIB
    assert store.get_into(key, target.ptr, MIB - 1) == -600
    assert store.unregister_buffer(source.ptr) == 0
    assert store.unregister_buffer(source.ptr) == -600
    assert store.unregister_buffer(target.ptr) == 0


def test_memory_need_not_be_registered(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    source, target = memory(os.urandom(100_000)), memory(100_000)
    assert store.put_from(key, source.ptr, source.size) == 0
    assert store.get_into(key, target.ptr, target.size) == 100_000
    assert bytes(target) == bytes(source)


def test_a_batch_answers_each_key_for_itself(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    keys = [f"{key}-{n}" for n in range(4)]
    sources = [memory(os.urandom(1000 * (n + 1))) for n in range(4)]
    pointers, sizes = [m.ptr for m in sources], [m.size for m in sources]
    assert store.batch_put_from(keys, pointers, sizes) == [0] * 4
    targets = [memory(4000) for _ in range(6)]
    answers = store.batch_get_into(
        [*keys, f"{key}-none", keys[0]], [m.ptr for m in targets], [4000, 4000, 2999, 4000, 4000, 4000]
    )
    assert answers == [1000, 2000, -600, 4000, -704, 1000]
    assert bytes(targets[3]) == bytes(sources[3])
    assert bytes(targets[5])[:1000] == bytes(sources[0])
    assert store.batch_get_into([], [], []) == []
    assert store.batch_get_into(keys, pointers[:3], sizes) == [-600] * 4


def test_objects_are_gathered_from_and_scattered_to_several_buffers(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    keys = [f"{key}-{n}" for n in range(3)]
    parts = [[memory(os.urandom(1 + 777 * (k + n))) for n in range(5)] for k in range(3)]
    pointers = [[m.ptr for m in of_key] for of_key in parts]
    sizes = [[m.size for m in of_key] for of_key in parts]
    assert store.batch_put_from_multi_buffers(keys, pointers, sizes, ReplicateConfig()) == [0] * 3
    assert store.get(keys[2]) == b"".join(bytes(m) for m in parts[2])
    targets = [[memory(m.size) for m in of_key] for of_key in parts]
    answers = store.batch_get_into_multi_buffers(keys, [[m.ptr for m in t] for t in targets], sizes, True)
    assert answers == [sum(of_key) for of_key in sizes]
    assert [[bytes(m) for m in t] for t in targets] == [[bytes(m) for m in p] for p in parts]
    # A list of another length and a null pointer fail only their own keys.
    bad = [pointers[0], pointers[1][:2], [0, *pointers[2][1:]]]
    assert store.batch_get_into_multi_buffers(keys, bad, sizes) == [answers[0], -600, -600]


def test_metadata_comes_before_the_data(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    data, metadata = memory(b"data"), memory(b"meta")
    assert store.put_from_with_metadata(key, data.ptr, metadata.ptr, data.size, metadata.size) == 0
    assert store.get(key) == b"metadata"


def test_a_buffer_shows_the_object_in_place_and_keeps_it(store: MooncakeDistributedStore, key: str) -> None:
    value = os.urandom(2 * MIB)
    assert store.put(key, value) == 0
    handle = store.get_buffer(key)
    assert handle is not None
    assert handle.in_place
    assert handle.size() == len(handle) == 2 * MIB
    array = np.frombuffer(handle, dtype=np.uint8)
    assert array.ctypes.data == handle.ptr()
    assert not array.flags.writeable
    del handle
    # After the removal its room is reused repeatedly, but the shown bytes do not change.
    assert store.remove(key, force=True) == 0
    for number in range(200):
        store.upsert(f"{key}-filler-{number % 3}", os.urandom(2 * MIB))
    assert array.tobytes() == value


def test_buffers_of_a_batch_are_copies(store: MooncakeDistributedStore, key: str) -> None:
    values = [os.urandom(1 + 300_000 * n) for n in range(3)]
    keys = [f"{key}-{n}" for n in range(3)]
    assert store.put_batch(keys, values) == 0
    handles = store.batch_get_buffer([keys[0], f"{key}-none", keys[2], keys[0]])
    assert [bytes(handle) if handle else None for handle in handles] == [
        values[0],
        None,
        values[2],
        values[0],
    ]


def test_existence_is_1_or_0_and_nothing_for_nothing(store: MooncakeDistributedStore, key: str) -> None:
    keys = [f"{key}-{n}" for n in range(1024)]
    assert store.put_batch(keys[::2], [b"x"] * 512) == 0
    assert store.batch_is_exist(keys) == [1, 0] * 512
    assert store.is_exist(keys[0]) == 1
    assert store.is_exist(keys[1]) == 0
    assert store.batch_is_exist([]) == []
    assert store.batch_is_exist([keys[0], "", keys[1], "x" * 1025]) == [1, -600, 0, -600]
    assert store.is_exist("") == -600


def test_a_leased_object_is_removed_only_by_force(store: MooncakeDistributedStore, key: str) -> None:
    assert store.put(key, b"x") == 0
    assert store.is_exist(key) == 1
    assert store.remove(key) == -706
    assert store.remove(key, force=True) == 0
    assert store.remove(key, force=True) == -704
    assert store.is_exist(key) == 0


def test_removal_of_many_answers_each(store: MooncakeDistributedStore, key: str) -> None:
    keys = [f"{key}-{n}" for n in range(3)]
    assert store.put_batch(keys, [b"x"] * 3) == 0
    assert store.is_exist(keys[1]) == 1
    assert store.batch_remove([*keys, ""]) == [0, -706, 0, -600]
    assert store.batch_remove(keys, force=True) == [-704, 0, -704]
    assert store.batch_remove([]) == []


def test_removal_by_pattern_counts_removed_objects(store: MooncakeDistributedStore, key: str) -> None:
    assert store.put_batch([f"{key}-a-{n}" for n in range(5)], [b"x"] * 5) == 0
    assert store.put(f"{key}-b", b"x") == 0
    assert store.remove_by_regex(f"^{key}-a-[0-3]$") == 4
    assert store.remove_by_regex(f"^{key}-none$") == 0
    assert store.is_exist(f"{key}-a-4") == 1
    assert store.remove_by_regex(f"^{key}-a-4$") == 0
    assert store.remove_by_regex(f"^{key}-a-4$", force=True) == 1
    assert store.remove_by_regex("(") == -600


def test_removal_of_all_keeps_leased_objects_unless_forced(store: MooncakeDistributedStore, key: str) -> None:
    store.remove_all(force=True)
    assert store.put_batch([f"{key}-{n}" for n in range(4)], [b"x"] * 4) == 0
    assert store.is_exist(f"{key}-0") == 1
    assert store.remove_all() == 3
    assert store.remove_all(force=True) == 1
    assert store.remove_all() == 0


def test_replicas_are_described(store: MooncakeDistributedStore, key: str) -> None:
    assert store.put(key, b"x" * 100) == 0
    described = store.batch_get_replica_desc([key, f"{key}-none", ""])
    assert list(described) == [key]
    (replica,) = described[key]
    assert replica.is_memory_replica()
    assert not replica.is_disk_replica() and not replica.is_local_disk_replica()
    buffer = replica.get_memory_descriptor().buffer_descriptor
    assert (buffer.size, buffer.transport_endpoint) == (100, "node-0")
    assert store.get_replica_desc(key) == [replica]
    # A description leases nothing.
    assert store.remove(key) == 0


def test_replicas_are_cleared_with_their_objects(store: MooncakeDistributedStore, key: str) -> None:
    keys = [f"{key}-{n}" for n in range(3)]
    assert store.put_batch(keys, [b"x"] * 3) == 0
    assert store.batch_replica_clear([keys[0], f"{key}-none"]) == [keys[0]]
    assert store.batch_replica_clear(keys[1:], "elsewhere:1") == []
    assert store.batch_replica_clear(keys[1:], "node-0") == keys[1:]
    assert store.batch_is_exist(keys) == [0, 0, 0]


def test_pins_and_replica_counts_are_passed_on(store: MooncakeDistributedStore, key: str) -> None:
    assert store.put(key, b"x", ReplicateConfig(with_hard_pin=True)) == 0
    assert store.remove(key) == -706
    assert store.remove(key, force=True) == 0
    soft = ReplicateConfig(with_soft_pin=True, soft_pin_ttl_ms=60_000, replica_num=3)
    # The pool has one node, so fewer replicas are made. That is no error.
    assert store.put(key, b"x", soft) == 0
    assert len(store.get_replica_desc(key)) == 1
    for bad in (
        ReplicateConfig(replica_num=0),
        ReplicateConfig(replica_num=-1),
        ReplicateConfig(soft_pin_ttl_ms=-1),
    ):
        assert store.put(f"{key}-bad", b"x", bad) == -600
