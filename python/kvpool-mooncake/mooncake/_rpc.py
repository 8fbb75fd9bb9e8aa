"""Sending bytes and tensors to another process, and calling a function there with them.

A message is a frame: b"KVR1", the lengths of its description (4 bytes) and its data (8 bytes), big-endian, the
description in JSON, and the data. The receiver answers one byte when its callback has ended: 1 if the callback
returned, 0 if it raised an exception. Callers are not authenticated, as in the original.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import json
import logging
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from typing import Any

from mooncake._tensor_format import on_host

_log = logging.getLogger("mooncake.rpc")

_FRAME = struct.Struct("!4sIQ")
_MAGIC = b"KVR1"
_LONGEST_DESCRIPTION = 1 << 16
_LONGEST_DATA = 1 << 34
_DONE = b"\x01"
_RAISED = b"\x00"
_DEFAULT_PORT = 8080


@dataclasses.dataclass(frozen=True)
class ReceivedData:
    """Received bytes."""

    source_address: str
    data: bytes = dataclasses.field(repr=False)

    @property
    def data_size(self) -> int:
        """The length in bytes."""
        return len(self.data)

    def get_bytes(self) -> bytes:
        """The bytes."""
        return self.data

    def get_memory_view(self) -> memoryview:
        """The bytes, in place."""
        return memoryview(self.data)


@dataclasses.dataclass(frozen=True)
class ReceivedTensor:
    """A received tensor: `dtype` such as "float16", `shape`, and the bytes of a contiguous tensor."""

    source_address: str
    dtype: str
    shape: list[int]
    data: bytes = dataclasses.field(repr=False)

    @property
    def total_bytes(self) -> int:
        """The length of the data in bytes."""
        return len(self.data)

    def get_data_size(self) -> int:
        """The length of the data in bytes."""
        return len(self.data)

    def get_data_as_bytes(self) -> bytes:
        """The data."""
        return self.data

    def get_memory_view(self) -> memoryview:
        """The data, in place."""
        return memoryview(self.data)


class RpcInterface:
    """One end: a client that sends, a server with callbacks, or both. Threads may share it."""

    def __init__(self) -> None:
        self._initialized = False
        self._listen = ""
        self._timeout = 30.0
        self._idle = 100
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._on_data: Callable[[dict[str, Any]], object] | None = None
        self._on_tensor: Callable[[ReceivedTensor], object] | None = None
        self._lock = threading.Lock()
        self._connections: dict[str, list[socket.socket]] = {}
        self._senders: concurrent.futures.ThreadPoolExecutor | None = None

    def initialize(
        self, listen_address: str = "", thread_count: int = 0, timeout_seconds: int = 30, pool_size: int = 100
    ) -> bool:
        """Prepares both ends. Returns True. Keeps up to `pool_size` idle connections to each target.

        `thread_count` has no effect: each connection has a thread.
        """
        if not isinstance(listen_address, str):
            raise TypeError(f"listen_address must be a str, not {type(listen_address).__name__}")
        self._listen, self._timeout, self._idle = listen_address, float(timeout_seconds), pool_size
        self._initialized = True
        return True

    def initialize_client(self, pool_size: int = 100, timeout_seconds: int = 30) -> bool:
        """As `initialize`, without a listening address."""
        return self.initialize("", 0, timeout_seconds, pool_size)

    def initialize_server(self, listen_address: str, thread_count: int = 8, timeout_seconds: int = 30) -> bool:
        """As `initialize`, with the listening address "host:port"."""
        return self.initialize(listen_address, thread_count, timeout_seconds)

    def start_server(self) -> bool:
        """Serves until another thread calls `stop_server`. Returns whether it could listen."""
        if not self._bind():
            return False
        server = self._server
        if server is not None:
            server.serve_forever()
        return True

    def start_server_async(self) -> bool:
        """Serves on a thread of its own. Returns whether it could listen."""
        if not self._bind():
            return False
        server = self._server
        if server is not None:
            self._thread = threading.Thread(target=server.serve_forever, name="rpc", daemon=True)
            self._thread.start()
        return True

    def _bind(self) -> bool:
        host, _, port = self._listen.rpartition(":")
        if not self._initialized or self._server is not None or not port.isdecimal():
            _log.error("no server is started at %r", self._listen)
            return False
        try:
            self._server = _Server((host.strip("[]") or "0.0.0.0", int(port)), self)
        except (OSError, ValueError, OverflowError) as error:
            _log.error("%r: %s", self._listen, error)
            return False
        return True

    def stop_server(self) -> None:
        """Ends the server."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        if self._thread is not None:
            self._thread.join(self._timeout)
            self._thread = None

    def set_data_receive_callback(self, callback: Callable[[dict[str, Any]], object]) -> None:
        """Sets the callback for bytes: `callback({"source": "host:port", "data": bytes})`."""
        self._on_data = callback

    def set_tensor_receive_callback(self, callback: Callable[[ReceivedTensor], object]) -> None:
        """Sets the callback for tensors: `callback(ReceivedTensor)`."""
        self._on_tensor = callback

    def send_data(self, target_address: str, data: Any) -> int:
        """Sends bytes, and waits for the receiver's callback. Returns 0, or -1 for a failure, also of the
        callback. The receiver is called at most once: after -1 it may have been called."""
        return self._send(target_address, {}, memoryview(data).cast("B"))

    def send_tensor(self, target_address: str, tensor: Any) -> int:
        """Sends a torch tensor as `send_data` sends bytes. Returns 0, or -1 for a failure."""
        try:
            whole = on_host(tensor)
            length = whole.numel() * whole.element_size()
            data = memoryview((ctypes.c_ubyte * length).from_address(whole.data_ptr())).cast("B") if length else b""
            said = {"dtype": str(whole.dtype).removeprefix("torch."), "shape": list(whole.shape)}
        except AttributeError as error:
            _log.error("send_tensor: %s is no tensor: %s", type(tensor).__name__, error)
            return -1
        return self._send(target_address, said, memoryview(data))

    def send_data_async(self, target_address: str, data: Any, loop: asyncio.AbstractEventLoop) -> asyncio.Future[int]:
        """`send_data` as a future of `loop`. The future raises RuntimeError for a failure: the receiver may have been
        called."""
        return self._later(loop, self.send_data, target_address, data)

    def send_tensor_async(
        self, target_address: str, tensor: Any, loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future[int]:
        """`send_tensor` as a future of `loop`. The future raises RuntimeError for a failure."""
        return self._later(loop, self.send_tensor, target_address, tensor)

    def _later(
        self, loop: asyncio.AbstractEventLoop, send: Callable[[str, Any], int], *args: Any
    ) -> asyncio.Future[int]:
        def sent() -> int:
            code = send(*args)
            if code < 0:
                raise RuntimeError(f"the message to {args[0]} failed; the log says why")
            return code

        with self._lock:
            if self._senders is None:
                self._senders = concurrent.futures.ThreadPoolExecutor(16, "rpc-send")
        return asyncio.wrap_future(self._senders.submit(sent), loop=loop)

    def _send(self, target: str, said: dict[str, Any], data: memoryview) -> int:
        if not self._initialized:
            _log.error("nothing is sent before initialize")
            return -1
        text = json.dumps(said).encode()
        head = _FRAME.pack(_MAGIC, len(text), len(data)) + text
        connection = None
        try:
            connection = self._connection(target)
            connection.sendall(head)
            connection.sendall(data)
            answer = connection.recv(1)
            if not answer:
                raise OSError("the receiver has closed the connection before its answer")
        except (OSError, ValueError, OverflowError) as error:
            # The receiver may have the message. A second message would call it back twice.
            if connection is not None:
                connection.close()
            _log.error("%s: %s", target, error)
            return -1
        self._keep(target, connection)
        if answer == _DONE:
            return 0
        _log.error("%s: the receiver's callback raised an exception; the receiver's log has it", target)
        return -1

    def _connection(self, target: str) -> socket.socket:
        """Returns a kept connection that the receiver has not closed, or a new one."""
        while True:
            with self._lock:
                found = self._connections.get(target)
                kept = found.pop() if found else None
            if kept is None:
                break
            if self._is_open(kept):
                return kept
            kept.close()
        host, _, port = target.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), self._timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _is_open(self, kept: socket.socket) -> bool:
        kept.settimeout(0)
        try:
            # An open connection has nothing to read between two messages.
            kept.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            kept.settimeout(self._timeout)
            return True
        except OSError:
            return False
        return False

    def _keep(self, target: str, connection: socket.socket) -> None:
        with self._lock:
            idle = self._connections.setdefault(target, [])
            if len(idle) < self._idle:
                idle.append(connection)
                return
        connection.close()

    def _received(self, source: str, said: dict[str, Any], data: bytes) -> None:
        if "dtype" in said:
            tensor = ReceivedTensor(source, str(said["dtype"]), [int(length) for length in said["shape"]], data)
            if self._on_tensor is not None:
                self._on_tensor(tensor)
        elif self._on_data is not None:
            self._on_data({"source": source, "data": data})

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            for idle in self._connections.values():
                for connection in idle:
                    connection.close()
            if self._senders is not None:
                self._senders.shutdown(wait=False)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    # A backlog of 5, the default, resets connections of a client that sends from many threads.
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], owner: RpcInterface) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.owner = owner
        super().__init__(address, _Handler)


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        source = "{}:{}".format(*self.client_address[:2])
        with contextlib.suppress(ConnectionError):
            while frame := self.rfile.read(_FRAME.size):
                if len(frame) < _FRAME.size:
                    return
                magic, description, length = _FRAME.unpack(frame)
                if magic != _MAGIC or description > _LONGEST_DESCRIPTION or length > _LONGEST_DATA:
                    _log.warning("%s sends what is no message", source)
                    return
                text, data = self.rfile.read(description), self.rfile.read(length)
                if len(text) + len(data) < description + length:
                    return
                answer = _DONE
                try:
                    self.server.owner._received(source, json.loads(text), data)
                except Exception:
                    _log.exception("the callback for a message of %s", source)
                    answer = _RAISED
                self.wfile.write(answer)


def create_rpc_client(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """Returns an initialized client. The rank has no effect."""
    client = RpcInterface()
    client.initialize("", 0, 30, 10)
    return client


def create_rpc_server(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """Returns a server, initialized for port 8080 of all interfaces, and not started. The rank has no
    effect."""
    server = RpcInterface()
    server.initialize(f"0.0.0.0:{_DEFAULT_PORT}", 0, 30, 10)
    return server
