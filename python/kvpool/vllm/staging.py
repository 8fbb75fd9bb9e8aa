"""Copies of blocks in host memory, for memory that the pool cannot reach.

Blocks of a device are gathered on the device, copied into pinned host memory, and put from there. A get goes
the other way. The same code copies blocks in host memory, if the engine is about to reuse them before they are
saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch  # type: ignore[import-not-found]

from kvpool.vllm.rows import RowPool, Rows
from kvpool.vllm.segments import BlockMap


@dataclasses.dataclass(frozen=True)
class Copies:
    """Host memory with copies of blocks, one row each. It is reusable when this object is garbage."""

    tensor: Any
    rows: Rows | None
    """The rows of the staging memory; `None` for memory allocated for this copy alone."""

    @property
    def address(self) -> int:
        """The address of the first row."""
        return int(self.tensor.data_ptr())


class Staging:
    """Copies the blocks of one group of layers to and from host memory.

    `storages` has, for each of the group's segments, the address and the flat byte view of its memory. At most
    `budget` bytes of host memory are allocated once. Register `memory` with the pool, so that no call must
    register it. Copies beyond the budget use memory of their own.
    """

    def __init__(self, blocks: BlockMap, storages: Sequence[tuple[int, Any]], budget: int):
        self._views: list[Any] = []
        for segment, (base, flat) in zip(blocks.segments, storages, strict=True):
            offset = segment.start - base
            rows = (flat.numel() - offset - segment.length) // segment.stride + 1
            self._views.append(
                torch.as_strided(flat, (rows, segment.length), (segment.stride, 1), offset)
            )
        self._block_bytes = blocks.block_bytes
        self._device = self._views[0].device
        self._pinned = self._device.type == "cuda"
        # The copies run on a stream of their own, so that they do not wait in the engine's queue.
        self._stream: Any = torch.cuda.Stream(self._device) if self._pinned else None
        rows = budget // self._block_bytes
        self._own = self._made(rows)
        self._free = RowPool(rows)

    @property
    def memory(self) -> tuple[int, int]:
        """The staging memory, as (address, length)."""
        return int(self._own.data_ptr()), int(self._own.numel())

    def mark(self) -> Any:
        """Returns a mark in the engine's queue of work. After the mark, the results of earlier work can be
        read."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def room(self, blocks: int) -> Copies:
        """Returns host memory for `blocks` blocks."""
        rows = self._free.take(blocks)
        if rows is None:
            return Copies(self._made(blocks), None)
        return Copies(self._own[rows.start : rows.start + blocks], rows)

    def _made(self, blocks: int) -> Any:
        return torch.empty((blocks, self._block_bytes), dtype=torch.uint8, pin_memory=self._pinned)

    def gather(self, numbers: Sequence[int], after: Any) -> Copies:
        """Copies blocks into host memory, with their content at the mark `after`."""
        copies = self.room(len(numbers))
        rows = copies.tensor
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            at = 0
            index = torch.tensor(numbers, device=self._device)
            for view in self._views:
                length = view.shape[1]
                rows[:, at : at + length].copy_(view.index_select(0, index), non_blocking=True)
                at += length
        self._wait()
        return copies

    def scatter(self, numbers: Sequence[int], copies: Copies, after: Any) -> None:
        """Copies host memory into the blocks, after the mark `after`."""
        rows = copies.tensor
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            at = 0
            index = torch.tensor(numbers, device=self._device)
            for view in self._views:
                length = view.shape[1]
                part = rows[:, at : at + length].to(self._device, non_blocking=True)
                view.index_copy_(0, index, part)
                at += length
        self._wait()

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
