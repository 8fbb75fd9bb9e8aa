"""Hand-off: sends KV directly from a prefill process to a decode process, without the pool.

Each rank of an engine opens one `Session` over its KV memory. For each request, prefill calls `send` and decode
calls `receive`. Both use the same number for the request: the room. Either call may come first.

```python
from kvpool import handoff

# Both sides: two pages of 4 tokens, 1 layer, keys of 2 heads with 8 bytes a head.
state = handoff.State("k", layer=0, base=memory.ctypes.data, pages=2, outer=4, parts=2, part_bytes=8)

with handoff.Session([state], page_tokens=4) as prefill:          # in the prefill process
    sending = prefill.send(room=7, pages=[0, 1])
    sending.produced(0, 2)                                        # pages 0 and 1 of the request
    sending.finish()

with handoff.Session([state], page_tokens=4) as decode:           # in the decode process
    receiving = decode.receive(room=7, pages=[1, 0], senders=[prefill_address])
    assert receiving.wait(timeout=30) is handoff.Poll.SUCCESS     # the bytes are there, and verified
```

Read this first:

- All calls return at once, except `wait` and `close`, which have a deadline.
- A room ends at both ends. It ends with `SUCCESS` when every byte was compared after the last write, else with
  `FAILED`. After `FAILED`, use the pages again once `released` is true.
- The other end learns of a killed peer within a second, and of a stopped peer within four.
- Page numbers are each process's own. Only the layouts of the two ends must agree: heads, and tokens of a page.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from kvpool import _native
from kvpool.errors import ClosedError

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

__all__ = [
    "AuxLayout",
    "Bootstrap",
    "Offering",
    "Poll",
    "Pulling",
    "Receiving",
    "Sending",
    "Session",
    "State",
]


class Poll(enum.IntEnum):
    """The state of a room on one rank. A room's state over several ranks is the least of their states.

    FAILED and SUCCESS are final. BOOTSTRAPPING: not all ranks of the other side are known. WAITING_FOR_INPUT: all
    ranks agree, and no byte has moved. TRANSFERRING: bytes move."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


@dataclass(frozen=True)
class State:
    """One region of this rank's KV memory: the keys of a layer, its values, or another state.

    A page of the region has `outer` runs. A run has `parts` parts of `part_bytes` bytes over all ranks
    together. With the rule "slice" each rank holds its share of the parts. So a page on a rank has `outer` times the
    rank's parts times `part_bytes` bytes. The pages are adjacent in memory, from `base` on.

    - Token-major keys `[token][head][bytes]`: `outer` tokens of a page, `parts` heads of all ranks.
    - Head-major keys `[head][token][bytes]`: `outer` 1, `parts` heads, `part_bytes` of all tokens.
    - A state that is never sliced: rule "copy" or "one_source" (MLA), with `outer` and `parts` 1.
    """

    name: str
    """The name, equal at both ends."""
    layer: int
    """The number of the layer in the whole model."""
    base: int
    """The address of page 0 in this process."""
    pages: int
    """The number of pages."""
    parts: int
    """The number of parts over all ranks."""
    part_bytes: int
    """The bytes of one part."""
    outer: int = 1
    """The number of runs in a page."""
    rule: str = "slice"
    """How ranks share the parts: "slice", "copy" or "one_source"."""


class AuxLayout:
    """The layout of a slot of metadata, in the form of disaggregated engines. A slot has `slot_bytes` bytes.
    `hidden_bytes`: the bytes of the hidden states of one token; 0 when prefill sends none."""

    def __init__(self, hidden_bytes: int = 0) -> None:
        fields, self.slot_bytes = _native.handoff_aux_layout(hidden_bytes)
        self._fields = {name: (begin, end) for name, begin, end in fields}

    def range(self, field: str) -> tuple[int, int]:
        """Returns the first byte of a field in a slot, and the byte after its last. Raises KeyError for an
        unknown field. Names: output_ids, cached_tokens, token_logprobs_val, token_logprobs_idx,
        top_logprobs_val, top_logprobs_idx, topk_p, topk_index, hidden_states, room."""
        return self._fields[field]


