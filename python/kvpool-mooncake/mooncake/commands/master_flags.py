"""The flags of mooncake_master, and their translation to flags of kvmaster."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import struct

from mooncake._settings import after_etcd
from mooncake.commands.flags import CommandLine, Flag, UsageError
from mooncake.commands.logging_flags import logging_flags

# The ioctl request for the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915

_THREADS = "kvmaster sizes its threads by itself"
_SOFT_PINS = "a soft pin's time comes with its put, half an hour when the put says none"
_FILES = "no directory is shared by all nodes; --enable_offload of mooncake_client keeps blocks on a node's SSD"
_SSD_SIZE = "a node says how much of its SSD is used, and a full SSD drops the oldest copies that nobody uses"
_OFFLOAD = "blocks are always copied to the SSDs that nodes offer, ahead of eviction"
_FORCED = "eviction never waits for a copy: a block whose copy is late leaves memory without one"
_QUEUE = "kvmaster limits the bytes on their way to each SSD; the blocks behind them wait, and none is refused"
_PROMOTION = "a get of a block on SSD always brings it back to memory"
_TASKS = "4096 tasks run at once, none of them has a deadline, and the leader keeps the last 16384 that ended"
_REPLICAS = "kvmaster counts bytes, not requests: -- --hot-rate=1GiB turns further replicas of hot blocks on"
_TENANTS = "namespaces are always kept apart; `kvctl namespace` sets their quotas"
_EVENTS = "kvpool publishes no events of keys"
_LOGGED = "kvmaster always keeps a log and snapshots, in -- --data-dir=DIR or in etcd"
_FABRIC = "kvpool has no segments on NVMe over fabrics"
_CXL = "nodes contribute memory of the host; kvpool opens no CXL device"
_MEMORY = "kvmaster keeps no blocks; each kvstore-node takes its segment's memory at its start"
_METADATA = "kvpool leaves nothing at a metadata server"
_PODS = "clients find the leader by asking any master"

FLAGS = (
    Flag("rpc_port", "int32", 0, "Serve clients and nodes at this port; 0 for that of --port"),
    Flag("port", "int32", 50051, "The older name of --rpc_port"),
    Flag("rpc_address", "string", "0.0.0.0", "Serve clients and nodes at this address; needed with --enable_ha"),
    Flag("rpc_interface", "string", "", "Serve at this interface's IPv4 address, whatever --rpc_address says"),
    Flag("metrics_port", "int32", 9003, "Serve /metrics, /health and /get_all_segments at this port"),
    Flag("metrics_host", "string", "", "Serve them at this address; default --rpc_address"),
    Flag("eviction_high_watermark_ratio", "double", 0.95, "Never use more than this share of a segment"),
    Flag("eviction_ratio", "double", 0.05, "Keep this share free below the watermark"),
    Flag("default_kv_lease_ttl", "string", "5000", "Lease TTL of readers: ms, or 10s, 5m, 1h"),
    Flag("client_ttl", "int64", 600, "Drop the blocks of a node after this many seconds of silence"),
    Flag("client_live_ttl_sec", "int64", 600, "Name of --client_ttl in configuration files"),
    Flag("put_start_discard_timeout_sec", "uint64", 60, "The longest that an unfinished put holds its key"),
    Flag("enable_http_metadata_server", "bool", False, "Also serve /metadata"),
    Flag("http_metadata_server_host", "string", "0.0.0.0", "Serve /metadata at this address"),
    Flag("http_metadata_server_port", "int32", 8080, "Serve /metadata at this port"),
    Flag("enable_ha", "bool", False, "Keep the metadata in etcd, with standby masters (--etcd_endpoints)"),
    Flag("etcd_endpoints", "string", "", "etcd's servers, separated by semicolons or commas"),
    Flag("ha_backend_type", "string", "etcd", "What --enable_ha uses: etcd, there is no other here"),
    Flag("ha_backend_connstring", "string", "", "etcd's servers, before --etcd_endpoints"),
    Flag("cluster_id", "string", "default", "The pool's name in etcd"),
    Flag("config_path", "string", "", "Take the flags that are not given from this file, JSON or flat YAML"),
    Flag("rpc_thread_num", "int32", 0, "", _THREADS),
    Flag("max_threads", "int32", 16, "", _THREADS),
    Flag("rpc_conn_timeout_seconds", "int32", 0, "", "kvmaster keeps idle connections"),
    Flag("rpc_enable_tcp_no_delay", "bool", True, "", "kvmaster always sends at once"),
    Flag("enable_metric_reporting", "bool", True, "", "/metrics is always there, and no log line repeats it"),
    Flag("enable_gc", "bool", False, "", "kvmaster frees as it goes"),
    Flag("default_kv_soft_pin_ttl", "string", "1800000", "", _SOFT_PINS),
    Flag("max_kv_soft_pin_ttl", "string", "86400000", "", _SOFT_PINS),
    Flag("allow_evict_soft_pinned_objects", "bool", True, "", "soft-pinned blocks are evicted, after all others"),
    Flag("put_start_release_timeout_sec", "uint64", 600, "", "an unfinished put gives its room back with its key"),
    Flag("allocation_strategy", "string", "random", "", "kvmaster has one way to place blocks"),
    Flag("memory_allocator", "string", "offset", "", "kvmaster has one allocator"),
    Flag("use_mmap_arena_allocator", "bool", False, "", _MEMORY),
    Flag("mmap_arena_pool_size", "uint64", 8589934592, "", _MEMORY),
    Flag("enable_metadata_cleanup_on_timeout", "bool", False, "", _METADATA),
    Flag("pod_name", "string", "", "", _PODS),
    Flag("pod_namespace", "string", "", "", _PODS),
    Flag("root_fs_dir", "string", "", "", _FILES),
    Flag("global_file_segment_size", "int64", 9223372036854775807, "", _SSD_SIZE),
    Flag("enable_disk_eviction", "bool", True, "", _SSD_SIZE),
    Flag("quota_bytes", "uint64", 0, "", _SSD_SIZE),
    Flag("enable_offload", "bool", False, "", _OFFLOAD),
    Flag("offload_on_evict", "bool", False, "", _OFFLOAD),
    Flag("offload_force_evict", "bool", False, "", _FORCED),
    Flag("offload_cap_ratio", "double", 0.5, "", _QUEUE),
    Flag("offloading_queue_limit", "uint64", 50000, "", _QUEUE),
    Flag("promotion_on_hit", "bool", False, "", _PROMOTION),
    Flag("promotion_admission_threshold", "uint32", 2, "", _PROMOTION),
    Flag("promotion_max_per_heartbeat", "uint32", 1, "", _PROMOTION),
    Flag("promotion_queue_limit", "uint32", 50000, "", _PROMOTION),
    Flag("dynamic_replication_mode", "string", "off", "", _REPLICAS),
    Flag("dynamic_replication_admission_qps_threshold", "double", 0.8, "", _REPLICAS),
    Flag("dynamic_replication_heat_window_seconds", "uint32", 10, "", _REPLICAS),
    Flag("dynamic_replication_max_memory_replicas", "uint64", 2, "", _REPLICAS),
    Flag("enable_multi_tenants", "bool", False, "", _TENANTS),
    Flag("tenant_quota_connector_type", "string", "file", "", _TENANTS),
    Flag("tenant_quota_connector_uri", "string", "", "", _TENANTS),
    Flag("enable_kv_events", "bool", False, "", _EVENTS),
    Flag("kv_events_additional_salt", "string", "", "", _EVENTS),
    Flag("kv_events_backend_id", "string", "", "", _EVENTS),
    Flag("kv_events_bind_endpoint", "string", "", "", _EVENTS),
    Flag("kv_events_block_size", "uint32", 0, "", _EVENTS),
    Flag("kv_events_dp_rank", "uint32", 0, "", _EVENTS),
    Flag("kv_events_emit_legacy_compat", "bool", True, "", _EVENTS),
    Flag("kv_events_emit_object_key", "bool", True, "", _EVENTS),
    Flag("kv_events_lora_name", "string", "", "", _EVENTS),
    Flag("kv_events_model_name", "string", "", "", _EVENTS),
    Flag("kv_events_queue_capacity", "uint32", 65536, "", _EVENTS),
    Flag("kv_events_tenant_id", "string", "default", "", _EVENTS),
    Flag("enable_oplog", "bool", False, "", _LOGGED),
    Flag("oplog_batch_max_entries", "uint32", 1024, "", _LOGGED),
    Flag("oplog_poll_interval_ms", "int32", 1000, "", _LOGGED),
    Flag("batch_oplog_retry_timeout_sec", "uint32", 180, "", _LOGGED),
    Flag("enable_snapshot", "bool", False, "", _LOGGED),
    Flag("enable_snapshot_restore", "bool", False, "", _LOGGED),
    Flag("snapshot_backup_dir", "string", "", "", _LOGGED),
    Flag("snapshot_catalog_backend_connstring", "string", "", "", _LOGGED),
    Flag("snapshot_catalog_backend_type", "string", "", "", _LOGGED),
    Flag("snapshot_catalog_store_connstring", "string", "", "", _LOGGED),
    Flag("snapshot_catalog_store_type", "string", "", "", _LOGGED),
    Flag("snapshot_child_timeout_seconds", "uint64", 300, "", _LOGGED),
    Flag("snapshot_interval_seconds", "uint64", 600, "", _LOGGED),
    Flag("snapshot_object_store_type", "string", "", "", _LOGGED),
    Flag("snapshot_payload_backend_type", "string", "", "", _LOGGED),
    Flag("snapshot_payload_store_type", "string", "", "", _LOGGED),
    Flag("snapshot_retention_count", "uint32", 2, "", _LOGGED),
    Flag("max_retry_attempts", "uint32", 10, "", _TASKS),
    Flag("max_total_finished_tasks", "uint32", 10000, "", _TASKS),
    Flag("max_total_pending_tasks", "uint32", 10000, "", _TASKS),
    Flag("max_total_processing_tasks", "uint32", 10000, "", _TASKS),
    Flag("pending_task_timeout_sec", "uint64", 300, "", _TASKS),
    Flag("processing_task_timeout_sec", "uint64", 300, "", _TASKS),
    Flag("nof_eviction_high_watermark_ratio", "double", 0.9, "", _FABRIC),
    Flag("nof_eviction_ratio", "double", 0.05, "", _FABRIC),
    Flag("nof_heartbeat_failures_threshold", "uint32", 3, "", _FABRIC),
    Flag("nof_heartbeat_interval_sec", "int64", 10, "", _FABRIC),
    Flag("nof_heartbeat_probe_timeout_ms", "uint32", 1000, "", _FABRIC),
    Flag("enable_cxl", "bool", False, "", _CXL),
    Flag("cxl_path", "string", "/dev/dax0.0", "", _CXL),
    Flag("cxl_size", "uint64", 8589934592, "", _CXL),
    *logging_flags("kvmaster"),
)

_UNITS_MS = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
# kvmaster's own setting, in seconds: a node is suspect after this silence, which is several heartbeats.
_SUSPECT_AFTER = 3
# The longest lease and the longest silence, in ms: over a hundred years.
_LONGEST_MS = 1 << 42


def kvmaster_args(line: CommandLine) -> list[tuple[str, str]]:
    """Returns the arguments of kvmaster, each with the flags that it comes from. Raises UsageError."""
    rpc = "rpc_port" if line.number("rpc_port") != 0 else "port"
    host, come_from = rpc_host(line)
    told = [(f"--listen={bracketed(host)}:{line.port(rpc)}", f"--{come_from} --{rpc}")]
    for name in ("eviction_high_watermark_ratio", "eviction_ratio"):
        if name in line.given:
            told.append((f"--{name.replace('_', '-')}={line.text(name)}", f"--{name}"))
    if "default_kv_lease_ttl" in line.given:
        told.append((f"--lease-ttl={_milliseconds(line, 'default_kv_lease_ttl')}ms", "--default_kv_lease_ttl"))
    told += _silence(line)
    name = "put_start_discard_timeout_sec"
    if name in line.given and not line.passes_on("--max-grant-ttl"):
        told.append((f"--max-grant-ttl={_seconds(line, name)}s", f"--{name}"))
    if line.is_on("enable_ha"):
        servers, come_from = _etcd(line)
        told.append((f"--etcd={servers}", f"--enable_ha --{come_from}"))
        is_told = "KVMASTER_ADVERTISE" in os.environ or line.passes_on("--advertise")
        if _is_every_interface(host) and not is_told:
            raise UsageError(
                f"--enable_ha needs --rpc_address: {host} tells others no address to call this master at "
                "(or -- --advertise=HOST beside it)"
            )
        if "cluster_id" in line.given:
            told.append((f"--cluster={line.text('cluster_id')}", "--cluster_id"))
    return told


def without_effect(line: CommandLine) -> list[tuple[str, str]]:
    """Returns the given flags that need another flag which was not given, each with the reason."""
    idle: list[tuple[str, str]] = []

    def unless(is_needed: bool, names: tuple[str, ...], why: str) -> None:
        idle.extend((name, why) for name in names if name in line.given and not is_needed)

    ha = line.is_on("enable_ha")
    of_ha = ("etcd_endpoints", "ha_backend_type", "ha_backend_connstring", "cluster_id")
    unless(ha, of_ha, "it counts with --enable_ha")
    served = line.is_on("enable_http_metadata_server")
    of_metadata = ("http_metadata_server_host", "http_metadata_server_port")
    unless(served, of_metadata, "it counts with --enable_http_metadata_server")
    unless(line.number("rpc_port") == 0, ("port",), "--rpc_port counts before it")
    unless(not line.text("rpc_interface"), ("rpc_address",), "--rpc_interface counts before it")
    unless("client_ttl" not in line.given, ("client_live_ttl_sec",), "--client_ttl counts before it")
    if ha and line.text("ha_backend_connstring"):
        unless(False, ("etcd_endpoints",), "--ha_backend_connstring counts before it")
    return idle


def rpc_host(line: CommandLine) -> tuple[str, str]:
    """Returns the address that serves clients and nodes, and the flag that sets it. Raises UsageError."""
    name = line.text("rpc_interface")
    if not name:
        return line.text("rpc_address"), "rpc_address"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            request = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(asked, _SIOCGIFADDR, request)
        except OSError as error:
            raise UsageError(f"--rpc_interface={name}: it has no IPv4 address ({error.strerror})") from error
    return socket.inet_ntoa(answer[20:24]), "rpc_interface"


def metrics_host(line: CommandLine) -> str:
    """Returns the address that serves /metrics. Raises UsageError."""
    return line.text("metrics_host") or rpc_host(line)[0]


def bracketed(host: str) -> str:
    """Returns a host in the form that precedes a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _silence(line: CommandLine) -> list[tuple[str, str]]:
    given = [name for name in ("client_ttl", "client_live_ttl_sec") if name in line.given]
    if not given or line.passes_on("--drop-after"):
        return []
    seconds = _seconds(line, given[0])
    told = [(f"--drop-after={seconds}s", f"--{given[0]}")]
    if seconds < _SUSPECT_AFTER and not line.passes_on("--suspect-after"):
        told.append((f"--suspect-after={seconds}s", f"--{given[0]}"))
    return told


