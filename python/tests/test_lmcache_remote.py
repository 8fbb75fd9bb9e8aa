"""LMCache's remote connector over stand-ins of LMCache's own classes: full memory, names, and refusals."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import kvpool
import pytest

CHUNK = 64


class RemoteConnector:
    """Stands for LMCache's base class."""

    save_chunk_meta = False
    meta_shapes: tuple[int, ...] = (CHUNK,)
    meta_dtypes = ("torch.uint8",)
    meta_fmt = "KV_2LTD"

    def __init__(self, config: Any, metadata: Any) -> None:
        assert metadata is not None

    def reshape_partial_chunk(self, room: Any, length: int) -> Any:
        if length != CHUNK:
            raise ValueError(f"{length} bytes")
        return room


class Key:
    """A key of LMCache's."""

    def __init__(self, number: int) -> None:
        self.number = number

    def to_string(self) -> str:
        return f"tiny@1@0@{self.number:064x}@bfloat16"


KEYS = [Key(number) for number in range(4)]


class Room:
    """Room for a chunk in LMCache's memory."""

    data_ptr = 4096

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.references = 1

    def get_size(self) -> int:
        return CHUNK

    def ref_count_up(self) -> None:
        self.references += 1

    def ref_count_down(self) -> None:
        self.references -= 1
        assert self.references >= 0
        if self.references == 0:
            self.memory.used.remove(self)


class Memory:
    """Stands for LMCache's memory of this host. LMCache's own wait for memory has no end."""

    config = metadata = "of an engine"

    def __init__(self, rooms: int = 100) -> None:
        self.rooms = rooms
        self.used: list[Room] = []
        self.asked = 0
        self.frees_at: int | None = None

    def allocate(self, _shapes: Any, _types: Any, _fmt: Any, eviction: bool = True, busy_loop: bool = True) -> Any:
        self.asked += 1
        if self.asked == self.frees_at:
            self.rooms += 1
        if len(self.used) < self.rooms:
            self.used.append(Room(self))
            return self.used[-1]
        assert not busy_loop, "the memory is full: this get would wait for ever"
        return None


