"""Threads for work beside the engine's."""

from __future__ import annotations

import concurrent.futures
import threading


def started(threads: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
    """An executor whose threads all run already.

    An executor starts its threads with the first calls of `submit`. Where the system has no thread
    to give, such a call raises. Its work stays in the queue, and may run later on memory that has
    another use by then. Raises RuntimeError if the system has no thread to give now.
    """
    executor = concurrent.futures.ThreadPoolExecutor(threads, name)
    # Each thread waits in it for the others, so that none of them takes the work of two.
    together = threading.Barrier(threads)
    try:
        begun = [executor.submit(together.wait) for _ in range(threads)]
    except RuntimeError:
        together.abort()
        executor.shutdown(wait=False)
        raise
    concurrent.futures.wait(begun)
    return executor
