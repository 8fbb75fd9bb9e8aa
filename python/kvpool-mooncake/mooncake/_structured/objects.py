"""Structured objects: bundles whose metadata describes how each buffer is decoded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mooncake._structured import members
from mooncake._structured.chunks import Bundles, Fill
from mooncake._structured.types import (
    DEFAULT_BUNDLE_CHUNK_BYTES,
    STRUCTURED_FIELD_SPECS_KEY,
    BundleStore,
    BundleTransferPolicy,
    RemoteBundleRef,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
    bundle_ref,
)

# The metadata of an object with a single value, and the name of that value's member.
_SINGLE = "single_value"
_VALUE = "value"


class ObjectTransfer:
    """Puts and gets bundles and structured objects."""

    def __init__(
        self,
        store: BundleStore,
        key_prefix: str = "bundle",
        default_chunk_bytes: int = DEFAULT_BUNDLE_CHUNK_BYTES,
        buffer_pool: Any = None,
    ) -> None:
        """All objects are under `key_prefix`. `buffer_pool` has no effect, because a read writes directly into
        its result."""
        del buffer_pool
        self._bundles = Bundles(store, key_prefix, default_chunk_bytes)

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
        """Puts metadata and named buffers. If one is not put, the others are removed. Raises RuntimeError
        then."""
        spec, data = members.encode("meta", meta)
        if spec["encoding"] != "bytes":
            raise TypeError(f"the metadata of a bundle is bytes, not {type(meta).__name__}")
        encoded = {name: members.encode(name, value)[1] for name, value in buffers.items()}
        return self._put(data, encoded, partition, chunk_bytes, _policy(policy, max_inflight_put), config)

    def _put(
        self,
        meta: memoryview,
        buffers: Mapping[str, memoryview],
        partition: str,
        chunk_bytes: int | None,
        policy: BundleTransferPolicy,
        config: Any,
    ) -> RemoteBundleRef:
        return self._bundles.write(meta, buffers, partition, chunk_bytes, policy, config)

    def remove_bundle(self, ref: RemoteBundleRef | Mapping[str, Any]) -> None:
        """Removes a bundle, or the rest of it. Raises RuntimeError if an object cannot be removed."""
        self._bundles.remove(bundle_ref(ref))

    def put_structured_object(
        self,
        payload: StructuredObjectPayload,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Puts metadata and members. Raises TypeError for metadata that JSON cannot express."""
        said = {"layout": "structured", **payload.metadata}
        how = _policy(policy, max_inflight_put)
        return self._put_members(said, payload.buffers, partition, chunk_bytes, how, config)

    def _put_members(
        self,
        metadata: dict[str, Any],
        buffers: Mapping[str, Any],
        partition: str,
        chunk_bytes: int | None,
        policy: BundleTransferPolicy,
        config: Any,
    ) -> RemoteBundleRef:
        if STRUCTURED_FIELD_SPECS_KEY in metadata:
            raise ValueError(f"the metadata's {STRUCTURED_FIELD_SPECS_KEY} is not the caller's")
        encoded = {name: members.encode(name, value) for name, value in buffers.items()}
        if encoded:
            metadata = metadata | {STRUCTURED_FIELD_SPECS_KEY: {name: spec for name, (spec, _) in encoded.items()}}
        try:
            meta = json.dumps(metadata, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise TypeError(f"the metadata cannot be JSON: {error}") from error
        data = {name: view for name, (_, view) in encoded.items()}
        return self._put(memoryview(meta), data, partition, chunk_bytes, policy, config)

    def put_object(
        self,
        obj: Any,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Puts a mapping of arrays, tensors and bytes, or a single such value."""
        if isinstance(obj, Mapping):
            payload = StructuredObjectPayload({}, obj)
        else:
            payload = StructuredObjectPayload({_SINGLE: True}, {_VALUE: obj})
        return self.put_structured_object(payload, partition, chunk_bytes, policy, max_inflight_put, config)

    def get_object(self, ref: RemoteBundleRef | Mapping[str, Any]) -> Any:
        """Returns the value of `put_object`, or the members of a structured object."""
        result = self.materialize(self.read_spec(ref))
        return result.objects[_VALUE] if result.metadata.get(_SINGLE) is True else result.objects

    def read_spec(self, ref: RemoteBundleRef | Mapping[str, Any]) -> StructuredObjectReadSpec:
        """Returns a plan for reading everything. Select or slice members to read less."""
        return StructuredObjectReadSpec(ref)

    def materialize(self, spec: StructuredObjectReadSpec) -> StructuredObjectResult:
        """Reads the members. Raises RuntimeError if one is not in the store, and KeyError for an unknown
        member."""
        return self.materialize_into(spec, None)

    def materialize_into(
        self, spec: StructuredObjectReadSpec, destinations: Mapping[str, Any] | None
    ) -> StructuredObjectResult:
        """As `materialize`, into the caller's arrays, tensors or `raw_destination`s, by the names of
        members."""
        manifest = self._bundles.manifest(bundle_ref(spec.ref))
        metadata = self._metadata(manifest)
        entries = manifest["buffers"]
        names = list(dict.fromkeys(entries if spec.member_names is None else spec.member_names))
        unknown = [name for name in names if name not in entries]
        if unknown:
            raise KeyError(f"the object has no members {unknown}")
        if not names and spec.member_names is not None:
            raise ValueError("no member is selected")
        specs = metadata.get(STRUCTURED_FIELD_SPECS_KEY) or {}
        readings = {}
        for name in names:
            part = spec.member_slice(name)
            rows = None
            if part is not None:
                shape = specs.get(name, {}).get("shape")
                if part.axis != 0 or part.step <= 0 or not shape:
                    raise ValueError(f"the member {name} cannot be cut along axis {part.axis} in steps of {part.step}")
                rows = range(*slice(part.start, part.end, part.step).indices(shape[0]))
            into = (destinations or {}).get(name)
            readings[name] = members.reading(
                name, specs.get(name, {"encoding": "bytes"}), entries[name], rows, into
            )
        self._bundles.fill([fill for reading in readings.values() for fill in reading.fills])
        return StructuredObjectResult(metadata, {name: reading.value() for name, reading in readings.items()})

    def _metadata(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        said = json.loads(bytes(self._bundles.read(manifest["meta"])) or b"{}")
        if not isinstance(said, dict):
            raise ValueError("the bundle is no structured object: its metadata are no JSON object")
        return said

    def _fill(self, fills: list[Fill]) -> None:
        self._bundles.fill(fills)

    @staticmethod
    def release_result(result: Any) -> None:
        """Does nothing: a result owns its memory."""


def _policy(policy: BundleTransferPolicy | None, max_inflight_put: int | None) -> BundleTransferPolicy:
    if policy is None:
        return BundleTransferPolicy(1 if max_inflight_put is None else max_inflight_put)
    if max_inflight_put is None:
        return policy
    return BundleTransferPolicy(max_inflight_put, policy.put_mode, policy.copy_mode)
