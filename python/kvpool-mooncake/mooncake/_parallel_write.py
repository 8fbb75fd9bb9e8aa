"""Putting tensors that are split over ranks.

With one "tp" axis the caller gives the shard itself. With more axes, and with a writer's partition, the caller
gives the whole tensor, and the store cuts the shard. From memory, the caller gives the whole tensor, and the
store puts all "tp" shards. A manifest beside the shards describes the split, so readers may split the tensor in
other ways.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mooncake import _codes
from mooncake._base import LENGTHS_DIFFER
from mooncake._parallel_types import (
    BadSplit,
    Manifest,
    ParallelAxis,
    TensorParallelism,
    axes_key,
    manifest_key,
    read_axes,
    tp_axis,
    writer_key,
    writer_manifest_key,
)
from mooncake._tensor_format import Tensor, is_encoded, memory_at, torch_module
from mooncake._tensors import TensorMethods
from mooncake._types import ReplicateConfig


@dataclasses.dataclass
class _Pieces:
    """The objects of one request: tensors by key, and the manifest with its key."""

    shards: list[tuple[str, Tensor]]
    manifest: tuple[str, Manifest] | None = None


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dimension(tensor: Tensor, split_dim: int) -> int:
    if not 0 <= split_dim < tensor.dim():
        raise BadSplit(f"a tensor of {tensor.dim()} dimensions has no dimension {split_dim}")
    return int(tensor.shape[split_dim])


def _cut(tensor: Tensor, manifest: Manifest, rank: int) -> Tensor:
    start, end = manifest.span(rank)
    return tensor.narrow(manifest.split_dim, start, end - start)


def _whole(tensor: Tensor, split_dim: int, size: int) -> Manifest:
    """Returns the manifest for splitting a whole tensor."""
    length = _dimension(tensor, split_dim)
    if length % size:
        raise BadSplit(f"{size} shards of one length do not fit {length} along dimension {split_dim}")
    return Manifest(_dtype_name(tensor), tuple(tensor.shape), split_dim, size)


def _of_writer(key: str, tensor: Tensor, partition: object) -> _Pieces:
    try:
        rank, size, split_dim = (int(getattr(partition, name)) for name in ("rank", "size", "split_dim"))
    except (AttributeError, TypeError, ValueError) as error:
        raise BadSplit(f"a writer's partition has a rank, a size and a split_dim: {error}") from error
    if not 0 <= rank < size:
        raise BadSplit(f"a writer has no rank {rank} of {size}")
    manifest = _whole(tensor, split_dim, size)
    shard = (writer_key(key, rank, size, split_dim), _cut(tensor, manifest, rank))
    return _Pieces([shard], (writer_manifest_key(key), manifest))


def _of_axes(key: str, tensor: Tensor, axes: list[ParallelAxis], all_ranks: bool) -> _Pieces:
    tp = tp_axis(axes)
    if tp is None:
        return _Pieces([(axes_key(key, axes), tensor)])
    split_dim = tp.split_dim or 0
    if len(axes) == 1 and not all_ranks:
        length = _dimension(tensor, split_dim) * tp.size
        shape = (*tensor.shape[:split_dim], length, *tensor.shape[split_dim + 1 :])
        manifest = Manifest(_dtype_name(tensor), shape, split_dim, tp.size)
        return _Pieces([(axes_key(key, axes), tensor)], (manifest_key(key), manifest))
    manifest = _whole(tensor, split_dim, tp.size)
    ranks = range(tp.size) if all_ranks else [tp.rank]
    shards = [(axes_key(key, axes, rank), _cut(tensor, manifest, rank)) for rank in ranks]
    return _Pieces(shards, (manifest_key(key), manifest))


def _pieces(key: str, tensor: Tensor, parallelism: object, partition: object, all_ranks: bool) -> _Pieces:
    if not isinstance(tensor, torch_module().Tensor):
        raise TypeError(f"a tensor must be a torch.Tensor, not {type(tensor).__name__}")
    if partition is not None:
        if parallelism is not None:
            raise BadSplit("a parallelism and a writer's partition exclude each other")
        return _of_writer(key, tensor, partition)
    if parallelism is None:
        return _Pieces([(key, tensor)])
    return _of_axes(key, tensor, read_axes(parallelism), all_ranks)


class ParallelWriteMethods(TensorMethods):
    """The methods of a store that put split tensors."""

    def _put_split(
        self,
        keys: Sequence[str],
        tensors: Sequence[Tensor | None],
        parallelisms: object,
        partitions: object,
        config: ReplicateConfig | None,
        upsert: bool,
        all_ranks: bool = False,
    ) -> list[int]:
        """Puts shards and manifests. Returns for each key the first code that is not 0."""
        requests = [_listed(parallelisms, len(keys)), _listed(partitions, len(keys))]
        if len(tensors) != len(keys) or None in requests:
            return self._refused("put of split tensors", keys, LENGTHS_DIFFER)
        found: list[_Pieces | None] = []
        for key, tensor, parallelism, partition in zip(keys, tensors, *(request or () for request in requests)):
            try:
                pieces = None if tensor is None else _pieces(key, tensor, parallelism, partition, all_ranks)
            except BadSplit as error:
                self._refuse_key("put of split tensors", key, error)
                pieces = None
            found.append(pieces)
        shards = [shard for pieces in found if pieces for shard in pieces.shards]
        # A manifest is put after its shard, so that no reader finds a manifest alone.
        codes = iter(self._put_tensors([key for key, _ in shards], [tensor for _, tensor in shards], config, upsert))
        answers = [_first([next(codes) for _ in pieces.shards]) if pieces else _codes.PARAMETERS for pieces in found]
        return self._put_manifests(answers, [pieces.manifest if pieces else None for pieces in found], config, upsert)

    def _put_manifests(
        self,
        answers: list[int],
        manifests: Sequence[tuple[str, Manifest] | None],
        config: ReplicateConfig | None,
        upsert: bool,
    ) -> list[int]:
        """Puts the manifests of shards that were put. Returns the codes, with the codes of the manifests."""
        put = [at for at, manifest in enumerate(manifests) if manifest and answers[at] == _codes.OK]
        how = self._how(config)
        if not put or how is None:
            return answers
        said = [manifests[at] or ("", None) for at in put]
        values = [(manifest.encode(),) for _, manifest in said if manifest]
        codes = self._native.put_values([key for key, _ in said], values, how, upsert)
        for at, code in zip(put, self._all_said("put of manifests", codes)):
            answers[at] = code
        return answers

    def _tensors_at(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor | None]:
        """Returns the encoded tensors in memory; `None` for memory without a tensor."""
        return [
            self._decoded(key, memory_at(ptr, size)) if is_encoded(ptr, size) else None
            for key, ptr, size in zip(keys, buffer_ptrs, self._sizes_on_host(keys, buffer_ptrs, sizes))
        ]

    def put_tensor_with_parallelism(
        self,
        key: str,
        tensor: Tensor,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig | None = None,
        writer_partition: object = None,
    ) -> int:
        """Puts a tensor, or the shard of it that `parallelism` or `writer_partition` names. Returns 0 or a code.

        With one "tp" axis `tensor` is the shard itself. With more axes, or with a `writer_partition` (an object
        with `rank`, `size` and `split_dim`), it is the whole tensor.
        """
        return self._one(self._put_split([key], [tensor], [parallelism], [writer_partition], config, False))

    def batch_put_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        parallelisms: Sequence[TensorParallelism | None] | None = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Sequence[object] | None = None,
    ) -> list[int]:
        """`put_tensor_with_parallelism` for several keys. Returns one code for each key."""
        return self._put_split(keys, tensors_list, parallelisms, writer_partitions, config, False)

    def upsert_tensor_with_parallelism(
        self,
        key: str,
        tensor: Tensor,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig | None = None,
        writer_partition: object = None,
    ) -> int:
        """`put_tensor_with_parallelism` that replaces the shard and the manifest."""
        return self._one(self._put_split([key], [tensor], [parallelism], [writer_partition], config, True))

    def batch_upsert_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        parallelisms: Sequence[TensorParallelism | None] | None = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Sequence[object] | None = None,
    ) -> list[int]:
        """`upsert_tensor_with_parallelism` for several keys."""
        return self._put_split(keys, tensors_list, parallelisms, writer_partitions, config, True)

    def put_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig | None = None,
        writer_partition: object = None,
    ) -> int:
        """Puts a whole tensor from memory, with its header as `get_tensor_into` reads it.

        With a "tp" axis, all its shards are put, whatever the axis's rank.
        """
        tensors = self._tensors_at([key], [buffer_ptr], [size])
        return self._one(self._put_split([key], tensors, [parallelism], [writer_partition], config, False, True))

    def batch_put_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Sequence[TensorParallelism | None] | None = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Sequence[object] | None = None,
    ) -> list[int]:
        """`put_tensor_with_parallelism_from` for several keys."""
        tensors = self._tensors_at(keys, buffer_ptrs, sizes)
        return self._put_split(keys, tensors, parallelisms, writer_partitions, config, False, True)

    def upsert_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig | None = None,
        writer_partition: object = None,
    ) -> int:
        """`put_tensor_with_parallelism_from` that replaces the shards and the manifest."""
        tensors = self._tensors_at([key], [buffer_ptr], [size])
        return self._one(self._put_split([key], tensors, [parallelism], [writer_partition], config, True, True))

    def batch_upsert_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Sequence[TensorParallelism | None] | None = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Sequence[object] | None = None,
    ) -> list[int]:
        """`upsert_tensor_with_parallelism_from` for several keys."""
        tensors = self._tensors_at(keys, buffer_ptrs, sizes)
        return self._put_split(keys, tensors, parallelisms, writer_partitions, config, True, True)


def _listed(requests: object, count: int) -> list[object] | None:
    """Returns one request for each key; `None` if `requests` is neither absent nor a list of that length."""
    if requests is None:
        return [None] * count
    if not isinstance(requests, (list, tuple)) or len(requests) != count:
        return None
    return list(requests)


def _first(codes: Sequence[int]) -> int:
    return next((code for code in codes if code != _codes.OK), _codes.OK)
