"""PyTorch tensors as objects: a small header that describes the tensor, then its bytes.

    b"KVT1" | length of the description, 4 bytes little-endian | description, JSON | padding to 64 | data

The description has only `dtype` ("float16") and `shape`. The data are the bytes of a contiguous tensor. torch
is imported at first use.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import struct
from collections.abc import Sequence
from typing import Any, Final

# Any: torch is no dependency, not even of the type checks.
Tensor = Any

_MAGIC: Final = b"KVT1"
_ALIGN: Final = 64
_LONGEST_DESCRIPTION: Final = 1 << 16


def encode_header(dtype: str, shape: Sequence[int]) -> bytes:
    """Returns the header of a tensor: the bytes before its data."""
    text = json.dumps({"dtype": dtype, "shape": list(shape)}).encode()
    head = _MAGIC + struct.pack("<I", len(text)) + text
    return head + b"\0" * (-len(head) % _ALIGN)


def decode_header(data: memoryview) -> tuple[str, list[int], int]:
    """Returns the dtype, the shape, and the offset of the data. Raises ValueError for an invalid header."""
    if len(data) < 8 or bytes(data[:4]) != _MAGIC:
        raise ValueError("the object is no tensor")
    (length,) = struct.unpack("<I", data[4:8])
    if length > _LONGEST_DESCRIPTION or 8 + length > len(data):
        raise ValueError("the tensor's description is cut off")
    said = json.loads(bytes(data[8 : 8 + length]))
    dtype, shape = said["dtype"], said["shape"]
    if not isinstance(dtype, str) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError("the tensor's description is none")
    return dtype, shape, 8 + length + (-(8 + length) % _ALIGN)


def torch_module() -> Any:
    """torch, imported at first use."""
    return importlib.import_module("torch")


def decode(data: memoryview) -> Tensor:
    """Returns the tensor in an object's bytes. The tensor shares their memory."""
    torch = torch_module()
    dtype_name, shape, start = decode_header(data)
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {dtype_name!r}")
    count = 1
    for size in shape:
        count *= size
    if count * dtype.itemsize > len(data) - start:
        raise ValueError("the tensor's data are cut off")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start).reshape(shape)


def dtype_of(name: str) -> Any:
    """Returns torch's dtype for a header's name. Raises ValueError for an unknown name."""
    torch = torch_module()
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def header_of(tensor: Tensor) -> bytes:
    """The header of a tensor."""
    return encode_header(str(tensor.dtype).removeprefix("torch."), tensor.shape)


def on_host(tensor: Tensor) -> Tensor:
    """Returns the tensor's values as one contiguous tensor in host memory. Copies unless the tensor already is
    one.

    torch conjugates and negates lazily: the memory of such a tensor has other values than the tensor.
    """
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def is_lazy(tensor: Tensor) -> bool:
    """Whether the tensor's memory holds the conjugates or negatives of its values."""
    return bool(tensor.is_conj() or tensor.is_neg())


def memory_at(ptr: int, size: int) -> memoryview:
    """Returns memory of this process by its address."""
    return memoryview((ctypes.c_ubyte * size).from_address(ptr)).cast("B")


def is_encoded(ptr: int, size: int) -> bool:
    """Whether memory begins with the header of a tensor."""
    if ptr <= 0 or size < 8:
        return False
    try:
        decode_header(memory_at(ptr, size))
    except (ValueError, KeyError, TypeError):
        return False
    return True
