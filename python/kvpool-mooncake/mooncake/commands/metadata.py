"""The HTTP metadata server: small values by key, in memory, for engines of the original."""

from __future__ import annotations

import threading

from mooncake.commands.web import Answer, Request, Routes, text

_MAX_KEY = 4096
_MAX_KEYS = 100_000


class Metadata:
    """The values. They are lost when the process ends."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def routes(self) -> Routes:
        """Returns the routes: `/metadata?key=` for GET, PUT and DELETE, and `/health`."""
        return {
            ("GET", "/metadata"): self._get,
            ("PUT", "/metadata"): self._put,
            ("DELETE", "/metadata"): self._delete,
            ("GET", "/health"): lambda _request: text(200, "OK\n"),
        }

    def _get(self, request: Request) -> Answer:
        key = _key(request)
        with self._lock:
            value = self._values.get(key)
        if value is None:
            return _missing(key)
        return Answer(200, value, "application/json")

    def _put(self, request: Request) -> Answer:
        key = _key(request)
        if not 0 < len(key) <= _MAX_KEY:
            return text(400, f"key must have 1 to {_MAX_KEY} characters\n")
        with self._lock:
            # An engine must not overwrite another engine's address.
            if "rpc_meta" in key and key in self._values:
                return text(400, f"{key} is there already\n")
            if key not in self._values and len(self._values) >= _MAX_KEYS:
                return text(507, f"there are {_MAX_KEYS} keys already\n")
            self._values[key] = request.body
        return text(200, "metadata updated\n")

    def _delete(self, request: Request) -> Answer:
        key = _key(request)
        with self._lock:
            value = self._values.pop(key, None)
        return _missing(key) if value is None else text(200, "metadata deleted\n")


def _key(request: Request) -> str:
    return request.query.get("key", "").strip()


def _missing(key: str) -> Answer:
    return text(404 if key else 400, "metadata not found\n" if key else "key is missing\n")
