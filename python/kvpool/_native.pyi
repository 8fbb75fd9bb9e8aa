import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Literal, Protocol, Self, SupportsIndex, TypeAlias, TypedDict

from typing_extensions import Buffer

from kvpool._native_bases import (
    BufferHandle as BufferHandle,
    HandoffBootstrap as HandoffBootstrap,
    HandoffReceiving as HandoffReceiving,
    HandoffSending as HandoffSending,
    HandoffSession as HandoffSession,
    ObjectStore as ObjectStore,
    PeerEngine as PeerEngine,
    handoff_aux_layout as handoff_aux_layout,
    is_host_memory as is_host_memory,
)
from kvpool.errors import Error

__version__: str

class Tensor(Protocol):
    """A torch tensor, contiguous, on the CPU or a CUDA device."""

    def data_ptr(self) -> int: ...
    def is_contiguous(self) -> bool: ...
    def numel(self) -> int: ...
    def element_size(self) -> int: ...

class CudaArray(Protocol):
    """A GPU array of CuPy, Numba and others, contiguous."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]: ...

class _Latency(TypedDict):
    count: int
    seconds: float
    buckets: list[tuple[float | None, int]]

Key: TypeAlias = str | bytes
Memory: TypeAlias = Buffer | Tensor | CudaArray | tuple[SupportsIndex, SupportsIndex]
Block: TypeAlias = Memory | Sequence[Memory]
WritableBlock: TypeAlias = Block
_Bools: TypeAlias = list[bool]
_BoolsOrErrors: TypeAlias = list[bool | Error]
_Descriptions: TypeAlias = list[Description | None]
_ReplicaTasks: TypeAlias = list[ReplicaTask]
_NamespaceInfos: TypeAlias = list[NamespaceInfo]

def chain_keys(
    namespace: Namespace, block_tokens: int, tokens: Sequence[SupportsIndex] | Buffer
) -> list[bytes]:
    """Returns the keys of all full blocks of `tokens`, `block_tokens` tokens each. A key is a digest of 32
    bytes that depends on the block's tokens and on all tokens before it.

    `tokens`: a sequence of ints from 0 to 2**32 - 1, or a buffer of ints, such as a numpy array. A uint32
    buffer is read in place; other integer types of 32 or 64 bits are converted. Tokens after the last full
    block have no key.

    Raises InvalidArgumentError (a ValueError) for a token out of range or `block_tokens` below 1, and
    TypeError for any other type.
    """

class Namespace:
    """A namespace: its name, and the fields from which the keys of its chains are derived.

    Pools with equal names of namespaces see each other's blocks. Chains of `chain_keys` have equal keys when
    the other four fields are equal. A name is up to 255 bytes of `A-Z a-z 0-9 . _ / : @ -`; an empty name
    means "default". The other fields are any text of up to 1 KiB. Another name or a longer text raises
    InvalidArgumentError.
    """

    def __new__(
        cls,
        name: str = "",
        *,
        model: str = "",
        dtype: str = "",
        parallel_rank: str = "",
        salt: str = "",
    ) -> Self: ...
    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def parallel_rank(self) -> str: ...
    @property
    def salt(self) -> str: ...
    @property
    def seed(self) -> bytes:
        """The digest from which the keys of the namespace's chains are derived: 32 bytes."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class Pool:
    """A connection to the pool. All threads of a process can share it.

    `Pool.connect` makes it; `close()` or a `with` statement closes it.

    Keys: a str of 1 byte to 1 KiB in UTF-8, or the 32 bytes of a digest (see `chain_keys`).

    Blocks: one buffer, or a sequence of buffers that hold the block's bytes in order. A buffer is one of:

    - an object with the buffer protocol (bytes, bytearray, memoryview, array, numpy), contiguous, and
      writable for gets;
    - a contiguous torch tensor on the CPU or a CUDA device;
    - an array with `__cuda_array_interface__`;
    - an `(address, length)` pair of ints, whose memory the caller keeps alive.

    No transfer touches a buffer after its call has returned. If a transfer still uses the memory 10 seconds after
    the call's timeout, the call raises MemoryInUseError. Bytes move without a further copy, except that a GPU's
    bytes pass through pinned host memory.

    Streams: for GPU memory a call waits for the work that torch's current stream, or the stream that an array
    names, has queued. These waits do not end by the timeout. The copies begin after the work of the default
    stream. An `(address, length)` pair names no stream: work on it in other streams must have ended. Work that
    is queued after the call sees the bytes. Pinned host memory is host memory: work on it must have ended.

    Batches: one result for each key, in order. A failed key has an Error in its place; the other keys are
    not affected. A wrong type raises TypeError before anything is done. Lists of different lengths, and options
    out of range, raise InvalidArgumentError before anything is done. A key named twice is served twice.

    Time: all times are in seconds, from 0 to 1,000,000. Every call that waits releases the interpreter's lock and
    ends by its timeout. On the main thread it runs signal handlers meanwhile. An exception from a handler, such as
    KeyboardInterrupt, ends the call, and a put may then be stored or not. With GPU memory, handlers run at
    the end of the call.

    Lifetime: a closed pool raises ClosedError. After a fork, the parent's pools raise ForkedError in the
    child. A child whose parent had pools open at the fork cannot connect either. Connect only after the
    fork, or start processes by spawn.
    """

    @staticmethod
    def connect(
        master: str | Sequence[str] | None = None,
        *,
        namespace: Namespace | None = None,
        transport: Literal["auto", "shm", "rdma", "tcp"] = "auto",
        token: str = "",
        token_file: str | os.PathLike[str] | None = None,
        timeout: float = 5.0,
        put_timeout: float | None = None,
        get_timeout: float | None = None,
        control_timeout: float | None = None,
        spin: float = 0.0,
        tls_ca: str | os.PathLike[str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_server_name: str | None = None,
    ) -> Pool:
        """Connects to the pool.

        `master`: `host:port`, `http://host:port` or `https://host:port`, or `etcd://host:port/cluster`. Give
        several masters as a text with commas or as a sequence. Any master of the pool is enough: the client
        finds and follows the leader. Default: the environment variable KVPOOL_MASTER, else
        `http://127.0.0.1:7070`.
        `namespace`: clients with equal names of namespaces share blocks; registered at connect.
        `transport`: "shm", "rdma" or "tcp" forces one transport. "auto" uses shared memory to nodes on the same
        host, else RDMA, else TCP.
        `token_file`: the file with the token, for a pool that requires one. The client reads the file again
        when it changes. Default: the environment variable KVPOOL_TOKEN_FILE. `token`: the token itself, instead
        of a file.
        `timeout`: the longest time for connecting, in seconds.
        `put_timeout`, `get_timeout`, `control_timeout`: timeouts in seconds of calls without a `timeout`
        argument. Defaults: put 10, get 5, all other calls 3.
        `spin`: seconds for which a call polls for the master's answer before it sleeps. Polling takes a
        whole core, so use it only where cores are idle.
        `tls_ca`, `tls_cert`, `tls_key`: PEM files. The authority verifies masters and nodes at https:// and
        tls:// addresses. The client presents the certificate and its key to them. Defaults: the environment
        variables KVPOOL_TLS_CA, KVPOOL_TLS_CERT, KVPOOL_TLS_KEY.
        `tls_server_name`: the name that every certificate must have, instead of the host in the address.
        Default: KVPOOL_TLS_SERVER_NAME.

        Raises ConnectError when no master accepts the client. Raises InvalidArgumentError for a malformed
        address, an option out of range, TLS files that cannot be used, and "rdma" on a host without RDMA.
        """

    def batch_put(
        self,
        keys: Sequence[Key],
        blocks: Sequence[Block],
        *,
        parents: Sequence[Key | None] | None = None,
        replicas: int = 1,
        preferred_node: str | Sequence[str] | None = None,
        prefer_same_host: bool = False,
        soft_pin: float | None = None,
        hard_pin: bool = False,
        upsert: bool = False,
        timeout: float | None = None,
    ) -> list[bool | Error]:
        """Puts blocks, one for each key. Returns one result for each key:

        - True: the block is stored;
        - False: the key was present, and its block is unchanged;
        - an Error: the put failed.

        `parents`: for each key the key before it in its chain, or None. The master links a block to its parent
        if the parent is present at commit.
        `replicas`: the number of replicas, 1 to 64, each on another node. With too few nodes there are fewer
        replicas; `describe` shows them.
        `preferred_node`: the name of the node to try first, or several names in order. `prefer_same_host`: try
        nodes on this host next.
        `soft_pin`: seconds for which the blocks are evicted after all others. `hard_pin`: never evict the
        blocks.
        `upsert`: write a new version of blocks that are present; the result is True. Of several blocks with one
        key the last is written.
        `timeout`: seconds for the whole call, including the wait for room in a full pool.
        """

    def put(
        self,
        key: Key,
        block: Block,
        *,
        parent: Key | None = None,
        replicas: int = 1,
        preferred_node: str | Sequence[str] | None = None,
        prefer_same_host: bool = False,
        soft_pin: float | None = None,
        hard_pin: bool = False,
        upsert: bool = False,
        timeout: float | None = None,
    ) -> bool:
        """Puts one block, as `batch_put` does. Returns True if the block is stored, False if the key was present.
        Raises an Error if the put failed, for example FullError when no room came free within the timeout.
        """

    def batch_get(
        self,
        keys: Sequence[Key],
        into: Sequence[WritableBlock],
        *,
        timeout: float | None = None,
        release: bool = False,
    ) -> list[int | None | Error]:
        """Gets blocks, each into the memory at its index in `into`. Returns one result for each key:

        - the block's length in bytes;
        - None: a miss, the pool does not have the block;
        - an Error: the get failed.

        The memory must be at least as long as the block; bytes after the block's end do not change. The bytes
        are verified against the checksum of the writer. Without a hit the content of the memory is undefined.
        The buffers of one block must not overlap. If those of different blocks do, the shared bytes are undefined.

        `timeout`: seconds for the whole call.
        `release`: wait until the master has ended the call's leases, and cache no locations. Otherwise the
        leases end shortly after the call.
        """

    def get(self, key: Key, *, timeout: float | None = None) -> bytes | None:
        """Gets one block as bytes; None for a miss. Raises InvalidArgumentError for an invalid key, and an Error if the
        get failed.
        """

    def get_range(
        self, key: Key, offset: int, length: int, *, timeout: float | None = None
    ) -> bytes | None:
        """Gets `length` bytes of a block, starting at byte `offset`; None for a miss. Moves and verifies only the
        64 KiB chunks of the range. Raises InvalidArgumentError for a range outside the block, and an Error if
        the get failed.
        """

    def is_exist(self, keys: Sequence[Key], *, lease: bool = True) -> _Bools:
        """Returns one bool for each key, in order: whether the pool has the block. Found blocks are leased
        (`limits.lease_ttl` seconds at most) and count as used; with `lease=False` neither happens.
        Raises InvalidArgumentError for an invalid key, and an Error when the master cannot be asked.
        """

    def match_prefix(self, keys: Sequence[Key], *, lease: bool = True) -> Prefix:
        """Returns a `Prefix`: the number of leading blocks of a chain that the pool has, with a lease on them.
        Takes one round trip. With `lease=False` nothing is leased. Raises as `is_exist` does.
        """

    def get_view(
        self, key: Key, *, verify: bool = True, timeout: float | None = None
    ) -> View | None:
        """Returns a block in place, without a copy, from a replica in shared memory on this host; None for a miss.
        `verify=False` skips the comparison with the checksum. Raises an Error if the call failed, or if no
        replica of the block is in shared memory on this host.
        """

    def register_buffer(self, memory: Memory) -> Registration:
        """Registers memory with the RDMA ports of this host, for buffers of repeated puts and gets.
        `memory`: a writable buffer, a tensor, an array with `__cuda_array_interface__`, or an `(address, length)` pair.
        Without RDMA this has no effect. Raises InvalidArgumentError for memory that cannot be registered or is already
        registered, and TypeError for another object.
        """

    def remove(self, keys: Sequence[Key], *, force: bool = False) -> _BoolsOrErrors:
        """Removes blocks. Returns one result for each key:

        - True: the block is removed;
        - False: the block was absent;
        - an Error: the block was kept, for example LeasedError when a lease or a pin protects it.

        `force` removes leased and pinned blocks too. If the master's answer is lost, the block may be present
        or not. The client does not repeat a removal, because the repetition could remove a newer block. Raises
        an Error when the master answers for no key at all.
        """

    def remove_matching(self, regex: str, *, force: bool = False) -> tuple[int, int]:
        """Removes every block of the namespace whose key matches a regular expression. Returns `(removed, kept)`.
        Without `force`, leased and pinned blocks are kept. Raises InvalidArgumentError for an invalid
        expression, and an Error when the master cannot be asked.
        """

    def remove_all(self, *, force: bool = False) -> tuple[int, int]:
        """Removes every block of the namespace. Returns `(removed, kept)`, as `remove_matching` does."""

    # From here on `list` is this method, so return types of later methods have aliases.
    def list(self, regex: str = "") -> Listing:
        """Returns an iterator of `Listed` over the blocks of the namespace whose keys match a regular expression;
        an empty expression matches all. The client fetches a page at a time and leases nothing. Blocks that
        are put or removed meanwhile may be listed or not. The iteration raises an Error when the master cannot be
        asked.
        """

    def describe(self, keys: Sequence[Key]) -> _Descriptions:
        """Returns a `Description` for each key, None for a miss. Leases nothing. Raises as `is_exist` does."""

    def change_replicas(
        self,
        change: Literal["copy", "move", "drop"],
        keys: Sequence[Key] | None = None,
        *,
        regex: str | None = None,
        source: str | None = None,
        to: Sequence[str] = (),
        evict: bool = False,
        only_on_media: bool = False,
    ) -> ReplicaTask:
        """Begins a task that copies, moves or drops replicas, and returns its `ReplicaTask` at once. Bytes move
        from node to node and are verified.

        `change`: 'copy' gives each block one more replica for each node of `to`; 'move' moves a replica to
        another node; 'drop' drops the replica on the node `source`. The last readable replica stays.
        The blocks are one of: these `keys`; the blocks whose keys contain a match of `regex`; without both,
        every block of every namespace that has a replica on `source`. With `only_on_media`, every block that only
        the media of `source` hold: a move with `evict` and without `to`, off a node that `drain_node` takes out of
        service. An older master refuses it with InvalidArgumentError.
        `to`: names of nodes; empty for the node with the most free room.
        `evict`: a full target evicts blocks that were used earlier. Without it, a full target fails.

        Raises InvalidArgumentError for arguments that contradict each other. Raises an Error with the code `missing`
        for an unknown node, and `too_many_held` while too many tasks run. With `only_on_media`, a node that does not
        drain is `not_draining`. After another Error the task may have begun: see `replica_tasks`.
        """

    def drain_node(self, name: str, *, force: bool = False, media: bool = False) -> ReplicaTask:
        """Takes a store node out of service. The node gets no new blocks, and a task moves its blocks to other
        nodes. The most recently used block moves first. Full targets evict blocks that were used earlier.
        Returns the `ReplicaTask`. The node may stop once its state in `stats` is `drained`. A repeated call
        moves the remaining blocks, or begins the drain again if it was cancelled.

        With `media`, the node's media do not come back, and the node is `drained` only once no block is left on them
        alone. When the task has ended, call `change_replicas("move", source=name, evict=True, only_on_media=True)`.
        Repeat it until a task changes nothing more. A repeated call without `media` says that they come back.

        Raises an Error with the code `missing` for an unknown node. Without `force`, raises an Error with the
        code `last_node` if no other node can take the blocks that would leave with this node.
        """

    def undrain_node(self, name: str) -> bool:
        """Takes a store node back into service after `drain_node`. Blocks that have moved stay where they are.
        Returns whether the node was draining, and True after an attempt whose answer was lost. Raises an Error
        with the code `missing` for an unknown node, `node_stops` for a node that stops, and `node_unheard` for a
        node that does not answer.
        """

    def replica_tasks(self, ids: Sequence[int] = ()) -> _ReplicaTasks:
        """Returns the tasks with these ids that the leader knows; without ids every task. Raises an Error when
        the master cannot be asked.
        """

    def cancel_replica_tasks(self, ids: Sequence[int]) -> _ReplicaTasks:
        """Ends tasks. Returns the tasks that the leader knows. Transfers in progress still end on their own.
        Raises InvalidArgumentError without an id.
        """

    def wait_replica_task(self, id: int, timeout: float) -> ReplicaTask | None:
        """Waits until a task has ended, for at most `timeout` seconds, and returns its state at that time. Returns
        None if the leader does not know the task: another leader began, and the task ended with its own leader.
        """

    def create_namespace(self, namespace: Namespace, settings: Mapping[str, int] = {}) -> bool:
        """Creates a namespace with settings, and returns True. If a namespace with the same fields exists, it
        keeps its own settings, and the result is False.

        `settings`: dict of a setting's name and its value, an int. In bytes: `memory_soft`, `memory_hard`,
        `media_hard`, `guaranteed`, `bytes_per_second`. In blocks: `blocks_soft`, `blocks_hard`. Others:
        `priority` (0 to 9), `requests_per_second`. docs/operations/tenancy.md describes each setting.

        Raises InvalidArgumentError for settings that contradict each other, and for a name that exists with
        other fields or, when `settings` are given, with other settings.
        """

    def change_namespace(self, name: str, settings: Mapping[str, int | None]) -> NamespaceInfo:
        """Changes settings of a namespace, durably, and returns its `NamespaceInfo`. The value None ends a
        setting. Other settings stay unchanged.

        Raises an Error with the code `unknown_namespace`, and InvalidArgumentError for settings that contradict
        each other. A refused change changes nothing.
        """

    def delete_namespace(self, name: str, *, blocks: bool = False) -> int:
        """Deletes a namespace. With `blocks`, also removes its blocks, despite leases and pins. Returns the number
        of these blocks.

        Raises an Error with the code `namespace_in_use` if the namespace has blocks or open puts and `blocks`
        is False. Raises an Error with the code `unknown_namespace` for an unknown name.
        """

    def namespace(self, name: str) -> NamespaceInfo:
        """Returns the `NamespaceInfo` of one namespace. Raises an Error with the code `unknown_namespace` for an
        unknown name.
        """

    def namespaces(self) -> _NamespaceInfos:
        """Returns the `NamespaceInfo` of every namespace, sorted by name. With tokens the call needs the role
        operator, or admin in every namespace. Another role raises an Error with the code `forbidden`.
        """

    def stats(self) -> Stats:
        """Returns the master's counts of blocks, bytes, nodes and segments. Raises an Error when the master
        cannot be asked.
        """

    def counters(self) -> dict[str, int]:
        """Returns the counters of this connection by name: hits, misses, bytes moved by each transport."""

    def latencies(self) -> dict[str, _Latency]:
        """Returns the latencies of this connection by operation. Each is a dict with `count`, `seconds` (their
        sum), and `buckets`: a list of (upper end in seconds or None, count of the bucket).

        `get` and `put` are whole batches. `read_` and `write_` with a transport are transfers with one store
        node. Capitalized names are calls to the master. An operation that never ran has no entry.
        """

    @property
    def limits(self) -> Limits:
        """The pool's limits, agreed at connect and again with each new leader."""

    @property
    def closed(self) -> bool:
        """Whether the pool is closed."""

    def close(self) -> None:
        """Closes the connection. Calls in progress continue to their end; later calls raise ClosedError. Views
        stay valid. A second close has no effect.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

class Prefix:
    """The leading blocks of a chain that are present: their number `blocks`, and the `lease` on them.

    A `with` statement releases the lease at the end.
    """

    @property
    def blocks(self) -> int: ...
    @property
    def lease(self) -> Lease: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

class Lease:
    """A lease: while it runs, the master does not evict its blocks.

    A `with` statement releases it at the end; otherwise it expires. `len()` is the number of its keys.
    """

    def renew(self) -> int:
        """Extends the lease by the master's full lease TTL. Returns the number of blocks that left the lease because
        their lease had expired. Raises ClosedError if the lease was released, if the pool is closed, or if another
        thread renews the lease. A release during the renewal raises ClosedError too. Raises an Error when the
        master cannot be asked; the lease then continues unchanged.
        """

    def release(self) -> None:
        """Ends the lease, so that its blocks may be evicted. A second release has no effect. During a renewal in
        another thread, that thread releases the lease. Raises an Error when the master cannot be told, and
        ClosedError for a closed pool; the lease then expires.
        """

    @property
    def left(self) -> float:
        """Seconds until the first of the lease's blocks may be evicted; 0 after that."""

    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

class View(Buffer):
    """A block in place, read-only and without a copy: a buffer for `memoryview`, `bytes` and
    `numpy.frombuffer`.

    The node keeps the block's memory as long as the view exists, also after the block is removed or the
    pool is closed. So release views soon. A view ends with `release()`, at the end of a `with` statement,
    or when it is garbage. After a fork the memory is not mapped in the child: do not read buffers of the
    view there.
    """

    @property
    def version(self) -> int:
        """The version of the block: it grows with each put of the key."""

    @property
    def released(self) -> bool:
        """Whether the view is released."""

    def release(self) -> None:
        """Releases the memory. A second call has no effect. Raises BufferError while a memoryview or an array
        of the view exists.
        """

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

class Registration:
    """Memory that is registered with the RDMA ports of this host, so that no call must register it again.

    Without RDMA it has no effect. It ends with `unregister()`, at the end of a `with` statement, or when
    it is garbage. The object that owns the memory stays alive until then.
    """

    @property
    def address(self) -> int:
        """The address of the memory."""

    def unregister(self) -> None:
        """Ends the registration when no transfer uses the memory any more, for every thread that calls it.
        Afterwards it has no effect.
        """

    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

class Listing(Iterator[Listed]):
    """An iterator of `Listed` over the blocks of a namespace, fetched page by page. `Pool.list` makes it. Raises
    ClosedError once the pool is closed, and an Error when the master cannot be asked.
    """

    def __iter__(self) -> Self: ...
    def __next__(self) -> Listed: ...

class Listed:
    """One block of a listing. `key`: as text. `length`: bytes. `replicas`: their number. `leased`, `pinned`:
    whether a lease or a pin protects the block.
    """

    @property
    def key(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def replicas(self) -> int: ...
    @property
    def leased(self) -> bool: ...
    @property
    def pinned(self) -> bool: ...

class Description:
    """The master's description of one block.

    `length`: bytes. `checksum`: the CRC-64 of the block's bytes. `version`: grows with each put of the key.
    `replicas`: list of `Replica`, in memory and on SSDs. `lease_left`, `soft_pin_left`: seconds, 0 without a
    lease or soft pin. `hard_pin`: whether the block is never evicted.
    """

    @property
    def length(self) -> int: ...
    @property
    def checksum(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def replicas(self) -> list[Replica]: ...
    @property
    def lease_left(self) -> float: ...
    @property
    def soft_pin_left(self) -> float: ...
    @property
    def hard_pin(self) -> bool: ...

class Replica:
    """One replica of a block. `node`: name of the store node. `segment`: id of the segment. `offset`: bytes from
    the segment's start. `state` of a replica in memory: the state of its node (live, suspect, draining or
    drained), or hidden while the replica is verified again. `state` of a copy on an SSD: the state of its
    medium (ready, read_only, slow, gone, attaching, absent or refused).
    """

    @property
    def node(self) -> str: ...
    @property
    def segment(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def state(self) -> str: ...

class NamespaceInfo:
    """A namespace with its settings and use.

    `name`, `model`, `dtype`, `parallel_rank`, `salt`: as the creator of the namespace gave them.
    `settings`: dict of the namespace's settings by name; see `Pool.create_namespace`.
    `memory`: bytes of its blocks and open puts. `media`: bytes of its copies on SSD, with their headers.
    `blocks`: its blocks in memory. `copies`: its copies on SSD. `open_puts`: its puts that have not ended.
    """

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def parallel_rank(self) -> str: ...
    @property
    def salt(self) -> str: ...
    @property
    def settings(self) -> dict[str, int]: ...
    @property
    def memory(self) -> int: ...
    @property
    def media(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def copies(self) -> int: ...
    @property
    def open_puts(self) -> int: ...

class ReplicaTask:
    """A task that copies, moves or drops replicas. The leader keeps the task in memory, so the next leader does
    not know it.

    `id`: int. `change`: copy, move or drop. `state`: running, done, failed or cancelled.
    `blocks`: the blocks of the task, each counted once for each target. `changed`: blocks with the requested
    change. `gone`: blocks that left meanwhile, or needed no change. `failed`: blocks without the change.
    `bytes`: bytes that arrived at their targets. `failure`: the last Error of a block, or None; for a
    cancelled task the reason for which its blocks last waited.
    `age`, `idle`: seconds since the task began, and since its last change.
    `source`: the node whose replicas move or are dropped, empty for any. `to`: the target nodes, empty for
    the nodes with the most free room.
    """

    @property
    def id(self) -> int: ...
    @property
    def change(self) -> Literal["copy", "move", "drop"]: ...
    @property
    def state(self) -> Literal["running", "done", "failed", "cancelled"]: ...
    @property
    def blocks(self) -> int: ...
    @property
    def changed(self) -> int: ...
    @property
    def gone(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def failure(self) -> Error | None: ...
    @property
    def age(self) -> float: ...
    @property
    def idle(self) -> float: ...
    @property
    def source(self) -> str: ...
    @property
    def to(self) -> list[str]: ...

class Limits:
    """The pool's limits. `max_block`: the largest block, in bytes. `max_batch_keys`: the most keys in one message;
    the client splits larger batches. `lease_ttl`: how long the master leases found blocks, in seconds.
    """

    @property
    def max_block(self) -> int: ...
    @property
    def max_batch_keys(self) -> int: ...
    @property
    def lease_ttl(self) -> float: ...

class Stats:
    """The master's counts. `epoch`: the term. `blocks`: the visible blocks. `reservations`: the puts that have not
    ended.

    `capacity`: bytes of memory that the store nodes contribute. `used`: bytes of blocks, open puts and quarantine.
    `quarantine`: bytes of removed blocks that cannot be given out yet. `nodes`: list of `Node`. `uptime`: seconds.
    `counters`: the master's counters by name. `namespaces`: the names of the known namespaces.
    With tokens, the roles reader and writer see only the term, the uptime and their namespaces. The rest is 0
    or empty.
    """

    @property
    def epoch(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def reservations(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def quarantine(self) -> int: ...
    @property
    def nodes(self) -> list[Node]: ...
    @property
    def counters(self) -> dict[str, int]: ...
    @property
    def uptime(self) -> float: ...
    @property
    def namespaces(self) -> list[str]: ...

class Node:
    """A store node. `state`: live, suspect, draining or drained (it may stop). `incarnation`: text, new after each
    restart of the node. `data_address`: the data port, host:port. `heartbeat_age`: seconds since the last
    heartbeat. `segments`: list of `Segment`. `version`: of kvpool; empty if unknown.
    """

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def data_address(self) -> str: ...
    @property
    def heartbeat_age(self) -> float: ...
    @property
    def segments(self) -> list[Segment]: ...
    @property
    def version(self) -> str: ...

class Segment:
    """A segment of a store node. `id`: int. `capacity`, `used`, `quarantine`, `largest_free`: bytes. `free_ranges`: the
    number of separate free ranges.
    """

    @property
    def id(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def quarantine(self) -> int: ...
    @property
    def free_ranges(self) -> int: ...
    @property
    def largest_free(self) -> int: ...

class MemoryUse:
    """Memory of a call that has ended, and that a transfer may still use."""

    def has_ended(self, timeout: float) -> bool:
        """Whether no transfer uses the memory any more. Waits for it, for `timeout` seconds at most."""
