"""Bundles of named buffers, structured objects, and tables, over a store.

A *bundle* is metadata and named buffers, each cut into objects of bounded size. A *structured object* is a
bundle of arrays, tensors and bytes that are restored with their types. A *table* has columns of one length:
arrays, tensors, or Python values. It is written in stages, and read by column and row. The module needs numpy.
Columns of mixed Python values need msgpack (the extra `structured` of the wheel).
"""

from __future__ import annotations

from typing import Any

from mooncake._structured.members import RawDestination as _RawDestination
from mooncake._structured.members import TensorObject as _TensorObject
from mooncake._structured.tables import (
    DATAPROTO_REF_HANDLE_TYPE,
    DATAPROTO_REF_HANDLE_VERSION,
    DataProtoRefLike,
    MooncakeDataProtoRef,
    export_dataproto_ref,
    import_dataproto_ref,
    is_dataproto_ref_handle,
)
from mooncake._structured.transfer import MooncakeBundleTransfer
from mooncake._structured.types import (
    AUTO_PARALLEL_MIN_BYTES,
    AUTO_PARALLEL_MIN_CHUNKS,
    DEFAULT_BUNDLE_CHUNK_BYTES,
    MISSING,
    MISSING_OBJECT_ERROR,
    STORAGE_GROUP_ID,
    STRUCTURED_FIELD_SPECS_KEY,
    BundleStore,
    BundleTransferPolicy,
    FieldSchema,
    RemoteBundleRef,
    StructuredFieldLocation,
    StructuredMemberSlice,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
)

__all__ = [
    "AUTO_PARALLEL_MIN_BYTES",
    "AUTO_PARALLEL_MIN_CHUNKS",
    "DATAPROTO_REF_HANDLE_TYPE",
    "DATAPROTO_REF_HANDLE_VERSION",
    "DEFAULT_BUNDLE_CHUNK_BYTES",
    "MISSING",
    "MISSING_OBJECT_ERROR",
    "STORAGE_GROUP_ID",
    "STRUCTURED_FIELD_SPECS_KEY",
    "BundleStore",
    "BundleTransferPolicy",
    "DataProtoRefLike",
    "FieldSchema",
    "MooncakeBundleTransfer",
    "MooncakeDataProtoRef",
    "RemoteBundleRef",
    "StructuredFieldLocation",
    "StructuredMemberSlice",
    "StructuredObjectPayload",
    "StructuredObjectReadSpec",
    "StructuredObjectResult",
    "export_dataproto_ref",
    "export_ref",
    "import_dataproto_ref",
    "import_ref",
    "is_dataproto_ref_handle",
    "raw_destination",
    "tensor_object_buffer",
]

export_ref = export_dataproto_ref
import_ref = import_dataproto_ref


def raw_destination(ptr: int, size: int, owner: Any = None, *, pre_registered: bool = False) -> _RawDestination:
    """Returns a destination of `size` bytes in host memory, for a column or a member.

    The result keeps `owner` alive. Registering the memory is optional. The read raises ValueError for GPU
    memory.
    """
    return _RawDestination(int(ptr), int(size), owner, pre_registered)


def tensor_object_buffer(ptr: int, size: int, owner: Any = None, batch_size: int | None = None) -> _TensorObject:
    """Returns a tensor with its header in host memory, as a member. As a column of a table it needs
    `batch_size`, the number of its rows. The put raises ValueError for GPU memory."""
    return _TensorObject(int(ptr), int(size), owner, batch_size)
