"""Columns of Python values: one value a row, `None` for a row without one.

A column is stored in buffers beside the other columns' buffers:

- `ndarray`: `data`, one number a row, and `nulls`.
- the ragged codecs: `data`, the bytes of all rows; `offsets`, the start of each row and the end of the last;
  `nulls`.

| codec | a row |
|---|---|
| utf8_ragged | text |
| bytes_ragged | bytes |
| typed_ragged | an array, a tensor or a list of numbers, all rows of one dtype, each of its own shape |
| msgpack_ragged | a value that MessagePack can express; also tuples, arrays and tensors within |
"""

from __future__ import annotations

import dataclasses
import importlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mooncake import _tensor_format
from mooncake._structured import members
from mooncake._structured.types import FieldSchema

CODECS = ("ndarray", "utf8_ragged", "bytes_ragged", "typed_ragged", "msgpack_ragged")

# The MessagePack extension types of this module.
_TUPLE, _ARRAY, _TENSOR = 1, 2, 3


@dataclasses.dataclass
class Column:
    """A column to write: its description, and its buffers by the last part of their names."""

    codec: str
    metadata: dict[str, Any]
    buffers: dict[str, Any]


def encode(name: str, rows: Sequence[Any], schema: FieldSchema | None) -> Column:
    """Encodes the rows of a column. Raises ValueError, with the field's name, for a row that its codec cannot
    express."""
    codec = _codec_for(rows) if schema is None else schema.codec
    if codec not in CODECS:
        raise ValueError(f"the field {name!r} asks for the codec {codec!r}, which is none of {', '.join(CODECS)}")
    np = members.numpy()
    nulls = np.array([row is None for row in rows], dtype=bool)
    if schema is not None and not schema.nullable and nulls.any():
        raise ValueError(f"the field {name!r} is not nullable, and its row {int(nulls.argmax())} is None")
    wanted = None if schema is None else schema.metadata.get("dtype")
    try:
        if codec == "ndarray":
            # Another row stands in for a null, so that the dtype stays that of the rows.
            stand_in = next((row for row in rows if row is not None), 0)
            data = np.array([stand_in if row is None else row for row in rows], dtype=wanted)
            if data.dtype.kind not in "biuf" or data.ndim != 1:
                raise ValueError(f"the rows are {data.dtype} of {data.ndim} dimensions, not numbers")
            return Column(codec, {}, {"data": data, "nulls": nulls})
        metadata, pack = _packer(codec, rows, wanted)
        packed = [b"" if row is None else pack(row) for row in rows]
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ValueError(f"the field {name!r} cannot be written as {codec}: {error}") from error
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in packed], out=offsets[1:])
    return Column(codec, metadata, {"data": b"".join(packed), "offsets": offsets, "nulls": nulls})


def decode(description: Mapping[str, Any], data: Any, ends: Sequence[tuple[int, int]], nulls: Any) -> Any:
    """Returns the rows as an array of objects: row `i` is `data[ends[i][0]:ends[i][1]]`, or the number
    `data[i]`."""
    found = members.numpy().empty(len(nulls), dtype=object)
    if description["codec"] == "ndarray":
        values: Sequence[Any] = data.tolist()
        for at, missing in enumerate(nulls):
            found[at] = None if missing else values[at]
        return found
    unpack = _unpacker(description["codec"], description.get("metadata") or {})
    view = memoryview(data)
    for at, (missing, (first, last)) in enumerate(zip(nulls, ends)):
        found[at] = None if missing else unpack(view[first:last])
    return found


def _codec_for(rows: Sequence[Any]) -> str:
    """Returns the narrowest codec that restores every row exactly."""
    kinds = {type(row) for row in rows if row is not None}
    if kinds and kinds <= {str, members.numpy().str_}:
        return "utf8_ragged"
    if kinds and kinds <= {bytes, bytearray, memoryview}:
        return "bytes_ragged"
    if kinds in ({bool}, {float}) or (kinds == {int} and _fit(rows)):
        return "ndarray"
    if len(kinds) == 1 and _dtype_of_all([row for row in rows if row is not None]) is not None:
        return "typed_ragged"
    return "msgpack_ragged"


def _fit(values: Sequence[Any]) -> bool:
    return all(value is None or -(1 << 63) <= value < 1 << 63 for value in values)


def _dtype_of_all(rows: Sequence[Any]) -> str | None:
    """Returns the one dtype of rows that are all arrays, all tensors, or all lists of one kind of number."""
    if all(members.is_array(row) for row in rows):
        dtypes = {members.dtype_name(row.dtype) for row in rows if row.dtype.kind in "biufc"}
        plain = all(row.dtype.kind in "biufc" for row in rows)
        return dtypes.pop() if plain and len(dtypes) == 1 else None
    if all(members.is_tensor(row) for row in rows):
        names = {str(row.dtype).removeprefix("torch.") for row in rows}
        return names.pop() if len(names) == 1 else None
    if all(type(row) is list for row in rows):
        kinds = {type(value) for row in rows for value in row}
        if kinds == {int} and all(_fit(row) for row in rows):
            return "<i8"
        return "<f8" if kinds == {float} else None
    return None


