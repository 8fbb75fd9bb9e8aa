"""mooncake_http_metadata_server: the HTTP metadata server as a command.

kvpool uses no metadata server. This server is for deployments whose scripts start one and wait for it.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading

from mooncake.commands import flags
from mooncake.commands.flags import CommandLine, Flag, UsageError
from mooncake.commands.metadata import Metadata
from mooncake.commands.web import Server

FLAGS = (
    Flag("host", "string", "0.0.0.0", "Listen at this address"),
    Flag("port", "int32", 8080, "Listen at this port"),
    Flag("log_level", "string", "INFO", "Log from this level on: DEBUG, INFO, WARNING, ERROR or CRITICAL"),
)

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def serve(line: CommandLine, log: logging.Logger) -> int:
    """Serves until a signal arrives."""
    host, port, level = line.text("host"), line.port("port"), line.text("log_level")
    if level not in _LEVELS:
        raise UsageError(f"--log_level={level} is none of {', '.join(_LEVELS)}")
    logging.getLogger().setLevel(level)
    try:
        server = Server(host, port, Metadata().routes())
    except OSError as error:
        log.error("%s:%d: %s", host, port, error)
        return 1
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stopping.set())
    log.info("serving /metadata and /health at http://%s:%d", host, server.port)
    server.start()
    stopping.wait()
    server.stop()
    return 0


def main() -> None:
    """Runs the command."""
    sys.exit(flags.run("mooncake_http_metadata_server", __doc__ or "", FLAGS, serve))


if __name__ == "__main__":
    main()
