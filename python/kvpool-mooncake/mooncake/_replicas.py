"""The replicas of objects."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake import _codes
from mooncake._base import StoreBase
from mooncake._descriptors import ReplicaDescriptor
from mooncake._settings import node_name


class ReplicaMethods(StoreBase):
    """The replica methods of a store."""

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Removes objects that are neither leased nor pinned. Returns the removed keys.

        With a segment: only objects whose only replica is there. Single replicas are not removed.
        """
        keys = list(keys)
        if segment_name:
            keys = self._only_at(keys, node_name(segment_name))
        return [key for key, code in zip(keys, self._native.remove(keys, False)) if code == _codes.OK]

    def _only_at(self, keys: Sequence[str], node: str) -> list[str]:
        """The keys whose only replica is at a node: the pool cannot drop one replica of several yet."""
        descriptors = self.batch_get_replica_desc(keys)
        return [key for key in keys if {replica.node for replica in descriptors.get(key, [])} == {node}]

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """The replicas of an object; empty if it is absent."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """The replicas of objects, by key, without absent keys. Leases nothing."""
        keys = list(keys)
        code, described = self._native.describe(keys)
        self._said("batch_get_replica_desc", code)
        found: dict[str, list[ReplicaDescriptor]] = {}
        for key, block in zip(keys, described):
            if block is not None:
                length, replicas = block
                found[key] = [
                    ReplicaDescriptor(node, segment, offset, length, state)
                    for node, segment, offset, state in replicas
                ]
        return found
