"""Any value of Python as bytes: JSON with references to blobs behind it. Nothing is executed at the decoding.

    length of the JSON, 4 bytes little-endian | JSON | blobs

What JSON has no form for is `{"$": KIND, ...}`; a mapping with such a key, or with other keys than text, is a list of
pairs.
"""

from __future__ import annotations

import importlib
import io
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from mooncake._tensor_format import dtype_of, torch_module

_LENGTH = struct.Struct("<I")


def encode(value: Any) -> bytes:
    """The bytes of a value. Raises TypeError for a type that is not known."""
    blobs: list[bytes] = []
    text = json.dumps(_packed(value, blobs)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *blobs])


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The value of bytes. Raises ValueError for bytes that are none."""
    view = memoryview(data).cast("B")
    if len(view) < _LENGTH.size:
        raise ValueError("the value is cut off")
    (length,) = _LENGTH.unpack(view[: _LENGTH.size])
    start = _LENGTH.size + length
    try:
        return _unpacked(json.loads(bytes(view[_LENGTH.size : start])), view[start:])
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the bytes are no value: {error}") from error


def _blob(data: bytes, blobs: list[bytes]) -> list[int]:
    at = sum(map(len, blobs))
    blobs.append(data)
    return [at, len(data)]


def _packed(value: Any, blobs: list[bytes]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)) and type(value).__module__ == "builtins":
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"$": "bytes", "at": _blob(bytes(value), blobs)}
    if isinstance(value, list):
        return [_packed(item, blobs) for item in value]
    if isinstance(value, (tuple, set, frozenset)):
        return {"$": type(value).__name__, "items": [_packed(item, blobs) for item in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != "$" for key in value):
            return {key: _packed(item, blobs) for key, item in value.items()}
        return {"$": "pairs", "items": [[_packed(key, blobs), _packed(item, blobs)] for key, item in value.items()]}
    if isinstance(value, np.generic) and value.dtype != object:
        return {"$": "scalar", "dtype": value.dtype.str, "at": _blob(value.tobytes(), blobs)}
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            items = [_packed(item, blobs) for item in value.reshape(-1)]
            return {"$": "objects", "shape": list(value.shape), "items": items}
        return {"$": "array", "dtype": value.dtype.str, "shape": list(value.shape), "at": _blob(value.tobytes(), blobs)}
    return _packed_other(value, blobs)


def _packed_other(value: Any, blobs: list[bytes]) -> Any:
    module = type(value).__module__.partition(".")[0]
    if module == "torch" and callable(getattr(value, "data_ptr", None)):
        whole = value.detach().cpu().contiguous()
        data = whole.reshape(-1).view(torch_module().uint8).numpy().tobytes() if whole.numel() else b""
        name = str(whole.dtype).removeprefix("torch.")
        return {"$": "tensor", "dtype": name, "shape": list(whole.shape), "at": _blob(data, blobs)}
    if module == "PIL" and callable(getattr(value, "save", None)):
        file = io.BytesIO()
        value.save(file, format="PNG")
        return {"$": "image", "at": _blob(file.getvalue(), blobs)}
    raise TypeError(f"a value of type {type(value).__module__}.{type(value).__name__} cannot be stored")


def _unpacked(said: Any, blobs: memoryview) -> Any:
    if isinstance(said, list):
        return [_unpacked(item, blobs) for item in said]
    if not isinstance(said, dict):
        return said
    kind = said.get("$")
    if kind is None:
        return {key: _unpacked(item, blobs) for key, item in said.items()}
    if kind in ("tuple", "set", "frozenset"):
        items = [_unpacked(item, blobs) for item in said["items"]]
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
    if kind == "pairs":
        return {_unpacked(key, blobs): _unpacked(item, blobs) for key, item in said["items"]}
    if kind == "objects":
        array = np.empty(len(said["items"]), dtype=object)
        for index, item in enumerate(said["items"]):
            array[index] = _unpacked(item, blobs)
        return array.reshape(said["shape"])
    at, length = said["at"]
    data = bytes(blobs[at : at + length])
    if kind == "bytes":
        return data
    if kind == "scalar":
        return np.frombuffer(data, dtype=said["dtype"])[0]
    if kind == "array":
        return np.frombuffer(data, dtype=said["dtype"]).reshape(said["shape"]).copy()
    if kind == "tensor":
        torch = torch_module()
        empty = torch.empty(said["shape"], dtype=dtype_of(said["dtype"]))
        if empty.numel():
            empty.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return empty
    if kind == "image":
        image = importlib.import_module("PIL.Image").open(io.BytesIO(data))
        image.load()
        return image
    raise ValueError(f"the value has the unknown kind {kind!r}")
