"""The state behind `dataproto_catalog`: which table has which field of which key."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mooncake._structured import members
from mooncake._structured.tables import MooncakeDataProtoRef, import_dataproto_ref

Handle = Mapping[str, Any]


class CatalogDrained(RuntimeError):
    """The catalog is drained and takes no further tables."""


@dataclasses.dataclass(eq=False)
class _Table:
    """A table that keys refer to. The catalog owns the tables that were published, and retires no others."""

    name: str
    handle: dict[str, Any]
    ref: MooncakeDataProtoRef
    owned: bool
    # The number of fields of keys in this table, and of reads that use it.
    uses: int = 0
    reads: int = 0


@dataclasses.dataclass
class _Row:
    """One key: its tags, and for each field its table and its row there."""

    tags: dict[str, Any] = dataclasses.field(default_factory=dict)
    fields: dict[str, tuple[_Table, int]] = dataclasses.field(default_factory=dict)


class DataProtoCatalog:
    """Keys of partitions, each with tags and with fields in tables.

    One process has the catalog. Other processes reach it through a call of their own, see
    `DataProtoCatalogTransfer`. Its answers are plain values. A published table without a key or a read is
    *retired*: answers name its handle until `ack_retired` reports its removal. All methods raise ValueError for
    an invalid argument.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._partitions: dict[str, dict[str, _Row]] = {}
        self._tables: dict[str, _Table] = {}
        self._retired: dict[str, dict[str, Any]] = {}
        # Answers by operation, so that a repeated call changes nothing.
        self._answered: dict[str, dict[str, Any]] = {}
        self._reads: dict[int, list[_Table]] = {}
        self._last_read = 0
        self._drained = False

    def update(
        self,
        partition: str,
        keys: Sequence[str],
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        handle: Handle | None = None,
    ) -> dict[str, Any]:
        """Adds tags to keys, or the fields of a table whose row `i` is key `i`. The table still belongs to the
        caller."""
        with self._lock:
            return self._bind(partition, keys, tags, handle, owned=False)

    def publish(
        self,
        operation_id: str,
        partition: str,
        keys: Sequence[str],
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        handle: Handle | None = None,
    ) -> dict[str, Any]:
        """As `update`, but the catalog owns the table afterwards. A repeated call with the same id returns the
        same answer."""
        _text("operation_id", operation_id)
        with self._lock:
            if operation_id not in self._answered:
                self._answered[operation_id] = self._bind(partition, keys, tags, handle, owned=True)
            return dict(self._answered[operation_id])

    def ack_publication(self, operation_id: str) -> None:
        """Forgets the answer of an operation: it will not be repeated."""
        with self._lock:
            self._answered.pop(operation_id, None)

    def publish_append(
        self,
        operation_id: str,
        fragment_id: str,
        partition: str,
        keys: Sequence[str],
        *,
        previous_handle: Handle,
        handle: Handle,
    ) -> dict[str, Any]:
        """Replaces a published table by a table with further fields.

        `fragment_id` names the table in the answers of `resolve`. If the table is no longer `previous_handle`,
        or the keys are not its rows, nothing changes. The answer is then `{"append_rejected": reason}`.
        """
        _text("operation_id", operation_id)
        names = _keys(keys)
        longer, _ = _checked(handle, len(names))
        before = import_dataproto_ref(previous_handle)
        with self._lock:
            if operation_id in self._answered:
                return dict(self._answered[operation_id])
            answer = self._append(fragment_id, partition, names, before, longer)
            if "append_rejected" not in answer:
                self._answered[operation_id] = answer
            return dict(answer)

    def _append(
        self,
        fragment: str,
        partition: str,
        keys: Sequence[str],
        before: MooncakeDataProtoRef,
        longer: dict[str, Any],
    ) -> dict[str, Any]:
        if self._drained:
            return {"append_rejected": "the catalog is drained"}
        table = self._tables.get(fragment)
        if table is None or not table.owned or _parts(table.ref) != _parts(before):
            return {"append_rejected": f"the table {fragment!r} has changed, or is not the catalog's"}
        rows = self._partitions.get(partition, {})
        for at, key in enumerate(keys):
            places = rows[key].fields.values() if key in rows else ()
            if not any(found is table and row == at for found, row in places):
                return {"append_rejected": f"the key {key!r} is not row {at} of the table {fragment!r}"}
        table.handle, table.ref = longer, import_dataproto_ref(longer)
        added = [name for name in table.ref.field_index if name not in before.field_index]
        for at, key in enumerate(keys):
            self._assign(rows[key], table, at, added)
        return self._answer(partition, keys)

    def _bind(
        self,
        partition: str,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]] | None,
        handle: Handle | None,
        *,
        owned: bool,
    ) -> dict[str, Any]:
        if self._drained:
            raise CatalogDrained("the catalog is drained")
        _text("partition", partition)
        names = _keys(keys)
        if tags is None and handle is None:
            raise ValueError("an update has tags, a handle, or both")
        if tags is not None and len(tags) != len(names):
            raise ValueError(f"{len(names)} keys have {len(tags)} tags")
        if not all(isinstance(tag, Mapping) for tag in tags or ()):
            raise TypeError("tags are mappings")
        table = None if handle is None else self._table(handle, len(names), owned)
        rows = self._partitions.setdefault(partition, {})
        for at, key in enumerate(names):
            row = rows.setdefault(key, _Row())
            row.tags |= dict(tags[at]) if tags else {}
            if table is not None:
                self._assign(row, table, at, table.ref.field_index)
        return self._answer(partition, names)

    def _table(self, handle: Handle, rows: int, owned: bool) -> _Table:
        plain, ref = _checked(handle, rows)
        name = next(iter(ref.stage_refs.values())).manifest_key
        if name in self._retired:
            raise ValueError(f"the table {name!r} is retired")
        table = self._tables.setdefault(name, _Table(name, plain, ref, owned))
        if not _alike(table.handle, plain):
            raise ValueError(f"the table {name!r} has another handle here: append to it")
        table.owned |= owned
        return table

    def _assign(self, row: _Row, table: _Table, at: int, fields: Sequence[str] | Mapping[str, Any]) -> None:
        for field in fields:
            table.uses += 1
            self._drop_use(row.fields.get(field))
            row.fields[field] = (table, at)

    def _drop_use(self, place: tuple[_Table, int] | None) -> None:
        if place is not None:
            place[0].uses -= 1
            self._retire(place[0])

    def _retire(self, table: _Table) -> None:
        if table.uses or table.reads or table.name not in self._tables:
            return
        del self._tables[table.name]
        if table.owned:
            self._retired[table.name] = table.handle

    def _answer(self, partition: str, keys: Sequence[str]) -> dict[str, Any]:
        rows = [self._partitions[partition][key] for key in keys]
        fields = sorted({field for row in rows for field in row.fields})
        return {"keys": list(keys), "tags": [dict(row.tags) for row in rows], "fields": fields, **self._left()}

    def _left(self) -> dict[str, Any]:
        return {"retired_handles": list(self._retired.values())}

    def resolve(
        self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None, *, pin: bool = False
    ) -> dict[str, Any]:
        """Returns the locations of fields of keys. By default these are all fields that any of the keys has.

        `field_groups` lists fields with the same locations: for each key the name of its table and the row
        there. `handles` has the tables by name. With `pin`, the tables stay until `release_read` of the
        answer's `read_token`. Raises ValueError for an unknown key, for a field that a key lacks, and if the
        metadata of the tables contradict each other.
        """
        names = _keys(keys)
        with self._lock:
            rows = self._partitions.get(partition, {})
            unknown = [key for key in names if key not in rows]
            if unknown:
                raise ValueError(f"the partition {partition!r} has no keys {unknown}")
            found = [rows[key] for key in names]
            wanted = sorted({name for row in found for name in row.fields}) if fields is None else list(fields)
            if not wanted or not all(isinstance(name, str) and name for name in wanted):
                raise ValueError("no field is asked for, or the keys have none")
            for key, row in zip(names, found):
                missing = [name for name in wanted if name not in row.fields]
                if missing:
                    raise ValueError(f"the key {key!r} has no fields {missing} yet")
            groups: dict[tuple[tuple[str, int], ...], list[str]] = {}
            used: dict[str, _Table] = {}
            for name in wanted:
                places = [row.fields[name] for row in found]
                used |= {table.name: table for table, _ in places}
                groups.setdefault(tuple((table.name, at) for table, at in places), []).append(name)
            answer: dict[str, Any] = {
                "keys": list(names),
                "tags": [dict(row.tags) for row in found],
                "fields": wanted,
                "field_groups": [{"fields": of, "locations": list(places)} for places, of in groups.items()],
                "handles": {name: table.handle for name, table in used.items()},
                "meta_info": _merged([table.ref.meta_info for table in used.values()]),
            }
            if pin:
                self._last_read += 1
                answer["read_token"] = self._last_read
                self._reads[self._last_read] = list(used.values())
                for table in used.values():
                    table.reads += 1
            return answer

    def release_read(self, token: int) -> dict[str, Any]:
        """Ends a read. An unknown token has no effect."""
        with self._lock:
            for table in self._reads.pop(token, []):
                table.reads -= 1
                self._retire(table)
            return self._left()

    def list(self, partition: str | None = None) -> dict[str, dict[str, Any]]:
        """Returns the tags of all keys, by partition."""
        with self._lock:
            return {
                name: {key: dict(row.tags) for key, row in rows.items()}
                for name, rows in self._partitions.items()
                if rows and partition in (None, name)
            }

    def remove(self, partition: str, keys: Sequence[str]) -> dict[str, Any]:
        """Removes keys. Unknown keys are no error."""
        names = _keys(keys)
        with self._lock:
            rows = self._partitions.get(partition, {})
            for key in names:
                row = rows.pop(key, None)
                for place in list(row.fields.values()) if row is not None else ():
                    self._drop_use(place)
            return self._left()

    def drain(self) -> dict[str, Any]:
        """Removes all keys, and accepts no further ones. Raises RuntimeError while a read is pinned."""
        with self._lock:
            if self._reads:
                raise RuntimeError(f"{len(self._reads)} reads are not released yet")
            self._drained = True
            for table in list(self._tables.values()):
                table.uses = 0
                self._retire(table)
            self._partitions.clear()
            return self._left()

    def ack_retired(self, handles: Sequence[Handle]) -> dict[str, Any]:
        """Forgets retired tables that were removed."""
        with self._lock:
            gone = [_parts(import_dataproto_ref(handle)) for handle in handles]
            left = {name: _parts(import_dataproto_ref(handle)) not in gone for name, handle in self._retired.items()}
            self._retired = {name: handle for name, handle in self._retired.items() if left[name]}
            return self._left()


