"""The pool that a benchmark measures."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator


def free_port() -> int:
    """Returns a port that no process listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def pool_of_processes(segment: str = "256MiB") -> Iterator[str]:
    """Starts a kvmaster and a kvstore-node with a segment of this size, both from the path. Yields the master's
    URL."""
    with tempfile.TemporaryDirectory() as dir, contextlib.ExitStack() as stack:
        url = f"http://127.0.0.1:{free_port()}"
        master = ["kvmaster", f"--listen={url[7:]}", f"--data-dir={dir}/master"]
        node = ["kvstore-node", f"--master={url}", f"--listen=127.0.0.1:{free_port()}"]
        node += ["--name=bench", f"--segment={segment}", f"--shm-path={dir}/node.sock"]
        for command in (master, node):
            http = free_port()
            log = stack.enter_context(open(f"{dir}/{command[0]}.log", "wb"))
            command.append(f"--http-listen=127.0.0.1:{http}")
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            ready = f"http://127.0.0.1:{http}/readyz"
            for _ in range(200):
                with contextlib.suppress(OSError), urllib.request.urlopen(ready, timeout=1):
                    break
                time.sleep(0.05)
        yield url
