"""PyTorch tensors as objects: a small header that describes the tensor, then its bytes.

    b"KVT1" | length of the description, 4 bytes little-endian | description, JSON | padding to 64 | data

The description has `dtype` ("float16"), `shape`, and nothing else. The data are those of a contiguous tensor.
torch is imported at first use.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from mooncake import _codes
from mooncake._base import StoreBase, log
from mooncake._types import ReplicateConfig, same_length

if TYPE_CHECKING:
    # Any: torch is no dependency, also not of the checks.
    Tensor = Any

_MAGIC: Final = b"KVT1"
_ALIGN: Final = 64
_LONGEST_DESCRIPTION: Final = 1 << 16


def encode_header(dtype: str, shape: Sequence[int]) -> bytes:
    """The bytes before a tensor's data."""
    text = json.dumps({"dtype": dtype, "shape": list(shape)}).encode()
    head = _MAGIC + struct.pack("<I", len(text)) + text
    return head + b"\0" * (-len(head) % _ALIGN)


def decode_header(data: memoryview) -> tuple[str, list[int], int]:
    """The dtype, the shape, and the offset of the data. Raises ValueError for any other header."""
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


def _torch() -> Any:
    return importlib.import_module("torch")


def _decode(data: memoryview) -> Tensor:
    """The tensor in an object's bytes; it shares their memory."""
    torch = _torch()
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


def _shard_key(key: str, rank: int, size: int) -> str:
    return key if size == 1 else f"{key}_tp_{rank}"


