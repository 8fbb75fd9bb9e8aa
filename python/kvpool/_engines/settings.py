"""The settings that every engine's plugin takes, and how they are read from an engine's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self, cast, get_args

Transport = Literal["auto", "shm", "rdma", "tcp"]


@dataclasses.dataclass(frozen=True)
class PoolSettings:
    """Where the pool is and how it is reached. Times are in seconds."""

    master: str | tuple[str, ...] = "http://127.0.0.1:7070"
    """Where the masters are: one address or several."""
    namespace: str = ""
    """The pool's namespace to use, whose keys no other one's ever meet; empty for the default one."""
    transport: Transport = "auto"
    token: str = ""
    """Reserved: no pool checks one yet."""
    connect_timeout: float = 5.0
    put_timeout: float = 5.0
    get_timeout: float = 5.0
    control_timeout: float = 1.0
    """The longest that a lookup may take."""
    retry_after: float = 5.0
    """After a failed call the pool is left alone for so long."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """The settings in `given`.

        Raises ValueError for a name that is none, a value of another type and a time or size that is
        not positive, and names it.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"kvpool: {name!r} is no setting; there are {', '.join(known)}")
            values[name] = _checked(name, known[name], value)
        return cls(**values)


def choices(*of: str) -> dict[str, tuple[str, ...]]:
    """The metadata of a field that is one of some words."""
    return {"choices": of}


def _checked(name: str, field: dataclasses.Field[Any], value: Any) -> Any:
    """`value` as the type of the setting's default."""
    if name == "master":
        return _masters(value)
    allowed = get_args(Transport) if name == "transport" else field.metadata.get("choices", ())
    if allowed and value not in allowed:
        raise ValueError(f"kvpool: {name} is one of {', '.join(allowed)}, not {value!r}")
    default = field.default
    # A bool is an int to Python, and no setting takes one for the other.
    fits = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(default, bool):
        fits = isinstance(value, bool)
    elif isinstance(default, float):
        fits = fits or isinstance(value, float)
    elif isinstance(default, str):
        fits = isinstance(value, str)
    if not fits:
        raise ValueError(f"kvpool: {name} is of type {type(default).__name__}, not {value!r}")
    # Written so that it catches a NaN too.
    if not isinstance(value, bool | str) and not value > 0:
        raise ValueError(f"kvpool: {name} is above zero, not {value!r}")
    return value


def _masters(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) and one for one in value):
        return tuple(cast("list[str]", value))
    raise ValueError(f"kvpool: master is an address or a list of them, not {value!r}")
