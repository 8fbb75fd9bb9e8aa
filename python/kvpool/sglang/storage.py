"""kvpool as the storage of SGLang's hierarchical cache.

```
python -m sglang.launch_server ... --enable-hierarchical-cache --hicache-mem-layout page_first \
  --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvpool",
  "module_path": "kvpool.sglang", "class_name": "KvpoolStorage", "interface_v1": 1,
  "master": "http://10.0.0.1:7070"}'
```

Further settings go beside `master`: those of `kvpool._engines.settings.PoolSettings`, and `salt`.
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
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

import kvpool
from kvpool._engines.connection import Connection
from kvpool._engines.settings import PoolSettings
from kvpool.sglang.models import cache_types, draft

logger = logging.getLogger(__name__)

_DRAFT_POOLS = ("draft", "draft_swa")
"""SGLang's names for the memory of a draft model's keys and values."""

_EQUAL_ON_ALL_RANKS = ("MLATokenToKVPoolHost", "DeepSeekV4PagedHostPool")
"""SGLang's classes of host memory with equal pages on all ranks: the classes of latent attention."""

_OF_SGLANG = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    # SGLang itself reads these keys from the same object.
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
)


@dataclasses.dataclass(frozen=True)
class Settings(PoolSettings):
    """The settings of this backend, besides `PoolSettings`."""

    salt: str = ""
    """Separates models with the same name, such as two sets of weights."""


@dataclasses.dataclass(frozen=True)
class _SidePool:
    """Host memory besides the KV cache, for example of recurrent states or an indexer."""

    memory: Any
    suffix: str
    """The suffix of its pages' keys."""
    direct: bool
    """Whether the memory gives the address of each page. Otherwise each page is copied once more."""


