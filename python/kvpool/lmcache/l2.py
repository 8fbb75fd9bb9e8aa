"""The pool as an L2 adapter of LMCache's server."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from lmcache.lmcache_native import Bitmap  # type: ignore[import-not-found]
from lmcache.v1.distributed.internal_api import (  # type: ignore[import-not-found]
    L2StoreResult,
)
from lmcache.v1.distributed.l2_adapters.base import (  # type: ignore[import-not-found]
    L2AdapterInterface,
)
from lmcache.v1.platform import create_event_notifier  # type: ignore[import-not-found]

import kvpool
from kvpool._engines.connection import Connection
from kvpool._engines.settings import PoolSettings
from kvpool.lmcache.locks import Locks

logger = logging.getLogger(__name__)

_THREADS = 2
"""How many tasks of one kind run at a time; each uses several connections."""

Answer = TypeVar("Answer")


def object_key(key: Any) -> str:
    """The key of an LMCache object. The hash comes last: the pool stores keys that end with 64 hex digits
    in the least memory."""
    owner = f"{key.model_name}@{key.kv_rank:x}@{key.object_group_id}@{key.cache_salt}"
    return f"lmcache:{owner}@{key.chunk_hash.hex()}"


class Tasks:
    """Tasks of one kind. They run on their own threads, and an event signals that a task has ended."""

    def __init__(self, kind: str):
        self.event = create_event_notifier()
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, f"kvpool-{kind}")
        self._lock = threading.Lock()
        self._done: dict[int, Any] = {}

    def submit(self, number: int, failed: Answer, run: Callable[[], Answer]) -> None:
        """Runs a task; its result is `failed` if it raises."""

        def work() -> None:
            answer = failed
            try:
                answer = run()
            except Exception:
                # Any exception: the caller waits for a result.
                logger.exception("a task failed")
            with self._lock:
                self._done[number] = answer
            self.event.notify()

        self._threads.submit(work)

    def take(self, number: int) -> Any:
        """The result of a task, once; None while it runs."""
        with self._lock:
            return self._done.pop(number, None)

    def take_all(self) -> dict[int, Any]:
        """The results of all tasks that have ended."""
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        """Waits for the tasks in progress, which all have deadlines."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.event.close()


class KvpoolL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Stores LMCache's objects in a pool that all hosts share.

    `params` are the settings. `l1_memory_desc` names the memory of the objects, which is registered.
    A lookup locks objects with leases, which are renewed until the unlock. The pool evicts by itself.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None):
        super().__init__()
        settings = PoolSettings.read(params)
        self._connection = Connection(settings, _arena(l1_memory_desc))
        self._locks = Locks()
        self._numbers = itertools.count(1)
        self._stores = Tasks("store")
        self._lookups = Tasks("lookup")
        self._loads = Tasks("load")

    def get_store_event_fd(self) -> int:
        return int(self._stores.event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookups.event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loads.event.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        number = next(self._numbers)
        self._stores.submit(number, L2StoreResult(False, 0), lambda: self._store(keys, objects))
        return number

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        number = next(self._numbers)
        self._lookups.submit(number, Bitmap(len(keys)), lambda: self._look_up(keys))
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        self._locks.unlock([object_key(key) for key in keys])

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        number = next(self._numbers)
        self._loads.submit(number, Bitmap(len(keys)), lambda: self._load(keys, objects))
        return number

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.take(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Removes objects, except leased ones."""
        pool = self._connection.pool()
        if pool is None:
            return
        names = [object_key(key) for key in keys]
        try:
            known = pool.describe(names)
            outcomes = pool.remove(names)
        except kvpool.Error as error:
            self._connection.failed("removing objects", error)
            return
        gone = [
            (key, description.length)
            for key, description, outcome in zip(keys, known, outcomes, strict=True)
            if outcome is True and description is not None
        ]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": self._connection.pool() is not None, "type": "kvpool"}

    def close(self) -> None:
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        self._locks.close()
        self._connection.close()

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        pool = self._connection.pool()
        if pool is None:
            return L2StoreResult(False, 0)
        try:
            outcomes = pool.batch_put([object_key(key) for key in keys], _memory_of(objects))
        except kvpool.Error as error:
            self._connection.failed("storing objects", error)
            return L2StoreResult(False, 0)
        errors = [outcome for outcome in outcomes if isinstance(outcome, kvpool.Error)]
        if errors:
            logger.warning("%d of %d objects were not stored: %s", len(errors), len(keys), errors[0])
        new = [
            (key, item.get_size())
            for key, item, outcome in zip(keys, objects, outcomes, strict=True)
            if outcome is True
        ]
        if new:
            self._notify_keys_stored([key for key, _ in new], [size for _, size in new])
        return L2StoreResult(not errors, sum(size for _, size in new))

    def _look_up(self, keys: Sequence[Any]) -> Any:
        found = Bitmap(len(keys))
        pool = self._connection.pool()
        if pool is None:
            return found
        try:
            present = self._locks.look_up(pool, [object_key(key) for key in keys])
        except kvpool.Error as error:
            self._connection.failed("looking objects up", error)
            return found
        hits = [at for at, is_there in enumerate(present) if is_there]
        found.batched_set(hits)
        if hits:
            self._notify_keys_accessed([keys[at] for at in hits])
        return found

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        loaded = Bitmap(len(keys))
        pool = self._connection.pool()
        if pool is None:
            return loaded
        try:
            outcomes = pool.batch_get([object_key(key) for key in keys], _memory_of(objects))
        except kvpool.Error as error:
            self._connection.failed("loading objects", error)
            return loaded
        for at, (item, outcome) in enumerate(zip(objects, outcomes, strict=True)):
            if isinstance(outcome, kvpool.Error):
                logger.warning("an object was not loaded: %s", outcome)
            elif outcome == item.get_size():
                loaded.set(at)
        return loaded


def _memory_of(objects: Sequence[Any]) -> list[tuple[int, int]]:
    return [(item.data_ptr, item.get_size()) for item in objects]


def _arena(description: Any) -> list[tuple[int, int]]:
    """The memory of the objects, as far as it is allocated already."""
    if description is None:
        return []
    size = getattr(description, "stable_registration_size", None)
    size = description.size if size is None else size
    return [(description.ptr, size)] if description.ptr and size else []
