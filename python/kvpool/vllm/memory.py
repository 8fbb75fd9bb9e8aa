"""The layout of the engine's KV cache: for each group of layers, where the bytes of its blocks are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch  # type: ignore[import-not-found]

from kvpool import handoff
from kvpool.vllm.segments import BlockMap, Segment, joined, runs
from kvpool.vllm.staging import Staging
from kvpool.vllm.worker import GroupMemory


def group_memory(
    caches: Sequence[Any], blocks: int, *, kept: bool, stage: bool, staging_bytes: int
) -> GroupMemory:
    """The memory of a group whose layers have these caches, each of `blocks` blocks.

    A cache is a tensor whose first axis is blocks, or equal parts of blocks. `kept` is as in
    `GroupMemory`. `stage` copies through host memory also where the pool reaches the cache directly.
    `staging_bytes` limits the host memory for these copies. Raises ValueError for a cache of any other
    shape.
    """
    segments: list[Segment] = []
    storages: dict[int, tuple[int, Any]] = {}
    seen: set[int] = set()
    for cache in caches:
        if not isinstance(cache, torch.Tensor) or cache.shape[0] % blocks:
            raise ValueError(f"a KV cache is no tensor of {blocks} blocks")
        if cache.device.type not in ("cpu", "cuda"):
            raise ValueError(f"KV cache on {cache.device} cannot be moved: CPU and CUDA memory can")
        if cache.data_ptr() in seen:
            # Layers that share one cache are moved once.
            continue
        seen.add(cache.data_ptr())
        for segment in block_segments(cache, blocks):
            segments.append(segment)
            storages[segment.start] = storage_bytes(cache)
    # Pieces of different allocations are never joined, even if the allocations are adjacent.
    parts = itertools.groupby(segments, key=lambda segment: storages[segment.start][0])
    whole = BlockMap(tuple(one for _, part in parts for one in joined(part)))
    direct = cache_is_host(caches) and not stage
    staging = None
    if not direct or not kept:
        staging = Staging(whole, [storages[segment.start] for segment in whole.segments], staging_bytes)
    return GroupMemory(whole, staging, direct, kept)


def block_segments(cache: Any, blocks: int) -> list[Segment]:
    """The segments that hold the bytes of each block of `cache`."""
    parts = cache.shape[0] // blocks
    item = cache.element_size()
    stride = cache.stride(0) * parts * item
    inner = runs([parts, *cache.shape[1:]], cache.stride(), item)
    return [Segment(cache.data_ptr() + offset, stride, length) for offset, length in inner]


def storage_bytes(cache: Any) -> tuple[int, Any]:
    """The whole memory behind the tensor: its address, and its bytes as a flat tensor."""
    storage = cache.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
    return storage.data_ptr(), flat


def cache_is_host(caches: Sequence[Any]) -> bool:
    """Whether the whole cache is host memory."""
    return all(cache.device.type == "cpu" for cache in caches)


def handoff_states(
    caches: Mapping[int, Any], blocks: int, name: str, heads: int, ranks: int, *, one_source: bool
) -> list[handoff.State]:
    """The caches of the layers, by the layer's number, as a hand-off describes them.

    A cache is a tensor [block, head, token, element] of any order within a block. `heads` are those of all
    `ranks` tensor parallel ranks. `one_source`: all ranks hold the same bytes (MLA). `name` differs for
    caches whose bytes another engine cannot use. Raises ValueError for a cache of another shape.
    """
    states = []
    for layer, cache in caches.items():
        if not isinstance(cache, torch.Tensor) or cache.shape[0] != blocks or cache.device.type != "cpu":
            raise ValueError(f"handoff: the KV cache of layer {layer} is no tensor of {blocks} blocks in host memory")
        item = cache.element_size()
        block_bytes = cache[0].numel() * item
        if cache.stride(0) * item != block_bytes:
            raise ValueError(f"handoff: the blocks of layer {layer} are not adjacent in memory")
        parts, part_bytes, outer = 1, block_bytes, 1
        rule = "one_source" if one_source else "slice"
        if not one_source:
            # With more ranks than heads each rank has one head.
            local = max(heads // ranks, 1)
            if cache.dim() != 4 or cache.shape[1] != local:
                shape = tuple(cache.shape)
                raise ValueError(f"handoff: the KV cache of layer {layer} has the shape {shape}, not {local} heads")
            parts, tokens = heads, cache.shape[2]
            is_token_major = cache.stride(2) > cache.stride(1) and local > 1
            outer = tokens if is_token_major else 1
            part_bytes = block_bytes // local // outer
        states.append(
            handoff.State(
                name=name,
                layer=layer,
                base=cache.data_ptr(),
                pages=blocks,
                parts=parts,
                part_bytes=part_bytes,
                outer=outer,
                rule=rule,
            )
        )
    return states


def host_regions(caches: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The host memory behind the caches, each piece once, as (address, length)."""
    storages = [cache.untyped_storage() for cache in caches.values() if cache.device.type == "cpu"]
    return list({storage.data_ptr(): (storage.data_ptr(), storage.nbytes()) for storage in storages}.values())
