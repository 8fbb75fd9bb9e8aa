"""Hand-off: a prompt's blocks go straight from the engine that computed them to the engine that decodes.

```
 proxy ──── request, do_remote_decode ───► prefill's scheduler (Desk) ──Send──► its workers (Exchange)
   │  ◄──── answer with the room ────────────┘                                       │ kvpool.handoff
   └─────── request, room and senders ───► decode's scheduler (Desk) ─Receive─► its workers (Exchange)
```

The parameters travel in vLLM's `kv_transfer_params`. A request with `do_remote_decode` is prefill's. Its answer
has the parameters of decode's request, with `do_remote_prefill`. So a proxy only passes them on. A proxy that
knows prefill's addresses may also choose the `room` and send both requests at the same time.

`Desk`, `Parameters` and `Arrivals` are pure. `Exchange` moves bytes.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import kvpool
from kvpool import handoff
from kvpool.vllm.plan import Decline, Plan, Receive, Send
from kvpool.vllm.settings import Settings

logger = logging.getLogger(__name__)

MODES = ("push", "pull", "delayed")
_ROOMS = 1 << 63
_MAX_RANKS = 1024
"""The most ranks of decode that a client may name. Prefill computes a share for each of them."""
_MAX_LAYERS = 65_536
"""The most layers of a model, because a client may name any number."""
_STOP_SECONDS = 5.0
"""How long `stop` waits for a preempted request's hand-off to release its blocks."""
_LOOK = 0.002
_REFUSED = (kvpool.Error, OverflowError, TypeError, ValueError)
"""The exceptions of a native call that refuses a value of a client."""

Blocks = Callable[[], Sequence[int]]
"""Returns the blocks of a request."""

Handle = TypeVar("Handle")


def session_options(settings: Settings, place: int) -> dict[str, Any]:
    """The arguments of a rank's `handoff.Session` that come from the settings. `place` is the rank's number
    over all stages of this engine."""
    secret = settings.handoff_secret_file
    return {
        "host": settings.handoff_host,
        "port": settings.handoff_port + place if settings.handoff_port else 0,
        "secret": Path(secret).read_text().strip() if secret else "",
        "pin_limit": settings.handoff_pin_limit or None,
    }


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The part of `kv_transfer_params` that concerns decode."""

    room: int
    senders: tuple[str, ...]
    prefill_ranks: int
    prefill_layers: tuple[int, ...] = ()
    mode: str = "push"
    tokens: int | None = None
    """The length of the prompt that prefill computed."""

    @classmethod
    def read(cls, given: Mapping[str, Any], mode: str) -> Parameters:
        """Reads the parameters. `mode` is used if they name none. Raises ValueError, with the name, for an
        invalid one."""
        room, senders = given.get("room"), given.get("senders")
        if not _is_number(room) or not 0 <= room < _ROOMS:
            raise ValueError(f"kv_transfer_params: room is a number below 2^63, not {room!r}")
        if not isinstance(senders, list | tuple) or not senders or not all(isinstance(one, str) for one in senders):
            raise ValueError(f"kv_transfer_params: senders are addresses of prefill's ranks, not {senders!r}")
        layers = given.get("prefill_layers") or ()
        if not isinstance(layers, list | tuple) or not all(_is_number(one) and one > 0 for one in layers):
            raise ValueError(f"kv_transfer_params: prefill_layers are numbers of layers, not {layers!r}")
        if sum(layers) > _MAX_LAYERS:
            raise ValueError(f"kv_transfer_params: prefill_layers are at most {_MAX_LAYERS} together, not {layers!r}")
        stages = max(len(layers), 1)
        ranks = given.get("prefill_ranks", len(senders) // stages)
        if not _is_number(ranks) or ranks * stages != len(senders):
            raise ValueError(f"kv_transfer_params: {len(senders)} senders are not {ranks!r} ranks x {stages} stages")
        mode = given.get("mode", mode)
        if mode not in MODES:
            raise ValueError(f"kv_transfer_params: mode is one of {', '.join(MODES)}, not {mode!r}")
        tokens = given.get("tokens")
        if tokens is not None and not _is_number(tokens):
            raise ValueError(f"kv_transfer_params: tokens is a number, not {tokens!r}")
        return cls(room, tuple(senders), ranks, tuple(layers), mode, tokens)

    def answer(self) -> dict[str, Any]:
        """Returns the `kv_transfer_params` of decode's request."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "room": self.room,
            "senders": list(self.senders),
            "prefill_ranks": self.prefill_ranks,
            "prefill_layers": list(self.prefill_layers),
            "mode": self.mode,
            "tokens": self.tokens,
        }


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class Given:
    """A prompt that prefill hands off."""

    room: int
    tokens: int


