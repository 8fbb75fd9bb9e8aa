"""What the checks of faults share: engines that live until a fault kills them, and the report of what was seen."""

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
    """A new model that is wide, so that a hand-off takes long enough to be hit."""
    model = work / "wide"
    subprocess.run([environment.python, HERE / "tiny_model.py", model, "--wide"], check=True)
    return model


@dataclasses.dataclass
class Engines:
    """The engines of one back end or connector, and what is reported of them."""

    environment: Environment
    program: Path
    work: Path
    tally: Tally
    name: str
    """The part that the tally names."""
    is_ours: bool
    _started: int = 0

    def run(self, faults: Callable[[], None]) -> None:
        """Runs the faults. What ends them early is a fact, but for ours."""
        try:
            faults()
        except RuntimeError as error:
            if self.is_ours:
                raise
            self.fact("goes no further here", error)

    @contextlib.contextmanager
    def live(self, role: str, settings: dict[str, Any], env: dict[str, str]) -> Iterator[LiveEngine]:
        """An engine that ends with the block. `env`: the environment's variables."""
        self._started += 1
        name = f"{role}-{self._started}"
        wanted = {name: (settings, {"PYTHONUNBUFFERED": "1", **env})}
        with live_engines(self.environment, self.program, self.work, wanted) as engines:
            yield engines[name]
            # Nothing is left to end well.
            engines[name].kill()

    def fact(self, what: str, seen: object) -> None:
        """Notes what was seen."""
        self.tally.fact(self.name, what, seen)

    def report(self, what: str, seen: str, holds: bool) -> None:
        """A check of ours. What others do is a fact."""
        if self.is_ours:
            self.tally.check(self.name, what, seen, holds)
        else:
            self.fact(what, seen)


def fail(engine: LiveEngine, is_killed: bool) -> float:
    """Kills or stops an engine. Returns when."""
    since = time.monotonic()
    if is_killed:
        engine.kill()
    else:
        engine.freeze()
    return since
