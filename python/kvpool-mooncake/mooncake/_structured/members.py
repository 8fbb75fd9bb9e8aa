"""Members of objects: how arrays, tensors, bytes and rows of values lie in bytes, and parts of them."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mooncake._structured import values
from mooncake._structured.refs import StructuredMemberSlice
from mooncake._tensor_format import decode as decode_tensor
from mooncake._tensor_format import dtype_of, memory_at, torch_module

Read = Callable[[int, int, Any], None]
"""Reads the bytes from an offset on, so many, into a writable buffer."""


@dataclasses.dataclass(frozen=True)
class TensorObjectBuffer:
    """Memory with a tensor as `put_tensor_from` takes it."""

    ptr: int
    size: int
    owner: Any = None
    batch_size: int | None = None

    def __len__(self) -> int:
        if self.batch_size is None:
            raise TypeError("the tensor_object_buffer was made without a batch_size")
        return self.batch_size


@dataclasses.dataclass(frozen=True)
class RawDestination:
    """Memory that a member's bytes are read into."""

    ptr: int
    size: int
    owner: Any = None
    pre_registered: bool = False


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch, without importing torch."""
    return type(value).__module__.partition(".")[0] == "torch" and callable(getattr(value, "data_ptr", None))


def encode(name: str, value: Any) -> tuple[dict[str, Any], list[Any]]:
    """The description of a member, and the buffers of its bytes, in order."""
    if isinstance(value, TensorObjectBuffer):
        decode_tensor(memory_at(value.ptr, value.size))
        return {"encoding": "tensor_object"}, [memory_at(value.ptr, value.size)]
    if is_tensor(value) and value.is_nested:
        said, buffers = _encode_rows([row.clone() for row in value.unbind()])
        return {**said, "nested": True}, buffers
    if is_tensor(value):
        whole = value.detach().cpu().contiguous()
        said = {"encoding": "tensor", "dtype": str(whole.dtype).removeprefix("torch."), "shape": list(whole.shape)}
        flat = whole.reshape(-1).view(torch_module().uint8).numpy() if whole.numel() else np.empty(0, np.uint8)
        return said, [flat]
    if isinstance(value, np.ndarray) and value.dtype != object and value.dtype.fields is None:
        whole = np.ascontiguousarray(value)
        said = {"encoding": "ndarray", "dtype": value.dtype.str, "shape": list(value.shape)}
        return said, [whole.reshape(-1).view(np.uint8)]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"encoding": "bytes"}, [memoryview(value).cast("B")]
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return _encode_rows(list(value))
    try:
        return {"encoding": "value"}, [values.encode(value)]
    except TypeError as error:
        raise TypeError(f"the member {name!r}: {error}") from error


def _encode_rows(items: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
    rows = [values.encode(item) for item in items]
    # The ends of the rows come first, so that a reader of some rows finds them.
    ends = np.cumsum([len(row) for row in rows], dtype="<i8") if rows else np.empty(0, "<i8")
    return {"encoding": "rows", "count": len(rows)}, [ends.view(np.uint8), *rows]


def decode(said: dict[str, Any], size: int, read: Read, part: StructuredMemberSlice | None, to: Any = None) -> Any:
    """A member, or a part of it, into `to` if it is given. Raises ValueError for what does not fit."""
    encoding = said["encoding"]
    if isinstance(to, RawDestination):
        return _into_memory(said, size, read, part, to)
    if encoding in ("ndarray", "tensor"):
        return _decode_dense(said, read, part, to)
    if encoding == "rows":
        chosen = _indexes(part, said["count"])
        return _copied(_joined(said, _rows(said["count"], read, chosen)), to)
    data = bytearray(size)
    read(0, size, data)
    if encoding == "bytes":
        whole = bytes(data)
        if part is not None:
            whole = whole[part.start : part.end : part.step]
        return _copied(whole, to)
    value = decode_tensor(memoryview(data)) if encoding == "tensor_object" else values.decode(data)
    if part is not None:
        value = value[(slice(None),) * part.axis + (slice(part.start, part.end, part.step),)]
    return _copied(value, to)


def decode_rows(said: dict[str, Any], size: int, read: Read, rows: Sequence[int]) -> Any:
    """Some rows of a member, in their order."""
    if said["encoding"] == "rows":
        return _joined(said, _rows(said["count"], read, rows))
    if said["encoding"] not in ("ndarray", "tensor"):
        return decode(said, size, read, None)[list(rows)]
    first, last = (min(rows), max(rows) + 1) if rows else (0, 0)
    dense = _decode_dense(said, read, StructuredMemberSlice(0, first, last), None)
    return dense[[row - first for row in rows]]


def _indexes(part: StructuredMemberSlice | None, count: int) -> range:
    if part is None:
        return range(count)
    if part.axis != 0:
        raise ValueError("rows are sliced along axis 0 only")
    return range(*slice(part.start, part.end, part.step).indices(count))


def _rows(count: int, read: Read, chosen: Sequence[int]) -> list[Any]:
    ends = np.empty(count, dtype="<i8")
    if count:
        read(0, ends.nbytes, ends.view(np.uint8))
    found = []
    for row in chosen:
        start = int(ends[row - 1]) if row else 0
        data = bytearray(int(ends[row]) - start)
        read(ends.nbytes + start, len(data), data)
        found.append(values.decode(data))
    return found


def _joined(said: dict[str, Any], rows: list[Any]) -> Any:
    if said.get("nested"):
        torch = torch_module()
        return torch.nested.nested_tensor(rows, layout=torch.jagged)
    found = np.empty(len(rows), dtype=object)
    for at, row in enumerate(rows):
        found[at] = row
    return found


def _decode_dense(said: dict[str, Any], read: Read, part: StructuredMemberSlice | None, to: Any) -> Any:
    shape = list(said["shape"])
    tensor = said["encoding"] == "tensor"
    begin, rest = 0, part
    if part is not None and part.axis == 0 and shape:
        chosen = _indexes(part, shape[0])
        rest = None if part.step == 1 else StructuredMemberSlice(0, 0, len(range(chosen.start, chosen.stop)), part.step)
        begin, shape[0] = chosen.start, max(chosen.stop - chosen.start, 0)
    item = dtype_of(said["dtype"]).itemsize if tensor else np.dtype(said["dtype"]).itemsize
    row = math.prod(shape[1:]) * item if shape else item
    length = math.prod(shape) * item
    if tensor:
        torch = torch_module()
        whole = to if rest is None and _is_place(to, said, shape) else torch.empty(shape, dtype=dtype_of(said["dtype"]))
        if length:
            read(begin * row, length, memory_at(whole.data_ptr(), length))
    else:
        whole = to if rest is None and _is_place(to, said, shape) else np.empty(shape, dtype=said["dtype"])
        if length:
            read(begin * row, length, whole.reshape(-1).view(np.uint8))
    if rest is not None:
        whole = whole[(slice(None),) * rest.axis + (slice(rest.start, rest.end, rest.step),)]
    return whole if whole is to else _copied(whole, to)


def _is_place(to: Any, said: dict[str, Any], shape: Sequence[int]) -> bool:
    """Whether bytes can be read straight into a destination."""
    if said["encoding"] == "tensor":
        same = is_tensor(to) and str(to.dtype).removeprefix("torch.") == said["dtype"]
        return same and list(to.shape) == list(shape) and to.is_contiguous() and to.device.type == "cpu"
    same = isinstance(to, np.ndarray) and to.dtype == np.dtype(said["dtype"]) and list(to.shape) == list(shape)
    return bool(same and to.flags.c_contiguous and to.flags.writeable)


def _copied(value: Any, to: Any) -> Any:
    """The value, copied to a destination of the caller if there is one."""
    if to is None:
        return value
    if isinstance(to, bytearray) and isinstance(value, bytes):
        if len(to) != len(value):
            raise ValueError(f"the destination has {len(to)} bytes, and the member {len(value)}")
        to[:] = value
        return to
    if tuple(getattr(to, "shape", ())) != tuple(getattr(value, "shape", ())) or str(to.dtype) != str(value.dtype):
        raise ValueError(f"the destination is not of the member's shape and dtype {getattr(value, 'shape', None)}")
    to[...] = value
    return to


def _into_memory(
    said: dict[str, Any], size: int, read: Read, part: StructuredMemberSlice | None, to: RawDestination
) -> Any:
    begin, length = 0, size
    if part is not None:
        shape = said.get("shape")
        if not shape or part.axis != 0 or part.step != 1:
            raise ValueError("memory takes whole members, or rows of arrays and tensors that follow each other")
        row = size // max(shape[0], 1)
        chosen = _indexes(part, shape[0])
        begin, length = chosen.start * row, len(chosen) * row
    if length > to.size:
        raise ValueError(f"the destination has {to.size} bytes, and the member {length}")
    if length:
        read(begin, length, (ctypes.c_ubyte * length).from_address(to.ptr))
    return to
