"""The HTTP metadata server, as a command and as an object for programs."""

from __future__ import annotations

import enum
import logging
import threading

from mooncake.commands.http_metadata_server import main
from mooncake.commands.metadata import Metadata
from mooncake.commands.web import Server

__all__ = ["KVBootstrapServer", "KVPoll", "main"]

_log = logging.getLogger("mooncake.http")


class KVPoll(enum.Enum):
    """The state of a server. kvpool's server is `Failed` or `Success`."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


class KVBootstrapServer:
    """`/metadata?key=` for GET, PUT and DELETE, and `/health`, on a thread of its own. Values are in memory."""

    def __init__(self, port: int, host: str = "0.0.0.0") -> None:
        self.port = port
        self.host = host
        self.thread: threading.Thread | None = None
        self._server: Server | None = None

    def run(self) -> threading.Thread | None:
        """Starts the server. Returns its thread; `None` if the port is taken, and then logs the reason."""
        try:
            self._server = Server(self.host, self.port, Metadata().routes())
        except OSError as error:
            _log.error("%s:%d: %s", self.host, self.port, error)
            return None
        self.port = self._server.port
        self.thread = threading.Thread(target=self._server.serve, name="metadata", daemon=True)
        self.thread.start()
        return self.thread

    def close(self) -> None:
        """Stops the server."""
        server, self._server = self._server, None
        if server is not None and self.thread is not None:
            server.stop()
            self.thread.join(2)

    def poll(self) -> KVPoll:
        """`Success` while the server runs, else `Failed`."""
        return KVPoll.Success if self.thread is not None and self.thread.is_alive() else KVPoll.Failed


if __name__ == "__main__":
    main()
