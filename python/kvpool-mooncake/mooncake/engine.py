"""`mooncake.engine`: moving bytes between registered memory of two processes, over kvpool's transport.

A `TransferEngine` is one session, named "host:port". A peer may read and write the session's registered
memory, at its addresses in this process, and no other memory. With `KVPOOL_ENGINE_SECRET` only peers with
the same secret may. Without it every process that reaches the port may, so set it beyond one machine.

```python
engine = TransferEngine()
assert engine.initialize("10.0.0.2", "P2PHANDSHAKE", "tcp", "") == 0
address = engine.allocate_managed_buffer(1 << 20)
status = engine.transfer_sync_write("10.0.0.3:12345", address, peer_address, 1 << 20)   # 0 or -1
```

Addresses and lengths are in bytes. Checksums verify all bytes. With `protocol="rdma"` bytes go over RDMA to
peers that use it too, else over TCP. `device_name` names the RDMA devices, separated by commas; empty means
all. The engine logs the transport of each peer, with the reason, at first contact.
`TransferEngine.get_transport` returns it.

Settings, from the environment:

- `KVPOOL_ENGINE_SECRET`: the secret that all peers must share (default: none)
- `KVPOOL_ENGINE_TIMEOUT`: the longest time of a transfer, in seconds (default: 30)
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Sequence

from kvpool._native import PeerEngine
from mooncake import _engine_args as _args
from mooncake import _engine_session as _session
from mooncake._engine_args import TransferNotify, TransferOpcode

__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]

_log = logging.getLogger("mooncake.engine")

_PROBE_TIMEOUT = 3.0
_OK = 0
_FAILED = -1

# What peers may still be writing to must not go away under them when the interpreter ends.
_open: weakref.WeakSet[TransferEngine] = weakref.WeakSet()
# Managed buffers of engines that were closed in the middle of a transfer.
_kept: list[mmap.mmap] = []


class TransferEngine:
    """One session: registered memory of this process, and transfers from and to peers' memory.

    Any thread may call, and no call lasts longer than its deadline. A wrong type raises TypeError. Every
    other failure is logged and returns the documented code.
    """

    def __init__(self) -> None:
        self._native: PeerEngine | None = None
        self._host = ""
        self._timeout = _session.DEFAULT_TIMEOUT
        self._is_tcp = True
        self._lock = threading.Lock()
        self._managed: dict[int, mmap.mmap] = {}
        _open.add(self)

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str | None
    ) -> int:
        """Starts the session. Returns 0, or -1 if it cannot listen or runs already.

        `local_hostname` is "host" or "host:port", as peers reach it; the port is used if it is free.
        `metadata_server` is "P2PHANDSHAKE"; any other value is ignored. Peers' names must be "host:port".
        `protocol` is "rdma" or "tcp"; any other value means "tcp", with a warning. If devices are
        missing, bytes go over TCP.
        """
        for what, value in (
            ("local_hostname", local_hostname),
            ("metadata_server", metadata_server),
            ("protocol", protocol),
            ("device_name", "" if device_name is None else device_name),
        ):
            if not isinstance(value, str):
                raise TypeError(f"{what} must be a str, not {type(value).__name__}")
        try:
            host, port = _session.split(local_hostname)
            timeout = _session.timeout_setting()
        except ValueError as error:
            return _failed("initialize", error)
        devices = None
        if protocol.lower() == "rdma":
            devices = list(_session.devices(device_name))
        elif protocol.lower() != "tcp":
            _log.warning("protocol %r is not served: bytes go over TCP", protocol)
        peer_to_peer = metadata_server.upper() == "P2PHANDSHAKE"
        if not peer_to_peer:
            _log.info("metadata server %s is not asked: peers are named host:port", metadata_server)
        secret = os.environ.get("KVPOOL_ENGINE_SECRET", "")
        with self._lock:
            if self._native is not None:
                return _failed("initialize", "the engine is initialized already")
            try:
                native, bound = _session.serve(host, port, secret, peer_to_peer, devices)
            except OSError as error:
                return _failed("initialize", f"{local_hostname}: {error}")
            self._native, self._host, self._timeout = native, host, timeout
            self._is_tcp = devices is None
        if devices is not None:
            ports, why = native.ports()
            if why is None:
                _log.info("session %s uses the RDMA ports %s", self.get_session_id(), ", ".join(ports))
            else:
                _log.warning("session %s: bytes go over TCP: %s", self.get_session_id(), why)
        if not secret and not _session.is_loopback(bound):
            _log.warning(
                "session %s has no secret: whoever reaches the port may touch registered memory"
                " (KVPOOL_ENGINE_SECRET)",
                self.get_session_id(),
            )
        return _OK

    def initialize_ext(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str | None,
        metadata_type: str,
    ) -> int:
        """As `initialize`; `metadata_type` has no effect."""
        if not isinstance(metadata_type, str):
            raise TypeError(f"metadata_type must be a str, not {type(metadata_type).__name__}")
        return self.initialize(local_hostname, metadata_server, protocol, device_name)

    def get_rpc_port(self) -> int:
        """The port that peers connect to; -1 before `initialize`."""
        native = self._native
        if native is None:
            return _failed("get_rpc_port", "the engine is not initialized")
        try:
            return native.port()
        except RuntimeError as error:
            return _failed("get_rpc_port", error)

    def get_session_id(self) -> str:
        """The session's name for peers, "host:port"; "" before `initialize`."""
        port = self.get_rpc_port()
        if port < 0:
            return ""
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    def get_engine(self) -> TransferEngine:
        """This object, for the parameter `engine` of `mooncake.store`."""
        return self

    def get_local_topology(self, device_name: str | None = None) -> str:
        """The RDMA devices that reach the CPU's memory, as JSON: those that the session uses.

        `device_name` selects some of them. Without RDMA there are none.
        """
        if device_name is not None and not isinstance(device_name, str):
            raise TypeError(f"device_name must be a str, not {type(device_name).__name__}")
        native = self._native
        ports: list[str] = []
        if native is not None:
            with contextlib.suppress(RuntimeError):
                ports, _why = native.ports()
        wanted = _session.devices(device_name)
        # A port is called "device:1".
        devices = dict.fromkeys(port.rpartition(":")[0] for port in ports)
        return json.dumps({"cpu:0": [[name for name in devices if not wanted or name in wanted], []]})

    def get_transport(self, target_hostname: str) -> str:
        """The transport to a peer: "rdma" or "tcp"; "" if the peer is not reached within 3 s."""
        _args.check_str("target_hostname", target_hostname)
        native = self._native
        if native is None:
            _failed("get_transport", "the engine is not initialized")
            return ""
        try:
            kind, _why = native.route(target_hostname, _PROBE_TIMEOUT)
        except (ValueError, OSError, RuntimeError) as error:
            _failed("get_transport", error)
            return ""
        self._log_news(native)
        return kind

    def _log_news(self, native: PeerEngine) -> None:
        """Logs the transport of each peer, once and after each change."""
        with contextlib.suppress(RuntimeError):
            for target, (kind, why) in native.news():
                if why is None or self._is_tcp:
                    _log.info("peer %s: bytes go over %s", target, kind.upper())
                else:
                    _log.warning("peer %s: bytes go over %s: %s", target, kind.upper(), why)

    def close(self) -> None:
        """Ends the session: no peer accesses memory any more, and every later call fails."""
        with self._lock:
            native, self._native = self._native, None
            managed, self._managed = self._managed, {}
        if native is not None and not native.close():
            _log.error("the engine is closed while a transfer uses its memory, which is not freed")
            _kept.extend(managed.values())
            return
        for memory in managed.values():
            memory.close()

    def __del__(self) -> None:
        # Nothing may be left of an object whose constructor failed.
        with contextlib.suppress(AttributeError):
            self.close()

    # Memory

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Lets peers read and write `capacity` bytes at `buffer_addr`. Returns 0, or -1 for a failure.

        It fails if the range is not host memory of this process, or overlaps a registered range. Before
        you free the memory, unregister it or close the engine: this process sums the bytes there.
        """
        _args.check_int("buffer_addr", buffer_addr)
        _args.check_int("capacity", capacity)
        native = self._native
        if native is None:
            return _failed("register_memory", "the engine is not initialized")
        try:
            native.register(_args.address(buffer_addr), _args.length(capacity))
        except (ValueError, OSError, RuntimeError) as error:
            return _failed("register_memory", error)
        return _OK

    def unregister_memory(self, buffer_addr: int) -> int:
        """Ends a registration when no transfer uses the range. Returns 0, or -1 for a failure.

        It fails if no registration begins at the address, or if a transfer still uses the range after
        the timeout. Then do not free the memory.
        """
        _args.check_int("buffer_addr", buffer_addr)
        native = self._native
        if native is None:
            return _failed("unregister_memory", "the engine is not initialized")
        try:
            if native.unregister(_args.address(buffer_addr)):
                return _OK
        except (ValueError, RuntimeError) as error:
            return _failed("unregister_memory", error)
        return _failed("unregister_memory", f"no registered range begins at {buffer_addr:#x}")

    def batch_register_memory(
        self,
        buffer_addrs: Sequence[int],
        capacities: Sequence[int],
        locations: Sequence[str] | str = "*",
    ) -> int:
        """Registers several ranges, all or none. Returns 0 or -1."""
        addresses, lengths = list(buffer_addrs), list(capacities)
        if len(addresses) != len(lengths):
            return _failed("batch_register_memory", f"{len(addresses)} addresses, {len(lengths)} lengths")
        for index, (address, length) in enumerate(zip(addresses, lengths, strict=True)):
            if self.register_memory(address, length) != _OK:
                for done in addresses[:index]:
                    self.unregister_memory(done)
                return _FAILED
        return _OK

    def batch_unregister_memory(self, buffer_addrs: Sequence[int]) -> int:
        """Ends several registrations. Returns 0, or -1 if one of them failed."""
        results = [self.unregister_memory(address) for address in buffer_addrs]
        return _OK if all(result == _OK for result in results) else _FAILED

    def allocate_managed_buffer(self, length: int) -> int:
        """The address of `length` new bytes, zeroed and registered; 0 on failure."""
        _args.check_int("length", length)
        if self._native is None or not 0 < length < _args.LARGEST:
            _failed("allocate_managed_buffer", f"{length} bytes, or the engine is not initialized")
            return 0
        try:
            memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            _failed("allocate_managed_buffer", error)
            return 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self.register_memory(address, length) != _OK:
            memory.close()
            return 0
        with self._lock:
            self._managed[address] = memory
        return address

    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """Frees memory of `allocate_managed_buffer`. Returns 0, or -1 for any other address."""
        _args.check_int("buffer_addr", buffer_addr)
        _args.check_int("length", length)
        with self._lock:
            memory = self._managed.get(buffer_addr)
            if memory is None or len(memory) != length:
                return _failed("free_managed_buffer", f"no buffer of {length} bytes at {buffer_addr:#x}")
            del self._managed[buffer_addr]
        native = self._native
        try:
            # The caller may have ended the registration already.
            if native is not None:
                native.unregister(buffer_addr)
        except RuntimeError as error:
            with self._lock:
                self._managed[buffer_addr] = memory
            return _failed("free_managed_buffer", error)
        memory.close()
        return _OK

    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes, length: int) -> int:
        """Copies the first `length` bytes of `src_ptr` to an address in this process. Returns 0, or -1 if
        the address is invalid or `src_ptr` is shorter."""
        _args.check_int("dest_address", dest_address)
        _args.check_int("length", length)
        data = memoryview(src_ptr.encode() if isinstance(src_ptr, str) else src_ptr).cast("B")
        native = self._native
        if native is None or not 0 <= length <= len(data):
            return _failed("write_bytes_to_buffer", f"{length} of {len(data)} bytes")
        try:
            native.write_bytes(_args.address(dest_address), bytes(data[:length]))
        except (ValueError, OSError, RuntimeError) as error:
            return _failed("write_bytes_to_buffer", error)
        return _OK

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """`length` bytes from an address in this process. Raises ValueError for an invalid address."""
        _args.check_int("source_address", source_address)
        _args.check_int("length", length)
        native = self._native
        if native is None:
            raise ValueError("the engine is not initialized")
        return native.read_bytes(_args.address(source_address), _args.length(length))

    def get_first_buffer_address(self, segment_name: str) -> int:
        """The address of the memory that a peer registered first; 0 without one or without the peer."""
        _args.check_str("segment_name", segment_name)
        native = self._native
        if native is None:
            _failed("get_first_buffer_address", "the engine is not initialized")
            return 0
        try:
            return native.first_registered(segment_name, self._timeout) or 0
        except (ValueError, OSError, RuntimeError) as error:
            _failed("get_first_buffer_address", error)
            return 0

    # Transfers that are waited for

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        """Writes `length` bytes at `buffer` to the peer's `peer_buffer_address`. Returns 0 or -1."""
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], TransferOpcode.Write)

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        """Reads `length` bytes from the peer's `peer_buffer_address` to `buffer`. Returns 0 or -1."""
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], TransferOpcode.Read)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
    ) -> int:
        """Reads or writes, then sends `notify` to the peer, if given. Returns 0 or -1."""
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], opcode, notify)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Writes several ranges; ranges adjacent at the peer are joined. Returns 0 or -1."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Write)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Reads several ranges. Returns 0 or -1."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Read)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
    ) -> int:
        """Reads or writes several ranges, then sends `notify` to the peer, if given. Returns 0 or -1."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify)

    # Transfers that go on in the background

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        """Begins a write. Returns its number for `transfer_check_status`, or -1. Keep the memory until it ends."""
        return (
            self._submit(target_hostname, [buffer], [peer_buffer_address], [length], TransferOpcode.Write)
            or _FAILED
        )

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Begins several writes. Returns the batch's number, or 0. Keep the memory until they end."""
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Write)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Begins several reads. Returns the batch's number, or 0. Keep the memory until they end."""
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Read)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
    ) -> int:
        """Begins several reads or writes. Returns the batch's number, or 0."""
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify)

    def transfer_check_status(self, batch_id: int) -> int:
        """The state of a transfer: 1 done, 0 pending, -1 failed or unknown, -2 timed out."""
        _args.check_int("batch_id", batch_id)
        native = self._native
        if native is None or not 0 < batch_id < _args.LARGEST:
            return _FAILED
        try:
            status = native.status(batch_id)
        except RuntimeError as error:
            return _failed("transfer_check_status", error)
        if status:
            self._log_news(native)
        return _FAILED if status is None else status

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Waits until all these transfers have ended. Returns 0 if all succeeded, else -1."""
        ids = list(batch_ids)
        for batch_id in ids:
            _args.check_int("batch_ids", batch_id)
        native = self._native
        if native is None:
            return _failed("get_batch_transfer_status", "the engine is not initialized")
        done = True
        for batch_id in ids:
            if not 0 < batch_id < _args.LARGEST:
                done = False
                continue
            try:
                # Each has a deadline of its own, which is not further away than this.
                if native.wait(batch_id, self._timeout + 15.0) != 1:
                    _failed("get_batch_transfer_status", native.failure(batch_id) or f"batch {batch_id}")
                    done = False
            except RuntimeError as error:
                return _failed("get_batch_transfer_status", error)
        self._log_news(native)
        return _OK if done else _FAILED

    # What peers say

    def get_notifies(self) -> list[TransferNotify]:
        """Takes the messages from peers since the last call, oldest first."""
        native = self._native
        if native is None:
            return []
        try:
            messages = native.messages()
        except RuntimeError as error:
            _failed("get_notifies", error)
            return []
        return [notify for message in messages if (notify := _args.decoded(message)) is not None]

    def send_probe(self, target_hostname: str) -> int:
        """Returns 0 if a peer answers, or -1 after 3 s at most."""
        _args.check_str("target_hostname", target_hostname)
        native = self._native
        if native is None:
            return _failed("send_probe", "the engine is not initialized")
        try:
            native.first_registered(target_hostname, _PROBE_TIMEOUT)
        except (ValueError, OSError, RuntimeError) as error:
            return _failed("send_probe", error)
        return _OK

    def _sync(
        self,
        target: str,
        buffers: Sequence[int],
        peer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
    ) -> int:
        locals_, remotes, sizes = _args.ranges(target, buffers, peer_addresses, lengths)
        _args.check_int("opcode", opcode)
        message = _args.encoded(notify)
        native = self._native
        if native is None:
            return _failed("transfer", "the engine is not initialized")
        try:
            _args.check_values(locals_, remotes, sizes)
            native.transfer(target, _args.is_write(opcode), locals_, remotes, sizes, self._timeout, message)
            self._log_news(native)
        except (ValueError, OSError, RuntimeError) as error:
            return _failed(f"transfer with {target}", error)
        return _OK

    def _submit(
        self,
        target: str,
        buffers: Sequence[int],
        peer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
    ) -> int:
        locals_, remotes, sizes = _args.ranges(target, buffers, peer_addresses, lengths)
        _args.check_int("opcode", opcode)
        message = _args.encoded(notify)
        native = self._native
        if native is None:
            _failed("transfer", "the engine is not initialized")
            return 0
        try:
            _args.check_values(locals_, remotes, sizes)
            write = _args.is_write(opcode)
            return native.submit(target, write, locals_, remotes, sizes, self._timeout, message)
        except (ValueError, OSError, RuntimeError) as error:
            _failed(f"transfer with {target}", error)
            return 0


def _failed(what: str, why: object) -> int:
    _log.error("%s: %s", what, why)
    return _FAILED


@atexit.register
def _close_all() -> None:
    for engine in list(_open):
        with contextlib.suppress(RuntimeError):
            engine.close()
