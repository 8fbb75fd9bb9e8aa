"""Getting tensors that are split over ranks, in the writer's split or in any other.

A read of parts fetches only the bytes that it needs, directly to their places, and the headers of their shards.
A header that does not fit the manifest makes the read a miss, because another writer has replaced that shard.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Iterator, Sequence

from mooncake._base import LENGTHS_DIFFER, log
from mooncake._parallel_types import (
    BadSplit,
    Manifest,
    ParallelAxis,
    ReadTarget,
    axes_key,
    manifest_key,
    read_axes,
    tp_axis,
    writer_key,
    writer_manifest_key,
)
from mooncake._tensor_format import Tensor, dtype_of, encode_header, torch_module
from mooncake._tensors import TensorMethods
from mooncake._types import same_length

# With more rows than this, the gaps between the rows of a part are read too. One read of more bytes is faster
# than many small reads.
_FEW_ROWS = 16


@dataclasses.dataclass(frozen=True)
class _Part:
    """A range of a split tensor along its split dimension, and the keys of all shards."""

    manifest: Manifest
    keys: Sequence[str]
    start: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.manifest.shape_of(self.start, self.end)

    @property
    def header(self) -> bytes:
        return encode_header(self.manifest.dtype, self.shape)


@dataclasses.dataclass
class _Fragments:
    """The fragments of one call to the native store."""

    keys: list[str] = dataclasses.field(default_factory=list)
    places: list[int] = dataclasses.field(default_factory=list)
    lengths: list[int] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)

    def add(self, key: str, place: int, length: int, offset: int) -> None:
        self.keys.append(key)
        self.places.append(place)
        self.lengths.append(length)
        self.offsets.append(offset)


class ParallelReadMethods(TensorMethods):
    """The methods of a store that get split tensors."""

    def _source(self, key: str, target: ReadTarget | None) -> str | _Part | None:
        """Returns the object or the part that a target means; `None` without a manifest for it. Raises
        BadSplit."""
        mode = "as_stored" if target is None else target.mode
        parallelism = None if target is None else target.parallelism
        if parallelism is None:
            if mode == "shard":
                raise BadSplit("a shard is read with a parallelism")
            return key if mode == "as_stored" else self._by_writers(key, None) or key
        axes = read_axes(parallelism)
        tp = tp_axis(axes)
        if mode == "as_stored" or (mode == "shard" and tp is None):
            return axes_key(key, axes)
        if tp is None:
            raise BadSplit("a full tensor is read with a tp axis")
        wanted = tp if mode == "shard" else None
        return self._by_axes(key, axes, tp, wanted) or self._by_writers(key, wanted)

    def _by_axes(
        self, key: str, axes: list[ParallelAxis], tp: ParallelAxis, wanted: ParallelAxis | None
    ) -> _Part | None:
        manifest = self._manifest(manifest_key(key))
        if manifest is None:
            return None
        if tp.split_dim != manifest.split_dim:
            raise BadSplit(f"the tensor is split along dimension {manifest.split_dim}, not {tp.split_dim}")
        keys = [axes_key(key, axes, rank, manifest.size) for rank in range(manifest.size)]
        return _part(manifest, keys, wanted)

    def _manifest(self, key: str) -> Manifest | None:
        return Manifest.decode(self._got("get of a manifest", self._native.get_values([key]))[0])

    def _by_writers(self, key: str, wanted: ParallelAxis | None) -> _Part | None:
        manifest = self._manifest(writer_manifest_key(key))
        if manifest is None or (wanted is not None and wanted.split_dim != manifest.split_dim):
            return None
        size, dim = manifest.size, manifest.split_dim
        return _part(manifest, [writer_key(key, rank, size, dim) for rank in range(size)], wanted)

    def _read_part(self, key: str, part: _Part, place: int) -> bool:
        """Reads a part, without a header, to an address. Returns whether all its bytes were read."""
        headers: list[tuple[bytes, ctypes.Array[ctypes.c_char]]] = []
        asked = _Fragments()
        gaps: list[ctypes.Array[ctypes.c_char]] = []
        for rank, shard in enumerate(part.keys):
            first, last = part.manifest.span(rank)
            if max(first, part.start) >= min(last, part.end):
                continue
            header = encode_header(part.manifest.dtype, part.manifest.shape_of(first, last))
            found = ctypes.create_string_buffer(len(header))
            headers.append((header, found))
            asked.add(shard, ctypes.addressof(found), len(header), 0)
            # Every gap needs memory of its own, because the checksum of a read covers the memory of all its
            # fragments.
            gaps.append(ctypes.create_string_buffer(max(_gaps(part, first, last), 1)))
            spare = ctypes.addressof(gaps[-1])
            for at, length, offset in _rows(part, first, last):
                asked.add(shard, spare if at < 0 else place + at, length, len(header) + offset)
                spare += length if at < 0 else 0
        answers = self._native.get_ranges(asked.keys, asked.places, asked.lengths, asked.offsets)
        if any(code < 0 for code in self._all_said("get of a split tensor", answers)):
            log.debug("%s: a part of a split tensor is not there: %s", key, min(answers))
            return False
        if any(found.raw != header for header, found in headers):
            why = "a shard is not as the manifest says: another writer has replaced it"
            self._refuse_key("get of a split tensor", key, why)
            return False
        return True

    def _get_split(self, key: str, target: ReadTarget | None) -> Tensor | None:
        try:
            source = self._source(key, target)
            if not isinstance(source, _Part):
                return None if source is None else self._get_tensors([source])[0]
            tensor = torch_module().empty(source.shape, dtype=dtype_of(source.manifest.dtype))
        except (BadSplit, ValueError) as error:
            self._refuse_key("get of a split tensor", key, error)
            return None
        return tensor if self._read_part(key, source, tensor.data_ptr()) else None

    def _get_split_into(self, key: str, ptr: int, size: int, target: ReadTarget | None) -> Tensor | None:
        try:
            source = self._source(key, target)
            if not isinstance(source, _Part):
                return None if source is None else self._get_tensors_into([source], [ptr], [size])[0]
            length = math.prod(source.shape) * dtype_of(source.manifest.dtype).itemsize
            header = source.header
            if ptr <= 0 or len(header) + length > size:
                raise BadSplit(f"the tensor takes {len(header) + length} bytes, and the memory has {size}")
        except (BadSplit, ValueError) as error:
            self._refuse_key("get of a split tensor", key, error)
            return None
        # Python writes the header, so the memory was checked before: a fault would end the process.
        if self._sizes_on_host([key], [ptr], [size], write=True)[0] < 0:
            return None
        if not self._read_part(key, source, ptr + len(header)):
            return None
        ctypes.memmove(ptr, header, len(header))
        return self._decoded(key, memoryview((ctypes.c_ubyte * size).from_address(ptr)).cast("B"))

    def get_tensor_with_parallelism(self, key: str, target: ReadTarget | None = None) -> Tensor | None:
        """Returns the tensor, or the shard, that `target` means; `None` for a miss or an error.

        The shard may be of another split than the writers' split, for example of TP 2 where they wrote TP 4.
        "full" joins the shards.
        """
        return self._get_split(key, target)

    def batch_get_tensor_with_parallelism(
        self, keys: Sequence[str], targets: Sequence[ReadTarget | None] | None = None
    ) -> list[Tensor | None]:
        """`get_tensor_with_parallelism` for several keys."""
        if targets is None:
            return self._get_tensors(keys)
        if not same_length(keys, targets):
            self._refused("batch_get_tensor_with_parallelism", keys, LENGTHS_DIFFER)
            return [None] * len(keys)
        return [self._get_split(key, target) for key, target in zip(keys, targets)]

    def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: ReadTarget | None = None
    ) -> Tensor | None:
        """`get_tensor_with_parallelism` into memory, with a header as `get_tensor_into` writes it."""
        return self._get_split_into(key, buffer_ptr, size, target)

    def batch_get_tensor_with_parallelism_into(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        targets: Sequence[ReadTarget | None] | None = None,
    ) -> list[Tensor | None]:
        """`get_tensor_with_parallelism_into` for several keys."""
        each = [None] * len(keys) if targets is None else targets
        if not same_length(keys, buffer_ptrs, sizes, each):
            self._refused("batch_get_tensor_with_parallelism_into", keys, LENGTHS_DIFFER)
            return [None] * len(keys)
        return [self._get_split_into(*request) for request in zip(keys, buffer_ptrs, sizes, each)]


def _part(manifest: Manifest, keys: Sequence[str], wanted: ParallelAxis | None) -> _Part:
    length = manifest.shape[manifest.split_dim]
    # torch's `chunk` and `tensor_split` cut uneven shards differently. So a caller never gets uneven shards by
    # surprise.
    if wanted is not None and wanted.size != manifest.size and length % wanted.size:
        raise BadSplit(f"{wanted.size} shards of one length do not fit {length}")
    start, end = (0, length) if wanted is None else manifest.span(wanted.rank, wanted.size)
    return _Part(manifest, keys, start, end)


def _unit(part: _Part) -> int:
    """Returns the length of one step along the split dimension, in bytes."""
    inner = math.prod(part.manifest.shape[part.manifest.split_dim + 1 :])
    return inner * int(dtype_of(part.manifest.dtype).itemsize)


def _outer(part: _Part) -> int:
    return math.prod(part.manifest.shape[: part.manifest.split_dim])


def _gaps(part: _Part, first: int, last: int) -> int:
    """Returns the bytes of a shard that a read discards."""
    if _outer(part) <= _FEW_ROWS:
        return 0
    wanted = min(last, part.end) - max(first, part.start)
    return _outer(part) * (last - first - wanted) * _unit(part)


def _rows(part: _Part, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yields the fragments of one shard's data: place in the part (-1: discarded), length, and offset in the
    shard."""
    unit, outer = _unit(part), _outer(part)
    begin, end = max(first, part.start), min(last, part.end)
    row, width = (last - first) * unit, (part.end - part.start) * unit
    before, after = (begin - first) * unit, (last - end) * unit
    for index in range(outer):
        offset = index * row
        if outer > _FEW_ROWS and before:
            yield -1, before, offset
        yield index * width + (begin - part.start) * unit, (end - begin) * unit, offset + before
        if outer > _FEW_ROWS and after:
            yield -1, after, offset + row - after
