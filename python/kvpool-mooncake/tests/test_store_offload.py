"""Blocks that leave a store's memory: they go to SSD, and come back in the same store and in the next one."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_pools import LivePool, wait_until
from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20
# Memory holds 64 blocks, and the SSD all of them.
BLOCKS = 192
SEGMENT = "64MB"
SSD = 512 * MIB


def value(number: int) -> bytes:
    """The bytes of a block."""
    return random.Random(number).randbytes(MIB)


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FILE_STORAGE_PATH", "BUCKET_MAX_TOTAL_SIZE"):
        monkeypatch.delenv(f"MOONCAKE_OFFLOAD_{name}", raising=False)
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(SSD))


@pytest.fixture
def pool(make_pool: Callable[..., LivePool]) -> LivePool:
    """A pool without nodes and with short leases: memory holds only a part of the blocks."""
    return make_pool(0, "", "--lease-ttl=300ms")


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    """A directory for blocks."""
    directory = tmp_path / "ssd"
    directory.mkdir()
    return directory


@pytest.fixture
def stores() -> Iterator[list[MooncakeDistributedStore]]:
    """Stores. They are closed after the test."""
    stores: list[MooncakeDistributedStore] = []
    yield stores
    for store in stores:
        store.close()


def config(pool: LivePool, ssd: Path, **other: object) -> dict[str, object]:
    settings: dict[str, object] = {
        "local_hostname": "127.0.0.1",
        "global_segment_size": SEGMENT,
        "master_server_addr": pool.url,
        "enable_ssd_offload": True,
        "ssd_offload_path": str(ssd),
    }
    return settings | other


def put_all(store: MooncakeDistributedStore) -> None:
    for number in range(BLOCKS):
        assert store.put(f"block-{number}", value(number)) == 0
        # The pause gives the disk of any machine enough time.
        time.sleep(0.01)


def right(store: MooncakeDistributedStore) -> int:
    """Returns the number of blocks that come back. No wrong byte does."""
    found = 0
    for number in range(BLOCKS):
        got = store.get(f"block-{number}")
        assert got in (b"", value(number)), f"block-{number} has wrong bytes"
        found += got != b""
    return found


def test_blocks_that_memory_cannot_hold_come_back_in_this_store_and_in_the_next(
    pool: LivePool, ssd: Path, stores: list[MooncakeDistributedStore]
) -> None:
    first = MooncakeDistributedStore()
    stores.append(first)
    code = first.setup(
        "127.0.0.1", "P2PHANDSHAKE", SEGMENT, 1 << 24, "tcp", "", pool.url, None, True, str(ssd)
    )
    assert code == 0
    assert [(file.name, file.stat().st_size) for file in ssd.iterdir()] == [("kvpool-0.ssd", SSD)]
    put_all(first)
    # Memory alone holds a third of them.
    assert right(first) == BLOCKS
    name = first.get_hostname()
    assert first.close() == 0

    client = MooncakeDistributedStore()
    stores.append(client)
    assert client.setup({"global_segment_size": 0, "master_server_addr": pool.url}) == 0
    assert right(client) == 0
    again = MooncakeDistributedStore()
    stores.append(again)
    assert again.setup(config(pool, ssd)) == 0
    assert again.get_hostname() != name
    assert [file.name for file in ssd.iterdir()] == ["kvpool-0.ssd"]
    wait_until(lambda: again.is_exist("block-0") == 1, what="the first block")
    assert right(again) == BLOCKS
    # Another process gets the blocks from this store.
    assert right(client) == BLOCKS


CHILD = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup(eval(sys.argv[1])) == 0
print("ready", flush=True)
time.sleep(600)
"""


def test_stores_of_one_directory_have_own_files_and_a_killed_stores_file_is_reused(
    pool: LivePool, ssd: Path, stores: list[MooncakeDistributedStore]
) -> None:
    command = [sys.executable, "-c", CHILD, repr(config(pool, ssd))]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    try:
        for child in children:
            assert child.stdout and child.stdout.readline() == b"ready\n"
        names = [f"kvpool-{number}.ssd" for number in range(3)]
        assert sorted(file.name for file in ssd.iterdir()) == names
        client = MooncakeDistributedStore()
        stores.append(client)
        assert client.setup({"global_segment_size": 0, "master_server_addr": pool.url}) == 0
        put_all(client)
    finally:
        for child in children:
            child.send_signal(signal.SIGKILL)
            child.wait()
    for _ in range(3):
        store = MooncakeDistributedStore()
        stores.append(store)
        assert store.setup(config(pool, ssd)) == 0
    assert sorted(file.name for file in ssd.iterdir()) == names
    # Blocks that were only in memory are lost with the processes.
    wait_until(lambda: right(client) > 0, what="a block from the files")
    stored = pool_counter(pool, "blocks_stored_total")
    assert right(client) >= stored * 9 // 10 > 0


