"""The settings of `setup`, in all forms of its callers, and their meaning in kvpool."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Final

DEFAULT_MASTER_PORT: Final = 50051
DEFAULT_ETCD_PORT: Final = 2379
# The default name of a kvmaster's pool in etcd.
DEFAULT_CLUSTER: Final = "default"
PAGE: Final = 4096

_UNITS: Final = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(?:i?b)?\s*", re.IGNORECASE)
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9._:-]")
_LONGEST_NAME: Final = 64


class BadSetting(ValueError):
    """An invalid setting. The text names the setting and the reason."""


# The exceptions for an invalid setting. Python itself raises some of them: for a host name that IDNA cannot
# express, for text that is not UTF-8, and for a number with too many digits.
NO_SETTING: Final = (ValueError, OverflowError)


@dataclasses.dataclass(frozen=True)
class Patience:
    """The timeouts of calls, in milliseconds.

    Each has a setting of the same name for the dict form of `setup`, and an environment variable
    (`KVPOOL_` and the name in capitals).
    """

    connect_timeout_ms: int = 5_000
    put_timeout_ms: int = 10_000
    get_timeout_ms: int = 5_000
    control_timeout_ms: int = 3_000


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a store."""

    host: str = "localhost"
    # 0: any free port.
    port: int = 0
    metadata_server: str = "P2PHANDSHAKE"
    segment_size: int = 16 << 20
    buffer_size: int = 16 << 20
    protocol: str = "tcp"
    devices: tuple[str, ...] = ()
    masters: tuple[str, ...] = (f"http://127.0.0.1:{DEFAULT_MASTER_PORT}",)
    tenant: str = "default"
    # Whether blocks that leave the segment are kept on SSD, and the directory. An empty directory comes from
    # the environment.
    offload: bool = False
    offload_path: str = ""
    patience: Patience = Patience()
    # Settings of the caller that have no effect here.
    ignored: tuple[str, ...] = ()


def parse_size(value: object, what: str) -> int:
    """Reads a number of bytes from an int, or from text such as "16MB", "4 GB" or "1.5GiB". Units are powers of
    1024."""
    if isinstance(value, bool):
        raise BadSetting(f"{what}: {value!r} is no size")
    if isinstance(value, int):
        size = value
    elif isinstance(value, str) and (parts := _SIZE.fullmatch(value)):
        number, unit = parts.groups()
        scale = 1 << _UNITS[unit.lower()]
        size = int(number) * scale if "." not in number else int(float(number) * scale)
    else:
        raise BadSetting(f"{what}: {value!r} is no size; write a number of bytes, or 16MB, 4 GB")
    if not 0 <= size < 1 << 63:
        raise BadSetting(f"{what}: {size} bytes cannot be")
    return size


def parse_host(value: object) -> tuple[str, int]:
    """Reads a host and its port, 0 without a port."""
    if not isinstance(value, str) or not value.strip():
        raise BadSetting(f"local_hostname: {value!r} is no host name")
    text = value.strip()
    host, colon, port = text.rpartition(":")
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1], 0
    if not colon or (":" in host and not host.endswith("]")):
        # There is no port, or this is an IPv6 address without a port.
        return text, 0
    if not port.isdecimal() or int(port) > 65535:
        raise BadSetting(f"local_hostname: {port!r} is no port")
    return host.strip("[]"), int(port)


def after_etcd(address: str) -> str | None:
    """The part of an address behind the scheme of etcd, in capitals or not; `None` for another scheme."""
    scheme, separator, rest = address.partition("://")
    return rest if separator and scheme.lower() == "etcd" else None


def parse_masters(value: object) -> tuple[str, ...]:
    """The masters' addresses as kvpool writes them.

    `host:port`, `http://host:port` and `https://host:port`, several separated by `,` or `;`, or
    `etcd://host;host;host[/cluster]`. The scheme may be in capitals.
    """
    if not isinstance(value, str) or not value.strip():
        raise BadSetting(f"master_server_addr: {value!r} is no address")
    text = value.strip()
    servers = after_etcd(text)
    if servers is not None:
        hosts, slash, cluster = servers.partition("/")
        each = [_with_port(host, DEFAULT_ETCD_PORT) for host in re.split("[;,]", hosts) if host.strip()]
        if not each:
            raise BadSetting(f"master_server_addr: {value!r} names no etcd")
        return (f"etcd://{','.join(each)}/{cluster if slash and cluster else DEFAULT_CLUSTER}",)
    each = []
    for one in re.split("[;,]", text):
        scheme, separator, rest = one.strip().rpartition("://")
        scheme = scheme.lower()
        if separator and scheme not in ("http", "https"):
            raise BadSetting(f"master_server_addr: {one!r}: masters are reached by http://, https:// or etcd://")
        if rest.strip("/"):
            each.append(f"{scheme or 'http'}://{_with_port(rest.strip('/'), DEFAULT_MASTER_PORT)}")
    if not each:
        raise BadSetting(f"master_server_addr: {value!r} is no address")
    return tuple(each)


def _with_port(host: str, port: int) -> str:
    host = host.strip()
    has_port = host.rpartition(":")[2].isdecimal() and (host.count(":") == 1 or "]:" in host)
    return host if has_port else f"{host}:{port}"


def parse_devices(value: object) -> tuple[str, ...]:
    """Reads RDMA devices from a list separated by commas; none for empty text."""
    if value is None:
        return ()
    if not isinstance(value, str):
        raise BadSetting(f"rdma_devices: {value!r} is not text")
    return tuple(name.strip() for name in value.split(",") if name.strip())


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise BadSetting(f"{what}: {value!r} is not text")
    return value


_TRUE: Final = ("true", "1", "yes", "on")
_FALSE: Final = ("false", "0", "no", "off")


