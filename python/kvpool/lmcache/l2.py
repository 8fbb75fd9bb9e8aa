"""The pool as an L2 adapter of LMCache's server."""

from __future__ import annotations

import dataclasses
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
from kvpool._engines.threads import started
from kvpool.lmcache.locks import Locks
from kvpool.lmcache.names import Names

logger = logging.getLogger(__name__)

_THREADS = 2
"""The number of tasks of one kind that run at a time. Each task uses several connections."""

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True)
class Settings(PoolSettings):
    """The settings of the adapter, besides `PoolSettings`."""

    salt: str = ""
    """Separates models with the same name, such as two sets of weights, and 8-bit element types."""
    serde: str = ""
    """A name for the serde, with its parameters, in LMCache's configuration of the adapter; empty without a
    serde. LMCache does not tell the adapter its serde."""


class Tasks:
    """Tasks of one kind. They run on their own threads, and an event signals that a task has ended."""

    def __init__(self, kind: str):
        self.event = create_event_notifier()
        self._threads = started(_THREADS, f"kvpool-{kind}")
        self._lock = threading.Lock()
        self._done: dict[int, Any] = {}

    def submit(self, number: int, failed: Answer, run: Callable[[], Answer]) -> None:
        """Runs a task; its result is `failed` if it raises."""

        def work() -> None:
            answer = failed
            try:
                answer = run()
            except BaseException:
                # Every exception is caught: the caller waits for a result. A panic of the native module is no
                # Exception.
                logger.exception("a task failed")
            with self._lock:
                self._done[number] = answer
            self.event.notify()

        self._threads.submit(work)

    def take(self, number: int) -> Any:
        """Returns the result of a task, once. None while the task runs."""
        with self._lock:
            return self._done.pop(number, None)

    def take_all(self) -> dict[int, Any]:
        """Returns the results of all tasks that have ended."""
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        """Waits for the tasks in progress. All of them have deadlines."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.event.close()


class KvpoolL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Stores LMCache's objects in a pool that all hosts share.

    `params` are the settings. `l1_memory_desc` names the memory of the objects, which the adapter registers. A
    lookup locks objects with leases, and the adapter renews them until the unlock. The pool evicts by itself.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None):
        super().__init__()
        self._settings = Settings.read(params)
        self._names = Names(self._settings.serde, self._settings.salt)
        self._connection = Connection(self._settings, _arena(l1_memory_desc))
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

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        number = next(self._numbers)
        self._lookups.submit(number, Bitmap(len(keys)), lambda: self._look_up(keys, group_layout_descs))
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        self._locks.unlock([name for key in keys for name in self._names.of_all_types(key)])

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
        named = [(key, name) for key in keys for name in self._names.of_all_types(key)]
        names = [name for _, name in named]
        try:
            known = pool.describe(names)
            outcomes = pool.remove(names)
        except kvpool.Error as error:
            self._connection.failed("removing objects", error)
            return
        gone = [
            (key, description.length)
            for (key, _), description, outcome in zip(named, known, outcomes, strict=True)
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
        names, at = self._named(keys, objects)
        try:
            outcomes = pool.batch_put(names, _memory_of([objects[one] for one in at]))
        except kvpool.Error as error:
            self._connection.failed("storing objects", error)
            return L2StoreResult(False, 0)
        errors = [outcome for outcome in outcomes if isinstance(outcome, kvpool.Error)]
        if errors:
            logger.warning("%d of %d objects were not stored: %s", len(errors), len(keys), errors[0])
        new = [
            (keys[one], objects[one].get_size())
            for one, outcome in zip(at, outcomes, strict=True)
            if outcome is True
        ]
        if new:
            self._notify_keys_stored([key for key, _ in new], [size for _, size in new])
        return L2StoreResult(not errors and len(at) == len(keys), sum(size for _, size in new))

    def _look_up(self, keys: Sequence[Any], layouts: Any) -> Any:
        found = Bitmap(len(keys))
        # This also runs without the pool: a store after this lookup needs the element types that the lookup
        # gives.
        names = self._names.of_lookup(keys, layouts)
        pool = self._connection.pool()
        if pool is None:
            return found
        # Without its element types an object has no name.
        named = [(at, name) for at, name in enumerate(names) if name is not None]
        if not named:
            return found
        try:
            present = self._locks.look_up(pool, [name for _, name in named])
        except kvpool.Error as error:
            self._connection.failed("looking objects up", error)
            return found
        hits = [at for (at, _), is_there in zip(named, present, strict=True) if is_there]
        try:
            found.batched_set(hits)
            if hits:
                self._notify_keys_accessed([keys[at] for at in hits])
        except BaseException:
            # The caller learns of no lock, so it would never release these.
            self._locks.unlock([name for (_, name), is_there in zip(named, present, strict=True) if is_there])
            raise
        return found

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        loaded = Bitmap(len(keys))
        pool = self._connection.pool()
        if pool is None:
            return loaded
        names, at = self._named(keys, objects)
        try:
            outcomes = pool.batch_get(names, _memory_of([objects[one] for one in at]))
        except kvpool.Error as error:
            self._connection.failed("loading objects", error)
            return loaded
        for one, outcome in zip(at, outcomes, strict=True):
            if isinstance(outcome, kvpool.Error):
                logger.warning("an object was not loaded: %s", outcome)
            elif outcome is not None and self._fits(objects[one], outcome):
                loaded.set(one)
        return loaded

    def _fits(self, item: Any, length: int) -> bool:
        """Whether `length` bytes are a whole object. LMCache allocates room for the longest serialized object,
        and the room of a shorter object is cut."""
        size = item.get_size()
        is_shorter = bool(self._settings.serde) and 0 < length < size
        if is_shorter and hasattr(item, "set_used_size"):
            item.set_used_size(length)
        return is_shorter or bool(length == size)

    def _named(self, keys: Sequence[Any], objects: Sequence[Any]) -> tuple[list[str], list[int]]:
        """Returns the names of the objects that have one, and the indices of these objects."""
        named = [(name, at) for at, name in enumerate(self._names.of_objects(keys, objects)) if name is not None]
        if len(named) < len(keys):
            reason = (
                "no lookup has told their element types yet"
                if self._settings.serde
                else "their types or shapes are not those of the last lookup, or no lookup has told them. If LMCache "
                "serializes them, set serde in adapter_params. If engines with different caches share this server, "
                "give each its own"
            )
            logger.error("%d of %d objects have no name: %s", len(keys) - len(named), len(keys), reason)
        return [name for name, _ in named], [at for _, at in named]


def _memory_of(objects: Sequence[Any]) -> list[tuple[int, int]]:
    return [(item.data_ptr, item.get_size()) for item in objects]


def _arena(description: Any) -> list[tuple[int, int]]:
    """The memory of the objects that is allocated already."""
    if description is None:
        return []
    size = getattr(description, "stable_registration_size", None)
    size = description.size if size is None else size
    return [(description.ptr, size)] if description.ptr and size else []
