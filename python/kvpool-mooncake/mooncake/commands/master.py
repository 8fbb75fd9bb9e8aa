"""mooncake_master: kvmaster, started with the original's flags.

kvmaster runs as a child process. This process serves the original's metrics port (/metrics, /health,
/get_all_segments) with data from kvmaster's own HTTP port. With `--enable_http_metadata_server` it also serves
/metadata at another port. Arguments after `--` go to kvmaster unchanged, for example `--
--data-dir=/var/lib/kvmaster`.
"""

from __future__ import annotations

import http.client
import json
import logging
import sys
import tempfile
from pathlib import Path

from mooncake.commands import flags
from mooncake.commands.flags import CommandLine
from mooncake.commands.master_flags import FLAGS, kvmaster_args, metrics_host, without_effect
from mooncake.commands.metadata import Metadata
from mooncake.commands.programs import Child, NotFound, find
from mooncake.commands.web import Answer, Request, Routes, Server, text

_ASK_TIMEOUT = 5.0


class Backend:
    """kvmaster's own HTTP port. It is known after kvmaster has written its ready file."""

    def __init__(self, ready_file: Path):
        self._ready_file = ready_file

    def ask(self, path: str) -> tuple[int, bytes]:
        """Returns kvmaster's answer. Raises OSError before kvmaster serves, and if it does not answer in
        time."""
        try:
            address = json.loads(self._ready_file.read_text())["http"]
        except (FileNotFoundError, ValueError) as error:
            raise OSError("kvmaster is starting") from error
        connection = http.client.HTTPConnection(address, timeout=_ASK_TIMEOUT)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()

    def routes(self) -> Routes:
        """Returns the routes of the original's metrics port."""
        return {
            ("GET", "/metrics"): self._metrics,
            ("GET", "/health"): self._health,
            ("GET", "/get_all_segments"): self._segments,
        }

    def _metrics(self, _request: Request) -> Answer:
        try:
            status, body = self.ask("/metrics")
        except OSError as error:
            return text(503, f"{error}\n")
        return Answer(status, body, "text/plain; version=0.0.4")

    def _health(self, _request: Request) -> Answer:
        try:
            status, body = self.ask("/healthz")
        except OSError as error:
            return text(503, f"{error}\n")
        return text(200, "OK\n") if status == 200 else Answer(503, body)

    def _segments(self, _request: Request) -> Answer:
        """Returns one line for each segment: the address of its node. Empty while there is no segment."""
        try:
            status, body = self.ask("/api/v1/nodes")
        except OSError as error:
            return text(503, f"{error}\n")
        if status != 200:
            # A standby knows no nodes, so it is asked no further.
            return Answer(503, body)
        nodes = [node for node in json.loads(body) if node["state"] == "live"]
        lines = [f"{node['data_address']}\n" for node in nodes for _ in node["segments"]]
        return Answer(200, "".join(lines).encode(), "text/plain; version=0.0.4")


def serve(line: CommandLine, log: logging.Logger) -> int:
    """Runs kvmaster until it ends. Returns its exit code."""
    told = kvmaster_args(line)
    for name, why in without_effect(line):
        log.warning("--%s has no effect: %s", name, why)
    try:
        program = find("kvmaster")
    except NotFound as error:
        log.error("%s", error)
        return 1
    with tempfile.TemporaryDirectory(prefix="mooncake-master-") as scratch:
        ready_file = Path(scratch) / "ready.json"
        servers: list[Server] = []
        for what, host, port in http_ports(line):
            routes = Backend(ready_file).routes() if what == "metrics" else Metadata().routes()
            try:
                servers.append(Server(host, port, routes))
            except OSError as error:
                log.error("--%s: %s:%d: %s", _port_flag(what), host, port, error)
                return 1
            log.info("--%s: http://%s:%d", _port_flag(what), host, servers[-1].port)
        for arg, come_from in told:
            log.info("%s: kvmaster %s", come_from, arg)
        if line.rest:
            log.info("kvmaster %s", " ".join(line.rest))
        own = ["--http-listen=127.0.0.1:0", f"--ready-file={ready_file}"]
        if not line.passes_on("--insecure"):
            # Without TLS every caller is accepted, as with the original. kvmaster logs a warning then.
            own.append("--insecure")
        child = Child(program, [*own, *(arg for arg, _ in told), *line.rest])
        # The threads start after the fork of the child, because a process with threads must not fork.
        for server in servers:
            server.start()
        code = child.wait()
        for server in servers:
            server.stop()
    log.info("kvmaster has ended with %d", code)
    return code


def http_ports(line: CommandLine) -> list[tuple[str, str, int]]:
    """Returns the HTTP services of this process, with their addresses. Raises UsageError."""
    ports = [("metrics", metrics_host(line), line.port("metrics_port"))]
    if line.is_on("enable_http_metadata_server"):
        host = line.text("http_metadata_server_host")
        ports.append(("metadata", host, line.port("http_metadata_server_port")))
    return ports


def _port_flag(what: str) -> str:
    return "metrics_port" if what == "metrics" else "http_metadata_server_port"


def main() -> None:
    """Runs the command."""
    sys.exit(flags.run("mooncake_master", __doc__ or "", FLAGS, serve))


if __name__ == "__main__":
    main()
