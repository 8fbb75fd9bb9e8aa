"""The settings that all connectors have, and their reading from the engine's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self, cast, get_args

Transport = Literal["auto", "shm", "rdma", "tcp"]


@dataclasses.dataclass(frozen=True)
class PoolSettings:
    """The address of the pool and how to reach it. Times are in seconds."""

    master: str | tuple[str, ...] | None = None
    """One address of a master, or several. Default: the environment variable KVPOOL_MASTER, else
    http://127.0.0.1:7070."""
    namespace: str = ""
    """The namespace of all keys; empty for the default namespace."""
    transport: Transport = "auto"
    token: str = ""
    """The token itself. Better: name its file in the environment variable KVPOOL_TOKEN_FILE."""
    connect_timeout: float = 5.0
    put_timeout: float = 5.0
    get_timeout: float = 5.0
    control_timeout: float = 1.0
    """The longest time that a lookup may take."""
    retry_after: float = 5.0
    """How long the engine sends no calls to the pool after a failed call."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Reads settings from a mapping.

        Raises ValueError, with the setting's name, for an unknown setting, a value of another type,
        or a time or size that is not positive.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"kvpool: {name!r} is no setting; there are {', '.join(known)}")
            values[name] = _checked(name, known[name], value)
        return cls(**values)


def choices(*of: str) -> dict[str, tuple[str, ...]]:
    """Field metadata that lists the allowed values."""
    return {"choices": of}


def _checked(name: str, field: dataclasses.Field[Any], value: Any) -> Any:
    """`value`, checked against the type of the setting's default."""
    if name == "master":
        return _masters(value)
    allowed = get_args(Transport) if name == "transport" else field.metadata.get("choices", ())
    if allowed and value not in allowed:
        raise ValueError(f"kvpool: {name} is one of {', '.join(allowed)}, not {value!r}")
    default = field.default
    # In Python a bool is an int; refuse a bool for an int and an int for a bool.
    fits = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(default, bool):
        fits = isinstance(value, bool)
    elif isinstance(default, float):
        fits = fits or isinstance(value, float)
    elif isinstance(default, str):
        fits = isinstance(value, str)
    if not fits:
        raise ValueError(f"kvpool: {name} is of type {type(default).__name__}, not {value!r}")
    # This form of the comparison also refuses NaN.
    if not isinstance(value, bool | str) and not value > 0:
        raise ValueError(f"kvpool: {name} is above zero, not {value!r}")
    return value


def _masters(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) and one for one in value):
        return tuple(cast("list[str]", value))
    raise ValueError(f"kvpool: master is an address or a list of them, not {value!r}")
