"""The locations of an object's replicas."""

from __future__ import annotations

import dataclasses
import enum


class ReplicaStatus(enum.IntEnum):
    """The state of a replica."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


@dataclasses.dataclass
class Descriptor:
    """The location of a replica's bytes.

    `size` is in bytes. `transport_endpoint` is the node's name; for the segment of a store this is the
    segment's `host:port`. `buffer_address` is the offset in the segment. It is no address, because only the
    node could use one.
    """

    size: int = 0
    buffer_address: int = 0
    transport_endpoint: str = ""

    # Releases before 0.3.12 used these names.
    size_ = property(lambda self: self.size)
    buffer_address_ = property(lambda self: self.buffer_address)
    transport_endpoint_ = property(lambda self: self.transport_endpoint)


@dataclasses.dataclass(frozen=True)
class DiskDescriptor:
    """A file that all hosts share. kvpool has none."""

    file_path: str
    object_size: int


@dataclasses.dataclass(frozen=True)
class MemoryDescriptor:
    """A replica in memory."""

    buffer_descriptor: Descriptor

    @property
    def buffer_descriptors(self) -> list[Descriptor]:
        """The only descriptor, for older callers."""
        return [self.buffer_descriptor]


@dataclasses.dataclass(frozen=True)
class ReplicaDescriptor:
    """One replica of an object. kvpool keeps all replicas in the memory of store nodes."""

    node: str
    segment: int
    offset: int
    length: int
    state: str

    @property
    def status(self) -> ReplicaStatus:
        """`COMPLETE` for a readable replica."""
        is_readable = self.state in ("live", "draining", "drained")
        return ReplicaStatus.COMPLETE if is_readable else ReplicaStatus.UNDEFINED

    def is_memory_replica(self) -> bool:
        """Whether the replica is in memory."""
        return True

    def is_disk_replica(self) -> bool:
        """Whether the replica is in a file that all hosts share."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Whether the replica is on its node's disk."""
        return False

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """The location of the replica."""
        return MemoryDescriptor(Descriptor(self.length, self.offset, self.node))

    def get_disk_descriptor(self) -> DiskDescriptor:
        """Not supported: raises, because kvpool keeps no replica in a shared file."""
        raise RuntimeError("the replica is in memory, not on a disk")

    def get_local_disk_descriptor(self) -> DiskDescriptor:
        """Not supported: raises, because kvpool describes no replica on a disk."""
        raise RuntimeError("the replica is in memory, not on a disk")
