"""Pools of real processes for the tests of both packages, from the commands that the wheel installs."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

MIB = 1 << 20

RANGES = [range(first, first + 1500) for first in range(20000, 32000, 1500)]
"""Ports below the ports that the system assigns by itself. A run of both suites needs some hundreds."""


class Ports:
    """The ports for the tests of a process: one of `RANGES`, locked until the process ends."""

    def __init__(self, folder: Path, process: int) -> None:
        """Takes the first range that no other process has. The start of the search depends on the process.
        `folder` has a lock file for each range."""
        for at in range(process, process + len(RANGES)):
            self.range = RANGES[at % len(RANGES)]
            self.lock = _locked(folder / f"kvpool-tests-{self.range.start}.lock")
            if self.lock is not None:
                return
        raise RuntimeError(f"all ranges of ports are taken: {folder}/kvpool-tests-*.lock")


def _locked(file: Path) -> IO[bytes] | None:
    """Opens and locks a file. Returns None if another process has the lock."""
    try:
        # The system may refuse an open that could create the file, if the file is another user's.
        if not file.exists():
            file.touch()
        lock = file.open("rb")
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


PORTS = Ports(Path(tempfile.gettempdir()), os.getpid())
_ports = itertools.cycle(PORTS.range)


def free_port() -> int:
    """Returns a port on which no process listens."""
    while True:
        port = next(_ports)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port


def wait_until(is_so, seconds: float = 20.0, what: str = "it") -> None:
    """Waits until `is_so()` is true. Fails after `seconds`."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"{what} did not come about in {seconds} s"
        time.sleep(0.02)


def answers(url: str) -> bool:
    """Whether an HTTP server at the URL answers with success."""
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return response.status == 200
    except OSError:
        return False


class Daemon:
    """A process of a command on the path."""

    def __init__(self, command: str, *args: str, log: Path, env: dict[str, str] | None = None):
        program = shutil.which(command)
        assert program, f"{command} is not on the path"
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [program, *args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **(env or {})},
            )

    def send(self, what: signal.Signals) -> None:
        self.process.send_signal(what)

    def hang(self) -> None:
        """Stops the process until SIGCONT, and waits until all its threads have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")

        def all_stopped() -> bool:
            # A thread may end before the stop.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stats = [(thread / "stat").read_text() for thread in threads.iterdir()]
                return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}
            return False

        wait_until(all_stopped, what="the stop")

    def kill(self) -> None:
        """kill -9, and waits until the process is gone."""
        self.process.kill()
        self.process.wait()


@dataclasses.dataclass
class LivePool:
    """One kvmaster and some kvstore-nodes, each a process of its own."""

    dir: Path
    port: int = dataclasses.field(default_factory=free_port)
    http: int = dataclasses.field(default_factory=free_port)
    master: Daemon | None = None
    nodes: list[Daemon] = dataclasses.field(default_factory=list)
    flags: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start_master(self) -> None:
        self.master = Daemon(
            "kvmaster",
            f"--listen=127.0.0.1:{self.port}",
            f"--http-listen=127.0.0.1:{self.http}",
            f"--data-dir={self.dir / 'master'}",
            *self.flags,
            log=self.dir / "master.log",
        )
        wait_until(lambda: answers(f"http://127.0.0.1:{self.http}/readyz"), what="the master")

    def start_node(self, segment: str = "256MiB", *flags: str) -> Daemon:
        number = len(self.nodes)
        http = free_port()
        node = Daemon(
            "kvstore-node",
            f"--name=node-{number}",
            f"--master={self.url}",
            f"--listen=127.0.0.1:{free_port()}",
            f"--http-listen=127.0.0.1:{http}",
            f"--segment={segment}",
            # Other pools of this host also have a node-0.
            f"--shm-path={self.dir / f'node-{number}.sock'}",
            *flags,
            log=self.dir / f"node-{number}.log",
        )
        self.nodes.append(node)
        wait_until(lambda: answers(f"http://127.0.0.1:{http}/readyz"), what="the node")
        return node

    def kvctl(self, *args: str) -> object:
        """Returns the JSON output of kvctl."""
        command = ["kvctl", "--master", self.url, "--output", "json", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return json.loads(done.stdout)

    def stop(self) -> None:
        for daemon in [*self.nodes, self.master]:
            if daemon is not None:
                daemon.send(signal.SIGCONT)
                daemon.kill()


@contextlib.contextmanager
def live_pool(dir: Path, nodes: int = 1, segment: str = "256MiB", *flags: str) -> Iterator[LivePool]:
    """A pool of its own, which ends with the block."""
    pool = LivePool(dir, flags=flags)
    try:
        pool.start_master()
        for _ in range(nodes):
            pool.start_node(segment)
        yield pool
    finally:
        pool.stop()


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Callable[..., LivePool]]:
    """Makes pools that the test may break: `make_pool(nodes, segment, *flags of the master)`."""
    with contextlib.ExitStack() as pools:

        def make(nodes: int = 1, segment: str = "256MiB", *flags: str) -> LivePool:
            return pools.enter_context(live_pool(tmp_path, nodes, segment, *flags))

        yield make


@pytest.fixture(scope="module")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    """A pool with one node for the tests of one file. Tests use keys of their own."""
    with live_pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture
def own_pool(tmp_path: Path) -> Iterator[LivePool]:
    """A pool with one node that the test may break."""
    with live_pool(tmp_path) as pool:
        yield pool
