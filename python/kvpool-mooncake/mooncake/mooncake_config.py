"""The configuration of a store, from a JSON file or from the environment."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

DEFAULT_GLOBAL_SEGMENT_SIZE: Final = 3355443200
DEFAULT_LOCAL_BUFFER_SIZE: Final = 1 << 30

logger = logging.getLogger("mooncake.mooncake_config")

_REQUIRED: Final = ("local_hostname", "metadata_server", "master_server_address")
_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TRUE: Final = ("true", "1", "yes", "on", "enable")
_FALSE: Final = ("false", "0", "no", "off", "disable", "")
# The protocols of the original's engine and store. kvpool uses RDMA for "rdma", and ignores the others.
_PROTOCOLS: Final = frozenset(
    "tcp rdma efa nvmeof nvlink musa nvlink_intra hip barex cxl ascend ub ubshmem maca sunrise_link rpc_only".split()
)
# The environment variable of each setting.
_VARIABLES: Final = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_server_address": "MOONCAKE_MASTER",
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
    "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
}


def _parse_segment_size(value: Any) -> int:
    """Returns the bytes of a number, or of text with a unit of 1024 ("16MB", "4 GB"). Raises ValueError."""
    if not isinstance(value, str):
        return int(value)
    text = value.strip().lower()
    number = text.rstrip("bkmgt")
    unit = text[len(number) :].removesuffix("b")
    if not number.strip() or unit not in _UNITS:
        raise ValueError(f"Invalid segment size {value!r}: missing number or unknown unit (empty or kb, mb, gb, tb)")
    return int(float(number) * _UNITS[unit])


def _parse_bool(value: Any) -> bool:
    """Returns a bool from a bool, a number, or text such as "yes" and "off". Raises ValueError."""
    if value is None or isinstance(value, (bool, int, float)):
        return bool(value)
    text = str(value).strip().lower()
    if text not in _TRUE + _FALSE:
        raise ValueError(f"Invalid boolean value: {value!r}")
    return text in _TRUE


@dataclass
class MooncakeConfig:
    """The settings of `MooncakeDistributedStore.setup`, by the names of configuration files.

    The protocol is kept in lower case. An unknown protocol is logged. Raises ValueError for a negative size,
    and for an empty `protocol`, `local_hostname`, `metadata_server` or `master_server_address`.
    """

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str | None
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300

    def __post_init__(self) -> None:
        if not isinstance(self.protocol, str) or not self.protocol.strip():
            raise ValueError(f"Invalid protocol: {self.protocol!r} is not a name such as tcp or rdma")
        self.protocol = self.protocol.strip().lower()
        if self.protocol not in _PROTOCOLS:
            logger.warning("Unrecognised protocol %r is passed on", self.protocol)
        for name in ("global_segment_size", "local_buffer_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"Invalid {name}: {getattr(self, name)} bytes; a size must be non-negative")
        for name in _REQUIRED:
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name!r} must be a non-empty string, not {value!r}")

    @staticmethod
    def from_file(file_path: str) -> MooncakeConfig:
        """Reads the configuration from a JSON file. Raises OSError or ValueError."""
        with open(file_path) as file:
            given = json.load(file)
        for name in _REQUIRED:
            if name not in given:
                raise ValueError(f"Missing required config field: {name}")
        return _config(given)

    @staticmethod
    def load_from_env() -> MooncakeConfig:
        """Reads the configuration from the file MOONCAKE_CONFIG_PATH, else from the other variables MOONCAKE_*.

        Raises ValueError if neither MOONCAKE_CONFIG_PATH nor MOONCAKE_MASTER is set.
        """
        path = os.environ.get("MOONCAKE_CONFIG_PATH")
        if path is not None:
            return MooncakeConfig.from_file(path)
        if not os.environ.get("MOONCAKE_MASTER"):
            raise ValueError("set MOONCAKE_CONFIG_PATH, a file, or MOONCAKE_MASTER, the master's address")
        given = {name: os.environ[variable] for name, variable in _VARIABLES.items() if variable in os.environ}
        return _config({"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", **given})


# The functions that read a value of a file or a variable. Other settings are taken unchanged.
_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "global_segment_size": _parse_segment_size,
    "local_buffer_size": _parse_segment_size,
    "enable_ssd_offload": _parse_bool,
    "ssd_offload_path": lambda value: "" if value is None else str(value),
    "tenant_id": lambda value: "default" if value is None else str(value),
    "enable_client_http_server": _parse_bool,
    "client_http_port": int,
}
_DEFAULTS: Final[Mapping[str, Any]] = {
    "global_segment_size": DEFAULT_GLOBAL_SEGMENT_SIZE,
    "local_buffer_size": DEFAULT_LOCAL_BUFFER_SIZE,
    "protocol": "tcp",
    "device_name": "",
}


def _config(given: Mapping[str, Any]) -> MooncakeConfig:
    names = [field.name for field in fields(MooncakeConfig)]
    known = {**_DEFAULTS, **{name: value for name, value in given.items() if name in names}}
    return MooncakeConfig(**{name: _READERS.get(name, lambda value: value)(value) for name, value in known.items()})
