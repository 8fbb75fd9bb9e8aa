"""How `setup_dummy` finds the pool of a `mooncake_client` on this host.

A caller of `setup_dummy` knows only the port of a client on its host. So the command that starts the
client writes the masters' addresses to a file named for the port, in a directory of the user.
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
    """The announcement of a client on this host."""

    masters: str
    """The addresses of its masters, separated by commas."""
    tenant: str
    """The namespace of the stores that join through it."""


def announce_client(
    port: int, masters: Sequence[str], process: int | None = None, tenant: str = "default"
) -> Path:
    """Announces that the client on `port`, in process `process` (default: this one), uses `masters`.

    Returns the file; remove it when the client ends.
    """
    file = _file(port)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    said = {"masters": list(masters), "process": process or os.getpid(), "tenant": tenant}
    partial.write_text(json.dumps(said))
    partial.replace(file)
    return file


def announced_client(port: int) -> AnnouncedClient | None:
    """The announcement of the client on `port`; `None` without a living one."""
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
