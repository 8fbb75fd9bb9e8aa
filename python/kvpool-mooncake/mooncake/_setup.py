"""Joining and leaving a pool, and the memory of a store."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Mapping, Sequence

from mooncake import _codes
from mooncake._base import NOT_SET_UP, log
from mooncake._clients import announced_client
from mooncake._memory import MooncakeHostMemAllocator
from mooncake._offload import offload_medium
from mooncake._segments import SegmentMethods
from mooncake._settings import (
    NO_SETTING,
    PAGE,
    Place,
    Settings,
    find_place,
    node_name,
    parse_size,
    rdma_devices_here,
    read_settings,
)
from mooncake._still_open import still_open

# The result of `health_check` when the master does not answer.
_NO_ANSWER = 2
# The parameters of `setup` that its positional and keyword forms require.
_REQUIRED = (
    "local_hostname",
    "metadata_server",
    "global_segment_size",
    "local_buffer_size",
    "protocol",
    "rdma_devices",
    "master_server_addr",
)


# The stores that are set up.
_open: weakref.WeakSet[SetupMethods] = weakref.WeakSet()
# The stores of a parent process are closed there.
os.register_at_fork(after_in_child=_open.clear)


class SetupMethods(SegmentMethods):
    """The set-up and the memory of a store."""

    def __init__(self) -> None:
        super().__init__()
        self._place: Place | None = None
        self._mem_pool = MooncakeHostMemAllocator()
        # The bytes that the memory pool may still give; `None` without a limit.
        self._mem_pool_left: int | None = None

    def setup(
        self,
        local_hostname: str | Mapping[str, object] | None = None,
        metadata_server: str | None = None,
        global_segment_size: int | str | None = None,
        local_buffer_size: int | str | None = None,
        protocol: str | None = None,
        rdma_devices: str | None = None,
        master_server_addr: str | None = None,
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
        *,
        config: Mapping[str, object] | None = None,
        master_server_address: str | None = None,
        device_name: str | None = None,
    ) -> int:
        """Connects to the pool, and contributes a segment of `global_segment_size` bytes to it.

        Pass one dict with these names as keys, all optional. Or pass the first seven parameters and any of the
        others. `master_server_address` and `device_name` are aliases of `master_server_addr` and
        `rdma_devices`. Sizes are numbers of bytes or text ("16MB", "4 GB"; units are powers of 1024).
        The master's address is `host:port`, `http://host:port`, `https://host:port`, or `etcd://host;host[/cluster]`.
        `tenant_id` is the namespace of all keys.

        `enable_ssd_offload` keeps blocks that leave the segment in a file of the directory `ssd_offload_path`
        (default: MOONCAKE_OFFLOAD_FILE_STORAGE_PATH, or /data/file_storage). Each store takes a file of its
        own, and a later store takes it again. MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES is the size of the file.
        By default, a new file takes a tenth of the free room of the filesystem.

        Accepted without effect: `metadata_server`, `local_buffer_size`, `engine`, `enable_client_http_server`,
        `client_http_port`. `protocol` only enables `rdma_devices`: a store uses the first of shared memory,
        RDMA and TCP that reaches a node.

        Returns 0, or a code; the log has the reason. The code -600 means a bad value, a directory that cannot
        be used, or a store that is already set up. The codes -900 and -901 mean that no master answered
        within `connect_timeout_ms` (5000). A warning names each right that the token lacks, to read or to put and
        remove.
        """
        if isinstance(local_hostname, Mapping):
            config = local_hostname
        if config is not None:
            if not isinstance(config, Mapping):
                raise TypeError(f"setup(): config must be a dict, not {type(config).__name__}")
            return self._set_up(dict(config))
        given: dict[str, object] = {
            "local_hostname": local_hostname,
            "metadata_server": metadata_server,
            "global_segment_size": global_segment_size,
            "local_buffer_size": local_buffer_size,
            "protocol": protocol,
            "rdma_devices": device_name if rdma_devices is None else rdma_devices,
            "master_server_addr": master_server_address if master_server_addr is None else master_server_addr,
        }
        missing = [name for name in _REQUIRED if given[name] is None]
        if missing:
            raise TypeError(f"setup() is missing {', '.join(missing)}")
        for name, value in given.items():
            if not isinstance(value, (str, int) if name.endswith("_size") else str):
                raise TypeError(f"setup(): {name} must not be of type {type(value).__name__}")
        if not isinstance(tenant_id, str):
            raise TypeError(f"setup(): tenant_id must be a str, not {type(tenant_id).__name__}")
        if not isinstance(ssd_offload_path, str):
            raise TypeError(f"setup(): ssd_offload_path must be a str, not {type(ssd_offload_path).__name__}")
        given["tenant_id"] = tenant_id
        given["enable_ssd_offload"] = enable_ssd_offload
        given["ssd_offload_path"] = ssd_offload_path
        if enable_client_http_server:
            given["enable_client_http_server"] = True
        return self._set_up(given)

    def _set_up(self, given: Mapping[str, object]) -> int:
        if self._native.is_set_up():
            log.error("setup: the store is already set up, and stays as it is: close it first")
            return _codes.PARAMETERS
        try:
            settings = read_settings(given)
            place = find_place(settings.host, settings.port)
            medium = self._medium(settings)
            code = self._connect(settings)
        except NO_SETTING as error:
            log.error("setup: %s", error)
            return _codes.PARAMETERS
        if code != _codes.OK:
            return code
        _open.add(self)
        for right in self._native.missing_rights():
            log.warning("setup: the token lacks a right, and calls that need it will fail: %s", right)
        self._settings, self._place = settings, place
        if settings.segment_size:
            size = -(-settings.segment_size // PAGE) * PAGE
            code = self._contribute(settings, size, node_name(place.hostname), place, medium)
            if code != _codes.OK:
                self.close()
                return code
        log.info("%s is set up with %s", place.hostname, ", ".join(settings.masters))
        return _codes.OK

    @staticmethod
    def _medium(settings: Settings) -> Sequence[str]:
        if settings.offload and not settings.segment_size:
            # Programs often keep this setting although another process contributes the memory.
            log.warning(
                "setup: enable_ssd_offload has no effect without a segment (global_segment_size is 0): the "
                "stores and mooncake_clients that contribute memory keep its blocks on their own SSDs"
            )
            return ()
        return offload_medium(settings.offload_path) if settings.offload else ()

    def _connect(self, settings: Settings) -> int:
        for name in settings.ignored:
            log.info("setup: %s means nothing to kvpool and is ignored", name)
        log.debug(
            "setup: metadata_server %s and protocol %s are not needed: masters know all, and each node is "
            "reached in the best way there is",
            settings.metadata_server,
            settings.protocol,
        )
        if settings.protocol == "rdma":
            here = rdma_devices_here()
            # A name may have a port too: `mlx5_0:1`.
            if not any(device.partition(":")[0] in here for device in settings.devices or here):
                wanted = ", ".join(settings.devices) or "any RDMA device"
                log.warning("setup: %s is not on this host; shared memory and TCP are used", wanted)
        patience = settings.patience
        code, reason = self._native.connect(
            list(settings.masters),
            "" if settings.tenant == "default" else settings.tenant,
            list(settings.devices),
            (
                patience.connect_timeout_ms,
                patience.put_timeout_ms,
                patience.get_timeout_ms,
                patience.control_timeout_ms,
            ),
        )
        if code == _codes.PARAMETERS:
            log.error("setup: %s", reason)
        elif code != _codes.OK:
            log.error("setup: no connection to the master at %s: %s", ", ".join(settings.masters), reason)
        return code

    def setup_dummy(self, mem_pool_size: int | str, local_buffer_size: int | str, server_address: str) -> int:
        """Connects to the pool that a `mooncake_client` of this host belongs to.

        `server_address` is that client's `host:port`. If no client has announced this address, it counts as a
        master's address. `alloc_from_mem_pool` allocates at most `mem_pool_size` bytes in all.
        """
        if not isinstance(server_address, str):
            raise TypeError(f"server_address must be a str, not {type(server_address).__name__}")
        try:
            size = parse_size(mem_pool_size, "mem_pool_size")
            parse_size(local_buffer_size, "local_buffer_size")
        except NO_SETTING as error:
            log.error("setup_dummy: %s", error)
            return _codes.PARAMETERS
        port = server_address.rpartition(":")[2]
        client = announced_client(int(port)) if port.isdecimal() else None
        code = self._set_up(
            {
                "global_segment_size": 0,
                "master_server_addr": client.masters if client else server_address,
                "tenant_id": client.tenant if client else "default",
            }
        )
        if code == _codes.OK:
            self._mem_pool_left = size
        return code

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int | str = 16 << 20) -> int:
        """`setup` with a master on this host at the default port."""
        return self._set_up(
            {"protocol": protocol, "rdma_devices": device_name, "global_segment_size": mount_segment_size}
        )

    def close(self) -> int:
        """Removes the segment and its objects from the pool and closes the connection. Returns 0.

        Calls of other threads continue to their end. `close` waits at most 10 s for calls that use registered
        memory. It returns -800 if a call still uses some: the log names that memory, which must not be freed.
        With an SSD, `close` first copies the segment's blocks there, for at most 30 s, so that a later store
        has them. The store can be set up again. At the normal end of the interpreter all stores are closed.
        """
        code, used = self._native.close()
        _open.discard(self)
        self._registered.clear()
        for ptr in used:
            if self._mem_pool.keep(ptr):
                continue
            self._in_use.add(ptr)
            code = _codes.TRANSFER
            log.error("the store is closed, and a transfer still uses the memory registered at %#x", ptr)
        self._mem_pool.free_all()
        self._settings = self._place = self._mem_pool_left = None
        return code

    def health_check(self) -> int:
        """Returns 0 when the master answers, 1 when the store is not set up, 2 when the master does not
        answer."""
        state = self._native.health()
        if state == _NO_ANSWER:
            self._log_code("health_check", state, 1, 1, self._native.last_error())
        return state

    def get_hostname(self) -> str:
        """The store's name, `host:port`; empty while it is not set up.

        As `ReplicateConfig.preferred_segment` it selects the segment of this store.
        """
        return self._place.hostname if self._place else ""

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Registers memory for repeated puts and gets. Returns 0, or -600.

        Keep the memory until it is unregistered or the store is closed. Registering is optional.
        """
        code = self._said("register_buffer", self._native.register(buffer_ptr, size))
        if code == _codes.OK:
            self._registered[buffer_ptr] = size
        return code

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Ends a registration once no transfer uses the memory. Returns 0, or -600 for an unknown address."""
        code = self._said("unregister_buffer", self._native.unregister(buffer_ptr))
        if code == _codes.OK:
            self._registered.pop(buffer_ptr, None)
        return code

    def alloc_from_mem_pool(self, size: int) -> int:
        """Returns the address of `size` new registered bytes, valid until the store is closed; 0 on failure."""
        if not isinstance(size, int):
            raise TypeError(f"size must be an int, not {type(size).__name__}")
        if not self._native.is_set_up():
            self._refuse("alloc_from_mem_pool", NOT_SET_UP)
            return 0
        left = self._mem_pool_left
        if left is not None and size > left:
            log.error("alloc_from_mem_pool: %d bytes are left, not %d", left, size)
            return 0
        address = self._mem_pool.alloc(size)
        if address and self.register_buffer(address, size) != _codes.OK:
            self._mem_pool.free(address)
            return 0
        if address and left is not None:
            self._mem_pool_left = left - size
        return address

    def _hostname(self) -> str:
        return self.get_hostname()


@atexit.register
def _close_all() -> None:
    for store in still_open(_open):
        name = store.get_hostname()
        log.info("%s is closed, because the process ends", name)
        try:
            store.close()
        except Exception as error:
            log.error("%s is not closed: %s", name, error)
