"""The reports of both halves of the vLLM connector about preempted requests, without a pool."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from kvpool.vllm.handoff import Exchange
from kvpool.vllm.keys import Group, Layout
from kvpool.vllm.plan import Plan, Send
from kvpool.vllm.scheduler import Planner, Progress
from kvpool.vllm.segments import BlockMap, Segment
from kvpool.vllm.worker import GroupMemory, Mover

Answer = TypeVar("Answer")

HASHES = [hashlib.sha256(bytes([at])).digest() for at in range(3)]


class Pool:
    """Stands for the pool and the connection to it. A save waits until the test lets it end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def pool(self) -> Pool:
        return self

    def call(self, _what: str, _otherwise: Answer, ask: Callable[[Any], Answer]) -> Answer:
        return ask(self)

    def batch_put(self, keys: list[str], _blocks: Any, *, parents: Any) -> list[Any]:
        assert self.may_end.wait(30)
        return [True] * len(keys)


class Engine:
    """One scheduler and one worker with a request "a"."""

    def __init__(self) -> None:
        self.pool = Pool()
        connection: Any = self.pool
        layout = Layout("p", ("t0p0",), (Group(0, 16),), 16, 16)
        self.planner = Planner(layout, connection, loads=False, saves=True)
        memory = GroupMemory(BlockMap((Segment(4096, 64, 64),)), staging=None, direct=True, kept=True)
        self.mover = Mover(
            connection, "t0p0", {0: memory}, saves=True, save_backlog=1 << 20, save_patience=5.0, rest=0.2
        )

    def close(self) -> None:
        self.pool.may_end.set()
        self.planner.close()
        self.mover.close()

    def compute(self) -> None:
        """A step that computes the request, so that its blocks are saved."""
        progress = Progress("a", HASHES, len(HASHES) * 16, lambda: [[1, 2, 3]])
        self.mover.save(self.planner.step([progress], ()))

    def step(self, *, preempted: tuple[str, ...] = (), over: tuple[str, ...] = ()) -> set[str]:
        """A step without a computation. Returns the requests that the worker names."""
        plan = self.planner.step([], preempted)
        self.pool.may_end.set()
        self.mover.stop(plan.preempted)
        self.mover.save(plan)
        return self.mover.moved(over).saved


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def test_a_request_that_ends_between_its_preemption_and_the_next_step_is_named(engine: Engine) -> None:
    engine.compute()
    # vLLM resets its running requests, and aborts a request before the next step.
    assert engine.planner.finished("a") is True
    assert engine.step(preempted=("a",), over=("a",)) == {"a"}
    assert engine.step() == set()


def test_a_request_that_ends_after_the_step_of_its_preemption_is_not_named(engine: Engine) -> None:
    engine.compute()
    assert engine.step(preempted=("a",)) == set()
    assert engine.planner.finished("a") is False
    assert engine.step(over=("a",)) == set()


def test_a_request_without_saves_is_not_named(engine: Engine) -> None:
    assert engine.planner.finished("a") is False
    assert engine.step(preempted=("a",), over=("a",)) == set()


def test_a_hand_off_that_ends_between_its_preemption_and_the_next_step_is_named() -> None:
    session: Any = None
    half = Exchange(session, "pull", [0], timeout=20.0)
    send = Plan("p", sends=(Send("a", 5, (1, 2), 1),))
    half.begin_sends(send)
    half.stop(["a"])
    assert half.sent(["a"]) == {"a"}
    half.begin_sends(send)
    half.stop(["a"])
    assert half.sent([]) == set()
    assert half.sent(["a"]) == set()
