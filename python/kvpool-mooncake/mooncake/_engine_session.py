"""The address of an engine, and its settings."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import socket

from kvpool._native import PeerEngine
from mooncake._settings import parse_bool, parse_devices

DEFAULT_TIMEOUT = 30.0
"""The longest time of a transfer, in seconds."""


def timeout_setting() -> float:
    """Reads the longest time of a transfer, in seconds. Raises ValueError for an invalid setting."""
    text = os.environ.get("KVPOOL_ENGINE_TIMEOUT", "")
    if not text:
        return DEFAULT_TIMEOUT
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(f"KVPOOL_ENGINE_TIMEOUT={text} is no time in seconds")
    return seconds


def direct_setting() -> bool:
    """Reads whether large reads from peers on this host are copied from their processes. Raises ValueError."""
    name = "KVPOOL_ENGINE_DIRECT_READS"
    return parse_bool(os.environ.get(name) or "true", name)


def split(local_hostname: str) -> tuple[str, int]:
    """Splits a host name into the host and the port, 0 without a port. Raises ValueError for an invalid one."""
    host, port = local_hostname, ""
    if local_hostname.startswith("["):
        host, _, port = local_hostname[1:].partition("]")
        port = port.removeprefix(":")
    elif local_hostname.count(":") == 1:
        host, _, port = local_hostname.partition(":")
    if not host:
        raise ValueError(f"local_hostname {local_hostname!r} names no host")
    if port and not (port.isdecimal() and int(port) < 65536):
        raise ValueError(f"local_hostname {local_hostname!r} names no port")
    return host, int(port or 0)


def devices(device_name: str | None) -> tuple[str, ...]:
    """Reads RDMA devices from a list separated by commas; none for empty text."""
    return parse_devices(device_name)


def serve(
    host: str, port: int, secret: str, any_port: bool, devices: list[str] | None, reads_directly: bool
) -> tuple[PeerEngine, str]:
    """Listens on the address of the host name, else on all interfaces. Returns the engine and its address.

    The engine uses the named RDMA devices, or all devices for an empty list. Raises OSError if it cannot
    listen.
    """
    ports = [port, 0] if any_port and port else [port]
    tries = [(host, number) for number in ports]
    # The host's address may belong to a NAT, so the session then listens on all interfaces. A loopback address
    # never does. A caller that names one wants no connections from other machines.
    if not is_loopback(host):
        tries += [("::" if ":" in host else "0.0.0.0", number) for number in ports]
    last: OSError = OSError("no address")
    for bind, number in tries:
        try:
            return PeerEngine(bind, number, host, secret, devices, reads_directly), bind
        except OSError as error:
            last = error
    raise last


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    with contextlib.suppress(OSError, ValueError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)
    return False
