"""How the commands read their flags."""

from __future__ import annotations

import pytest

from mooncake.commands import client, master
from mooncake.commands.flags import UsageError, parse


def told(*args: str) -> list[str]:
    return [arg for arg, _ in master.kvmaster_args(parse(master.FLAGS, args))]


def node_told(*args: str) -> list[str]:
    return [arg for arg, _ in client.node_args(parse(client.FLAGS, args))]


@pytest.mark.parametrize(
    "args",
    [
        ("-rpc_port", "7"),
        ("--rpc_port", "7"),
        ("-rpc_port=7",),
        ("--rpc_port=7",),
        ("--rpc-port=7",),
        ("--port=7",),
    ],
)
def test_a_value_can_be_given_in_every_documented_form(args) -> None:
    assert told(*args) == ["--listen=0.0.0.0:7"]


@pytest.mark.parametrize(
    ("args", "is_on"),
    [
        ((), False),
        (("--enable_http_metadata_server",), True),
        (("-enable_http_metadata_server=true",), True),
        (("--enable_http_metadata_server=1",), True),
        (("--enable_http_metadata_server", "true"), True),
        (("--enable_http_metadata_server", "false"), False),
        (("--enable_http_metadata_server=false",), False),
        (("--noenable_http_metadata_server",), False),
        (("--enable_http_metadata_server", "-rpc_port", "7"), True),
    ],
)
def test_a_bool_can_be_given_in_every_documented_form(args, is_on) -> None:
    assert parse(master.FLAGS, args).is_on("enable_http_metadata_server") == is_on


def test_what_is_given_reaches_kvmaster_and_defaults_are_its_own() -> None:
    assert told() == ["--listen=0.0.0.0:50051"]
    assert told(
        "--rpc_address=10.0.0.1",
        "-eviction_high_watermark_ratio=0.9",
        "-eviction_ratio",
        "0.1",
        "-default_kv_lease_ttl=10000",
    ) == [
        "--listen=10.0.0.1:50051",
        "--eviction-high-watermark-ratio=0.9",
        "--eviction-ratio=0.1",
        "--lease-ttl=10000ms",
    ]
    ha = ["--enable_ha", "--etcd_endpoints=a:2379;b:2379", "--cluster_id=blue"]
    etcd = ["--etcd=http://a:2379,http://b:2379", "--cluster=blue"]
    assert told(*ha, "--rpc_address=10.0.0.1", "--", "--x=y") == ["--listen=10.0.0.1:50051", *etcd]
    assert told(*ha, "--", "--advertise=10.0.0.1") == ["--listen=0.0.0.0:50051", *etcd]


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (("--no_such_flag=1",), "no_such_flag"),
        (("-rpc_port",), "rpc_port"),
        (("-rpc_port=x",), "rpc_port"),
        (("-rpc_port=70000",), "rpc_port"),
        (("-eviction_ratio=much",), "eviction_ratio"),
        (("--enable_ha=maybe",), "enable_ha"),
        (("--enable_ha",), "etcd_endpoints"),
        (("--enable_ha", "--etcd_endpoints=a:1"), "rpc_address"),
        (("--enable_ha", "--etcd_endpoints=a:1", "--rpc_address=::"), "rpc_address"),
        (("--etcd_endpoints=a:1",), "enable_ha"),
        (("stray",), "stray"),
        (("--",), ""),
    ],
)
def test_what_is_wrong_names_the_flag(args, name) -> None:
    if not name:
        assert told(*args) == ["--listen=0.0.0.0:50051"]
        return
    with pytest.raises(UsageError, match=name):
        told(*args)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4 GB", 4 << 30),
        ("4GB", 4 << 30),
        ("16MB", 16 << 20),
        ("1.5g", 3 << 29),
        ("512MiB", 512 << 20),
        ("7", 7),
    ],
)
def test_sizes_are_read_as_the_original_reads_them(text, size) -> None:
    assert client.size(text) == size


def test_a_node_is_told_where_it_is_and_whom_it_serves() -> None:
    args = node_told("--host=10.0.0.7", "--global_segment_size", "1 GB", "--master_server_address=m:1")
    assert args[:4] == [
        "--listen=10.0.0.7:50052",
        "--advertise=10.0.0.7",
        f"--segment={1 << 30}",
        "--master=http://m:1",
    ]
    assert "--no-rdma" in args
    # A name is what others connect to; with no name at all it is the address on the way to the master.
    assert node_told("--host=node7.example")[:2] == ["--listen=0.0.0.0:50052", "--advertise=node7.example"]
    assert node_told()[:2] == ["--listen=0.0.0.0:50052", "--advertise=127.0.0.1"]
    assert node_told("--host=127.0.0.1")[0] == "--listen=127.0.0.1:50052"
    rdma = "--protocol=rdma", "--device_names=mlx5_0,mlx5_1"
    etcd = node_told("--master_server_address=etcd://a:1;b:2", *rdma)
    assert "--master=etcd://a:1,b:2/default" in etcd
    assert {"--rdma-device=mlx5_0", "--rdma-device=mlx5_1"} <= set(etcd)
    for wrong in ("--global_segment_size=much", "--protocol=pigeon", "--port=99999"):
        with pytest.raises(UsageError, match=wrong[2:].partition("=")[0]):
            node_told(wrong)
