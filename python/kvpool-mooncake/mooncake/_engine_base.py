"""The common base of the parts of `TransferEngine`."""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading

from kvpool._native import PeerEngine
from mooncake import _engine_session as _session

log = logging.getLogger("mooncake.engine")

PROBE_TIMEOUT = 3.0
OK = 0
FAILED = -1


def failed(what: str, why: object) -> int:
    """Logs a failure. Returns its code."""
    log.error("%s: %s", what, why)
    return FAILED


class EngineBase:
    """A session, running or not."""

    def __init__(self) -> None:
        self._native: PeerEngine | None = None
        self._host = ""
        self._timeout = _session.DEFAULT_TIMEOUT
        self._is_tcp = True
        self._lock = threading.Lock()
        self._managed: dict[int, mmap.mmap] = {}

    def _log_news(self, native: PeerEngine) -> None:
        """Logs the transport of each peer, once and after each change."""
        with contextlib.suppress(RuntimeError):
            for target, (kind, why, reads_directly) in native.news():
                copied = "; large reads are copied from its process" if reads_directly else ""
                if why is None or self._is_tcp:
                    log.info("peer %s: bytes go over %s%s", target, kind.upper(), copied)
                else:
                    log.warning("peer %s: bytes go over %s: %s%s", target, kind.upper(), why, copied)
