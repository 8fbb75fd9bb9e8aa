"""`mooncake.engine`: moving bytes between registered memory of two processes, over kvpool's transport.

A `TransferEngine` is one session, named "host:port". A peer may read and write the session's registered memory,
at its addresses in this process, and no other memory. With `KVPOOL_ENGINE_SECRET`, a peer needs the same
secret. Without it, every process that reaches the port may access the memory, so set it beyond one machine.

```python
engine = TransferEngine()
assert engine.initialize("10.0.0.2", "P2PHANDSHAKE", "tcp", "") == 0
address = engine.allocate_managed_buffer(1 << 20)
status = engine.transfer_sync_write("10.0.0.3:12345", address, peer_address, 1 << 20)   # 0 or -1
```

Addresses and lengths are in bytes. Checksums verify all bytes. With `protocol="rdma"`, bytes go over RDMA to
peers that use it too, else over TCP. `device_name` names the RDMA devices, separated by commas; empty means
all. At the first contact with a peer the engine logs the transport and the reason.
`TransferEngine.get_transport` returns the transport.

Settings, from the environment:

- `KVPOOL_ENGINE_SECRET`: the secret that all peers must share (default: none)
- `KVPOOL_ENGINE_TIMEOUT`: the longest time of a transfer, in seconds (default: 30)
- `KVPOOL_ENGINE_DIRECT_READS`: whether large reads from a peer on the same host are copied from its process, if bytes
  do not go over RDMA (default: true)
"""

from __future__ import annotations

import atexit as _atexit
import contextlib as _contextlib
import json as _json
import mmap as _mmap
import os as _os
import weakref as _weakref

from mooncake import _engine_args as _args
from mooncake import _engine_session as _session
from mooncake._engine_args import TransferNotify, TransferOpcode
from mooncake._engine_background import BackgroundMethods as _BackgroundMethods
from mooncake._engine_base import OK as _OK
from mooncake._engine_base import PROBE_TIMEOUT as _PROBE_TIMEOUT
from mooncake._engine_base import failed as _failed
from mooncake._engine_base import log as _log
from mooncake._engine_cuda import CudaMethods as _CudaMethods
from mooncake._engine_memory import MemoryMethods as _MemoryMethods
from mooncake._engine_transfers import TransferMethods as _TransferMethods
from mooncake._rpc import ReceivedData, ReceivedTensor, RpcInterface, create_rpc_client, create_rpc_server
from mooncake._shared_segment import SharedSegment
from mooncake._still_open import still_open as _still_open

__all__ = [
    "CoroRPCInterface",
    "InnerTransferEngine",
    "Read",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "SharedSegment",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
    "create_rpc_client",
    "create_rpc_server",
]

# The engine moves bytes of host memory only, over TCP and RDMA.
SUPPORT_CUDA = False
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False

Read = TransferOpcode.Read
Write = TransferOpcode.Write

CoroRPCInterface = RpcInterface

# Peers may still write when the interpreter ends, so the session is closed before.
_open: _weakref.WeakSet[TransferEngine] = _weakref.WeakSet()
# Managed buffers of engines that were closed during a transfer.
_kept: list[_mmap.mmap] = []


class InnerTransferEngine:
    """The result of `TransferEngine.get_engine`, for the parameter `engine` of `mooncake.store`."""


class TransferEngine(_MemoryMethods, _TransferMethods, _BackgroundMethods, _CudaMethods, InnerTransferEngine):
    """One session: registered memory of this process, and transfers from and to the memory of peers.

    Any thread may call the methods, and no call lasts longer than its deadline. A wrong type raises TypeError.
    The engine logs every other failure and returns the documented code.
    """

    TransferOpcode = TransferOpcode

    def __init__(self) -> None:
        super().__init__()
        _open.add(self)

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str | None
    ) -> int:
        """Starts the session. Returns 0, or -1 if the engine cannot listen or runs already.

        `local_hostname` is "host" or "host:port", as peers reach it. If the port is taken, the session gets another
        port: `get_session_id` has it, and a warning names both. A name that cannot be resolved is a warning too.
        `metadata_server` is "P2PHANDSHAKE". Any other value is ignored, except that a taken port is then an error.
        Peers' names must be "host:port".
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
            reads_directly = _session.direct_setting()
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
        secret = _os.environ.get("KVPOOL_ENGINE_SECRET", "")
        with self._lock:
            if self._native is not None:
                return _failed("initialize", "the engine is initialized already")
            try:
                native, bound = _session.serve(
                    host, port, secret, peer_to_peer, devices, reads_directly
                )
            except (OSError, ValueError) as error:
                return _failed("initialize", f"{local_hostname!r}: {error}")
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
        """The session's name for peers, "host:port"; empty before `initialize`."""
        port = self.get_rpc_port()
        if port < 0:
            return ""
        return _session.session_name(self._host, port)

    def get_engine(self) -> TransferEngine:
        """This object, for the parameter `engine` of `mooncake.store`."""
        return self

    def get_local_topology(self, device_name: str | None = None) -> str:
        """Returns the RDMA devices of the session that reach the CPU's memory, as JSON.

        `device_name` selects some of them. Without RDMA there are none.
        """
        if device_name is not None and not isinstance(device_name, str):
            raise TypeError(f"device_name must be a str, not {type(device_name).__name__}")
        native = self._native
        ports: list[str] = []
        if native is not None:
            with _contextlib.suppress(RuntimeError):
                ports, _why = native.ports()
        wanted = _session.devices(device_name)
        # Port 1 of a device has the name "device:1".
        devices = dict.fromkeys(port.rpartition(":")[0] for port in ports)
        return _json.dumps({"cpu:0": [[name for name in devices if not wanted or name in wanted], []]})

    def get_transport(self, target_hostname: str) -> str:
        """Returns the transport to a peer: "rdma" or "tcp"; "" if the peer is not reached within 3 s."""
        _args.check_str("target_hostname", target_hostname)
        native = self._native
        if native is None:
            _failed("get_transport", "the engine is not initialized")
            return ""
        try:
            kind, _why, _direct = native.route(target_hostname, _PROBE_TIMEOUT)
        except (ValueError, OSError, RuntimeError) as error:
            _failed("get_transport", error)
            return ""
        self._log_news(native)
        return kind

    def close(self) -> None:
        """Ends the session. No peer writes to memory any more, and every later call fails."""
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
        # An object whose constructor failed lacks this attribute.
        with _contextlib.suppress(AttributeError):
            self.close()

    def get_notifies(self) -> list[TransferNotify]:
        """Returns the messages from peers since the last call, oldest first."""
        native = self._native
        if native is None:
            return []
        try:
            messages = native.messages()
        except RuntimeError as error:
            _failed("get_notifies", error)
            return []
        return [notify for message in messages if (notify := _args.decoded(message)) is not None]

    def send_probe(self, peer_server_name: str) -> int:
        """Returns 0 if a peer answers, or -1 after 3 s at most."""
        _args.check_str("peer_server_name", peer_server_name)
        native = self._native
        if native is None:
            return _failed("send_probe", "the engine is not initialized")
        try:
            native.first_registered(peer_server_name, _PROBE_TIMEOUT)
        except (ValueError, OSError, RuntimeError) as error:
            return _failed("send_probe", error)
        return _OK


@_atexit.register
def _close_all() -> None:
    for engine in _still_open(_open):
        with _contextlib.suppress(RuntimeError):
            engine.close()


del annotations
