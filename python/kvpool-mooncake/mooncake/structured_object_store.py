"""Objects of named members, and tables of rows, in a store.

```python
transfer = MooncakeBundleTransfer(store)
ref = transfer.put({"batch": {"ids": tensor}, "non_tensor_batch": {"text": texts}}, partition="train")
part = transfer.get(ref, fields=["ids"], rows=slice(0, 16))
```

It needs numpy. Values are stored without pickle, so reading an object executes nothing. A stored object has
kvpool's own form (`mooncake/_structured`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

from mooncake._structured import tables as _tables
from mooncake._structured.bundles import (
    DEFAULT_BUNDLE_CHUNK_BYTES,
    MISSING_OBJECT_ERROR,
    BundleStore,
    Bundles as _Bundles,
)
from mooncake._structured.members import RawDestination as _RawDestination
from mooncake._structured.members import TensorObjectBuffer as _TensorObjectBuffer
from mooncake._structured.refs import (
    DATAPROTO_REF_HANDLE_TYPE,
    DATAPROTO_REF_HANDLE_VERSION,
    STORAGE_GROUP_ID,
    BundleTransferPolicy,
    DataProtoRefLike,
    FieldSchema,
    MooncakeDataProtoRef,
    RemoteBundleRef,
    StructuredFieldLocation,
    StructuredMemberSlice,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
    export_dataproto_ref,
    import_dataproto_ref,
    is_dataproto_ref_handle,
)
from mooncake._structured.refs import resolve_ref as _resolve_ref

__all__ = [
    "AUTO_PARALLEL_MIN_BYTES",
    "AUTO_PARALLEL_MIN_CHUNKS",
    "BundleStore",
    "BundleTransferPolicy",
    "DATAPROTO_REF_HANDLE_TYPE",
    "DATAPROTO_REF_HANDLE_VERSION",
    "DEFAULT_BUNDLE_CHUNK_BYTES",
    "DataProtoRefLike",
    "FieldSchema",
    "MISSING",
    "MISSING_OBJECT_ERROR",
    "MooncakeBundleTransfer",
    "MooncakeDataProtoRef",
    "RemoteBundleRef",
    "STORAGE_GROUP_ID",
    "STRUCTURED_FIELD_SPECS_KEY",
    "StructuredFieldLocation",
    "StructuredMemberSlice",
    "StructuredObjectPayload",
    "StructuredObjectReadSpec",
    "StructuredObjectResult",
    "export_dataproto_ref",
    "export_ref",
    "import_dataproto_ref",
    "import_ref",
    "infer_structure",
    "is_dataproto_ref_handle",
    "raw_destination",
    "tensor_object_buffer",
]

# Thresholds of the original, which have no effect: a bundle's chunks are put at once.
AUTO_PARALLEL_MIN_BYTES = DEFAULT_BUNDLE_CHUNK_BYTES
AUTO_PARALLEL_MIN_CHUNKS = 8
STRUCTURED_FIELD_SPECS_KEY = "__mooncake_structured_fields__"

_WRAPPED = "__mooncake_wrapped_object__"

export_ref = export_dataproto_ref
import_ref = import_dataproto_ref


class _Missing:
    def __repr__(self) -> str:
        return "<MISSING>"


MISSING = _Missing()


class MooncakeBundleTransfer:
    """Puts and gets objects of members, and tables, in a store."""

    def __init__(
        self,
        store: BundleStore,
        key_prefix: str = "bundle",
        default_chunk_bytes: int = DEFAULT_BUNDLE_CHUNK_BYTES,
        buffer_pool: Any = None,
    ) -> None:
        """`buffer_pool` has no effect: bytes are read straight to where they are used."""
        self.store = store
        self.key_prefix = key_prefix.strip("/")
        self.default_chunk_bytes = default_chunk_bytes
        self._bundles = _Bundles(store, self.key_prefix, default_chunk_bytes)

    def put_bundle(
        self,
        meta: bytes | bytearray | memoryview,
        buffers: Mapping[str, Any],
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Puts bytes and named members. `policy` and `max_inflight_put` have no effect. Raises RuntimeError."""
        return self._bundles.put({"meta": bytes(meta).hex()}, buffers, partition, chunk_bytes, config)

    def remove_bundle(self, ref: RemoteBundleRef | Mapping[str, Any]) -> None:
        """Removes all objects of a bundle. Raises RuntimeError if one cannot be removed."""
        self._bundles.remove(ref)

    def put_structured_object(
        self,
        payload: StructuredObjectPayload,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Puts members with metadata for JSON. Raises RuntimeError, or TypeError for a value of an unknown type."""
        return self._bundles.put(payload.metadata or {}, payload.buffers or {}, partition, chunk_bytes, config)

    def put_object(
        self,
        obj: Any,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Puts a mapping of members, or one value."""
        is_mapping = isinstance(obj, Mapping)
        metadata, given = ({}, obj) if is_mapping else ({_WRAPPED: True}, {"value": obj})
        return self._bundles.put(metadata, given, partition, chunk_bytes, config)

    def get_object(self, ref: RemoteBundleRef | Mapping[str, Any]) -> Any:
        """What `put_object` put. Raises KeyError for a miss."""
        found = self.materialize(self.read_spec(ref))
        return found.objects["value"] if found.metadata.get(_WRAPPED) else found.objects

    def read_spec(self, ref: RemoteBundleRef | Mapping[str, Any]) -> StructuredObjectReadSpec:
        """A read of all members, to be narrowed."""
        return StructuredObjectReadSpec(ref)

    def materialize(self, spec: StructuredObjectReadSpec) -> StructuredObjectResult:
        """Reads what a spec says. Raises KeyError for a miss."""
        return self._bundles.read(spec, {})

    def materialize_into(
        self, spec: StructuredObjectReadSpec, destinations: Mapping[str, Any] | None
    ) -> StructuredObjectResult:
        """`materialize` into arrays, tensors, bytearrays or memory of the caller.

        Raises ValueError if one does not fit.
        """
        return self._bundles.read(spec, destinations or {})

    @staticmethod
    def release_result(result: Any) -> None:
        """Does nothing: a result owns its memory."""

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
        field_schemas: Mapping[str, FieldSchema] | None = None,
    ) -> MooncakeDataProtoRef:
        """Puts a table: an object or a mapping with `batch`, `non_tensor_batch` and `meta_info`, or a flat "dict"."""
        if type not in ("dataproto", "dict"):
            raise ValueError(f"a payload has the type dataproto or dict, not {type!r}")
        table = _tables.from_flat(data, field_schemas or {}) if type == "dict" else data
        empty = MooncakeDataProtoRef(0, {}, {}, {}, namespace, partition)
        return self._put_stage(empty, table, stage, False, chunk_bytes, config, field_schemas or {})

    def put_dataproto(self, data: Any, **how: Any) -> MooncakeDataProtoRef:
        """`put` of the type "dataproto"."""
        return self.put(data, type="dataproto", **how)

    def append_dataproto_fields(
        self,
        ref: DataProtoRefLike,
        data: Any,
        *,
        stage: str,
        overwrite: bool = False,
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        field_schemas: Mapping[str, FieldSchema] | None = None,
        config: Any = None,
    ) -> MooncakeDataProtoRef:
        """Puts further fields of the same rows. Returns the reference with them; the given one stays as it is.

        Raises ValueError for other numbers of rows, or for a field that is there, unless `overwrite`.
        """
        found = _resolve_ref(ref)
        return self._put_stage(found, data, stage, overwrite, chunk_bytes, config, field_schemas or {})

    def _put_stage(
        self,
        ref: MooncakeDataProtoRef,
        data: Any,
        stage: str,
        overwrite: bool,
        chunk_bytes: int | None,
        config: Any,
        schemas: Mapping[str, FieldSchema],
    ) -> MooncakeDataProtoRef:
        batch, others, meta_info = _tables.split(data)
        _tables.check_schemas({**batch, **others}, schemas)
        count = _tables.batch_size([batch, others])
        if ref.stage_refs and (batch or others) and count != ref.batch_size:
            raise ValueError(f"the new fields have {count} rows, and the table {ref.batch_size}")
        twice = [name for name in (*batch, *others) if name in ref.field_index]
        if (twice and not overwrite) or set(batch) & set(others):
            raise ValueError(f"the fields {', '.join(twice) or 'of both sections'} are there already")
        serial = len(ref.stage_refs) + len(ref.field_index)
        places = {name: _location(stage, "batch", name, serial) for name in batch}
        places |= {name: _location(stage, "non_tensor_batch", name, serial) for name in others}
        given = {places[name].member: value for name, value in {**batch, **others}.items()}
        new = self._bundles.put({"dataproto": {"rows": count}}, given, ref.partition, chunk_bytes, config)
        old = ref.stage_refs.get(stage)
        if old is not None:
            new = self._joined(old, new, config)
        return MooncakeDataProtoRef(
            batch_size=ref.batch_size if ref.stage_refs else count,
            stage_refs={**ref.stage_refs, stage: new},
            field_index={**ref.field_index, **places},
            meta_info={**ref.meta_info, **meta_info},
            namespace=ref.namespace,
            partition=ref.partition,
            global_indexes=ref.global_indexes,
        )

    def _joined(self, old: RemoteBundleRef, new: RemoteBundleRef, config: Any) -> RemoteBundleRef:
        """One manifest for the members of two; the older manifest stays for those who have it."""
        before, after = self._bundles.manifest(old), self._bundles.manifest(new)
        merged = {
            **after,
            "members": {**before["members"], **after["members"]},
            "others": [*before.get("others", []), old.manifest_key],
        }
        try:
            joined = self._bundles.put_manifest(self._bundles.new_manifest_key(new.manifest_key), merged, config)
        except RuntimeError:
            self._bundles.remove(new)
            raise
        self._bundles.remove_keys([new.manifest_key])
        return joined

    def get(
        self,
        ref: DataProtoRefLike,
        *,
        type: Literal["dataproto", "dict"] = "dataproto",
        fields: Sequence[str] | None = None,
        batch_fields: Sequence[str] | None = None,
        non_tensor_fields: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        data_cls: Any = None,
        destinations: Mapping[str, Any] | None = None,
        rows: slice | StructuredMemberSlice | Sequence[int] | None = None,
    ) -> Any:
        """Some fields and rows of a table: a dict of three parts, an object of `data_cls`, or a flat "dict".

        Raises KeyError for a miss or an unknown field, and ValueError for a destination that does not fit.
        """
        if type not in ("dataproto", "dict"):
            raise ValueError(f"a payload has the type dataproto or dict, not {type!r}")
        found = _resolve_ref(ref)
        names = _tables.select(found, fields, batch_fields, non_tensor_fields)
        chosen = _tables.chosen_rows(rows, found.batch_size)
        metadata = _chosen(found.meta_info, meta_info_keys)
        table: dict[str, Any] = {"batch": {}, "non_tensor_batch": {}, "meta_info": metadata}
        for name in names:
            location = found.field_index[name]
            stage, to = found.stage_refs[location.stage], (destinations or {}).get(name)
            table[location.section][name] = self._field(stage, location.member, chosen, to)
        return _tables.to_flat(table) if type == "dict" else _tables.build(table, data_cls)

    def _field(
        self, stage: RemoteBundleRef, member: str, rows: StructuredMemberSlice | list[int] | None, to: Any
    ) -> Any:
        if isinstance(rows, list):
            value = self._bundles.read_rows(stage, member, rows)
            if to is None:
                return value
            to[...] = value
            return to
        spec = StructuredObjectReadSpec(stage, (member,), () if rows is None else ((member, rows),))
        return self._bundles.read(spec, {} if to is None else {member: to}).objects[member]

    def get_dataproto(self, ref: DataProtoRefLike, **what: Any) -> Any:
        """`get` of the type "dataproto"."""
        return self.get(ref, type="dataproto", **what)

    def dataproto_manifest_view(self, ref: DataProtoRefLike) -> dict[str, Any]:
        """The fields of a table with their encodings, for people and tools."""
        found = _resolve_ref(ref)
        manifests = {stage: self._bundles.manifest(one) for stage, one in found.stage_refs.items()}
        described: dict[str, dict[str, Any]] = {"batch": {}, "non_tensor_batch": {}}
        for name, location in found.field_index.items():
            said = manifests[location.stage]["members"][location.member]
            spec = {key: value for key, value in said.items() if not key.startswith("chunk")}
            place = {"section": location.section, "stage": location.stage, "member": location.member}
            described[location.section][name] = {**place, "spec": spec}
        return {
            "namespace": found.namespace,
            "partition": found.partition,
            "batch_size": found.batch_size,
            "batch_fields": described["batch"],
            "non_tensor_fields": described["non_tensor_batch"],
            "meta_info_keys": list(found.meta_info),
            "stages": {stage: {"manifest_key": one.manifest_key} for stage, one in found.stage_refs.items()},
        }

    def cleanup_dataproto(self, ref: DataProtoRefLike) -> None:
        """Removes all objects of a table. Raises RuntimeError if one cannot be removed."""
        for stage in _resolve_ref(ref).stage_refs.values():
            self._bundles.remove(stage)

    def cleanup_dataproto_append(self, previous: DataProtoRefLike, appended: DataProtoRefLike) -> None:
        """Removes what an append added, and keeps the objects of the reference before it."""
        before, after = _resolve_ref(previous), _resolve_ref(appended)
        for stage, new in after.stage_refs.items():
            old = before.stage_refs.get(stage)
            if old is None:
                self._bundles.remove(new)
            elif old.manifest_key != new.manifest_key:
                kept = self._bundles.manifest(old)["members"]
                added = [said for name, said in self._bundles.manifest(new)["members"].items() if name not in kept]
                self._bundles.remove_keys([*(key for said in added for key in said["chunks"]), new.manifest_key])


