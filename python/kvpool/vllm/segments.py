"""The position of a block's bytes in the engine's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of bytes in each block. The run of block `n` begins at `start + n * stride`."""

    start: int
    stride: int
    length: int


def runs(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> list[tuple[int, int]]:
    """Returns the runs of contiguous bytes of an array, as (offset, length), in the order of their offsets.

    `strides` are in elements, as in torch. Adjacent runs are joined. Raises ValueError if elements overlap,
    because the result of a copy would then depend on its order.
    """
    pieces = [(0, item_bytes)]
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda axis: axis[1]):
        if size == 1:
            continue
        step = stride * item_bytes
        offset, length = pieces[-1]
        if step < offset + length:
            raise ValueError(f"elements of shape {tuple(shape)} and strides {tuple(strides)} overlap")
        if len(pieces) == 1 and step == length:
            pieces = [(0, length * size)]
        else:
            pieces = [(at * step + offset, length) for at in range(size) for offset, length in pieces]
    return merged(pieces)


def merged(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins adjacent pieces, given as (offset, length)."""
    whole: list[tuple[int, int]] = []
    for offset, length in pieces:
        if whole and sum(whole[-1]) == offset:
            whole[-1] = (whole[-1][0], whole[-1][1] + length)
        else:
            whole.append((offset, length))
    return whole


def joined(segments: Iterable[Segment]) -> list[Segment]:
    """Joins the segments of one group of layers that are adjacent in every block.

    The order stays. It is the order of the bytes in the pool, which must not depend on an engine's addresses.
    """
    whole: list[Segment] = []
    for segment in segments:
        last = whole[-1] if whole else None
        if last and last.stride == segment.stride and last.start + last.length == segment.start:
            whole[-1] = dataclasses.replace(last, length=last.length + segment.length)
        else:
            whole.append(segment)
    return whole


@dataclasses.dataclass(frozen=True)
class BlockMap:
    """The memory of one group of layers."""

    segments: tuple[Segment, ...]

    @property
    def block_bytes(self) -> int:
        """The length of a block in bytes."""
        return sum(segment.length for segment in self.segments)

    def pieces(self, number: int) -> list[tuple[int, int]]:
        """Returns the pieces of the block of that number, as (address, length)."""
        return [(part.start + number * part.stride, part.length) for part in self.segments]
