"""kvpool as the storage of SGLang's hierarchical cache.

```
python -m sglang.launch_server ... --enable-hierarchical-cache --hicache-mem-layout page_first \
  --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvpool",
  "module_path": "kvpool.sglang", "class_name": "KvpoolStorage", "interface_v1": 1,
  "master": "http://10.0.0.1:7070"}'
```

Further settings, those of `kvpool._engines.settings.PoolSettings` and `salt`, stand beside `master`.
Written for the interface of SGLang 0.5.23.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch  # type: ignore[import-not-found]
from sglang.srt.mem_cache.hicache_storage import (  # type: ignore[import-not-found]
    HiCacheStorage,
)

import kvpool
from kvpool._engines.connection import Connection
from kvpool._engines.settings import PoolSettings

logger = logging.getLogger(__name__)

_OF_SGLANG = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    # What SGLang itself reads from the same object.
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
)


@dataclasses.dataclass(frozen=True)
class Settings(PoolSettings):
    """The backend's settings, besides those of every plugin."""

    salt: str = ""
    """Keeps apart what the model's name does not, such as two sets of weights."""


class KvpoolStorage(HiCacheStorage):  # type: ignore[misc]
    """Stores pages of SGLang's host memory in a pool that all hosts share.

    `storage_config` says which model and rank this is, and holds the settings in its `extra_config`.
    With `interface_v1` pages move straight between the pool and SGLang's host memory; without it SGLang
    copies each page once more. What fails is a miss, and said in the log.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None):
        extra = dict(storage_config.extra_config or {})
        self._direct = bool(extra.get("interface_v1", 0))
        settings = Settings.read({name: value for name, value in extra.items() if name not in _OF_SGLANG})
        self._config = storage_config
        self._settings = settings
        self._connection = Connection(settings)
        self._registered: list[kvpool.Registration] = []
        self._prefix = self._make_prefix("")

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes SGLang's host memory: its layout becomes part of the keys, and it is registered."""
        super().register_mem_pool_host(mem_pool_host)
        shape = (mem_pool_host.layout, mem_pool_host.page_size, str(getattr(mem_pool_host, "dtype", "")))
        self._prefix = self._make_prefix(repr(shape))
        buffer = getattr(mem_pool_host, "kv_buffer", None)
        if isinstance(buffer, torch.Tensor):
            self._connection.call("registering memory", None, lambda pool: self._register(pool, buffer))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Gets pages into SGLang's host memory; which of them came."""
        pages = self._pages(keys, host_indices)
        outcomes = self._get(keys, pages)
        return [
            outcome == sum(length for _, length in page)
            for outcome, page in zip(outcomes, pages, strict=True)
        ]

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Puts pages from SGLang's host memory; which of them are in the pool."""
        return self._put(keys, self._pages(keys, host_indices))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """A page as a tensor: `target_location` if that is given, else a new one of bytes; None for a
        miss."""
        if target_location is not None:
            return self.batch_get([key], [target_location])[0]
        found = self._connection.call("getting a page", None, lambda pool: pool.get(self._key(key)))
        return None if found is None else torch.frombuffer(bytearray(found), dtype=torch.uint8)

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Gets pages into tensors; for each the tensor, or None for a miss."""
        if target_locations is None:
            return [self.get(key) for key in keys]
        outcomes = self._get(keys, list(target_locations))
        return [
            tensor if outcome == tensor.numel() * tensor.element_size() else None
            for outcome, tensor in zip(outcomes, target_locations, strict=True)
        ]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Puts a page; whether it is in the pool."""
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Puts pages; whether all of them are in the pool."""
        if values is None:
            return False
        return all(self._put(keys, [value.contiguous() for value in values]))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the leading pages are there, leased for a moment each."""
        names = [self._key(key) for key in keys]
        present: list[bool] = []
        present = self._connection.call("looking pages up", present, lambda pool: pool.is_exist(names))
        return present.index(False) if False in present else len(present)

    def clear(self) -> None:
        """Removes the pages of this model and rank, for all hosts, leased ones too."""
        mine = f"^{self._prefix}"
        self._connection.call("removing pages", None, lambda pool: pool.remove_matching(mine, force=True))

    def get_stats(self) -> None:
        """There are none in SGLang's form: the pool has metrics of its own."""

    def close(self) -> None:
        """Lets go of the pool."""
        self._connection.close()

    def _make_prefix(self, memory: str) -> str:
        """What the keys of this model and rank begin with.

        Ranks of a model with latent attention hold the same, so that they share keys.
        """
        config = self._config
        fields = [
            config.model_name or "",
            self._settings.salt,
            memory,
            "pages" if self._direct else "copies",
            f"pp {config.pp_rank} of {config.pp_size}",
            f"cp {config.attn_cp_rank} of {config.attn_cp_size}",
            f"dcp {config.dcp_rank} of {config.dcp_size}",
            "" if config.is_mla_model else f"tp {config.tp_rank} of {config.tp_size}",
        ]
        digest = hashlib.sha256("\0".join(fields).encode()).hexdigest()
        return f"sglang:{digest[:32]}:"

    def _key(self, key: str) -> str:
        return f"{self._prefix}{key}"

    def _pages(self, keys: Sequence[str], host_indices: Any) -> list[list[tuple[int, int]]]:
        """Where each page lies in SGLang's host memory, as (address, length)."""
        addresses, lengths = self.mem_pool_host.get_page_buffer_meta(host_indices)
        pieces = [(int(address), int(length)) for address, length in zip(addresses, lengths, strict=True)]
        if not keys or len(pieces) % len(keys):
            raise ValueError(f"{len(pieces)} pieces of memory for {len(keys)} pages")
        each = len(pieces) // len(keys)
        return [pieces[at : at + each] for at in range(0, len(pieces), each)]

    def _get(self, keys: Sequence[str], into: Sequence[Any]) -> list[Any]:
        names = [self._key(key) for key in keys]
        outcomes: list[Any] = self._connection.call(
            "getting pages", [None] * len(keys), lambda pool: pool.batch_get(names, into)
        )
        self._report("got", outcomes)
        return outcomes

    def _put(self, keys: Sequence[str], pages: Sequence[Any]) -> list[bool]:
        names = [self._key(key) for key in keys]
        outcomes: list[Any] = self._connection.call(
            "putting pages", [None] * len(keys), lambda pool: pool.batch_put(names, pages)
        )
        self._report("put", outcomes)
        return [isinstance(outcome, bool) for outcome in outcomes]

    def _report(self, what: str, outcomes: Sequence[Any]) -> None:
        errors = [outcome for outcome in outcomes if isinstance(outcome, kvpool.Error)]
        if errors:
            logger.warning("%d of %d pages were not %s: %s", len(errors), len(outcomes), what, errors[0])

    def _register(self, pool: kvpool.Pool, buffer: Any) -> None:
        self._registered.append(pool.register_buffer(buffer))
