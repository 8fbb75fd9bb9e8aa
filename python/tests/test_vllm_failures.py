"""Failures of the pool cost the vLLM connector hits, but never a thread of the engine."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import kvpool
import pytest
from kvpool import handoff
from kvpool._engines.connection import Connection
from kvpool._engines.threads import started
from kvpool.vllm.handoff import Exchange
from kvpool.vllm.keys import Group, Layout
from kvpool.vllm.plan import Block, Move, Plan, Send
from kvpool.vllm.scheduler import Planner
from kvpool.vllm.segments import BlockMap, Segment
from kvpool.vllm.settings import Settings
from kvpool.vllm.worker import GroupMemory, Moved, Mover

HASHES = [hashlib.sha256(bytes([at])).digest() for at in range(3)]
BLOCKS = tuple(Block(0, at + 1, hashed) for at, hashed in enumerate(HASHES))
BYTES = 64


class Panic(BaseException):
    """Stands for a panic of the native module, which is no `Exception`."""


ERRORS = [
    kvpool.UnreachableError("gone", "unreachable", True),
    kvpool.DeadlineError("late", "deadline_exceeded", True),
    kvpool.ClosedError("closed", "closed"),
    kvpool.Error("a bad reply", "malformed"),
    ValueError("a bad reply"),
    MemoryError(),
    Panic("a panic"),
]


class Pool:
    """Stands for a pool whose calls fail with `error`, if it is set."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def match_prefix(self, _keys: list[str]) -> Any:
        return self._answer(None)

    def batch_get(self, keys: list[str], _into: Any) -> list[Any]:
        return list(self._answer([BYTES] * len(keys)))

    def batch_put(self, keys: list[str], _blocks: Any, *, parents: Any) -> list[Any]:
        return list(self._answer([True] * len(keys)))

    def close(self) -> None:
        pass

    def _answer(self, answer: Any) -> Any:
        if self.error is not None:
            raise self.error
        return answer


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """The pool of the test's connections."""
    made = Pool()
    connects = types.SimpleNamespace(connect=lambda *_args, **_named: made)
    monkeypatch.setattr(kvpool, "Pool", connects)
    return made


@pytest.fixture
def connection(pool: Pool) -> Connection:
    # A pause after a failure would hide the failures of later calls.
    return Connection(Settings.read({"retry_after": 1e-9}))


class Staging:
    """Stands for copies in host memory that cannot be made."""

    memory = (0, 0)

    def mark(self) -> None:
        pass

    def gather(self, _numbers: Any, _after: Any) -> Any:
        raise MemoryError("no pinned memory")


