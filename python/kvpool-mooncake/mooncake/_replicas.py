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

        With a segment, it removes the replicas there, and the objects without another replica. Returns the keys
        of both.
        """
        keys = list(keys)
        if not segment_name:
            return self._removed(keys)
        node = node_name(segment_name)
        here = self._with_replica_at(keys, node) or {}
        shared = [key for key in keys if here.get(key) is False]
        if shared:
            self._said("batch_replica_clear", self._native.drop_replicas(shared, node))
        left = self._with_replica_at(shared, node)
        if left is None:
            # Without an answer nothing is known to be removed.
            left, shared = {}, []
        cleared = {key for key in shared if key not in left}
        # Another task may have dropped the other replicas meanwhile, so a replica can be left as the last.
        cleared.update(self._removed([key for key in keys if here.get(key) or left.get(key)]))
        return [key for key in keys if key in cleared]

    def _removed(self, keys: list[str]) -> list[str]:
        answers = self._all_said("batch_replica_clear", self._native.remove(keys, False))
        return [key for key, code in zip(keys, answers) if code == _codes.OK]

    def _with_replica_at(self, keys: Sequence[str], node: str) -> dict[str, bool] | None:
        """The keys with a replica at a node, and whether it is the only one. None if the master did not answer."""
        code, descriptors = self._described(keys)
        if code != _codes.OK:
            return None
        nodes = {key: {replica.node for replica in found} for key, found in descriptors.items()}
        return {key: found == {node} for key, found in nodes.items() if node in found}

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """The replicas of an object; empty if it is absent."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """The replicas of objects, by key, without absent keys. Leases nothing."""
        return self._described(keys)[1]

    def _described(self, keys: Sequence[str]) -> tuple[int, dict[str, list[ReplicaDescriptor]]]:
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
        return code, found
