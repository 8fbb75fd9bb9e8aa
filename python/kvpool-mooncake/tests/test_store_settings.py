"""The parsing of settings, without a pool."""

from __future__ import annotations

from pathlib import Path

import pytest
from mooncake._offload import BUCKETS_VARIABLE, PATH_VARIABLE, SIZE_VARIABLE, offload_medium
from mooncake._settings import (
    BadSetting,
    Place,
    find_place,
    is_for_this_host_alone,
    node_name,
    parse_host,
    parse_masters,
    parse_size,
    read_settings,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (1234, 1234),
        ("1234", 1234),
        ("16MB", 16 << 20),
        ("1GB", 1 << 30),
        ("4 GB", 4 << 30),
        ("100GB", 100 << 30),
        ("2 TiB", 2 << 40),
        ("1.5gb", 3 << 29),
        ("512k", 512 << 10),
        ("7 B", 7),
    ],
)
def test_sizes_are_ints_or_text_with_a_unit(text: object, size: int) -> None:
    assert parse_size(text, "size") == size


@pytest.mark.parametrize(
    "bad", ["", "MB", "1 XB", "-1", "1e3", -1, True, None, 1.5, [], 1 << 63, "9999999 PB"]
)
def test_an_invalid_size_is_refused_by_name(bad: object) -> None:
    with pytest.raises(BadSetting, match="global_segment_size"):
        parse_size(bad, "global_segment_size")


@pytest.mark.parametrize(
    ("given", "masters"),
    [
        ("10.0.0.1:50051", ("http://10.0.0.1:50051",)),
        ("master", ("http://master:50051",)),
        ("http://a:7070/", ("http://a:7070",)),
        ("a:1,b:2;c", ("http://a:1", "http://b:2", "http://c:50051")),
        ("[::1]:7", ("http://[::1]:7",)),
        ("etcd://a;b:1;c", ("etcd://a:2379,b:1,c:2379/default",)),
        ("etcd://a:1,b:2/blue", ("etcd://a:1,b:2/blue",)),
        ("HTTP://a:1;Https://b:2", ("http://a:1", "https://b:2")),
        ("ETCD://a;b:1/Blue", ("etcd://a:2379,b:1/Blue",)),
    ],
)
def test_a_master_is_named_in_any_of_the_usual_ways(given: str, masters: tuple[str, ...]) -> None:
    assert parse_masters(given) == masters


@pytest.mark.parametrize("bad", ["", "  ", "etcd://", ";", "ftp://a:1", None, 7])
def test_an_invalid_master_is_refused(bad: object) -> None:
    with pytest.raises(BadSetting, match="master"):
        parse_masters(bad)


def test_a_host_may_have_a_port() -> None:
    assert parse_host("localhost") == ("localhost", 0)
    assert parse_host("10.1.2.3:17") == ("10.1.2.3", 17)
    assert parse_host("[::1]:17") == ("::1", 17)
    assert parse_host("::1") == ("::1", 0)
    for bad in ("", "a:b", "a:70000", None):
        with pytest.raises(BadSetting):
            parse_host(bad)


def test_both_spellings_of_the_master_and_of_the_devices_are_read() -> None:
    for master, devices in (
        ("master_server_addr", "rdma_devices"),
        ("master_server_address", "device_name"),
    ):
        settings = read_settings({master: "m:1", devices: "mlx5_0, mlx5_1", "protocol": "RDMA"})
        assert settings.masters == ("http://m:1",)
        assert settings.devices == ("mlx5_0", "mlx5_1")
        assert settings.protocol == "rdma"


def test_an_empty_dict_has_the_documented_defaults() -> None:
    settings = read_settings({})
    assert settings.segment_size == settings.buffer_size == 16 << 20
    assert settings.protocol == "tcp"
    assert settings.masters == ("http://127.0.0.1:50051",)


def test_times_come_from_the_settings_or_else_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_PUT_TIMEOUT_MS", "700")
    monkeypatch.setenv("KVPOOL_GET_TIMEOUT_MS", "800")
    patience = read_settings({"get_timeout_ms": "90"}).patience
    assert (patience.put_timeout_ms, patience.get_timeout_ms) == (700, 90)
    with pytest.raises(BadSetting, match="connect_timeout_ms"):
        read_settings({"connect_timeout_ms": "soon"})


