"""Putting, getting and removing whole objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpool._native import BufferHandle
from mooncake import _codes
from mooncake._base import BAD_CONFIG, StoreBase
from mooncake._types import ReplicateConfig

if TYPE_CHECKING:
    from typing_extensions import Buffer


class ObjectMethods(StoreBase):
    """The methods of a store for whole objects."""

    def put(self, key: str, value: Buffer, config: ReplicateConfig | None = None) -> int:
        """Puts bytes. Returns 0 or a code. A key that is present keeps its bytes, and the result is 0.

        -200: no room came free within the put's timeout.
        """
        return self._one(self._put_values("put", [key], [(value,)], config, False))

    def put_parts(self, key: str, *parts: Buffer, config: ReplicateConfig | None = None) -> int:
        """Puts several pieces of bytes, in order, as one object."""
        return self._one(self._put_values("put_parts", [key], [parts], config, False))

    def put_batch(
        self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig | None = None
    ) -> int:
        """Puts several objects. Returns 0, or the first code that is not 0."""
        parts = [(value,) for value in values]
        return self._first(self._put_values("put_batch", keys, parts, config, False))

    def upsert(self, key: str, value: Buffer, config: ReplicateConfig | None = None) -> int:
        """Puts bytes that replace the key's object, completely or not at all."""
        return self._one(self._put_values("upsert", [key], [(value,)], config, True))

    def upsert_parts(self, key: str, *parts: Buffer, config: ReplicateConfig | None = None) -> int:
        """`put_parts` that replaces the key's object."""
        return self._one(self._put_values("upsert_parts", [key], [parts], config, True))

    def upsert_batch(
        self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig | None = None
    ) -> int:
        """`put_batch` that replaces the keys' objects."""
        parts = [(value,) for value in values]
        return self._first(self._put_values("upsert_batch", keys, parts, config, True))

    def _put_values(
        self,
        what: str,
        keys: Sequence[str],
        values: Sequence[Sequence[Buffer]],
        config: ReplicateConfig | None,
        upsert: bool,
    ) -> list[int]:
        how = self._how(config)
        if how is None:
            return self._refused(what, keys, BAD_CONFIG)
        return self._all_said(what, self._native.put_values(keys, values, how, upsert))

    @staticmethod
    def _first(codes: list[int]) -> int:
        return next((code for code in codes if code != _codes.OK), _codes.OK)

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Puts memory by its address."""
        return self._one(self.batch_put_from([key], [buffer_ptr], [size], config))

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """`put_from` that replaces the key's object."""
        return self._one(self.batch_upsert_from([key], [buffer_ptr], [size], config))

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Puts one range of memory for each key. Returns one code for each key."""
        how = self._how(config)
        if how is None:
            return self._refused("batch_put_from", keys, BAD_CONFIG)
        return self._all_said("batch_put_from", self._native.put_from(keys, buffer_ptrs, sizes, how, False))

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """`batch_put_from` that replaces the keys' objects."""
        how = self._how(config)
        if how is None:
            return self._refused("batch_upsert_from", keys, BAD_CONFIG)
        return self._all_said("batch_upsert_from", self._native.put_from(keys, buffer_ptrs, sizes, how, True))

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Puts several ranges of memory for each key, in order. Returns one code for each key."""
        how = self._how(config)
        if how is None:
            return self._refused("batch_put_from_multi_buffers", keys, BAD_CONFIG)
        answers = self._native.put_from_many(keys, all_buffer_ptrs, all_sizes, how, False)
        return self._all_said("batch_put_from_multi_buffers", answers)

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig | None = None,
    ) -> int:
        """Puts metadata and then data, each by its address, as one object."""
        pointers, sizes = [[metadata_buffer_ptr, buffer_ptr]], [[metadata_size, size]]
        return self._one(self.batch_put_from_multi_buffers([key], pointers, sizes, config))

    def get(self, key: str) -> bytes:
        """Returns the bytes of a key; empty for a miss or an error."""
        return self._got("get", self._native.get_values([key]))[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the bytes of each key; empty for a miss or an error."""
        return self._got("get_batch", self._native.get_values(keys))

    def get_buffer(self, key: str) -> BufferHandle | None:
        """Returns the bytes of a key, read-only: in place if a node on this host has them, else a copy.

        An object in place stays in the node's memory while the handle, or a memoryview of it, lives. `None` for
        a miss or an error.
        """
        handle, code = self._native.get_handle(key)
        self._said("get_buffer", code)
        return handle

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """Returns copies of the bytes of each key; `None` for a miss or an error."""
        return self._got("batch_get_buffer", self._native.get_handles(keys))

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Reads an object into memory. Returns its length, or a code; -600 if the memory is too small."""
        return self._one(self.batch_get_into([key], [buffer_ptr], [size]))

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """`get_into` for several keys. Returns lengths or codes."""
        return self._all_said("batch_get_into", self._native.get_into(keys, buffer_ptrs, sizes))

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Reads each object into several ranges of memory, in order. Returns lengths or codes."""
        answers = self._native.get_into_many(keys, all_buffer_ptrs, all_sizes)
        return self._all_said("batch_get_into_multi_buffers", answers)

    def get_size(self, key: str) -> int:
        """Returns the length of an object in bytes, or a code; -704 when it is absent."""
        return self._said("get_size", self._native.size(key))

    def is_exist(self, key: str) -> int:
        """Returns 1 if the key is present, 0 if it is absent, or a code. A present key is leased."""
        return self._one(self.batch_is_exist([key]))

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """`is_exist` for several keys, in one round trip."""
        return self._all_said("batch_is_exist", self._native.exist(keys))

    def remove(self, key: str, force: bool = False) -> int:
        """Removes an object. Returns 0; -704 if it is absent; -706 if it is leased or pinned, unless forced."""
        return self._one(self.batch_remove([key], force))

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """`remove` for several keys."""
        return self._all_said("batch_remove", self._native.remove(keys, force))

    def remove_by_regex(self, pattern: str, force: bool = False) -> int:
        """Removes this tenant's objects whose keys match a pattern. Returns their number, or a code."""
        try:
            code = self._native.remove_pattern(pattern, force)
        except UnicodeEncodeError:
            # No key and no pattern can contain this text.
            code = _codes.PARAMETERS
        return self._said("remove_by_regex", code)

    def remove_all(self, force: bool = False) -> int:
        """Removes this tenant's objects. Keeps leased and pinned ones unless `force`. Returns their number, or
        a code."""
        return self._said("remove_all", self._native.remove_namespace(force))
