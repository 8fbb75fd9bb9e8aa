"""Tests of the scheduler's half of the hand-off between vLLM engines, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvpool.vllm.handoff import Arrivals, Desk, Parameters, session_options
from kvpool.vllm.plan import Block, Decline, Move, Plan, Receive
from kvpool.vllm.settings import Settings

PAGE = 16
PARAMS: dict[str, Any] = {"do_remote_prefill": True, "room": 7, "senders": ["10.0.0.1:9000"]}
GIVEN: dict[str, Any] = {"do_remote_decode": True, "room": 9}
DECLINE = Decline("a", 7, ("10.0.0.1:9000",))


def make_desk(**changes: Any) -> Desk:
    settings: dict[str, Any] = {"gives": True, "takes": True, "ranks": 1, "layers": [2], "decode_ranks": 1}
    desk = Desk("push", PAGE, **{**settings, **changes})
    desk.meet({(0, rank): f"10.0.0.2:{9000 + rank}" for rank in range(changes.get("ranks", 1))})
    return desk


def taken(desk: Desk, tokens: int, computed: int, blocks: list[int]) -> Receive:
    """Returns decode's request to prefill."""
    promised = desk.promised("a", PARAMS, tokens, computed)
    assert desk.allocated("a", blocks, promised) == promised
    (receive,) = desk.step()["receives"]
    assert isinstance(receive, Receive)
    return receive


def test_a_ranks_session_has_the_settings(tmp_path: Path) -> None:
    assert session_options(Settings.read({"handoff": "pull"}), 3) == {
        "host": "127.0.0.1",
        "port": 0,
        "secret": "",
        "pin_limit": None,
    }
    secret = tmp_path / "secret"
    secret.write_text("shared\n")
    given = {"handoff_port": 9000, "handoff_secret_file": str(secret), "handoff_pin_limit": 4096}
    options = session_options(Settings.read(given), 3)
    assert (options["port"], options["secret"], options["pin_limit"]) == (9003, "shared", 4096)


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "4096"])
def test_a_limit_of_pins_that_is_no_number_above_zero_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="handoff_pin_limit"):
        Settings.read({"handoff_pin_limit": wrong})


def test_decode_asks_for_the_pages_that_neither_it_nor_the_pool_has() -> None:
    desk = make_desk()
    assert desk.promised("a", PARAMS, tokens=50, computed=32) == 18
    receive = taken(desk, tokens=50, computed=32, blocks=[5, 6, 7, 8, 9])
    assert (receive.room, receive.held, receive.pages) == (7, 2, (7, 8))
    assert receive.senders == ("10.0.0.1:9000",)


def test_a_prompt_of_whole_pages_has_no_further_page() -> None:
    assert taken(make_desk(), tokens=48, computed=0, blocks=[1, 2, 3, 4]).pages == (1, 2, 3)


def test_a_request_asks_prefill_once() -> None:
    desk = make_desk()
    taken(desk, tokens=50, computed=0, blocks=[1, 2, 3, 4])
    assert desk.promised("a", PARAMS, tokens=50, computed=0) == 0
    desk.finished("a", whole=True)
    assert desk.promised("a", PARAMS, tokens=50, computed=0) == 50


def test_prefill_learns_of_a_request_that_ends_in_decodes_queue() -> None:
    desk = make_desk()
    # vLLM may abort a request before and after its first lookup.
    assert desk.finished("a", whole=False, params=PARAMS) == (False, None)
    assert desk.step()["declines"] == (DECLINE,)
    desk.promised("a", PARAMS, tokens=50, computed=0)
    assert desk.finished("a", whole=False, params=PARAMS) == (False, None)
    step = desk.step()
    assert (step["declines"], step["receives"], step["dropped"]) == ((DECLINE,), (), frozenset())
    assert desk.step()["declines"] == ()


def test_prefill_learns_once_of_a_prompt_that_decode_computes_itself() -> None:
    desk = make_desk()
    for _ in range(2):
        desk.refuse("a", PARAMS)
    assert desk.promised("a", PARAMS, tokens=50, computed=0) == 0
    desk.finished("a", whole=True, params=PARAMS)
    assert desk.step()["declines"] == (DECLINE,)
    assert desk.promised("a", {**PARAMS, "tokens": 49}, tokens=50, computed=0) == 0
    assert desk.step()["declines"] == (DECLINE,)


