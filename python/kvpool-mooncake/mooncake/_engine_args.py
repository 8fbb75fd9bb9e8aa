"""The arguments of `mooncake.engine`: their types and ranges."""

from __future__ import annotations

import contextlib
import enum
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

_log = logging.getLogger("mooncake.engine")

# No valid address or length is larger. So a caller's mistake cannot overflow in the native module.
LARGEST = 1 << 63


class TransferOpcode(enum.IntEnum):
    """The direction of a transfer."""

    Read = 0
    """From the peer's memory into this process's memory."""
    Write = 1
    """From this process's memory into the peer's memory."""


@dataclass
class TransferNotify:
    """A message to the peer after a transfer."""

    name: str = ""
    msg: str = ""


def check_int(what: str, value: object) -> None:
    """Raises TypeError unless the value is an int or an integer of numpy or torch."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{what} must be an int, not {type(value).__name__}")


def check_str(what: str, value: object) -> None:
    """Raises TypeError unless the value is a str."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")


def address(value: int) -> int:
    """Checks an address. Raises ValueError for an invalid one."""
    if not 0 <= value < LARGEST:
        raise ValueError(f"{value} is no address")
    return value


def length(value: int) -> int:
    """Checks a length in bytes. Raises ValueError for an invalid one."""
    if not 0 <= value < LARGEST:
        raise ValueError(f"{value} is no length")
    return value


def ranges(
    target: str, buffers: Sequence[int], peer_addresses: Sequence[int], lengths: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Checks the types of a transfer's lists. Raises TypeError for a wrong type."""
    check_str("target_hostname", target)
    ranges = list(buffers), list(peer_addresses), list(lengths)
    names = "buffers", "peer_buffer_addresses", "lengths"
    for name, values in zip(names, ranges, strict=True):
        for value in values:
            check_int(name, value)
    return ranges


def check_values(*ranges: list[int]) -> None:
    """Raises ValueError for an invalid address or length."""
    for values in ranges:
        for value in values:
            if not 0 <= value < LARGEST:
                raise ValueError(f"{value} is neither an address nor a length")


def is_write(opcode: TransferOpcode) -> bool:
    """Whether an opcode means a write. Raises ValueError for an unknown opcode."""
    return TransferOpcode(opcode) is TransferOpcode.Write


def encoded(notify: TransferNotify | None) -> bytes | None:
    """A message in its wire format."""
    if notify is None:
        return None
    if not isinstance(notify, TransferNotify):
        raise TypeError(f"notify must be a TransferNotify, not {type(notify).__name__}")
    return json.dumps([notify.name, notify.msg]).encode()


def decoded(message: bytes) -> TransferNotify | None:
    """A message from a peer; None for other bytes."""
    with contextlib.suppress(ValueError):
        match json.loads(message):
            case [str(name), str(msg)]:
                return TransferNotify(name, msg)
    _log.warning("a peer left a message of %d bytes that is none", len(message))
    return None