def _text(what: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"the {what} is {value!r}, not a text")


def _keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Checks the keys of a call. Raises ValueError if there are none, one is no text, or one is repeated."""
    if isinstance(keys, (str, bytes)) or not all(isinstance(key, str) and key for key in keys) or not len(keys):
        raise ValueError("keys are a sequence of texts, at least one")
    if len(set(keys)) != len(keys):
        raise ValueError("a key is named twice")
    return tuple(keys)


def _checked(handle: Handle, rows: int) -> tuple[dict[str, Any], MooncakeDataProtoRef]:
    """Checks the handle of a table with `rows` rows."""
    ref = import_dataproto_ref(handle)
    if ref.batch_size != rows:
        raise ValueError(f"the table has {ref.batch_size} rows for {rows} keys")
    if not ref.stage_refs:
        raise ValueError("the table has no columns")
    return dict(handle), ref


def _parts(ref: MooncakeDataProtoRef) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Returns the parts of a table. No two tables share a bundle, so handles with equal parts name the same
    table."""
    bundles = {stage: bundle.manifest_key for stage, bundle in ref.stage_refs.items()}
    return ref.batch_size, bundles, ref.field_index


def _alike(one: Any, other: Any) -> bool:
    """Whether metadata are equal. Arrays and tensors answer `==` with an array, and JSON turns tuples into
    lists."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    if any(members.is_array(value) or members.is_tensor(value) for value in (one, other)):
        same_kind = type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        return same_kind and _alike(one.tolist(), other.tolist())
    return bool(one == other) or bool(one != one and other != other)


def _merged(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for info in infos:
        for key, value in info.items():
            if key in merged and not _alike(merged[key], value):
                raise ValueError(f"the tables disagree about the metadata {key!r}")
            merged[key] = value
    return merged
