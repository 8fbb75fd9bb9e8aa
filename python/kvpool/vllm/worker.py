"""A worker's half: moves blocks between the engine's memory and the pool, beside the engine's work."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import kvpool
from kvpool._engines.connection import Connection
from kvpool._engines.threads import started
from kvpool.vllm.keys import block_key
from kvpool.vllm.plan import Block, Move, Plan
from kvpool.vllm.segments import BlockMap

if TYPE_CHECKING:
    from kvpool.vllm.staging import Copies, Staging

logger = logging.getLogger(__name__)

_LOADERS = 2
"""The number of requests that are loaded at a time. Each load uses several connections."""

Pieces = list[tuple[int, int]]
"""Memory as (address, length)."""


@dataclasses.dataclass(frozen=True)
class GroupMemory:
    """The memory of one group of layers."""

    blocks: BlockMap
    staging: Staging | None
    """The copies of the group's blocks in host memory; never `None` for a group that is not `kept`."""
    direct: bool
    """Whether the pool reaches the memory; otherwise its bytes move through `staging`."""
    kept: bool
    """Whether the engine keeps a request's blocks unchanged until the request ends. Layers with a window
    do not: the engine reuses blocks that have left the window."""


@dataclasses.dataclass(frozen=True)
class Moved:
    """The saves and loads that ended since the last call."""

    saved: set[str]
    """Ended requests whose blocks are saved or dropped."""
    loaded: dict[str, tuple[Block, ...]]
    """Requests whose load has ended, with the blocks that were not loaded."""


