"""LMCache's remote connector over stand-ins of LMCache's own classes: what it refuses."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest


class RemoteConnector:
    """Stands for LMCache's base class."""

    def __init__(self, config: Any, metadata: Any) -> None:
        pass


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`kvpool.lmcache.remote` without LMCache and without a pool."""
    stands: dict[str, dict[str, Any]] = {
        "protocol": {"RemoteMetadata": object},
        "storage_backend.connector.base_connector": {"RemoteConnector": RemoteConnector},
    }
    for name, content in stands.items():
        module = types.ModuleType(f"lmcache.v1.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "kvpool.lmcache.remote", raising=False)
    module = importlib.import_module("kvpool.lmcache.remote")
    monkeypatch.setattr(module, "Connection", lambda _settings: None)
    yield module
    sys.modules.pop("kvpool.lmcache.remote", None)


def connector(remote: Any, *, use_layerwise: bool) -> Any:
    config = types.SimpleNamespace(extra_config={}, use_layerwise=use_layerwise)
    return remote.KvpoolConnector(None, types.SimpleNamespace(config=config, metadata=None), config)


def test_chunks_of_one_layer_are_refused(remote: Any) -> None:
    with pytest.raises(ValueError, match="set use_layerwise to false"):
        connector(remote, use_layerwise=True)


def test_chunks_of_all_layers_are_stored(remote: Any) -> None:
    assert connector(remote, use_layerwise=False)
