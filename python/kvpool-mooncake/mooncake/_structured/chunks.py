"""Bundles in a store: a manifest, metadata and named buffers. Each buffer is cut into objects of bounded size.

    PREFIX/PARTITION/ID/manifest           JSON: the keys and lengths of all others
    PREFIX/PARTITION/ID/meta               bytes of the caller
    PREFIX/PARTITION/ID/buffer/NAME        bytes of the caller; or NAME/chunk/0, NAME/chunk/1, ...

The manifest is put last, so every bundle with a manifest is complete.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mooncake._structured.types import (
    AUTO_PARALLEL_MIN_BYTES,
    AUTO_PARALLEL_MIN_CHUNKS,
    MISSING_OBJECT_ERROR,
    BundleStore,
    BundleTransferPolicy,
    RemoteBundleRef,
)

# The manifest's entry of one buffer: `key`, `bytes`, and `chunks`, each with `key` and `bytes`.
Entry = Mapping[str, Any]


@dataclasses.dataclass
class Fill:
    """A read of a buffer's bytes from `start` on, into all of `room`."""

    entry: Entry
    start: int
    room: memoryview


class Bundles:
    """The bundles of one prefix in a store."""

    def __init__(self, store: BundleStore, prefix: str, chunk_bytes: int) -> None:
        if not isinstance(prefix, str) or not prefix.strip("/"):
            raise ValueError("key_prefix must be a text of at least one letter")
        self._store = store
        self._prefix = prefix.rstrip("/")
        self._chunk_bytes = _positive(chunk_bytes)

    def write(
        self,
        meta: memoryview,
        buffers: Mapping[str, memoryview],
        partition: str,
        chunk_bytes: int | None,
        policy: BundleTransferPolicy,
        config: Any,
    ) -> RemoteBundleRef:
        """Puts a bundle. If one of its objects is not put, the others are removed. Raises RuntimeError then."""
        longest = self._chunk_bytes if chunk_bytes is None else _positive(chunk_bytes)
        policy = policy.checked()
        if not isinstance(partition, str) or not partition or "/" in partition:
            raise ValueError(f"the partition {partition!r} is no text without '/'")
        name = f"{partition}/{uuid.uuid4().hex}"
        base = f"{self._prefix}/{name}"
        chunks: list[tuple[str, memoryview]] = []
        entries = {}
        for member, data in buffers.items():
            if not isinstance(member, str) or not member or "/" in member:
                raise ValueError(f"the buffer name {member!r} is no text without '/'")
            entries[member] = _cut(f"{base}/buffer/{member}", data, longest, chunks)
        said = {"version": 1, "layout": "bundle", "object_id": name}
        said |= {"meta": _cut(f"{base}/meta", meta, longest, chunks), "buffers": entries}
        text = json.dumps(said, separators=(",", ":")).encode()
        put = self._putter(config)
        try:
            self._put_all(put, chunks, policy)
            put(f"{base}/manifest", memoryview(text))
        except BaseException:
            self._remove_keys([key for key, _ in chunks] + [f"{base}/manifest"])
            raise
        return RemoteBundleRef(f"{base}/manifest", said)

    def _putter(self, config: Any) -> Callable[[str, memoryview], None]:
        how = {} if config is None else {"config": config}

        def put(key: str, data: memoryview) -> None:
            code = self._store.put(key, data, **how)
            if code != 0:
                raise RuntimeError(f"the object {key} is not put: {code}")

        return put

    @staticmethod
    def _put_all(
        put: Callable[[str, memoryview], None],
        chunks: Sequence[tuple[str, memoryview]],
        policy: BundleTransferPolicy,
    ) -> None:
        large = len(chunks) >= AUTO_PARALLEL_MIN_CHUNKS
        large = large and sum(data.nbytes for _, data in chunks) >= AUTO_PARALLEL_MIN_BYTES
        parallel = policy.put_mode == "parallel" or (policy.put_mode == "auto" and large)
        if not parallel or policy.max_inflight_put == 1:
            for key, data in chunks:
                put(key, data)
            return
        with ThreadPoolExecutor(policy.max_inflight_put, "bundle-put") as threads:
            started = [threads.submit(put, key, data) for key, data in chunks]
            # An error is raised only after every put has ended. A later put would outlive the removal.
            errors = [error for error in [each.exception() for each in started] if error is not None]
        if errors:
            raise errors[0]

    def manifest(self, ref: RemoteBundleRef) -> Mapping[str, Any]:
        """Returns the manifest of a bundle, from the store if the reference lacks it. Raises RuntimeError if it
        is absent."""
        if ref.manifest:
            return ref.manifest
        text = bytes(self._store.get(ref.manifest_key))
        if not text:
            raise RuntimeError(f"there is no bundle {ref.manifest_key}")
        said = json.loads(text)
        if not isinstance(said, dict) or said.get("layout") != "bundle" or said.get("version") != 1:
            raise ValueError(f"the object {ref.manifest_key} is no manifest of a bundle")
        return said

    def fill(self, wishes: Sequence[Fill]) -> None:
        """Reads bytes into memory. Raises RuntimeError, with the object's name, if one cannot be read."""
        read_ranges = getattr(self._store, "get_into_ranges", None)
        wishes = [wish for wish in wishes if wish.room.nbytes]
        if read_ranges is None:
            for wish in wishes:
                self._fill_from_whole_chunks(wish)
            return
        parts = [list(_parts(wish)) for wish in wishes]
        answers = read_ranges(
            [ctypes.addressof(ctypes.c_char.from_buffer(wish.room)) for wish in wishes],
            [[key for key, *_ in of_wish] for of_wish in parts],
            [[[at] for _, _, at, _ in of_wish] for of_wish in parts],
            [[[source] for _, source, _, _ in of_wish] for of_wish in parts],
            [[[length] for *_, length in of_wish] for of_wish in parts],
        )
        for of_wish, of_buffer in zip(parts, answers):
            for (key, _, _, length), (code, *_) in zip(of_wish, of_buffer):
                if code != length:
                    raise RuntimeError(f"the object {key} cannot be read: {code}")

    def _fill_from_whole_chunks(self, wish: Fill) -> None:
        lengths = {chunk["key"]: chunk["bytes"] for chunk in wish.entry["chunks"]}
        for key, source, at, length in _parts(wish):
            data = self._store.get(key)
            if len(data) != lengths[key]:
                raise RuntimeError(f"the object {key} has {len(data)} bytes instead of {lengths[key]}")
            wish.room[at : at + length] = data[source : source + length]

    def read(self, entry: Entry) -> bytearray:
        """Returns all bytes of a buffer."""
        data = bytearray(entry["bytes"])
        self.fill([Fill(entry, 0, memoryview(data))])
        return data

    def remove(self, ref: RemoteBundleRef) -> None:
        """Removes a bundle, even while it is read. If an object stays, so does the manifest, and RuntimeError
        is raised."""
        if not ref.manifest and self._store.is_exist(ref.manifest_key) == 0:
            return
        said = self.manifest(ref)
        entries = [said["meta"], *said["buffers"].values()]
        self._checked_removal([chunk["key"] for entry in entries for chunk in entry["chunks"]])
        self._checked_removal([ref.manifest_key])

    def _checked_removal(self, keys: Sequence[str]) -> None:
        codes = self._remove_keys(keys)
        stayed = [(key, code) for key, code in zip(keys, codes) if code not in (0, MISSING_OBJECT_ERROR)]
        if stayed:
            raise RuntimeError(f"{len(stayed)} objects are not removed, the first is {stayed[0]}")

    def _remove_keys(self, keys: Sequence[str]) -> Sequence[int]:
        remove_all = getattr(self._store, "batch_remove", None)
        if remove_all is not None:
            codes: Sequence[int] = remove_all(list(keys), True)
            return codes
        return [self._store.remove(key, True) for key in keys]


