"""Which stored table has which field of which row.

A `DataProtoCatalog` names rows by a partition and a key. Each field of a row is in a fragment: a stored table with
one stage. `DataProtoCatalogTransfer` puts the fragments, and removes those that no row needs any more.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

logger = logging.getLogger("mooncake.dataproto_catalog")

_Handle = Mapping[str, Any]


class _Row:
    """One row: its tag, and the fragment and the place of each field."""

    def __init__(self) -> None:
        self.tag: dict[str, Any] = {}
        self.fields: dict[str, tuple[str, int]] = {}


class _Fragment:
    """A stored table, the number of fields of rows that are in it, and the reads that use it."""

    def __init__(self, handle: dict[str, Any], managed: bool) -> None:
        self.handle = handle
        self.managed = managed
        self.uses = 0
        self.readers = 0


class DataProtoCatalog:
    """The catalog. Its host makes one call at a time.

    A fragment of `publish` is managed: when no field and no read needs it, its handle is retired. Every answer has
    the retired handles, until `ack_retired` names them.
    """

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, _Row]] = {}
        self._fragments: dict[str, _Fragment] = {}
        self._retired: dict[str, dict[str, Any]] = {}
        # The answers to publications, for callers that ask again.
        self._answers: dict[str, dict[str, Any]] = {}
        self._reads: dict[int, list[str]] = {}
        self._last_read = 0
        self._drained = False

    def update(
        self,
        partition: str,
        keys: Sequence[str],
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        handle: _Handle | None = None,
    ) -> dict[str, Any]:
        """Merges tags into rows and points their fields to a table, whose life is the caller's. Raises ValueError."""
        return self._update(partition, keys, tags, handle, False)

    def publish(
        self,
        operation_id: str,
        partition: str,
        keys: Sequence[str],
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        handle: _Handle | None = None,
    ) -> dict[str, Any]:
        """`update` with a managed table. A second call with the operation's id answers as the first."""
        name = _text(operation_id, "operation_id")
        if name not in self._answers:
            self._answers[name] = self._update(partition, keys, tags, handle, handle is not None)
        return copy.deepcopy(self._answers[name])

    def ack_publication(self, operation_id: str) -> None:
        """Forgets the answer to a publication."""
        self._answers.pop(_text(operation_id, "operation_id"), None)

    def publish_append(
        self,
        operation_id: str,
        fragment_id: str,
        partition: str,
        keys: Sequence[str],
        *,
        previous_handle: _Handle,
        handle: _Handle,
    ) -> dict[str, Any]:
        """Replaces a managed table by one with further fields, and points the rows to these.

        An append that comes too late answers {"append_rejected": reason}.
        """
        name = _text(operation_id, "operation_id")
        if name not in self._answers:
            try:
                answer = self._append(_text(fragment_id, "fragment_id"), partition, keys, previous_handle, handle)
            except _Rejected as rejected:
                answer = {"append_rejected": str(rejected)}
            self._answers[name] = answer
        return copy.deepcopy(self._answers[name])

    def _append(
        self, fragment_id: str, partition: str, keys: Sequence[str], before: _Handle, after: _Handle
    ) -> dict[str, Any]:
        if self._drained:
            raise _Rejected("the catalog is drained")
        names = _names(keys, "keys")
        old, old_handle = _normalized(before)
        new, new_handle = _normalized(after)
        fragment = self._fragments.get(fragment_id)
        if fragment is None or not fragment.managed or fragment.handle != old_handle:
            raise _Rejected(f"stale handle of the fragment {fragment_id!r}")
        if (new.batch_size, new.partition) != (old.batch_size, old.partition) or new.batch_size != len(names):
            raise _Rejected("the appended table has other rows, or another partition")
        if new.partition != _text(partition, "partition"):
            raise _Rejected("the appended table has another partition")
        if any(new.field_index.get(name) != location for name, location in old.field_index.items()):
            raise _Rejected("the appended table changed a field that was there")
        rows = self._partitions.get(partition, {})
        missing = [name for name in names if name not in rows]
        if missing:
            raise _Rejected(f"keys not found in partition {partition!r}: {missing}")
        added = [name for name in new.field_index if name not in old.field_index]
        self._point([rows[name] for name in names], added, fragment_id)
        fragment.handle = new_handle
        return self._answer(rows, names)

    def _update(
        self,
        partition: str,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]] | None,
        handle: _Handle | None,
        managed: bool,
    ) -> dict[str, Any]:
        if self._drained:
            raise RuntimeError("the catalog is drained")
        place, names = _text(partition, "partition"), _names(keys, "keys")
        merged = _tags(tags, len(names))
        if merged is None and handle is None:
            raise ValueError("an update needs tags or a handle")
        added: tuple[str, ...] = ()
        fragment_id = ""
        if handle is not None:
            fragment_id, stored, added = _fragment(handle, len(names))
            self._admit(fragment_id, stored, managed)
        rows = self._partitions.setdefault(place, {})
        for at, name in enumerate(names):
            rows.setdefault(name, _Row()).tag.update(merged[at] if merged else {})
        self._point([rows[name] for name in names], added, fragment_id)
        return self._answer(rows, names)

    def _admit(self, fragment_id: str, handle: dict[str, Any], managed: bool) -> None:
        known = self._fragments.get(fragment_id)
        if fragment_id in self._retired:
            raise ValueError(f"the fragment {fragment_id!r} is being retired")
        if known is not None and (known.handle != handle or known.managed != managed):
            raise ValueError(f"the fragment {fragment_id!r} is there already, with other fields or another owner")
        if known is None:
            self._fragments[fragment_id] = _Fragment(handle, managed)

    def _point(self, rows: Sequence[_Row], fields: Sequence[str], fragment_id: str) -> None:
        """Points fields of rows to a fragment. What they pointed to may be retired."""
        left: list[str] = []
        for at, row in enumerate(rows):
            for field in fields:
                before = row.fields.get(field)
                if before is not None:
                    left.append(before[0])
                row.fields[field] = (fragment_id, at)
                self._fragments[fragment_id].uses += 1
        self._leave(left)

    def _leave(self, fragment_ids: Iterable[str]) -> None:
        for fragment_id in fragment_ids:
            fragment = self._fragments[fragment_id]
            fragment.uses -= 1
            self._retire(fragment_id)

    def _retire(self, fragment_id: str) -> None:
        fragment = self._fragments.get(fragment_id)
        if fragment is not None and not fragment.uses and not fragment.readers:
            del self._fragments[fragment_id]
            if fragment.managed:
                self._retired[fragment_id] = fragment.handle

    def resolve(
        self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None, *, pin: bool = False
    ) -> dict[str, Any]:
        """Where the fields of rows are: `handles` by fragment, and `field_groups` with the place of each row.

        With `pin` the tables stay until `release_read(read_token)`. Raises ValueError for rows or fields that are
        not there.
        """
        place, names = _text(partition, "partition"), _names(keys, "keys")
        rows = self._partitions.get(place, {})
        missing = [name for name in names if name not in rows]
        if missing:
            raise ValueError(f"keys were not found in partition {place!r}: {missing}")
        chosen = _union(rows, names) if fields is None else list(_names(fields, "field names"))
        if not chosen:
            raise ValueError("the rows do not contain any fields")
        for name in names:
            lacking = [field for field in chosen if field not in rows[name].fields]
            if lacking:
                raise ValueError(f"fields are not ready for key {name!r}: {lacking}")
        groups: dict[tuple[tuple[str, int], ...], list[str]] = {}
        for field in chosen:
            groups.setdefault(tuple(rows[name].fields[field] for name in names), []).append(field)
        used = list(dict.fromkeys(fragment for locations in groups for fragment, _ in locations))
        handles = {fragment: copy.deepcopy(self._fragments[fragment].handle) for fragment in used}
        answer: dict[str, Any] = {
            "keys": list(names),
            "tags": [copy.deepcopy(rows[name].tag) for name in names],
            "fields": chosen,
            "field_groups": [{"fields": group, "locations": list(places)} for places, group in groups.items()],
            "handles": handles,
            "meta_info": _merged_metadata(handles.values()),
        }
        if pin:
            self._last_read += 1
            self._reads[self._last_read] = used
            for fragment in used:
                self._fragments[fragment].readers += 1
            answer["read_token"] = self._last_read
        return answer

    def release_read(self, token: int) -> dict[str, Any]:
        """Ends a pinned read. A second call does nothing."""
        for fragment_id in self._reads.pop(token, []):
            self._fragments[fragment_id].readers -= 1
            self._retire(fragment_id)
        return self._pending()

    def list(self, partition: str | None = None) -> dict[str, dict[str, Any]]:
        """The tags of all rows, by partition and key."""
        if partition is not None:
            _text(partition, "partition")
        return {
            place: {name: copy.deepcopy(row.tag) for name, row in rows.items()}
            for place, rows in self._partitions.items()
            if partition in (None, place)
        }

    def remove(self, partition: str, keys: Sequence[str]) -> dict[str, Any]:
        """Removes rows; absent ones do not matter."""
        place, names = _text(partition, "partition"), _names(keys, "keys")
        rows = self._partitions.get(place, {})
        for name in names:
            row = rows.pop(name, None)
            if row is not None:
                self._leave(fragment for fragment, _ in row.fields.values())
        if not rows:
            self._partitions.pop(place, None)
        return self._pending()

    def drain(self) -> dict[str, Any]:
        """Retires everything; the catalog takes no update afterwards. Raises RuntimeError while a read is pinned."""
        if self._reads:
            raise RuntimeError(f"the catalog has {len(self._reads)} active reads, and is not drained")
        for fragment_id, fragment in self._fragments.items():
            if fragment.managed:
                self._retired[fragment_id] = fragment.handle
        self._partitions.clear()
        self._fragments.clear()
        self._answers.clear()
        self._drained = True
        return self._pending()

    def ack_retired(self, handles: Sequence[_Handle]) -> dict[str, Any]:
        """Forgets retired handles whose objects are removed. Raises ValueError for a handle of another state."""
        for handle in handles:
            ref, normalized = _normalized(handle)
            same = [fragment for fragment, retired in self._retired.items() if retired == normalized]
            for fragment in same[:1]:
                del self._retired[fragment]
            if not same and any(stage.manifest_key in self._retired for stage in ref.stage_refs.values()):
                raise ValueError("the retired fragment has another handle")
        return self._pending()

    def _answer(self, rows: Mapping[str, _Row], names: Sequence[str]) -> dict[str, Any]:
        tags = [copy.deepcopy(rows[name].tag) for name in names]
        return {"keys": [*names], "tags": tags, "fields": _union(rows, names), **self._pending()}

    def _pending(self) -> dict[str, Any]:
        return {"retired_handles": [copy.deepcopy(handle) for handle in self._retired.values()]}


