"""The commands themselves: real processes, and blocks through them with kvctl."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_pools import free_port, wait_until
from mooncake.commands.master import FLAGS
from mooncake.store import MooncakeDistributedStore



def ask(url: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    """Returns the status and the body; the status is 0 without an answer."""
    request = urllib.request.Request(url, data=body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


class Command:
    """A command of the wheel, and its output."""

    def __init__(self, log: Path, name: str, *args: str):
        program = shutil.which(name)
        assert program, f"{name} is not on the path"
        self.log = log
        # A killed command leaves its scratch directory, so that lies in the test's own.
        env = {**os.environ, "TMPDIR": str(log.parent)}
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [program, *args], stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=log.parent, env=env
            )

    def printed(self) -> str:
        return self.log.read_text()

    def children(self) -> list[int]:
        pid = self.process.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in text.split()]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        self.process.kill()
        self.process.wait()


class Master(Command):
    """mooncake_master at ports of its own."""

    def __init__(self, dir: Path, *args: str):
        self.rpc, self.http = free_port(), free_port()
        super().__init__(
            dir / "master.log",
            "mooncake_master",
            "-rpc_address=127.0.0.1",
            "-rpc_port",
            str(self.rpc),
            f"--metrics_port={self.http}",
            *args,
            "--",
            f"--data-dir={dir / 'data'}",
        )
        self.url = f"http://127.0.0.1:{self.http}"


@pytest.fixture
def commands() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def started_master(commands: contextlib.ExitStack, dir: Path, *args: str) -> Master:
    master = Master(dir, *args)
    commands.callback(master.stop)
    wait_until(lambda: ask(f"{master.url}/health")[0] == 200)
    return master


def kvctl(master: Master, *args: str) -> subprocess.CompletedProcess[bytes]:
    command = ["kvctl", "--master", f"http://127.0.0.1:{master.rpc}", *args]
    return subprocess.run(command, capture_output=True, timeout=30)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_help_has_kvmasters_defaults() -> None:
    said = subprocess.run(["kvmaster", "--print-config"], capture_output=True, check=True, timeout=30)
    config = tomllib.loads(said.stdout.decode())
    told = {flag.name: flag.default for flag in FLAGS}
    for name in ("eviction_high_watermark_ratio", "eviction_ratio"):
        assert told[name] == config[name]
    assert config["lease_ttl"] == f"{int(told['default_kv_lease_ttl']) // 1000}s"
    assert config["drop_after"] == f"{told['client_ttl'] // 60}m"
    assert config["max_grant_ttl"] == f"{told['put_start_discard_timeout_sec'] // 60}m"
    assert config["cluster"] == told["cluster_id"]


def test_a_pool_of_the_originals_commands_keeps_blocks(commands, tmp_path) -> None:
    metadata = free_port()
    master = started_master(
        commands,
        tmp_path,
        "--enable_http_metadata_server",
        f"--http_metadata_server_port={metadata}",
        "-eviction_high_watermark_ratio=0.8",
        "-default_kv_lease_ttl",
        "200",
        "--rpc_thread_num=4",
    )
    assert ask(f"{master.url}/get_all_segments") == (200, b"")
    port = free_port()
    node = Command(
        tmp_path / "client.log",
        "mooncake_client",
        "--host=127.0.0.1",
        f"--port={port}",
        "--global_segment_size",
        "0.125 GB",
        f"--master_server_address=127.0.0.1:{master.rpc}",
        "--metadata_server=P2PHANDSHAKE",
        "--protocol=tcp",
    )
    commands.callback(node.stop)
    wait_until(lambda: ask(f"{master.url}/get_all_segments")[1] == f"127.0.0.1:{port}\n".encode())
    status = json.loads(kvctl(master, "--output", "json", "status").stdout)
    assert str(128 << 20) in json.dumps(status)

    value = tmp_path / "value"
    value.write_bytes(os.urandom(100_000))
    put = kvctl(master, "put", "a key", str(value))
    assert put.returncode == 0, put.stderr
    got = kvctl(master, "get", "a key", "--to", str(tmp_path / "got"))
    assert got.returncode == 0, got.stderr
    assert (tmp_path / "got").read_bytes() == value.read_bytes()

    # A process that knows only the client's port finds the pool.
    store = MooncakeDistributedStore()
    assert store.setup_dummy(1 << 20, 1 << 20, f"127.0.0.1:{port}") == 0
    assert store.get("a key") == value.read_bytes()
    assert store.close() == 0

    code, metrics = ask(f"{master.url}/metrics")
    assert code == 200 and b"kvpool_" in metrics
    assert ask(f"{master.url}/metadata?key=x")[0] == 404
    assert ask(f"http://127.0.0.1:{metadata}/metadata?key=x", "PUT", b"{}")[0] == 200
    assert ask(f"http://127.0.0.1:{metadata}/metadata?key=x") == (200, b"{}")
    assert ask(f"http://127.0.0.1:{metadata}/health")[0] == 200

    printed = master.printed()
    assert "--eviction-high-watermark-ratio=0.8" in printed and "--lease-ttl=200ms" in printed
    assert printed.count("--rpc_thread_num has no effect") == 1
    assert "--metadata_server has no effect" in node.printed()

    # The node is kvstore-node itself: SIGTERM drains it.
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(20) == 0
    wait_until(lambda: ask(f"{master.url}/get_all_segments") == (200, b""))


def test_a_master_with_every_flag_of_the_original_starts(commands, tmp_path) -> None:
    # The fixture gives the flags with addresses. Flags that need absent services are left out.
    left_out = {"port", "rpc_port", "rpc_address", "rpc_interface", "metrics_port", "config_path"}
    lines = (Path(__file__).parent / "flags-0.3.13-master.txt").read_text().splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    given = [(name, json.loads(default)) for name, _, default in rows if name not in left_out]
    words = [f"--{name}={str(value).lower() if value is not None else ''}" for name, value in given]
    master = started_master(commands, tmp_path, *words)
    assert ask(f"{master.url}/metrics")[0] == 200
    printed = master.printed()
    for flag in FLAGS:
        if flag.ignored and flag.name in dict(given):
            assert f"--{flag.name} has no effect: {flag.ignored}" in printed
    assert "--lease-ttl=10000ms" in printed and "--drop-after=10s" in printed


def test_a_client_serves_its_health_at_the_given_address(commands, tmp_path) -> None:
    master = started_master(commands, tmp_path)
    port, http = free_port(), free_port()
    args = ("--host=127.0.0.1", f"--port={port}", "--global_segment_size=16MB", "-enable_http_server")
    address = f"127.0.0.1:{master.rpc}"
    node = Command(
        tmp_path / "client.log",
        "mooncake_client",
        *args,
        f"--http_port={http}",
        f"--master_server_address={address}",
    )
    commands.callback(node.stop)
    wait_until(lambda: ask(f"http://127.0.0.1:{http}/health")[0] == 200)
    assert b"kvpool_" in ask(f"http://127.0.0.1:{http}/metrics")[1]


def test_a_client_with_offload_has_its_blocks_again_after_a_restart(commands, tmp_path, monkeypatch) -> None:
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", str(ssd))
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(128 << 20))
    master = started_master(commands, tmp_path, "--enable_offload", "--offload_on_evict")
    assert "--offload_on_evict has no effect: blocks are always copied" in master.printed()
    blocks = {f"block {number}": os.urandom(1 << 20) for number in range(8)}

    def started_client() -> tuple[Command, MooncakeDistributedStore]:
        port = free_port()
        client = Command(
            tmp_path / f"client-{port}.log",
            "mooncake_client",
            "--host=127.0.0.1",
            f"--port={port}",
            "--global_segment_size=16MB",
            f"--master_server_address=127.0.0.1:{master.rpc}",
            "--enable_offload",
        )
        commands.callback(client.stop)
        wait_until(lambda: "medium attached" in client.printed())
        store = MooncakeDistributedStore()
        commands.callback(store.close)
        assert store.setup_dummy(1 << 20, 1 << 20, f"127.0.0.1:{port}") == 0
        return client, store

    client, store = started_client()
    assert f"--enable_offload: kvstore-node --ssd=dir={ssd},size={128 << 20}" in client.printed()
    for key, value in blocks.items():
        assert store.put(key, value) == 0
    # The node copies the blocks of its memory before it ends.
    client.process.send_signal(signal.SIGTERM)
    assert client.process.wait(30) == 0
    assert store.is_exist("block 0") == 0
    _, store = started_client()
    wait_until(lambda: store.is_exist("block 0") == 1)
    assert {key: store.get(key) for key in blocks} == blocks
    assert [file.name for file in ssd.iterdir()] == ["kvpool-0.ssd"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_kvmaster_and_its_exit_code_comes_back(commands, tmp_path, number) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests run under nohup")
    master = started_master(commands, tmp_path)
    (kvmaster,) = master.children()
    master.process.send_signal(number)
    assert master.process.wait(15) == 0
    assert not is_running(kvmaster)
    # As in a shell, the exit code tells the signal that ended the command.
    again = started_master(commands, tmp_path)
    os.kill(again.children()[0], signal.SIGKILL)
    assert again.process.wait(15) == 128 + signal.SIGKILL


def test_kvmaster_does_not_outlive_a_front_that_was_killed(commands, tmp_path) -> None:
    master = started_master(commands, tmp_path)
    (kvmaster,) = master.children()
    master.process.kill()
    master.process.wait()
    wait_until(lambda: not is_running(kvmaster), 15)
    # Another master can then take its place at once.
    assert ask(f"{started_master(commands, tmp_path).url}/health") == (200, b"OK\n")


def test_kvmasters_own_refusal_is_the_fronts_exit_code(commands, tmp_path) -> None:
    master = Master(tmp_path, "-eviction_ratio=7")
    commands.callback(master.stop)
    assert master.process.wait(15) not in (0, None)
    assert "eviction" in master.printed()


def test_unknown_flags_and_taken_ports_end_a_command_before_it_begins(tmp_path) -> None:
    for command in ("mooncake_master", "mooncake_client", "mooncake_http_metadata_server"):
        log = tmp_path / f"{command}.log"
        assert Command(log, command, "--no_such_flag=1").process.wait(15) == 2
        assert "--no_such_flag" in log.read_text()
        assert Command(tmp_path / "help.log", command, "--help").process.wait(15) == 0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        log = tmp_path / "taken.log"
        port = str(taken.getsockname()[1])
        args = ("-rpc_address=127.0.0.1", f"-rpc_port={free_port()}", f"-metrics_port={port}")
        assert Command(log, "mooncake_master", *args).process.wait(15) == 1
        assert port in log.read_text() and "--metrics_port" in log.read_text()


def test_the_metadata_server_keeps_its_values(commands, tmp_path) -> None:
    port = free_port()
    server = Command(
        tmp_path / "metadata.log", "mooncake_http_metadata_server", "--host=127.0.0.1", f"--port={port}"
    )
    commands.callback(server.stop)
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: ask(f"{url}/health")[0] == 200)
    key = f"{url}/metadata?key=mooncake%2Fram%2Fhost%3A1"
    assert ask(key)[0] == 404
    assert ask(key, "DELETE")[0] == 404
    for value in (b'{"a": 1}', b"", bytes(range(256))):
        assert ask(key, "PUT", value)[0] == 200
        assert ask(key) == (200, value)
    assert ask(f"{url}/metadata?key=other")[0] == 404
    assert ask(key, "DELETE")[0] == 200
    assert ask(key)[0] == 404
    assert ask(f"{url}/metadata", "PUT", b"x")[0] == 400
    assert ask(f"{url}/metadata")[0] == 400
    assert ask(f"{url}/metadata?key=k", "POST", b"x")[0] == 405
    assert ask(f"{url}/elsewhere")[0] == 404
    assert ask(key, "PUT", bytes((1 << 20) + 1))[0] in (0, 413)
    assert ask(f"{url}/health")[0] == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(15) == 0
