"""What callers hold: references to stored objects, schemas and slices, and their transport as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

DATAPROTO_REF_HANDLE_TYPE = "mooncake_dataproto_ref"
DATAPROTO_REF_HANDLE_VERSION = 1
STORAGE_GROUP_ID = "storage_group_id"

Section = Literal["batch", "non_tensor_batch"]
_SECTIONS = ("batch", "non_tensor_batch")


@dataclasses.dataclass(frozen=True)
class BundleTransferPolicy:
    """How a bundle is put. No field has an effect: the store moves all chunks of a bundle at once."""

    max_inflight_put: int = 1
    put_mode: Literal["auto", "batch", "parallel"] = "auto"
    copy_mode: Literal["auto", "zero_copy", "copy"] = "auto"


@dataclasses.dataclass(frozen=True)
class FieldSchema:
    """What a caller knows of a field.

    `metadata["section"]` puts it into "batch", "non_tensor_batch" or "meta_info". With `nullable` of False, a row
    without a value is refused. `codec` has no effect: the values choose how they are stored.
    """

    codec: str
    nullable: bool = True
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class RemoteBundleRef:
    """A stored bundle: the key of its manifest, and the manifest if it is known."""

    manifest_key: str
    manifest: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StructuredFieldLocation:
    """The stage and the member of a field."""

    stage: str
    member: str
    section: Section


@dataclasses.dataclass
class MooncakeDataProtoRef:
    """A stored table: its stages, and where each field is."""

    batch_size: int
    stage_refs: dict[str, RemoteBundleRef]
    field_index: dict[str, StructuredFieldLocation]
    meta_info: dict[str, Any]
    namespace: str = "default"
    partition: str = "default"
    global_indexes: list[int] | None = None
    encoded_non_tensor: dict[str, Any] = dataclasses.field(default_factory=dict)
    _storage_group_id: str | None = None


DataProtoRefLike = MooncakeDataProtoRef | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class StructuredMemberSlice:
    """The elements `start` to `end` of a member along an axis, each `step`-th."""

    axis: int
    start: int
    end: int
    step: int = 1


@dataclasses.dataclass(frozen=True)
class StructuredObjectReadSpec:
    """What of an object is read: all members, or some, each whole or sliced."""

    ref: RemoteBundleRef | Mapping[str, Any]
    member_names: tuple[str, ...] | None = None
    member_slices: tuple[tuple[str, StructuredMemberSlice], ...] = ()

    def select_members(self, names: Sequence[str] | None) -> StructuredObjectReadSpec:
        """The same for these members only; all for `None`."""
        return dataclasses.replace(self, member_names=None if names is None else tuple(names))

    def slice_member(self, name: str, axis: int, start: int, end: int, step: int = 1) -> StructuredObjectReadSpec:
        """The same with a slice of a member, in place of an earlier one."""
        others = tuple((other, part) for other, part in self.member_slices if other != name)
        return dataclasses.replace(
            self, member_slices=(*others, (name, StructuredMemberSlice(axis, start, end, step)))
        )

    def member_slice(self, name: str) -> StructuredMemberSlice | None:
        """The slice of a member."""
        return dict(self.member_slices).get(name)


@dataclasses.dataclass(frozen=True)
class StructuredObjectPayload:
    """An object to put: metadata for JSON, and members by name."""

    metadata: Mapping[str, Any] | None = None
    buffers: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.buffers is None:
            raise TypeError("a StructuredObjectPayload needs buffers")
        if self.metadata is None:
            object.__setattr__(self, "metadata", {})


@dataclasses.dataclass
class StructuredObjectResult:
    """An object that was read."""

    metadata: dict[str, Any]
    objects: dict[str, Any]


def is_dataproto_ref_handle(value: Any) -> bool:
    """Whether a value is what `export_dataproto_ref` returns."""
    return isinstance(value, Mapping) and value.get("type") == DATAPROTO_REF_HANDLE_TYPE


def export_dataproto_ref(ref: MooncakeDataProtoRef) -> dict[str, Any]:
    """A reference as a value for JSON. Raises TypeError for metadata that JSON has no form for."""
    if not isinstance(ref, MooncakeDataProtoRef):
        raise TypeError(f"a MooncakeDataProtoRef is exported, not {type(ref).__name__}")
    handle: dict[str, Any] = {
        "type": DATAPROTO_REF_HANDLE_TYPE,
        "version": DATAPROTO_REF_HANDLE_VERSION,
        "kind": "bundle_stages",
        "batch_size": int(ref.batch_size),
        "namespace": ref.namespace,
        "partition": ref.partition,
        "global_indexes": _plain(ref.global_indexes),
        "stage_refs": {stage: {"manifest_key": one.manifest_key} for stage, one in ref.stage_refs.items()},
        "field_index": {name: dataclasses.asdict(location) for name, location in ref.field_index.items()},
        "meta_info": _plain(ref.meta_info),
        "encoded_non_tensor": _plain(ref.encoded_non_tensor),
    }
    if ref._storage_group_id is not None:
        handle[STORAGE_GROUP_ID] = ref._storage_group_id
    json.dumps(handle)
    return handle


def import_dataproto_ref(handle: Mapping[str, Any]) -> MooncakeDataProtoRef:
    """The reference of an exported value. Raises ValueError for any other value."""
    if not is_dataproto_ref_handle(handle):
        raise ValueError("the value is no DataProto ref handle")
    if handle.get("version", -1) not in (DATAPROTO_REF_HANDLE_VERSION, 2):
        raise ValueError(f"unsupported version {handle.get('version')!r} of a DataProto ref handle")
    if handle.get("kind") != "bundle_stages":
        raise ValueError(f"unsupported kind {handle.get('kind')!r} of a DataProto ref handle")
    stages = {
        _name(stage, "stage"): RemoteBundleRef(_name(_mapping(one, stage).get("manifest_key"), "manifest_key"), {})
        for stage, one in _mapping(handle.get("stage_refs"), "stage_refs").items()
    }
    fields = {}
    for name, said in _mapping(handle.get("field_index"), "field_index").items():
        location = _mapping(said, name)
        if location.get("section") not in _SECTIONS:
            raise ValueError(f"invalid section {location.get('section')!r} of the field {name!r}")
        stage, member = _name(location.get("stage"), "stage"), _name(location.get("member"), "member")
        if stage not in stages:
            raise ValueError(f"the field {name!r} is in the unknown stage {stage!r}")
        fields[_name(name, "field")] = StructuredFieldLocation(stage, member, location["section"])
    group = handle.get(STORAGE_GROUP_ID)
    if group is not None or handle["version"] == 2:
        _name(group, STORAGE_GROUP_ID)
    indexes = handle.get("global_indexes")
    if indexes is not None and not (isinstance(indexes, list) and all(type(index) is int for index in indexes)):
        raise ValueError("global_indexes must be a list of integers, or null")
    return MooncakeDataProtoRef(
        batch_size=int(handle["batch_size"]),
        stage_refs=stages,
        field_index=fields,
        meta_info=dict(_mapping(handle.get("meta_info", {}), "meta_info")),
        namespace=str(handle.get("namespace", "default")),
        partition=str(handle.get("partition", "default")),
        global_indexes=indexes,
        encoded_non_tensor=dict(_mapping(handle.get("encoded_non_tensor", {}), "encoded_non_tensor")),
        _storage_group_id=group,
    )


def resolve_ref(ref: DataProtoRefLike) -> MooncakeDataProtoRef:
    """The reference of either form. Raises TypeError for anything else."""
    if isinstance(ref, MooncakeDataProtoRef):
        return ref
    if is_dataproto_ref_handle(ref):
        return import_dataproto_ref(ref)
    raise TypeError(f"a MooncakeDataProtoRef or its handle is needed, not {type(ref).__name__}")


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} of a DataProto ref handle must be a mapping")
    return value


def _name(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} of a DataProto ref handle must be a non-empty string, not {value!r}")
    return value


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if callable(getattr(value, "tolist", None)):
        return _plain(value.tolist())
    raise TypeError(f"a DataProto ref handle holds values for JSON only, not {type(value).__name__}")
