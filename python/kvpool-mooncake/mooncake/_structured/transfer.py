"""Putting, extending, reading and removing tables."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from mooncake._structured import columns, members, tables
from mooncake._structured.chunks import Fill
from mooncake._structured.objects import ObjectTransfer, _policy
from mooncake._structured.tables import BATCH, NON_TENSOR, DataProtoRefLike, MooncakeDataProtoRef, Sections
from mooncake._structured.types import (
    STRUCTURED_FIELD_SPECS_KEY,
    BundleTransferPolicy,
    FieldSchema,
    RemoteBundleRef,
    StructuredFieldLocation,
    StructuredMemberSlice,
)

_Rows = slice | StructuredMemberSlice | Sequence[int] | None
_Schemas = Mapping[str, FieldSchema] | None


@dataclasses.dataclass
class _Stage:
    """A stage with its metadata."""

    entries: Mapping[str, Any]
    specs: Mapping[str, Any]
    described: Any


class MooncakeBundleTransfer(ObjectTransfer):
    """Puts and gets bundles, structured objects and tables over a store."""

    def put(
        self,
        data: Any,
        *,
        type: Literal["dataproto", "dict"] = "dataproto",
        namespace: str = "default",
        partition: str = "default",
        stage: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        config: Any = None,
        field_schemas: _Schemas = None,
    ) -> MooncakeDataProtoRef:
        """Puts a table: an object or mapping with the sections `batch`, `non_tensor_batch` and `meta_info`.

        With the type "dict", it is a mapping of columns, and all other values are metadata.
        """
        given = tables.sections(data, type)
        ref = MooncakeDataProtoRef(
            given.rows, {}, {}, dict(given.meta_info), namespace, partition,
            _storage_group_id=f"structured-{uuid.uuid4().hex}",
        )
        return self._with_stage(ref, given, stage, chunk_bytes, policy, field_schemas, config)

    def put_dataproto(
        self,
        data: Any,
        *,
        namespace: str = "default",
        partition: str = "default",
        stage: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        field_schemas: _Schemas = None,
        config: Any = None,
    ) -> MooncakeDataProtoRef:
        """As `put`, for an object with sections."""
        return self.put(
            data, namespace=namespace, partition=partition, stage=stage, chunk_bytes=chunk_bytes,
            policy=policy, config=config, field_schemas=field_schemas,
        )

    def append_dataproto_fields(
        self,
        ref: DataProtoRefLike,
        data: Any,
        *,
        stage: str,
        overwrite: bool = False,
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        field_schemas: _Schemas = None,
        config: Any = None,
    ) -> MooncakeDataProtoRef:
        """Returns the table with further columns of the same number of rows. The table of `ref` does not
        change.

        Raises ValueError for another number of rows, and, without `overwrite`, for a column that exists.
        """
        old, given = tables.table_ref(ref), tables.sections(data, "dataproto")
        if given.rows != old.batch_size:
            raise ValueError(f"the new columns have {given.rows} rows, the table {old.batch_size}")
        fields = {*given.batch, *given.values}
        present = sorted(fields & set(old.field_index))
        if present and not overwrite:
            raise ValueError(f"the table has the columns {present} already")
        stages = dict(old.stage_refs)
        index = dict(old.field_index)
        if stage in stages:
            # The earlier bundle stays in the table's reference, so that a removal of the table finds it.
            aside = next(name for n in range(1, len(stages) + 2) if (name := f"{stage}#{n}") not in stages)
            stages[aside] = stages.pop(stage)
            moved = {name: place for name, place in index.items() if place.stage == stage}
            index |= {name: dataclasses.replace(place, stage=aside) for name, place in moved.items()}
        table = dataclasses.replace(
            old, stage_refs=stages, field_index=index, meta_info=old.meta_info | given.meta_info,
            encoded_non_tensor={k: v for k, v in old.encoded_non_tensor.items() if k not in fields},
        )
        return self._with_stage(table, given, stage, chunk_bytes, policy, field_schemas, config)

    def _with_stage(
        self,
        table: MooncakeDataProtoRef,
        given: Sections,
        stage: str,
        chunk_bytes: int | None,
        policy: BundleTransferPolicy | None,
        schemas: _Schemas,
        config: Any,
    ) -> MooncakeDataProtoRef:
        """Returns the table with the columns as a new stage, if there are any."""
        buffers, encoded = {}, {}
        places = {}
        for name, value in given.batch.items():
            buffers[f"{BATCH}.{name}"] = value
            places[name] = StructuredFieldLocation(stage, f"{BATCH}.{name}", BATCH)
        for name, value in given.values.items():
            member = f"{NON_TENSOR}.{name}"
            places[name] = StructuredFieldLocation(stage, member, NON_TENSOR)
            if members.is_array(value) and not value.dtype.hasobject:
                buffers[member] = value
                continue
            column = columns.encode(name, list(value), (schemas or {}).get(name))
            buffers |= {f"{member}.{part}": data for part, data in column.buffers.items()}
            encoded[name] = {
                "codec": column.codec,
                "rows": given.rows,
                "metadata": column.metadata,
                "payload_members": {part: f"{member}.{part}" for part in column.buffers},
            }
        if not places:
            return table
        said = {
            "layout": "dataproto_stage",
            "dataproto": {
                "version": 1, "namespace": table.namespace, "partition": table.partition, "stage": stage,
                "batch_size": given.rows,
            },
        }
        bundle = self._put_members(said, buffers, table.partition, chunk_bytes, _policy(policy, None), config)
        return dataclasses.replace(
            table,
            stage_refs=table.stage_refs | {stage: bundle},
            field_index=table.field_index | places,
            encoded_non_tensor=table.encoded_non_tensor | encoded,
        )

    def get(
        self,
        ref: DataProtoRefLike,
        *,
        type: Literal["dataproto", "dict"] = "dataproto",
        fields: Sequence[str] | None = None,
        batch_fields: Sequence[str] | None = None,
        non_tensor_fields: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        data_cls: Any | None = None,
        destinations: Mapping[str, Any] | None = None,
        rows: _Rows = None,
    ) -> Any:
        """Reads columns and rows of a table, by default all of them.

        The result is a dict of the three sections, or the object that `data_cls` makes of them. With the type
        "dict" it is one dict of columns and metadata. `destinations` are arrays, tensors or `raw_destination`s
        for columns of arrays, by name; a column of Python values raises TypeError. Raises KeyError for an
        unknown column, IndexError for an unknown row, and RuntimeError if bytes are not in the store.
        """
        if type not in ("dataproto", "dict"):
            raise ValueError(f"the type {type!r} is neither 'dataproto' nor 'dict'")
        table = tables.table_ref(ref)
        wanted = _chosen(table, fields, batch_fields, non_tensor_fields)
        selected = tables.rows_of(rows, table.batch_size)
        batch, values = self._read(table, wanted, selected, destinations or {})
        meta_info = dict(table.meta_info)
        if meta_info_keys is not None:
            meta_info = {key: value for key, value in meta_info.items() if key in meta_info_keys}
        if type == "dict":
            names = [*meta_info, *batch, *values]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"several sections have the names {twice}")
            lists = {name: list(value) if name in table.encoded_non_tensor else value for name, value in values.items()}
            return {**meta_info, **batch, **lists}
        if data_cls is None:
            return {BATCH: batch, NON_TENSOR: values, "meta_info": meta_info}
        if hasattr(data_cls, "from_dict"):
            return data_cls.from_dict(batch, values, meta_info=meta_info)
        return data_cls(batch=batch, non_tensor_batch=values, meta_info=meta_info)

    def get_dataproto(
        self,
        ref: DataProtoRefLike,
        *,
        fields: Sequence[str] | None = None,
        batch_fields: Sequence[str] | None = None,
        non_tensor_fields: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        data_cls: Any | None = None,
        destinations: Mapping[str, Any] | None = None,
        rows: _Rows = None,
    ) -> Any:
        """As `get`, with the type "dataproto"."""
        return self.get(
            ref, fields=fields, batch_fields=batch_fields, non_tensor_fields=non_tensor_fields,
            meta_info_keys=meta_info_keys, data_cls=data_cls, destinations=destinations, rows=rows,
        )

    def _stage(self, bundle: RemoteBundleRef) -> _Stage:
        manifest = self._bundles.manifest(bundle)
        metadata = self._metadata(manifest)
        specs = metadata.get(STRUCTURED_FIELD_SPECS_KEY) or {}
        return _Stage(manifest["buffers"], specs, metadata.get("dataproto"))

    def _read(
        self,
        table: MooncakeDataProtoRef,
        wanted: Sequence[str],
        rows: Sequence[int] | None,
        destinations: Mapping[str, Any],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        needed = {table.field_index[name].stage for name in wanted}
        stages = {name: self._stage(table.stage_refs[name]) for name in table.stage_refs if name in needed}
        finish: dict[str, Callable[[], Any]] = {}
        fills: list[Fill] = []
        # A column of Python values needs its offsets before its data.
        later: list[tuple[str, _Ragged]] = []
        for name in wanted:
            place = table.field_index[name]
            stage = stages[place.stage]
            said = table.encoded_non_tensor.get(name)
            if said is None:
                reading = members.reading(
                    name, stage.specs[place.member], stage.entries[place.member], rows, destinations.get(name)
                )
                fills += reading.fills
                finish[name] = reading.value
            else:
                if destinations.get(name) is not None:
                    raise TypeError(f"the column {name} has Python values, and takes no destination")
                column = _Ragged(name, said, stage, rows)
                fills += column.first
                later.append((name, column))
                finish[name] = column.value
        self._bundles.fill(fills)
        self._bundles.fill([fill for _, column in later for fill in column.second()])
        found: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for name in wanted:
            found[table.field_index[name].section == NON_TENSOR][name] = finish[name]()
        return found

    def dataproto_manifest_view(self, ref: DataProtoRefLike) -> dict[str, Any]:
        """Describes a table without reading its columns."""
        table = tables.table_ref(ref)
        stages = {name: self._stage(bundle) for name, bundle in table.stage_refs.items()}
        fields: dict[str, dict[str, Any]] = {BATCH: {}, NON_TENSOR: {}}
        for name, place in table.field_index.items():
            spec = table.encoded_non_tensor.get(name) or stages[place.stage].specs.get(place.member)
            fields[place.section][name] = dataclasses.asdict(place) | {"spec": spec}
        return {
            "namespace": table.namespace,
            "partition": table.partition,
            "batch_size": table.batch_size,
            "batch_fields": fields[BATCH],
            "non_tensor_fields": fields[NON_TENSOR],
            "meta_info_keys": list(table.meta_info),
            "stages": {
                name: {"manifest_key": table.stage_refs[name].manifest_key, "dataproto": stage.described}
                for name, stage in stages.items()
            },
        }

    def cleanup_dataproto(self, ref: DataProtoRefLike) -> None:
        """Removes a table with all its stages. Raises RuntimeError if something stays: call it again then."""
        self._remove_stages(tables.table_ref(ref).stage_refs.values())

    def cleanup_dataproto_append(self, previous: DataProtoRefLike, appended: DataProtoRefLike) -> None:
        """Removes the objects that `append_dataproto_fields` put when it made `appended` from `previous`."""
        kept = {bundle.manifest_key for bundle in tables.table_ref(previous).stage_refs.values()}
        added = tables.table_ref(appended).stage_refs.values()
        self._remove_stages(bundle for bundle in added if bundle.manifest_key not in kept)

    def _remove_stages(self, bundles: Any) -> None:
        first: RuntimeError | None = None
        for bundle in bundles:
            try:
                self.remove_bundle(bundle)
            except RuntimeError as error:
                first = first or error
        if first is not None:
            raise first


def _chosen(
    table: MooncakeDataProtoRef,
    fields: Sequence[str] | None,
    batch_fields: Sequence[str] | None,
    non_tensor_fields: Sequence[str] | None,
) -> list[str]:
    """Returns the requested columns in order, each once."""
    parts = [part for part in (batch_fields, non_tensor_fields) if part is not None]
    if fields is not None and parts:
        raise ValueError("columns are chosen by fields, or by batch_fields and non_tensor_fields, not by both")
    if fields is not None:
        parts = [fields]
    chosen = list(dict.fromkeys(name for part in parts for name in part)) if parts else list(table.field_index)
    unknown = [name for name in chosen if name not in table.field_index]
    if unknown:
        raise KeyError(f"the table has no columns {unknown}")
    return chosen


class _Ragged:
    """A column of Python values that is being read: first the offsets of its rows, then the rows."""

    def __init__(self, name: str, said: Mapping[str, Any], stage: _Stage, rows: Sequence[int] | None) -> None:
        self._said = said
        self._rows = range(said["rows"]) if rows is None else rows
        self._parts = said["payload_members"]
        self._stage = stage
        self._data: Any = bytearray()
        # Both buffers are read whole, because they are small beside the data.
        self._readings = {
            part: members.reading(name, stage.specs[member], stage.entries[member], None, None)
            for part, member in self._parts.items()
            if part != "data" or said["codec"] == "ndarray"
        }
        self.first = [fill for reading in self._readings.values() for fill in reading.fills]

    def second(self) -> list[Fill]:
        """Returns the reads of the rows' bytes."""
        if "offsets" not in self._readings:
            return []
        offsets = self._readings["offsets"].value()
        entry = self._stage.entries[self._parts["data"]]
        self._ends, fills, at = [], [], 0
        for _, first, count in members.runs(self._rows):
            begin, end = int(offsets[first]), int(offsets[first + count])
            edges = [at + int(offset) - begin for offset in offsets[first : first + count + 1]]
            self._ends += list(zip(edges, edges[1:]))
            fills.append((begin, at, end - begin))
            at += end - begin
        self._data = bytearray(at)
        room = memoryview(self._data)
        return [Fill(entry, begin, room[start : start + length]) for begin, start, length in fills]

    def value(self) -> Any:
        """Returns the rows after both reads."""
        rows = list(self._rows)
        nulls = self._readings["nulls"].value()[rows]
        if "data" in self._readings:
            return columns.decode(self._said, self._readings["data"].value()[rows], [], nulls)
        return columns.decode(self._said, self._data, self._ends, nulls)
