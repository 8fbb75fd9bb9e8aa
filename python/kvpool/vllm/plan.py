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
class Send:
    """A prompt that this step completes and that is handed off to decode."""

    request: str
    room: int
    """The number of the hand-off, which both engines know."""
    pages: tuple[int, ...]
    """The blocks of the whole prompt, in their order."""
    decode_ranks: int
    """The number of decode's tensor parallel ranks."""


@dataclasses.dataclass(frozen=True)
class Receive:
    """A prompt whose blocks come from prefill."""

    request: str
    room: int
    mode: str
    """"push", "pull" or "delayed"."""
    senders: tuple[str, ...]
    """The addresses of prefill's ranks: all tensor parallel ranks of the first stage, then of the next."""
    prefill_ranks: int
    """The number of prefill's tensor parallel ranks."""
    prefill_layers: tuple[int, ...]
    """The number of layers of each of prefill's stages."""
    held: int
    """The number of the prompt's first blocks that come from elsewhere."""
    pages: tuple[int, ...]
    """This engine's blocks for the rest of the prompt."""


@dataclasses.dataclass(frozen=True)
class Decline:
    """A prompt that prefill hands off and that this engine does not take."""

    request: str
    room: int
    senders: tuple[str, ...]
    """The addresses of all of prefill's ranks."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step's moves."""

    prefix: str
    """The prefix of all keys."""
    loads: tuple[Move, ...] = ()
    saves: tuple[Move, ...] = ()
    preempted: frozenset[str] = frozenset()
    """Requests that lost their blocks: the workers must not read these blocks any more."""
    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()
    dropped: frozenset[str] = frozenset()
    """Requests that ended early: the workers abort their hand-offs."""
    declines: tuple[Decline, ...] = ()
    """Prompts that prefill need not keep for this engine."""
