"""Tables: columns of arrays, columns of Python values, and metadata. All columns have the same length.

A table is written in stages, and each stage is a bundle. The table's reference lists the columns of each stage.
It travels between processes as a handle: a dictionary. JSON can express the handle if it can express the
table's metadata.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mooncake._structured import members
from mooncake._structured.types import (
    STORAGE_GROUP_ID,
    RemoteBundleRef,
    StructuredFieldLocation,
    StructuredMemberSlice,
    bundle_ref,
)

DATAPROTO_REF_HANDLE_TYPE = "mooncake_dataproto_ref"
DATAPROTO_REF_HANDLE_VERSION = 1
BATCH: Final = "batch"
NON_TENSOR: Final = "non_tensor_batch"


@dataclasses.dataclass
class MooncakeDataProtoRef:
    """A table in the store."""

    batch_size: int
    stage_refs: dict[str, RemoteBundleRef]
    field_index: dict[str, StructuredFieldLocation]
    meta_info: dict[str, Any]
    namespace: str = "default"
    partition: str = "default"
    global_indexes: list[int] | None = None
    encoded_non_tensor: dict[str, Any] = dataclasses.field(default_factory=dict)
    _storage_group_id: str | None = dataclasses.field(default=None, repr=False)


# A table's reference, as an object or as a handle.
DataProtoRefLike = MooncakeDataProtoRef | Mapping[str, Any]


def export_dataproto_ref(ref: MooncakeDataProtoRef) -> dict[str, Any]:
    """The handle of a table."""
    if not isinstance(ref, MooncakeDataProtoRef):
        raise TypeError(f"a handle is made of a MooncakeDataProtoRef, not of {type(ref).__name__}")
    return {
        "type": DATAPROTO_REF_HANDLE_TYPE,
        "version": DATAPROTO_REF_HANDLE_VERSION,
        "kind": "bundle_stages",
        "batch_size": ref.batch_size,
        "namespace": ref.namespace,
        "partition": ref.partition,
        "global_indexes": ref.global_indexes,
        "stage_refs": {stage: {"manifest_key": bundle.manifest_key} for stage, bundle in ref.stage_refs.items()},
        "field_index": {field: dataclasses.asdict(place) for field, place in ref.field_index.items()},
        "meta_info": dict(ref.meta_info),
        "encoded_non_tensor": dict(ref.encoded_non_tensor),
        STORAGE_GROUP_ID: ref._storage_group_id,
    }


def is_dataproto_ref_handle(value: Any) -> bool:
    """Whether a value is the handle of a table, in any version of the format."""
    return isinstance(value, Mapping) and value.get("type") == DATAPROTO_REF_HANDLE_TYPE


def import_dataproto_ref(handle: Mapping[str, Any]) -> MooncakeDataProtoRef:
    """Returns the table of a handle. Raises ValueError for any other value, and for another version."""
    if not is_dataproto_ref_handle(handle):
        raise ValueError("the value is no handle of a table")
    if handle.get("version") != DATAPROTO_REF_HANDLE_VERSION:
        raise ValueError(f"the handle has the version {handle.get('version')}, not {DATAPROTO_REF_HANDLE_VERSION}")
    try:
        return MooncakeDataProtoRef(
            batch_size=int(handle["batch_size"]),
            stage_refs={stage: bundle_ref(ref) for stage, ref in handle["stage_refs"].items()},
            field_index={field: StructuredFieldLocation(**place) for field, place in handle["field_index"].items()},
            meta_info=dict(handle["meta_info"]),
            namespace=handle["namespace"],
            partition=handle["partition"],
            global_indexes=handle.get("global_indexes"),
            encoded_non_tensor=dict(handle.get("encoded_non_tensor") or {}),
            _storage_group_id=handle.get(STORAGE_GROUP_ID),
        )
    except KeyError as missing:
        raise ValueError(f"the handle has no {missing}") from missing
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the handle is not as it was exported: {error}") from error


def table_ref(ref: DataProtoRefLike) -> MooncakeDataProtoRef:
    """Returns the reference from either form."""
    if isinstance(ref, MooncakeDataProtoRef):
        return ref
    if not isinstance(ref, Mapping):
        raise TypeError(f"a table is named by a MooncakeDataProtoRef or its handle, not by {type(ref).__name__}")
    return import_dataproto_ref(ref)


@dataclasses.dataclass
class Sections:
    """A caller's table: columns of arrays, columns of Python values, metadata, and the length of all
    columns."""

    batch: dict[str, Any]
    values: dict[str, Any]
    meta_info: dict[str, Any]
    rows: int


def sections(data: Any, kind: str) -> Sections:
    """Returns the sections of `data`. Kind "dataproto": an object or mapping with the sections. Kind "dict":
    columns."""
    if kind not in ("dataproto", "dict"):
        raise ValueError(f"the type {kind!r} is neither 'dataproto' nor 'dict'")
    if kind == "dict":
        if not isinstance(data, Mapping):
            raise TypeError(f"a 'dict' is a mapping of columns, not {type(data).__name__}")
        return _flat(data)
    names = (BATCH, NON_TENSOR, "meta_info")
    if isinstance(data, Mapping):
        if not any(isinstance(data.get(name), Mapping) for name in names):
            return _flat(data)
        given = [data.get(name) for name in names]
    elif any(hasattr(data, name) for name in names):
        given = [getattr(data, name, None) for name in names]
    else:
        raise TypeError(f"a {type(data).__name__} has neither columns nor the sections {', '.join(names)}")
    batch, values, meta_info = ({} if part is None else dict(part.items()) for part in given)
    both = sorted(set(batch) & set(values))
    if both:
        raise ValueError(f"the fields {both} are in {BATCH} and in {NON_TENSOR}")
    lengths = {_length(name, column) for name, column in [*batch.items(), *values.items()]}
    if len(lengths) > 1:
        raise ValueError(f"the columns have different lengths: {sorted(lengths)}")
    return Sections(batch, values, meta_info, lengths.pop() if lengths else 0)


def _flat(data: Mapping[str, Any]) -> Sections:
    """Sorts a mapping: arrays, tensors and lists of one length are columns. Every other value is metadata."""
    batch = {name: value for name, value in data.items() if _is_dense(value)}
    lengths = {len(value) for value in batch.values()}
    if not batch:
        lengths = {len(value) for value in data.values() if isinstance(value, (list, tuple))}
    if len(lengths) > 1:
        raise ValueError(f"the columns have different lengths: {sorted(lengths)}")
    rows = lengths.pop() if lengths else 0
    rest = {name: value for name, value in data.items() if name not in batch}
    values = {name: value for name, value in rest.items() if rows and _is_column(value, rows)}
    meta_info = {name: value for name, value in rest.items() if name not in values}
    return Sections(batch, values, meta_info, rows)


def _is_dense(value: Any) -> bool:
    if members.is_array(value):
        return bool(value.ndim) and not value.dtype.hasobject
    return members.is_tensor(value) and value.ndim > 0


def _is_column(value: Any, rows: int) -> bool:
    is_list = isinstance(value, (list, tuple)) or (members.is_array(value) and value.ndim == 1)
    return is_list and len(value) == rows


def _length(name: str, column: Any) -> int:
    if isinstance(column, members.TensorObject):
        if column.batch_size is None:
            raise TypeError(f"the tensor object of the column {name} has no batch_size")
        return column.batch_size
    try:
        return len(column)
    except TypeError:
        raise TypeError(f"the column {name} is a {type(column).__name__}, which has no rows") from None


def rows_of(wanted: Any, count: int) -> Sequence[int] | None:
    """Returns the numbers of the requested rows; `None` for all rows.

    Raises IndexError for an absent row, and TypeError for a row that is no integer. Bools are refused, because
    they may be a mask.
    """
    if wanted is None:
        return None
    if isinstance(wanted, StructuredMemberSlice):
        if wanted.axis != 0:
            raise ValueError(f"rows are along axis 0, not {wanted.axis}")
        wanted = slice(wanted.start, wanted.end, wanted.step)
    if isinstance(wanted, slice):
        if wanted.step is not None and wanted.step <= 0:
            raise ValueError(f"the step between rows must be positive, not {wanted.step}")
        return range(*wanted.indices(count))
    if isinstance(wanted, (str, bytes)) or not isinstance(wanted, Sequence):
        raise TypeError(f"rows are a slice or a sequence of numbers, not {type(wanted).__name__}")
    found = []
    for row in wanted:
        number = _number(row)
        if not -count <= number < count:
            raise IndexError(f"the row {number} is not among the {count} rows")
        found.append(number % count)
    return found


def _number(row: Any) -> int:
    if isinstance(row, bool) or str(getattr(row, "dtype", "")) in ("bool", "torch.bool"):
        raise TypeError("rows are numbers, not bools: of a mask, take the numbers of its true rows")
    try:
        return operator.index(row)
    except TypeError:
        raise TypeError(f"rows are integers, not {type(row).__name__}") from None
