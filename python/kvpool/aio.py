"""The pool with `async def`.

```python
async with await kvpool.aio.Pool.connect("http://127.0.0.1:7070") as pool:
    await pool.put("key", b"value")
    assert await pool.get("key") == b"value"
```

Calls wait in the pool's own threads. These release the interpreter's lock meanwhile.

Cancelling depends on the call. A call that lends memory (`batch_put`, `put`, `batch_get`) continues until its
transfer ends, at the latest until its timeout. Then it raises CancelledError. So after the await the memory
always belongs to the caller. Any other call raises at once. Its thread continues to the end of the call and
drops the result. A cancelled call that has not begun never begins.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import kvpool

if TYPE_CHECKING:
    import os

    from kvpool._native import Block, Key, Memory, WritableBlock

__all__ = ["Lease", "Pool", "Prefix"]

_T = TypeVar("_T")


class _Threads:
    """The threads in which calls wait."""

    def __init__(self, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="kvpool-aio")
        self._ended = False

    def _begin(self, call: Callable[[], _T]) -> Future[_T]:
        if self._ended:
            raise kvpool.ClosedError("the pool is closed", "closed")
        return self._executor.submit(call)

    async def run(self, call: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
        """Runs a call that lends no memory; raises at once when cancelled."""
        future = self._begin(functools.partial(call, *args, **kwargs))
        return await asyncio.wrap_future(future)

    async def run_lending(self, call: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
        """Runs a call that lends memory; when cancelled, waits for its end if it has begun."""
        future = self._begin(functools.partial(call, *args, **kwargs))
        # asyncio.wait never cancels its tasks.
        waited = asyncio.wrap_future(future)
        cancelled: asyncio.CancelledError | None = None
        while not waited.done():
            try:
                await asyncio.wait((waited,))
            except asyncio.CancelledError as error:
                if future.cancel():
                    raise
                cancelled = error
        if cancelled is not None:
            # Without this retrieval asyncio warns about an exception that no caller saw.
            waited.exception()
            raise cancelled
        return waited.result()

    def refuse(self) -> None:
        """Refuses further calls."""
        self._ended = True

    def end(self, *, wait: bool) -> None:
        """Refuses further calls; with `wait`, waits for calls in progress."""
        self.refuse()
        self._executor.shutdown(wait=wait)


class Lease:
    """`kvpool.Lease` with `async def`. As an asynchronous context manager it releases the lease at the end."""

    def __init__(self, lease: kvpool.Lease, threads: _Threads) -> None:
        self._lease = lease
        self._threads = threads

    async def renew(self) -> int:
        """As `kvpool.Lease.renew`."""
        return await self._threads.run(self._lease.renew)

    async def release(self) -> None:
        """As `kvpool.Lease.release`."""
        await self._threads.run(self._lease.release)

    @property
    def left(self) -> float:
        """Seconds until the first of the lease's blocks may be evicted; 0 after that."""
        return self._lease.left

    def __len__(self) -> int:
        return len(self._lease)

    def __bool__(self) -> bool:
        return True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.release()


class Prefix:
    """`kvpool.Prefix` with `async def`: the number `blocks`, and the `lease` on these blocks."""

    def __init__(self, prefix: kvpool.Prefix, threads: _Threads) -> None:
        self.blocks = prefix.blocks
        self.lease = Lease(prefix.lease, threads)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.lease.release()


