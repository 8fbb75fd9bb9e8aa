"""PyTorch tensors that are split for the ranks of one tensor-parallel group: the older methods."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake import _codes
from mooncake._base import LENGTHS_DIFFER
from mooncake._parallel_types import Manifest, manifest_key, shard_key
from mooncake._parallel_write import ParallelWriteMethods
from mooncake._tensor_format import Tensor, is_encoded, memory_at, torch_module
from mooncake._types import ReplicateConfig, same_length


class TensorTpMethods(ParallelWriteMethods):
    """The methods of a store whose names have `_with_tp`."""

    def _put_shards(
        self,
        keys: Sequence[str],
        tensors: Sequence[Tensor],
        config: ReplicateConfig | None,
        upsert: bool,
        tp_size: int,
        split_dim: int,
    ) -> list[int]:
        """Puts each tensor as `tp_size` shards. Returns for each tensor the first code that is not 0, else
        0."""
        torch = torch_module()
        if tp_size == 1:
            return self._put_tensors(keys, tensors, config, upsert)
        if tp_size < 1:
            return self._refused("put of tensor shards", keys, f"tp_size is {tp_size}")
        if not same_length(keys, tensors):
            return self._refused("put of tensor shards", keys, LENGTHS_DIFFER)
        shard_keys: list[str] = []
        shards: list[Tensor] = []
        manifests: list[tuple[str, Manifest] | None] = []
        for key, tensor in zip(keys, tensors):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"a tensor must be a torch.Tensor, not {type(tensor).__name__}")
            if not (-tensor.dim() <= split_dim < tensor.dim() and tensor.shape[split_dim] >= tp_size):
                manifests.append(None)
                continue
            shards.extend(torch.tensor_split(tensor, tp_size, dim=split_dim))
            shard_keys.extend(shard_key(key, rank, tp_size) for rank in range(tp_size))
            dtype = str(tensor.dtype).removeprefix("torch.")
            split = Manifest(dtype, tuple(tensor.shape), split_dim % tensor.dim(), tp_size)
            manifests.append((manifest_key(key), split))
        wrong = [manifest for manifest in manifests if manifest is None]
        self._refused("put of tensor shards", wrong, f"dimension {split_dim} cannot be split over {tp_size} ranks")
        codes = iter(self._put_tensors(shard_keys, shards, config, upsert))
        answers = []
        for manifest in manifests:
            own = [next(codes) for _ in range(tp_size)] if manifest else [_codes.PARAMETERS]
            answers.append(next((code for code in own if code != _codes.OK), _codes.OK))
        return self._put_manifests(answers, manifests, config, upsert)

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
        """Returns the shard of a rank, as `put_tensor_with_tp` put it; `None` for a miss or an error."""
        return self._get_tensors([shard_key(key, tp_rank, tp_size)])[0]

    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Tensor | None]:
        """`get_tensor_with_tp` for several keys."""
        return self._get_tensors([shard_key(key, tp_rank, tp_size) for key in base_keys])

    def get_tensor_with_tp_into(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Tensor | None:
        """`get_tensor_into` of the shard of a rank."""
        return self.get_tensor_into(shard_key(key, tp_rank, tp_size), buffer_ptr, size)

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Tensor | None]:
        """`get_tensor_with_tp_into` for several keys."""
        keys = [shard_key(key, tp_rank, tp_size) for key in base_keys]
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
            return self._refused("batch_put_tensor_with_tp_from", base_keys, LENGTHS_DIFFER)
        answers = []
        for key, ptr, size in zip(base_keys, buffer_ptrs, self._sizes_on_host(base_keys, buffer_ptrs, sizes)):
            whole = self._decoded(key, memory_at(ptr, size)) if is_encoded(ptr, size) else None
            shards = [] if whole is None else [whole]
            codes = self._put_shards([key][: len(shards)], shards, None, False, tp_size, split_dim)
            answers.append(self._one(codes))
        return answers