class TensorMethods(StoreBase):
    """The tensor methods of a store."""

    def _put_tensors(
        self, keys: Sequence[str], tensors: Sequence[Tensor], config: ReplicateConfig | None, upsert: bool
    ) -> list[int]:
        torch = _torch()
        how = self._how(config)
        if how is None or not same_length(keys, tensors):
            return self._refused(keys)
        heads, bodies = [], []
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"a tensor must be a torch.Tensor, not {type(tensor).__name__}")
            # What lies on a device, or not in one piece, is copied first.
            body = tensor.detach().cpu().contiguous()
            header = encode_header(str(body.dtype).removeprefix("torch."), body.shape)
            heads.append((ctypes.c_char * len(header)).from_buffer_copy(header))
            bodies.append(body)
        addresses = [[ctypes.addressof(head), body.data_ptr()] for head, body in zip(heads, bodies)]
        sizes = [[len(head), body.numel() * body.element_size()] for head, body in zip(heads, bodies)]
        answers = self._native.put_from_many(keys, addresses, sizes, how, upsert)
        return self._all_said("put of tensors", answers)

    def _put_shards(
        self,
        keys: Sequence[str],
        tensors: Sequence[Tensor],
        config: ReplicateConfig | None,
        upsert: bool,
        tp_size: int,
        split_dim: int,
    ) -> list[int]:
        """Puts each tensor as `tp_size` shards. Returns one code for each tensor, the first that is not 0."""
        torch = _torch()
        if tp_size == 1:
            return self._put_tensors(keys, tensors, config, upsert)
        if tp_size < 1 or not same_length(keys, tensors):
            return self._refused(keys)
        shard_keys: list[str] = []
        shards: list[Tensor] = []
        fits: list[bool] = []
        for key, tensor in zip(keys, tensors):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"a tensor must be a torch.Tensor, not {type(tensor).__name__}")
            fits.append(-tensor.dim() <= split_dim < tensor.dim() and tensor.shape[split_dim] >= tp_size)
            if fits[-1]:
                shards.extend(torch.tensor_split(tensor, tp_size, dim=split_dim))
                shard_keys.extend(_shard_key(key, rank, tp_size) for rank in range(tp_size))
        codes = iter(self._put_tensors(shard_keys, shards, config, upsert))
        answers = []
        for fit in fits:
            own = [next(codes) for _ in range(tp_size)] if fit else [_codes.PARAMETERS]
            answers.append(next((code for code in own if code != _codes.OK), _codes.OK))
        return answers

    def _get_tensors(self, keys: Sequence[str]) -> list[Tensor | None]:
        return [
            self._decoded(key, memoryview(bytearray(handle))) if handle is not None else None
            for key, handle in zip(keys, self._native.get_handles(keys))
        ]

    def _get_tensors_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor | None]:
        lengths = self._native.get_into(keys, buffer_ptrs, sizes)
        return [
            self._decoded(key, _memory_at(ptr, length)) if length > 0 else None
            for key, ptr, length in zip(keys, buffer_ptrs, lengths)
        ]

    @staticmethod
    def _decoded(key: str, data: memoryview) -> Tensor | None:
        try:
            return _decode(data)
        except (ValueError, KeyError, TypeError) as error:
            log.error("%s: %s", key, error)
            return None

    def _put_encoded(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], upsert: bool
    ) -> list[int]:
        """Puts encoded tensors from memory; -600 for memory without a tensor."""
        how = self._how(None)
        if how is None or not same_length(keys, buffer_ptrs, sizes):
            return self._refused(keys)
        checked = [size if _is_encoded(ptr, size) else -1 for ptr, size in zip(buffer_ptrs, sizes)]
        return self._native.put_from(keys, buffer_ptrs, checked, how, upsert)

    def put_tensor(self, key: str, tensor: Tensor) -> int:
        """Puts a tensor. Returns 0 or a code."""
        return self._one(self._put_tensors([key], [tensor], None, False))

    def pub_tensor(self, key: str, tensor: Tensor, config: ReplicateConfig | None = None) -> int:
        """`put_tensor` with a configuration."""
        return self._one(self._put_tensors([key], [tensor], config, False))

    def upsert_tensor(self, key: str, tensor: Tensor) -> int:
        """Puts a tensor and replaces the key's object."""
        return self._one(self._put_tensors([key], [tensor], None, True))

    def upsert_pub_tensor(self, key: str, tensor: Tensor, config: ReplicateConfig | None = None) -> int:
        """`upsert_tensor` with a configuration."""
        return self._one(self._put_tensors([key], [tensor], config, True))

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[Tensor]) -> list[int]:
        """Puts tensors. Returns one code for each key."""
        return self._put_tensors(keys, tensors_list, None, False)

    def batch_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Tensor], config: ReplicateConfig | None = None
    ) -> list[int]:
        """`batch_put_tensor` with a configuration."""
        return self._put_tensors(keys, tensors_list, config, False)

    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence[Tensor]) -> list[int]:
        """Puts tensors and replaces the keys' objects."""
        return self._put_tensors(keys, tensors_list, None, True)

    def batch_upsert_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Tensor], config: ReplicateConfig | None = None
    ) -> list[int]:
        """`batch_upsert_tensor` with a configuration."""
        return self._put_tensors(keys, tensors_list, config, True)

    def get_tensor(self, key: str) -> Tensor | None:
        """The tensor of a key, in new memory; `None` for a miss or an error."""
        return self._get_tensors([key])[0]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Tensor | None]:
        """The tensors of keys; `None` for a miss or an error."""
        return self._get_tensors(keys)

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Tensor | None:
        """Reads a tensor with its header into memory. Returns the tensor in that memory."""
        return self._get_tensors_into([key], [buffer_ptr], [size])[0]

    def batch_get_tensor_into(
        self, base_keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor | None]:
        """`get_tensor_into` for several keys."""
        if not same_length(base_keys, buffer_ptrs, sizes):
            return [None] * len(base_keys)
        return self._get_tensors_into(base_keys, buffer_ptrs, sizes)

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Puts a tensor from memory, with its header as `get_tensor_into` reads it; `size` includes the header."""
        return self._one(self._put_encoded([key], [buffer_ptr], [size], False))

    def batch_put_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """`put_tensor_from` for several keys."""
        return self._put_encoded(keys, buffer_ptrs, sizes, False)

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """`put_tensor_from` that replaces the key's object."""
        return self._one(self._put_encoded([key], [buffer_ptr], [size], True))

    def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """`upsert_tensor_from` for several keys."""
        return self._put_encoded(keys, buffer_ptrs, sizes, True)

    def put_tensor_with_tp(
        self, key: str, tensor: Tensor, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Splits a whole tensor along `split_dim` and puts all `tp_size` shards, `KEY_tp_RANK` each.

        With a `tp_size` of 1 the tensor is put under the key itself. `tp_rank` has no effect.
        """
        return self._one(self._put_shards([key], [tensor], None, False, tp_size, split_dim))

    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Tensor,
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """`put_tensor_with_tp` with a configuration."""
        return self._one(self._put_shards([key], [tensor], config, False, tp_size, split_dim))

    def upsert_tensor_with_tp(
        self, key: str, tensor: Tensor, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """`put_tensor_with_tp` that replaces the keys' objects."""
        return self._one(self._put_shards([key], [tensor], None, True, tp_size, split_dim))

    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """`put_tensor_with_tp` for several keys."""
        return self._put_shards(base_keys, tensors_list, None, False, tp_size, split_dim)

    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """`pub_tensor_with_tp` for several keys."""
        return self._put_shards(base_keys, tensors_list, config, False, tp_size, split_dim)

    def batch_upsert_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """`upsert_tensor_with_tp` for several keys."""
        return self._put_shards(base_keys, tensors_list, None, True, tp_size, split_dim)

    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Tensor | None:
        """The shard of a rank, as `put_tensor_with_tp` put it; `None` for a miss or an error."""
        return self._get_tensors([_shard_key(key, tp_rank, tp_size)])[0]

    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Tensor | None]:
        """`get_tensor_with_tp` for several keys."""
        return self._get_tensors([_shard_key(key, tp_rank, tp_size) for key in base_keys])

    def get_tensor_with_tp_into(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Tensor | None:
        """`get_tensor_into` of the shard of a rank."""
        return self.get_tensor_into(_shard_key(key, tp_rank, tp_size), buffer_ptr, size)

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Tensor | None]:
        """`get_tensor_with_tp_into` for several keys."""
        keys = [_shard_key(key, tp_rank, tp_size) for key in base_keys]
        return self.batch_get_tensor_into(keys, buffer_ptrs, sizes)

    def put_tensor_with_tp_from(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """`put_tensor_with_tp` of a whole tensor in memory, with its header as `get_tensor_into` reads it."""
        answers = self.batch_put_tensor_with_tp_from([key], [buffer_ptr], [size], 0, tp_size, split_dim)
        return self._one(answers)

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """`put_tensor_with_tp_from` for several keys."""
        if tp_size == 1:
            return self._put_encoded(base_keys, buffer_ptrs, sizes, False)
        if not same_length(base_keys, buffer_ptrs, sizes):
            return self._refused(base_keys)
        answers = []
        for key, ptr, size in zip(base_keys, buffer_ptrs, sizes):
            whole = self._decoded(key, _memory_at(ptr, size)) if _is_encoded(ptr, size) else None
            shards = [] if whole is None else [whole]
            codes = self._put_shards([key][: len(shards)], shards, None, False, tp_size, split_dim)
            answers.append(self._one(codes))
        return answers


def _memory_at(ptr: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(ptr)).cast("B")


def _is_encoded(ptr: int, size: int) -> bool:
    if ptr <= 0 or size < 8:
        return False
    try:
        decode_header(_memory_at(ptr, size))
    except (ValueError, KeyError, TypeError):
        return False
    return True
