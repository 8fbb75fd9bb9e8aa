"""The workers' halves of the hand-off between vLLM engines: two of them move real bytes, without an engine."""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
from kvpool import handoff
from kvpool.vllm.handoff import Exchange, session_options
from kvpool.vllm.plan import Decline, Plan, Receive, Send
from kvpool.vllm.settings import Settings

PAGE = 16
PAGES = 12
LAYERS = 2
HEADS = 4
SOURCE = (3, 4, 9)
TARGET = (7, 1, 8)


class Rank:
    """A rank's memory, [layer][page][head][byte], and its worker's half."""

    def __init__(self, mode: str, rank: int, ranks: int, filled: bool, **options: Any):
        local = HEADS // ranks
        whole = numpy.arange(LAYERS * PAGES * HEADS * PAGE, dtype=numpy.uint8)
        whole = whole.reshape(LAYERS, PAGES, HEADS, PAGE) * 7 + 1
        mine = numpy.ascontiguousarray(whole[:, :, rank * local : (rank + 1) * local])
        self.whole = mine.copy()
        self.memory = mine if filled else numpy.zeros_like(mine)
        states = [
            handoff.State("kv", layer, self.memory[layer].ctypes.data, PAGES, HEADS, PAGE)
            for layer in range(LAYERS)
        ]
        self.session = handoff.Session(
            states, page_tokens=PAGE, tensor=(rank, ranks), pipeline=(0, [LAYERS]), **options
        )
        self.half = Exchange(self.session, mode, range(LAYERS), timeout=20.0)

    def wanted(self) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.uint8]]:
        """The memory after the hand-off."""
        wanted = numpy.zeros_like(self.whole)
        wanted[:, list(TARGET)] = self.whole[:, list(SOURCE)]
        return wanted