def pool_counter(pool: LivePool, name: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{pool.http}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(f"kvpool_master_{name}"))


def test_the_directory_and_the_size_come_from_the_environment(
    pool: LivePool,
    ssd: Path,
    stores: list[MooncakeDistributedStore],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", str(ssd))
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(100 * MIB))
    store = MooncakeDistributedStore()
    stores.append(store)
    assert store.setup(config(pool, ssd, ssd_offload_path="", enable_ssd_offload="true")) == 0
    assert (ssd / "kvpool-0.ssd").stat().st_size == 100 * MIB
    assert store.close() == 0

    # A file never shrinks, and grows with the limit.
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(64 * MIB))
    code, text = refusal(pool, ssd, caplog)
    assert code == -600 and "a file is not cut" in text
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(128 * MIB))
    assert store.setup(config(pool, ssd)) == 0
    assert (ssd / "kvpool-0.ssd").stat().st_size == 128 * MIB


def test_without_a_limit_a_new_file_takes_a_tenth_of_the_free_room(
    pool: LivePool, ssd: Path, stores: list[MooncakeDistributedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES")
    room = os.statvfs(ssd)
    free = room.f_bavail * room.f_frsize
    store = MooncakeDistributedStore()
    stores.append(store)
    assert store.setup(config(pool, ssd)) == 0
    size = (ssd / "kvpool-0.ssd").stat().st_size
    # Other processes use the disk too.
    assert free / 20 < size < free / 5
    assert store.close() == 0
    # The file keeps its size, whatever is free now.
    assert store.setup(config(pool, ssd)) == 0
    assert (ssd / "kvpool-0.ssd").stat().st_size == size
    store.close()
    (ssd / "kvpool-0.ssd").unlink()


def refusal(
    pool: LivePool, ssd: Path, caplog: pytest.LogCaptureFixture, **other: object
) -> tuple[int, str]:
    """Returns the log of a refused `setup`, which leaves nothing set up."""
    store = MooncakeDistributedStore()
    caplog.clear()
    with caplog.at_level(logging.ERROR, logger="mooncake"):
        code = store.setup(config(pool, ssd, **other))
    assert (store.health_check(), store.get_hostname()) == (1, "")
    return code, caplog.text


def test_a_directory_that_cannot_be_used_is_refused_with_its_reason(
    pool: LivePool, ssd: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ssd / "file").touch()
    for path, reason in (
        (ssd / "none", "does not exist"),
        (ssd / "file", "not a directory"),
        (Path("here"), "not an absolute path"),
    ):
        code, text = refusal(pool, ssd, caplog, ssd_offload_path=str(path))
        assert code == -600 and reason in text and str(path) in text
    for limit, reason in (("much", "no size"), ("0", "too few"), (str(1 << 50), "bytes free")):
        monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", limit)
        code, text = refusal(pool, ssd, caplog)
        assert code == -600 and reason in text
    assert [file.name for file in ssd.iterdir()] == ["file"]
    assert refusal(pool, ssd, caplog, enable_ssd_offload="perhaps")[0] == -600


def test_a_file_of_another_pool_or_program_is_refused_and_left_alone(
    pool: LivePool,
    ssd: Path,
    stores: list[MooncakeDistributedStore],
    caplog: pytest.LogCaptureFixture,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    (ssd / "kvpool-0.ssd").write_bytes(b"mine" * (16 << 20))
    code, text = refusal(pool, ssd, caplog)
    assert code == -600 and "not kvpool's" in text and "kvpool-0.ssd" in text
    assert (ssd / "kvpool-0.ssd").read_bytes()[: 64 << 20] == b"mine" * (16 << 20)
    (ssd / "kvpool-0.ssd").unlink()

    other = LivePool(tmp_path_factory.mktemp("other"))
    try:
        other.start_master()
        store = MooncakeDistributedStore()
        stores.append(store)
        assert store.setup(config(other, ssd)) == 0
        assert store.close() == 0
    finally:
        other.stop()
    code, text = refusal(pool, ssd, caplog)
    assert code == -600 and "it belongs to pool" in text and "kvpool-0.ssd" in text
    assert "remove the file" in text


def test_without_a_segment_there_is_no_ssd_and_the_log_says_so(
    pool: LivePool,
    ssd: Path,
    stores: list[MooncakeDistributedStore],
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MooncakeDistributedStore()
    stores.append(store)
    with caplog.at_level(logging.WARNING, logger="mooncake"):
        assert store.setup(config(pool, ssd, global_segment_size=0)) == 0
    assert "enable_ssd_offload has no effect without a segment" in caplog.text
    assert list(ssd.iterdir()) == []