class Pool:
    """Stands for the pool and the connection to it. It has a chunk under every name that is not missing."""

    def __init__(self) -> None:
        self.outcome: Any = CHUNK
        self.missing: set[int] = set()
        self.error: BaseException | None = None
        self.names: list[str] = []
        self.patterns: list[str] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.has_begun = threading.Event()

    def __call__(self, _settings: Any) -> Pool:
        return self

    def call(self, _what: str, otherwise: Any, ask: Callable[[Any], Any]) -> Any:
        try:
            return ask(self)
        except kvpool.Error:
            return otherwise

    def batch_put(self, names: Sequence[str], _blocks: Any) -> list[Any]:
        self._wait()
        self.names += names
        return [True] * len(names)

    def is_exist(self, names: Sequence[str]) -> list[bool]:
        return [at not in self.missing for at in range(len(names))]

    def _wait(self) -> None:
        self.has_begun.set()
        assert self.goes_on.wait(60)
        if self.error is not None:
            raise self.error

    def batch_get(self, names: Sequence[str], _into: Any) -> list[Any]:
        self._wait()
        self.names += names
        return [None if at in self.missing else self.outcome for at in range(len(names))]

    def list(self, pattern: str) -> list[Any]:
        self.patterns.append(pattern)
        return [types.SimpleNamespace(key=name) for name in self.names]


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> Iterator[Any]:
    """`kvpool.lmcache.remote` without LMCache and without a pool."""
    stands: dict[str, dict[str, Any]] = {
        "protocol": {"RemoteMetadata": object},
        "storage_backend.connector.base_connector": {"RemoteConnector": RemoteConnector},
    }
    for name, content in stands.items():
        module = types.ModuleType(f"lmcache.v1.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "kvpool.lmcache.remote", raising=False)
    module = importlib.import_module("kvpool.lmcache.remote")
    monkeypatch.setattr(module, "Connection", pool)
    yield module
    sys.modules.pop("kvpool.lmcache.remote", None)


def connector(
    remote: Any,
    *,
    memory: Any = None,
    use_layerwise: bool = False,
    serde: str | None = "naive",
    salt: str | None = None,
) -> Any:
    plugin = "remote_storage_plugin.kvpool"
    extra = {f"{plugin}.module_path": "kvpool.lmcache", f"{plugin}.class_name": "KvpoolConnector"}
    if salt is not None:
        extra[f"{plugin}.salt"] = salt
    config = types.SimpleNamespace(extra_config=extra, use_layerwise=use_layerwise, remote_serde=serde)
    return remote.KvpoolConnector(None, memory or Memory(), config)


def test_chunks_of_one_layer_are_refused(remote: Any) -> None:
    with pytest.raises(ValueError, match="set use_layerwise to false"):
        connector(remote, use_layerwise=True)


def test_chunks_of_all_layers_are_stored(remote: Any) -> None:
    assert connector(remote, use_layerwise=False)


def test_a_get_ends_when_lmcaches_memory_is_full(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_ROOM_WAIT", 0.1)
    memory = Memory(rooms=2)
    chunks = asyncio.run(connector(remote, memory=memory).batched_get(KEYS))
    assert [chunk is not None for chunk in chunks] == [True, True, False, False]
    assert memory.used == chunks[:2]


def test_a_get_without_any_memory_asks_the_pool_for_nothing(
    remote: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_ROOM_WAIT", 0.1)
    assert asyncio.run(connector(remote, memory=Memory(rooms=0)).get(KEYS[0])) is None
    assert not pool.has_begun.is_set()


def test_a_get_waits_for_memory_that_a_store_gives_back(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_ROOM_WAIT", 600.0)
    memory = Memory(rooms=0)
    memory.frees_at = 3
    assert asyncio.run(connector(remote, memory=memory).get(KEYS[0])) in memory.used


def test_a_get_gives_the_memory_of_its_misses_back(remote: Any, pool: Pool) -> None:
    memory = Memory()
    made = connector(remote, memory=memory)
    pool.missing = {1, 3}
    chunks = asyncio.run(made.batched_get(KEYS))
    assert memory.used == [chunks[0], chunks[2]]
    chunks = asyncio.run(made.batched_get_non_blocking("lookup", KEYS))
    assert len(chunks) == 1 and len(memory.used) == 3
    memory.used.clear()
    for wrong in [kvpool.Error("damaged"), CHUNK - 1, 0]:
        pool.missing, pool.outcome = set(), wrong
        assert asyncio.run(made.batched_get(KEYS)) == [None] * 4
        assert not memory.used


@pytest.mark.parametrize("error", [kvpool.Error("gone"), MemoryError("full"), TypeError("wrong")])
def test_a_get_that_fails_gives_its_memory_back(remote: Any, pool: Pool, error: Exception) -> None:
    memory = Memory()
    pool.error = error
    made = connector(remote, memory=memory)
    if isinstance(error, kvpool.Error):
        assert asyncio.run(made.batched_get(KEYS)) == [None] * 4
    else:
        with pytest.raises(type(error)):
            asyncio.run(made.batched_get(KEYS))
    assert not memory.used


def test_a_get_that_cannot_allocate_gives_its_memory_back(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    allocate = memory.allocate

    def allocate_twice(*args: Any, **named: Any) -> Any:
        if len(memory.used) == 2:
            raise RuntimeError("LMCache is closed")
        return allocate(*args, **named)

    monkeypatch.setattr(memory, "allocate", allocate_twice)
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(connector(remote, memory=memory).batched_get(KEYS))
    assert not memory.used


def test_a_get_that_fails_after_its_first_chunk_gives_all_its_memory_back(
    remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    made = connector(remote, memory=memory)
    cuts = [made.reshape_partial_chunk]
    # The first chunk takes the only cut.
    monkeypatch.setattr(made, "reshape_partial_chunk", lambda *chunk: cuts.pop()(*chunk))
    with pytest.raises(LookupError):
        asyncio.run(made.batched_get(KEYS))
    assert not memory.used


def test_a_get_that_lmcache_cancels_gives_its_memory_back(remote: Any, pool: Pool) -> None:
    memory = Memory()
    made = connector(remote, memory=memory)
    pool.goes_on.clear()

    async def cancel() -> None:
        getting = asyncio.ensure_future(made.batched_get(KEYS))
        assert await asyncio.to_thread(pool.has_begun.wait, 60)
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        assert len(memory.used) == 4
        pool.goes_on.set()
        end = asyncio.get_running_loop().time() + 60
        while memory.used:
            assert asyncio.get_running_loop().time() < end, "the chunks were not given back"
            await asyncio.sleep(0.005)

    asyncio.run(cancel())


class Instrumented:
    """Puts like LMCache's wrapper of every connector, which frees the memory when its wait ends."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector

    async def put(self, chunks: Sequence[Room]) -> None:
        try:
            await self.connector.batched_put(KEYS[: len(chunks)], chunks)
        finally:
            for chunk in chunks:
                chunk.ref_count_down()


@pytest.mark.parametrize("error", [None, kvpool.Error("gone"), TypeError("wrong")])
def test_a_put_gives_its_memory_back(remote: Any, pool: Pool, error: Exception | None) -> None:
    memory = Memory()
    chunks = [memory.allocate(None, None, None) for _ in range(3)]
    pool.error = error
    putting = Instrumented(connector(remote, memory=memory)).put(chunks)
    if isinstance(error, TypeError):
        with pytest.raises(TypeError):
            asyncio.run(putting)
    else:
        asyncio.run(putting)
    assert not memory.used
    assert len(pool.names) == (3 if error is None else 0)


def test_a_put_that_lmcache_cancels_keeps_its_memory_until_it_has_ended(
    remote: Any, pool: Pool
) -> None:
    memory = Memory()
    chunks = [memory.allocate(None, None, None) for _ in range(3)]
    made = Instrumented(connector(remote, memory=memory))
    pool.goes_on.clear()

    async def cancel() -> None:
        putting = asyncio.ensure_future(made.put(chunks))
        assert await asyncio.to_thread(pool.has_begun.wait, 60)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        # The put still reads the memory.
        assert memory.used == chunks
        pool.goes_on.set()
        # The end of the loop waits for the put's thread, and runs no callback afterwards.

    asyncio.run(cancel())
    assert not memory.used
    assert pool.names == [f"lmcache:{key.to_string()}" for key in KEYS[:3]]


def test_a_put_that_lmcache_cancels_before_it_begins_gives_its_memory_back(
    remote: Any, pool: Pool
) -> None:
    memory = Memory()
    chunks = [memory.allocate(None, None, None) for _ in range(3)]
    made = Instrumented(connector(remote, memory=memory))

    async def cancel() -> None:
        loop, goes_on = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
        before = loop.run_in_executor(None, goes_on.wait, 60)
        putting = asyncio.ensure_future(made.put(chunks))
        await asyncio.sleep(0)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert not pool.has_begun.is_set()
        goes_on.set()
        assert await before

    asyncio.run(cancel())
    assert not memory.used


def test_a_put_that_cannot_begin_gives_its_memory_back(remote: Any) -> None:
    memory = Memory()
    chunks = [memory.allocate(None, None, None)]
    made = Instrumented(connector(remote, memory=memory))

    async def put_without_threads() -> None:
        await asyncio.get_running_loop().shutdown_default_executor()
        with pytest.raises(RuntimeError):
            await made.put(chunks)

    asyncio.run(put_without_threads())
    assert not memory.used


def test_lmcaches_scheduler_looks_chunks_up_without_memory(remote: Any, pool: Pool) -> None:
    # The object that LMCache passes there has no attributes.
    made = connector(remote, memory=types.SimpleNamespace())
    assert made.batched_contains(KEYS) == 4
    assert made.exists_sync(KEYS[0]) and asyncio.run(made.exists(KEYS[0]))
    pool.missing = {2}
    assert asyncio.run(made.batched_async_contains("lookup", KEYS)) == 2
    # The scheduler never loads, and has no room for chunks.
    assert asyncio.run(made.batched_get(KEYS)) == [None] * 4
    assert not pool.has_begun.is_set()


def test_chunks_with_different_serdes_have_different_names(remote: Any, pool: Pool) -> None:
    for serde in ("naive", None, "cachegen", "kivi"):
        made = connector(remote, serde=serde)
        asyncio.run(made.get(KEYS[0]))
        assert asyncio.run(made.list())[-1] == KEYS[0].to_string()
    naive, without, cachegen, kivi = pool.names
    assert naive == without == f"lmcache:{KEYS[0].to_string()}"
    assert len({naive, cachegen, kivi}) == 3
    assert pool.patterns[2] == r"^lmcache\(cachegen\):"


def test_chunks_with_different_salts_have_different_names(remote: Any, pool: Pool) -> None:
    for salt, serde in ((None, "naive"), ("", "naive"), ("e4m3", "naive"), ("e5m2", "naive"), ("e4m3", "kivi")):
        made = connector(remote, salt=salt, serde=serde)
        asyncio.run(made.get(KEYS[0]))
        assert asyncio.run(made.list())[-1] == KEYS[0].to_string()
    without, empty, *salted = pool.names
    assert without == empty == f"lmcache:{KEYS[0].to_string()}"
    assert len({empty, *salted}) == 4
