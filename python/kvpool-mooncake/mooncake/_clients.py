"""How `setup_dummy` finds the pool that a `mooncake_client` of this host belongs to.

A caller of `setup_dummy` knows only the port of a client on its host. So the command that starts the client
writes the addresses of the masters to a file. The file is named after the port, and lies in a directory of the
user.

The sockets of segments lie in the same directory. A process that was killed leaves its files there, and their names
return rarely. So each process that makes a file there first removes the files of processes that have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


_ANNOUNCEMENT = re.compile(r"mooncake-client-[0-9]+\.json")
# The names of nodes end with a port, or are cut and end with a digest.
_SOCKET = re.compile(r"[A-Za-z0-9_.:-]+[:-][0-9a-f]+\.sock")
# The age in seconds from which a socket without a server is removed. A younger one may be about to get its server.
_OLD = 60.0


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
    remove_left_files()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    said = {
        "masters": list(masters),
        "process": process or os.getpid(),
        "namespace": _process_namespace(),
        "tenant": tenant,
    }
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


def remove_left_files() -> None:
    """Removes the announcements of clients that have ended, and the sockets of segments without a server.

    Touches no file of another user or with another name, and follows no link.
    """
    directory = _directory()
    with contextlib.suppress(OSError):
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return
        for file in list(directory.iterdir()):
            with contextlib.suppress(OSError):
                found = file.lstat()
                # Another process may have replaced the file meanwhile.
                if _is_left(file, found) and os.path.samestat(found, file.lstat()):
                    file.unlink()


def _is_left(file: Path, found: os.stat_result) -> bool:
    if found.st_uid != os.getuid():
        return False
    if _ANNOUNCEMENT.fullmatch(file.name) and stat.S_ISREG(found.st_mode):
        return _has_ended(file)
    if _SOCKET.fullmatch(file.name) and stat.S_ISSOCK(found.st_mode):
        return time.time() - found.st_mtime > _OLD and _has_no_server(file)
    return False


def _has_ended(announcement: Path) -> bool:
    """Whether the process of an announcement has ended.

    A process of another container or host cannot be asked about.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError):
        with os.fdopen(os.open(announcement, os.O_RDONLY | os.O_NOFOLLOW)) as opened:
            said = json.load(opened)
        here = _process_namespace()
        process = int(said["process"])
        if process <= 0 or not here or said.get("namespace") != here:
            return False
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
    return False


def _has_no_server(file: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(file))
        except ConnectionRefusedError:
            return True
    return False


def _process_namespace() -> str:
    """The host and the namespace in which this process's id is valid; empty if unknown."""
    with contextlib.suppress(OSError):
        # The first namespace of each host has the same number. The id of the boot tells hosts apart.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}" if boot else ""
    return ""