class Mover:
    """Loads and saves the plans of the scheduler's half, on threads of its own.

    A save reads the engine's memory after the step that computed it, while the engine continues. The memory
    does not change meanwhile. A finished request's blocks stay until `moved` returns the request. `stop` waits
    for the saves of a preempted request. Blocks that are not kept are copied at once.
    """

    def __init__(
        self,
        connection: Connection,
        rank: str,
        memory: Mapping[int, GroupMemory],
        *,
        saves: bool,
        save_backlog: int,
        save_patience: float,
        rest: float,
    ):
        """At most `save_backlog` bytes wait to be saved. `close` waits at most `save_patience` seconds for
        them. After a failed save no save starts for `rest` seconds."""
        self._connection = connection
        self._rank = rank
        self._memory = memory
        self._saves = saves
        self._backlog = save_backlog
        self._patience = save_patience
        self._rest = rest
        self._rest_until = 0.0
        self._loader = started(_LOADERS, "kvpool-load")
        self._saver = started(1, "kvpool-save")
        self._saving: dict[str, list[concurrent.futures.Future[None]]] = {}
        self._ending: set[str] = set()
        self._stopped: set[str] = set()
        self._lock = threading.Lock()
        self._loaded: dict[str, tuple[Block, ...]] = {}
        self._unsaved_bytes = 0
        self._dropping = False

    def load(self, plan: Plan) -> None:
        """Starts the plan's loads."""
        for move in plan.loads:
            try:
                self._loader.submit(self._load, plan.prefix, move, self._marks())
            except Exception as error:
                # Every exception is caught: none may reach the engine's thread. The request waits for the end
                # of the load.
                self._connection.failed("loading a prompt", error)
                self._load_ended(move, move.blocks)

    def save(self, plan: Plan) -> None:
        """Starts the plan's saves. The blocks are computed, or the device has the work for them in its
        queue."""
        for move in plan.saves:
            # This also runs without a block to save on this rank, because the scheduler waits for all ranks.
            jobs = self._saving.setdefault(move.request, [])
            jobs[:] = [job for job in jobs if not job.done()]
            if not self._saves or not self._has_room(move):
                continue
            try:
                jobs.append(self._start_save(plan.prefix, move))
            except Exception as error:
                # Every exception is caught: none may reach the engine's thread. An unsaved block is only a
                # later miss.
                self._connection.failed("saving blocks", error)

    def stop(self, requests: Iterable[str]) -> None:
        """Returns when no save reads a block of these requests any more."""
        for request in requests:
            jobs = self._saving.pop(request, None)
            if jobs is None:
                continue
            self._ending.discard(request)
            self._stopped.add(request)
            concurrent.futures.wait([job for job in jobs if not job.cancel()])

    def is_saving(self, request: str) -> bool:
        """Whether `moved` has yet to return this request."""
        return request in self._saving

    def moved(self, over: Iterable[str]) -> Moved:
        """Returns the ended saves and loads. `over`: the requests that ended since the last call."""
        ended = set(over)
        self._ending.update(request for request in ended if request in self._saving)
        saved = {request for request in self._ending if all(job.done() for job in self._saving[request])}
        self._ending -= saved
        for request in saved:
            del self._saving[request]
        # The scheduler waits for a request that ended before its preemption was reported to this worker.
        saved |= ended & self._stopped
        self._stopped.clear()
        with self._lock:
            loaded, self._loaded = self._loaded, {}
        return Moved(saved, loaded)

    def close(self) -> None:
        """Waits for the saves in progress, for at most `save_patience` seconds."""
        jobs = [job for jobs in self._saving.values() for job in jobs]
        concurrent.futures.wait(jobs, timeout=self._patience)
        for executor in (self._saver, self._loader):
            executor.shutdown(wait=True, cancel_futures=True)

    def _marks(self) -> dict[int, Any]:
        return {
            number: memory.staging.mark()
            for number, memory in self._memory.items()
            if memory.staging is not None
        }

    def _bytes(self, blocks: Iterable[Block]) -> int:
        return sum(self._memory[block.group].blocks.block_bytes for block in blocks)

    def _has_room(self, move: Move) -> bool:
        with self._lock:
            full = self._unsaved_bytes > 0 and self._unsaved_bytes + self._bytes(move.blocks) > self._backlog
        if full and not self._dropping:
            logger.warning("more is computed than the pool takes: some is not saved (save_backlog)")
        self._dropping = full
        return not full

    def _start_save(self, prefix: str, move: Move) -> concurrent.futures.Future[None]:
        marks = self._marks()
        copies: dict[int, Copies] = {}
        for number, blocks in _by_group(move.blocks).items():
            memory = self._memory[number]
            if not memory.kept:
                staging = _staging(memory)
                copies[number] = staging.gather([block.number for block in blocks], marks[number])
        size = self._bytes(move.blocks)
        job = self._saver.submit(self._save, prefix, move, marks, copies)
        # The count rises only here, so that a failed submit does not raise it.
        with self._lock:
            self._unsaved_bytes += size

        def ended(job: concurrent.futures.Future[None]) -> None:
            with self._lock:
                self._unsaved_bytes -= size
            if not job.cancelled() and (error := job.exception()) is not None:
                self._connection.failed("saving blocks", error)

        job.add_done_callback(ended)
        return job

    def _save(
        self, prefix: str, move: Move, marks: Mapping[int, Any], copies: dict[int, Copies]
    ) -> None:
        if time.monotonic() < self._rest_until or self._connection.pool() is None:
            return
        keys: list[str] = []
        parents: list[str | None] = []
        bytes_of: list[Pieces] = []
        for number, blocks in _by_group(move.blocks).items():
            memory = self._memory[number]
            if not memory.direct and number not in copies:
                copies[number] = _staging(memory).gather([block.number for block in blocks], marks[number])
            keys += self._keys(prefix, blocks)
            parents += [
                None if block.parent is None else block_key(prefix, self._rank, number, block.parent)
                for block in blocks
            ]
            bytes_of += self._pieces(memory, blocks, copies.get(number))
        outcomes: list[Any] = self._connection.call(
            "saving blocks", [], lambda pool: pool.batch_put(keys, bytes_of, parents=parents)
        )
        errors = [outcome for outcome in outcomes if isinstance(outcome, kvpool.Error)]
        if errors:
            # An unsaved block is only a later miss. The pause gives time to a pool that is full or has lost a
            # node. So the engine's blocks do not accumulate in the backlog.
            self._rest_until = time.monotonic() + self._rest
            logger.warning(
                "%d of %d blocks were not saved, and none will be for %g s: %s",
                len(errors),
                len(outcomes),
                self._rest,
                errors[0],
            )

    def _load(self, prefix: str, move: Move, marks: Mapping[int, Any]) -> None:
        bad: tuple[Block, ...] = move.blocks
        try:
            bad = self._loaded_but(prefix, move, marks)
        except BaseException as error:
            # Every exception is caught: an engine that does not learn of the end of the load waits for ever.
            self._connection.failed("loading a prompt", error)
        self._load_ended(move, bad)

    def _load_ended(self, move: Move, bad: tuple[Block, ...]) -> None:
        with self._lock:
            self._loaded[move.request] = bad

    def _loaded_but(self, prefix: str, move: Move, marks: Mapping[int, Any]) -> tuple[Block, ...]:
        """Loads the blocks of `move`. Returns the blocks that were not loaded."""
        order: list[Block] = []
        keys: list[str] = []
        into: list[Pieces] = []
        rows: dict[int, Copies] = {}
        for number, blocks in _by_group(move.blocks).items():
            memory = self._memory[number]
            if not memory.direct:
                rows[number] = _staging(memory).room(len(blocks))
            order += blocks
            keys += self._keys(prefix, blocks)
            into += self._pieces(memory, blocks, rows.get(number))
        outcomes: list[Any] = self._connection.call(
            "loading a prompt", [None] * len(keys), lambda pool: pool.batch_get(keys, into)
        )
        whole = [
            outcome == self._memory[block.group].blocks.block_bytes
            for block, outcome in zip(order, outcomes, strict=True)
        ]
        bad = tuple(block for block, is_whole in zip(order, whole, strict=True) if not is_whole)
        if bad:
            logger.warning(
                "%d of %d blocks of a prompt were not there to load: %s",
                len(bad),
                len(order),
                next((str(outcome) for outcome in outcomes if isinstance(outcome, kvpool.Error)), "missing"),
            )
        for number, copy in rows.items():
            staging = _staging(self._memory[number])
            staging.scatter([block.number for block in order if block.group == number], copy, marks[number])
        return bad

    def _keys(self, prefix: str, blocks: Iterable[Block]) -> list[str]:
        return [block_key(prefix, self._rank, block.group, block.hashed) for block in blocks]

    def _pieces(
        self, memory: GroupMemory, blocks: Sequence[Block], rows: Copies | None
    ) -> list[Pieces]:
        """The pieces of the blocks: in `rows` of host memory, or in the engine's memory."""
        if rows is None:
            return [memory.blocks.pieces(block.number) for block in blocks]
        size = memory.blocks.block_bytes
        return [[(rows.address + at * size, size)] for at in range(len(blocks))]


def _by_group(blocks: Iterable[Block]) -> dict[int, list[Block]]:
    groups: dict[int, list[Block]] = {}
    for block in blocks:
        groups.setdefault(block.group, []).append(block)
    return groups


def _staging(memory: GroupMemory) -> Staging:
    assert memory.staging is not None, "invariant: memory that is not direct or not kept has staging"
    return memory.staging
