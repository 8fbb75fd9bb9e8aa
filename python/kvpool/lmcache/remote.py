"""The pool as a remote connector of LMCache inside an engine."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lmcache.v1.protocol import RemoteMetadata  # type: ignore[import-not-found]
from lmcache.v1.storage_backend.connector.base_connector import (  # type: ignore[import-not-found]
    RemoteConnector,
)

import kvpool
from kvpool._engines.connection import Connection
from kvpool._engines.settings import PoolSettings
from kvpool.lmcache.names import start

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
# The connector has a method called `list`.
Chunks = list[Any]
Names = list[str]

_MODULES = ("kvpool.lmcache", "kvpool.lmcache.remote")
_OF_LMCACHE = ("module_path", "class_name")

_ROOM_WAIT = 1.0
"""The longest time that a get waits for LMCache's memory, in seconds. Stores that end free some of it."""
_ROOM_LOOK = 0.02
"""The time between two requests of a waiting get for memory, in seconds."""


@dataclasses.dataclass(frozen=True)
class Settings(PoolSettings):
    """The settings of the connector, besides `PoolSettings`."""

    salt: str = ""
    """Separates models with the same name, such as two sets of weights, and 8-bit element types."""


class KvpoolConnector(RemoteConnector):  # type: ignore[misc]
    """Stores LMCache's chunks in a pool that all hosts share.

    ```
    remote_url: "plugin://kvpool"
    remote_storage_plugins: ["kvpool"]
    extra_config:
      remote_storage_plugin.kvpool.module_path: kvpool.lmcache
      remote_storage_plugin.kvpool.class_name: KvpoolConnector
      remote_storage_plugin.kvpool.master: http://10.0.0.1:7070
    ```

    Further settings go beside `master`. A stored chunk is LMCache's description of the chunk and its bytes. The
    bytes move directly from and into LMCache's memory. A failure is a miss and a line in the log.

    Raises ValueError if LMCache stores its chunks layer by layer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any):
        if config.use_layerwise:
            # The room for a chunk has the shape of all layers, which a single layer does not fit. After a miss
            # LMCache's layerwise loader would take the bytes in the room for the layer.
            raise ValueError(
                "kvpool's remote connector does not support LMCache's use_layerwise: set use_layerwise to false"
            )
        self._loop = loop
        # LMCache's scheduler has no memory, and passes a stand-in without attributes. With
        # `enable_scheduler_bypass_lookup` the scheduler looks chunks up itself, and makes no other call.
        metadata = getattr(local_cpu_backend, "metadata", None)
        self._memory: Any = local_cpu_backend if metadata is not None else None
        if self._memory is not None:
            super().__init__(local_cpu_backend.config, metadata)
        settings = Settings.read(plugin_settings(config.extra_config or {}))
        self._prefix = _prefix(config.remote_serde, settings.salt)
        self._connection = Connection(settings)

    async def exists(self, key: Any) -> bool:
        return await self._apart(lambda: self.batched_contains([key]) == 1)

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """Returns how many leading keys are present. Each of them is leased for a short time."""
        return self._connection.call("looking chunks up", 0, lambda pool: self._leading(pool, keys))

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:
        return await self._apart(lambda: self.batched_contains(keys))

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> Chunks:
        getting = asyncio.get_running_loop().run_in_executor(None, self._get, keys)
        try:
            # LMCache cancels a get that takes too long. Its thread continues, and has chunks at its end.
            return await asyncio.shield(getting)
        except asyncio.CancelledError:
            getting.add_done_callback(_give_back)
            raise

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> Chunks:
        chunks = await self.batched_get(keys)
        leading = chunks.index(None) if None in chunks else len(chunks)
        for chunk in chunks[leading:]:
            if chunk is not None:
                chunk.ref_count_down()
        return chunks[:leading]

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        # LMCache reuses the memory when a cancelled put returns. The thread continues to read it.
        for chunk in memory_objs:
            chunk.ref_count_up()

        def put() -> None:
            try:
                self._put(keys, memory_objs)
            finally:
                _give_up(memory_objs)

        try:
            putting = asyncio.get_running_loop().run_in_executor(None, put)
        except BaseException:
            _give_up(memory_objs)
            raise
        # Without the shield, cancelling a put that has not begun would leave its memory allocated.
        await asyncio.shield(putting)

    def remove_sync(self, key: Any) -> bool:
        def remove(pool: kvpool.Pool) -> bool:
            return pool.remove([self._name(key)])[0] is True

        return self._connection.call("removing a chunk", False, remove)

    async def list(self) -> Names:
        def names(pool: kvpool.Pool) -> Names:
            return [one.key.removeprefix(self._prefix) for one in pool.list(f"^{re.escape(self._prefix)}")]

        return await self._apart(lambda: self._connection.call("listing chunks", [], names))

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        def ask(pool: kvpool.Pool) -> int:
            pool.stats()
            return 0

        return await self._apart(lambda: self._connection.call("asking the master", 1, ask))

    async def close(self) -> None:
        await self._apart(self._connection.close)

    def _leading(self, pool: kvpool.Pool, keys: Sequence[Any]) -> int:
        present = pool.is_exist([self._name(key) for key in keys])
        return present.index(False) if False in present else len(present)

    def _name(self, key: Any) -> str:
        return f"{self._prefix}{key.to_string()}"

    def _get(self, keys: Sequence[Any]) -> Chunks:
        room: Chunks = []
        chunks: Chunks = [None] * len(keys)
        if self._memory is None:
            return chunks
        try:
            self._allocate(room, len(keys))
            heads = [bytearray(self._head_bytes) for _ in room]

            def get(pool: kvpool.Pool) -> Chunks:
                names = [self._name(key) for key in keys[: len(room)]]
                return pool.batch_get(names, [_pieces(*pieces) for pieces in zip(heads, room, strict=True)])

            misses: Chunks = [None] * len(room)
            outcomes = self._connection.call("getting chunks", misses, get) if room else misses
            for at, outcome in enumerate(outcomes):
                chunks[at] = self._chunk(room[at], heads[at], outcome)
            return chunks
        except BaseException:
            # The caller gets none of these chunks.
            chunks = [None] * len(keys)
            raise
        finally:
            for one, chunk in zip(room, chunks, strict=False):
                if chunk is None:
                    one.ref_count_down()

    def _allocate(self, room: Chunks, count: int) -> None:
        """Adds room for `count` whole chunks to `room`. The room of a shorter stored chunk is cut later. When
        LMCache's memory is full, there may be less room, and the rest are misses."""
        end = time.monotonic() + _ROOM_WAIT
        while len(room) < count:
            # LMCache's own wait has no end: gets that hold room would wait for each other.
            one = self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False)
            if one is not None:
                room.append(one)
            elif time.monotonic() < end:
                time.sleep(_ROOM_LOOK)
            else:
                logger.warning("LMCache's memory is full: %d of %d chunks are not got", count - len(room), count)
                return

    def _chunk(self, room: Any, head: bytearray, outcome: Any) -> Any:
        """Returns the chunk that a get wrote into `room`; None for a miss."""
        if isinstance(outcome, kvpool.Error):
            logger.warning("a chunk was not got: %s", outcome)
        elif outcome is not None and outcome > len(head):
            try:
                return self._cut(room, head, outcome - len(head))
            except ValueError as error:
                logger.warning("a chunk is of another shape: %s", error)
        return None

    def _cut(self, room: Any, head: bytearray, length: int) -> Any:
        if head:
            said = RemoteMetadata.deserialize(head)
            alike = said.fmt == self.meta_fmt and list(said.dtypes) == list(self.meta_dtypes)
            if said.length != length or not alike:
                raise ValueError(f"{length} bytes described as {said}")
        return self.reshape_partial_chunk(room, length)

    def _put(self, keys: Sequence[Any], chunks: Sequence[Any]) -> None:
        blocks = [_pieces(self._head(chunk), chunk) for chunk in chunks]
        names = [self._name(key) for key in keys]
        outcomes: Chunks = self._connection.call(
            "putting chunks", [], lambda pool: pool.batch_put(names, blocks)
        )
        errors = [outcome for outcome in outcomes if isinstance(outcome, kvpool.Error)]
        if errors:
            logger.warning("%d of %d chunks were not put: %s", len(errors), len(keys), errors[0])

    @property
    def _head_bytes(self) -> int:
        return int(self.remote_metadata_bytes) if self.save_chunk_meta else 0

    def _head(self, chunk: Any) -> bytes:
        if not self.save_chunk_meta:
            return b""
        size, shapes, dtypes = chunk.get_size(), chunk.get_shapes(), chunk.get_dtypes()
        return bytes(RemoteMetadata(size, shapes, dtypes, chunk.get_memory_format()).serialize())

    async def _apart(self, call: Callable[[], Answer]) -> Answer:
        """Runs a call on a thread, so that LMCache's event loop continues."""
        return await asyncio.get_running_loop().run_in_executor(None, call)


