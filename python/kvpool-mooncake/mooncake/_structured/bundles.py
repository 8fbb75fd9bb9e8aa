"""Bundles: members as chunks in a store, and a manifest that describes them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mooncake._structured import members
from mooncake._structured.refs import (
    RemoteBundleRef,
    StructuredMemberSlice,
    StructuredObjectReadSpec,
    StructuredObjectResult,
)

DEFAULT_BUNDLE_CHUNK_BYTES = 64 << 20
MISSING_OBJECT_ERROR = -704
_FORMAT = "kvpool-bundle-1"


class BundleStore(Protocol):
    """What a bundle needs of a store. Other methods of a store are used if it has them."""

    def put(self, key: str, value: Any, config: Any = None) -> int:
        """As `MooncakeDistributedStore.put`."""

    def get(self, key: str) -> bytes:
        """As `MooncakeDistributedStore.get`."""

    def remove(self, key: str, force: bool = False) -> int:
        """As `MooncakeDistributedStore.remove`."""

    def is_exist(self, key: str) -> int:
        """As `MooncakeDistributedStore.is_exist`."""


class Bundles:
    """The bundles of one store under one prefix of keys."""

    def __init__(self, store: Any, prefix: str, chunk: int) -> None:
        if not prefix or prefix != prefix.strip("/"):
            raise ValueError(f"the key prefix {prefix!r} is empty, or begins or ends with a slash")
        self.store = store
        self._prefix = prefix
        self._chunk = check_chunk(chunk)

    def put(
        self, metadata: Mapping[str, Any], given: Mapping[str, Any], partition: str, chunk: int | None, config: Any
    ) -> RemoteBundleRef:
        """Puts members and their manifest. Raises RuntimeError, after which nothing is left of them."""
        if not partition or "/" in partition:
            raise ValueError(f"the partition {partition!r} is empty or has a slash")
        base = f"{self._prefix}/{partition}/{uuid.uuid4().hex}"
        step = self._chunk if chunk is None else check_chunk(chunk)
        described: dict[str, Any] = {}
        done: list[str] = []
        try:
            for at, (name, value) in enumerate(given.items()):
                said, buffers = members.encode(name, value)
                data = buffers[0] if len(buffers) == 1 else b"".join(bytes(buffer) for buffer in buffers)
                keys, sizes = self._put_chunks(f"{base}/{at}", data, step, config, done)
                described[name] = {**said, "size": sum(sizes), "chunks": keys, "chunk_sizes": sizes}
            manifest = {"format": _FORMAT, "metadata": dict(metadata), "members": described}
            return self.put_manifest(f"{base}/manifest", manifest, config)
        except Exception:
            self._remove(done)
            raise

    def put_manifest(self, key: str, manifest: dict[str, Any], config: Any) -> RemoteBundleRef:
        """Puts a manifest. Raises RuntimeError."""
        self._check(self._put(key, json.dumps(manifest).encode(), config), "put", key)
        return RemoteBundleRef(key, manifest)

    def new_manifest_key(self, key: str) -> str:
        """A key for another manifest beside one."""
        return f"{key.rsplit('/', 2)[0]}/{uuid.uuid4().hex}/manifest"

    def manifest(self, ref: RemoteBundleRef | Mapping[str, Any]) -> dict[str, Any]:
        """The manifest of a reference, from the store if the reference has none. Raises KeyError for a miss."""
        found = ref.manifest if isinstance(ref, RemoteBundleRef) else dict(ref).get("manifest", {})
        if not found:
            key = self.key(ref)
            data = self.store.get(key)
            if not data:
                raise KeyError(f"the bundle {key} is not in the store")
            found = json.loads(bytes(data))
        if found.get("format") != _FORMAT:
            raise ValueError("the manifest is none of a bundle of kvpool")
        return dict(found)

    @staticmethod
    def key(ref: RemoteBundleRef | Mapping[str, Any]) -> str:
        """The key of a reference's manifest."""
        return ref.manifest_key if isinstance(ref, RemoteBundleRef) else str(ref["manifest_key"])

    def remove(self, ref: RemoteBundleRef | Mapping[str, Any]) -> None:
        """Removes a bundle; the manifest goes last. Raises RuntimeError if an object cannot be removed."""
        try:
            manifest = self.manifest(ref)
        except KeyError:
            return
        keys = [key for said in manifest["members"].values() for key in said["chunks"]]
        self.remove_keys([*keys, *manifest.get("others", []), self.key(ref)])

    def remove_keys(self, keys: Sequence[str]) -> None:
        """Removes objects; absent ones do not matter. Raises RuntimeError for any other failure."""
        for key, code in self._remove(keys):
            if code not in (0, MISSING_OBJECT_ERROR):
                raise RuntimeError(f"the object {key} is not removed: {code}")

    def _remove(self, keys: Sequence[str]) -> list[tuple[str, int]]:
        batch = getattr(self.store, "batch_remove", None)
        if batch is not None and keys:
            return list(zip(keys, batch(list(keys), True)))
        return [(key, self.store.remove(key, True)) for key in keys]

    def read(self, spec: StructuredObjectReadSpec, to: Mapping[str, Any]) -> StructuredObjectResult:
        """Reads members, into destinations where there are some. Raises KeyError for an unknown member."""
        manifest = self.manifest(spec.ref)
        names = list(manifest["members"]) if spec.member_names is None else spec.member_names
        unknown = [name for name in names if name not in manifest["members"]]
        if unknown:
            raise KeyError(f"the bundle has no members {', '.join(unknown)}")
        found = {
            name: self._member(manifest["members"][name], spec.member_slice(name), to.get(name)) for name in names
        }
        return StructuredObjectResult(dict(manifest["metadata"]), found)

    def read_rows(self, ref: RemoteBundleRef | Mapping[str, Any], name: str, rows: Sequence[int]) -> Any:
        """Some rows of a member, in their order."""
        said = self.manifest(ref)["members"][name]
        return members.decode_rows(said, said["size"], self._reader(said), rows)

    def _member(self, said: dict[str, Any], part: StructuredMemberSlice | None, to: Any) -> Any:
        return members.decode(said, said["size"], self._reader(said), part, to)

    def _reader(self, said: dict[str, Any]) -> members.Read:
        def read(offset: int, length: int, buffer: Any) -> None:
            place = np.frombuffer(buffer, dtype=np.uint8)
            fragments, at = [], 0
            for key, size in zip(said["chunks"], said["chunk_sizes"]):
                begin, end = max(offset, at), min(offset + length, at + size)
                if begin < end:
                    fragments.append((key, begin - offset, begin - at, end - begin))
                at += size
            self._read_fragments(place, fragments)

        return read

    def _read_fragments(self, place: Any, fragments: Sequence[tuple[str, int, int, int]]) -> None:
        """Reads fragments of objects: key, place in the buffer, offset in the object, and length."""
        ranges = getattr(self.store, "get_into_ranges", None)
        if ranges is None:
            for key, to, begin, length in fragments:
                data = memoryview(self.store.get(key))[begin : begin + length]
                if len(data) != length:
                    raise KeyError(f"the object {key} is not in the store, or cut off")
                place[to : to + length] = np.frombuffer(data, dtype=np.uint8)
            return
        keys, *lists = ([*column] for column in zip(*fragments)) if fragments else ([], [], [], [])
        wrapped = [[[number] for number in column] for column in lists]
        answers = ranges([place.ctypes.data], [keys], [wrapped[0]], [wrapped[1]], [wrapped[2]])[0]
        for (key, _, _, length), codes in zip(fragments, answers):
            if codes != [length]:
                raise KeyError(f"the object {key} cannot be read: {codes}")

    def _put_chunks(
        self, key: str, data: Any, step: int, config: Any, done: list[str]
    ) -> tuple[list[str], list[int]]:
        flat = np.frombuffer(data, dtype=np.uint8) if len(data) else np.empty(0, np.uint8)
        starts = range(0, len(flat), step)
        keys = [f"{key}/{at}" for at in range(len(starts))]
        sizes = [min(step, len(flat) - start) for start in starts]
        done.extend(keys)
        batch = getattr(self.store, "batch_put_from", None)
        if batch is not None and keys:
            places = [flat.ctypes.data + start for start in starts]
            codes = batch(keys, places, sizes) if config is None else batch(keys, places, sizes, config)
        else:
            parts = [flat[start : start + size].data for start, size in zip(starts, sizes)]
            codes = [self._put(one, part, config) for one, part in zip(keys, parts)]
        for one, code in zip(keys, codes):
            self._check(code, "put", one)
        return keys, sizes

    def _put(self, key: str, data: Any, config: Any) -> int:
        return int(self.store.put(key, data) if config is None else self.store.put(key, data, config))

    @staticmethod
    def _check(code: int, what: str, key: str) -> None:
        if code != 0:
            raise RuntimeError(f"{what} of {key} failed: {code}")


def check_chunk(size: int) -> int:
    """A size of chunks. Raises ValueError for an invalid one."""
    if not isinstance(size, int) or size <= 0:
        raise ValueError(f"chunks of {size} bytes cannot be")
    return size
