"""Setting a store up, and its end."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mooncake._clients import announce_client
from mooncake._still_open import still_open
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from live_pools import LivePool, free_port

Connect = Callable[[LivePool], MooncakeDistributedStore]


@pytest.fixture
def new() -> Iterator[MooncakeDistributedStore]:
    """A store that is not set up, and is closed after the test."""
    store = MooncakeDistributedStore()
    yield store
    store.close()


def test_the_positional_form(new: MooncakeDistributedStore, shared_pool: LivePool) -> None:
    master = f"127.0.0.1:{shared_pool.port}"
    assert new.setup("localhost", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", master) == 0
    assert new.get_hostname().startswith("localhost:")
    assert new.health_check() == 0


def test_the_keyword_form_as_vllm_ascend_calls_it(
    new: MooncakeDistributedStore, shared_pool: LivePool
) -> None:
    code = new.setup(
        local_hostname="127.0.0.1:0",
        metadata_server="P2PHANDSHAKE",
        global_segment_size=0,
        local_buffer_size="16MB",
        protocol="tcp",
        rdma_devices="",
        master_server_addr=shared_pool.url,
        engine=None,
        enable_ssd_offload=False,
        ssd_offload_path="",
    )
    assert code == 0


@pytest.mark.parametrize("spelling", ["master_server_addr", "master_server_address"])
def test_the_dict_form(new: MooncakeDistributedStore, shared_pool: LivePool, spelling: str) -> None:
    config = {
        "local_hostname": "localhost",
        "metadata_server": "http://127.0.0.1:8080/metadata",
        "global_segment_size": "0",
        "local_buffer_size": "16MB",
        "protocol": "tcp",
        "device_name": "",
        spelling: f"127.0.0.1:{shared_pool.port}",
    }
    assert new.setup(config) == 0
    assert new.health_check() == 0


def test_the_offload_flag_can_be_found_in_signature_and_documentation() -> None:
    assert "enable_ssd_offload" in inspect.signature(MooncakeDistributedStore.setup).parameters
    assert "enable_ssd_offload" in (MooncakeDistributedStore.setup.__doc__ or "")


def test_rdma_without_a_device_uses_another_transport_and_logs_it(
    new: MooncakeDistributedStore, shared_pool: LivePool, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = {
        "global_segment_size": 0,
        "protocol": "rdma",
        "device_name": "none_0",
        "master_server_address": shared_pool.url,
    }
    with caplog.at_level(logging.WARNING, logger="mooncake"):
        assert new.setup(config) == 0
    assert "none_0" in caplog.text
    assert new.put(key, b"x") == 0
    assert new.get(key) == b"x"


def test_missing_parameters_and_wrong_types_raise(new: MooncakeDistributedStore) -> None:
    with pytest.raises(TypeError, match="master_server_addr"):
        new.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "")
    with pytest.raises(TypeError, match="local_hostname"):
        new.setup(7, "P2PHANDSHAKE", 0, 0, "tcp", "", "m:1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="global_segment_size"):
        new.setup("localhost", "P2PHANDSHAKE", [], 0, "tcp", "", "m:1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        {"global_segment_size": "lots"},
        {"global_segment_size": -1},
        {"local_buffer_size": "16QB"},
        {"master_server_addr": ""},
        {"master_server_addr": "ftp://m:1"},
        {"local_hostname": "a:b"},
        {"tenant_id": "no spaces"},
        {"protocol": 7},
        {"put_timeout_ms": "soon"},
    ],
)
def test_bad_values_are_refused_with_600(new: MooncakeDistributedStore, bad: dict[str, object]) -> None:
    assert new.setup({"global_segment_size": 0, **bad}) == -600
    assert new.health_check() == 1


def test_a_second_setup_is_refused_with_its_reason(
    new: MooncakeDistributedStore, shared_pool: LivePool, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"global_segment_size": 0, "master_server_addr": shared_pool.url}
    assert new.setup(settings) == 0
    with caplog.at_level(logging.WARNING, logger="mooncake"):
        assert new.setup(settings) == -600
    (line,) = [record.getMessage() for record in caplog.records if record.name == "mooncake"]
    assert "already set up" in line and "no connection" not in line
    assert new.put(key, b"x") == 0


def token_of(auth: Path, role: str, patch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Makes a token and names it in the environment. Returns the flags of a master that accepts it."""
    where = () if role == "node" else ("--in", "team-a")
    create = ["kvctl", "token", "create", "--subject", "team", "--role", role, *where, "--dir", str(auth)]
    subprocess.run(create, check=True, capture_output=True)
    patch.setenv("KVPOOL_TOKEN_FILE", str(auth / "team.token"))
    return f"--auth-jwks={auth / 'jwks.json'}", f"--auth-policy={auth / 'policy.toml'}", "--auth-issuer=kvctl"


