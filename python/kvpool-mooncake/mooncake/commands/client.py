"""mooncake_client: kvstore-node, started with the original's flags.

The process becomes kvstore-node by exec. Arguments after `--` go to kvstore-node unchanged, for example
`-- --shm-path=/run/kvpool.sock`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import socket
import sys

from mooncake._clients import announce_client
from mooncake._offload import offload_medium
from mooncake._settings import BadSetting, after_etcd
from mooncake.commands import flags
from mooncake.commands.flags import CommandLine, Flag, UsageError
from mooncake.commands.logging_flags import logging_flags
from mooncake.commands.programs import NotFound, find

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

_LOADED = "blocks on SSD are served from memory, at the port of all blocks"
_ARENA = "kvstore-node takes its segment's memory at its start"

FLAGS = (
    Flag("host", "string", "0.0.0.0", "This host's name or address, as others reach it"),
    Flag("port", "int32", 50052, "Serve blocks at this port"),
    Flag("global_segment_size", "string", "4 GB", "Contribute so much memory (units of 1024)"),
    Flag("master_server_address", "string", "127.0.0.1:50051", "The master: host:port, or etcd://host:port;host:port"),
    Flag("protocol", "string", "tcp", "tcp, or rdma to serve over RDMA too where there is a device"),
    Flag("device_names", "string", "", "Serve over these RDMA devices, separated by commas"),
    Flag("device_name", "string", "", "The same by another name"),
    Flag("tenant_id", "string", "default", "The namespace of a store that joins by this client (setup_dummy)"),
    Flag("enable_http_server", "bool", False, "Serve /health and /metrics"),
    Flag("http_port", "int32", 9300, "Serve them at this port"),
    Flag("enable_offload", "bool", False, "Keep blocks that leave memory on SSD (see `setup` for the directory)"),
    Flag("metadata_server", "string", "http://127.0.0.1:8080/metadata", "", "kvpool asks no metadata server"),
    Flag("local_buffer_size", "string", "0", "", "kvstore-node needs no buffer"),
    Flag("threads", "int32", 1, "", "kvstore-node sizes its threads by itself"),
    Flag("start_offload_rpc_server", "bool", True, "", _LOADED),
    Flag("use_mmap_arena_allocator", "bool", False, "", _ARENA),
    Flag("mmap_arena_pool_size", "uint64", 8589934592, "", _ARENA),
    *logging_flags("kvstore-node"),
)


def size(text: str) -> int:
    """Returns the bytes of "4 GB", "512MiB" or "1024". Raises UsageError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])i?)?b?\s*", text.lower())
    if match is None:
        raise UsageError(f"--global_segment_size={text} is no size")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def node_args(line: CommandLine) -> list[tuple[str, str]]:
    """Returns the arguments of kvstore-node, each with the flags that it comes from. Raises UsageError."""
    host, port = line.text("host"), line.port("port")
    told: list[tuple[str, str]] = []
    bare = host.strip("[]")
    advertised: str | None = bare
    listen = "0.0.0.0"
    # A host name may resolve differently here than elsewhere. So the node listens at the host only if it is an
    # address.
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(bare)
        listen = f"[{bare}]" if address.version == 6 else bare
        if address.is_unspecified:
            advertised = _own_address(line)
        elif address.is_loopback:
            advertised = None
    told.append((f"--listen={listen}:{port}", "--host --port"))
    if advertised is not None and not line.passes_on("--advertise"):
        told.append((f"--advertise={advertised}", "--host"))
    told.append((f"--segment={size(line.text('global_segment_size'))}", "--global_segment_size"))
    if line.is_on("enable_offload") and not line.passes_on("--ssd"):
        told.append((f"--ssd={_medium()}", "--enable_offload"))
    told.append((f"--master={_master(line)}", "--master_server_address"))
    protocol = line.text("protocol").lower()
    devices = line.text("device_names") or line.text("device_name")
    if protocol == "rdma":
        names = [name.strip() for name in devices.split(",") if name.strip()]
        told += [(f"--rdma-device={name}", "--device_names") for name in names]
    elif protocol == "tcp":
        told.append(("--no-rdma", "--protocol"))
    else:
        raise UsageError(f"--protocol={protocol} is neither tcp nor rdma")
    if line.passes_on("--http-listen"):
        return told
    if line.is_on("enable_http_server"):
        told.append((f"--http-listen={listen}:{line.port('http_port')}", "--enable_http_server --http_port"))
    elif "KVSTORE_NODE_HTTP_LISTEN" not in os.environ:
        told.append(("--http-listen=127.0.0.1:0", "(several nodes on one host)"))
    return told


def _medium() -> str:
    try:
        items = offload_medium()
    except BadSetting as error:
        raise UsageError(f"--enable_offload: {error}") from error
    if any("," in item for item in items):
        raise UsageError(f"--enable_offload: {items[0].removeprefix('dir=')} has a comma, which ends a path here")
    return ",".join(items)


def _own_address(line: CommandLine) -> str | None:
    """Returns the address by which this host reaches the master; `None` if unknown."""
    first = re.split("[;,/]", _master(line).partition("://")[2])[0]
    host, _, port = first.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        for family, kind, _, _, address in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        ):
            # Connecting a UDP socket sends nothing. It only chooses the local address.
            with socket.socket(family, kind) as way:
                way.connect(address)
                return str(way.getsockname()[0])
    return None


def _master(line: CommandLine) -> str:
    master = line.text("master_server_address")
    behind = after_etcd(master)
    if behind is not None:
        servers, _, cluster = behind.partition("/")
        return f"etcd://{servers.replace(';', ',')}/{cluster or 'default'}"
    return master if "://" in master else f"http://{master}"


def serve(line: CommandLine, log: logging.Logger) -> int:
    """Replaces this process by kvstore-node. Returns only on failure."""
    told = node_args(line)
    if "http_port" in line.given and not line.is_on("enable_http_server"):
        log.warning("--http_port has no effect: it counts with --enable_http_server")
    try:
        program = find("kvstore-node")
    except NotFound as error:
        log.error("%s", error)
        return 1
    for arg, come_from in told:
        log.info("%s: kvstore-node %s", come_from, arg)
    if line.rest:
        log.info("kvstore-node %s", " ".join(line.rest))
    try:
        # `setup_dummy` on this host finds the pool by this announcement. The process id stays the same after
        # the exec.
        announce_client(line.port("port"), [_master(line)], tenant=line.text("tenant_id"))
    except OSError as error:
        log.warning("setup_dummy will not find this client: %s", error)
    # Without TLS every caller is accepted, as with the original. kvstore-node logs a warning then.
    insecure = [] if line.passes_on("--insecure") else ["--insecure"]
    try:
        os.execv(program, ["kvstore-node", *insecure, *(arg for arg, _ in told), *line.rest])
    except OSError as error:
        log.error("%s: %s", program, error)
    return 1


def main() -> None:
    """Runs the command."""
    sys.exit(flags.run("mooncake_client", __doc__ or "", FLAGS, serve))


if __name__ == "__main__":
    main()
