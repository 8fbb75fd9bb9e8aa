"""The REST service over HTTP with a live pool, and the configuration."""

from __future__ import annotations

import asyncio
import importlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import MooncakeDistributedStore
from live_pools import Daemon, LivePool, free_port, wait_until


class Rest:
    """A client of the service."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def __call__(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._base}{path}", data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


@pytest.fixture(scope="module")
def rest(shared_pool: LivePool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    directory = tmp_path_factory.mktemp("rest")
    config = directory / "config.json"
    given = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{shared_pool.port}",
        "global_segment_size": "1GB",
    }
    config.write_text(json.dumps(given))
    port = free_port()
    log = directory / "log"
    args = ["--config", str(config), "-Dglobal_segment_size=0", "-Dlocal_buffer_size=16MB", "--port", str(port)]
    service = Daemon("mc_store_rest_server", *args, log=log)
    wait_until(lambda: f"served at port {port}" in log.read_text(), what="the service")
    yield Rest(port)
    service.process.terminate()
    assert service.process.wait(20) == 0


def test_objects_are_put_and_got_by_http(rest: Rest, key: str) -> None:
    assert rest("GET", f"/api/exist/{key}") == (200, b'{"exists": false}')
    assert rest("GET", f"/api/get/{key}")[0] == 404
    assert rest("PUT", "/api/put", {"key": key, "value": "h\u00e9llo"}) == (200, b'{"status": "success"}')
    assert rest("GET", f"/api/exist/{key}") == (200, b'{"exists": true}')
    assert rest("GET", f"/api/get/{key}") == (200, "h\u00e9llo".encode())
    # The lease of the get ends in the background.
    wait_until(lambda: rest("DELETE", f"/api/remove/{key}")[0] == 200, what="the end of the lease")
    status, answer = rest("DELETE", f"/api/remove/{key}")
    assert status == 500 and json.loads(answer)["code"] == -704
    for at in range(3):
        assert rest("PUT", "/api/put", {"key": f"{key}-{at}", "value": "x"})[0] == 200
    status, answer = rest("DELETE", "/api/remove_all")
    assert status == 200 and b"success removed" in answer
    assert rest("GET", f"/api/exist/{key}-0") == (200, b'{"exists": false}')


def test_an_object_that_cannot_be_read_is_500(own_pool: LivePool, key: str) -> None:
    test_utils = pytest.importorskip("aiohttp.test_utils", reason="aiohttp is not installed")
    routes = importlib.import_module("mooncake._rest.objects").ObjectRoutes()
    routes.store = MooncakeDistributedStore()
    settings = {"global_segment_size": 0, "master_server_addr": own_pool.url, "get_timeout_ms": 300}
    assert routes.store.setup(settings) == 0
    assert routes.store.put(key, b"x") == 0
    own_pool.nodes[0].hang()
    request = test_utils.make_mocked_request("GET", "/", match_info={"key": key})
    answer = asyncio.run(routes.handle_get(request))
    assert answer.status == 500
    routes.store.close()


@pytest.mark.parametrize(
    "body",
    [{}, {"key": "k"}, {"value": "v"}, {"key": "", "value": "v"}, {"key": 1, "value": "v"}, [1], b"{no", b"\xff"],
)
def test_a_bad_body_is_400(rest: Rest, body: object) -> None:
    status, answer = rest("PUT", "/api/put", body)
    assert status == 400 and json.loads(answer)["error"]


def test_memory_is_contributed_and_withdrawn_by_http(rest: Rest, shared_pool: LivePool) -> None:
    status, answer = rest("POST", "/api/mount", {"size": 1 << 20})
    said = json.loads(answer)
    assert status == 200 and said["allocated_size"] == 1 << 20
    assert rest("POST", "/api/unmount", {"segment_ids": said["segment_ids"]}) == (200, b'{"status": "success"}')
    assert rest("POST", "/api/unmount", {"segment_ids": said["segment_ids"]})[0] == 500
    for size in (0, -1, 1.5, "1MB", None):
        assert rest("POST", "/api/mount", {"size": size})[0] == 400
    assert rest("POST", "/api/unmount", {})[0] == 400
    assert rest("POST", "/api/unmount_shm", {"segment_ids": "none"})[0] == 500
    for grace in (-1, 1.5, True, "1", 3601):
        assert rest("POST", "/api/unmount_local_disk", {"grace_period_seconds": grace})[0] == 400
    status, answer = rest("POST", "/api/unmount_local_disk", {})
    assert status == 500 and b"-101" in answer


def test_mounts_of_others_memory_are_501(rest: Rest) -> None:
    status, answer = rest("POST", "/api/mount_shm", {"name": "x", "size": 4096})
    assert status == 501 and b"allocate_and_mount_segment" in answer
    for name in ("", "..", "a/b", None):
        assert rest("POST", "/api/mount_shm", {"name": name, "size": 4096})[0] == 400
    assert rest("POST", "/api/reconfigure", {"mode": "decode", "path": "/dev/shm/x", "size": 4096})[0] == 501
    assert rest("POST", "/api/reconfigure", {"mode": "decode"})[0] == 400
    assert rest("POST", "/api/reconfigure", {"mode": "other"})[0] == 400
    assert rest("POST", "/api/reconfigure", {"mode": "prefill"}) == (200, b'{"status": "success", "mode": "prefill"}')


def test_a_service_without_a_pool_gives_up(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    env = {"MOONCAKE_MASTER": "127.0.0.1:1", "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0"}
    log = tmp_path / "log"
    service = Daemon("mc_store_rest_server", "--max-wait-time=1", f"--port={free_port()}", log=log, env=env)
    assert service.process.wait(40) == 1
    assert "cannot be set up" in log.read_text()


def test_a_configuration_comes_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    given = {"local_hostname": "h", "metadata_server": "m", "master_server_address": "a", "protocol": " RDMA "}
    file.write_text(json.dumps({**given, "local_buffer_size": "1.5 GB", "enable_ssd_offload": "yes", "other": 1}))
    config = MooncakeConfig.from_file(str(file))
    assert (config.protocol, config.global_segment_size) == ("rdma", 3355443200)
    assert (config.local_buffer_size, config.enable_ssd_offload) == (3 << 29, True)
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    assert MooncakeConfig.load_from_env() == config
    file.write_text(json.dumps({"local_hostname": "h"}))
    with pytest.raises(ValueError, match="metadata_server"):
        MooncakeConfig.from_file(str(file))


def test_a_configuration_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="MOONCAKE_MASTER"):
        MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_MASTER", "10.0.0.1:50051")
    monkeypatch.setenv("MOONCAKE_LOCAL_BUFFER_SIZE", "16mb")
    monkeypatch.setenv("MOONCAKE_CLIENT_HTTP_PORT", "9301")
    config = MooncakeConfig.load_from_env()
    assert (config.local_hostname, config.metadata_server) == ("localhost", "P2PHANDSHAKE")
    assert (config.local_buffer_size, config.client_http_port, config.tenant_id) == (16 << 20, 9301, "default")


@pytest.mark.parametrize(
    "wrong",
    [
        {"protocol": ""},
        {"protocol": 5},
        {"global_segment_size": -1},
        {"global_segment_size": ""},
        {"global_segment_size": "GB"},
        {"local_buffer_size": "1 XB"},
        {"master_server_address": " "},
        {"enable_ssd_offload": "perhaps"},
    ],
)
def test_an_invalid_configuration_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    file = tmp_path / "config.json"
    given = {"local_hostname": "h", "metadata_server": "m", "master_server_address": "a"}
    file.write_text(json.dumps({**given, **wrong}))
    with pytest.raises(ValueError):
        MooncakeConfig.from_file(str(file))
