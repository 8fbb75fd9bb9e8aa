"""Memory that the ranks of one host share: one rank makes the memory, and all ranks map it."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Sequence


class SharedSegment:
    """A segment of host memory. Each rank calls `create`, gathers the blobs of all ranks, and calls `complete`."""

    def __init__(self) -> None:
        raise TypeError("a SharedSegment is made by SharedSegment.create")

    @staticmethod
    def supported(mmap: bool = True, host_register: bool = False) -> bool:
        """Whether memory of this kind can be shared: host memory without a GPU registration."""
        return mmap and not host_register

    @staticmethod
    def create(
        name: str,
        size: int,
        world_size: int,
        rank_id: int,
        owner_rank: int = 0,
        device_id: int = 0,
        mmap: bool = True,
        host_register: bool = False,
    ) -> tuple[SharedSegment, bytes]:
        """Begins a segment of `size` bytes. Returns the segment, not mapped yet, and this rank's blob for all
        ranks.

        Raises RuntimeError for GPU memory, and for an invalid size or rank. `device_id` has no effect.
        """
        if not SharedSegment.supported(mmap, host_register):
            raise RuntimeError(f"{name}: kvpool shares host memory only (mmap=True, host_register=False)")
        if size <= 0 or not 0 <= rank_id < world_size or not 0 <= owner_rank < world_size:
            raise RuntimeError(f"{name}: {size} bytes, rank {rank_id} of {world_size}, owner {owner_rank} cannot be")
        segment = object.__new__(SharedSegment)
        segment._name, segment._size = name, size
        segment._ranks, segment._owner = world_size, owner_rank
        segment._file = segment._memory = segment._first = None
        said: dict[str, object] = {"name": name, "size": size, "rank": rank_id}
        if rank_id == owner_rank:
            segment._file = os.memfd_create(name, os.MFD_CLOEXEC)
            os.ftruncate(segment._file, size)
            said["path"] = f"/proc/{os.getpid()}/fd/{segment._file}"
        return segment, json.dumps(said).encode()

    _name: str
    _size: int
    _ranks: int
    _owner: int
    _file: int | None
    _memory: mmap.mmap | None
    _first: ctypes.c_char | None

    def complete(self, blobs: Sequence[str | bytes]) -> None:
        """Maps the segment. `blobs`: the blobs of all ranks, in order. The owner must live until all ranks are
        complete.

        Raises RuntimeError for invalid blobs, or if the owner's memory cannot be opened.
        """
        try:
            said = [json.loads(blob) for blob in blobs]
            if len(said) != self._ranks or any((one["name"], one["size"]) != (self._name, self._size) for one in said):
                raise ValueError("the blobs are not those of this segment's ranks")
            path = said[self._owner]["path"]
            file = os.dup(self._file) if self._file is not None else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise RuntimeError(f"{self._name}: {error}") from error
        try:
            if os.fstat(file).st_size != self._size:
                raise RuntimeError(f"{self._name}: {path} has another size")
            self._memory = mmap.mmap(file, self._size)
            self._first = ctypes.c_char.from_buffer(self._memory)
        finally:
            os.close(file)

    def ready(self) -> bool:
        """Whether the segment is mapped."""
        return self._memory is not None

    def base_addr(self) -> int:
        """The address of the segment in this process; 0 before `complete`."""
        return ctypes.addressof(self._first) if self._first is not None else 0

    def device_addr(self) -> int:
        """0: no GPU has the memory."""
        return 0

    def size(self) -> int:
        """The length in bytes."""
        return self._size

    def __del__(self) -> None:
        file = getattr(self, "_file", None)
        if file is not None:
            os.close(file)
