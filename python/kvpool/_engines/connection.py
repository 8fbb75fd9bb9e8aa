"""A connection that may fail: the engine continues without the pool and uses it again later."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import kvpool
from kvpool._engines.settings import PoolSettings

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_WAIT_LINE = 60.0
"""The time between two log lines about one wait, in seconds."""


class Connection:
    """Connects to the pool, and leaves the pool alone for `retry_after` seconds after a failed call.

    A failed cache must neither stop the engine nor delay each request. So a thread beside the engine's work
    connects to the pool.
    """

    def __init__(self, settings: PoolSettings, memory: Sequence[tuple[int, int]] = ()):
        """`memory`, as (address, length), is registered with the pool. Transfers read from it and write into
        it."""
        self._settings = settings
        self._memory = memory
        self._registered: list[kvpool.Registration] = []
        self._lock = threading.Lock()
        self._pool: kvpool.Pool | None = None
        self._closed = False
        self._connecting = False
        self._rest_until = 0.0
        self._failures = 0
        self._unsaid = 0
        self._quiet_until = 0.0
        self._connect()

    @property
    def failures(self) -> int:
        """The number of calls that failed so far."""
        with self._lock:
            return self._failures

    def pool(self) -> kvpool.Pool | None:
        """The pool; None without a connection, and for `retry_after` after a failure."""
        with self._lock:
            if self._closed or time.monotonic() < self._rest_until:
                return None
            is_first = self._pool is None and not self._connecting
            self._connecting = self._connecting or is_first
            pool = self._pool
        if is_first:
            self._connect_aside()
        return pool

    def call(self, what: str, otherwise: Answer, ask: Callable[[kvpool.Pool], Answer]) -> Answer:
        """Returns the result of `ask`. Without a pool, and after a failure, returns `otherwise`. Logs a
        failure."""
        pool = self.pool()
        if pool is None:
            return otherwise
        try:
            return ask(pool)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # Every other exception is caught: the caller may be a thread that the engine needs. A panic of the
            # native module is no Exception.
            self.failed(what, error)
            return otherwise

    def failed(self, what: str, error: BaseException) -> None:
        """Counts and logs a call that failed as a whole.

        It logs at most one line in `retry_after` seconds. It returns when no transfer uses the call's memory
        any more, because the engine then uses that memory again.
        """
        self._log(what, error)
        if isinstance(error, kvpool.MemoryInUseError):
            begin = time.monotonic()
            while not error.wait(_WAIT_LINE):
                text = "%s ended %.0f s ago, and a transfer still uses its memory: waiting for it"
                logger.error(text, what, time.monotonic() - begin)

    def _log(self, what: str, error: BaseException) -> None:
        rest = self._settings.retry_after
        is_ours = isinstance(error, kvpool.Error)
        is_away = is_ours and isinstance(error, ConnectionError | TimeoutError)
        now = time.monotonic()
        with self._lock:
            self._failures += 1
            if is_away:
                self._rest_until = now + rest
            if now < self._quiet_until:
                self._unsaid += 1
                return
            self._quiet_until = now + rest
            unsaid, self._unsaid = self._unsaid, 0
        more = f" ({unsaid} failures before it were not logged)" if unsaid else ""
        if is_away:
            text = "%s failed, the pool is left alone for %g s: %s%s"
            logger.warning(text, what, rest, error, more)
        elif is_ours:
            # The pool answered and refused this call; the next call may succeed.
            logger.warning("%s failed: %s%s", what, error, more)
        else:
            logger.error("%s failed%s", what, more, exc_info=error)

    def close(self) -> None:
        """Closes the connection."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._closed = True
        if pool is not None:
            pool.close()

    def _register(self, pool: kvpool.Pool) -> None:
        # Transfers of unregistered memory also work, but an RDMA device cannot access that memory directly.
        try:
            self._registered = [pool.register_buffer(part) for part in self._memory]
        except kvpool.Error as error:
            logger.warning("the engine's memory is not registered: %s", error)

    def _connect_aside(self) -> None:
        try:
            threading.Thread(target=self._connect, name="kvpool-connect", daemon=True).start()
        except RuntimeError as error:
            # The system has no free thread. A later call tries again.
            with self._lock:
                self._connecting = False
                self._rest_until = time.monotonic() + self._settings.retry_after
            self.failed("connecting", error)

    def _connect(self) -> None:
        settings = self._settings
        master = list(settings.master) if isinstance(settings.master, tuple) else settings.master
        pool = None
        try:
            pool = kvpool.Pool.connect(
                master,
                namespace=kvpool.Namespace(settings.namespace) if settings.namespace else None,
                transport=settings.transport,
                token=settings.token,
                timeout=settings.connect_timeout,
                put_timeout=settings.put_timeout,
                get_timeout=settings.get_timeout,
                control_timeout=settings.control_timeout,
            )
            self._register(pool)
        except kvpool.ConnectError as error:
            self.failed(f"connecting to {settings.master or 'the default master'}", error)
        finally:
            with self._lock:
                self._connecting = False
                if not self._closed:
                    self._pool = pool
                    pool = None
            if pool is not None:
                pool.close()