def _positive(chunk_bytes: int) -> int:
    if chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")
    return chunk_bytes


def _cut(key: str, data: memoryview, longest: int, chunks: list[tuple[str, memoryview]]) -> dict[str, Any]:
    """Returns the manifest's entry of a buffer. Appends its chunks to `chunks`."""
    starts = range(0, data.nbytes, longest)
    keys = [key] if len(starts) == 1 else [f"{key}/chunk/{number}" for number in range(len(starts))]
    cut = [(name, data[start : start + longest]) for name, start in zip(keys, starts)]
    chunks.extend(cut)
    return {
        "key": key,
        "bytes": data.nbytes,
        "chunks": [{"key": name, "bytes": part.nbytes} for name, part in cut],
    }


def _parts(wish: Fill) -> list[tuple[str, int, int, int]]:
    """Returns for each chunk of a read: its key, the offset in it, the offset in the room, and the length."""
    found = []
    begin, end = wish.start, wish.start + wish.room.nbytes
    if begin < 0 or end > wish.entry["bytes"]:
        raise ValueError(f"bytes {begin} to {end} are not in the {wish.entry['bytes']} bytes of {wish.entry['key']}")
    at = 0
    for chunk in wish.entry["chunks"]:
        first, last = max(begin, at), min(end, at + chunk["bytes"])
        if first < last:
            found.append((chunk["key"], first - at, first - begin, last - first))
        at += chunk["bytes"]
    return found
