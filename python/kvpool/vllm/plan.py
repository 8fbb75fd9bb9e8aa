"""The moves of one step, from the scheduler's half to the workers' halves."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of vLLM's memory and its hash."""

    group: int
    number: int
    """The block's id within its group."""
    hashed: bytes
    parent: bytes | None = None
    """The hash of the block before it in the same group."""


@dataclasses.dataclass(frozen=True)
class Move:
    """Blocks of one request."""

    request: str
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step's moves."""

    prefix: str
    """The prefix of all keys."""
    loads: tuple[Move, ...] = ()
    saves: tuple[Move, ...] = ()
    preempted: frozenset[str] = frozenset()
    """Requests that lost their blocks: the workers must not read these blocks any more."""
