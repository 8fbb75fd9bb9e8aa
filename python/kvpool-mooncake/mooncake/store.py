"""`mooncake.store` over kvpool: the same names, arguments and return values.

```python
store = MooncakeDistributedStore()
assert store.setup("10.0.0.2", "P2PHANDSHAKE", "1GB", "16MB", "tcp", "", "10.0.0.1:50051") == 0
assert store.put("key", b"value") == 0
assert store.get("key") == b"value"
```

Methods that return ints return 0, a count or a length, or a negative code. The code -600 also means that the
store is not set up or is closed. Methods that return data return `b""` or `None` for a miss or an error. The
logger `mooncake` warns of errors, not of misses. A wrong type raises TypeError. The use of a store in a child
made by fork raises RuntimeError. Sizes are in bytes.
"""

from __future__ import annotations

from kvpool._native import BufferHandle
from mooncake._aio import AsyncForms as _AsyncForms
from mooncake._buffer_pool import BufferLease, BufferLeaseView, BufferPool
from mooncake._cuda_tensors import CudaTensorMethods as _CudaTensorMethods
from mooncake._descriptors import Descriptor, DiskDescriptor, MemoryDescriptor, ReplicaDescriptor, ReplicaStatus
from mooncake._engram import EngramStore, EngramStoreConfig
from mooncake._memory import MooncakeHostMemAllocator, bind_to_numa_node, get_alloc_func_addr, get_free_func_addr
from mooncake._nof import MooncakeDistributedNoFRegister
from mooncake._objects import ObjectMethods as _ObjectMethods
from mooncake._parallel_read import ParallelReadMethods as _ParallelReadMethods
from mooncake._parallel_types import ParallelAxis, ReadTarget, TensorParallelism
from mooncake._ranges import RangeMethods as _RangeMethods
from mooncake._replicas import ReplicaMethods as _ReplicaMethods
from mooncake._safetensors import SafetensorMethods as _SafetensorMethods
from mooncake._setup import SetupMethods as _SetupMethods
from mooncake._tasks import QueryTaskResponse, TaskMethods as _TaskMethods, TaskStatus, TaskType
from mooncake._tensors_tp import TensorTpMethods as _TensorTpMethods
from mooncake._types import ObjectDataType, ReplicateConfig, SoftPinAction

__all__ = [
    "ACTIVATION",
    "BufferHandle",
    "BufferLease",
    "BufferLeaseView",
    "BufferPool",
    "COMPLETE",
    "Descriptor",
    "DiskDescriptor",
    "EngramStore",
    "EngramStoreConfig",
    "FAILED",
    "GENERAL",
    "GRADIENT",
    "INITIALIZED",
    "KVCACHE",
    "METADATA",
    "MemoryDescriptor",
    "MooncakeDistributedNoFRegister",
    "MooncakeDistributedStore",
    "MooncakeDistributedStoreAsync",
    "MooncakeHostMemAllocator",
    "OPTIMIZER_STATE",
    "ObjectDataType",
    "PENDING",
    "PROCESSING",
    "ParallelAxis",
    "QueryTaskResponse",
    "REMOVED",
    "REPLICA_COPY",
    "REPLICA_MOVE",
    "ReadTarget",
    "RegisteredBufferLease",
    "RegisteredBufferLeaseView",
    "RegisteredBufferPool",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SAMPLE",
    "SUCCESS",
    "SoftPinAction",
    "TENSOR",
    "TaskStatus",
    "TaskType",
    "TensorParallelism",
    "UNDEFINED",
    "UNKNOWN",
    "WEIGHT",
    "bind_to_numa_node",
    "get_alloc_func_addr",
    "get_free_func_addr",
]

# The original has these classes under other names too.
RegisteredBufferPool = BufferPool
RegisteredBufferLease = BufferLease
RegisteredBufferLeaseView = BufferLeaseView

# The original also has the members of its enumerations in the module. `FAILED` and `PROCESSING` are states of a
# task.
UNKNOWN = ObjectDataType.UNKNOWN
KVCACHE = ObjectDataType.KVCACHE
TENSOR = ObjectDataType.TENSOR
WEIGHT = ObjectDataType.WEIGHT
SAMPLE = ObjectDataType.SAMPLE
ACTIVATION = ObjectDataType.ACTIVATION
GRADIENT = ObjectDataType.GRADIENT
OPTIMIZER_STATE = ObjectDataType.OPTIMIZER_STATE
METADATA = ObjectDataType.METADATA
GENERAL = ObjectDataType.GENERAL
UNDEFINED = ReplicaStatus.UNDEFINED
INITIALIZED = ReplicaStatus.INITIALIZED
COMPLETE = ReplicaStatus.COMPLETE
REMOVED = ReplicaStatus.REMOVED
PENDING = TaskStatus.PENDING
PROCESSING = TaskStatus.PROCESSING
SUCCESS = TaskStatus.SUCCESS
FAILED = TaskStatus.FAILED
REPLICA_COPY = TaskType.REPLICA_COPY
REPLICA_MOVE = TaskType.REPLICA_MOVE


class MooncakeDistributedStore(
    _SetupMethods,
    _ObjectMethods,
    _RangeMethods,
    _ReplicaMethods,
    _TaskMethods,
    _CudaTensorMethods,
    _SafetensorMethods,
    _TensorTpMethods,
    _ParallelReadMethods,
):
    """A client of the pool. With a segment it is also a store node. Threads may share it."""


class MooncakeDistributedStoreAsync(_AsyncForms, MooncakeDistributedStore):
    """A store with an awaitable `async_NAME` for every method NAME."""


del annotations
