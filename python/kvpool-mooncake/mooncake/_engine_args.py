"""The arguments of `mooncake.engine`: their types, and what they may be."""

from __future__ import annotations

import contextlib
import enum
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

_log = logging.getLogger("mooncake.engine")

# No address or length is larger, so none that a caller gives by mistake overflows below.
LARGEST = 1 << 63


class TransferOpcode(enum.IntEnum):
    """Which way a transfer goes."""

    Read = 0
    """From the peer's memory into this process's."""
    Write = 1
    """From this process's memory into the peer's."""


@dataclass(frozen=True)
class TransferNotify:
    """A message that is left with the peer after a transfer."""

    name: str
    msg: str


def check_int(what: str, value: object) -> None:
    """Raises TypeError unless it is an int. What numpy and torch call integers are taken too."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{what} must be an int, not {type(value).__name__}")


def check_str(what: str, value: object) -> None:
    """Raises TypeError unless it is a str."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")


def address(value: int) -> int:
    """An address. Raises ValueError for what cannot be one."""
    if not 0 <= value < LARGEST:
        raise ValueError(f"{value} is no address")
    return value


def length(value: int) -> int:
    """A length in bytes. Raises ValueError for what cannot be one."""
    if not 0 <= value < LARGEST:
        raise ValueError(f"{value} is no length")
    return value


def ranges(
    target: str, buffers: Sequence[int], peer_addresses: Sequence[int], lengths: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Lists of what a transfer names. Raises TypeError for what is not of the right types."""
    check_str("target_hostname", target)
    ranges = list(buffers), list(peer_addresses), list(lengths)
    names = "buffers", "peer_buffer_addresses", "lengths"
    for name, values in zip(names, ranges, strict=True):
        for value in values:
            check_int(name, value)
    return ranges


def check_values(*ranges: list[int]) -> None:
    """Raises ValueError for what is neither an address nor a length."""
    for values in ranges:
        for value in values:
            if not 0 <= value < LARGEST:
                raise ValueError(f"{value} is neither an address nor a length")


def is_write(opcode: TransferOpcode) -> bool:
    """Which way an opcode goes. Raises ValueError for one that is none."""
    return TransferOpcode(opcode) is TransferOpcode.Write


def encoded(notify: TransferNotify | None) -> bytes | None:
    """A message as it travels."""
    if notify is None:
        return None
    if not isinstance(notify, TransferNotify):
        raise TypeError(f"notify must be a TransferNotify, not {type(notify).__name__}")
    return json.dumps([notify.name, notify.msg]).encode()


def decoded(message: bytes) -> TransferNotify | None:
    """A message that a peer left; None when it is none."""
    with contextlib.suppress(ValueError):
        match json.loads(message):
            case [str(name), str(msg)]:
                return TransferNotify(name, msg)
    _log.warning("a peer left a message of %d bytes that is none", len(message))
    return None
