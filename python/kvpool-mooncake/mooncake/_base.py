"""The common base of the parts of `MooncakeDistributedStore`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvpool._native import ObjectStore
from mooncake import _codes
from mooncake._settings import node_name
from mooncake._types import How, ReplicateConfig, how_to_put

log = logging.getLogger("mooncake")


class StoreBase:
    """A store, set up or not."""

    def __init__(self) -> None:
        self._native = ObjectStore()
        # The lengths of registered ranges, by address.
        self._registered: dict[int, int] = {}
        # Addresses of memory that a transfer still used when the store was closed.
        self._in_use: set[int] = set()

    def _room_at(self, address: int) -> int | None:
        """The bytes from an address to the end of its registered range; `None` outside of all."""
        for start, length in list(self._registered.items()):
            if start <= address < start + length:
                return start + length - address
        return None

    @staticmethod
    def _how(config: ReplicateConfig | None) -> How | None:
        return how_to_put(config, node_name)

    def _said(self, what: str, code: int) -> int:
        """Returns the code; logs a failure with its reason."""
        if code < 0:
            log.debug("%s: %d: %s", what, code, self._native.last_error())
        return code

    def _all_said(self, what: str, answers: list[int]) -> list[int]:
        if log.isEnabledFor(logging.DEBUG):
            failed = [code for code in answers if code < 0]
            if failed:
                reason = self._native.last_error()
                log.debug("%s: %d of %d failed: %s: %s", what, len(failed), len(answers), set(failed), reason)
        return answers

    @staticmethod
    def _one(answers: list[int]) -> int:
        """The result of a batch of one."""
        return answers[0] if answers else _codes.PARAMETERS

    @staticmethod
    def _refused(keys: Sequence[object]) -> list[int]:
        return [_codes.PARAMETERS] * len(keys)
