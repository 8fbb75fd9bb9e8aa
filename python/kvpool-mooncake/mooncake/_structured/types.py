"""The types of references, policies, payloads and results of bundles, structured objects and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

DEFAULT_BUNDLE_CHUNK_BYTES = 64 << 20
# A policy of "auto" puts chunks in parallel from this many bytes and chunks on.
AUTO_PARALLEL_MIN_BYTES = 64 << 20
AUTO_PARALLEL_MIN_CHUNKS = 8
MISSING_OBJECT_ERROR = -704
# The member of a bundle's metadata that describes how each buffer is decoded.
STRUCTURED_FIELD_SPECS_KEY = "__mooncake_structured_fields__"
STORAGE_GROUP_ID = "storage_group_id"


class BundleStore(Protocol):
    """The methods that a store must have. `get_into_ranges` and `batch_remove` are used if the store has
    them."""

    def put(self, key: str, value: Any, config: Any = None) -> int:
        """Puts bytes. Returns 0 or a negative code."""

    def get(self, key: str) -> bytes:
        """Returns the bytes of an object; empty if it is absent."""

    def remove(self, key: str, force: bool = False) -> int:
        """Removes an object. Returns 0 or a negative code."""

    def is_exist(self, key: str) -> int:
        """Returns 1 if the object is present, 0 if it is absent, or a negative code."""


class Missing:
    """The one value that means an absent value."""

    def __repr__(self) -> str:
        return "<MISSING>"

    def __bool__(self) -> bool:
        return False


MISSING = Missing()


@dataclasses.dataclass(frozen=True)
class BundleTransferPolicy:
    """How the chunks of a bundle are put.

    - `put_mode`: "parallel" puts up to `max_inflight_put` chunks at once, "batch" one after the other. "auto" is
      "parallel" for large bundles.
    - `copy_mode` has no effect: kvpool moves bytes directly out of the caller's memory.
    """

    max_inflight_put: int = 1
    put_mode: Literal["auto", "batch", "parallel"] = "auto"
    copy_mode: Literal["auto", "zero_copy", "copy"] = "auto"

    def checked(self) -> BundleTransferPolicy:
        """Returns this policy. Raises ValueError for an invalid value."""
        if self.max_inflight_put < 1:
            raise ValueError(f"max_inflight_put must be positive, not {self.max_inflight_put}")
        for name, known in (("put_mode", ("auto", "batch", "parallel")), ("copy_mode", ("auto", "zero_copy", "copy"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, which is none of {', '.join(known)}")
        return self


@dataclasses.dataclass
class RemoteBundleRef:
    """A bundle in the store. If the reference lacks the manifest, the manifest is read from the store when
    needed."""

    manifest_key: str
    manifest: dict[str, Any]


def bundle_ref(value: RemoteBundleRef | Mapping[str, Any]) -> RemoteBundleRef:
    """Returns the reference from either form. Raises ValueError for a mapping without `manifest_key`."""
    if isinstance(value, RemoteBundleRef):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"a bundle is named by a RemoteBundleRef or a mapping, not {type(value).__name__}")
    key = value.get("manifest_key")
    if not isinstance(key, str) or not key:
        raise ValueError("the reference of a bundle has no manifest_key")
    return RemoteBundleRef(key, dict(value.get("manifest") or {}))


@dataclasses.dataclass(frozen=True)
class StructuredMemberSlice:
    """Every `step`-th part of a member along one axis, from `start` up to, but not including, `end`."""

    axis: int
    start: int
    end: int
    step: int = 1


@dataclasses.dataclass(frozen=True, init=False)
class StructuredObjectPayload:
    """Metadata that JSON can express, and named buffers: arrays, tensors, or bytes."""

    metadata: Mapping[str, Any]
    buffers: Mapping[str, Any]

    def __init__(
        self, metadata: Mapping[str, Any] | None = None, buffers: Mapping[str, Any] | None = None
    ) -> None:
        if buffers is None:
            raise TypeError("a StructuredObjectPayload needs buffers")
        object.__setattr__(self, "metadata", metadata or {})
        object.__setattr__(self, "buffers", buffers)


@dataclasses.dataclass(frozen=True)
class StructuredObjectReadSpec:
    """The plan for reading a structured object. All members are read if `member_names` is `None`."""

    ref: RemoteBundleRef | Mapping[str, Any]
    member_names: tuple[str, ...] | None = None
    member_slices: tuple[tuple[str, StructuredMemberSlice], ...] = ()

    def select_members(self, names: Sequence[str] | None) -> StructuredObjectReadSpec:
        """Returns the same plan with these members only."""
        return dataclasses.replace(self, member_names=None if names is None else tuple(names))

    def slice_member(self, name: str, axis: int, start: int, end: int, step: int = 1) -> StructuredObjectReadSpec:
        """Returns the same plan with a part of one member. It replaces an earlier slice of the member."""
        slices = dict(self.member_slices)
        slices[name] = StructuredMemberSlice(axis, start, end, step)
        return dataclasses.replace(self, member_slices=tuple(slices.items()))

    def member_slice(self, name: str) -> StructuredMemberSlice | None:
        """Returns the slice of a member; `None` without one."""
        return dict(self.member_slices).get(name)


@dataclasses.dataclass
class StructuredObjectResult:
    """The metadata of a structured object, and the members that were read."""

    metadata: dict[str, Any]
    objects: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class FieldSchema:
    """The encoding of a column of Python values. Without a schema, the rows decide the encoding.

    - `codec`: "ndarray", "utf8_ragged", "bytes_ragged", "typed_ragged" or "msgpack_ragged".
    - `nullable`: whether rows may be `None`.
    - `metadata`: for "ndarray" and "typed_ragged", the `dtype`.
    """

    codec: str
    nullable: bool = True
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StructuredFieldLocation:
    """The location of a table's column: a member of a stage's bundle."""

    stage: str
    member: str
    section: Literal["batch", "non_tensor_batch"]