@pytest.fixture
def mover(connection: Connection) -> Iterator[Callable[..., Mover]]:
    made: list[Mover] = []

    def make(**fields: Any) -> Mover:
        whole: dict[str, Any] = {"staging": None, "direct": True, "kept": True, **fields}
        memory = GroupMemory(BlockMap((Segment(4096, BYTES, BYTES),)), **whole)
        made.append(
            Mover(
                connection,
                "t0p0",
                {0: memory},
                saves=True,
                save_backlog=1 << 20,
                save_patience=5.0,
                rest=1e-9,
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def planner(connection: Connection) -> Iterator[Planner]:
    layout = Layout("p", ("t0p0",), (Group(0, 16),), 16, 16)
    made = Planner(layout, connection, loads=True, saves=True)
    yield made
    made.close()


def found(planner: Planner) -> int:
    """Returns how many tokens a lookup finds, repeated in each step until it has an answer."""
    end = time.monotonic() + 60
    while (tokens := planner.lookup("a", HASHES, len(HASHES) * 16 + 1, 0)) is None:
        assert time.monotonic() < end
        planner.step([], [])
    return tokens


def moved(mover: Mover, *over: str) -> Moved:
    """Waits until a save or a load has ended."""
    end = time.monotonic() + 60
    while not ((moves := mover.moved(over)).saved or moves.loaded):
        assert time.monotonic() < end
        time.sleep(0.005)
    return moves


def moves() -> tuple[Plan, Plan]:
    """Plans of a load and of a save."""
    move = (Move("a", BLOCKS),)
    return Plan("p", loads=move), Plan("p", saves=move)


@pytest.mark.parametrize("error", ERRORS)
def test_a_lookup_that_fails_is_a_miss(
    planner: Planner, pool: Pool, connection: Connection, error: BaseException
) -> None:
    pool.error = error
    assert found(planner) == 0
    assert connection.failures == 1


@pytest.mark.parametrize("error", ERRORS)
def test_blocks_of_a_load_that_fails_are_computed(
    mover: Callable[..., Mover], pool: Pool, connection: Connection, error: BaseException
) -> None:
    load, _ = moves()
    pool.error = error
    made = mover()
    made.load(load)
    assert moved(made).loaded == {"a": BLOCKS}
    assert connection.failures == 1


@pytest.mark.parametrize("error", ERRORS)
def test_a_request_whose_save_fails_gives_its_blocks_back(
    mover: Callable[..., Mover], pool: Pool, connection: Connection, error: BaseException
) -> None:
    _, save = moves()
    pool.error = error
    made = mover()
    made.save(save)
    assert moved(made, "a").saved == {"a"}
    assert connection.failures == 1
    pool.error = None
    made.save(save)
    assert moved(made, "a").saved == {"a"}


def test_a_save_without_memory_for_its_copy_is_dropped(
    mover: Callable[..., Mover], connection: Connection
) -> None:
    _, save = moves()
    made = mover(staging=Staging(), kept=False)
    made.save(save)
    assert connection.failures == 1
    assert made.moved(["a"]).saved == {"a"}
    assert made._unsaved_bytes == 0


def test_no_call_after_the_end_raises(
    planner: Planner, mover: Callable[..., Mover], connection: Connection
) -> None:
    load, save = moves()
    made = mover()
    made.close()
    planner.close()
    made.load(load)
    made.save(save)
    ended = made.moved(["a"])
    assert (ended.saved, ended.loaded) == ({"a"}, {"a": BLOCKS})
    assert made._unsaved_bytes == 0
    assert found(planner) == 0
    assert connection.failures == 3


def test_a_call_raises_only_what_ends_the_engine(pool: Pool, connection: Connection) -> None:
    pool.error = Panic("a panic")
    assert connection.call("looking", 7, lambda one: one.match_prefix([])) == 7
    assert connection.failures == 1
    ends: list[BaseException] = [KeyboardInterrupt(), SystemExit()]
    for end in ends:
        pool.error = end
        with pytest.raises(type(end)):
            connection.call("looking", 7, lambda one: one.match_prefix([]))
    assert connection.failures == 1


def test_a_system_without_free_threads_stops_no_call(
    planner: Planner,
    mover: Callable[..., Mover],
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load, save = moves()
    made = mover()

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", refuse)
        assert found(planner) == 0
        made.load(load)
        assert moved(made).loaded == {"a": ()}
        made.save(save)
        assert moved(made, "a").saved == {"a"}
        assert connection.failures == 0
        # The pool went away, and no thread is available that could connect again.
        connection._pool = None
        assert connection.pool() is None
        assert connection.failures == 1
    end = time.monotonic() + 60
    while connection.pool() is None:
        assert time.monotonic() < end, "it never connected again"
        time.sleep(0.005)


def test_missing_threads_are_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, given = threading.Thread.start, []

    def refuse_the_second(thread: threading.Thread) -> None:
        if given:
            raise RuntimeError("can't start new thread")
        given.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_second)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        started(2, "test")
    given[0].join(60)
    assert not given[0].is_alive()


def test_failures_are_logged_at_intervals_and_all_counted(
    pool: Pool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    connection = Connection(Settings.read({"retry_after": 5.0}))
    pool.error = kvpool.Error("refused")
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert connection.call("looking", 7, lambda one: one.match_prefix([])) == 7
        assert [record.getMessage() for record in caplog.records] == ["looking failed: refused"]
        now += 5.0
        pool.error = ValueError("odd")
        connection.call("looking", 7, lambda one: one.match_prefix([]))
    assert caplog.records[1].getMessage() == "looking failed (3 failures before it were not logged)"
    assert caplog.records[1].exc_info is not None
    assert connection.failures == 5


def test_a_call_of_a_hand_off_that_fails_ends_it_and_not_the_engine() -> None:
    aborted: list[str] = []

    class Sending(handoff.Sending):
        released = True
        error = "draining"

        def __init__(self) -> None:
            pass

        def produced(self, *_args: Any) -> None:
            raise kvpool.ClosedError("the session is closed", "closed")

        def finish(self, aux: bytes | None = None) -> None:
            raise kvpool.InvalidArgumentError("not all is computed", "invalid_argument")

        def abort(self) -> None:
            aborted.append("a")

    session: Any = types.SimpleNamespace(send=lambda *_args, **_named: Sending())
    half = Exchange(session, "push", [0, 1], timeout=20.0)
    half.begin_sends(Plan("p", sends=(Send("a", 5, (1, 2), 1),)))
    half.layer_computed(0)
    half.step_ended()
    assert aborted == ["a"]
    assert half.sent(["a"]) == {"a"}
