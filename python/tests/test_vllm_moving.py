"""Both halves of the vLLM connector over a live pool and ordinary memory: the part without vLLM.

An *engine* here stands for one rank of a model: some memory in blocks, and the two halves.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import kvpool
import numpy
import pytest
from kvpool._engines.connection import Connection
from kvpool.vllm.keys import Group, Layout, layout_prefix
from kvpool.vllm.plan import Plan
from kvpool.vllm.scheduler import Planner, Progress
from kvpool.vllm.segments import BlockMap, Segment
from kvpool.vllm.settings import Settings
from kvpool.vllm.worker import GroupMemory, Moved, Mover
from live_pools import LivePool

TOKENS = 16
LAYERS = 3
LAYER_BYTES = 4096
BLOCKS = 64

_models = itertools.count()


def prompt(blocks: int, seed: str = "prompt") -> list[bytes]:
    """The hashes of a prompt's blocks."""
    return [hashlib.sha256(f"{seed}{at}".encode()).digest() for at in range(blocks)]


class Engine:
    """One scheduler and one worker. Blocks have a piece in each of three layers."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        ranks: Sequence[str] = ("t0p0",),
        rank: str = "t0p0",
        saves: bool = True,
        **settings: float,
    ):
        self.memory = numpy.zeros((LAYERS, BLOCKS, LAYER_BYTES), dtype=numpy.uint8)
        # With the default `retry_after`, a pool that is away for a moment would be unused for the whole test.
        self.settings = Settings.read({"master": url, "retry_after": 0.2, **settings})
        self.connection = Connection(self.settings)
        layout = Layout(layout_prefix(model, {}), tuple(ranks), (Group(0, TOKENS),), TOKENS, TOKENS)
        self.planner = Planner(layout, self.connection, loads=True, saves=saves)
        start = self.memory.ctypes.data
        starts = [start + at * BLOCKS * LAYER_BYTES for at in range(LAYERS)]
        layers = [Segment(start, LAYER_BYTES, LAYER_BYTES) for start in starts]
        blocks = GroupMemory(BlockMap(tuple(layers)), staging=None, direct=True, kept=True)
        self.mover = Mover(
            self.connection,
            rank,
            {0: blocks},
            saves=saves,
            save_backlog=1 << 30,
            save_patience=5.0,
            rest=0.2,
        )

    def close(self) -> None:
        self.planner.close()
        self.mover.close()
        self.connection.close()

    def lookup(self, request: str, hashes: list[bytes], local: int = 0) -> int:
        """Returns how many blocks after the first `local` can be loaded, for a prompt of one token more. Asks
        in each step until it has an answer."""
        end = time.monotonic() + 30
        while (found := self.ask(request, hashes, local)) is None:
            assert time.monotonic() < end
            self.planner.step([], [])
        return found

    def ask(self, request: str, hashes: list[bytes], local: int = 0) -> int | None:
        """As `lookup`, but asks once."""
        found = self.planner.lookup(request, hashes, len(hashes) * TOKENS + 1, local * TOKENS)
        return None if found is None else found // TOKENS

    def allocate(self, request: str, hashes: list[bytes], numbers: Sequence[int], load: int) -> None:
        self.planner.allocated(request, hashes, [list(numbers)], load * TOKENS)

    def step(self, *computed: tuple[str, list[bytes], Sequence[int]], preempted: Sequence[str] = ()) -> Plan:
        """A step that computes these requests completely."""
        progress = [
            Progress(request, hashes, len(hashes) * TOKENS, lambda numbers=numbers: [list(numbers)])
            for request, hashes, numbers in computed
        ]
        plan = self.planner.step(progress, preempted)
        self.mover.stop(plan.preempted)
        self.mover.load(plan)
        self.mover.save(plan)
        return plan

    def moved(self, over: Sequence[str] = (), seconds: float = 10.0) -> Moved:
        """Waits until a save or a load has ended."""
        end = time.monotonic() + seconds
        moved = self.mover.moved(over)
        while not moved.saved and not moved.loaded and time.monotonic() < end:
            time.sleep(0.01)
            moved = self.mover.moved(())
        bad = [block.number for blocks in moved.loaded.values() for block in blocks]
        self.planner.arrived(moved.loaded, (), bad)
        return moved

    def fill(self, hashes: list[bytes], numbers: Sequence[int]) -> None:
        """Writes the content of these blocks."""
        for hashed, number in zip(hashes, numbers, strict=True):
            self.memory[:, number] = content(hashed)

    def compute(self, request: str, hashes: list[bytes], numbers: Sequence[int]) -> None:
        """Computes a prompt and saves it."""
        self.fill(hashes, numbers)
        self.step((request, hashes, numbers))
        assert self.planner.finished(request)
        assert self.moved([request]).saved == {request}

    def has(self, hashes: list[bytes], numbers: Sequence[int]) -> bool:
        return all(
            bool((self.memory[:, number] == content(hashed)).all())
            for hashed, number in zip(hashes, numbers, strict=True)
        )


def content(hashed: bytes) -> numpy.ndarray:
    """Returns the content of the three layers of a block."""
    seed = numpy.frombuffer(hashed, dtype=numpy.uint8)
    return numpy.resize(seed, LAYER_BYTES) + numpy.arange(LAYERS, dtype=numpy.uint8)[:, None]


@contextlib.contextmanager
def engines(*made: Engine) -> Iterator[None]:
    try:
        yield
    finally:
        for engine in made:
            engine.close()


@pytest.fixture
def model() -> str:
    return f"model-{next(_models)}"


def test_an_engine_loads_the_blocks_of_another_engine(shared_pool: LivePool, model: str) -> None:
    first, second = Engine(shared_pool.url, model), Engine(shared_pool.url, model)
    hashes = prompt(5)
    with engines(first, second):
        assert first.lookup("a", hashes) == 0
        first.compute("a", hashes, [9, 3, 4, 1, 7])
        # The engine has the first block itself, and the pool has the other four.
        assert second.lookup("b", hashes, local=1) == 4
        second.allocate("b", hashes, [20, 11, 12, 10, 30], load=4)
        second.step()
        assert second.moved().loaded == {"b": ()}
        assert second.has(hashes[1:], [11, 12, 10, 30])
        assert not second.memory[:, 20].any()


def test_a_hit_counts_when_all_ranks_have_it(shared_pool: LivePool, model: str) -> None:
    ranks = ("t0p0", "t1p0")
    first, other = (Engine(shared_pool.url, model, ranks=ranks, rank=rank) for rank in ranks)
    with engines(first, other):
        first.compute("a", prompt(3), [1, 2, 3])
        assert first.lookup("b", prompt(3)) == 0
        other.compute("a", prompt(2), [1, 2])
        assert first.lookup("c", prompt(3)) == 2


def test_another_model_finds_nothing(shared_pool: LivePool, model: str) -> None:
    first, second = Engine(shared_pool.url, model), Engine(shared_pool.url, f"{model}-other")
    with engines(first, second):
        first.compute("a", prompt(3), [1, 2, 3])
        assert second.lookup("b", prompt(3)) == 0


def test_blocks_in_the_pool_are_not_saved_again(shared_pool: LivePool, model: str) -> None:
    first, second = Engine(shared_pool.url, model), Engine(shared_pool.url, model)
    with engines(first, second):
        first.compute("a", prompt(2), [1, 2])
        hashes = prompt(4)
        assert second.lookup("b", hashes) == 2
        plan = second.step(("b", hashes, [5, 6, 7, 8]))
        assert [[block.number for block in move.blocks] for move in plan.saves] == [[7, 8]]
        # The parent of the third block is the second block.
        assert plan.saves[0].blocks[0].parent == hashes[1]
        assert second.step(("b", hashes, [5, 6, 7, 8])).saves == ()


def test_found_blocks_stay_until_they_are_loaded(own_pool: LivePool, model: str) -> None:
    # The pool is so small that blocks without a lease are soon evicted.
    own_pool.start_node("4MiB")
    own_pool.nodes[0].kill()
    first, second = Engine(own_pool.url, model), Engine(own_pool.url, model)
    hashes = prompt(8)
    with engines(first, second):
        first.compute("a", hashes, range(1, 9))
        assert second.lookup("b", hashes) == 8
        # Meanwhile saves evict all other blocks, for longer than the lease TTL.
        end = time.monotonic() + 8
        for turn in itertools.count():
            first.compute(f"other{turn}", prompt(60, f"{turn}"), range(1, 61))
            if time.monotonic() > end:
                break
        assert first.lookup("evicted", prompt(60, "0")) == 0
        assert second.lookup("b", hashes) == 8
        second.allocate("b", hashes, range(1, 9), load=8)
        second.step()
        assert second.moved().loaded == {"b": ()}
        assert second.has(hashes, range(1, 9))


def test_a_load_that_fails_is_reported_and_not_tried_again(own_pool: LivePool, model: str) -> None:
    engine = Engine(own_pool.url, model, get_timeout=2.0)
    hashes = prompt(3)
    with engines(engine):
        engine.compute("a", hashes, [1, 2, 3])
        assert engine.lookup("b", hashes) == 3
        own_pool.nodes[0].kill()
        engine.allocate("b", hashes, [4, 5, 6], load=3)
        began = time.monotonic()
        engine.step()
        loaded = engine.moved().loaded
        assert [block.number for block in loaded["b"]] == [4, 5, 6]
        assert time.monotonic() - began < 5
        assert engine.lookup("b", hashes) == 0


def test_without_a_master_the_engine_goes_on(own_pool: LivePool, model: str) -> None:
    engine = Engine(own_pool.url, model, control_timeout=2.0, put_timeout=0.5, retry_after=30.0)
    with engines(engine):
        engine.compute("a", prompt(3), [1, 2, 3])
        assert own_pool.master is not None
        own_pool.master.kill()
        began = time.monotonic()
        assert engine.lookup("b", prompt(3)) == 0
        # A second request does not wait at all: its lookup would take control_timeout.
        asked = time.monotonic()
        assert engine.lookup("c", prompt(3)) == 0
        assert time.monotonic() - asked < 1
        assert asked - began < 10
        engine.compute("d", prompt(3, "new"), [4, 5, 6])


def test_a_pool_that_comes_later_is_found(own_pool: LivePool, model: str) -> None:
    assert own_pool.master is not None
    own_pool.master.kill()
    engine = Engine(own_pool.url, model, connect_timeout=0.5)
    with engines(engine):
        assert engine.lookup("a", prompt(3)) == 0
        own_pool.start_master()
        end = time.monotonic() + 20
        while engine.connection.pool() is None:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_request_that_is_preempted_is_read_no_more_and_keeps_no_blocks(
    shared_pool: LivePool, model: str
) -> None:
    engine = Engine(shared_pool.url, model)
    hashes = prompt(40)
    with engines(engine):
        engine.fill(hashes, range(1, 41))
        engine.step(("a", hashes, range(1, 41)))
        engine.step(preempted=["a"])
        assert engine.mover.moved([]).saved == set()
        # From here on another request uses the memory.
        engine.memory[:] = 0
        assert engine.planner.finished("a") is False
        assert engine.mover.moved(["a"]).saved == set()
        # Every block that was saved until then is right.
        other = Engine(shared_pool.url, model)
        with engines(other):
            found = other.lookup("b", hashes)
            other.allocate("b", hashes, range(1, 41), load=found)
            if found:
                other.step()
                assert other.moved().loaded == {"b": ()}
                assert other.has(hashes[:found], range(1, found + 1))


def test_blocks_without_memory_are_neither_saved_nor_loaded(shared_pool: LivePool, model: str) -> None:
    engine = Engine(shared_pool.url, model)
    hashes = prompt(4)
    with engines(engine):
        plan = engine.step(("a", hashes, [0, 0, 5, 6]))
        assert [block.number for move in plan.saves for block in move.blocks] == [5, 6]


def test_a_consumer_saves_nothing(shared_pool: LivePool, model: str) -> None:
    engine = Engine(shared_pool.url, model, saves=False)
    with engines(engine):
        assert engine.step(("a", prompt(3), [1, 2, 3])).saves == ()
        assert engine.planner.finished("a") is False


def test_lookups_do_not_hold_the_scheduler_while_the_master_hangs(own_pool: LivePool, model: str) -> None:
    engine = Engine(own_pool.url, model, control_timeout=6.0)
    with engines(engine):
        engine.compute("a", prompt(3), [1, 2, 3])
        assert own_pool.master is not None
        own_pool.master.hang()
        began = time.monotonic()
        for turn in range(20):
            # Each step has several requests, and no lookup has an answer.
            assert engine.ask("b", prompt(3)) is None
            assert engine.ask(f"c{turn % 4}", prompt(2)) is None
            engine.planner.step([], [])
        # One lookup alone would wait for six seconds.
        assert time.monotonic() - began < 3
        own_pool.master.send(signal.SIGCONT)
        assert engine.lookup("b", prompt(3)) == 3
        assert engine.lookup("c1", prompt(2)) == 2


def test_a_lookup_ends_as_a_miss_when_the_master_does_not_answer(own_pool: LivePool, model: str) -> None:
    engine = Engine(own_pool.url, model, control_timeout=0.5, retry_after=30.0)
    with engines(engine):
        engine.compute("a", prompt(3), [1, 2, 3])
        assert own_pool.master is not None
        own_pool.master.hang()
        assert engine.lookup("b", prompt(3)) == 0
        own_pool.master.send(signal.SIGCONT)


def test_the_lease_of_an_unwanted_answer_is_released(
    make_pool: Callable[..., LivePool], model: str
) -> None:
    live = make_pool(1, "64MiB", "--lease-ttl=120s")
    engine = Engine(live.url, model, control_timeout=30.0)
    with engines(engine), kvpool.Pool.connect(live.url, control_timeout=30.0) as pool:
        engine.compute("a", prompt(1), [1])
        (key,) = [listed.key for listed in pool.list()]
        assert live.master is not None
        live.master.hang()
        assert engine.ask("b", prompt(1)) is None
        engine.planner.finished("b")
        live.master.send(signal.SIGCONT)
        # This is long before the lease would have expired.
        end = time.monotonic() + 60
        while pool.remove([key]) != [True]:
            assert time.monotonic() < end
            time.sleep(0.05)
