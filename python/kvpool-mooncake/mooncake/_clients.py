"""How `setup_dummy` finds the pool that a `mooncake_client` of this host belongs to.

A caller of `setup_dummy` knows the port of a client on its host and nothing else. So whoever starts
such a client writes the masters' addresses to a file named for the port, in a directory of the user's
own.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


def _directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "kvpool" if runtime else Path(f"/tmp/kvpool-{os.getuid()}")


def _file(port: int) -> Path:
    return _directory() / f"mooncake-client-{port}.json"


@dataclass(frozen=True)
class AnnouncedClient:
    """What a client of this host says of itself."""

    masters: str
    """The masters that it belongs to, with commas."""
    tenant: str
    """The namespace of the stores that join by it."""


def announce_client(
    port: int, masters: Sequence[str], process: int | None = None, tenant: str = "default"
) -> Path:
    """Says that the client on `port`, run by `process` (this one unless said), belongs to `masters`.

    Returns the file, which is to be removed when the client ends.
    """
    file = _file(port)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    said = {"masters": list(masters), "process": process or os.getpid(), "tenant": tenant}
    partial.write_text(json.dumps(said))
    partial.replace(file)
    return file


def announced_client(port: int) -> AnnouncedClient | None:
    """What the client on `port` said of itself; `None` when no living one did."""
    file = _file(port)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        # Another user's directory under the same name is none to believe.
        if file.stat().st_uid != os.getuid():
            return None
        said = json.loads(file.read_text())
        os.kill(int(said["process"]), 0)
        masters = ",".join(str(master) for master in said["masters"])
        return AnnouncedClient(masters, str(said.get("tenant", "default")))
    return None