def parse_bool(value: object, what: str) -> bool:
    """Reads true or false. Raises BadSetting, a ValueError, for anything else."""
    text = str(value).strip().lower()
    if text not in _TRUE + _FALSE:
        raise BadSetting(f"{what}: {value!r} is neither true nor false")
    return text in _TRUE


def _patience(given: Mapping[str, object]) -> Patience:
    found: dict[str, int] = {}
    for field in dataclasses.fields(Patience):
        value = given.get(field.name, os.environ.get(f"KVPOOL_{field.name.upper()}"))
        if value is None:
            continue
        try:
            number = int(str(value))
        except ValueError:
            raise BadSetting(f"{field.name}: {value!r} is no number of milliseconds") from None
        if not 0 < number < 1 << 31:
            raise BadSetting(f"{field.name}: {number} ms cannot be")
        found[field.name] = number
    return Patience(**found)


# The names of each setting that callers use.
_NAMES: Final = {
    "local_hostname": ("local_hostname",),
    "metadata_server": ("metadata_server",),
    "global_segment_size": ("global_segment_size",),
    "local_buffer_size": ("local_buffer_size",),
    "protocol": ("protocol",),
    "rdma_devices": ("rdma_devices", "device_name"),
    "master_server_addr": ("master_server_addr", "master_server_address", "master_server_entry"),
    "tenant_id": ("tenant_id",),
    "enable_ssd_offload": ("enable_ssd_offload",),
    "ssd_offload_path": ("ssd_offload_path",),
}
_PATIENCE: Final = frozenset(field.name for field in dataclasses.fields(Patience))


def read_settings(given: Mapping[str, object]) -> Settings:
    """Reads settings from names and values, as in the dict form of `setup`.

    Raises `BadSetting` for an invalid value. Notes unknown names.
    """
    settings = Settings()
    values = {
        name: given[spelling]
        for name, spellings in _NAMES.items()
        for spelling in reversed(spellings)
        if spelling in given
    }
    host, port = parse_host(values.get("local_hostname", settings.host))
    known = {spelling for spellings in _NAMES.values() for spelling in spellings} | _PATIENCE
    tenant = _text(values.get("tenant_id", settings.tenant), "tenant_id")
    metadata_server = values.get("metadata_server", settings.metadata_server)
    segment_size = values.get("global_segment_size", settings.segment_size)
    buffer_size = values.get("local_buffer_size", settings.buffer_size)
    protocol = _text(values.get("protocol", settings.protocol), "protocol").lower()
    devices = parse_devices(values.get("rdma_devices"))
    offload = parse_bool(values.get("enable_ssd_offload") or False, "enable_ssd_offload")
    offload_path = _text(values.get("ssd_offload_path") or "", "ssd_offload_path")
    ignored = [str(name) for name in given if name not in known]
    if offload_path and not offload:
        ignored.append("ssd_offload_path without enable_ssd_offload")
    return Settings(
        host=host,
        port=port,
        metadata_server=_text(metadata_server, "metadata_server"),
        segment_size=parse_size(segment_size, "global_segment_size"),
        buffer_size=parse_size(buffer_size, "local_buffer_size"),
        protocol=protocol,
        # Callers often keep a device's name in their settings when they change to another protocol.
        devices=devices if protocol == "rdma" else (),
        masters=parse_masters(values["master_server_addr"])
        if "master_server_addr" in values
        else settings.masters,
        tenant=tenant or settings.tenant,
        offload=offload,
        offload_path=offload_path,
        patience=_patience(given),
        ignored=tuple(sorted(ignored)),
    )


@dataclasses.dataclass(frozen=True)
class Place:
    """A store's name, and the listening address of its segment."""

    host: str
    port: int
    listen: str
    advertise: str

    @property
    def hostname(self) -> str:
        """The store's name: `host:port`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_place(host: str, port: int) -> Place:
    """Finds a free port on `host`: `port` itself if it is free.

    If the host name is not an address of this machine (for example behind NAT), the store listens on all
    interfaces. It then advertises the host name.
    """
    bare = host.strip("[]")
    for address, wanted in ((bare, port), (bare, 0), ("", port), ("", 0)):
        with contextlib.suppress(OSError):
            return _try_place(bare, address, wanted)
    raise BadSetting(f"local_hostname: no port is free on {host}")


def _try_place(host: str, address: str, port: int) -> Place:
    if address:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    else:
        family, where = socket.AF_INET, ("0.0.0.0", port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        ip, found = probe.getsockname()[:2]
    listen = f"[{ip}]:{found}" if ":" in ip else f"{ip}:{found}"
    told = f"[{host}]:{found}" if ":" in host else f"{host}:{found}"
    if _is_loopback(host):
        # A loopback name is advertised as it is, even if the master is on another host.
        return Place(host, found, listen, listen)
    return Place(host, found, listen, "" if ip == host or _is_loopback(ip) else told)


def is_for_this_host_alone(place: Place, masters: Sequence[str]) -> bool:
    """Whether other hosts cannot reach a segment there although a master is on another host."""
    hosts = [re.split("[,/]", url.partition("://")[2])[0].rpartition(":")[0] for url in masters]
    return _is_loopback(place.host) and not all(map(_is_loopback, hosts))


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def node_name(hostname: str) -> str:
    """Returns the store node's name for a segment: its `host:port`, shortened, with other characters replaced
    by `-`."""
    name = _NOT_IN_A_NAME.sub("-", hostname).lstrip(".")
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{name[: _LONGEST_NAME - 17]}-{digest}"


def rdma_devices_here() -> tuple[str, ...]:
    """The RDMA devices of this host."""
    try:
        return tuple(sorted(os.listdir("/sys/class/infiniband")))
    except OSError:
        return ()
