"""LMCache's L2 adapter over stand-ins of LMCache's own classes and of the pool: the names of objects."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import kvpool
import pytest

HASH = bytes(range(32))
SHAPE = (2, 4, 8)
BFLOAT, HALF, BYTES = "torch.bfloat16", "torch.float16", "torch.uint8"


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of LMCache, which has no element type."""

    chunk_hash: bytes = HASH
    model_name: str = "org/tiny"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""


@dataclasses.dataclass
class Layout:
    """LMCache's description of the objects of a group."""

    dtypes: list[str]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [SHAPE] * len(self.dtypes)


class Item:
    """An object in LMCache's memory. It lists its parts, except as an object of LMCache's own checks."""

    data_ptr = 4096

    def __init__(self, *parts: str, size: int = 64, shape: tuple[int, ...] = SHAPE, lists_parts: bool = True) -> None:
        self.size = size
        self.metadata = types.SimpleNamespace(dtype=parts[0], shape=shape, dtypes=None, shapes=None)
        if lists_parts:
            self.metadata.dtypes, self.metadata.shapes = list(parts), [shape] * len(parts)

    def get_size(self) -> int:
        return self.size

    def set_used_size(self, size: int) -> None:
        assert size <= self.size
        self.size = size


def serialized(size: int = 64) -> Item:
    """LMCache passes serialized objects as one row of bytes."""
    return Item(BYTES, size=size, shape=(size,))


class Bitmap:
    """Stands for LMCache's bitmap."""

    def __init__(self, size: int) -> None:
        self.bits = [False] * size

    def set(self, at: int) -> None:
        self.bits[at] = True

    def batched_set(self, all_at: Sequence[int]) -> None:
        for at in all_at:
            self.set(at)


@dataclasses.dataclass
class Result:
    """Stands for LMCache's result of a store."""

    is_successful: bool
    size: int


class Interface:
    """Stands for LMCache's base class."""

    def __init__(self) -> None:
        self.deleted: list[tuple[list[Key], list[int]]] = []

    def _notify_keys_stored(self, keys: list[Key], sizes: list[int]) -> None:
        pass

    def _notify_keys_accessed(self, keys: list[Key]) -> None:
        pass

    def _notify_keys_deleted(self, keys: list[Key], sizes: list[int]) -> None:
        self.deleted.append((keys, sizes))


class Notifier:
    """Stands for LMCache's eventfd."""

    def __init__(self) -> None:
        self.ends = os.pipe()

    def fileno(self) -> int:
        return self.ends[0]

    def notify(self) -> None:
        os.write(self.ends[1], b"x")

    def close(self) -> None:
        for end in self.ends:
            os.close(end)


class Lease:
    """A lease that is long enough for every test."""

    left = 60.0

    def __init__(self, pool: Pool, names: Sequence[str]) -> None:
        self.pool, self.names = pool, list(names)
        pool.leased += self.names

    def renew(self) -> int:
        return 0

    def release(self) -> None:
        for name in self.names:
            self.pool.leased.remove(name)


class Pool:
    """Stands for the pool that the adapters of all tests share, and for the connections to it."""

    def __init__(self) -> None:
        self.stored: dict[str, int] = {}
        self.leased: list[str] = []
        self.is_away = False

    def __call__(self, _settings: Any, _memory: Any) -> Pool:
        return self

    def pool(self) -> Pool | None:
        return None if self.is_away else self

    def close(self) -> None:
        pass

    def batch_put(self, names: Sequence[str], pieces: Sequence[tuple[int, int]]) -> list[bool]:
        new = [name not in self.stored for name in names]
        self.stored.update({name: size for name, (_, size) in zip(names, pieces, strict=True)})
        return new

    def batch_get(self, names: Sequence[str], _pieces: Any) -> list[int | None]:
        return [self.stored.get(name) for name in names]

    def match_prefix(self, names: Sequence[str]) -> Any:
        found = 0
        while found < len(names) and names[found] in self.stored:
            found += 1
        return types.SimpleNamespace(blocks=found, lease=Lease(self, names[:found]) if found else None)

    def is_exist(self, names: Sequence[str], *, lease: bool) -> list[bool]:
        return [name in self.stored for name in names]

    def describe(self, names: Sequence[str]) -> list[Any]:
        there = [self.stored.get(name) for name in names]
        return [None if size is None else types.SimpleNamespace(length=size) for size in there]

    def remove(self, names: Sequence[str]) -> list[bool]:
        return [self.stored.pop(name, None) is not None for name in names]