def test_a_prompt_that_decode_has_asked_for_is_not_declined() -> None:
    desk = make_desk()
    taken(desk, tokens=50, computed=0, blocks=[1, 2, 3, 4])
    desk.refuse("a", PARAMS)
    desk.finished("a", whole=False, params=PARAMS)
    assert desk.step()["declines"] == ()


@pytest.mark.parametrize("params", [None, {}, {**PARAMS, "do_remote_prefill": False}, {**PARAMS, "senders": []}])
def test_a_request_without_a_room_of_prefill_is_not_declined(params: dict[str, Any] | None) -> None:
    desk = make_desk()
    desk.finished("a", whole=False, params=params)
    assert desk.step()["declines"] == ()
    desk = make_desk(takes=False)
    desk.finished("a", whole=False, params=PARAMS)
    assert desk.step()["declines"] == ()


def test_a_request_without_parameters_is_not_handed_off() -> None:
    desk = make_desk()
    assert desk.promised("a", None, tokens=50, computed=0) == 0
    assert desk.promised("a", {"do_remote_prefill": False}, tokens=50, computed=0) == 0
    assert make_desk(takes=False).promised("a", PARAMS, tokens=50, computed=0) == 0


def test_a_prompt_of_another_length_is_computed() -> None:
    assert make_desk().promised("a", {**PARAMS, "tokens": 49}, tokens=50, computed=0) == 0
    assert make_desk().promised("a", {**PARAMS, "tokens": 50}, tokens=50, computed=0) == 50


@pytest.mark.parametrize(
    "wrong",
    [
        {"room": None},
        {"room": True},
        {"room": -1},
        {"room": 1 << 63},
        {"senders": []},
        {"senders": "10.0.0.1:9000"},
        {"senders": [9000]},
        {"prefill_ranks": 2},
        {"prefill_layers": [1, 1]},
        {"prefill_layers": [0]},
        {"prefill_layers": [1 << 32]},
        {"prefill_layers": [40_000, 40_000], "senders": ["10.0.0.1:9000", "10.0.0.1:9001"]},
        {"mode": "mooncake"},
        {"tokens": "50"},
    ],
)
def test_wrong_parameters_are_named_and_the_prompt_is_computed(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kv_transfer_params"):
        Parameters.read({**PARAMS, **wrong}, "push")
    assert make_desk().promised("a", {**PARAMS, **wrong}, tokens=50, computed=0) == 0


def test_prefill_gives_a_prompt_in_the_step_that_computes_its_end() -> None:
    desk = make_desk()
    for computed_tokens in (16, 32, 50, 50):
        desk.computed("a", GIVEN, 50, computed_tokens, lambda: [1, 2, 3, 4, 5], 1)
        sends = desk.step()["sends"]
        if computed_tokens < 50:
            assert sends == ()
        elif sends:
            (send,) = sends
            assert (send.room, send.pages, send.decode_ranks) == (9, (1, 2, 3, 4), 1)
    stays, answer = desk.finished("a", whole=True)
    assert stays
    assert answer is not None
    parameters = Parameters.read(answer, "pull")
    assert parameters == Parameters(9, ("10.0.0.2:9000",), 1, (2,), "push", 50)


@pytest.mark.parametrize("wrong", [0, -1, 65_537, 1 << 32, 1 << 64, True, "2", [2]])
def test_wrong_decode_ranks_do_not_leave_the_scheduler(wrong: Any) -> None:
    desk = make_desk(decode_ranks=2)
    desk.computed("a", {**GIVEN, "decode_ranks": wrong}, 50, 50, lambda: [1, 2, 3, 4], 1)
    assert desk.step()["sends"][0].decode_ranks == 2


def test_a_step_gives_a_prompt_once() -> None:
    desk = make_desk()
    for _ in range(2):
        desk.computed("a", GIVEN, 50, 50, lambda: [1, 2, 3, 4], 1)
    assert len(desk.step()["sends"]) == 1


def test_prefill_chooses_a_room_if_the_proxy_does_not() -> None:
    rooms = set()
    for request in "ab":
        desk = make_desk()
        desk.computed(request, {"do_remote_decode": True}, 50, 50, lambda: [1, 2, 3, 4], 1)
        rooms.add(desk.step()["sends"][0].room)
    assert len(rooms) == 2
    assert all(0 <= room < 1 << 63 for room in rooms)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True, "room": "nine"}])
