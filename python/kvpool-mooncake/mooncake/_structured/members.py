"""One buffer of a structured object: an array, a tensor or bytes, with the description to decode its bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpool._native import is_host_memory
from mooncake import _tensor_format
from mooncake._structured.chunks import Entry, Fill

# A buffer's entry in a bundle's metadata: `encoding`, and the fields of that encoding.
Spec = Mapping[str, Any]


def numpy() -> Any:
    """numpy, imported at first use."""
    return importlib.import_module("numpy")


def is_tensor(value: object) -> bool:
    """Whether a value is a torch tensor. The check does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: object) -> bool:
    """Whether a value is a numpy array. The check does not import numpy."""
    module = sys.modules.get("numpy")
    return module is not None and isinstance(value, module.ndarray)


@dataclasses.dataclass(frozen=True)
class TensorObject:
    """A tensor with its header in memory, as `get_tensor_into` writes it."""

    ptr: int
    size: int
    owner: Any = None
    batch_size: int | None = None


@dataclasses.dataclass(frozen=True)
class RawDestination:
    """The memory into which a member is read."""

    ptr: int
    size: int
    owner: Any = None
    pre_registered: bool = False


def encode(name: str, value: Any) -> tuple[dict[str, Any], memoryview]:
    """Returns the description of a buffer and its bytes. Raises TypeError for a value without bytes."""
    if isinstance(value, TensorObject):
        if value.ptr <= 0 or value.size <= 0:
            raise ValueError(f"the member {name} is {value.size} bytes at address {value.ptr}")
        _check_is_of_host(name, value.ptr, value.size, write=False)
        return {"encoding": "tensor_object"}, _tensor_format.memory_at(value.ptr, value.size)
    if is_tensor(value):
        if value.layout is not _tensor_format.torch_module().strided:
            raise TypeError(f"the member {name} is a tensor of the layout {value.layout}")
        dtype = str(value.dtype).removeprefix("torch.")
        whole = _tensor_format.on_host(value)
        return {"encoding": "torch", "dtype": dtype, "shape": list(value.shape)}, tensor_bytes(whole)
    if is_array(value):
        if value.dtype.hasobject or value.dtype.names:
            raise TypeError(f"the member {name} is an array of {value.dtype}, which is not plain numbers or text")
        whole = numpy().ascontiguousarray(value)
        return {"encoding": "ndarray", "dtype": dtype_name(value.dtype), "shape": list(value.shape)}, array_bytes(whole)
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(f"the member {name} must be an array, a tensor or bytes, not {type(value).__name__}") from None
    return {"encoding": "bytes"}, (view if view.contiguous else memoryview(bytes(view))).cast("B")


def dtype_name(dtype: Any) -> str:
    """Returns a text from which `dtype_named` makes the dtype again. Raises TypeError for a dtype without such
    a text."""
    # The `str` of an ml_dtypes dtype names another dtype or none.
    for text in (dtype.str, dtype.name):
        with contextlib.suppress(TypeError):
            if numpy().dtype(text) == dtype:
                return str(text)
    raise TypeError(f"the dtype {dtype} has no name by which numpy finds it again")


def dtype_named(text: str) -> Any:
    """Returns the dtype of a text of `dtype_name`. Raises ValueError if it needs ml_dtypes and that package is
    absent."""
    try:
        return numpy().dtype(text)
    except TypeError as unknown:
        try:
            # numpy knows the names of ml_dtypes once that package is imported.
            importlib.import_module("ml_dtypes")
        except ImportError:
            raise ValueError(f"numpy has no dtype {text!r}, and the package ml_dtypes is not installed") from unknown
        return numpy().dtype(text)


def array_bytes(array: Any) -> memoryview:
    """The memory of a contiguous array."""
    if array.nbytes == 0:
        return memoryview(bytearray())
    return memoryview(array.reshape(-1).view(numpy().uint8)).cast("B")


def tensor_bytes(tensor: Any) -> memoryview:
    """The memory of a contiguous tensor in host memory."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return memoryview(tensor.reshape(-1).view(_tensor_format.torch_module().uint8).numpy())


@dataclasses.dataclass
class Reading:
    """A member that is being read: its reads, and its value after them."""

    fills: list[Fill]
    value: Callable[[], Any]


def reading(name: str, spec: Spec, entry: Entry, rows: Sequence[int] | None, into: Any) -> Reading:
    """Plans the read of a member, or only of its `rows`, into new memory or into the caller's memory."""
    kind = spec.get("encoding")
    if kind in ("ndarray", "torch"):
        return _reading_array(name, spec, entry, rows, into)
    if rows is not None:
        raise ValueError(f"the member {name} is {kind}, which has no rows to select")
    if kind not in ("bytes", "tensor_object"):
        raise ValueError(f"the member {name} has the encoding {kind!r}, which this version does not know")
    if isinstance(into, RawDestination):
        return Reading([Fill(entry, 0, _raw_room(name, into, entry["bytes"]))], lambda: into)
    if into is not None:
        raise TypeError(f"the member {name} is {kind} and can be read into a raw_destination only")
    data = bytearray(entry["bytes"])
    fills = [Fill(entry, 0, memoryview(data))]
    if kind == "bytes":
        return Reading(fills, lambda: bytes(data))
    return Reading(fills, lambda: _tensor_format.decode(memoryview(data)))