class _Rejected(Exception):
    """An append that came too late."""


class DataProtoCatalogTransfer:
    """Puts tables and publishes them in a catalog, and removes the objects of retired ones.

    `catalog_call(method, *args, **how)` calls a `DataProtoCatalog`, of this process or of another. A publication
    that fails twice is kept, and tried again before the next one.
    """

    def __init__(self, transfer: Any, catalog_call: Callable[..., Any]) -> None:
        self.transfer = transfer
        self._call = catalog_call
        self._lock = threading.RLock()
        self._unpublished: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = []
        self._unacknowledged: list[str] = []
        self._results: list[Any] = []

    def put(
        self,
        data: Any,
        *,
        partition: str,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]] | None = None,
        **put_kwargs: Any,
    ) -> dict[str, Any]:
        """Puts a table and publishes it for rows, or merges tags alone if `data` is None. Raises ValueError."""
        self._catch_up()
        place, names = _text(partition, "partition"), _names(keys, "keys")
        merged = _tags(tags, len(names))
        if data is None and merged is None:
            raise ValueError("an update needs tags or data")
        handle = None
        if data is not None:
            if len(data) != len(names):
                raise ValueError(f"the table has {len(data)} rows for {len(names)} keys")
            handle = _exported(self.transfer.put(data, type="dataproto", partition=place, **put_kwargs))
        return self._publish_soon("publish", (place, names), {"tags": merged, "handle": handle})

    def append(
        self,
        fragment_id: str,
        handle: _Handle,
        data: Any,
        *,
        partition: str,
        keys: Sequence[str],
        stage: str,
        **append_kwargs: Any,
    ) -> dict[str, Any]:
        """Puts further fields of a table and publishes them. Raises ValueError for a stale handle."""
        self._catch_up()
        fragment, place = _text(fragment_id, "fragment_id"), _text(partition, "partition")
        names = _names(keys, "keys")
        if append_kwargs.get("overwrite"):
            raise ValueError("an append to a catalog does not overwrite")
        if len(data) != len(names):
            raise ValueError(f"the table has {len(data)} rows for {len(names)} keys")
        before, before_handle = _normalized(handle)
        if before.partition != place:
            raise ValueError("the handle has another partition")
        plan = self._call("resolve", place, names, list(before.field_index))
        if plan["handles"].get(fragment) != before_handle:
            raise ValueError(f"stale handle of the fragment {fragment!r}")
        after = _exported(self.transfer.append_dataproto_fields(before_handle, data, stage=stage, **append_kwargs))
        how = {"previous_handle": before_handle, "handle": after}
        answer = self._publish_soon("publish_append", (fragment, place, names), how)
        if "append_rejected" in answer:
            raise ValueError(answer["append_rejected"])
        return answer

    def resolve(self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None) -> dict[str, Any]:
        """A pinned `DataProtoCatalog.resolve`."""
        return dict(self._call("resolve", partition, keys, fields, pin=True))

    def release_read(self, token: int) -> None:
        """Ends a pinned read, and removes what was retired."""
        self._clean_up(self._call("release_read", token))

    def attach_results(self, output: Any, results: Sequence[Any]) -> None:
        """Notes results that `release_result(output)` releases."""
        output._mooncake_catalog_results = list(results)

    def release_result(self, output: Any) -> None:
        """Releases the results of `attach_results`."""
        results = getattr(output, "_mooncake_catalog_results", ())
        output._mooncake_catalog_results = []
        self.discard_results(results)

    def discard_results(self, results: Sequence[Any], *, strict: bool = False) -> None:
        """Releases results. Those that fail are kept and tried again; with `strict` it raises RuntimeError."""
        with self._lock:
            pending, self._results = [*self._results, *results], []
        failed = [result for result in pending if not self._tried(self.transfer.release_result, result)]
        with self._lock:
            self._results.extend(failed)
        if strict and failed:
            raise RuntimeError(f"{len(failed)} results are not released")

    def list(self, partition: str | None = None) -> dict[str, dict[str, Any]]:
        """The tags of all rows."""
        return dict(self._call("list", partition))

    def remove(self, partition: str, keys: Sequence[str]) -> None:
        """Removes rows, and the objects that no other row needs."""
        self._clean_up(self._call("remove", partition, keys))

    def drain(self) -> None:
        """Removes all rows and objects. Raises RuntimeError if an object cannot be removed."""
        self._catch_up()
        self._clean_up(self._call("drain"), strict=True)

    def close(self) -> None:
        """Does what is pending. Raises RuntimeError if it fails."""
        self.discard_results((), strict=True)
        self._catch_up()
        if self._unacknowledged:
            raise RuntimeError(f"{len(self._unacknowledged)} publications are not acknowledged")

    def _publish_soon(self, method: str, args: tuple[Any, ...], how: dict[str, Any]) -> dict[str, Any]:
        publication = (uuid.uuid4().hex, method, args, how)
        try:
            return self._publish(*publication)
        except Exception:
            # The catalog answers a repeated publication as it did the first.
            logger.exception("a publication failed and is tried again")
        try:
            return self._publish(*publication)
        except Exception:
            with self._lock:
                self._unpublished.append(publication)
            raise

    def _publish(self, name: str, method: str, args: tuple[Any, ...], how: dict[str, Any]) -> dict[str, Any]:
        answer = dict(self._call(method, name, *args, **how))
        if "append_rejected" in answer:
            self.transfer.cleanup_dataproto_append(how["previous_handle"], how["handle"])
        self._clean_up(answer)
        if not self._tried(self._call, "ack_publication", name):
            with self._lock:
                self._unacknowledged.append(name)
        return answer

    def _catch_up(self) -> None:
        with self._lock:
            waiting, self._unacknowledged = self._unacknowledged, []
            unpublished, self._unpublished = self._unpublished, []
        failed = [name for name in waiting if not self._tried(self._call, "ack_publication", name)]
        again = [publication for publication in unpublished if not self._tried(self._publish, *publication)]
        with self._lock:
            self._unacknowledged.extend(failed)
            self._unpublished.extend(again)
        if again:
            raise RuntimeError(f"{len(again)} publications wait for the catalog")

    def _clean_up(self, answer: Mapping[str, Any], *, strict: bool = False) -> None:
        retired = list(answer.get("retired_handles", ()))
        removed = [handle for handle in retired if self._tried(self.transfer.cleanup_dataproto, handle)]
        acknowledged = not removed or self._tried(self._call, "ack_retired", removed)
        if strict and (len(removed) < len(retired) or not acknowledged):
            raise RuntimeError(f"{len(retired) - len(removed)} of {len(retired)} retired tables are not removed")

    @staticmethod
    def _tried(action: Callable[..., Any], *args: Any) -> bool:
        """Whether a call returned; a failure is logged."""
        with contextlib.suppress(Exception):
            try:
                action(*args)
                return True
            except Exception:
                logger.exception("%s failed and is tried again later", getattr(action, "__name__", action))
                raise
        return False


