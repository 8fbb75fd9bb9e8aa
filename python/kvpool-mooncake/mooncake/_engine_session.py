"""The address of an engine, and its settings."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import socket

from kvpool._native import PeerEngine
from mooncake._settings import parse_bool, parse_devices

_log = logging.getLogger("mooncake.engine")

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


def session_name(host: str, port: int) -> str:
    """A session's name for peers, "host:port"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def serve(
    host: str, port: int, secret: str, any_port: bool, devices: list[str] | None, reads_directly: bool
) -> tuple[PeerEngine, str]:
    """Listens on an address of the host name, else on all interfaces. Returns the engine and its address.

    The engine uses the named RDMA devices, or all devices for an empty list. Logs a warning if it listens on another
    port, or if the host name cannot be resolved. Raises OSError if it cannot listen.
    """
    found = _addresses(host)
    # One bind of all addresses would go on to the next address if the port is taken. Peers on this host try the
    # addresses in the same order, so they would reach another process.
    bind = next(filter(_is_here, found), None)
    if bind is None:
        # The host's address may belong to a NAT, so the session then listens on all interfaces. A loopback address
        # never does. A caller that names one wants no connections from other machines.
        if _are_loopback(found):
            raise OSError(f"this host has no address of {host!r}")
        bind = "::" if ":" in host else "0.0.0.0"
    last: OSError = OSError("no address")
    for number in [port, 0] if any_port and port else [port]:
        try:
            native = PeerEngine(bind, number, host, secret, devices, reads_directly)
        except OSError as error:
            # This host has the address, so the error is about the port.
            last = error
            continue
        name = session_name(host, native.port())
        if number != port:
            _log.warning(
                "port %d cannot be used (%s): the session is %s. Free the port, or give peers this name, which"
                " get_session_id() returns",
                port,
                last,
                name,
            )
        if not found:
            _log.warning(
                "session %s: this host cannot resolve the host name %r, so peers may not reach the session. Name an"
                " address of this host, or a name that peers resolve",
                name,
                host,
            )
        return native, bind
    raise last


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    return _are_loopback(_addresses(host))


def _addresses(host: str) -> list[str]:
    """The addresses of a host; none if its name cannot be resolved."""
    # The resolver raises ValueError for a text that cannot be a name.
    with contextlib.suppress(OSError, ValueError):
        found = [entry[4] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        # Unlike the resolver, this keeps the interface of a link-local address.
        numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
        return [socket.getnameinfo(address, numeric)[0] for address in found]
    return []


def _is_here(address: str) -> bool:
    """Whether this host has an address."""
    with contextlib.suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(target)
        return True
    return False


def _are_loopback(addresses: list[str]) -> bool:
    return bool(addresses) and all(ipaddress.ip_address(address).is_loopback for address in addresses)
