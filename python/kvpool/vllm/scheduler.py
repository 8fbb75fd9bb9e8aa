"""The scheduler's half: looks prompts up in the pool and plans the moves of each step."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Sequence

from kvpool._engines.connection import Connection
from kvpool._engines.leases import Keeper
from kvpool.vllm.keys import Group, Layout
from kvpool.vllm.lookups import Lookups
from kvpool.vllm.plan import Block, Move, Plan
from kvpool.vllm.settings import Settings

_MISS_LASTS = 0.5
"""How long a lookup that found no new blocks is not repeated, in seconds."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a lookup: how many leading units the pool has."""

    units: int
    asked: int
    """How many units the lookup asked for."""
    local_tokens: int
    """How many tokens the engine already had."""
    at: float


@dataclasses.dataclass(frozen=True)
class Progress:
    """The state of a request after the step."""

    request: str
    hashes: Sequence[bytes]
    computed_tokens: int
    blocks: Callable[[], Sequence[Sequence[int]]]
    """Returns the request's blocks for each of the engine's groups, indexed by the group's number."""


class Planner:
    """Looks requests up, keeps leases on found blocks, and plans loads and saves.

    Calls for one request: `lookup` (repeated while it waits), `allocated`, `step` in each step,
    `arrived` when its load has ended, `finished`.
    """

    def __init__(
        self,
        layout: Layout,
        connection: Connection,
        *,
        loads: bool,
        saves: bool,
        spare_units: int = 0,
        lookup_patience: float = Settings.lookup_patience,
    ):
        """`spare_units`: how many of the last found units are computed anyway. A model that drafts tokens from
        hidden states needs the states of the last tokens. `lookup_patience`: as in `Settings`."""
        self._layout = layout
        self._spare_units = spare_units
        self._connection = connection
        self._loads = loads
        self._saves = saves
        self._keeper = Keeper()
        self._lookups = Lookups(connection, self._keeper, lookup_patience)
        self._found: dict[str, Found] = {}
        self._to_load: list[Move] = []
        self._loading: dict[str, Move] = {}
        self._failed: set[str] = set()
        self._saved_units: dict[str, int] = {}
        self._saving: set[str] = set()

    def lookup(
        self, request: str, hashes: Sequence[bytes], tokens: int, local_tokens: int
    ) -> int | None:
        """Returns how many tokens after the first `local_tokens` can be loaded. Returns `None` while that is
        unknown: ask again at the next step.

        `tokens` is the number of tokens of the request. The last token is always computed, because the engine
        needs its output. A lookup is one round trip to the master, beside the scheduler. A cached answer needs
        no round trip.
        """
        layout = self._layout
        wanted = layout.units(len(hashes), tokens - 1)
        if not self._loads or request in self._failed or wanted == 0:
            return 0
        found = self._found.get(request)
        if found is None or found.asked != wanted or not self._still_true(request, found):
            found = self._ask(request, hashes, wanted, local_tokens)
        if found is None:
            return None
        if found.local_tokens != local_tokens:
            found = self._found[request] = dataclasses.replace(found, local_tokens=local_tokens)
        self._saved_units[request] = max(found.units, self._saved_units.get(request, 0))
        more = self._usable_tokens(found)
        if more <= 0:
            self._keeper.let_go(request)
        return max(more, 0)

    def allocated(
        self,
        request: str,
        hashes: Sequence[bytes],
        blocks: Sequence[Sequence[int]],
        load_tokens: int,
    ) -> None:
        """The engine has allocated room for the request. `load_tokens`: the tokens to load beyond those that it
        had at the lookup; 0 for none."""
        found = self._found.pop(request, None)
        if found is None or load_tokens == 0:
            if request not in self._loading:
                self._keeper.let_go(request)
            return
        unit = self._layout.unit_tokens
        first, last = found.local_tokens // unit, (found.local_tokens + load_tokens) // unit
        move = Move(request, tuple(self._blocks(hashes, blocks, first, last)))
        self._loading[request] = move
        self._to_load.append(move)

    def handed(self, request: str, tokens: int) -> None:
        """The first `tokens` tokens come from another engine, and that engine saves their blocks."""
        units = tokens // self._layout.unit_tokens
        self._saved_units[request] = max(units, self._saved_units.get(request, 0))

    def step(self, progress: Iterable[Progress], preempted: Iterable[str]) -> Plan:
        """Returns the moves of the next step."""
        self._lookups.begin_step()
        gone = frozenset(preempted)
        # The workers stop reading these blocks, so no block must stay when the requests end.
        self._saving -= gone
        saves = [self._save(one) for one in progress] if self._saves else []
        loads, self._to_load = self._to_load, []
        return Plan(
            prefix=self._layout.prefix,
            loads=tuple(loads),
            saves=tuple(move for move in saves if move is not None),
            preempted=gone,
        )

    def arrived(self, requests: Iterable[str], failed: Iterable[str], bad_blocks: Iterable[int]) -> None:
        """The loads of `requests` have ended. Requests in `failed`, and requests with any of `bad_blocks`, did
        not load."""
        bad = set(bad_blocks)
        lost = set(failed)
        if bad:
            # vLLM names blocks without their group only if there is one group.
            lost.update(
                request
                for request, move in self._loading.items()
                if any(block.number in bad for block in move.blocks)
            )
        for request in lost:
            # The request computes the blocks that it could not load, and puts them again.
            self._failed.add(request)
            self._saved_units.pop(request, None)
        for request in requests:
            self._loading.pop(request, None)
            self._keeper.let_go(request)

    def finished(self, request: str) -> bool:
        """The request has ended. Returns whether its blocks must stay until the workers have saved them."""
        self._lookups.forget(request)
        self._found.pop(request, None)
        self._saved_units.pop(request, None)
        self._failed.discard(request)
        saving = request in self._saving
        self._saving.discard(request)
        # A load in progress has its own leases, and vLLM keeps its blocks until it has ended.
        self._loading.pop(request, None)
        self._keeper.let_go(request)
        return saving

    def reset(self) -> bool:
        """Forgets the results of lookups, and removes the layout's blocks from the pool, leased ones too.
        Returns whether the pool has removed all of them.

        Saves in progress, here or in another engine, can put blocks after the removal.
        """
        self._lookups.forget_all()
        for request in list(self._found):
            del self._found[request]
            # The found blocks counted as saved, and are removed now.
            self._saved_units.pop(request, None)
            self._keeper.let_go(request)
        mine = f"^{re.escape(self._layout.prefix)}:"
        _removed, kept = self._connection.call(
            "removing blocks", (0, 1), lambda pool: pool.remove_matching(mine, force=True)
        )
        return kept == 0

    def close(self) -> None:
        """Releases the leases."""
        self._lookups.close()
        self._keeper.close()

    def _usable_tokens(self, found: Found) -> int:
        return (found.units - self._spare_units) * self._layout.unit_tokens - found.local_tokens

    def _still_true(self, request: str, found: Found) -> bool:
        if self._usable_tokens(found) > 0:
            return self._keeper.holds(request)
        return time.monotonic() - found.at < _MISS_LASTS

    def _ask(
        self, request: str, hashes: Sequence[bytes], wanted: int, local_tokens: int
    ) -> Found | None:
        layout = self._layout
        units = 0
        is_answered, prefix = self._lookups.ask(request, wanted, lambda: layout.chain(hashes, wanted))
        if not is_answered:
            # The scheduler no longer uses the earlier answer or its lease.
            self._found.pop(request, None)
            return None
        if prefix is not None:
            units = prefix.blocks // layout.keys_per_unit
            self._keeper.hold(request, prefix.lease)
        found = Found(units, wanted, local_tokens, time.monotonic())
        self._found[request] = found
        return found

    def _save(self, one: Progress) -> Move | None:
        first = self._saved_units.get(one.request, 0)
        last = self._layout.units(len(one.hashes), one.computed_tokens)
        if last <= first:
            return None
        self._saved_units[one.request] = last
        blocks = tuple(self._blocks(one.hashes, one.blocks(), first, last))
        if not blocks:
            return None
        self._saving.add(one.request)
        return Move(one.request, blocks)

    def _blocks(
        self, hashes: Sequence[bytes], blocks: Sequence[Sequence[int]], first: int, last: int
    ) -> Iterable[Block]:
        for group in self._layout.groups:
            yield from self._group_blocks(group, hashes, blocks[group.number], first, last)

    def _group_blocks(
        self, group: Group, hashes: Sequence[bytes], blocks: Sequence[int], first: int, last: int
    ) -> Iterable[Block]:
        layout = self._layout
        for at in layout.blocks(group, first, last):
            # A group with a window has no memory for blocks before the window: block 0 means no block.
            if at < len(blocks) and blocks[at] != 0:
                parent = layout.hash_of(group, at - 1, hashes) if at else None
                yield Block(group.number, blocks[at], layout.hash_of(group, at, hashes), parent)