def tensor_object_buffer(ptr: int, size: int, owner: Any = None, batch_size: int | None = None) -> _TensorObjectBuffer:
    """Memory with a tensor and its header, as `get_tensor_into` reads it, for a member. `owner` is kept meanwhile."""
    return _TensorObjectBuffer(ptr, size, owner, batch_size)


def raw_destination(ptr: int, size: int, owner: Any = None, *, pre_registered: bool = False) -> _RawDestination:
    """Memory that a member's bytes are read into. `pre_registered` has no effect."""
    return _RawDestination(ptr, size, owner, pre_registered)


def infer_structure(*_args: Any, **_how: Any) -> NoReturn:
    """Not supported: raises NotImplementedError."""
    raise NotImplementedError("infer_structure: kvpool stores values as they are, and infers no codec for their leaves")


def _location(
    stage: str, section: Literal["batch", "non_tensor_batch"], name: str, serial: int
) -> StructuredFieldLocation:
    # The number keeps a field that replaces another apart from it.
    member = f"{section}.{name}" if serial == 0 else f"{section}.{name}.{serial}"
    return StructuredFieldLocation(stage, member, section)


def _chosen(values: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    if names is None:
        return dict(values)
    unknown = [name for name in names if name not in values]
    if unknown:
        raise KeyError(f"the table has no metadata {', '.join(unknown)}")
    return {name: values[name] for name in names}
