"""mooncake_master: kvmaster, started with the original's flags.

kvmaster runs as a child. This process answers what the original answers at its metrics port, from kvmaster's
own HTTP port: /metrics, /health, /get_all_segments; and /metadata at a port of its own when it is asked to.
What follows `--` goes to kvmaster as it is, for instance `-- --data-dir=/var/lib/kvmaster`.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

from mooncake.commands import flags
from mooncake.commands.flags import CommandLine, Flag, UsageError
from mooncake.commands.metadata import Metadata
from mooncake.commands.programs import Child, NotFound, find
from mooncake.commands.web import Answer, Request, Routes, Server, text

_ASK_TIMEOUT = 5.0

_THREADS = "kvmaster sizes its threads by itself"
_LEASES = "kvmaster knows one kind of lease"
_NODES = "kvmaster keeps a silent node's blocks and avoids it (--suspect-after, --drop-after)"
_GRANTS = "a put's own timeout bounds it (--max-grant-ttl)"
_DISK = "kvmaster keeps no blocks"
_LOG = "kvmaster logs to stderr; RUST_LOG sets how much"

FLAGS = (
    Flag("rpc_port", 50051, "Serve clients and nodes at this port"),
    Flag("port", 50051, "The older name of --rpc_port"),
    Flag("rpc_address", "0.0.0.0", "Serve clients and nodes at this address; needed with --enable_ha"),
    Flag("metrics_port", 9003, "Serve /metrics, /health and /get_all_segments at this port"),
    Flag("eviction_high_watermark_ratio", 0.95, "Never use more than this share of a segment"),
    Flag("eviction_ratio", 0.05, "Evict down to the watermark less this share"),
    Flag("default_kv_lease_ttl", 5000, "Protect what a reader was told for so long, in ms"),
    Flag("enable_http_metadata_server", False, "Serve /metadata too"),
    Flag("http_metadata_server_host", "0.0.0.0", "Serve /metadata at this address"),
    Flag("http_metadata_server_port", 8080, "Serve /metadata at this port"),
    Flag("enable_ha", False, "Keep the metadata in etcd, with standby masters (--etcd_endpoints)"),
    Flag("etcd_endpoints", "", "etcd's servers, separated by semicolons or commas"),
    Flag("cluster_id", "", "The pool's name in etcd"),
    Flag("rpc_thread_num", 0, "", _THREADS),
    Flag("max_threads", 0, "", _THREADS),
    Flag("rpc_conn_timeout_seconds", 0, "", "kvmaster keeps idle connections"),
    Flag("rpc_enable_tcp_no_delay", True, "", "kvmaster always sends at once"),
    Flag("rpc_interface", "", "", "give an address by --rpc_address"),
    Flag("enable_metric_reporting", True, "", "/metrics is always there"),
    Flag("enable_gc", False, "", "kvmaster frees as it goes"),
    Flag("default_kv_soft_pin_ttl", 0, "", _LEASES),
    Flag("allow_evict_soft_pinned_objects", True, "", _LEASES),
    Flag("client_ttl", 0, "", _NODES),
    Flag("client_live_ttl_sec", 0, "", _NODES),
    Flag("put_start_discard_timeout_sec", 0, "", _GRANTS),
    Flag("put_start_release_timeout_sec", 0, "", _GRANTS),
    Flag("root_fs_dir", "", "", _DISK),
    Flag("global_file_segment_size", "", "", _DISK),
    Flag("enable_offload", False, "", _DISK),
    Flag("memory_allocator", "", "", "kvmaster has one allocator"),
    Flag("allocation_strategy", "", "", "kvmaster has one way to place blocks"),
    Flag("logtostderr", True, "", _LOG),
    Flag("alsologtostderr", True, "", _LOG),
    Flag("minloglevel", 0, "", _LOG),
    Flag("log_dir", "", "", _LOG),
    Flag("v", 0, "", _LOG),
)


def kvmaster_args(line: CommandLine) -> list[tuple[str, str]]:
    """What kvmaster is told, each with the flags that it comes from. Raises UsageError."""
    rpc = "port" if "port" in line.given and "rpc_port" not in line.given else "rpc_port"
    host = line.text("rpc_address")
    told = [(f"--listen={_bracketed(host)}:{line.port(rpc)}", f"--rpc_address --{rpc}")]
    for name in ("eviction_high_watermark_ratio", "eviction_ratio"):
        if name in line.given:
            told.append((f"--{name.replace('_', '-')}={line.text(name)}", f"--{name}"))
    if "default_kv_lease_ttl" in line.given:
        told.append((f"--lease-ttl={line.number('default_kv_lease_ttl')}ms", "--default_kv_lease_ttl"))
    if line.is_on("enable_ha"):
        told.append((f"--etcd={_etcd(line)}", "--enable_ha --etcd_endpoints"))
        is_told = "KVMASTER_ADVERTISE" in os.environ or line.passes_on("--advertise")
        if _is_every_interface(host) and not is_told:
            raise UsageError(
                f"--enable_ha needs --rpc_address: {host} tells others no address to call this master at "
                "(or -- --advertise=HOST beside it)"
            )
        if "cluster_id" in line.given:
            told.append((f"--cluster={line.text('cluster_id')}", "--cluster_id"))
    elif line.given & {"etcd_endpoints", "cluster_id"}:
        raise UsageError("--etcd_endpoints and --cluster_id mean nothing without --enable_ha")
    return told


def _etcd(line: CommandLine) -> str:
    servers = line.text("etcd_endpoints").removeprefix("etcd://").replace(",", ";").split(";")
    urls = [each if "://" in each else f"http://{each}" for each in map(str.strip, servers) if each]
    if not urls:
        raise UsageError("--enable_ha needs --etcd_endpoints")
    return ",".join(urls)


def _is_every_interface(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class Backend:
    """kvmaster's own HTTP port. It is known once kvmaster has written its ready file."""

    def __init__(self, ready_file: Path):
        self._ready_file = ready_file

    def ask(self, path: str) -> tuple[int, bytes]:
        """What it answers. Raises OSError while it is not there, or does not answer in time."""
        try:
            address = json.loads(self._ready_file.read_text())["http"]
        except (FileNotFoundError, ValueError) as error:
            raise OSError("kvmaster is starting") from error
        connection = http.client.HTTPConnection(address, timeout=_ASK_TIMEOUT)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()

    def routes(self) -> Routes:
        """What the original answers at its metrics port."""
        return {
            ("GET", "/metrics"): self._metrics,
            ("GET", "/health"): self._health,
            ("GET", "/get_all_segments"): self._segments,
        }

    def _metrics(self, _request: Request) -> Answer:
        try:
            status, body = self.ask("/metrics")
        except OSError as error:
            return text(503, f"{error}\n")
        return Answer(status, body, "text/plain; version=0.0.4")

    def _health(self, _request: Request) -> Answer:
        try:
            status, body = self.ask("/healthz")
        except OSError as error:
            return text(503, f"{error}\n")
        return text(200, "OK\n") if status == 200 else Answer(503, body)

    def _segments(self, _request: Request) -> Answer:
        """One line a segment: where its node serves it. Empty until there is one."""
        try:
            status, body = self.ask("/api/v1/nodes")
        except OSError as error:
            return text(503, f"{error}\n")
        if status != 200:
            # A standby knows no nodes.
            return Answer(503, body)
        nodes = [node for node in json.loads(body) if node["state"] == "live"]
        lines = [f"{node['data_address']}\n" for node in nodes for _ in node["segments"]]
        return Answer(200, "".join(lines).encode(), "text/plain; version=0.0.4")


