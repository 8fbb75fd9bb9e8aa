"""Shared parts of the checks of faults: engines that live until a fault kills them, and the reports."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from environments import Environment
from live_engines import LiveEngine, live_engines
from tally import Tally

HERE = Path(__file__).parent


def wide_model(environment: Environment, work: Path) -> Path:
    """Makes a wide model, so that a hand-off takes long enough for a fault."""
    model = work / "wide"
    subprocess.run([environment.python, HERE / "tiny_model.py", model, "--wide"], check=True)
    return model


@dataclasses.dataclass
class Engines:
    """The engines of one back end or connector, with their reports."""

    environment: Environment
    program: Path
    work: Path
    tally: Tally
    name: str
    """The part that the tally names."""
    is_ours: bool
    _started: int = 0

    def run(self, faults: Callable[[], None]) -> None:
        """Runs the faults. An error that ends them early is raised for kvpool, and is a fact for other
        projects."""
        try:
            faults()
        except RuntimeError as error:
            if self.is_ours:
                raise
            self.fact("goes no further here", error)

    @contextlib.contextmanager
    def live(self, role: str, settings: dict[str, Any], env: dict[str, str]) -> Iterator[LiveEngine]:
        """An engine that ends with the block. `env`: further environment variables."""
        self._started += 1
        name = f"{role}-{self._started}"
        wanted = {name: (settings, {"PYTHONUNBUFFERED": "1", **env})}
        with live_engines(self.environment, self.program, self.work, wanted) as engines:
            yield engines[name]
            # Nothing is left that could end in order.
            engines[name].kill()

    def fact(self, what: str, seen: object) -> None:
        """Notes an observation."""
        self.tally.fact(self.name, what, seen)

    def report(self, what: str, seen: str, holds: bool) -> None:
        """Reports a check of kvpool. The results of other projects are facts."""
        if self.is_ours:
            self.tally.check(self.name, what, seen, holds)
        else:
            self.fact(what, seen)


def fail(engine: LiveEngine, is_killed: bool) -> float:
    """Kills or stops an engine. Returns the time."""
    since = time.monotonic()
    if is_killed:
        engine.kill()
    else:
        engine.freeze()
    return since
