"""`mooncake.store` over kvpool: the same names, arguments and return values.

```python
store = MooncakeDistributedStore()
assert store.setup("10.0.0.2", "P2PHANDSHAKE", "1GB", "16MB", "tcp", "", "10.0.0.1:50051") == 0
assert store.put("key", b"value") == 0
assert store.get("key") == b"value"
```

Methods that return ints return 0, a count or a length, or a negative code; -600 also means that the store
is not set up or is closed. Methods that return data return `b""` or `None` for a miss or an error. A wrong
type raises TypeError; the use of a store in a child made by fork raises RuntimeError. Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvpool._native import BufferHandle
from mooncake import _codes
from mooncake._aio import AsyncForms
from mooncake._base import log
from mooncake._buffer_pool import BufferPool, PooledBuffer
from mooncake._clients import announced_client
from mooncake._memory import MooncakeHostMemAllocator, bind_to_numa_node
from mooncake._offload import offload_medium
from mooncake._ranges import RangeMethods
from mooncake._segments import Mounted, SegmentMethods
from mooncake._settings import (
    PAGE,
    BadSetting,
    Place,
    Settings,
    find_place,
    node_name,
    parse_size,
    rdma_devices_here,
    read_settings,
)
from mooncake._tensors import TensorMethods
from mooncake._types import (
    BufferDescriptor,
    MemoryDescriptor,
    ObjectDataType,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    TaskStatus,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "BufferDescriptor",
    "BufferHandle",
    "BufferPool",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "MooncakeDistributedStoreAsync",
    "MooncakeHostMemAllocator",
    "Mounted",
    "ObjectDataType",
    "PooledBuffer",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "TaskStatus",
    "bind_to_numa_node",
]

# The parameters of `setup` that the positional and keyword forms must give.
_REQUIRED = (
    "local_hostname",
    "metadata_server",
    "global_segment_size",
    "local_buffer_size",
    "protocol",
    "rdma_devices",
    "master_server_addr",
)


class MooncakeDistributedStore(RangeMethods, SegmentMethods, TensorMethods):
    """A client of the pool; with a segment also a store node. Threads may share it."""

    def __init__(self) -> None:
        super().__init__()
        self._place: Place | None = None
        self._mem_pool = MooncakeHostMemAllocator()
        # What may yet be taken from the memory pool; `None`: no limit was set.
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

        Pass one dict with these names as keys, all optional, or the first seven parameters and any of
        the others. `master_server_address` and `device_name` are aliases of `master_server_addr` and
        `rdma_devices`. Sizes are numbers of bytes or text ("16MB", "4 GB"; units are powers of 1024).
        The master's address is `host:port`, `http://host:port`, or `etcd://host;host[/cluster]`.
        `tenant_id` is the namespace of all keys.

        `enable_ssd_offload` keeps blocks that leave the segment in a file of the directory `ssd_offload_path`
        (default: MOONCAKE_OFFLOAD_FILE_STORAGE_PATH, or /data/file_storage). Each store takes a file of its
        own, and a later one takes it again. MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES is the size of the file.
        Without it, a new file takes a tenth of the free room of the filesystem.

        Accepted without effect: `metadata_server`, `local_buffer_size`, `engine`,
        `enable_client_http_server`, `client_http_port`. `protocol` only enables `rdma_devices`: a store takes
        shared memory, RDMA or TCP, the first that reaches a node.

        Returns 0, or a code; the log has the reason. The code -600 means a bad value, a directory that cannot
        be used, or a store that is already set up. The codes -900 and -901 mean that no master answered
        within `connect_timeout_ms` (5000).
        """
        if isinstance(local_hostname, Mapping):
            config = local_hostname
        if config is not None:
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
        try:
            settings = read_settings(given)
            place = find_place(settings.host, settings.port)
            medium = self._medium(settings)
        except BadSetting as error:
            log.error("setup: %s", error)
            return _codes.PARAMETERS
        code = self._connect(settings)
        if code != _codes.OK:
            return code
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
            # Programs leave the setting in place where another process contributes the memory.
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
            # A name may say a port too: `mlx5_0:1`.
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
        if code != _codes.OK:
            log.error("setup: no connection to the master at %s: %s", ", ".join(settings.masters), reason)
        return code

    def setup_dummy(self, mem_pool_size: int | str, local_buffer_size: int | str, server_address: str) -> int:
        """Connects to the pool that a `mooncake_client` of this host belongs to.

        `server_address` is that client's `host:port`. If no client has announced this address, it is used
        as a master's address. `alloc_from_mem_pool` allocates at most `mem_pool_size` bytes in all.
        """
        if not isinstance(server_address, str):
            raise TypeError(f"server_address must be a str, not {type(server_address).__name__}")
        try:
            size = parse_size(mem_pool_size, "mem_pool_size")
            parse_size(local_buffer_size, "local_buffer_size")
        except BadSetting as error:
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

        Calls of other threads continue to their end. `close` waits at most 10 s for calls that use
        registered memory. With an SSD it first copies the segment's blocks there, for at most 30 s, so that a
        later store has them. The store can be set up again.
        """
        code, used = self._native.close()
        for ptr in used:
            self._mem_pool.keep(ptr)
        self._mem_pool.free_all()
        self._settings = self._place = self._mem_pool_left = None
        return code

    def health_check(self) -> int:
        """0 when the master answers, 1 when the store is not set up, 2 when the master does not answer."""
        return self._native.health()

    def get_hostname(self) -> str:
        """The store's name, `host:port`; empty while it is not set up.

        As `ReplicateConfig.preferred_segment` it selects the segment of this store.
        """
        return self._place.hostname if self._place else ""

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Registers memory for repeated puts and gets. Returns 0, or -600.

        Keep the memory until it is unregistered or the store is closed. Registering is optional.
        """
        return self._said("register_buffer", self._native.register(buffer_ptr, size))

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Ends a registration when no transfer uses the memory. Returns 0, or -600 for an unknown address."""
        return self._native.unregister(buffer_ptr)

    def alloc_from_mem_pool(self, size: int) -> int:
        """The address of `size` new registered bytes, valid until the store is closed; 0 on failure."""
        if not isinstance(size, int):
            raise TypeError(f"size must be an int, not {type(size).__name__}")
        if not self._native.is_set_up():
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

    def put(self, key: str, value: Buffer, config: ReplicateConfig | None = None) -> int:
        """Puts bytes. Returns 0, also if the key was present and keeps its bytes, or a code.

        -200: no room came free within the put's timeout.
        """
        return self._one(self._put_values("put", [key], [(value,)], config, False))

    def put_parts(self, key: str, *parts: Buffer, config: ReplicateConfig | None = None) -> int:
        """Puts several pieces of bytes, in order, as one object."""
        return self._one(self._put_values("put_parts", [key], [parts], config, False))

    def put_batch(
        self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig | None = None
    ) -> int:
        """Puts several objects. Returns 0, or the first code that is not 0."""
        parts = [(value,) for value in values]
        return self._first(self._put_values("put_batch", keys, parts, config, False))

    def upsert(self, key: str, value: Buffer, config: ReplicateConfig | None = None) -> int:
        """Puts bytes and replaces the key's object, completely or not at all."""
        return self._one(self._put_values("upsert", [key], [(value,)], config, True))

    def upsert_parts(self, key: str, *parts: Buffer, config: ReplicateConfig | None = None) -> int:
        """`put_parts` that replaces the key's object."""
        return self._one(self._put_values("upsert_parts", [key], [parts], config, True))

    def upsert_batch(
        self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig | None = None
    ) -> int:
        """`put_batch` that replaces the keys' objects."""
        parts = [(value,) for value in values]
        return self._first(self._put_values("upsert_batch", keys, parts, config, True))

    def _put_values(
        self,
        what: str,
        keys: Sequence[str],
        values: Sequence[Sequence[Buffer]],
        config: ReplicateConfig | None,
        upsert: bool,
    ) -> list[int]:
        how = self._how(config)
        if how is None:
            return self._refused(keys)
        return self._all_said(what, self._native.put_values(keys, values, how, upsert))

    @staticmethod
    def _first(codes: list[int]) -> int:
        return next((code for code in codes if code != _codes.OK), _codes.OK)

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Puts memory by its address."""
        return self._one(self.batch_put_from([key], [buffer_ptr], [size], config))

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """`put_from` that replaces the key's object."""
        return self._one(self.batch_upsert_from([key], [buffer_ptr], [size], config))

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Puts one range of memory for each key. Returns one code for each key."""
        how = self._how(config)
        if how is None:
            return self._refused(keys)
        return self._all_said("batch_put_from", self._native.put_from(keys, buffer_ptrs, sizes, how, False))

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """`batch_put_from` that replaces the keys' objects."""
        how = self._how(config)
        if how is None:
            return self._refused(keys)
        return self._all_said("batch_upsert_from", self._native.put_from(keys, buffer_ptrs, sizes, how, True))

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Puts several ranges of memory for each key, in order. Returns one code for each key."""
        how = self._how(config)
        if how is None:
            return self._refused(keys)
        answers = self._native.put_from_many(keys, all_buffer_ptrs, all_sizes, how, False)
        return self._all_said("batch_put_from_multi_buffers", answers)

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig | None = None,
    ) -> int:
        """Puts metadata and then data, each by its address, as one object."""
        pointers, sizes = [[metadata_buffer_ptr, buffer_ptr]], [[metadata_size, size]]
        return self._one(self.batch_put_from_multi_buffers([key], pointers, sizes, config))

    def get(self, key: str) -> bytes:
        """The bytes of a key; empty for a miss or an error."""
        return self._native.get_values([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """The bytes of each key; empty for a miss or an error."""
        return self._native.get_values(keys)

    def get_buffer(self, key: str) -> BufferHandle | None:
        """The bytes of a key, read-only: in place if a node on this host has them, else a copy.

        An object in place stays while the handle, or a memoryview of it, lives. `None` for a miss or an
        error.
        """
        return self._native.get_handle(key)

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """Copies of the bytes of each key; `None` for a miss or an error."""
        return self._native.get_handles(keys)

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Reads an object into memory. Returns its length, or a code; -600 if the memory is too small."""
        return self._one(self.batch_get_into([key], [buffer_ptr], [size]))

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """`get_into` for several keys. Returns lengths or codes."""
        return self._all_said("batch_get_into", self._native.get_into(keys, buffer_ptrs, sizes))

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Reads each object into several ranges of memory, in order. Returns lengths or codes."""
        answers = self._native.get_into_many(keys, all_buffer_ptrs, all_sizes)
        return self._all_said("batch_get_into_multi_buffers", answers)

    def get_size(self, key: str) -> int:
        """The length of an object in bytes, or a code; -704 when it is absent."""
        return self._native.size(key)

    def is_exist(self, key: str) -> int:
        """1 if the key is present, 0 if it is absent, or a code. A present key is leased."""
        return self._one(self._native.exist([key]))

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """`is_exist` for several keys, in one round trip."""
        return self._native.exist(keys)

    def remove(self, key: str, force: bool = False) -> int:
        """Removes an object. Returns 0; -704 if it is absent; -706 if it is leased or pinned, unless forced."""
        return self._one(self._native.remove([key], force))

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """`remove` for several keys."""
        return self._native.remove(keys, force)

    def remove_by_regex(self, pattern: str, force: bool = False) -> int:
        """Removes this tenant's objects whose keys match a pattern. Returns their number, or a code."""
        return self._said("remove_by_regex", self._native.remove_pattern(pattern, force))

    def remove_all(self, force: bool = False) -> int:
        """Removes this tenant's objects, leased and pinned ones only if forced. Returns their number."""
        return self._said("remove_all", self._native.remove_namespace(force))

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Removes objects that are neither leased nor pinned. Returns the removed keys.

        With a segment: only objects whose only replica is there. Single replicas are not removed.
        """
        keys = list(keys)
        if segment_name:
            name = node_name(segment_name)
            descriptors = self.batch_get_replica_desc(keys)
            keys = [key for key in keys if {replica.node for replica in descriptors.get(key, [])} == {name}]
        return [key for key, code in zip(keys, self._native.remove(keys, False)) if code == _codes.OK]

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """The replicas of an object; empty if it is absent."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """The replicas of objects, by key, without absent keys. Leases nothing."""
        keys = list(keys)
        code, described = self._native.describe(keys)
        self._said("batch_get_replica_desc", code)
        found: dict[str, list[ReplicaDescriptor]] = {}
        for key, block in zip(keys, described):
            if block is not None:
                length, replicas = block
                found[key] = [
                    ReplicaDescriptor(node, segment, offset, length, state)
                    for node, segment, offset, state in replicas
                ]
        return found


class MooncakeDistributedStoreAsync(AsyncForms, MooncakeDistributedStore):
    """A store with an awaitable `async_NAME` for every method NAME."""
