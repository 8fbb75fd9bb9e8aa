"""PyTorch tensors as objects: whole tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from mooncake import _codes
from mooncake._base import BAD_CONFIG, LENGTHS_DIFFER, StoreBase
from mooncake._tensor_format import Tensor, decode, header_of, is_encoded, memory_at, on_host, torch_module
from mooncake._types import ReplicateConfig, same_length


class TensorMethods(StoreBase):
    """The tensor methods of a store."""

    def _put_tensors(
        self, keys: Sequence[str], tensors: Sequence[Tensor], config: ReplicateConfig | None, upsert: bool
    ) -> list[int]:
        torch = torch_module()
        how = self._how(config)
        if how is None:
            return self._refused("put of tensors", keys, BAD_CONFIG)
        if not same_length(keys, tensors):
            return self._refused("put of tensors", keys, LENGTHS_DIFFER)
        heads, bodies = [], []
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"a tensor must be a torch.Tensor, not {type(tensor).__name__}")
            body = on_host(tensor)
            header = header_of(body)
            heads.append((ctypes.c_char * len(header)).from_buffer_copy(header))
            bodies.append(body)
        addresses = [[ctypes.addressof(head), body.data_ptr()] for head, body in zip(heads, bodies)]
        sizes = [[len(head), body.numel() * body.element_size()] for head, body in zip(heads, bodies)]
        answers = self._native.put_from_many(keys, addresses, sizes, how, upsert)
        return self._all_said("put of tensors", answers)

    def _get_tensors(self, keys: Sequence[str]) -> list[Tensor | None]:
        handles = self._got("get of tensors", self._native.get_handles(keys))
        return [
            self._decoded(key, memoryview(bytearray(handle))) if handle is not None else None
            for key, handle in zip(keys, handles)
        ]

    def _get_tensors_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor | None]:
        lengths = self._native.get_into(keys, buffer_ptrs, self._sizes_on_host(keys, buffer_ptrs, sizes))
        self._all_said("get of tensors into memory", lengths)
        return [
            self._decoded(key, memory_at(ptr, length)) if length > 0 else None
            for key, ptr, length in zip(keys, buffer_ptrs, lengths)
        ]

    def _sizes_on_host(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], *, write: bool = False
    ) -> list[int]:
        """Returns the sizes of memory. The size is -1, which is refused, where Python cannot read or write a
        tensor's header.

        This concerns memory of a GPU and, with `write`, read-only memory. One native call checks all of the
        memory: before Linux 6.11 a check reads all maps of the process.
        """
        found, wrong = [], []
        are_of_host = self._native.are_of_host(list(buffer_ptrs), list(sizes), write)
        for key, ptr, size, is_of_host in zip(keys, buffer_ptrs, sizes, are_of_host):
            if not is_of_host:
                wrong.append(f"{key}: {size} bytes at {ptr:#x}")
            found.append(size if is_of_host else -1)
        if wrong and self._native.is_set_up():
            kind = "writable memory" if write else "memory"
            way = "for a GPU use put_tensor and get_tensor_into_cuda"
            refused = [_codes.PARAMETERS] * len(wrong)
            self._log_failures("memory of tensors", refused, f"{wrong[0]} are no {kind} of the host; {way}")
        return found

    def _decoded(self, key: str, data: memoryview) -> Tensor | None:
        try:
            return decode(data)
        except (ValueError, KeyError, TypeError) as error:
            self._refuse_key("get of a tensor", key, error)
            return None

    def _put_encoded(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], upsert: bool
    ) -> list[int]:
        """Puts encoded tensors from memory; -600 for memory without a tensor."""
        how = self._how(None)
        if how is None or not same_length(keys, buffer_ptrs, sizes):
            return self._refused("put of tensors in memory", keys, LENGTHS_DIFFER)
        on_host = zip(buffer_ptrs, self._sizes_on_host(keys, buffer_ptrs, sizes))
        checked = [size if is_encoded(ptr, size) else -1 for ptr, size in on_host]
        answers = self._native.put_from(keys, buffer_ptrs, checked, how, upsert)
        return self._all_said("put of tensors in memory", answers)

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
        """Returns the tensor of a key, in new memory; `None` for a miss or an error."""
        return self._get_tensors([key])[0]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Tensor | None]:
        """Returns the tensors of keys, in new memory; `None` for a miss or an error."""
        return self._get_tensors(keys)

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Tensor | None:
        """Reads a tensor with its header into host memory. Returns the tensor in that memory.

        `None` for a miss or an error. GPU memory is an error: use `get_tensor_into_cuda` for it.
        """
        return self._get_tensors_into([key], [buffer_ptr], [size])[0]

    def batch_get_tensor_into(
        self, base_keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor | None]:
        """`get_tensor_into` for several keys."""
        if not same_length(base_keys, buffer_ptrs, sizes):
            self._refused("batch_get_tensor_into", base_keys, LENGTHS_DIFFER)
            return [None] * len(base_keys)
        return self._get_tensors_into(base_keys, buffer_ptrs, sizes)

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Puts a tensor from host memory. The memory has the header that `get_tensor_into` writes.

        `size` includes the header.
        """
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
