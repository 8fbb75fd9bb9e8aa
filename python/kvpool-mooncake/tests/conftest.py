"""Fixtures of the store's tests: pools of real processes, and stores that are set up with them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import called
import pytest
from mooncake.store import MooncakeDistributedStore
from lent_memory import Memory
from live_pools import LivePool, make_pool, own_pool, shared_pool

__all__ = ["make_pool", "own_pool", "shared_pool"]

called.record()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Notes a file of tests. The tests of a file that needs a missing package do not become items."""
    if isinstance(collector, pytest.Module):
        called.FILES.add(collector.path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the test about called methods behind all others."""
    items.sort(key=lambda item: item.path.name == "test_every_method.py")


@pytest.fixture(scope="module")
def store(shared_pool: LivePool) -> Iterator[MooncakeDistributedStore]:
    """A pure client of the file's pool."""
    store = MooncakeDistributedStore()
    master = f"127.0.0.1:{shared_pool.port}"
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", master) == 0
    yield store
    store.close()


@pytest.fixture
def connect() -> Iterator[Callable[[LivePool], MooncakeDistributedStore]]:
    """Makes pure clients of a pool. They are closed after the test."""
    stores = []

    def make(pool: LivePool) -> MooncakeDistributedStore:
        store = MooncakeDistributedStore()
        assert store.setup("localhost", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", pool.url) == 0
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def key() -> str:
    """A key that no other test uses."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def memory() -> type[Memory]:
    """Makes memory by its address: of a given size, or with given bytes."""
    return Memory
