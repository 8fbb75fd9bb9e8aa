"""The small types of the store's interface."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence

# How the native store is told how to put: replicas, preferred node, this host first, soft pin in
# milliseconds, hard pin.
How = tuple[int, str | None, bool, int | None, bool]

_SOFT_PIN_MS = 30 * 60 * 1000


class ObjectDataType(enum.IntEnum):
    """The kind of an object's bytes. kvpool treats all kinds alike."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8


@dataclasses.dataclass
class ReplicateConfig:
    """How an object is placed and protected.

    - `replica_num`: number of replicas, each on another node.
    - `preferred_segment`, or the first of `preferred_segments`: the node to try first, by its name or by
      a store's `get_hostname`.
    - `prefer_alloc_in_same_node`: prefer nodes of this host.
    - `with_hard_pin`: never evict the object.
    - `with_soft_pin`: evict it after others, for `soft_pin_ttl_ms` milliseconds (default: half an hour).

    The other fields have no effect in kvpool.
    """

    replica_num: int = 1
    nof_replica_num: int = 0
    dfs_replica_num: int = 0
    with_hard_pin: bool = False
    with_soft_pin: bool = False
    soft_pin_action: int = 0
    soft_pin_ttl_ms: int | None = None
    preferred_segments: list[str] = dataclasses.field(default_factory=list)
    preferred_segment: str = ""
    prefer_alloc_in_same_node: bool = False
    data_type: ObjectDataType = ObjectDataType.UNKNOWN
    group_ids: list[str] | None = None


class ReplicaStatus(enum.IntEnum):
    """The state of a replica."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class TaskStatus(enum.IntEnum):
    """The state of a `create_copy_task` task, which kvpool does not support."""

    PENDING = 0
    PROCESSING = 1
    SUCCESS = 2
    FAILED = 3


@dataclasses.dataclass(frozen=True)
class BufferDescriptor:
    """The location of a replica's bytes."""

    size_: int
    buffer_address_: int
    transport_endpoint_: str
    protocol_: str = "tcp"

    @property
    def size(self) -> int:
        """The length in bytes."""
        return self.size_

    @property
    def buffer_address(self) -> int:
        """The offset in the node's segment. (Not an address: only the node could use one.)"""
        return self.buffer_address_

    @property
    def transport_endpoint(self) -> str:
        """The node's name."""
        return self.transport_endpoint_


@dataclasses.dataclass(frozen=True)
class MemoryDescriptor:
    """A replica in memory."""

    buffer_descriptor: BufferDescriptor

    @property
    def buffer_descriptors(self) -> list[BufferDescriptor]:
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
        return ReplicaStatus.COMPLETE if self.state in ("live", "draining") else ReplicaStatus.UNDEFINED

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
        return MemoryDescriptor(BufferDescriptor(self.length, self.offset, self.node))

    def get_disk_descriptor(self) -> MemoryDescriptor:
        """kvpool has none: raises."""
        raise RuntimeError("the replica is in memory, not on a disk")

    def get_local_disk_descriptor(self) -> MemoryDescriptor:
        """kvpool has none: raises."""
        raise RuntimeError("the replica is in memory, not on a disk")


def how_to_put(config: ReplicateConfig | None, node_name: Callable[[str], str]) -> How | None:
    """The options of a configuration; `None` for an invalid one."""
    if config is None:
        return (1, None, False, None, False)
    if not isinstance(config, ReplicateConfig):
        raise TypeError(f"config must be a ReplicateConfig, not {type(config).__name__}")
    replicas, soft_ms = config.replica_num, config.soft_pin_ttl_ms
    if not 0 < replicas < 1 << 32 or (soft_ms is not None and not 0 <= soft_ms < 1 << 63):
        return None
    preferred = config.preferred_segment or next(iter(config.preferred_segments or ()), "")
    soft_pin = None
    if config.with_soft_pin:
        soft_pin = _SOFT_PIN_MS if soft_ms is None else soft_ms
    return (
        replicas,
        node_name(preferred) if preferred else None,
        bool(config.prefer_alloc_in_same_node),
        soft_pin,
        bool(config.with_hard_pin),
    )


def same_length(keys: Sequence[object], *others: Sequence[object]) -> bool:
    """Whether each list of a batch has one item for each key."""
    return all(len(other) == len(keys) for other in others)
