"""How `setup_dummy` finds the pool that a `mooncake_client` of this host belongs to.

A caller of `setup_dummy` knows only the port of a client on its host. So the command that starts the client
writes the addresses of the masters to a file. The file is named after the port, and lies in a directory of the
user.
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
    """The addresses of the client's masters, separated by commas."""
    tenant: str
    """The namespace of stores that join through the client."""


def announce_client(
    port: int, masters: Sequence[str], process: int | None = None, tenant: str = "default"
) -> Path:
    """Announces that the client on `port`, in process `process` (default: this one), uses `masters`.

    Returns the file. Remove the file when the client ends.
    """
    file = _file(port)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    said = {"masters": list(masters), "process": process or os.getpid(), "tenant": tenant}
    partial.write_text(json.dumps(said))
    partial.replace(file)
    return file


def announced_client(port: int) -> AnnouncedClient | None:
    """Returns the announcement of the client on `port`; `None` without a running client."""
    file = _file(port)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        # A directory of another user under this name is not trustworthy.
        if file.stat().st_uid != os.getuid():
            return None
        said = json.loads(file.read_text())
        os.kill(int(said["process"]), 0)
        masters = ",".join(str(master) for master in said["masters"])
        return AnnouncedClient(masters, str(said.get("tenant", "default")))
    return None
