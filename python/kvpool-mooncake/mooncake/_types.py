"""The small types of the store's interface."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence

# The native store's form of put options: replicas, preferred nodes, this host first, soft pin in milliseconds,
# hard pin.
How = tuple[int, list[str], bool, int | None, bool]

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
    GENERAL = 9


class SoftPinAction(enum.IntEnum):
    """The effect of a put on the soft pin of its object."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


@dataclasses.dataclass
class ReplicateConfig:
    """The placement and the protection of an object.

    - `replica_num`: number of replicas, each on another node.
    - `preferred_segment`, `preferred_segments`: the nodes to try first, in this order. Give each by its name or
      by a store's `get_hostname`.
    - `prefer_alloc_in_same_node`: try nodes of this host first.
    - `with_hard_pin`: never evict the object.
    - `soft_pin_action` of `ENABLE`, or `with_soft_pin` of older releases: evict the object after others, for
      `soft_pin_ttl_ms` milliseconds (default: half an hour). An upsert without either ends a soft pin.

    The other fields have no effect in kvpool.
    """

    replica_num: int = 1
    nof_replica_num: int = 0
    dfs_replica_num: int = 0
    with_hard_pin: bool = False
    with_soft_pin: bool = False
    soft_pin_action: SoftPinAction = SoftPinAction.PRESERVE
    soft_pin_ttl_ms: int | None = None
    preferred_segments: list[str] = dataclasses.field(default_factory=list)
    preferred_segment: str = ""
    prefer_alloc_in_same_node: bool = False
    data_type: ObjectDataType = ObjectDataType.UNKNOWN
    group_ids: list[str] | None = None
    preferred_nof_segments: list[str] = dataclasses.field(default_factory=list)


def how_to_put(config: ReplicateConfig | None, node_name: Callable[[str], str]) -> How | None:
    """Returns the native options of a configuration; `None` for an invalid one."""
    if config is None:
        return (1, [], False, None, False)
    if not isinstance(config, ReplicateConfig):
        raise TypeError(f"config must be a ReplicateConfig, not {type(config).__name__}")
    replicas, soft_ms = config.replica_num, config.soft_pin_ttl_ms
    if not 0 < replicas < 1 << 32 or (soft_ms is not None and not 0 <= soft_ms < 1 << 63):
        return None
    preferred = [config.preferred_segment, *(config.preferred_segments or ())]
    soft_pin = None
    if config.soft_pin_action == SoftPinAction.ENABLE or (
        config.with_soft_pin and config.soft_pin_action == SoftPinAction.PRESERVE
    ):
        soft_pin = _SOFT_PIN_MS if soft_ms is None else soft_ms
    return (
        replicas,
        [node_name(segment) for segment in preferred if segment],
        bool(config.prefer_alloc_in_same_node),
        soft_pin,
        bool(config.with_hard_pin),
    )


def same_length(keys: Sequence[object], *others: Sequence[object]) -> bool:
    """Whether each list of a batch has one item for each key."""
    return all(len(other) == len(keys) for other in others)