def until(is_so: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + 60
    while not (answer := is_so()):
        assert time.monotonic() < end, what
        time.sleep(0.005)
    return answer


class Server:
    """An adapter, with the calls of LMCache's server."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def store(self, item: Item, key: Key = Key()) -> bool:
        number = self.adapter.submit_store_task([key], [item])
        done = until(self.adapter.pop_completed_store_tasks, "the store")
        return bool(done[number].is_successful)

    def finds(self, *types: str, key: Key = Key()) -> bool:
        """Looks an object up, and unlocks it if it was found."""
        found = self.locks({key.object_group_id: Layout(list(types))} if types else {}, key)
        self.adapter.submit_unlock([key])
        return found

    def locks(self, layouts: Any, key: Key = Key()) -> bool:
        number = self.adapter.submit_lookup_and_lock_task([key], layouts)
        found = until(lambda: self.adapter.query_lookup_and_lock_result(number), "the lookup")
        return bool(found.bits[0])

    def loads(self, item: Item, key: Key = Key()) -> bool:
        number = self.adapter.submit_load_task([key], [item])
        return bool(until(lambda: self.adapter.query_load_result(number), "the load").bits[0])


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> Iterator[Callable[..., Server]]:
    """Makes adapters with `kvpool.lmcache.l2`, without LMCache."""
    stands: dict[str, dict[str, Any]] = {
        "lmcache_native": {"Bitmap": Bitmap},
        "v1.distributed.internal_api": {"L2StoreResult": Result},
        "v1.distributed.l2_adapters.base": {"L2AdapterInterface": Interface},
        "v1.platform": {"create_event_notifier": Notifier},
    }
    for name, content in stands.items():
        module = types.ModuleType(f"lmcache.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "kvpool.lmcache.l2", raising=False)
    module = importlib.import_module("kvpool.lmcache.l2")
    monkeypatch.setattr(module, "Connection", pool)
    made = []

    def make(**params: Any) -> Server:
        made.append(module.KvpoolL2Adapter(params))
        return Server(made[-1])

    yield make
    for adapter in made:
        adapter.close()
    sys.modules.pop("kvpool.lmcache.l2", None)


def test_engines_with_other_element_types_share_no_object(serve: Callable[..., Server], pool: Pool) -> None:
    brain, half = serve(), serve()
    assert brain.store(Item(BFLOAT))
    assert brain.finds(BFLOAT) and brain.loads(Item(BFLOAT))
    assert not half.finds(HALF) and not half.loads(Item(HALF))
    assert half.store(Item(HALF))
    assert half.finds(HALF) and brain.finds(BFLOAT)
    assert len(pool.stored) == 2
    # A third server learns the types from its lookups.
    assert serve().finds(BFLOAT)


def test_objects_with_different_types_of_parts_have_different_names(serve: Callable[..., Server]) -> None:
    server = serve()
    assert server.store(Item(BFLOAT, HALF))
    assert server.finds(BFLOAT, HALF)
    assert not serve().finds(HALF, BFLOAT)
    assert not serve().finds(BFLOAT)


def test_a_name_ends_with_the_hash(serve: Callable[..., Server], pool: Pool) -> None:
    assert serve().store(Item(BFLOAT))
    assert list(pool.stored) == [f"lmcache:org/tiny@1000100@0@@bfloat16@{HASH.hex()}"]


def test_objects_with_different_salts_have_different_names(serve: Callable[..., Server], pool: Pool) -> None:
    servers = [serve(salt=salt) for salt in ("", "e4m3", "e5m2")]
    for server in servers:
        assert not server.finds(BYTES)
        assert server.store(Item(BYTES)) and server.finds(BYTES) and server.loads(Item(BYTES))
    assert len(pool.stored) == 3
    assert f"lmcache:org/tiny@1000100@0@@uint8@{HASH.hex()}" in pool.stored
    assert serve(salt="e5m2").finds(BYTES)


def test_a_lookup_without_layouts_finds_this_servers_objects(serve: Callable[..., Server]) -> None:
    server = serve()
    assert server.store(Item(BFLOAT))
    assert server.finds()
    assert not serve().finds()


@pytest.mark.parametrize("layouts", [None, Layout([]), {0: Layout([])}, {1: Layout([HALF])}])
def test_a_lookup_with_layouts_without_types_finds_this_servers_objects(
    serve: Callable[..., Server], layouts: Any
) -> None:
    server = serve()
    assert not server.locks(layouts)
    assert server.store(Item(BFLOAT))
    assert server.locks(layouts)
    assert server.store(Item(BFLOAT), Key(HASH[::-1]))


def test_objects_of_lmcaches_own_checks_are_stored(serve: Callable[..., Server], pool: Pool) -> None:
    server = serve()
    assert server.store(Item(BFLOAT, lists_parts=False))
    assert server.finds() and server.loads(Item(BFLOAT, lists_parts=False))
    assert list(pool.stored) == [f"lmcache:org/tiny@1000100@0@@bfloat16@{HASH.hex()}"]


def test_a_lookup_without_the_pool_tells_the_types(serve: Callable[..., Server], pool: Pool) -> None:
    server = serve(serde="fp8 e4m3")
    pool.is_away = True
    assert not server.finds(BFLOAT)
    pool.is_away = False
    assert server.store(serialized()) and server.finds(BFLOAT)


def test_serialized_objects_are_named_by_the_serde_and_the_types_before_it(
    serve: Callable[..., Server], pool: Pool
) -> None:
    plain, fp8, other = serve(), serve(serde="fp8 e4m3"), serve(serde="fp8 e5m2")
    for server in (plain, fp8, other):
        assert not server.finds(BFLOAT)
    assert plain.store(Item(BFLOAT))
    assert fp8.store(serialized()) and fp8.finds(BFLOAT) and fp8.loads(serialized())
    assert not other.finds(BFLOAT)
    assert other.store(serialized()) and other.finds(BFLOAT)
    assert plain.finds(BFLOAT)
    assert len(pool.stored) == 3
    half = serve(serde="fp8 e4m3")
    assert not half.finds(HALF)
    assert half.store(serialized()) and half.finds(HALF)
    assert len(pool.stored) == 4


def test_a_serialized_object_that_is_shorter_than_its_room_is_loaded(serve: Callable[..., Server], pool: Pool) -> None:
    server = serve(serde="zip")
    assert not server.finds(BFLOAT)
    written = serialized(size=64)
    written.set_used_size(40)
    assert server.store(written)
    assert list(pool.stored.values()) == [40]
    room = serialized(size=64)
    assert server.finds(BFLOAT) and server.loads(room)
    assert room.get_size() == 40
    # The bytes of a longer object are incomplete.
    assert not server.loads(serialized(size=39))


def test_an_object_that_is_shorter_than_its_room_is_a_miss_without_a_serde(serve: Callable[..., Server]) -> None:
    server = serve()
    assert server.store(Item(BFLOAT, size=40))
    room = Item(BFLOAT, size=64)
    assert not server.loads(room)
    assert room.get_size() == 64


def test_serialized_objects_without_a_named_serde_are_not_stored(
    serve: Callable[..., Server], pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    assert not server.finds(BFLOAT)
    assert not server.store(serialized())
    assert not pool.stored
    assert "set serde in adapter_params" in caplog.text


def test_serialized_objects_of_an_8_bit_cache_are_not_stored_as_its_own(
    serve: Callable[..., Server], pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    assert not server.finds(BYTES)
    assert not server.store(serialized())
    assert not pool.stored
    assert "set serde in adapter_params" in caplog.text
    assert server.store(Item(BYTES)) and server.finds(BYTES) and server.loads(Item(BYTES))
    assert not server.loads(serialized())


@pytest.mark.parametrize("kind", [BYTES, BFLOAT])
def test_serialized_objects_before_the_first_lookup_have_no_name(
    serve: Callable[..., Server], pool: Pool, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    server = serve()
    assert not server.store(serialized()) and not server.loads(serialized())
    assert not pool.stored
    assert "set serde in adapter_params" in caplog.text
    # These objects gave no types either.
    assert not server.finds()
    assert not server.finds(kind)
    assert server.store(Item(kind)) and server.finds(kind) and server.loads(Item(kind))
    assert not server.loads(serialized())
    # Objects of LMCache's benchmark are also a row of bytes, without a list of parts.
    other = serve()
    assert other.store(Item(BYTES, shape=(64,), lists_parts=False), Key(model_name="bench"))


def test_an_8_bit_cache_is_stored_before_the_first_lookup(serve: Callable[..., Server]) -> None:
    server = serve()
    assert server.store(Item(BYTES)) and server.finds(BYTES) and server.loads(Item(BYTES))


def test_an_unlock_ends_the_lock_of_an_object_of_an_earlier_type(serve: Callable[..., Server], pool: Pool) -> None:
    server = serve()
    assert server.store(Item(BFLOAT))
    assert server.locks({0: Layout([BFLOAT])})
    assert len(pool.leased) == 1
    assert not server.locks({0: Layout([HALF])})
    server.adapter.submit_unlock([Key()])
    until(lambda: not pool.leased, "the unlock")


def test_a_delete_removes_the_object_of_every_type(serve: Callable[..., Server], pool: Pool) -> None:
    server = serve()
    assert server.store(Item(BFLOAT, size=64))
    assert not server.finds(HALF)
    assert server.store(Item(HALF, size=32))
    server.adapter.delete([Key()])
    assert not pool.stored
    assert server.adapter.deleted == [([Key(), Key()], [64, 32])]


class Panic(BaseException):
    """Stands for a panic of the native module, which is no `Exception`."""


@pytest.mark.parametrize("error", [ValueError("a bad reply"), Panic("a panic")])
def test_a_task_that_fails_has_a_result(
    serve: Callable[..., Server], pool: Pool, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    server = serve()
    assert server.store(Item(BFLOAT))

    def fail(*_args: Any, **_named: Any) -> Any:
        raise error

    for name in ("batch_put", "match_prefix", "batch_get"):
        monkeypatch.setattr(pool, name, fail)
    assert not server.finds(BFLOAT)
    assert not server.loads(Item(BFLOAT))
    assert not server.store(Item(BFLOAT))


def test_a_lookup_whose_hits_cannot_be_told_leaves_no_lock(
    serve: Callable[..., Server], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    assert server.store(Item(BFLOAT))

    def fail(_keys: Any) -> None:
        raise ValueError("a listener of LMCache's failed")

    monkeypatch.setattr(server.adapter, "_notify_keys_accessed", fail)
    assert not server.locks({0: Layout([BFLOAT])})
    until(lambda: not pool.leased, "the unlock")


def test_a_pool_that_fails_is_a_miss(serve: Callable[..., Server], pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    assert server.store(Item(BFLOAT))

    def refuse(*_args: Any, **_named: Any) -> Any:
        raise kvpool.UnreachableError("gone")

    for name in ("batch_put", "match_prefix", "batch_get"):
        monkeypatch.setattr(pool, name, refuse)
    monkeypatch.setattr(pool, "failed", lambda *_args: None, raising=False)
    assert not server.finds(BFLOAT)
    assert not server.loads(Item(BFLOAT))
    assert not server.store(Item(BFLOAT))