@pytest.mark.parametrize(
    ("role", "namespace", "missing"),
    [
        ("writer", "team-a", ()),
        ("reader", "team-a", ("remove",)),
        ("reader", "team-b", ("exist", "remove")),
        ("node", "team-a", ("exist", "remove")),
    ],
)
def test_setup_warns_of_the_rights_that_a_token_lacks(
    new: MooncakeDistributedStore,
    make_pool: Callable[..., LivePool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    role: str,
    namespace: str,
    missing: tuple[str, ...],
) -> None:
    pool = make_pool(0, "", *token_of(tmp_path / "auth", role, monkeypatch))
    settings = {"global_segment_size": 0, "master_server_addr": pool.url, "tenant_id": namespace}
    with caplog.at_level(logging.WARNING, logger="mooncake"):
        assert new.setup(settings) == 0
    lines = [record.getMessage() for record in caplog.records if "lacks a right" in record.getMessage()]
    assert len(lines) == len(missing), lines
    for line, operation in zip(lines, missing):
        assert f"{operation} needs one of the roles" in line and namespace in line


def test_a_segment_needs_the_role_of_a_node(
    new: MooncakeDistributedStore,
    make_pool: Callable[..., LivePool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = make_pool(0, "", *token_of(tmp_path / "auth", "writer", monkeypatch))
    settings = {"global_segment_size": "16MB", "master_server_addr": pool.url, "tenant_id": "team-a"}
    with caplog.at_level(logging.ERROR, logger="mooncake"):
        assert new.setup({**settings, "connect_timeout_ms": 1000}) == -900
    (line,) = [record.getMessage() for record in caplog.records if record.name == "mooncake"]
    assert "no segment" in line and "role node" in line
    assert new.health_check() == 1


def test_setup_reports_an_absent_master_within_seconds(
    new: MooncakeDistributedStore, caplog: pytest.LogCaptureFixture
) -> None:
    master = f"127.0.0.1:{free_port()}"
    begin = time.monotonic()
    with caplog.at_level(logging.ERROR, logger="mooncake"):
        code = new.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", master)
    assert code in (-900, -901)
    assert time.monotonic() - begin < 7
    assert any(master in record.getMessage() for record in caplog.records)
    assert new.is_exist("x") == -600


def test_setup_gives_up_a_silent_master_within_seconds(
    new: MooncakeDistributedStore,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert new.setup({"global_segment_size": 0, "master_server_addr": address}) in (-900, -901)
        assert time.monotonic() - begin < 7


def test_a_second_setup_is_refused_and_a_setup_after_close_works(connect: Connect, shared_pool: LivePool) -> None:
    store = connect(shared_pool)
    config = {"global_segment_size": 0, "master_server_addr": shared_pool.url}
    assert store.setup(config) == -600
    assert store.health_check() == 0
    assert store.close() == 0
    assert store.close() == 0
    assert store.health_check() == 1
    assert store.get_hostname() == ""
    assert store.setup(config) == 0


def test_a_contributed_segment_holds_objects_until_it_is_closed(
    new: MooncakeDistributedStore, connect: Connect, own_pool: LivePool, key: str
) -> None:
    other = connect(own_pool)
    own_pool.nodes[0].kill()
    assert new.setup("localhost", "P2PHANDSHAKE", "32MB", 1 << 24, "tcp", "", own_pool.url) == 0
    config = ReplicateConfig(preferred_segment=new.get_hostname())
    value = os.urandom(1 << 20)
    assert new.put(key, value, config) == 0
    (replica,) = other.get_replica_desc(key)
    assert replica.node == new.get_hostname()
    assert other.get(key) == value
    assert new.close() == 0
    assert other.is_exist(key) == 0


def test_an_object_may_be_half_of_the_smallest_segment(
    new: MooncakeDistributedStore, own_pool: LivePool, key: str
) -> None:
    own_pool.nodes[0].kill()
    assert new.setup("localhost", "P2PHANDSHAKE", "16MB", 1 << 24, "tcp", "", own_pool.url) == 0
    value = os.urandom(8 << 20)
    assert new.put(key, value) == 0
    assert new.get(key) == value


def test_a_preferred_segment_is_where_objects_go(
    new: MooncakeDistributedStore, connect: Connect, own_pool: LivePool
) -> None:
    assert new.setup("localhost", "P2PHANDSHAKE", "32MB", 1 << 24, "tcp", "", own_pool.url) == 0
    config = ReplicateConfig(preferred_segment=new.get_hostname())
    other = connect(own_pool)
    keys = [f"preferred-{n}" for n in range(8)]
    assert [other.put(key, b"here", config) for key in keys] == [0] * 8
    nodes = {replica.node for replicas in other.batch_get_replica_desc(keys).values() for replica in replicas}
    assert nodes == {new.get_hostname()}


def test_two_stores_of_one_host_and_port_both_contribute(connect: Connect, own_pool: LivePool) -> None:
    port = free_port()
    stores = [MooncakeDistributedStore() for _ in range(2)]
    try:
        for store in stores:
            assert store.setup(f"127.0.0.1:{port}", "", "16MB", 0, "tcp", "", own_pool.url) == 0
        assert stores[0].get_hostname() == f"127.0.0.1:{port}"
        assert len({store.get_hostname() for store in stores}) == 2
        status = str(own_pool.kvctl("status"))
        assert all(store.get_hostname() in status for store in stores)
    finally:
        for store in stores:
            store.close()


def test_segments_come_and_go_while_a_store_runs(connect: Connect, own_pool: LivePool, key: str) -> None:
    store = connect(own_pool)
    own_pool.nodes[0].kill()
    mounted = store.allocate_and_mount_segment((16 << 20) - 1)
    assert mounted["ret"] == 0 and mounted["allocated_size"] == 16 << 20
    assert store.put(key, b"kept") == 0
    assert store.unmount_and_free_segment(mounted["segment_ids"]) == 0
    assert store.is_exist(key) == 0
    assert store.unmount_segment(mounted["segment_ids"]) == -101
    assert store.unmount_segment(["\ud800"]) == -101
    assert store.allocate_and_mount_segment("none")["ret"] == -600


def test_unsupported_methods_raise_by_name(store: MooncakeDistributedStore) -> None:
    with pytest.raises(NotImplementedError, match="mount_segment"):
        store.mount_segment("/dev/shm/x", 4096)


def test_tenants_do_not_see_each_other(connect: Connect, shared_pool: LivePool, key: str) -> None:
    plain = connect(shared_pool)
    tenant = MooncakeDistributedStore()
    address = f"127.0.0.1:{shared_pool.port}"
    assert tenant.setup("localhost", "", 0, 0, "tcp", "", address, tenant_id="team-a") == 0
    try:
        assert tenant.put(key, b"mine") == 0
        assert plain.is_exist(key) == 0
        assert plain.put(key, b"yours") == 0
        assert tenant.get(key) == b"mine"
        assert tenant.remove_all(force=True) == 1
        assert plain.get(key) == b"yours"
    finally:
        tenant.close()


def test_a_dummy_finds_the_pool_of_an_announced_client(
    new: MooncakeDistributedStore, shared_pool: LivePool, key: str
) -> None:
    port = free_port()
    said = announce_client(port, [shared_pool.url])
    try:
        assert new.setup_dummy(1 << 20, 1 << 20, f"127.0.0.1:{port}") == 0
    finally:
        said.unlink()
    assert new.put(key, b"x") == 0
    address = new.alloc_from_mem_pool(1 << 19)
    assert address % 4096 == 0 and address > 0
    assert new.get_into(key, address, 1 << 19) == 1
    assert new.alloc_from_mem_pool(1 << 20) == 0


def test_a_dummy_has_the_namespace_of_its_client(
    new: MooncakeDistributedStore, connect: Connect, shared_pool: LivePool, key: str
) -> None:
    port = free_port()
    said = announce_client(port, [shared_pool.url], tenant="team-of-the-client")
    try:
        assert new.setup_dummy(1 << 20, 1 << 20, f"127.0.0.1:{port}") == 0
    finally:
        said.unlink()
    assert new.put(key, b"the client's") == 0
    assert connect(shared_pool).is_exist(key) == 0


def test_a_dummy_uses_an_unannounced_address_as_a_masters(
    new: MooncakeDistributedStore, shared_pool: LivePool
) -> None:
    assert new.setup_dummy("64MB", "16MB", f"127.0.0.1:{shared_pool.port}") == 0
    assert new.health_check() == 0


def test_a_dummy_refuses_bad_sizes(new: MooncakeDistributedStore) -> None:
    assert new.setup_dummy(-1, 0, "127.0.0.1:1") == -600
    with pytest.raises(TypeError):
        new.setup_dummy(1, 1, 7)  # type: ignore[arg-type]


def test_init_all_is_setup_with_the_usual_master(
    new: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_CONNECT_TIMEOUT_MS", "300")
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 50051)) == 0:
            pytest.skip("something listens on 127.0.0.1:50051")
    begin = time.monotonic()
    assert new.init_all("tcp", "", 0) in (-900, -901)
    assert time.monotonic() - begin < 3


def test_an_unclosed_store_ends_while_other_threads_run(own_pool: LivePool, key: str) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 16 << 20, 1 << 20, "tcp", "", own_pool.url) == 0
    assert store.put(key, b"x") == 0
    assert store.batch_get_session_start([key]) == [0]
    assert own_pool.master
    own_pool.master.hang()
    longest, over = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest
        last = time.monotonic()
        while not over.is_set():
            time.sleep(0.01)
            last, before = time.monotonic(), last
            longest = max(longest, last - before)

    ticking = threading.Thread(target=tick)
    ticking.start()
    time.sleep(0.1)
    began = time.monotonic()
    # The store gives back its lease and its segment to a master that does not answer.
    del store
    gc.collect()
    took = time.monotonic() - began
    over.set()
    ticking.join()
    assert took > 2, "nothing was waited for, so nothing was shown"
    assert longest < took / 2


def test_health_is_2_while_the_master_is_away(connect: Connect, own_pool: LivePool) -> None:
    store = connect(own_pool)
    assert store.health_check() == 0
    assert own_pool.master
    own_pool.master.kill()
    assert store.health_check() == 2
    own_pool.start_master()
    assert store.health_check() == 0


class Opened:
    """A member of a set of open things."""


class ChangingSet(weakref.WeakSet[Opened]):
    """Another thread changes the set while it is listed, a number of times."""

    changes = 0

    def __iter__(self) -> Iterator[Opened]:
        if self.changes > 0:
            self.changes -= 1
            raise RuntimeError("Set changed size during iteration")
        return super().__iter__()


def test_what_is_open_at_the_end_is_found_although_other_threads_open_more() -> None:
    one = Opened()
    opened = ChangingSet()
    opened.add(one)
    opened.changes = 5
    assert still_open(opened) == [one]
    opened.changes = 1_000_000
    assert still_open(opened) == [], "the end of the process must not wait"
