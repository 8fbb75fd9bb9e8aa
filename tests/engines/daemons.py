"""A live pool for the engines: one kvmaster and one kvstore-node, the commands that the wheel installs."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

SEGMENT = "512MiB"
_START_SECONDS = 20.0


def free_port() -> int:
    """Returns a port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pool:
    """A pool whose processes can be killed. `commands` is the directory of the commands, `logs` the directory
    of their logs."""

    def __init__(self, commands: Path, logs: Path):
        self._commands = commands
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_port()
        self.http = free_port()

    @property
    def master(self) -> str:
        """The master's address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, *, node: bool = True) -> None:
        """Starts both daemons, or only the master, and waits until they are ready."""
        self._start(
            "kvmaster",
            self.http,
            f"--listen=127.0.0.1:{self.port}",
            f"--data-dir={self._logs / 'master'}",
        )
        if node:
            self.start_node()

    def start_node(self) -> None:
        """Starts the store node."""
        http = free_port()
        self._start(
            "kvstore-node",
            http,
            "--name=node",
            f"--master={self.master}",
            f"--listen=127.0.0.1:{free_port()}",
            f"--segment={SEGMENT}",
        )

    def kill(self, command: str) -> None:
        """kill -9, and waits until the process is gone."""
        process = self._processes.pop(command)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """Ends the daemons that still run."""
        for command in list(self._processes):
            self.kill(command)

    def _start(self, command: str, http: int, *flags: str) -> None:
        with (self._logs / f"{command}.log").open("ab") as log:
            self._processes[command] = subprocess.Popen(
                [self._commands / command, f"--http-listen=127.0.0.1:{http}", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + _START_SECONDS
        while not _answers(f"http://127.0.0.1:{http}/readyz"):
            if time.monotonic() > end or self._processes[command].poll() is not None:
                raise RuntimeError(f"{command} did not start: see {self._logs / command}.log")
            time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def living_pool(commands: Path, logs: Path, *, node: bool = True) -> Iterator[Pool]:
    """A pool that ends with the block. Without a node it accepts no block."""
    logs.mkdir(parents=True, exist_ok=True)
    pool = Pool(commands, logs)
    try:
        pool.start(node=node)
        yield pool
    finally:
        pool.stop()


def with_path(commands: Path, **more: str) -> dict[str, str]:
    """The environment, with the commands first on the path."""
    return {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', '')}", **more}