class KvpoolStorage(HiCacheStorage):  # type: ignore[misc]
    """Stores pages of SGLang's host memory in a pool that all hosts share.

    `storage_config` names the model and the rank, and contains the settings in its `extra_config`.
    With `interface_v1` pages move directly between the pool and SGLang's host memory; without it SGLang
    copies each page once more. A failure is a miss and a line in the log.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None):
        extra = dict(storage_config.extra_config or {})
        self._direct = bool(extra.get("interface_v1", 0))
        settings = Settings.read({name: value for name, value in extra.items() if name not in _OF_SGLANG})
        self._config = storage_config
        self._settings = settings
        self._connection = Connection(settings)
        self._registered: list[kvpool.Registration] = []
        self._side_pools: dict[str, _SidePool] = {}
        self._prefix = self._make_prefix("")

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Registers SGLang's host memory; its format becomes part of the keys."""
        super().register_mem_pool_host(mem_pool_host)
        self._prefix = self._make_prefix(repr(_format(mem_pool_host)))
        buffer = getattr(mem_pool_host, "kv_buffer", None)
        if isinstance(buffer, torch.Tensor):
            self._connection.call("registering memory", None, lambda pool: self._register(pool, buffer))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Registers another kind of host memory, for models whose cache has more than keys and values."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name == str(PoolName.KV):
            return
        direct = self._direct and _has_addresses(host_pool)
        rank = None
        if self._differs_between_ranks(host_pool, name):
            rank = (self._config.tp_rank, self._config.tp_size)
        digest = hashlib.sha256(repr([_format(host_pool), direct, rank]).encode()).hexdigest()
        self._side_pools[name] = _SidePool(host_pool, f".{name}-{digest[:16]}", direct)
        if direct:
            buffers = _buffers(host_pool)
            self._connection.call("registering memory", None, lambda pool: self._register(pool, *buffers))

    def _differs_between_ranks(self, memory: Any, name: str) -> bool:
        """Whether ranks that share the model's pages have different pages in this memory."""
        if name == str(PoolName.MAMBA):
            return True
        if name not in _DRAFT_POOLS or not self._config.is_mla_model:
            return False
        kinds = {kind.__name__ for kind in type(memory).__mro__}
        if not kinds.isdisjoint(_EQUAL_ON_ALL_RANKS):
            return False
        if self._config.tp_size > 1:
            logger.warning(
                "ranks have different pages of the draft model (%s), and SGLang saves those of "
                "rank 0 only: engines will find no pages in the pool",
                name,
            )
        return True

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """Returns how many leading pages can be used, and how many pages of each kind of memory are present.

        Each kind has its own rule for the pages that it requires. Present pages are leased for a short time.
        """
        transfers = pool_transfers or []
        policies = (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)
        for transfer in transfers:
            if transfer.hit_policy not in policies:
                raise ValueError(f"pool {transfer.name}: {transfer.hit_policy} is not known")
        # Some caches have no keys and values of their own: all data is in the other kinds of memory.
        has_kv = getattr(self.mem_pool_host, "kv_buffer", True) is not None
        kinds = ([""] if has_kv else []) + [self._side_pool(transfer.name).suffix for transfer in transfers]
        names = [f"{self._key(key)}{kind}" for kind in kinds for key in keys]
        none = [False] * len(names)
        present = self._connection.call("looking pages up", none, lambda pool: pool.is_exist(names))
        of_kinds = [present[at : at + len(keys)] for at in range(0, len(present), len(keys) or 1)]
        pages = _leading(of_kinds.pop(0)) if has_kv and of_kinds else 0 if has_kv else len(keys)
        hits: dict[Any, int] = {PoolName.KV: pages} if pages else {}
        usable = list(range(1, pages + 1))
        for transfer, there in zip(transfers, of_kinds, strict=False):
            window = pages
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or []))
            ends = {end for end in range(1, pages + 1) if all(there[max(0, end - window) : end])}
            if ends:
                hits[transfer.name] = max(ends)
            usable = [end for end in usable if end in ends]
        return PoolTransferResult(max(usable, default=0), hits, usable)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Gets pages into several kinds of host memory. Returns for each kind which pages were hits."""
        return {transfer.name: self._get_v2(transfer) for transfer in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Puts pages from several kinds of host memory. Returns for each kind which pages are in the pool."""
        return {transfer.name: self._set_v2(transfer) for transfer in transfers}

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Gets pages into SGLang's host memory. Returns for each page whether it was a hit."""
        return self._get_pages(self._names(keys), _pages(self.mem_pool_host, keys, host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Puts pages from SGLang's host memory. Returns for each page whether it is in the pool."""
        return self._put(self._names(keys), _pages(self.mem_pool_host, keys, host_indices))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Returns a page as a tensor: `target_location` if given, else a new tensor of bytes. None for a
        miss."""
        if target_location is not None:
            return self.batch_get([key], [target_location])[0]
        found = self._connection.call("getting a page", None, lambda pool: pool.get(self._key(key)))
        return None if found is None else torch.frombuffer(bytearray(found), dtype=torch.uint8)

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Gets pages into tensors. Returns for each page its tensor, or None for a miss."""
        if target_locations is None:
            return [self.get(key) for key in keys]
        outcomes = self._get(self._names(keys), list(target_locations))
        return [
            tensor if outcome == tensor.numel() * tensor.element_size() else None
            for outcome, tensor in zip(outcomes, target_locations, strict=True)
        ]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Puts a page. Returns whether it is in the pool."""
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Puts pages. Returns whether all of them are in the pool."""
        if values is None:
            return False
        return all(self._put(self._names(keys), [value.contiguous() for value in values]))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Returns how many leading pages are present. Each of them is leased for a short time."""
        names = self._names(keys)
        present: list[bool] = []
        return _leading(self._connection.call("looking pages up", present, lambda pool: pool.is_exist(names)))

    def clear(self) -> None:
        """Removes the pages of this model and rank, for all hosts, leased ones too. Raises kvpool.Error if the
        pool keeps some of them: SGLang takes a normal return for success."""
        mine = f"^{self._prefix}"
        pool = self._connection.pool()
        if pool is None:
            raise kvpool.UnreachableError(
                "no page was removed, the pool did not answer lately: clear again when it does", "unreachable", True
            )
        try:
            _removed, kept = pool.remove_matching(mine, force=True)
        except kvpool.Error as error:
            self._connection.failed("removing pages", error)
            raise
        if kept:
            raise kvpool.LeasedError(f"{kept} pages were not removed, they are in use: clear again", "leased", True)

    def get_stats(self) -> None:
        """Returns nothing: the pool's own metrics replace SGLang's."""

    def close(self) -> None:
        """Closes the connection to the pool."""
        self._connection.close()

    def _make_prefix(self, memory: str) -> str:
        """Returns the key prefix of this model and rank.

        Ranks of a model with latent attention have equal pages, so they share keys.
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

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self._key(key) for key in keys]

    def _side_pool(self, name: Any) -> _SidePool:
        if str(name) == str(PoolName.KV):
            return _SidePool(self.mem_pool_host, "", self._direct)
        try:
            return self._side_pools[str(name)]
        except KeyError:
            raise ValueError(f"pool {name} has not been registered") from None

    def _get_v2(self, transfer: Any) -> list[bool]:
        keys, indices = transfer.keys or [], transfer.host_indices
        pool = self._side_pool(transfer.name)
        names = [f"{name}{pool.suffix}" for name in self._names(keys)]
        if not _is_whole(pool.memory, keys, indices):
            return _no_pages("got", transfer)
        if pool.direct:
            return self._get_pages(names, _pages(pool.memory, keys, indices))
        room = [pool.memory.get_dummy_flat_data_page() for _ in keys]
        outcomes = self._get(names, room)
        came = [
            outcome == page.numel() * page.element_size()
            for outcome, page in zip(outcomes, room, strict=True)
        ]
        for start, page, is_there in zip(_starts(pool.memory, indices), room, came, strict=True):
            if is_there:
                pool.memory.set_from_flat_data_page(start, page)
        return came

    def _set_v2(self, transfer: Any) -> list[bool]:
        keys, indices = transfer.keys or [], transfer.host_indices
        pool = self._side_pool(transfer.name)
        names = [f"{name}{pool.suffix}" for name in self._names(keys)]
        if not _is_whole(pool.memory, keys, indices):
            return _no_pages("put", transfer)
        if pool.direct:
            return self._put(names, _pages(pool.memory, keys, indices))
        starts = _starts(pool.memory, indices)
        return self._put(names, [pool.memory.get_data_page(start, flat=True).contiguous() for start in starts])

    def _get_pages(self, names: Sequence[str], pages: list[list[tuple[int, int]]]) -> list[bool]:
        outcomes = self._get(names, pages)
        return [
            outcome == sum(length for _, length in page)
            for outcome, page in zip(outcomes, pages, strict=True)
        ]

    def _get(self, names: Sequence[str], into: Sequence[Any]) -> list[Any]:
        outcomes: list[Any] = self._connection.call(
            "getting pages", [None] * len(names), lambda pool: pool.batch_get(names, into)
        )
        self._report("got", outcomes)
        return outcomes

    def _put(self, names: Sequence[str], pages: Sequence[Any]) -> list[bool]:
        outcomes: list[Any] = self._connection.call(
            "putting pages", [None] * len(names), lambda pool: pool.batch_put(names, pages)
        )
        self._report("put", outcomes)
        return [isinstance(outcome, bool) for outcome in outcomes]

    def _report(self, what: str, outcomes: Sequence[Any]) -> None:
        errors = [outcome for outcome in outcomes if isinstance(outcome, kvpool.Error)]
        if errors:
            logger.warning("%d of %d pages were not %s: %s", len(errors), len(outcomes), what, errors[0])

    def _register(self, pool: kvpool.Pool, *buffers: Any) -> None:
        self._registered.extend(pool.register_buffer(buffer) for buffer in buffers)


def _leading(present: Sequence[bool]) -> int:
    """The number of leading true values."""
    return list(present).index(False) if False in present else len(present)


def _format(memory: Any) -> list[str]:
    """Describes the format of the pages of a host memory, as far as SGLang reports it."""
    fields = [str(getattr(memory, field, "")) for field in ("layout", "page_size", "dtype", "size_per_token")]
    device_type = str(getattr(getattr(memory, "device_pool", None), "dtype", ""))
    return [*fields, device_type, *cache_types(), *draft()]


def _page_size(memory: Any) -> int:
    return int(getattr(memory, "page_size", 1) or 1)


def _is_whole(memory: Any, keys: Sequence[str], host_indices: Any) -> bool:
    """Whether every page has a location in host memory."""
    return bool(keys) and host_indices is not None and len(host_indices) == len(keys) * _page_size(memory)


def _no_pages(what: str, transfer: Any) -> list[bool]:
    keys = transfer.keys or []
    if keys:
        logger.warning("%d pages of pool %s were not %s: not each has a place", len(keys), transfer.name, what)
    return [False] * len(keys)


def _starts(memory: Any, host_indices: Any) -> list[int]:
    """The index into host memory at which each page begins."""
    return [int(index) for index in host_indices[:: _page_size(memory)]]


def _pages(memory: Any, keys: Sequence[str], host_indices: Any) -> list[list[tuple[int, int]]]:
    """Each page of SGLang's host memory, as (address, length)."""
    addresses, lengths = memory.get_page_buffer_meta(host_indices)
    pieces = [(int(address), int(length)) for address, length in zip(addresses, lengths, strict=True)]
    if not keys or len(pieces) % len(keys):
        raise ValueError(f"{len(pieces)} pieces of memory for {len(keys)} pages")
    each = len(pieces) // len(keys)
    return [pieces[at : at + each] for at in range(0, len(pieces), each)]


def _has_addresses(memory: Any) -> bool:
    """Whether a host memory gives the address of each page. Some do so only in some layouts."""
    try:
        addresses, _lengths = memory.get_page_buffer_meta(torch.arange(_page_size(memory)))
    except (AttributeError, AssertionError, NotImplementedError, ValueError):
        return False
    return bool(addresses)


def _buffers(memory: Any) -> list[Any]:
    """The tensors of a host memory pool."""
    listed = getattr(memory, "get_hybrid_pool_buffer", None)
    tensors = listed() if listed else [getattr(memory, "kv_buffer", None)]
    return [each for each in tensors if isinstance(each, torch.Tensor) and each.numel()]