def test_a_name_without_meaning_is_noted() -> None:
    assert read_settings({"enable_client_http_server": "true"}).ignored == ("enable_client_http_server",)
    (without,) = read_settings({"ssd_offload_path": "/ssd"}).ignored
    assert "ssd_offload_path" in without
    assert read_settings({"ssd_offload_path": "", "enable_ssd_offload": False}).ignored == ()


@pytest.mark.parametrize(
    ("given", "is_on"),
    [(True, True), ("true", True), ("True", True), ("1", True), (1, True), ("on", True), (False, False)]
    + [("false", False), ("0", False), (0, False), ("no", False), ("", False), (None, False)],
)
def test_offload_is_switched_by_a_bool_or_its_text(given: object, is_on: bool) -> None:
    settings = read_settings({"enable_ssd_offload": given, "ssd_offload_path": "/ssd"})
    assert (settings.offload, settings.offload_path) == (is_on, "/ssd")


@pytest.mark.parametrize("bad", [{"enable_ssd_offload": "maybe"}, {"enable_ssd_offload": 2}, {"ssd_offload_path": 7}])
def test_an_invalid_offload_setting_is_refused_by_name(bad: dict[str, object]) -> None:
    with pytest.raises(BadSetting, match=next(iter(bad))):
        read_settings(bad)


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PATH_VARIABLE, SIZE_VARIABLE, BUCKETS_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_the_path_of_a_setting_comes_before_the_environments(
    no_variables: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    with pytest.raises(BadSetting, match=f"{PATH_VARIABLE}.*/data/file_storage does not exist"):
        offload_medium()
    monkeypatch.setenv(PATH_VARIABLE, str(one))
    assert offload_medium() == (f"dir={one}",)
    assert offload_medium(str(two)) == (f"dir={two}",)
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(BadSetting, match=f"{PATH_VARIABLE}: .*none does not exist"):
        offload_medium()


@pytest.mark.parametrize(
    ("total", "buckets", "size"),
    [
        (str(1 << 30), "", 1 << 30),
        (str(1 << 30), "0", 1 << 30),
        (str(1 << 30), str(1 << 29), 1 << 29),
        ("", "2 GB", 2 << 30),
        (str((1 << 30) + 1), "", 1 << 30),
    ],
)
def test_the_smaller_limit_of_the_environment_is_the_size_in_whole_pages(
    no_variables: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: str, buckets: str, size: int
) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, total)
    monkeypatch.setenv(BUCKETS_VARIABLE, buckets)
    assert offload_medium(str(tmp_path)) == (f"dir={tmp_path}", f"size={size}")


@pytest.mark.parametrize("bad", ["0", "-1", "much", str((64 << 20) - 1)])
def test_an_invalid_or_too_small_limit_is_refused_by_its_variable(
    no_variables: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, bad)
    with pytest.raises(BadSetting, match=SIZE_VARIABLE):
        offload_medium(str(tmp_path))


def test_a_place_has_a_free_port_and_advertises_it() -> None:
    one = find_place("localhost", 0)
    assert one.hostname == f"localhost:{one.port}" and one.port > 0
    assert one.listen == one.advertise == f"127.0.0.1:{one.port}"


@pytest.mark.parametrize(
    ("host", "masters", "alone"),
    [
        ("localhost", ("http://127.0.0.1:50051", "http://[::1]:50051"), False),
        ("localhost", ("etcd://localhost:2379/default",), False),
        ("localhost", ("http://127.0.0.1:50051", "http://10.0.0.1:50051"), True),
        ("127.0.0.1", ("etcd://10.0.0.1:2379,10.0.0.2:2379/default",), True),
        ("10.0.0.7", ("http://10.0.0.1:50051",), False),
    ],
)
def test_a_place_on_loopback_is_for_this_host_alone_when_a_master_is_elsewhere(host, masters, alone) -> None:
    place = Place(host, 4000, f"{host}:4000", "")
    assert is_for_this_host_alone(place, masters) == alone


def test_a_host_name_of_another_machine_is_advertised_and_all_interfaces_listen() -> None:
    place = find_place("192.0.2.7", 0)
    assert place.listen == f"0.0.0.0:{place.port}"
    assert place.advertise == f"192.0.2.7:{place.port}"


def test_a_node_is_named_for_its_place_within_the_limits_of_names() -> None:
    assert node_name("10.0.0.1:4000") == "10.0.0.1:4000"
    assert node_name("a/b c:1") == "a-b-c:1"
    assert node_name("node-0") == "node-0"
    long = node_name("x" * 200 + ":1")
    assert len(long) == 64 and long != node_name("x" * 200 + ":2")