def _normalized(handle: _Handle) -> tuple[Any, dict[str, Any]]:
    from mooncake.structured_object_store import export_dataproto_ref, import_dataproto_ref

    ref = import_dataproto_ref(handle)
    return ref, export_dataproto_ref(ref)


def _exported(ref: Any) -> dict[str, Any]:
    from mooncake.structured_object_store import export_dataproto_ref

    return export_dataproto_ref(ref)


def _fragment(handle: _Handle, rows: int) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """The name, the handle and the fields of a fragment. Raises ValueError for a table that is none."""
    ref, normalized = _normalized(handle)
    if len(ref.stage_refs) != 1:
        raise ValueError("a fragment must have exactly one stage")
    if ref.batch_size != rows:
        raise ValueError(f"the table has {ref.batch_size} rows for {rows} keys")
    (stage,) = ref.stage_refs.values()
    return stage.manifest_key, normalized, _names(ref.field_index, "field names")


def _merged_metadata(handles: Iterable[_Handle]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for handle in handles:
        for name, value in handle.get("meta_info", {}).items():
            if merged.setdefault(name, value) != value:
                raise ValueError(f"the tables have conflicting metadata for {name!r}")
    return copy.deepcopy(merged)


def _union(rows: Mapping[str, _Row], names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(field for name in names for field in rows[name].fields))


def _names(given: Any, what: str) -> tuple[str, ...]:
    names = () if isinstance(given, str) else tuple(given)
    if not names or any(not isinstance(name, str) or not name for name in names):
        raise ValueError(f"{what} must be a sequence of non-empty strings")
    if len(set(names)) != len(names):
        raise ValueError(f"{what} must be unique")
    return names


def _tags(tags: Sequence[Mapping[str, Any]] | None, count: int) -> list[dict[str, Any]] | None:
    if tags is None:
        return None
    if len(tags) != count:
        raise ValueError("tags must have the same length as keys")
    if any(not isinstance(tag, Mapping) for tag in tags):
        raise TypeError("a tag must be a mapping")
    return [copy.deepcopy(dict(tag)) for tag in tags]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} must be a non-empty string")
    return value
