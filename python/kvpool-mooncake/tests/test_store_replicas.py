"""Copy and move tasks, and the removal of single replicas, over a pool of three nodes."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_pools import LivePool, live_pool, wait_until
from mooncake.store import (
    MooncakeDistributedStore,
    QueryTaskResponse,
    ReplicateConfig,
    TaskStatus,
    TaskType,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeDistributedStore]:
    """A pure client of a pool with three nodes."""
    with live_pool(tmp_path_factory.mktemp("pool"), 3) as pool:
        store = connected(pool)
        yield store
        store.close()


def connected(pool: LivePool) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", pool.url) == 0
    return store


def at(node: str, replicas: int = 1) -> ReplicateConfig:
    return ReplicateConfig(preferred_segment=node, replica_num=replicas)


def nodes_of(store: MooncakeDistributedStore, key: str) -> list[str]:
    replicas = store.get_replica_desc(key)
    return sorted(r.get_memory_descriptor().buffer_descriptor.transport_endpoint for r in replicas)


def ended(store: MooncakeDistributedStore, task: object) -> QueryTaskResponse:
    """Returns the task after its end."""
    answers = []

    def has_ended() -> bool:
        answer, code = store.query_task(task)
        assert code == 0 and answer is not None
        answers.append(answer)
        return answer.status in (TaskStatus.SUCCESS, TaskStatus.FAILED)

    wait_until(has_ended, what="the end of the task")
    return answers[-1]


def test_an_object_is_copied_to_other_segments(store: MooncakeDistributedStore, key: str) -> None:
    value = bytes(range(256)) * 40
    assert store.put(key, value, at("node-0")) == 0
    began = time.time() * 1000
    task, code = store.create_copy_task(key, ["node-1", "node-2"])
    assert code == 0
    answer = ended(store, task)
    assert (answer.id, answer.type, answer.status) == (task, TaskType.REPLICA_COPY, TaskStatus.SUCCESS)
    assert answer.message == "" and answer.assigned_client == (0, 0)
    assert began - 1000 < answer.created_at_ms_epoch <= answer.last_updated_at_ms_epoch
    assert answer.last_updated_at_ms_epoch < time.time() * 1000 + 1000
    assert nodes_of(store, key) == ["node-0", "node-1", "node-2"]
    assert store.get(key) == value
    # The id of a task has two forms.
    assert store.query_task(uuid.UUID(int=task[0] << 64 | task[1]))[0].id == task


def test_an_object_is_moved(store: MooncakeDistributedStore, key: str) -> None:
    value = bytes(range(256)) * 40
    assert store.put(key, value, at("node-0")) == 0
    task, code = store.create_move_task(key, "node-0", "node-1")
    assert code == 0
    answer = ended(store, task)
    assert (answer.type, answer.status) == (TaskType.REPLICA_MOVE, TaskStatus.SUCCESS)
    assert nodes_of(store, key) == ["node-1"]
    assert store.get(key) == value


def test_an_invalid_task_is_refused_by_code(store: MooncakeDistributedStore, key: str) -> None:
    assert store.put(key, b"x", at("node-0")) == 0
    nothing = (0, 0)
    assert store.create_copy_task(f"{key}-none", ["node-1"]) == (nothing, -704)
    assert store.create_copy_task(key, []) == (nothing, -600)
    assert store.create_copy_task("", ["node-1"]) == (nothing, -600)
    assert store.create_copy_task(key, ["elsewhere:1"]) == (nothing, -600)
    assert store.create_move_task(key, "elsewhere:1", "node-1") == (nothing, -600)
    assert store.create_move_task(key, "node-0", "elsewhere:1") == (nothing, -600)
    assert store.create_move_task(key, "node-0", "node-0") == (nothing, -600)
    assert store.create_move_task(key, "node-1", "node-2") == (nothing, -600)
    assert store.query_task((0, 77)) == (None, -1400)
    assert store.query_task(uuid.uuid4()) == (None, -1400)
    assert nodes_of(store, key) == ["node-0"]


def test_one_replica_of_several_is_cleared(store: MooncakeDistributedStore, key: str) -> None:
    shared, single, elsewhere, leased = (f"{key}-{n}" for n in range(4))
    assert store.put(shared, b"shared", at("node-0")) == 0
    task, _ = store.create_copy_task(shared, ["node-1"])
    assert ended(store, task).status is TaskStatus.SUCCESS
    assert store.put(single, b"single", at("node-0")) == 0
    assert store.put(elsewhere, b"elsewhere", at("node-2")) == 0
    assert store.put(leased, b"leased", at("node-0")) == 0
    assert store.is_exist(leased) == 1
    keys = [single, elsewhere, shared, leased, f"{key}-none", ""]
    assert store.batch_replica_clear(keys, "node-0") == [single, shared]
    assert nodes_of(store, shared) == ["node-1"]
    assert store.get(shared) == b"shared"
    assert store.batch_is_exist([single, elsewhere, leased]) == [0, 1, 1]
    assert store.batch_replica_clear([shared], "node-1") == [shared]
    assert store.is_exist(shared) == 0


class LosesItsMaster:
    """The native half of a store. Its master hangs before it receives a removal of replicas."""

    def __init__(self, native: object, pool: LivePool) -> None:
        self._native = native
        self._pool = pool

    def __getattr__(self, name: str) -> object:
        return getattr(self._native, name)

    def drop_replicas(self, *args: object) -> object:
        assert self._pool.master is not None
        self._pool.master.hang()
        return self.__getattr__("drop_replicas")(*args)


def test_no_replica_is_cleared_when_the_master_does_not_answer(tmp_path: Path, key: str) -> None:
    with live_pool(tmp_path, 2) as pool:
        store = connected(pool)
        assert store.put(key, b"shared", ReplicateConfig(replica_num=2)) == 0
        store._native = LosesItsMaster(store._native, pool)
        assert store.batch_replica_clear([key], "node-0") == []
        pool.master.send(signal.SIGCONT)
        store.close()
