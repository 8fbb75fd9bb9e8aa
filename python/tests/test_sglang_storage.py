"""SGLang's storage over stand-ins of SGLang's own classes: the names of pages, and their removal."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import kvpool
import pytest
from sglang_stands import Context

OURS = ("kvpool.sglang.storage", "kvpool.sglang.models")


class HiCacheStorage:
    """Stands for SGLang's base class."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        pass


class Connection:
    """Stands for the connection and for the pool."""

    def __init__(self, _settings: Any = None) -> None:
        self.patterns: list[tuple[str, bool]] = []
        self.failures: list[kvpool.Error] = []
        self.kept = 0
        self.is_there = True
        self.error: kvpool.Error | None = None

    def pool(self) -> Connection | None:
        return self if self.is_there else None

    def call(self, what: str, otherwise: Any, ask: Callable[[Any], Any]) -> Any:
        try:
            return ask(self) if self.is_there else otherwise
        except kvpool.Error as error:
            self.failed(what, error)
            return otherwise

    def failed(self, _what: str, error: kvpool.Error) -> None:
        self.failures.append(error)

    def remove_matching(self, regex: str, *, force: bool = False) -> tuple[int, int]:
        if self.error is not None:
            raise self.error
        self.patterns.append((regex, force))
        return 7, self.kept


