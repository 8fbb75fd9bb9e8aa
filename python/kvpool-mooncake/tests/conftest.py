"""Fixtures of the store's tests: pools of real processes, and stores that are set up with them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import called
import pytest
from mooncake.store import MooncakeDistributedStore
from lent_memory import Memory
from live_pools import LivePool, make_pool, own_pool, shared_pool

__all__ = ["make_pool", "own_pool", "shared_pool"]

# The name of a test in test_every_method.py.
EVERY_METHOD = "test_every_method_was_called_and_returned"

called.record()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Notes a file of tests. The tests of a file that needs a missing package do not become items."""
    if isinstance(collector, pytest.Module):
        called.FILES.add(collector.path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Moves the test about called methods behind all others. One of several processes does not have it: it knows only
    the methods that its own tests call."""
    items.sort(key=lambda item: item.path.name == "test_every_method.py")
    if is_one_of_several(config):
        items[:] = [item for item in items if item.name != EVERY_METHOD]


def is_one_of_several(config: pytest.Config) -> bool:
    """Whether pytest-xdist started this process to run some of the tests."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Notes what the tests of another process have called."""
    noted = getattr(node, "workeroutput", {})
    called.RETURNED.update(noted.get("returned", ()))
    called.FILES.update(map(Path, noted.get("files", ())))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tells the process that started this one what its tests have called. That process fails if a method is missing."""
    config = session.config
    if is_one_of_several(config):
        noted = {"returned": sorted(called.RETURNED), "files": sorted(map(str, called.FILES))}
        config.workeroutput.update(noted)  # type: ignore[attr-defined]
    elif config.getoption("numprocesses", None):
        # The module imports these fixtures' folder, which is complete only now.
        from test_every_method import never_returned

        if missing := never_returned(config):
            print(f"\nFAILED {EVERY_METHOD}: not called: {', '.join(missing)}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


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