class Pool:
    """`kvpool.Pool` with `async def`; `kvpool.Pool` documents arguments, results and errors.

    `await Pool.connect(...)` makes it. As an asynchronous context manager it closes the pool at the end.
    """

    def __init__(self, pool: kvpool.Pool, *, threads: int = 8) -> None:
        """Wraps a connected pool. At most `threads` calls wait at the same time."""
        self._pool = pool
        self._threads = _Threads(threads)

    @classmethod
    async def connect(
        cls,
        master: str | Sequence[str] | None = None,
        *,
        namespace: kvpool.Namespace | None = None,
        transport: Literal["auto", "shm", "rdma", "tcp"] = "auto",
        token: str = "",
        token_file: str | os.PathLike[str] | None = None,
        timeout: float = 5.0,
        put_timeout: float | None = None,
        get_timeout: float | None = None,
        control_timeout: float | None = None,
        spin: float = 0.0,
        tls_ca: str | os.PathLike[str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_server_name: str | None = None,
        threads: int = 8,
    ) -> Self:
        """As `kvpool.Pool.connect`. At most `threads` calls wait at the same time."""
        connecting = _Threads(1)
        try:
            pool = await connecting.run(
                kvpool.Pool.connect,
                master,
                namespace=namespace,
                transport=transport,
                token=token,
                token_file=token_file,
                timeout=timeout,
                put_timeout=put_timeout,
                get_timeout=get_timeout,
                control_timeout=control_timeout,
                spin=spin,
                tls_ca=tls_ca,
                tls_cert=tls_cert,
                tls_key=tls_key,
                tls_server_name=tls_server_name,
            )
        finally:
            connecting.end(wait=False)
        return cls(pool, threads=threads)

    async def batch_put(
        self,
        keys: Sequence[Key],
        blocks: Sequence[Block],
        *,
        parents: Sequence[Key | None] | None = None,
        replicas: int = 1,
        preferred_node: str | Sequence[str] | None = None,
        prefer_same_host: bool = False,
        soft_pin: float | None = None,
        hard_pin: bool = False,
        upsert: bool = False,
        timeout: float | None = None,
    ) -> list[bool | kvpool.Error]:
        """As `kvpool.Pool.batch_put`."""
        return await self._threads.run_lending(
            self._pool.batch_put,
            keys,
            blocks,
            parents=parents,
            replicas=replicas,
            preferred_node=preferred_node,
            prefer_same_host=prefer_same_host,
            soft_pin=soft_pin,
            hard_pin=hard_pin,
            upsert=upsert,
            timeout=timeout,
        )

    async def put(
        self,
        key: Key,
        block: Block,
        *,
        parent: Key | None = None,
        replicas: int = 1,
        preferred_node: str | Sequence[str] | None = None,
        prefer_same_host: bool = False,
        soft_pin: float | None = None,
        hard_pin: bool = False,
        upsert: bool = False,
        timeout: float | None = None,
    ) -> bool:
        """As `kvpool.Pool.put`."""
        return await self._threads.run_lending(
            self._pool.put,
            key,
            block,
            parent=parent,
            replicas=replicas,
            preferred_node=preferred_node,
            prefer_same_host=prefer_same_host,
            soft_pin=soft_pin,
            hard_pin=hard_pin,
            upsert=upsert,
            timeout=timeout,
        )

    async def batch_get(
        self,
        keys: Sequence[Key],
        into: Sequence[WritableBlock],
        *,
        timeout: float | None = None,
        release: bool = False,
    ) -> list[int | None | kvpool.Error]:
        """As `kvpool.Pool.batch_get`."""
        return await self._threads.run_lending(
            self._pool.batch_get, keys, into, timeout=timeout, release=release
        )

    async def get(self, key: Key, *, timeout: float | None = None) -> bytes | None:
        """As `kvpool.Pool.get`."""
        return await self._threads.run(self._pool.get, key, timeout=timeout)

    async def get_range(
        self, key: Key, offset: int, length: int, *, timeout: float | None = None
    ) -> bytes | None:
        """As `kvpool.Pool.get_range`."""
        return await self._threads.run(self._pool.get_range, key, offset, length, timeout=timeout)

    async def is_exist(self, keys: Sequence[Key], *, lease: bool = True) -> list[bool]:
        """As `kvpool.Pool.is_exist`."""
        return await self._threads.run(self._pool.is_exist, keys, lease=lease)

    async def match_prefix(self, keys: Sequence[Key], *, lease: bool = True) -> Prefix:
        """As `kvpool.Pool.match_prefix`."""
        prefix = await self._threads.run(self._pool.match_prefix, keys, lease=lease)
        return Prefix(prefix, self._threads)

    async def get_view(
        self, key: Key, *, verify: bool = True, timeout: float | None = None
    ) -> kvpool.View | None:
        """As `kvpool.Pool.get_view`."""
        return await self._threads.run(self._pool.get_view, key, verify=verify, timeout=timeout)

    async def register_buffer(self, memory: Memory) -> kvpool.Registration:
        """As `kvpool.Pool.register_buffer`."""
        return await self._threads.run(self._pool.register_buffer, memory)

    async def remove(
        self, keys: Sequence[Key], *, force: bool = False
    ) -> list[bool | kvpool.Error]:
        """As `kvpool.Pool.remove`."""
        return await self._threads.run(self._pool.remove, keys, force=force)

    async def remove_matching(self, regex: str, *, force: bool = False) -> tuple[int, int]:
        """As `kvpool.Pool.remove_matching`."""
        return await self._threads.run(self._pool.remove_matching, regex, force=force)

    async def remove_all(self, *, force: bool = False) -> tuple[int, int]:
        """As `kvpool.Pool.remove_all`."""
        return await self._threads.run(self._pool.remove_all, force=force)

    async def describe(self, keys: Sequence[Key]) -> list[kvpool.Description | None]:
        """As `kvpool.Pool.describe`."""
        return await self._threads.run(self._pool.describe, keys)

    async def change_replicas(
        self,
        change: Literal["copy", "move", "drop"],
        keys: Sequence[Key] | None = None,
        *,
        regex: str | None = None,
        source: str | None = None,
        to: Sequence[str] = (),
        evict: bool = False,
        only_on_media: bool = False,
    ) -> kvpool.ReplicaTask:
        """As `kvpool.Pool.change_replicas`. A cancelled call may still begin its task."""
        return await self._threads.run(
            self._pool.change_replicas,
            change,
            keys,
            regex=regex,
            source=source,
            to=to,
            evict=evict,
            only_on_media=only_on_media,
        )

    async def drain_node(self, name: str, *, force: bool = False, media: bool = False) -> kvpool.ReplicaTask:
        """As `kvpool.Pool.drain_node`."""
        return await self._threads.run(self._pool.drain_node, name, force=force, media=media)

    async def undrain_node(self, name: str) -> bool:
        """As `kvpool.Pool.undrain_node`."""
        return await self._threads.run(self._pool.undrain_node, name)

    async def replica_tasks(self, ids: Sequence[int] = ()) -> list[kvpool.ReplicaTask]:
        """As `kvpool.Pool.replica_tasks`."""
        return await self._threads.run(self._pool.replica_tasks, ids)

    async def cancel_replica_tasks(self, ids: Sequence[int]) -> list[kvpool.ReplicaTask]:
        """As `kvpool.Pool.cancel_replica_tasks`."""
        return await self._threads.run(self._pool.cancel_replica_tasks, ids)

    async def wait_replica_task(self, id: int, timeout: float) -> kvpool.ReplicaTask | None:
        """As `kvpool.Pool.wait_replica_task`."""
        return await self._threads.run(self._pool.wait_replica_task, id, timeout)

    async def create_namespace(self, namespace: kvpool.Namespace, settings: Mapping[str, int] | None = None) -> bool:
        """As `kvpool.Pool.create_namespace`. A cancelled call may still create the namespace."""
        return await self._threads.run(self._pool.create_namespace, namespace, settings or {})

    async def change_namespace(self, name: str, settings: Mapping[str, int | None]) -> kvpool.NamespaceInfo:
        """As `kvpool.Pool.change_namespace`. A cancelled call may still change the namespace."""
        return await self._threads.run(self._pool.change_namespace, name, settings)

    async def delete_namespace(self, name: str, *, blocks: bool = False) -> int:
        """As `kvpool.Pool.delete_namespace`. A cancelled call may still delete the namespace."""
        return await self._threads.run(self._pool.delete_namespace, name, blocks=blocks)

    async def namespace(self, name: str) -> kvpool.NamespaceInfo:
        """As `kvpool.Pool.namespace`."""
        return await self._threads.run(self._pool.namespace, name)

    async def namespaces(self) -> list[kvpool.NamespaceInfo]:
        """As `kvpool.Pool.namespaces`."""
        return await self._threads.run(self._pool.namespaces)

    async def stats(self) -> kvpool.Stats:
        """As `kvpool.Pool.stats`."""
        return await self._threads.run(self._pool.stats)

    def counters(self) -> dict[str, int]:
        """As `kvpool.Pool.counters`."""
        return self._pool.counters()

    def latencies(self) -> dict[str, kvpool._native._Latency]:
        """As `kvpool.Pool.latencies`."""
        return self._pool.latencies()

    @property
    def limits(self) -> kvpool.Limits:
        """As `kvpool.Pool.limits`."""
        return self._pool.limits

    @property
    def closed(self) -> bool:
        """Whether the pool is closed."""
        return self._pool.closed

    async def close(self) -> None:
        """Closes the connection after the calls in progress have ended. A second close has no effect."""
        self._threads.refuse()
        # Closing the client may take a moment. The event loop continues meanwhile.
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._pool.close()
        self._threads.end(wait=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def list(self, regex: str = "") -> AsyncIterator[kvpool.Listed]:
        """As `kvpool.Pool.list`, for `async for`."""
        listing = await self._threads.run(self._pool.list, regex)
        end = object()
        while True:
            listed = await self._threads.run(next, listing, end)
            if not isinstance(listed, kvpool.Listed):
                return
            yield listed