def test_prefill_gives_nothing_without_parameters(params: dict[str, Any] | None) -> None:
    desk = make_desk()
    desk.computed("a", params, 50, 50, lambda: [1, 2, 3, 4], 1)
    assert desk.step()["sends"] == ()
    assert desk.finished("a", whole=True) == (False, None)


def test_a_request_that_answers_more_than_one_token_is_not_given() -> None:
    desk = make_desk()
    desk.computed("a", GIVEN, 50, 50, lambda: [1, 2, 3, 4], 2)
    assert desk.step()["sends"] == ()


def test_an_aborted_request_drops_its_hand_off() -> None:
    desk = make_desk()
    desk.computed("a", GIVEN, 50, 50, lambda: [1, 2, 3, 4], 1)
    desk.step()
    assert desk.finished("a", whole=False) == (True, None)
    assert desk.step()["dropped"] == {"a"}
    taken(desk, tokens=50, computed=0, blocks=[1, 2, 3, 4])
    desk.finished("a", whole=False)
    assert desk.step()["dropped"] == {"a"}


def test_a_preempted_request_gives_its_prompt_again() -> None:
    desk = make_desk()
    desk.computed("a", GIVEN, 50, 50, lambda: [1, 2, 3, 4], 1)
    desk.step()
    desk.preempted(["a"])
    desk.step()
    desk.computed("a", GIVEN, 50, 50, lambda: [5, 6, 7, 8], 1)
    assert desk.step()["sends"][0].pages == (5, 6, 7, 8)


@pytest.mark.parametrize("was_given", [False, True])
def test_a_request_that_is_preempted_and_computed_in_one_step_is_given(was_given: bool) -> None:
    desk = make_desk()
    desk.computed("a", GIVEN, 50, 50 if was_given else 32, lambda: [1, 2, 3, 4], 1)
    desk.step()
    desk.preempted(["a"])
    desk.computed("a", GIVEN, 50, 50, lambda: [5, 6, 7, 8], 1)
    (send,) = desk.step()["sends"]
    assert send.pages == (5, 6, 7, 8)
    stays, answer = desk.finished("a", whole=True)
    assert stays
    assert answer is not None and answer["room"] == GIVEN["room"]


def test_a_request_whose_blocks_did_not_arrive_is_known() -> None:
    desk = make_desk()
    taken(desk, tokens=50, computed=0, blocks=[1, 2, 3, 4])
    assert desk.arrived(["a", "b"], [4]) == {"a"}
    taken(desk := make_desk(), tokens=50, computed=0, blocks=[1, 2, 3, 4])
    assert desk.arrived(["a"], [5]) == set()


def test_a_bad_block_that_one_rank_reports_before_the_load_has_ended_is_known() -> None:
    desk = make_desk()
    taken(desk, tokens=50, computed=0, blocks=[1, 2, 3, 4])
    assert desk.arrived([], [4]) == {"a"}
    assert desk.arrived(["a"], []) == set()
    # The request is forgotten with the end of its load.
    assert desk.arrived([], [4]) == set()


def test_senders_are_all_ranks_of_the_first_stage_and_then_of_the_next() -> None:
    desk = make_desk(ranks=2, layers=[1, 1])
    desk.meet({(1, 0): "c:1", (0, 1): "b:1", (1, 1): "d:1", (0, 0): "a:1"})
    desk.computed("a", GIVEN, 50, 50, lambda: [1, 2, 3, 4], 1)
    _, answer = desk.finished("a", whole=True)
    assert answer is not None
    assert (answer["senders"], answer["prefill_ranks"]) == (["a:1", "b:1", "c:1", "d:1"], 2)


def test_a_load_has_ended_when_all_its_parts_have() -> None:
    arrivals = Arrivals()
    move = Move("a", (Block(0, 1, b"1"),))
    receive = Receive("a", 1, "push", ("x:1",), 1, (), 1, (2, 3))
    arrivals.begin(Plan("p", loads=(move,), receives=(receive,)))
    assert arrivals.ended([("a", [])]) == {}
    assert arrivals.ended([("a", [2, 3])]) == {"a": {2, 3}}
    arrivals.begin(Plan("p", loads=(move,)))
    assert arrivals.ended([("a", [])]) == {"a": set()}