@pytest.fixture
def context() -> Context:
    return Context()


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch, context: Context) -> Iterator[Any]:
    """`kvpool.sglang.storage` without SGLang, without torch and without a pool."""
    torch = types.ModuleType("torch")
    torch.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    stands: dict[str, dict[str, Any]] = {
        "mem_cache.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "PoolHitPolicy": types.SimpleNamespace(ALL_PAGES=0, TRAILING_PAGES=1),
            "PoolName": types.SimpleNamespace(KV="kv", MAMBA="mamba"),
            "PoolTransferResult": object,
        },
        "runtime_context": {"get_context": lambda: context},
    }
    for name, content in stands.items():
        module = types.ModuleType(f"sglang.srt.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("kvpool.sglang.storage")
    monkeypatch.setattr(module, "Connection", Connection)
    yield module
    for name in OURS:
        sys.modules.pop(name, None)


def memory(**fields: Any) -> Any:
    """Host memory as SGLang 0.5.23 allocates it for an 8-bit cache."""
    return types.SimpleNamespace(
        **{"layout": "page_first", "page_size": 64, "dtype": "torch.uint8", "size_per_token": 512, **fields}
    )


def made(storage: Any, **fields: Any) -> Any:
    """Makes the storage of a rank of a model; without `fields` the rank is the only one."""
    config = {
        "model_name": "tiny",
        "is_mla_model": False,
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "dcp_rank": 0,
        "dcp_size": 1,
        "extra_config": {},
    }
    return storage.KvpoolStorage(types.SimpleNamespace(**{**config, **fields}))


def names(storage: Any, host_memory: Any) -> tuple[str, str]:
    """Returns the name of a page in this memory, in the model's cache and in a cache beside it."""
    backend = made(storage)
    backend.register_mem_host_pool_v2(host_memory, "indexer")
    beside = f"{backend._key('page')}{backend._side_pool('indexer').suffix}"
    backend.register_mem_pool_host(host_memory)
    return backend._key("page"), beside


def all_differ(named: list[tuple[str, str]]) -> bool:
    return len({name for both in named for name in both}) == 2 * len(named)


def test_element_types_that_memory_holds_as_bytes_have_different_names(storage: Any, context: Context) -> None:
    named = []
    for kinds in [("fp8_e4m3",), ("fp8_e5m2",), ("fp8_e4m3", "fp8_e5m2")]:
        context.publish(*kinds)
        named.append(names(storage, memory()))
    assert all_differ(named)
    context.publish("fp8_e4m3")
    assert names(storage, memory()) == named[0]


def test_pages_with_different_draft_models_have_different_names(storage: Any, context: Context) -> None:
    named = []
    for spec in [
        {},
        {"algorithm": "EAGLE", "draft_model_path": "heads/a"},
        {"algorithm": "EAGLE", "draft_model_path": "heads/b"},
        {"algorithm": "EAGLE3", "draft_model_path": "heads/a"},
        {"algorithm": "EAGLE", "draft_model_path": "heads/a", "draft_model_revision": "main"},
        {"algorithm": "EAGLE", "draft_model_path": "heads/a", "draft_model_quantization": "fp8"},
        {"algorithm": "EAGLE", "draft_model_path": "/models/tiny"},
    ]:
        context.publish(**spec)
        named.append(names(storage, memory()))
    assert all_differ(named)


def test_drafts_without_a_model_change_no_name(storage: Any, context: Context) -> None:
    context.publish()
    without = names(storage, memory())
    context.publish(algorithm="NGRAM")
    assert names(storage, memory()) == without


def test_a_model_that_drafts_itself_has_one_name_at_every_path(storage: Any, context: Context) -> None:
    named = []
    for path in ["/models/tiny", "/mnt/tiny"]:
        context.publish(algorithm="EAGLE", draft_model_path=path)
        context.bags["model"].model_path = path
        named.append(names(storage, memory()))
    assert named[0] == named[1]


def beside(storage: Any, kind: str, host_memory: Any, **fields: Any) -> str:
    """Returns the name of a page in memory of this kind beside the model's cache."""
    backend = made(storage, **fields)
    backend.register_mem_host_pool_v2(host_memory, kind)
    return f"{backend._key('page')}{backend._side_pool(kind).suffix}"


class MHATokenToKVPoolHost(types.SimpleNamespace):
    """Stands for SGLang's host memory of keys and values."""


class MLATokenToKVPoolHost(types.SimpleNamespace):
    """Stands for SGLang's host memory of latent attention."""


class HiSparse(MLATokenToKVPoolHost):
    """Stands for one of its subclasses."""


@pytest.mark.parametrize("kind", ["draft", "draft_swa"])
def test_keys_and_values_of_a_draft_model_are_each_ranks_own(
    storage: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def of_ranks(host_memory: Any, name: str = kind, is_mla: bool = True) -> list[str]:
        ranks = [(0, 2), (1, 2), (0, 1)]
        return [
            beside(storage, name, host_memory, is_mla_model=is_mla, tp_rank=rank, tp_size=size)
            for rank, size in ranks
        ]

    assert len(set(of_ranks(MHATokenToKVPoolHost()))) == 3
    assert "rank 0 only" in caplog.text
    caplog.clear()
    # All ranks have the same bytes of these, and share them also with engines of other sizes.
    assert len(set(of_ranks(MLATokenToKVPoolHost()))) == 1
    assert len(set(of_ranks(HiSparse()))) == 1
    assert len(set(of_ranks(MHATokenToKVPoolHost(), "indexer"))) == 1
    # The names of such a model contain its ranks already.
    assert len(set(of_ranks(MHATokenToKVPoolHost(), is_mla=False))) == 3
    assert not caplog.text


def test_the_names_of_a_draft_beside_keys_and_values_are_as_before(storage: Any) -> None:
    backend = made(storage)
    backend.register_mem_host_pool_v2(memory(), "draft")
    backend.register_mem_host_pool_v2(memory(), "indexer")
    suffixes = [backend._side_pool(kind).suffix for kind in ("draft", "indexer")]
    assert suffixes[0].removeprefix(".draft-") == suffixes[1].removeprefix(".indexer-")


def test_pages_with_different_cache_types_on_the_device_have_different_names(storage: Any) -> None:
    kinds = ("torch.float8_e4m3fn", "torch.float8_e5m2")
    devices = [types.SimpleNamespace(dtype=kind) for kind in kinds]
    assert all_differ([names(storage, memory(device_pool=device)) for device in devices])


def test_pages_of_more_layers_have_other_names(storage: Any) -> None:
    assert all_differ([names(storage, memory(size_per_token=size)) for size in (512, 768)])


def test_memory_without_an_engine_and_without_sizes_has_names(storage: Any) -> None:
    bare = types.SimpleNamespace(layout="page_first", page_size=64)
    assert all_differ([names(storage, bare)])


def test_a_clear_removes_the_pages_of_the_model(storage: Any) -> None:
    backend = made(storage)
    backend.clear()
    assert backend._connection.patterns == [(f"^{backend._prefix}", True)]


def test_a_clear_that_removed_nothing_raises(storage: Any) -> None:
    backend = made(storage)
    backend._connection.is_there = False
    with pytest.raises(kvpool.UnreachableError):
        backend.clear()
    backend._connection.is_there = True
    backend._connection.error = kvpool.DeadlineError("late")
    with pytest.raises(kvpool.DeadlineError):
        backend.clear()
    # The connection leaves the pool alone for a moment, as after every call without an answer.
    assert backend._connection.failures == [backend._connection.error]
    backend._connection.error, backend._connection.kept = None, 2
    with pytest.raises(kvpool.LeasedError, match="2 pages"):
        backend.clear()