def _prefix(serde: str | None, salt: str) -> str:
    """Returns the prefix of the names of an engine's chunks. LMCache's names have the element type, but not the
    serde."""
    return f"{start(salt)}:" if serde in (None, "naive") else f"{start(salt)}({serde}):"


def _give_back(getting: asyncio.Future[Chunks]) -> None:
    """Gives back the chunks of a get that no caller waits for."""
    if not getting.cancelled() and getting.exception() is None:
        _give_up([chunk for chunk in getting.result() if chunk is not None])


def _give_up(chunks: Sequence[Any]) -> None:
    """Drops a reference to each chunk."""
    for chunk in chunks:
        chunk.ref_count_down()


def _pieces(head: bytes | bytearray, chunk: Any) -> list[Any]:
    """Returns the pieces of a chunk: its description, if it has one, and its memory."""
    body = (chunk.data_ptr, chunk.get_size())
    return [head, body] if head else [body]


def plugin_settings(extra: dict[str, Any]) -> dict[str, Any]:
    """Returns this plugin's settings, by the plugin's name in LMCache's configuration."""
    start, end = "remote_storage_plugin.", ".module_path"
    ours = [key for key, value in extra.items() if key.endswith(end) and value in _MODULES]
    names = [key[len(start) : -len(end)] for key in ours]
    settings = {}
    for name in names[:1]:
        of_plugin = f"{start}{name}."
        for key, value in extra.items():
            setting = key.removeprefix(of_plugin)
            if setting != key and setting not in _OF_LMCACHE:
                settings[setting] = value
    return settings
