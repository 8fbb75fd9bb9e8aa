"""Watches a vLLM engine from a thread of its process, and prints changes with their times.

It reads vLLM's own objects and changes none. An engine that runs in one process has them all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from kvpool import handoff

_LOOK = 0.004
# One word for this many bytes of KV cache is compared, so that a check takes well below a millisecond.
_STEP = 1 << 20

_held = threading.Event()
_sessions: list[handoff.Session] = []


class Watch:
    """Prints these values with the time `at` whenever one of them has changed:

    - `blocks`: the blocks of vLLM's cache that requests hold;
    - `pins`: the pages that sessions of `kvpool.handoff` pin;
    - `bytes`: about how many bytes of the KV cache changed since `mark`.
    """

    def __init__(self, engine: Any, say: Callable[..., None]):
        core = engine.engine_core.engine_core
        self._pool = core.scheduler.kv_cache_manager.block_pool
        runner = core.model_executor.driver_worker.worker.model_runner
        storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in runner.kv_caches}
        # The samples are an odd number of words apart, so that they do not always hit the same word of a row.
        step = _STEP // 4 + 1
        self._caches = [
            torch.empty(0, dtype=torch.int32).set_(storage).numpy()[::step] for storage in storages.values()
        ]
        self._before: list[np.ndarray] | None = None
        self._say = say
        threading.Thread(target=self._run, daemon=True).start()

    def mark(self) -> None:
        """Starts counting changes of the KV cache."""
        self._before = [cache.copy() for cache in self._caches]

    def unmark(self) -> None:
        """Stops reading the KV cache, which slows the engine."""
        self._before = None

    def _look(self) -> dict[str, int]:
        # vLLM keeps one block for itself.
        seen = {"blocks": self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()}
        seen["pins"] = sum(session.pinned() for session in _sessions)
        if (marked := self._before) is not None:
            pairs = zip(self._caches, marked, strict=True)
            seen["bytes"] = sum(int(np.count_nonzero(now != before)) for now, before in pairs) * _STEP
        return seen

    def _run(self) -> None:
        last: dict[str, int] = {}
        while True:
            at = time.monotonic()
            seen = self._look()
            if seen != last:
                last = seen
                self._say(at=at, **seen)
            time.sleep(_LOOK)


def hold() -> None:
    """Makes this process never report the end of its writes from now on."""
    _held.set()


def prepare() -> None:
    """Prepares `hold` and `Watch`. Call it before the import of vLLM.

    The engine under test writes the bytes, and the other end never learns of the end of the last write."""
    opened = handoff.Session.__init__

    def noted_init(self: handoff.Session, *arguments: Any, **options: Any) -> None:
        opened(self, *arguments, **options)
        _sessions.append(self)

    handoff.Session.__init__ = noted_init  # type: ignore[method-assign]
    finish = handoff.Sending.finish

    def held_finish(self: handoff.Sending, aux: bytes | None = None) -> None:
        if not _held.is_set():
            finish(self, aux)

    handoff.Sending.finish = held_finish  # type: ignore[method-assign]
    import mooncake.engine

    class Engine(mooncake.engine.TransferEngine):
        """Mooncake's engine, or kvpool's in its place."""

        def batch_transfer_sync_write(self, *arguments: Any) -> int:
            done = int(super().batch_transfer_sync_write(*arguments))
            while _held.is_set():
                time.sleep(1.0)
            return done

    mooncake.engine.TransferEngine = Engine
