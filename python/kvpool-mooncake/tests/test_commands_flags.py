"""The parsing of the commands' flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake.commands import bench, client, flags, http_metadata_server, master
from mooncake.commands.flags import Flag, UsageError, parse

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[2] / "docs/operations/mooncake.md"
COMMANDS = {
    "master": master.FLAGS,
    "client": client.FLAGS,
    "http_metadata_server": http_metadata_server.FLAGS,
    "bench": bench.FLAGS,
}
TITLES = {"bench": "transfer_engine_bench"}
# The flags for which kvpool's own default holds, as the document says.
OTHER_DEFAULTS = {
    ("master", "client_ttl"),
    ("master", "cluster_id"),
    ("master", "default_kv_lease_ttl"),
    ("master", "eviction_high_watermark_ratio"),
    ("master", "metrics_host"),
    ("master", "put_start_discard_timeout_sec"),
    ("bench", "device_name"),
    ("bench", "local_server_name"),
    ("bench", "metadata_server"),
    ("bench", "segment_id"),
}
HA = ("--enable_ha", "--etcd_endpoints=a:1", "--rpc_address=10.0.0.1")
# For each flag with an effect: an example value, and the flags beside which it has its effect.
EXAMPLES = {
    "master": {
        "client_ttl": ("30",),
        "cluster_id": ("blue", *HA),
        "config_path": (None,),
        "default_kv_lease_ttl": ("10s",),
        "enable_ha": ("true", *HA[1:]),
        "enable_http_metadata_server": ("true",),
        "etcd_endpoints": ("b:1", "--enable_ha", "--rpc_address=10.0.0.1", "--ha_backend_connstring="),
        "eviction_high_watermark_ratio": ("0.9",),
        "eviction_ratio": ("0.1",),
        "ha_backend_connstring": ("b:1", *HA),
        "ha_backend_type": ("redis", *HA),
        "http_metadata_server_host": ("127.0.0.1", "--enable_http_metadata_server"),
        "http_metadata_server_port": ("7", "--enable_http_metadata_server"),
        "metrics_host": ("127.0.0.1",),
        "metrics_port": ("7",),
        "port": ("7",),
        "put_start_discard_timeout_sec": ("30",),
        "rpc_address": ("127.0.0.1",),
        "rpc_interface": ("lo",),
        "rpc_port": ("7",),
    },
    "client": {
        "device_names": ("mlx5_0", "--protocol=rdma"),
        "enable_offload": ("true",),
        "enable_http_server": ("true",),
        "global_segment_size": ("1 GB",),
        "host": ("127.0.0.1",),
        "http_port": ("7", "--enable_http_server"),
        "master_server_address": ("m:1",),
        "port": ("7",),
        "protocol": ("rdma",),
        "tenant_id": ("team",),
    },
    "http_metadata_server": {"host": ("127.0.0.1",), "port": ("7",), "log_level": ("DEBUG",)},
    "bench": {
        "batch_size": ("7",),
        "block_size": ("7",),
        "buffer_size": ("7",),
        "device_name": ("mlx5_0",),
        "duration": ("7",),
        "init_mem": ("false",),
        "local_server_name": ("10.0.0.1",),
        "mode": ("target",),
        "operation": ("write",),
        "protocol": ("tcp",),
        "report_precision": ("7",),
        "report_unit": ("Gb",),
        "segment_id": ("10.0.0.1:7",),
        "threads": ("7",),
    },
}


def of_the_original(command: str) -> dict[str, tuple[str, object]]:
    """Returns the flags of 0.3.13: their kinds and defaults by name."""
    lines = (HERE / f"flags-0.3.13-{command}.txt").read_text().splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return {name: (kind, json.loads(default)) for name, kind, default in rows}


def ours(command: str) -> dict[str, Flag]:
    return {flag.name: flag for flag in COMMANDS[command]}


def comes_to(command: str, args: list[str]) -> object:
    """Returns the effect of a command line on a command."""
    line = parse(COMMANDS[command], args)
    try:
        if command == "master":
            return master.kvmaster_args(line), master.http_ports(line)
        if command == "client":
            return client.node_args(line), line.text("tenant_id")
        return dict(line.values)
    except UsageError as error:
        return str(error)


EVERY_FLAG = [(command, name) for command in COMMANDS for name in of_the_original(command)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_the_original_is_taken_with_its_kind_and_default(command) -> None:
    theirs = of_the_original(command)
    assert not theirs.keys() - ours(command).keys()
    for name, (kind, default) in theirs.items():
        flag = ours(command)[name]
        assert flag.kind == kind, name
        differs = flag.default != pytest.approx(default) if kind == "double" else flag.default != default
        assert differs == ((command, name) in OTHER_DEFAULTS), (name, flag.default, default)


@pytest.mark.parametrize(("command", "name"), EVERY_FLAG)
def test_every_flag_of_the_original_does_its_work_or_is_named_as_without_effect(
    command, name, caplog, tmp_path
) -> None:
    flag, (_, default) = ours(command)[name], of_the_original(command)[name]
    if flag.ignored:
        value = json.dumps(default).strip('"')
        ran = flags.run(command, "", COMMANDS[command], lambda _line, _log: 7, [f"--{name}={value}"])
        assert ran == 7
        assert f"--{name} has no effect: {flag.ignored}" in caplog.text
        return
    value, *beside = EXAMPLES[command][name]
    if name == "config_path":
        (tmp_path / "flags.json").write_text('{"rpc_port": 7}')
        value = str(tmp_path / "flags.json")
    assert comes_to(command, [*beside, f"--{name}={value}"]) != comes_to(command, beside)


@pytest.mark.parametrize(("command", "name"), EVERY_FLAG)
def test_every_flag_of_the_original_is_in_the_document(command, name) -> None:
    title = f"## Flags of `{TITLES.get(command, f'mooncake_{command}')}`"
    chapter = DOCUMENT.read_text().partition(f"{title}\n")[2].partition("\n## ")[0].partition("\n# ")[0]
    does, _, idle = chapter.partition("Without effect")
    flag = ours(command)[name]
    assert f"`{name}`" in (idle if flag.ignored else does)
    if flag.ignored:
        assert flag.ignored in idle


def test_a_flag_that_needs_another_flag_is_named_without_it(caplog) -> None:
    idle = ["etcd_endpoints", "cluster_id", "ha_backend_type", "http_metadata_server_port", "port"]
    values = ["a:1", "blue", "redis", "7", "8"]
    args = [f"--{name}={value}" for name, value in zip(idle, values)]
    line = parse(master.FLAGS, [*args, "--rpc_port=9"])
    assert [name for name, _ in master.without_effect(line)] == [
        "etcd_endpoints",
        "ha_backend_type",
        "cluster_id",
        "http_metadata_server_port",
        "port",
    ]
    assert master.kvmaster_args(line)[0][0] == "--listen=0.0.0.0:9"
    assert master.without_effect(parse(master.FLAGS, [*HA, "--port=7"])) == []


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--eviction_ration=1", "eviction_ratio"),
        ("--metric_port=1", "metrics_port"),
        ("--noenable_haa", "enable_ha"),
        ("--zzz", None),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_one(given, meant) -> None:
    with pytest.raises(UsageError) as refused:
        parse(master.FLAGS, [given])
    assert ("is --" in str(refused.value)) == (meant is not None)
    assert meant is None or f"--{meant}" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "lease"),
    [("10000", "10000ms"), ("500ms", "500ms"), ("10s", "10000ms"), ("5m", "300000ms"), ("1h", "3600000ms")],
)
def test_a_lease_is_given_in_milliseconds_or_with_a_unit(text, lease) -> None:
    assert told(f"--default_kv_lease_ttl={text}")[1:] == [f"--lease-ttl={lease}"]


def test_a_silent_nodes_blocks_are_dropped_after_the_time_that_is_given() -> None:
    assert told("--client_ttl=30")[1:] == ["--drop-after=30s"]
    assert told("--client_ttl=2")[1:] == ["--drop-after=2s", "--suspect-after=2s"]
    assert told("--client_ttl=30", "--", "--drop-after=1h")[1:] == []


def test_flags_come_from_files_and_the_environment_as_in_gflags(tmp_path, monkeypatch) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    inner.write_text("# a remark\n-eviction_ratio=0.1\n\n--enable_ha=false\nkvother\n--port=9\nmooncake_*\n--port=8\n")
    outer.write_text(f"--flagfile={inner}\n--metrics_port=7\n")
    line = parse(master.FLAGS, ["--port=1", f"--flagfile={outer}"], "mooncake_master")
    assert (line.number("port"), line.number("metrics_port")) == (8, 7)
    assert line.values["eviction_ratio"] == 0.1
    outer.write_text(f"--flagfile={outer}\n")
    with pytest.raises(UsageError, match="flagfile"):
        parse(master.FLAGS, [f"--flagfile={outer}"])
    with pytest.raises(UsageError, match="flagfile"):
        parse(master.FLAGS, ["--flagfile", str(tmp_path / "none")])
    monkeypatch.setenv("FLAGS_metrics_port", "0x2b")
    line = parse(master.FLAGS, ["--fromenv=metrics_port", "--tryfromenv", "port,rpc_port"])
    assert line.number("metrics_port") == 43
    with pytest.raises(UsageError, match="FLAGS_port"):
        parse(master.FLAGS, ["--fromenv=port"])
    assert parse(master.FLAGS, ["--new_flag=7", "--undefok=new_flag"]).unknown == ("new_flag",)


def test_a_configuration_file_gives_the_flags_that_the_line_does_not(tmp_path) -> None:
    yaml = tmp_path / "master.yaml"
    yaml.write_text(
        "---\n# a remark\nrpc_port: 50053   # another\nrpc_address: \"127.0.0.1\"\n"
        "metrics_host: '::1'\netcd_endpoints:\nroot_fs_dir: \"\"\nenable_ha: false\n"
        "default_kv_lease_ttl: 10000\nclient_live_ttl_sec: 60\nnot_a_flag: 1\neviction_ratio: 0.1\n"
    )
    line = parse(master.FLAGS, ["--eviction_ratio=0.2", f"--config_path={yaml}"])
    assert [arg for arg, _ in master.kvmaster_args(line)] == [
        "--listen=127.0.0.1:50053",
        "--eviction-ratio=0.2",
        "--lease-ttl=10000ms",
        "--drop-after=60s",
    ]
    assert master.http_ports(line)[0][1] == "::1" and line.unknown == ("not_a_flag",)
    json_file = tmp_path / "master.json"
    json_file.write_text('{"rpc_port": 7, "enable_http_metadata_server": true, "cluster_id": "x"}')
    line = parse(master.FLAGS, [f"--config_path={json_file}"])
    assert line.number("rpc_port") == 7 and line.is_on("enable_http_metadata_server")
    for wrong in ("a: [1]", "a:\n  b: 1", "- a", "rpc_port: x", 'a: "b', "rpc_port:7"):
        yaml.write_text(wrong)
        with pytest.raises(UsageError, match="config_path|rpc_port"):
            parse(master.FLAGS, [f"--config_path={yaml}"])
    with pytest.raises(UsageError, match="config_path"):
        parse(master.FLAGS, [f"--config_path={tmp_path / 'none'}"])


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


def test_given_flags_reach_kvmaster_and_other_flags_have_its_defaults() -> None:
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
    ha[1] = "--etcd_endpoints=ETCD://a:2379;b:2379"
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
        ((*HA, "--ha_backend_type=k8s"), "ha_backend_type"),
        (("--rpc_interface=no-such-interface",), "rpc_interface"),
        (("--default_kv_lease_ttl=soon",), "default_kv_lease_ttl"),
        (("--client_ttl=0",), "client_ttl"),
        (("--put_start_discard_timeout_sec=0",), "put_start_discard_timeout_sec"),
        (("--quota_bytes=-1",), "quota_bytes"),
        (("--rpc_thread_num=4294967296",), "rpc_thread_num"),
        (("--rpc_thread_num=1_000",), "rpc_thread_num"),
        (("stray",), "stray"),
        (("--",), ""),
    ],
)
def test_an_invalid_command_line_names_the_flag(args, name) -> None:
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


def test_a_node_gets_its_addresses_and_its_master() -> None:
    args = node_told("--host=10.0.0.7", "--global_segment_size", "1 GB", "--master_server_address=m:1")
    assert args[:4] == [
        "--listen=10.0.0.7:50052",
        "--advertise=10.0.0.7",
        f"--segment={1 << 30}",
        "--master=http://m:1",
    ]
    assert "--no-rdma" in args
    # Clients connect to a host name. Without one, they connect to this host's address on the way to the master.
    assert node_told("--host=node7.example")[:2] == ["--listen=0.0.0.0:50052", "--advertise=node7.example"]
    assert node_told()[:2] == ["--listen=0.0.0.0:50052", "--advertise=127.0.0.1"]
    assert node_told("--host=127.0.0.1")[0] == "--listen=127.0.0.1:50052"
    rdma = "--protocol=rdma", "--device_names=mlx5_0,mlx5_1"
    etcd = node_told("--master_server_address=etcd://a:1;b:2", *rdma)
    assert "--master=etcd://a:1,b:2/default" in etcd
    assert "--master=etcd://a:1/blue" in node_told("--master_server_address=ETCD://a:1/blue")
    assert {"--rdma-device=mlx5_0", "--rdma-device=mlx5_1"} <= set(etcd)
    for wrong in ("--global_segment_size=much", "--protocol=pigeon", "--port=99999"):
        with pytest.raises(UsageError, match=wrong[2:].partition("=")[0]):
            node_told(wrong)


def test_offload_is_a_medium_in_the_directory_of_the_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", str(tmp_path))
    monkeypatch.delenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", raising=False)
    assert f"--ssd=dir={tmp_path}" in node_told("--enable_offload")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(1 << 30))
    assert f"--ssd=dir={tmp_path},size={1 << 30}" in node_told("--enable_offload=true")
    # An argument for kvstore-node itself has priority.
    own = node_told("--enable_offload", "--", "--ssd=path=/dev/nvme0n1p1")
    for args in (own, node_told(), node_told("--noenable_offload")):
        assert not any(arg.startswith("--ssd") for arg in args)
    for directory in (tmp_path / "none", tmp_path / "a,b"):
        monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", str(directory))
        (tmp_path / "a,b").mkdir(exist_ok=True)
        with pytest.raises(UsageError, match="enable_offload"):
            node_told("--enable_offload")
