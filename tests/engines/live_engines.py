"""Engines that run as processes of their own and answer single requests.

All times are of `time.monotonic`, which the processes of a host share.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from daemons import with_path
from environments import Environment

_START_SECONDS = 400.0
_ANSWER_SECONDS = 120.0
_MARK = ">>> "

Seen = dict[str, Any]
"""An observation of an engine's watch, with its time (`at`)."""


class LiveEngine:
    """A program that reads requests as lines of JSON, and prints each answer as `>>> ` and JSON."""

    def __init__(self, command: list[str], log: Path, work: Path, env: dict[str, str]):
        self._log = log
        self._answers: dict[str, Any] = {}
        self._seen: list[Seen] = []
        self._lines: list[tuple[float, str]] = []
        self._said = threading.Condition()
        self._ready = False
        # A session of its own, because the ranks of an engine are processes and are killed with it.
        self._process = subprocess.Popen(
            command,
            cwd=work,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        """Returns when the engine accepts requests. Raises RuntimeError if it does not start."""
        end = time.monotonic() + _START_SECONDS
        with self._said:
            while not self._ready and self._process.poll() is None and time.monotonic() < end:
                # There is no notification when the process ends and its children live on.
                self._said.wait(0.5)
            if not self._ready:
                raise RuntimeError(f"the engine did not start: see {self._log}")

    def send(self, name: str, **what: Any) -> None:
        """Sends a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": name, **what}) + "\n")
        self._process.stdin.flush()

    def answer(self, name: str, seconds: float = _ANSWER_SECONDS) -> dict[str, Any]:
        """Returns the answer to a request. Its `failed` has the reason of a failure."""
        end = time.monotonic() + seconds
        with self._said:
            while name not in self._answers and time.monotonic() < end:
                if self._process.poll() is not None and not self._reader.is_alive():
                    break
                self._said.wait(0.05)
            answer: dict[str, Any] = self._answers.pop(name, {"failed": f"no answer, see {self._log}"})
        return answer

    def ask(self, name: str, **what: Any) -> dict[str, Any]:
        """Sends a request and returns its answer."""
        self.send(name, **what)
        return self.answer(name)

    def wait_seen(self, holds: Callable[[Seen], bool], since: float, seconds: float) -> Seen | None:
        """Returns the first observation after `since` for which `holds` is true; None if there is none in
        time."""
        end = time.monotonic() + seconds
        with self._said:
            while True:
                for seen in self._seen:
                    if seen["at"] > since and holds(seen):
                        return seen
                if time.monotonic() > end or not self._reader.is_alive():
                    return None
                self._said.wait(0.05)

    def last_seen(self) -> Seen:
        """Returns the last observation of the engine's watch."""
        with self._said:
            return self._seen[-1]

    def line_after(self, pattern: str, since: float) -> float | None:
        """Returns the time of the first line after `since` that matches the pattern."""
        with self._said:
            return next((at for at, line in self._lines if at > since and re.search(pattern, line)), None)

    def kill(self) -> None:
        """kill -9 of the engine and its ranks."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def freeze(self) -> None:
        """Stops the engine and its ranks. Their connections stay open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets the engine and its ranks continue after `freeze`."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Lets the engine end, and kills it if it does not end."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20)
        self.kill()

    def owns(self, pid: int) -> bool:
        """Whether the process is one of the engine's."""
        try:
            return os.getsid(pid) == self._process.pid
        except ProcessLookupError:
            return False

    def log_text(self) -> str:
        """Returns the output of the engine."""
        return self._log.read_text(errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("w") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                at = time.monotonic()
                if not line.startswith(_MARK):
                    with self._said:
                        self._lines.append((at, line))
                    continue
                said = json.loads(line.removeprefix(_MARK))
                with self._said:
                    if "id" in said:
                        self._answers[said["id"]] = {"at": at, **said}
                    elif "at" in said:
                        self._seen.append(said)
                    else:
                        self._ready = True
                    self._said.notify_all()
        with self._said:
            self._said.notify_all()


@contextlib.contextmanager
def live_engines(
    environment: Environment,
    program: Path,
    work: Path,
    wanted: dict[str, tuple[dict[str, Any], dict[str, str]]],
) -> Iterator[dict[str, LiveEngine]]:
    """Engines by name, each with its settings and its environment variables. They are ready, and end with the
    block."""
    engines: dict[str, LiveEngine] = {}
    try:
        for name, (settings, env) in wanted.items():
            log = work / f"{name}.log"
            print(f"--- {name}: an engine starts, its log is {log}", flush=True)
            command = [str(environment.python), str(program), json.dumps(settings)]
            engines[name] = LiveEngine(command, log, work, with_path(environment.commands, **env))
        for engine in engines.values():
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines.values():
            engine.stop()
