"""Threads for work beside the engine's."""

from __future__ import annotations

import concurrent.futures
import threading


def started(threads: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
    """Returns an executor whose threads all run already.

    An executor normally starts its threads during the first calls of `submit`. If the system has no free
    thread, such a call raises. Its work stays in the queue, and may later run on memory that has another use by
    then. Raises RuntimeError if the system has no free thread now.
    """
    executor = concurrent.futures.ThreadPoolExecutor(threads, name)
    # Each thread waits in the barrier for the others, so that each takes exactly one of these tasks.
    together = threading.Barrier(threads)
    try:
        begun = [executor.submit(together.wait) for _ in range(threads)]
    except RuntimeError:
        together.abort()
        executor.shutdown(wait=False)
        raise
    concurrent.futures.wait(begun)
    return executor
