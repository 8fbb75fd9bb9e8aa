"""A small HTTP server: a table of paths, with one function for each path."""

from __future__ import annotations

import http.server
import logging
import socket
import socketserver
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_log = logging.getLogger("mooncake.http")

# The limits of one request.
MAX_BODY = 1 << 20


@dataclass(frozen=True)
class Request:
    """A request of a client."""

    query: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """An answer to a request."""

    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"


def text(status: int, message: str) -> Answer:
    """Returns an answer in plain text."""
    return Answer(status, message.encode())


Routes = Mapping[tuple[str, str], Callable[[Request], Answer]]
"""The functions that answer, by method and path."""


class Server:
    """Listens from its construction on, and answers from `start` on. Raises OSError when the port is taken."""

    def __init__(self, host: str, port: int, routes: Routes):
        server = _Server6 if ":" in host else _Server
        self._server = server((host.strip("[]"), port), _handler(routes))

    @property
    def port(self) -> int:
        """The listening port."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Answers requests on threads of its own."""
        threading.Thread(target=self._server.serve_forever, name="http", daemon=True).start()

    def serve(self) -> None:
        """Answers requests until another thread calls `stop`."""
        self._server.serve_forever()

    def stop(self) -> None:
        """Stops the server."""
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def server_bind(self) -> None:
        # The base class asks the name service for the host's name, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


class _Server6(_Server):
    address_family = socket.AF_INET6


def _handler(routes: Routes) -> type[http.server.BaseHTTPRequestHandler]:
    paths = {path for _, path in routes}

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # A silent client must not occupy a thread for ever.
        timeout = 15

        def _answer(self) -> None:
            answer = self._answered()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        def _answered(self) -> Answer:
            url = urllib.parse.urlsplit(self.path)
            length = self.headers.get("Content-Length", "0")
            if not length.isdecimal() or "Transfer-Encoding" in self.headers:
                self.close_connection = True
                return text(411, "Content-Length is needed\n")
            if int(length) > MAX_BODY:
                self.close_connection = True
                return text(413, f"at most {MAX_BODY} bytes are taken\n")
            body = self.rfile.read(int(length))
            method = "GET" if self.command == "HEAD" else self.command
            route = routes.get((method, url.path))
            if route is None:
                known = url.path in paths
                return text(405 if known else 404, "method not allowed\n" if known else "not found\n")
            query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
            try:
                return route(Request(query, body))
            except Exception:
                _log.exception("%s %s", self.command, url.path)
                return text(500, "internal error\n")

        do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _answer

        def log_message(self, format: str, *args: object) -> None:
            _log.debug(format, *args)

    return Handler
