"""Refused calls: each logs a warning with its reason, even if the caller sees `b""` or `None`. A miss logs
none."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Iterator

import pytest
from mooncake._base import LENGTHS_DIFFER, NOT_SET_UP, Refusals
from mooncake.store import MooncakeDistributedStore, ReadTarget, ReplicateConfig
from lent_memory import Memory
from live_pools import LivePool, live_pool
from test_store_wrong import CALLS

# Calls that succeed without a pool, and a task that is unknown.
SILENT = {"get_hostname", "get_offload_rpc_read_count", "health_check", "query_task", "close"}
ROOM = Memory(64)
KEY = "refused"

# Each method that asks the pool for a block, its arguments, and its result for a failure.
READS: list[tuple[str, tuple[object, ...], object]] = [
    ("get", (KEY,), b""),
    ("get_batch", ([KEY, "other"],), [b"", b""]),
    ("get_buffer", (KEY,), None),
    ("batch_get_buffer", ([KEY],), [None]),
    ("get_into", (KEY, ROOM.ptr, ROOM.size), -900),
    ("get_into_ranges", ([ROOM.ptr], [[KEY]], [[[0]]], [[[0]]], [[[8]]]), [[[-900]]]),
    ("batch_get_into_multi_buffer_ranges", ([KEY], [[ROOM.ptr]], [[8]], [[0]]), [-900]),
    ("batch_get_session_start", ([KEY],), [-900]),
    ("get_size", (KEY,), -900),
    ("is_exist", (KEY,), -900),
    ("get_replica_desc", (KEY,), []),
    ("batch_replica_clear", ([KEY],), []),
    ("get_tensor", (KEY,), None),
    ("get_tensor_with_parallelism", (KEY, ReadTarget(mode="full")), None),
]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record for record in caplog.records if record.name == "mooncake"]
    return [record.getMessage() for record in lines if record.levelno >= logging.WARNING]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeDistributedStore]:
    """A store whose token has no right to its namespace."""
    folder = tmp_path_factory.mktemp("refused")
    auth = folder / "auth"
    create = ["kvctl", "token", "create", "--subject", "team", "--role", "writer", "--in", "team-a"]
    subprocess.run([*create, "--dir", str(auth)], check=True, capture_output=True)
    files = (f"--auth-jwks={auth / 'jwks.json'}", f"--auth-policy={auth / 'policy.toml'}", "--auth-issuer=kvctl")
    store = MooncakeDistributedStore()
    with pytest.MonkeyPatch.context() as patch, live_pool(folder, 0, "", *files) as pool:
        patch.setenv("KVPOOL_TOKEN_FILE", str(auth / "team.token"))
        settings = {"global_segment_size": 0, "master_server_addr": pool.url, "tenant_id": "team-b"}
        assert store.setup(settings) == 0
        yield store
        store.close()


@pytest.mark.parametrize(("method", "args", "answer"), READS, ids=[call[0] for call in READS])
def test_a_read_without_rights_warns_with_the_reason(
    refused: MooncakeDistributedStore,
    caplog: pytest.LogCaptureFixture,
    method: str,
    args: tuple[object, ...],
    answer: object,
) -> None:
    # Warnings of earlier calls must not suppress a line of this call.
    refused._refusals = Refusals()
    with caplog.at_level(logging.WARNING, logger="mooncake"):
        assert getattr(refused, method)(*args) == answer
    (line,) = warnings(caplog)
    assert "failed with -900" in line and "needs one of the roles" in line and "team-b" in line


@pytest.mark.parametrize(("method", "args", "answer"), CALLS, ids=[call[0] for call in CALLS])
def test_a_call_of_a_store_that_is_not_set_up_warns(
    caplog: pytest.LogCaptureFixture, method: str, args: tuple[object, ...], answer: object
) -> None:
    with caplog.at_level(logging.WARNING, logger="mooncake"):
        assert getattr(MooncakeDistributedStore(), method)(*args) == answer
    lines = warnings(caplog)
    assert len(lines) == (method not in SILENT), lines
    assert all("failed with -600" in line and NOT_SET_UP in line for line in lines)


def test_reads_warn_once_while_the_master_is_away(
    own_pool: LivePool, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MooncakeDistributedStore()
    waits = {"get_timeout_ms": 500, "control_timeout_ms": 500}
    assert store.setup({"global_segment_size": 0, "master_server_addr": own_pool.url, **waits}) == 0
    assert own_pool.master
    own_pool.master.kill()
    try:
        for read, nothing in ((store.get, b""), (store.get_buffer, None)):
            store._refusals = Refusals()
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger="mooncake"):
                assert [read(key), read(key)] == [nothing, nothing]
            lines = warnings(caplog)
            assert lines and "1 of 1 failed with" in lines[0]
            codes = [line.partition("failed with ")[2].partition(":")[0] for line in lines]
            assert len(codes) == len(set(codes)), lines
        store._refusals = Refusals()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="mooncake"):
            assert store.health_check() == 2
        (line,) = warnings(caplog)
        assert line.startswith("health_check: 1 of 1 failed with 2: ")
    finally:
        own_pool.start_master()
        store.close()


def test_a_read_of_a_deleted_namespace_warns(
    shared_pool: LivePool, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MooncakeDistributedStore()
    settings = {"global_segment_size": 0, "master_server_addr": shared_pool.url, "tenant_id": "team-gone"}
    assert store.setup(settings) == 0
    try:
        assert store.get(key) == b""
        shared_pool.kvctl("namespace", "delete", "team-gone")
        with caplog.at_level(logging.WARNING, logger="mooncake"):
            assert store.get(key) == b""
        (line,) = warnings(caplog)
        assert "get: 1 of 1 failed with -600" in line and "team-gone" in line
    finally:
        store.close()


def test_a_miss_warns_of_nothing(
    store: MooncakeDistributedStore, key: str, memory: type[Memory], caplog: pytest.LogCaptureFixture
) -> None:
    room = memory(8)
    with caplog.at_level(logging.WARNING, logger="mooncake"):
        assert store.get(key) == b""
        assert store.get_batch([key]) == [b""]
        assert store.get_buffer(key) is None
        assert store.batch_get_buffer([key]) == [None]
        assert store.get_into(key, room.ptr, 8) == -704
        assert store.get_into_ranges([room.ptr], [[key]], [[[0]]], [[[0]]], [[[8]]]) == [[[-704]]]
        assert store.batch_get_session_end([key]) == -704
        assert store.batch_put_session_revoke([key]) == [-704]
        assert store.get_tensor(key) is None
        assert store.batch_replica_clear([key]) == []
    assert not warnings(caplog)
    with caplog.at_level(logging.DEBUG, logger="mooncake"):
        assert store.get(key) == b""
    assert any("get: 1 of 1 failed with -704" in record.getMessage() for record in caplog.records)


def test_values_that_are_found_among_failures_are_returned(
    store: MooncakeDistributedStore, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    value = os.urandom(1000)
    assert store.put(key, value) == 0
    store._refusals = Refusals()
    with caplog.at_level(logging.WARNING, logger="mooncake"):
        assert store.get_batch(["", key, f"{key}-none"]) == [b"", value, b""]
        assert [bytes(found) if found else None for found in store.batch_get_buffer([f"{key}-none", key, ""])] == [
            None,
            value,
            None,
        ]
    (line,) = warnings(caplog)
    assert line.startswith("get_batch: 1 of 3 failed with -600")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda store: store.get_into_ranges([1], [], [], [], []), LENGTHS_DIFFER),
        (lambda store: store.get_into_ranges([1], [[KEY]], [[[0]]], [[[0]]], [[]]), LENGTHS_DIFFER),
        (lambda store: store.batch_get_into_multi_buffer_ranges([KEY], [], [], []), LENGTHS_DIFFER),
        (lambda store: store.batch_get_tensor_into([KEY], [], []), LENGTHS_DIFFER),
        (lambda store: store.put(KEY, b"x", ReplicateConfig(replica_num=0)), "ReplicateConfig"),
        (lambda store: store.unregister_buffer(4096), "invalid"),
    ],
)
def test_a_call_that_is_refused_without_a_question_warns(
    store: MooncakeDistributedStore,
    caplog: pytest.LogCaptureFixture,
    call: Callable[[MooncakeDistributedStore], object],
    reason: str,
) -> None:
    store._refusals = Refusals()
    with caplog.at_level(logging.WARNING, logger="mooncake"):
        call(store)
    (line,) = warnings(caplog)
    assert "failed with -600" in line and reason in line