class _Transfer:
    """The operations of both ends of a request."""

    def __init__(self, native: _native.HandoffSending | _native.HandoffReceiving) -> None:
        self._native = native

    @property
    def poll(self) -> Poll:
        """The present state."""
        return Poll(self._native.state()[0])

    @property
    def error(self) -> str | None:
        """The code of a failed request, such as `unreachable` or `deadline_exceeded`; otherwise None."""
        return self._native.state()[1]

    @property
    def released(self) -> bool:
        """Whether no transfer touches the pages for this request any more."""
        return self._native.state()[2]

    def wait(self, timeout: float) -> Poll:
        """Waits until the request has ended and its pages are released, for at most `timeout` seconds. Returns
        the state at that time. Raises InvalidArgumentError for a negative timeout."""
        return Poll(self._native.wait(timeout))

    def abort(self) -> None:
        """Aborts the request at all ends, with the error `draining`. Does nothing once the request has ended."""
        self._native.abort()


class Sending(_Transfer):
    """Prefill's end of one request. Dropping this object early aborts the request."""

    _native: _native.HandoffSending

    def produced(
        self,
        first_page: int,
        pages: int,
        first_layer: int | None = None,
        layers: int | None = None,
    ) -> None:
        """Names computed pages of the request, so that they can be sent: `pages` pages from `first_page` on.
        With `first_layer`, only `layers` layers from `first_layer` on are computed, one by default. Layers
        count from the model's first layer. Name each page and layer once. Raises InvalidArgumentError for pages
        outside the request, and for layers that this rank does not have."""
        of_layers = None
        if first_layer is not None:
            of_layers = (first_layer, first_layer + (1 if layers is None else layers))
        self._native.produced((first_page, first_page + pages), of_layers)

    def finish(self, aux: bytes | None = None) -> None:
        """Ends the request, after `produced` has named each page and layer once. `aux` is the slot of metadata,
        for a receiver that asks for it. The session fills in its field `room`. Raises InvalidArgumentError
        while a page or layer is not named, and for a slot that is too long."""
        self._native.finish(aux or b"")


class Offering(_Transfer):
    """Prefill's end of a pull: pages that decode may ask for. Dropping this object before the end of the pull
    aborts it."""

    _native: _native.HandoffSending


class Receiving(_Transfer):
    """Decode's end of one request. Dropping this object early aborts the request."""

    _native: _native.HandoffReceiving

    @property
    def aux(self) -> bytes | None:
        """The slot of metadata. None unless `receive` asked for it and the state is SUCCESS."""
        return self._native.aux()


class Pulling:
    """Decode's end of a pull. A delayed pull is a proxy: it holds no memory and asks for nothing until `use`
    names the pages."""

    def __init__(
        self, begin: Callable[[Sequence[int]], Receiving], decline: Callable[[bool], None]
    ) -> None:
        self._begin = begin
        self._decline = decline
        self._receiving: Receiving | None = None
        self._ended: str | None = None

    def use(self, pages: Sequence[int]) -> None:
        """Asks for the bytes. `pages`: this rank's pages for the request's pages after the held ones. Raises
        ValueError when the pull was used or aborted before."""
        self._check_unused()
        self._receiving = self._begin(pages)

    def decline(self) -> None:
        """Declines the pull, because this process has no pages for it. The pull ends at both ends with `full`.
        Prefill serves this process again after its `back_off`. Raises ValueError when the pull was used or
        aborted before."""
        self._check_unused()
        self._decline(True)
        self._ended = "full"

    def _check_unused(self) -> None:
        if self._receiving is not None or self._ended is not None:
            raise ValueError("the pull was used or aborted before")

    @property
    def poll(self) -> Poll:
        """The present state: WAITING_FOR_INPUT before `use`."""
        if self._receiving is None:
            return Poll.WAITING_FOR_INPUT if self._ended is None else Poll.FAILED
        return self._receiving.poll

    @property
    def error(self) -> str | None:
        """The code of a failed pull; otherwise None."""
        if self._receiving is None:
            return self._ended
        return self._receiving.error

    @property
    def released(self) -> bool:
        """Whether no transfer touches the pages for this pull any more."""
        return True if self._receiving is None else self._receiving.released

    def wait(self, timeout: float) -> Poll:
        """Waits until the pull has ended and its pages are released, for at most `timeout` seconds. Returns at
        once before `use`."""
        return self.poll if self._receiving is None else self._receiving.wait(timeout)

    def abort(self) -> None:
        """Aborts the pull at both ends. Before `use`, decode tells prefill once. If that message is lost, the
        pins end with the offer's timeout."""
        if self._receiving is not None:
            self._receiving.abort()
        elif self._ended is None:
            self._ended = "draining"
            with contextlib.suppress(ClosedError):
                self._decline(False)


