"""Tasks that copy, move and drop replicas, over pools of several nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import kvpool
import kvpool.aio
import pytest
from live_pools import LivePool, live_pool

KEYS = [f"block-{n}" for n in range(20)]
BLOCKS = [bytes([n]) * 5000 for n in range(20)]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    """A pool with three nodes."""
    with live_pool(tmp_path_factory.mktemp("pool"), 3) as pool:
        yield pool


@pytest.fixture
def pool(nodes: LivePool) -> Iterator[kvpool.Pool]:
    """A connection. The pool has `KEYS` only on node-0."""
    with kvpool.Pool.connect(nodes.url) as pool:
        pool.remove_all(force=True)
        assert pool.batch_put(KEYS, BLOCKS, preferred_node="node-0") == [True] * 20
        assert places(pool) == [["node-0"]] * 20
        yield pool


def places(pool: kvpool.Pool, keys: list[str] = KEYS) -> list[list[str]]:
    """Returns the nodes with a replica of each key."""
    return [sorted(r.node for r in block.replicas) if block else [] for block in pool.describe(keys)]


def ended(pool: kvpool.Pool, task: kvpool.ReplicaTask) -> kvpool.ReplicaTask:
    """Returns the task after its end."""
    task_then = pool.wait_replica_task(task.id, 20)
    assert task_then is not None and task_then.state != "running"
    return task_then


def holds_every_byte(pool: kvpool.Pool) -> bool:
    return [pool.get(key) for key in KEYS] == BLOCKS


def test_replicas_are_copied_moved_and_dropped(pool: kvpool.Pool) -> None:
    task = ended(pool, pool.change_replicas("copy", KEYS, to=["node-1"]))
    assert (task.change, task.state, task.blocks, task.changed) == ("copy", "done", 20, 20)
    assert (task.bytes, task.to, task.source, task.failure) == (20 * 5000, ["node-1"], "", None)
    assert task.age >= task.idle >= 0
    assert places(pool) == [["node-0", "node-1"]] * 20
    task = ended(pool, pool.change_replicas("move", KEYS[:5], source="node-0", to=["node-2"]))
    assert (task.change, task.state, task.changed, task.source) == ("move", "done", 5, "node-0")
    assert places(pool, KEYS[:5]) == [["node-1", "node-2"]] * 5
    task = ended(pool, pool.change_replicas("drop", regex="^block-1", source="node-0"))
    assert (task.change, task.state) == ("drop", "done")
    # block-1 was moved away from node-0 before. block-10 to block-19 were still there.
    assert (task.blocks, task.changed, task.gone) == (11, 10, 1)
    assert places(pool, KEYS[10:]) == [["node-1"]] * 10
    assert holds_every_byte(pool)


def test_the_last_replica_of_a_block_is_not_dropped(pool: kvpool.Pool) -> None:
    task = ended(pool, pool.change_replicas("drop", KEYS[:3], source="node-0"))
    assert (task.state, task.failed) == ("failed", 3)
    assert task.failure is not None and task.failure.code == "last_replica"
    assert not task.failure.is_retryable and "last replica" in str(task.failure)
    assert places(pool) == [["node-0"]] * 20


def test_every_block_of_a_node_moves(pool: kvpool.Pool) -> None:
    task = ended(pool, pool.change_replicas("move", source="node-0"))
    assert (task.state, task.blocks, task.changed) == ("done", 20, 20)
    assert all(where in (["node-1"], ["node-2"]) for where in places(pool))
    assert holds_every_byte(pool)


def test_tasks_are_listed_and_cancelled(pool: kvpool.Pool) -> None:
    task = ended(pool, pool.change_replicas("copy", KEYS))
    assert [known.id for known in pool.replica_tasks([task.id])] == [task.id]
    assert task.id in [known.id for known in pool.replica_tasks()]
    # A task that has ended does not change any more.
    (cancelled,) = pool.cancel_replica_tasks([task.id])
    assert (cancelled.id, cancelled.state) == (task.id, "done")
    assert pool.replica_tasks([1]) == [] and pool.wait_replica_task(1, 0.1) is None
    assert f"id={task.id}, change=" in repr(task)


Call = Callable[[kvpool.Pool], object]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda p: p.change_replicas("swap", KEYS), "invalid_argument"),
        (lambda p: p.change_replicas("copy", KEYS, regex="x"), "invalid_argument"),
        (lambda p: p.change_replicas("copy", [""]), "invalid_argument"),
        (lambda p: p.change_replicas("copy"), "invalid_argument"),
        (lambda p: p.change_replicas("drop", KEYS), "invalid_argument"),
        (lambda p: p.change_replicas("move", KEYS, source="node-0", to=["node-0"]), "invalid_argument"),
        (lambda p: p.change_replicas("copy", KEYS, to=["node-9"]), "missing"),
        (lambda p: p.change_replicas("copy", regex="["), "invalid_argument"),
        (lambda p: p.change_replicas("move", KEYS, source="node-0", only_on_media=True), "invalid_argument"),
        (lambda p: p.change_replicas("move", source="node-0", only_on_media=True), "invalid_argument"),
        (lambda p: p.change_replicas("move", source="node-0", evict=True, only_on_media=True), "not_draining"),
        (lambda p: p.drain_node("node-9"), "missing"),
        (lambda p: p.undrain_node("node-9"), "missing"),
        (lambda p: p.cancel_replica_tasks([]), "invalid_argument"),
        (lambda p: p.wait_replica_task(1, -1), "invalid_argument"),
    ],
)
def test_an_invalid_change_of_replicas_changes_nothing(pool: kvpool.Pool, call: Call, code: str) -> None:
    before = {task.id for task in pool.replica_tasks()}
    with pytest.raises(kvpool.Error) as raised:
        call(pool)
    assert raised.value.code == code
    assert {task.id for task in pool.replica_tasks()} == before
    assert places(pool) == [["node-0"]] * 20


def test_a_node_is_drained(make_pool: Callable[..., LivePool]) -> None:
    with kvpool.Pool.connect(make_pool(2).url) as pool:
        assert pool.batch_put(KEYS, BLOCKS, preferred_node="node-0") == [True] * 20
        task = ended(pool, pool.drain_node("node-0"))
        assert (task.state, task.changed) == ("done", 20)
        assert places(pool) == [["node-1"]] * 20
        assert pool.put("later", b"x", preferred_node="node-0") is True
        assert places(pool, ["later"]) == [["node-1"]]
        assert pool.undrain_node("node-0") is True
        assert [node.state for node in pool.stats().nodes] == ["live", "live"]
        assert pool.put("back", b"x", preferred_node="node-0") is True
        assert places(pool, ["back"]) == [["node-0"]]
        assert pool.undrain_node("node-0") is False
        assert holds_every_byte(pool)


def test_a_node_whose_media_leave_is_drained_with_a_task_for_them(make_pool: Callable[..., LivePool]) -> None:
    async def drain(url: str) -> kvpool.ReplicaTask:
        async with await kvpool.aio.Pool.connect(url) as pool:
            task = await pool.drain_node("node-0", media=True)
            return await pool.wait_replica_task(task.id, 20) or task

    live = make_pool(2)
    with kvpool.Pool.connect(live.url) as pool:
        assert pool.batch_put(KEYS, BLOCKS, preferred_node="node-0") == [True] * 20
        task = asyncio.run(drain(live.url))
        assert (task.state, task.changed) == ("done", 20)
        off = ended(pool, pool.change_replicas("move", source="node-0", evict=True, only_on_media=True))
        # The nodes have no media.
        assert (off.state, off.blocks, off.source) == ("done", 0, "node-0")
        assert places(pool) == [["node-1"]] * 20


def test_the_last_node_is_drained_by_force_only(make_pool: Callable[..., LivePool]) -> None:
    with kvpool.Pool.connect(make_pool(1).url) as pool:
        assert pool.batch_put(KEYS, BLOCKS) == [True] * 20
        with pytest.raises(kvpool.Error, match="last node") as raised:
            pool.drain_node("node-0")
        assert raised.value.code == "last_node"
        assert [node.state for node in pool.stats().nodes] == ["live"]
        pool.drain_node("node-0", force=True)
        assert [node.state for node in pool.stats().nodes] == ["draining"]


def test_the_calls_have_an_async_form(nodes: LivePool, pool: kvpool.Pool) -> None:
    async def work() -> None:
        async with await kvpool.aio.Pool.connect(nodes.url) as other:
            task = await other.change_replicas("copy", KEYS[:2], to=["node-1"])
            then = await other.wait_replica_task(task.id, 20)
            assert then is not None and (then.state, then.changed) == ("done", 2)
            assert [known.id for known in await other.replica_tasks([task.id])] == [task.id]
            assert [known.id for known in await other.cancel_replica_tasks([task.id])] == [task.id]
            with pytest.raises(kvpool.Error, match="node-9"):
                await other.drain_node("node-9")
            assert await other.undrain_node("node-0") is False

    asyncio.run(work())
