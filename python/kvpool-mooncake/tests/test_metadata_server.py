"""The metadata server as an object for programs."""

from __future__ import annotations

import urllib.error
import urllib.request

from mooncake.http_metadata_server import KVBootstrapServer, KVPoll


def ask(port: int, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metadata?key={key}", body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_values_are_kept_while_the_server_runs() -> None:
    server = KVBootstrapServer(0, "127.0.0.1")
    assert server.poll() is KVPoll.Failed
    assert server.run() is not None and server.poll() is KVPoll.Success
    port = server.port
    assert ask(port, "GET", "a")[0] == 404
    assert ask(port, "PUT", "%20a%20", b"one")[0] == 200
    assert ask(port, "GET", "a") == (200, b"one")
    for method in ("GET", "PUT", "DELETE"):
        assert ask(port, method, "%20", b"x" if method == "PUT" else None)[0] == 400
    # An engine cannot overwrite another engine's address.
    assert ask(port, "PUT", "mooncake/rpc_meta/h", b"one")[0] == 200
    assert ask(port, "PUT", "mooncake/rpc_meta/h", b"two")[0] == 400
    assert ask(port, "DELETE", "a")[0] == 200
    other = KVBootstrapServer(port, "127.0.0.1")
    assert other.run() is None and other.poll() is KVPoll.Failed
    server.close()
    assert server.poll() is KVPoll.Failed