def _packer(
    codec: str, rows: Sequence[Any], wanted: str | None
) -> tuple[dict[str, Any], Callable[[Any], bytes]]:
    if codec == "utf8_ragged":
        return {}, lambda row: str.encode(row)
    if codec == "bytes_ragged":
        return {}, lambda row: bytes(memoryview(row))
    if codec == "msgpack_ragged":
        return {}, _pack
    present = [row for row in rows if row is not None]
    if present and all(members.is_tensor(row) for row in present):
        dtype = wanted or _dtype_of_all(present)
        if dtype is None:
            raise ValueError("the rows are tensors of several dtypes")
        torch_dtype = _tensor_format.dtype_of(dtype)
        return {"dtype": dtype, "rows": "tensor"}, lambda row: _shaped(_tensor_format.on_host(row).to(torch_dtype))
    np = members.numpy()
    arrays = all(members.is_array(row) for row in present)
    # Without rows every dtype fits.
    given = wanted or _dtype_of_all(present) if present else "<f8"
    known = members.dtype_named(given) if given else np.result_type(*(np.asarray(row) for row in present))
    if known.kind not in "biufc":
        raise ValueError(f"the rows are {known}, not numbers")

    def pack(row: Any) -> bytes:
        return _shaped(np.ascontiguousarray(np.asarray(row, dtype=known)).reshape(np.shape(row)))

    return {"dtype": members.dtype_name(known), "rows": "array" if arrays else "list"}, pack


def _shaped(row: Any) -> bytes:
    """Encodes a row of numbers: the number of dimensions, their lengths (8 bytes each), then the numbers."""
    shape = tuple(row.shape)
    head = struct.pack(f"<{1 + len(shape)}q", len(shape), *shape)
    return head + (members.tensor_bytes(row.contiguous()) if members.is_tensor(row) else row.tobytes())


def _unpacker(codec: str, metadata: Mapping[str, Any]) -> Callable[[memoryview], Any]:
    if codec == "utf8_ragged":
        return lambda data: str(data, "utf-8")
    if codec == "bytes_ragged":
        return bytes
    if codec == "msgpack_ragged":
        return _unpack
    if codec != "typed_ragged":
        raise ValueError(f"the codec {codec!r} is not known to this version")
    kind, dtype = metadata["rows"], metadata["dtype"]

    def unpack(data: memoryview) -> Any:
        (dimensions,) = struct.unpack_from("<q", data)
        shape = struct.unpack_from(f"<{dimensions}q", data, 8)
        # A copy, because a row must not keep the whole column alive.
        numbers = bytearray(data[8 * (1 + dimensions) :])
        if kind == "tensor":
            torch = _tensor_format.torch_module()
            if not numbers:
                return torch.empty(shape, dtype=_tensor_format.dtype_of(dtype))
            return torch.frombuffer(numbers, dtype=_tensor_format.dtype_of(dtype)).reshape(shape)
        array = members.numpy().frombuffer(numbers, dtype=members.dtype_named(dtype)).reshape(shape)
        return array if kind == "array" else array.tolist()

    return unpack


def _msgpack() -> Any:
    """msgpack, imported at first use."""
    return importlib.import_module("msgpack")


def _pack(row: Any) -> bytes:
    data: bytes = _msgpack().packb(row, default=_pack_other, strict_types=True, use_bin_type=True)
    return data


def _pack_other(value: Any) -> Any:
    msgpack = _msgpack()
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, _pack(list(value)))
    if members.is_tensor(value):
        spec, data = members.encode("a value", value)
        return msgpack.ExtType(_TENSOR, _tensor_format.encode_header(spec["dtype"], spec["shape"]) + data)
    if members.is_array(value):
        spec, data = members.encode("a value", value)
        return msgpack.ExtType(_ARRAY, _pack([spec["dtype"], spec["shape"], bytes(data)]))
    if isinstance(value, members.numpy().generic):
        return value.item()
    # With strict_types, subclasses reach the default function of this module.
    plains: tuple[Any, ...] = (str, int, float, dict, list)
    for plain in plains:
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"a value of the type {type(value).__name__} cannot be stored")


def _unpack(data: memoryview) -> Any:
    return _msgpack().unpackb(data, ext_hook=_unpack_other, strict_map_key=False, raw=False)


def _unpack_other(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(_unpack(memoryview(data)))
    if code == _TENSOR:
        return _tensor_format.decode(memoryview(bytearray(data)))
    if code == _ARRAY:
        dtype, shape, numbers = _unpack(memoryview(data))
        return members.numpy().frombuffer(bytearray(numbers), dtype=members.dtype_named(dtype)).reshape(shape)
    raise ValueError(f"a value has the unknown type {code}")
