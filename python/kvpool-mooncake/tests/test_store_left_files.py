"""Files that a store or client leaves in the directory of its user."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mooncake._clients import _process_namespace, announce_client, remove_left_files
from live_pools import LivePool, free_port

HOUR = 3600.0


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of the user. Its path is short, as that of a socket must be."""
    with tempfile.TemporaryDirectory(prefix="kv-") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        made = Path(runtime) / "kvpool"
        made.mkdir(mode=0o700)
        yield made


def bound(file: Path, age: float) -> socket.socket:
    """A listening socket at `file` that seems `age` seconds old."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(file))
    listener.listen()
    then = time.time() - age
    os.utime(file, (then, then))
    return listener


def ended_process() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_files_of_processes_that_ended_are_removed_and_no_others(folder: Path) -> None:
    for name, age in [
        ("127.0.0.1:1.sock", HOUR),
        ("host:2.sock", HOUR),
        # The names of a `mooncake_client`, and of a host whose name is long.
        ("host-2.sock", HOUR),
        ("host.example-0123456789abcdef.sock", HOUR),
        ("host:3.sock", 0.0),
        ("own.sock", HOUR),
        ("of-one.sock", HOUR),
    ]:
        bound(folder / name, age).close()
    served = bound(folder / "host:4.sock", HOUR)
    gone = ended_process()
    announce_client(5, ["http://127.0.0.1:1"], process=gone)
    other = announce_client(6, ["http://127.0.0.1:1"], process=gone)
    announced = json.loads(other.read_text())
    namespace = os.readlink("/proc/self/ns/pid")
    assert announced["namespace"].endswith(f" {namespace}")
    # Another host has other processes in the namespace with this number.
    other.write_text(json.dumps({**announced, "namespace": f"another-boot {namespace}"}))
    container = announced["namespace"].replace(namespace, "pid:[1]")
    (folder / "mooncake-client-10.json").write_text(json.dumps({**announced, "namespace": container}))
    (folder / "mooncake-client-11.json").write_text(json.dumps({**announced, "namespace": ""}))
    (folder / "mooncake-client-7.json").write_text("no JSON")
    (folder / "mooncake-clients.json").write_text(json.dumps({"process": gone}))
    # Announcements of earlier versions name no host.
    (folder / "mooncake-client-8.json").write_text(json.dumps({"process": gone, "masters": []}))
    (folder / "mooncake-client-12.json").write_text(json.dumps({**announced, "namespace": namespace}))
    announce_client(9, ["http://127.0.0.1:1"])
    assert names(folder) == {
        "host:3.sock",
        "host:4.sock",
        "own.sock",
        "of-one.sock",
        "mooncake-client-6.json",
        "mooncake-client-7.json",
        "mooncake-client-8.json",
        "mooncake-client-10.json",
        "mooncake-client-11.json",
        "mooncake-client-12.json",
        "mooncake-client-9.json",
        "mooncake-clients.json",
    }
    served.close()


def test_links_stay_and_are_not_followed(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as there:
        dead, said = Path(there) / "host:1.sock", Path(there) / "mooncake-client-1.json"
        bound(dead, HOUR).close()
        said.write_text(json.dumps({"process": ended_process(), "namespace": _process_namespace()}))
        for target in (dead, said):
            (folder / target.name).symlink_to(target)
        remove_left_files()
        assert names(folder) == names(Path(there)) == {dead.name, said.name}
        # A link in the place of the directory is not followed either.
        for link in folder.iterdir():
            link.unlink()
        folder.rmdir()
        folder.symlink_to(there)
        remove_left_files()
        assert names(Path(there)) == {dead.name, said.name}


def test_a_process_that_ends_without_close_leaves_no_socket(folder: Path, shared_pool: LivePool) -> None:
    program = f"""
from pathlib import Path
from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
settings = {{
    "local_hostname": "127.0.0.1:{free_port()}",
    "global_segment_size": "16MB",
    "master_server_addr": "{shared_pool.url}",
}}
assert store.setup(settings) == 0
print(*(file.name for file in Path("{folder}").iterdir()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ".sock" in done.stdout
    assert names(folder) == set()


def test_a_store_that_cannot_be_closed_does_not_keep_the_others_open(folder: Path, shared_pool: LivePool) -> None:
    port = free_port()
    program = f"""
from mooncake.store import MooncakeDistributedStore


class Unwilling(MooncakeDistributedStore):
    def close(self):
        raise ValueError("as told")


settings = {{"global_segment_size": 0, "master_server_addr": "{shared_pool.url}"}}
unwilling = [Unwilling() for _ in range(4)]
for store in unwilling:
    assert store.setup(settings) == 0
willing = MooncakeDistributedStore()
settings |= {{"local_hostname": "127.0.0.1:{port}", "global_segment_size": "16MB"}}
assert willing.setup(settings) == 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is not closed: as told") == 4
    assert names(folder) == set()