class _Closed(abc.ABC):
    """A base of objects that a `with` statement closes."""

    @abc.abstractmethod
    def close(self) -> object:
        """Ends the session or server."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Session(_Closed):
    """One rank's end of its hand-offs. The memory of its states must stay until `close` has returned.
    The end of a `with` statement logs an error where `close` returns False.

    `page_tokens`: tokens of a page, equal at both ends. `advertise`: the address that peers connect to,
    "host:port"; by default the listener's own. `secret`: shared by all processes of the group. Without a
    secret, every process that reaches the port may take part. `tensor`: this rank, and the number of ranks of
    its tensor-parallel group. `pipeline`: this stage, and the number of layers of each stage; by default one
    stage with all layers of `states`. `failure_probability`: the share of requests that fail on purpose, for
    tests of callers.

    `pin_limit`: the pages that all offers together may pin; no limit by default. `pin_reserve`: the percentage
    of `pin_limit` that stays free, 0 to 100. `back_off`: seconds for which prefill does not serve a process
    that declined for want of pages.

    `host`, `port`: the listening address; port 0 means any free port. `name`: this session's name in the logs of its
    peers. `hidden_bytes`: the bytes of the hidden states in a slot of metadata, equal at both ends.

    Raises InvalidArgumentError for memory that is not this process's, for parts that the ranks cannot share evenly,
    and for a value out of range. Raises OSError if the session cannot listen. After `close` all other methods
    raise ClosedError. In a child made by fork they raise ForkedError. Every method raises InvalidArgumentError for
    an int that is negative or too large.
    """

    def __init__(
        self,
        states: Sequence[State],
        *,
        page_tokens: int,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        name: str = "",
        secret: str = "",
        tensor: tuple[int, int] = (0, 1),
        pipeline: tuple[int, Sequence[int] | None] = (0, None),
        hidden_bytes: int = 0,
        failure_probability: float = 0.0,
        pin_limit: int | None = None,
        pin_reserve: int = 2,
        back_off: float = 2.0,
    ) -> None:
        stage, stages = pipeline
        if stages is None:
            stages = [1 + max((state.layer for state in states), default=0)]
        self._stages = list(stages)
        self._native = _native.HandoffSession(
            [
                (
                    state.name,
                    state.layer,
                    state.base,
                    state.pages,
                    state.rule,
                    (state.outer, state.parts, state.part_bytes),
                )
                for state in states
            ],
            page_tokens,
            (host, port),
            advertise,
            name,
            secret,
            tensor,
            (stage, self._stages),
            hidden_bytes,
            failure_probability,
            (pin_limit, pin_reserve, back_off),
        )

    @property
    def address(self) -> str:
        """The address that peers connect to: "host:port"."""
        return self._native.address

    def pinned(self) -> int:
        """The number of this rank's pages that requests send, counted once for each request. Waiting offers do
        not count."""
        return self._native.pinned()

    def waiting(self) -> int:
        """The number of offers that wait until other offers free their pages."""
        return self._native.waiting()

    def decline(self, room: int, senders: Sequence[str], *, no_pages: bool = True) -> None:
        """Declines a request at all ends: prefill's pages are free, and the other ranks of decode fail.
        `senders`: the addresses of all ranks of prefill. With `no_pages` the reason is `full`, and prefill
        serves this process again after its `back_off`; otherwise the reason is `draining`. Prefill accepts the
        message unless other processes have asked for all places of the request. The process sends it once. If
        it is lost, prefill's own timeout ends the request."""
        self._native.decline(room, list(senders), no_pages)

    def send(
        self,
        room: int,
        pages: Sequence[int],
        *,
        decode_tp: int = 1,
        timeout: float = 300.0,
        patience: float | None = None,
    ) -> Sending:
        """Sends a request's pages to decode. `pages`: this rank's pages, from the request's first token. Keep
        them until `released`. `decode_tp`: the number of decode's tensor-parallel ranks. `timeout`: the longest
        time of the request, in seconds. `patience`: how long decode may take to ask, in seconds, 30 by default.
        Raises an Error with the code `in_progress` while the room is open. Raises InvalidArgumentError for a
        page that does not exist, and if neither number of ranks divides the other."""
        return Sending(self._native.send(room, list(pages), decode_tp, timeout, patience))

    def offer(
        self, room: int, pages: Sequence[int], *, decode_tp: int = 1, timeout: float = 360.0
    ) -> Offering:
        """Offers a request's pages for decode to pull. All of them are computed. The pages stay pinned until
        decode has them, its process is lost, or `timeout` seconds have passed. The offer waits while the pins
        of other offers exceed the part of `pin_limit` that offers may use. It waits in BOOTSTRAPPING, and fails
        with `full` after the timeout. Raises as `send` does."""
        return Offering(self._native.offer(room, list(pages), decode_tp, timeout))

    def pull(
        self,
        room: int,
        pages: Sequence[int] | None,
        senders: Sequence[str],
        *,
        held: int = 0,
        prefill_tp: int | None = None,
        prefill_layers: Sequence[int] | None = None,
        timeout: float = 300.0,
        patience: float | None = None,
    ) -> Pulling:
        """Pulls the pages of an offer: at once with `pages`, or, with None, when `Pulling.use` names them. The
        other arguments are as for `receive`. `timeout` and `patience` count from the use."""

        def begin(used: Sequence[int]) -> Receiving:
            return self.receive(
                room,
                used,
                senders,
                held=held,
                prefill_tp=prefill_tp,
                prefill_layers=prefill_layers,
                timeout=timeout,
                patience=patience,
            )

        def decline(no_pages: bool) -> None:
            self.decline(room, senders, no_pages=no_pages)

        pulling = Pulling(begin, decline)
        if pages is not None:
            pulling.use(pages)
        return pulling

    def receive(
        self,
        room: int,
        pages: Sequence[int],
        senders: Sequence[str],
        *,
        held: int = 0,
        prefill_tp: int | None = None,
        prefill_layers: Sequence[int] | None = None,
        aux: bool = False,
        timeout: float = 300.0,
        patience: float | None = None,
    ) -> Receiving:
        """Receives a request's pages from prefill. `held`: the number of the request's first pages that this
        rank holds already. `pages`: this rank's pages for the rest of the request. If another open request
        receives into one of them, this request fails with `in_progress`. `senders`: the addresses of all ranks
        of prefill, "host:port", the ranks of the first stage first. `prefill_tp`: the number of prefill's
        tensor-parallel ranks, by default the senders of each stage. `prefill_layers`: the number of layers of
        each stage of prefill, by default those of this session. `aux`: whether to ask for the slot of metadata.
        `timeout`: the longest time of the request, in seconds. `patience`: how long prefill may take to open
        its room, in seconds, 30 by default. Raises InvalidArgumentError for a page that does not exist or is
        named twice, and for an address that is no "host:port". It raises the same error for numbers of ranks or
        layers that do not fit."""
        stages = self._stages if prefill_layers is None else list(prefill_layers)
        ranks = max(1, len(senders) // max(1, len(stages))) if prefill_tp is None else prefill_tp
        native = self._native.receive(
            room, list(pages), held, list(senders), ranks, stages, aux, timeout, patience
        )
        return Receiving(native)

    def close(self) -> bool:
        """Ends all requests, and waits a few seconds until nothing touches the memory. Returns False when a
        peer may still touch it: do not free it then."""
        return self._native.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A with statement has no place for the answer.
        if not self.close():
            logger.error("a hand-off did not end in time: a peer may still touch the memory of this session")


class Bootstrap(_Closed):
    """The HTTP server where ranks register and find each other, in the dialects of vLLM, SGLang and
    chitu. It listens at `host` and `port`; port 0 means any free port. Raises OSError if it cannot listen."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._native = _native.HandoffBootstrap(host, port)

    @property
    def address(self) -> str:
        """The listening address: "host:port"."""
        return self._native.address

    def close(self) -> None:
        """Ends the server."""
        self._native.close()
