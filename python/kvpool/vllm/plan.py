"""What the scheduler's half tells the workers' halves to move in a step."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of vLLM's memory and what names it."""

    group: int
    number: int
    """Where it lies: the block's id within its group."""
    hashed: bytes
    parent: bytes | None = None
    """What names the block before it in the same group."""


@dataclasses.dataclass(frozen=True)
class Move:
    """Blocks of one request."""

    request: str
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step's moves."""

    prefix: str
    """What all keys begin with."""
    loads: tuple[Move, ...] = ()
    saves: tuple[Move, ...] = ()
    preempted: frozenset[str] = frozenset()
    """Requests that have lost their blocks: these must not be read any more."""