class Desk:
    """The scheduler's half: which prompts are handed off in the next step.

    Calls for a request on decode: `promised` (repeated while it waits), `allocated`, `arrived`, `finished`. A call
    of `refuse` takes the place of the first three if the engine computes the prompt itself. Prefill learns of each
    prompt that decode does not ask for.

    Calls for a request on prefill: `computed` in each step, `finished`. In a step, `preempted` goes before
    `computed`, and `step` after it.
    """

    def __init__(
        self,
        mode: str,
        page_tokens: int,
        *,
        gives: bool,
        takes: bool,
        ranks: int,
        layers: Sequence[int],
        decode_ranks: int,
    ):
        """`ranks` is the number of this engine's tensor parallel ranks. `layers` are the numbers of layers of
        its stages."""
        self._mode = mode
        self._page_tokens = page_tokens
        self._gives = gives
        self._takes = takes
        self._ranks = ranks
        self._layers = tuple(layers)
        self._decode_ranks = decode_ranks
        self._addresses: tuple[str, ...] = ()
        self._promised: dict[str, tuple[Parameters, int, int]] = {}
        self._asked: set[str] = set()
        self._receiving: dict[str, Receive] = {}
        self._given: dict[str, Given] = {}
        self._sends: list[Send] = []
        self._receives: list[Receive] = []
        self._declines: list[Decline] = []
        self._dropped: set[str] = set()

    def meet(self, addresses: Mapping[tuple[int, int], str]) -> None:
        """Notes the addresses of this engine's ranks, by (stage, tensor parallel rank)."""
        self._addresses = tuple(addresses[place] for place in sorted(addresses))

    def promised(
        self, request: str, params: Mapping[str, Any] | None, tokens: int, computed: int
    ) -> int:
        """Returns how many of the prompt's `tokens` tokens come from prefill. The engine has the first
        `computed` tokens in its memory or in the pool, and only their whole pages count. Each request asks
        prefill once."""
        if not self._may_ask(request, params):
            return 0
        assert params is not None, "invariant: a request without parameters asks for nothing"
        try:
            wanted = Parameters.read(params, self._mode)
        except ValueError as error:
            self._asked.add(request)
            logger.warning("request %s is computed, not taken from prefill: %s", request, error)
            return 0
        if wanted.tokens is not None and wanted.tokens != tokens:
            self.refuse(request, params)
            logger.warning(
                "request %s has %d tokens, prefill computed %d: it is computed again",
                request,
                tokens,
                wanted.tokens,
            )
            return 0
        held = computed // self._page_tokens
        self._promised[request] = (wanted, held, tokens)
        return tokens - held * self._page_tokens

    def refuse(self, request: str, params: Mapping[str, Any] | None) -> None:
        """The engine computes the prompt itself, so prefill need not keep its blocks. A second call has no
        effect."""
        if not self._may_ask(request, params):
            return
        assert params is not None, "invariant: a request without parameters asks for nothing"
        self._asked.add(request)
        try:
            wanted = Parameters.read(params, self._mode)
        except ValueError:
            # Without the room and the addresses prefill cannot be told.
            return
        self._declines.append(Decline(request, wanted.room, wanted.senders))

    def allocated(self, request: str, blocks: Sequence[int], load_tokens: int) -> int:
        """The engine has allocated room for `load_tokens` tokens. Returns how many of them come from
        prefill."""
        promised = self._promised.pop(request, None)
        if promised is None or load_tokens == 0:
            return 0
        wanted, held, tokens = promised
        self._asked.add(request)
        pages = tuple(blocks[held : -(-tokens // self._page_tokens)])
        receive = Receive(
            request,
            wanted.room,
            wanted.mode,
            wanted.senders,
            wanted.prefill_ranks,
            wanted.prefill_layers,
            held,
            pages,
        )
        self._receiving[request] = receive
        self._receives.append(receive)
        return tokens - held * self._page_tokens

    def arrived(self, requests: Iterable[str], bad_blocks: Iterable[int]) -> set[str]:
        """The loads of `requests` have ended. Returns the requests that have one of `bad_blocks`: they do not get
        all blocks from prefill."""
        bad = set(bad_blocks)
        # One rank may report a bad block steps before the load has ended on all ranks.
        lost = {
            request for request, receive in self._receiving.items() if not bad.isdisjoint(receive.pages)
        }
        for request in requests:
            self._receiving.pop(request, None)
        return lost

    def preempted(self, requests: Iterable[str]) -> None:
        """The requests have lost their blocks. vLLM may compute a request again in the same step."""
        for request in requests:
            self._given.pop(request, None)

    def computed(
        self,
        request: str,
        params: Mapping[str, Any] | None,
        tokens: int,
        computed_tokens: int,
        blocks: Blocks,
        answer_tokens: int,
    ) -> None:
        """After the step, `computed_tokens` of the prompt's `tokens` tokens are computed."""
        if not self._gives or not params or not params.get("do_remote_decode") or request in self._given:
            return
        if computed_tokens < tokens:
            return
        if answer_tokens != 1:
            # A second token would change the last page while the page is sent.
            logger.warning("request %s is not handed off: prefill answers 1 token, not %d", request, answer_tokens)
            return
        room = params.get("room")
        if room is None:
            room = secrets.randbits(63)
        elif not _is_number(room) or not 0 <= room < _ROOMS:
            logger.warning("request %s is not handed off: its room is no number below 2^63: %r", request, room)
            return
        ranks = params.get("decode_ranks")
        if ranks is None:
            ranks = self._decode_ranks
        elif not _is_number(ranks) or not 1 <= ranks <= _MAX_RANKS:
            logger.warning(
                "request %s goes to %d ranks of decode: decode_ranks is no number from 1 to %d: %r",
                request,
                self._decode_ranks,
                _MAX_RANKS,
                ranks,
            )
            ranks = self._decode_ranks
        pages = tuple(blocks()[: -(-tokens // self._page_tokens)])
        self._given[request] = Given(room, tokens)
        self._sends.append(Send(request, room, pages, ranks))

    def finished(
        self, request: str, whole: bool, params: Mapping[str, Any] | None = None
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. Returns whether its blocks must stay until the workers have sent them, and the
        `kv_transfer_params` of its answer. `whole` is false for a request that was aborted. `params` are the
        request's own `kv_transfer_params`."""
        # A request that is aborted in the engine's queue has not asked yet.
        self.refuse(request, params)
        self._promised.pop(request, None)
        self._asked.discard(request)
        if self._receiving.pop(request, None) is not None:
            self._dropped.add(request)
        given = self._given.pop(request, None)
        if given is None:
            return False, None
        if not whole:
            self._dropped.add(request)
            return True, None
        parameters = Parameters(
            given.room, self._addresses, self._ranks, self._layers, self._mode, given.tokens
        )
        return True, parameters.answer()

    def step(self) -> dict[str, Any]:
        """Returns the hand-off's fields of the plan of the next step."""
        sends, self._sends = tuple(self._sends), []
        receives, self._receives = tuple(self._receives), []
        declines, self._declines = tuple(self._declines), []
        dropped, self._dropped = frozenset(self._dropped), set()
        return {"sends": sends, "receives": receives, "declines": declines, "dropped": dropped}

    def _may_ask(self, request: str, params: Mapping[str, Any] | None) -> bool:
        """Whether prefill hands the request's prompt off to this engine, and this engine has not decided yet."""
        is_given = self._takes and params is not None and bool(params.get("do_remote_prefill"))
        return is_given and request not in self._asked


@dataclasses.dataclass
class _Outgoing:
    send: Send
    handle: handoff.Sending | handoff.Offering | None
    """`None` if the hand-off did not begin."""
    layers: set[int] = dataclasses.field(default_factory=set)
    """The layers that were named as computed."""
    is_given_up: bool = False
    """Whether a call of the handle failed."""

    def computed(self, layer: int) -> None:
        """Names a computed layer of a push."""
        pages = len(self.send.pages)
        self._tell(lambda handle: handle.produced(0, pages, layer, 1))

    def finish(self) -> None:
        """Ends a push after its last layer."""
        self._tell(lambda handle: handle.finish())

    def _tell(self, call: Callable[[handoff.Sending], None]) -> None:
        """Calls the handle. A failure ends the hand-off, but not the engine."""
        if self.is_given_up or not isinstance(self.handle, handoff.Sending):
            return
        try:
            call(self.handle)
        except kvpool.Error as error:
            logger.warning("request %s is not handed off to decode: %s", self.send.request, error)
            self.is_given_up = True
            self.handle.abort()


@dataclasses.dataclass
class _Incoming:
    receive: Receive
    handle: handoff.Receiving | handoff.Pulling | None
    began: float


class Exchange:
    """A worker's half: performs the hand-offs of each step over the session of its rank.

    Calls in a step: `begin_sends`, `layer_computed` for each layer, `begin_receives`, `step_ended`, then `sent`
    and `received`.
    Blocks stay in use until `sent` or `received` names their request.
    """

    def __init__(
        self,
        session: handoff.Session,
        mode: str,
        layers: Sequence[int],
        timeout: float,
        *,
        declines: bool = True,
    ):
        """`layers` are the numbers of this rank's layers. `declines` is true for the one rank that tells prefill
        what this engine does not take."""
        self._session = session
        self._declines = declines
        self._layers = tuple(layers)
        self._mode = mode
        self._timeout = timeout
        self._outgoing: dict[str, _Outgoing] = {}
        self._incoming: dict[str, _Incoming] = {}
        self._now: list[_Outgoing] = []
        self._over: set[str] = set()
        self._stopped: set[str] = set()

    def begin_sends(self, plan: Plan) -> None:
        """Starts the pushes of the step, so that they can go layer by layer. Aborts hand-offs of requests that
        ended early."""
        for send in plan.sends:
            outgoing = _Outgoing(send, self._send(send) if self._mode == "push" else None)
            self._outgoing[send.request] = outgoing
            self._now.append(outgoing)
        for request in plan.dropped:
            self._abort(request)

    def begin_receives(self, plan: Plan) -> None:
        """Starts the plan's receives. Tells prefill which prompts this engine does not take."""
        for receive in plan.receives:
            handle = self._receive(receive)
            self._incoming[receive.request] = _Incoming(receive, handle, time.monotonic())
            if handle is None:
                self._decline(Decline(receive.request, receive.room, receive.senders))
        for decline in plan.declines:
            self._decline(decline)

    def layer_computed(self, layer: int) -> None:
        """Names a layer that the step has computed, for the prompts that end in this step."""
        for outgoing in self._now:
            if layer not in outgoing.layers:
                outgoing.layers.add(layer)
                outgoing.computed(layer)

    def step_ended(self) -> None:
        """Ends the step's hand-offs of prompts: all layers are computed."""
        for layer in self._layers:
            # A layer whose attention does not call the connector was not named yet.
            self.layer_computed(layer)
        ended, self._now = self._now, []
        for outgoing in ended:
            if self._mode != "push":
                outgoing.handle = self._offer(outgoing.send)
            else:
                outgoing.finish()

    def stop(self, requests: Iterable[str]) -> None:
        """Ends the hand-offs of these requests. Returns when no hand-off touches their blocks any more, or
        after a logged timeout."""
        for request in requests:
            self._abort(request)
            outgoing, incoming = self._outgoing.pop(request, None), self._incoming.pop(request, None)
            self._over.discard(request)
            if outgoing is not None:
                self._stopped.add(request)
            for one in (outgoing, incoming):
                if one is not None and not _released_within(one.handle, _STOP_SECONDS):
                    logger.error("the blocks of request %s are reused, but a hand-off may touch them", request)

    def is_sending(self, request: str) -> bool:
        """Whether `sent` has yet to return this request."""
        return request in self._outgoing

    def sent(self, over: Iterable[str]) -> set[str]:
        """Returns the ended requests whose blocks are free. `over`: the requests that ended since the last
        call."""
        ended = set(over)
        # The scheduler waits for a request that ended before its preemption was reported to this worker.
        stopped = ended & self._stopped
        self._stopped.clear()
        self._over.update(request for request in ended if request in self._outgoing)
        done = {request for request in self._over if _is_free(self._outgoing[request].handle)}
        for request in done:
            outgoing = self._outgoing.pop(request)
            error = None if outgoing.handle is None else outgoing.handle.error
            if error is not None:
                logger.warning("request %s was not handed off to decode: %s", request, error)
        self._over -= done
        return done | stopped

    def received(self) -> dict[str, tuple[int, ...]]:
        """Returns the requests whose receive has ended, with the blocks that did not arrive."""
        ended: dict[str, tuple[int, ...]] = {}
        for request, incoming in list(self._incoming.items()):
            handle, pages = incoming.handle, incoming.receive.pages
            # This question comes first: a receive that succeeds between the two questions has not failed.
            is_free = _is_free(handle)
            came = handle is not None and handle.poll == handoff.Poll.SUCCESS
            if came or is_free:
                del self._incoming[request]
                ended[request] = () if came else pages
                if not came:
                    logger.warning(
                        "request %s: %d blocks did not come from prefill within %.3f s, they are computed: %s",
                        request,
                        len(pages),
                        time.monotonic() - incoming.began,
                        "it did not begin" if handle is None else handle.error,
                    )
        return ended

    def close(self) -> bool:
        """Ends all hand-offs. Returns False, and logs an error, when a peer may still touch the memory of the KV
        cache."""
        released = self._session.close()
        if not released:
            logger.error(
                "a hand-off did not end in time: another engine may still read or write this rank's KV cache. "
                "Do not use this memory again before this process has ended"
            )
        return released

    def _send(self, send: Send) -> handoff.Sending | None:
        return _begun(
            send.request,
            lambda: self._session.send(
                send.room,
                send.pages,
                decode_tp=send.decode_ranks,
                timeout=self._timeout,
                # A busy decode engine asks late.
                patience=self._timeout,
            ),
        )

    def _offer(self, send: Send) -> handoff.Offering | None:
        return _begun(
            send.request,
            lambda: self._session.offer(
                send.room, send.pages, decode_tp=send.decode_ranks, timeout=self._timeout
            ),
        )

    def _receive(self, receive: Receive) -> handoff.Receiving | handoff.Pulling | None:
        if receive.mode == "push":
            return _begun(receive.request, lambda: self._take(receive))
        return _begun(receive.request, lambda: self._pull(receive))

    def _take(self, receive: Receive) -> handoff.Receiving:
        return self._session.receive(
            receive.room,
            receive.pages,
            receive.senders,
            held=receive.held,
            prefill_tp=receive.prefill_ranks,
            prefill_layers=receive.prefill_layers or None,
            timeout=self._timeout,
            # If a proxy sends both requests at the same time, prefill may still queue or compute the prompt.
            patience=self._timeout,
        )

    def _pull(self, receive: Receive) -> handoff.Pulling:
        is_delayed = receive.mode == "delayed"
        pulling = self._session.pull(
            receive.room,
            None if is_delayed else receive.pages,
            receive.senders,
            held=receive.held,
            prefill_tp=receive.prefill_ranks,
            prefill_layers=receive.prefill_layers or None,
            timeout=self._timeout,
            # If a proxy sends both requests at the same time, prefill may still queue or compute the prompt.
            patience=self._timeout,
        )
        if is_delayed:
            # vLLM has allocated the blocks already, so they are used at once.
            pulling.use(receive.pages)
        return pulling

    def _decline(self, decline: Decline) -> None:
        """Frees prefill's blocks. Without this message prefill keeps them until its timeout."""
        if not self._declines:
            return
        try:
            self._session.decline(decline.room, decline.senders, no_pages=False)
        except _REFUSED as error:
            logger.warning("prefill keeps the blocks of request %s for a time: %s", decline.request, error)

    def _abort(self, request: str) -> None:
        for one in (self._outgoing.get(request), self._incoming.get(request)):
            if one is not None and one.handle is not None:
                one.handle.abort()


class Arrivals:
    """Joins the parts of a request's load: the part from the pool, and the part from prefill."""

    def __init__(self) -> None:
        self._parts: dict[str, int] = {}
        self._bad: dict[str, set[int]] = {}

    def begin(self, plan: Plan) -> None:
        """Counts the parts that the plan starts."""
        requests = [move.request for move in plan.loads] + [one.request for one in plan.receives]
        for request in requests:
            self._parts[request] = self._parts.get(request, 0) + 1

    def ended(self, parts: Iterable[tuple[str, Iterable[int]]]) -> dict[str, set[int]]:
        """Notes the parts that have ended, with the blocks that did not arrive. Returns the requests without
        further parts, with all their blocks that did not arrive."""
        whole: dict[str, set[int]] = {}
        for request, bad in parts:
            self._bad.setdefault(request, set()).update(bad)
            self._parts[request] = self._parts.get(request, 1) - 1
            if self._parts[request] <= 0:
                del self._parts[request]
                whole[request] = self._bad.pop(request)
        return whole

    def stop(self, requests: Iterable[str]) -> None:
        """Forgets requests that lost their blocks."""
        for request in requests:
            self._parts.pop(request, None)
            self._bad.pop(request, None)


def _begun(request: str, start: Callable[[], Handle]) -> Handle | None:
    """Returns the handle of a hand-off; `None` if the hand-off does not begin.

    A client chose parts of the arguments. A value that the native call refuses must not end the engine.
    """
    try:
        return start()
    except _REFUSED as error:
        logger.warning("the hand-off of request %s does not begin: %s", request, error)
        return None


def _is_free(handle: Any) -> bool:
    return handle is None or bool(handle.released)


def _released_within(handle: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not _is_free(handle):
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK)
    return True