@pytest.fixture(params=["push", "pull", "delayed"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(mode: str) -> Iterator[tuple[Rank, Rank]]:
    ranks = Rank(mode, 0, 1, filled=True), Rank(mode, 0, 1, filled=False)
    yield ranks
    for rank in ranks:
        rank.half.close()


def sends(ranks: int = 1) -> Plan:
    return Plan("p", sends=(Send("a", 5, SOURCE, ranks),))


def receives(mode: str, senders: list[Rank]) -> Plan:
    addresses = tuple(sender.session.address for sender in senders)
    return Plan("p", receives=(Receive("a", 5, mode, addresses, len(senders), (LAYERS,), 0, TARGET),))


def compute(prefill: Rank, plan: Plan) -> None:
    """A step of prefill."""
    prefill.half.begin_sends(plan)
    # The last layer is not reported by itself: the end of the step reports it.
    for layer in range(LAYERS - 1):
        prefill.half.layer_computed(layer)
    prefill.half.step_ended()


def arrival(decode: Rank, seconds: float = 20.0) -> tuple[int, ...] | None:
    """Returns the blocks that did not arrive; None if the receive does not end in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if ended := decode.half.received():
            return ended["a"]
        time.sleep(0.01)
    return None


def gone(prefill: Rank, seconds: float = 20.0) -> bool:
    """Whether prefill's blocks become free."""
    end = time.monotonic() + seconds
    done = prefill.half.sent(["a"])
    while not done and time.monotonic() < end:
        time.sleep(0.01)
        done = prefill.half.sent([])
    return done == {"a"}


def test_blocks_arrive_and_prefill_gets_its_own_back(pair: tuple[Rank, Rank], mode: str) -> None:
    prefill, decode = pair
    compute(prefill, sends())
    assert prefill.half.is_sending("a")
    decode.half.begin_receives(receives(mode, [prefill]))
    assert arrival(decode) == ()
    assert (decode.memory == decode.wanted()).all()
    assert gone(prefill)
    assert not prefill.half.is_sending("a")


class JustEnding:
    """A receive that succeeds directly after the first check of it."""

    error = None

    def __init__(self) -> None:
        self._looks = 0

    def _is_over(self) -> bool:
        self._looks += 1
        return self._looks > 1

    @property
    def poll(self) -> handoff.Poll:
        return handoff.Poll.SUCCESS if self._is_over() else handoff.Poll.TRANSFERRING

    @property
    def released(self) -> bool:
        return self._is_over()


def test_blocks_that_arrive_between_two_looks_have_come(pair: tuple[Rank, Rank], mode: str) -> None:
    prefill, decode = pair
    decode.half.begin_receives(receives(mode, [prefill]))
    incoming = decode.half._incoming["a"]
    incoming.handle.abort()
    incoming.handle = JustEnding()
    assert arrival(decode) == ()


def test_decode_may_ask_first(pair: tuple[Rank, Rank], mode: str) -> None:
    prefill, decode = pair
    decode.half.begin_receives(receives(mode, [prefill]))
    assert decode.half.received() == {}
    compute(prefill, sends())
    assert arrival(decode) == ()
    assert (decode.memory == decode.wanted()).all()


def test_blocks_of_a_dead_prefill_are_bad_soon(pair: tuple[Rank, Rank], mode: str) -> None:
    prefill, decode = pair
    decode.half.begin_receives(receives(mode, [prefill]))
    time.sleep(0.3)
    prefill.half.close()
    began = time.monotonic()
    assert arrival(decode) == TARGET
    assert time.monotonic() - began < 3.0


def test_an_absent_prefill_is_noticed_soon(pair: tuple[Rank, Rank], mode: str) -> None:
    prefill, decode = pair
    plan = receives(mode, [prefill])
    prefill.half.close()
    decode.half.begin_receives(plan)
    assert arrival(decode, 5.0) == TARGET


def test_a_dropped_request_frees_both_ends(pair: tuple[Rank, Rank], mode: str) -> None:
    prefill, decode = pair
    compute(prefill, sends())
    prefill.half.begin_sends(Plan("p", dropped=frozenset("a")))
    assert gone(prefill)
    decode.half.begin_receives(receives(mode, [prefill]))
    decode.half.begin_sends(Plan("p", dropped=frozenset("a")))
    assert arrival(decode) == TARGET


def test_a_prompt_that_decode_does_not_take_frees_prefills_blocks(pair: tuple[Rank, Rank], mode: str) -> None:
    prefill, decode = pair
    compute(prefill, sends())
    decode.half.begin_receives(Plan("p", declines=(Decline("a", 5, (prefill.session.address,)),)))
    # Without the message prefill waits for its timeout of 20 s.
    assert gone(prefill, 5.0)


def test_a_receive_that_does_not_begin_frees_prefills_blocks(pair: tuple[Rank, Rank], mode: str) -> None:
    prefill, decode = pair
    compute(prefill, sends())
    (receive,) = receives(mode, [prefill]).receives
    decode.half.begin_receives(Plan("p", receives=(dataclasses.replace(receive, prefill_layers=(1 << 32,)),)))
    assert arrival(decode) == TARGET
    assert gone(prefill, 5.0)


def test_one_rank_declines_for_all() -> None:
    declined: list[int] = []
    session = types.SimpleNamespace(decline=lambda room, _senders, **_named: declined.append(room))
    for declines in (True, False):
        half = Exchange(session, "push", range(LAYERS), timeout=1.0, declines=declines)  # type: ignore[arg-type]
        half.begin_receives(Plan("p", declines=(Decline("a", 5, ("x:1",)),)))
    assert declined == [5]


def test_a_preempted_request_is_forgotten(pair: tuple[Rank, Rank], mode: str) -> None:
    prefill, _ = pair
    compute(prefill, sends())
    prefill.half.stop(["a"])
    assert not prefill.half.is_sending("a")
    assert prefill.half.sent([]) == set()
    # The request ends in a later step, and vLLM has not waited for it.
    assert prefill.half.sent(["a"]) == set()


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_each_end_waits_for_the_other_for_the_time_of_the_setting(mode: str) -> None:
    asked: list[dict[str, Any]] = []
    session = types.SimpleNamespace(
        **{name: lambda *_args, **named: asked.append(named) for name in ("send", "offer", "receive", "pull")}
    )
    half = Exchange(session, mode, range(LAYERS), timeout=123.0, declines=False)  # type: ignore[arg-type]
    half.begin_sends(sends())
    half.step_ended()
    half.begin_receives(Plan("p", receives=(Receive("a", 5, mode, ("x:1",), 1, (LAYERS,), 0, TARGET),)))
    assert [named["timeout"] for named in asked] == [123.0, 123.0]
    # An offer always waits until its timeout.
    assert [named.get("patience", 123.0) for named in asked] == [123.0, 123.0]
    assert "patience" in asked[1] and ("patience" in asked[0] or mode == "pull")


@pytest.mark.parametrize("released", [True, False])
def test_a_close_that_a_peer_outlasts_is_logged(released: bool, caplog: pytest.LogCaptureFixture) -> None:
    session = types.SimpleNamespace(close=lambda: released)
    half = Exchange(session, "push", range(LAYERS), timeout=1.0)  # type: ignore[arg-type]
    assert half.close() is released
    assert ("did not end in time" in caplog.text) is not released


def waiting(prefill: Rank, wanted: int, seconds: float = 20.0) -> bool:
    """Whether `wanted` offers wait for pins in time."""
    end = time.monotonic() + seconds
    while prefill.session.waiting() != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return prefill.session.waiting() == wanted


def test_p5_a_prompt_waits_while_the_prompts_before_it_pin_more_than_the_setting() -> None:
    settings = Settings.read({"handoff": "pull", "handoff_pin_limit": len(SOURCE) - 1})
    prefill = Rank("pull", 0, 1, filled=True, **session_options(settings, 0))
    decode = Rank("pull", 0, 1, filled=False)
    compute(prefill, Plan("p", sends=(Send("a", 5, SOURCE, 1), Send("b", 6, SOURCE, 1))))
    assert waiting(prefill, 1)
    assert prefill.session.pinned() == len(SOURCE)
    decode.half.begin_receives(receives("pull", [prefill]))
    assert arrival(decode) == ()
    assert (decode.memory == decode.wanted()).all()
    assert waiting(prefill, 0)
    for rank in (prefill, decode):
        rank.half.close()


def test_a_send_of_impossible_numbers_does_not_end_the_engine(pair: tuple[Rank, Rank]) -> None:
    prefill, _ = pair
    compute(prefill, Plan("p", sends=(Send("a", 5, SOURCE, 1 << 32),)))
    assert gone(prefill)


@pytest.mark.parametrize(
    "wrong", [{"prefill_layers": (1 << 32,)}, {"prefill_ranks": 1 << 32}, {"senders": ("\ud800",)}]
)
def test_a_receive_of_impossible_numbers_does_not_end_the_engine(
    pair: tuple[Rank, Rank], mode: str, wrong: dict[str, Any]
) -> None:
    prefill, decode = pair
    (receive,) = receives(mode, [prefill]).receives
    decode.half.begin_receives(Plan("p", receives=(dataclasses.replace(receive, **wrong),)))
    assert arrival(decode) == TARGET


@pytest.mark.parametrize(("prefills", "decodes"), [(2, 1), (1, 2)])
def test_numbers_of_ranks_may_differ(mode: str, prefills: int, decodes: int) -> None:
    senders = [Rank(mode, rank, prefills, filled=True) for rank in range(prefills)]
    takers = [Rank(mode, rank, decodes, filled=False) for rank in range(decodes)]
    for prefill in senders:
        compute(prefill, sends(decodes))
    for decode in takers:
        decode.half.begin_receives(receives(mode, senders))
    for decode in takers:
        assert arrival(decode) == ()
        assert (decode.memory == decode.wanted()).all()
    assert all(gone(prefill) for prefill in senders)
    for rank in (*senders, *takers):
        rank.half.close()


def test_a_prefill_that_died_before_decode_asks_again_is_noticed_soon(
    pair: tuple[Rank, Rank], mode: str
) -> None:
    prefill, decode = pair
    compute(prefill, sends())
    decode.half.begin_receives(receives(mode, [prefill]))
    assert arrival(decode) == ()
    plan = receives(mode, [prefill])
    prefill.half.close()
    # Decode has noticed the death before the next request.
    time.sleep(2.0)
    began = time.monotonic()
    decode.half.begin_receives(plan)
    assert arrival(decode) == TARGET
    assert time.monotonic() - began < 2.0
