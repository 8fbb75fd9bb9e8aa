"""What `kv_connector_extra_config` may hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

Transport = Literal["auto", "shm", "rdma", "tcp"]
Staging = Literal["auto", "always"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The connector's settings. Times are in seconds, sizes in bytes."""

    master: str | tuple[str, ...] = "http://127.0.0.1:7070"
    """Where the masters are: one address or several."""
    namespace: str = ""
    """The pool's namespace to use, the unit of quota and visibility; empty for the default one."""
    model: str = ""
    """The model's name in keys, where hosts have the same model under different names or paths."""
    salt: str = ""
    """Keeps apart what the model's name and configuration do not, such as two sets of weights."""
    transport: Transport = "auto"
    token: str = ""
    connect_timeout: float = 5.0
    put_timeout: float = 5.0
    get_timeout: float = 5.0
    control_timeout: float = 1.0
    """The longest that a lookup may hold up vLLM's scheduler."""
    retry_after: float = 5.0
    """After a failed call the pool is left alone for so long."""
    save_decoded: bool = True
    """Whether blocks of generated tokens are saved too."""
    save_backlog: int = 1 << 30
    """At most so much waits to be saved; what comes beyond that is not saved."""
    staging: Staging = "auto"
    """Whether blocks move through host memory of the connector's own: "auto" for memory of a device
    only, "always" for any."""

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Settings:
        """The settings in `extra`.

        Raises ValueError for a name that is none, a value of another type and a time or size that is
        not positive, and names it.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in extra.items():
            if name not in known:
                raise ValueError(f"kv_connector_extra_config: {name!r} is no setting of KvpoolConnector")
            values[name] = _checked(name, known[name].default, value)
        return cls(**values)


def _checked(name: str, default: object, value: Any) -> Any:
    """`value` as the type of the setting's `default`."""
    if name == "master":
        return _masters(value)
    choices: tuple[str, ...] = {"transport": get_args(Transport), "staging": get_args(Staging)}.get(name, ())
    if choices and value not in choices:
        raise ValueError(f"kv_connector_extra_config: {name} is one of {', '.join(choices)}, not {value!r}")
    # A bool is an int to Python, and no setting takes one for the other.
    fits = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(default, bool):
        fits = isinstance(value, bool)
    elif isinstance(default, float):
        fits = fits or isinstance(value, float)
    elif isinstance(default, str):
        fits = isinstance(value, str)
    if not fits:
        kind = type(default).__name__
        raise ValueError(f"kv_connector_extra_config: {name} is of type {kind}, not {value!r}")
    if isinstance(default, int | float) and not isinstance(default, bool) and not value > 0:
        raise ValueError(f"kv_connector_extra_config: {name} is above zero, not {value!r}")
    return value


def _masters(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) and one for one in value):
        return tuple(cast("list[str]", value))
    raise ValueError(f"kv_connector_extra_config: master is an address or a list of them, not {value!r}")