def serve(line: CommandLine, log: logging.Logger) -> int:
    """Runs kvmaster until it ends; its exit code."""
    told = kvmaster_args(line)
    metrics_host = line.text("rpc_address")
    ports = [("metrics", metrics_host, line.port("metrics_port"))]
    if line.is_on("enable_http_metadata_server"):
        host = line.text("http_metadata_server_host")
        ports.append(("metadata", host, line.port("http_metadata_server_port")))
    try:
        program = find("kvmaster")
    except NotFound as error:
        log.error("%s", error)
        return 1
    with tempfile.TemporaryDirectory(prefix="mooncake-master-") as scratch:
        ready_file = Path(scratch) / "ready.json"
        servers: list[Server] = []
        for what, host, port in ports:
            routes = Backend(ready_file).routes() if what == "metrics" else Metadata().routes()
            try:
                servers.append(Server(host, port, routes))
            except OSError as error:
                log.error("--%s: %s:%d: %s", _port_flag(what), host, port, error)
                return 1
            log.info("--%s: http://%s:%d", _port_flag(what), host, servers[-1].port)
        for arg, come_from in told:
            log.info("%s: kvmaster %s", come_from, arg)
        if line.rest:
            log.info("kvmaster %s", " ".join(line.rest))
        own = ["--http-listen=127.0.0.1:0", f"--ready-file={ready_file}"]
        child = Child(program, [*own, *(arg for arg, _ in told), *line.rest])
        # Only now: a process with threads is not to be forked.
        for server in servers:
            server.start()
        code = child.wait()
        for server in servers:
            server.stop()
    log.info("kvmaster has ended with %d", code)
    return code


def _port_flag(what: str) -> str:
    return "metrics_port" if what == "metrics" else "http_metadata_server_port"


def main() -> None:
    """The command."""
    sys.exit(flags.run("mooncake_master", __doc__ or "", FLAGS, serve))


if __name__ == "__main__":
    main()