def _reading_array(name: str, spec: Spec, entry: Entry, rows: Sequence[int] | None, into: Any) -> Reading:
    shape = tuple(spec["shape"])
    if rows is not None:
        if not shape:
            raise ValueError(f"the member {name} is one value, which has no rows to select")
        shape = (len(rows), *shape[1:])
    room: memoryview
    if isinstance(into, RawDestination):
        count = 1 if not spec["shape"] else max(spec["shape"][0], 1)
        needed = entry["bytes"] if rows is None else entry["bytes"] // count * len(rows)
        found, room = into, _raw_room(name, into, needed)
    elif spec["encoding"] == "torch":
        found = _tensor_for(name, spec, shape, into)
        room = tensor_bytes(found)
    else:
        found = _array_for(name, spec, shape, into)
        room = array_bytes(found)
    if rows is None:
        return Reading([Fill(entry, 0, room)], lambda: found)
    width = room.nbytes // len(rows) if rows else 0
    fills = [
        Fill(entry, first * width, room[at * width : (at + count) * width]) for at, first, count in runs(rows)
    ]
    return Reading(fills, lambda: found)


def _array_for(name: str, spec: Spec, shape: tuple[int, ...], into: Any) -> Any:
    dtype = dtype_named(spec["dtype"])
    if into is None:
        return numpy().empty(shape, dtype)
    if not is_array(into):
        raise TypeError(f"the member {name} is an array: its destination must be one, or a raw_destination")
    _same(name, "dtype", dtype, into.dtype)
    _same(name, "shape", shape, into.shape)
    if not into.flags.writeable or not into.flags.c_contiguous:
        raise ValueError(f"the destination of the member {name} must be writeable and contiguous")
    return into


def _tensor_for(name: str, spec: Spec, shape: tuple[int, ...], into: Any) -> Any:
    dtype = _tensor_format.dtype_of(spec["dtype"])
    if into is None:
        return _tensor_format.torch_module().empty(shape, dtype=dtype)
    if not is_tensor(into):
        raise TypeError(f"the member {name} is a tensor: its destination must be one, or a raw_destination")
    _same(name, "dtype", dtype, into.dtype)
    _same(name, "shape", shape, tuple(into.shape))
    if into.device.type != "cpu" or not into.is_contiguous() or _tensor_format.is_lazy(into):
        raise ValueError(f"the destination of the member {name} must be contiguous, of the host, and no lazy view")
    return into.detach()


def _same(name: str, what: str, wanted: object, given: object) -> None:
    if wanted != given:
        raise ValueError(f"the member {name} has the {what} {wanted}, its destination {given}")


def _raw_room(name: str, into: RawDestination, needed: int) -> memoryview:
    if into.ptr <= 0 or into.size < needed:
        raise ValueError(f"the member {name} needs {needed} bytes, its destination at {into.ptr} has {into.size}")
    _check_is_of_host(name, into.ptr, needed, write=True)
    return _tensor_format.memory_at(into.ptr, needed)


def _check_is_of_host(name: str, ptr: int, size: int, *, write: bool) -> None:
    """Raises ValueError for memory that Python cannot use: GPU memory, or an invalid range."""
    if not is_host_memory(ptr, size, write):
        use = "written" if write else "read"
        raise ValueError(
            f"the member {name} is {size} bytes at {ptr:#x}, which are no memory of the host that can be {use}; "
            "copy a tensor of a GPU to the host"
        )


def runs(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Groups rows in order into runs of adjacent rows: the index in `rows`, the first row, and the count."""
    if isinstance(rows, range) and rows.step == 1:
        return [(0, rows.start, len(rows))] if rows else []
    found: list[tuple[int, int, int]] = []
    for at, row in enumerate(rows):
        if found and found[-1][1] + found[-1][2] == row:
            start, first, count = found[-1]
            found[-1] = (start, first, count + 1)
        else:
            found.append((at, row, 1))
    return found
