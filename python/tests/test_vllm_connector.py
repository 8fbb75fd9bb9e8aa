"""vLLM's connector over stand-ins of vLLM and the pool: the names of blocks, and a reset of the cache."""

from __future__ import annotations

import hashlib
import importlib
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import kvpool
import pytest
import vllm_stands

Answer = TypeVar("Answer")

HASHES = [hashlib.sha256(bytes([at])).digest() for at in range(4)]
TOKENS = len(HASHES) * 16 + 1


class Lease:
    """A lease that is long enough for every test."""

    left = 60.0

    def __init__(self) -> None:
        self.is_released = False

    def renew(self) -> int:
        return 0

    def release(self) -> None:
        self.is_released = True


class Pool:
    """Stands for the pool and the connection to it. It has a block under every key, or none."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.patterns: list[tuple[str, bool]] = []
        self.kept = 0
        self.is_full = True
        self.is_there = True
        self.error: kvpool.Error | None = None

    def __call__(self, _settings: Any) -> Pool:
        return self

    def call(self, _what: str, otherwise: Answer, ask: Callable[[Any], Answer]) -> Answer:
        if not self.is_there:
            return otherwise
        try:
            return ask(self)
        except kvpool.Error:
            return otherwise

    def match_prefix(self, keys: list[str]) -> Any:
        if not self.is_full:
            return None
        self.leases.append(Lease())
        return types.SimpleNamespace(blocks=len(keys), lease=self.leases[-1])

    def remove_matching(self, regex: str, *, force: bool = False) -> tuple[int, int]:
        if self.error is not None:
            raise self.error
        self.patterns.append((regex, force))
        return 7, self.kept

    def close(self) -> None:
        pass


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> Iterator[Any]:
    """`kvpool.vllm.connector` without vLLM, without torch and without a pool."""
    for name, module in vllm_stands.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    ours = ("connector", "memory", "staging")
    for name in ours:
        monkeypatch.delitem(sys.modules, f"kvpool.vllm.{name}", raising=False)
    module = importlib.import_module("kvpool.vllm.connector")
    monkeypatch.setattr(module, "Connection", pool)
    yield module
    for name in ours:
        sys.modules.pop(f"kvpool.vllm.{name}", None)


@pytest.fixture
def scheduler(connector: Any) -> Iterator[Any]:
    """The scheduler's connector of an engine."""
    made = connector.KvpoolConnector(vllm_stands.configuration(), vllm_stands.Role.SCHEDULER, vllm_stands.cache())
    yield made
    made.shutdown()


def found(scheduler: Any, request: str) -> int:
    """Returns how many tokens a lookup finds, repeated in each step until it has an answer."""
    end = time.monotonic() + 30
    while (tokens := scheduler._planner.lookup(request, HASHES, TOKENS, 0)) is None:
        assert time.monotonic() < end
        scheduler._planner.step([], [])
    return int(tokens)


def test_a_reset_removes_the_blocks_of_the_engines_names(scheduler: Any, pool: Pool) -> None:
    prefix = scheduler._planner.step([], []).prefix
    assert scheduler.reset_cache() is True
    ((pattern, force),) = pool.patterns
    assert force
    # Only `-` and `.` in the name need an escape.
    assert pattern.replace("\\", "") == f"^{prefix}:"


def test_a_reset_forgets_found_blocks_and_releases_their_leases(scheduler: Any, pool: Pool) -> None:
    assert found(scheduler, "a") == TOKENS - 1
    assert scheduler.reset_cache() is True
    end = time.monotonic() + 30
    while not pool.leases[0].is_released:
        assert time.monotonic() < end
        time.sleep(0.01)
    # The next lookup asks the pool again.
    assert found(scheduler, "a") == TOKENS - 1
    assert len(pool.leases) == 2
    # The lookup before the reset does not count as saved.
    pool.is_full = False
    assert scheduler.reset_cache() is True
    assert found(scheduler, "a") == 0
    assert scheduler._planner._saved_units == {"a": 0}


def test_a_reset_that_did_not_remove_all_blocks_fails(scheduler: Any, pool: Pool) -> None:
    pool.kept = 1
    assert scheduler.reset_cache() is False
    pool.kept, pool.is_there = 0, False
    assert scheduler.reset_cache() is False
    pool.is_there, pool.error = True, kvpool.Error("refused")
    assert scheduler.reset_cache() is False
    pool.error = None
    assert scheduler.reset_cache() is True


def test_a_load_that_fails_after_the_end_of_its_request_leaves_no_note(scheduler: Any) -> None:
    output = types.SimpleNamespace(finished_recving={"a"}, failed_recving={"a"}, invalid_block_ids=None)
    scheduler.update_connector_output(output)
    assert scheduler._planner._failed == set()
    scheduler.on_new_request(types.SimpleNamespace(request_id="a"))
    scheduler.update_connector_output(output)
    assert scheduler._planner._failed == {"a"}


def test_a_workers_reset_is_vllms(connector: Any, pool: Pool) -> None:
    worker = connector.KvpoolConnector(vllm_stands.configuration(), vllm_stands.Role.WORKER, vllm_stands.cache())
    assert worker.reset_cache() is None
    assert pool.patterns == []


def prefix(connector: Any, speculative: Any = None, layers: int = 4, **fields: Any) -> str:
    """The prefix of the names of an engine's blocks."""
    role = vllm_stands.Role.SCHEDULER
    config = vllm_stands.configuration(speculative_config=speculative, **fields)
    made = connector.KvpoolConnector(config, role, vllm_stands.cache(layers))
    named = str(made._planner.step([], []).prefix)
    made.shutdown()
    return named


def drafts(
    method: str, model: str, revision: str | None = None, dtype: str = "torch.bfloat16", cache: str | None = None
) -> Any:
    return types.SimpleNamespace(
        method=method,
        model=model,
        revision=revision,
        kv_cache_dtype=cache,
        draft_model_config=types.SimpleNamespace(dtype=dtype),
        use_eagle=lambda: method == "eagle",
    )


def test_blocks_with_other_layers_have_other_names(connector: Any) -> None:
    assert prefix(connector, layers=4) == prefix(connector, layers=4)
    assert prefix(connector, layers=4) != prefix(connector, layers=5)


def test_blocks_with_different_draft_models_have_different_names(connector: Any) -> None:
    named = [
        prefix(connector, chosen, layers=5)
        for chosen in (
            None,
            drafts("eagle", "heads/a"),
            drafts("eagle", "heads/b"),
            drafts("eagle", "heads/a", "main"),
            drafts("eagle", "heads/a", dtype="torch.float16"),
            drafts("eagle", "heads/a", cache="fp8"),
            drafts("draft_model", "heads/a"),
            drafts("mtp", "tiny"),
        )
    ]
    assert len(set(named)) == len(named)


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_drafts_from_the_text_alone_change_no_name(connector: Any, method: str) -> None:
    assert prefix(connector, drafts(method, method)) == prefix(connector)


def test_blocks_with_different_skipped_layers_have_different_names(connector: Any) -> None:
    skipped: list[list[str]] = [[], ["0"], ["0", "1"], ["sliding_window"]]
    named = [prefix(connector, cache_config=vllm_stands.cached("fp8", layers)) for layers in skipped]
    assert len(set(named)) == len(named)
    # vLLM sorts the layers that it adds itself, but not the layers of the command line.
    again = prefix(connector, cache_config=vllm_stands.cached("fp8", ["1", "0", "1"]))
    assert again == named[2]