def _seconds(line: CommandLine, name: str) -> int:
    seconds = line.number(name)
    if not 1 <= seconds <= _LONGEST_MS // 1000:
        raise UsageError(f"--{name}={seconds} is not a number of seconds from 1 to {_LONGEST_MS // 1000}")
    return seconds


def _milliseconds(line: CommandLine, name: str) -> int:
    text = line.text(name)
    match = re.fullmatch(r"([0-9]+)(ms|s|m|h|)", text.strip())
    if match is None:
        raise UsageError(f"--{name}={text} is no time: write milliseconds, or 500ms, 10s, 5m, 1h")
    found = int(match[1]) * _UNITS_MS[match[2]]
    if not 1 <= found <= _LONGEST_MS:
        raise UsageError(f"--{name}={text} is not between 1ms and {_LONGEST_MS}ms")
    return found


def _etcd(line: CommandLine) -> tuple[str, str]:
    kind = line.text("ha_backend_type")
    if kind != "etcd":
        # Two masters without a common store would be two pools.
        raise UsageError(f"--ha_backend_type={kind}: with --enable_ha kvmaster keeps its metadata in etcd only")
    name = "ha_backend_connstring" if line.text("ha_backend_connstring") else "etcd_endpoints"
    text = line.text(name)
    behind = after_etcd(text)
    servers = (text if behind is None else behind).replace(",", ";").split(";")
    urls = [each if "://" in each else f"http://{each}" for each in map(str.strip, servers) if each]
    if not urls:
        raise UsageError("--enable_ha needs --etcd_endpoints")
    return ",".join(urls), name


def _is_every_interface(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    return False
