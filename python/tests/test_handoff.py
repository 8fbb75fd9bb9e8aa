"""Hand-offs between sessions of this process, and with a process that is killed."""

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import kvpool
import numpy as np
import pytest
from kvpool import handoff

PAGE = 16 * 4 * 64
WAIT = 30.0


def memory(fill: int | None = None) -> np.ndarray:
    """Eight pages; distinct bytes by default."""
    if fill is None:
        return np.random.default_rng(7).integers(0, 256, 8 * PAGE, dtype="uint8")
    return np.full(8 * PAGE, fill, dtype="uint8")


def state(of: np.ndarray, ranks: int = 1) -> handoff.State:
    pages = 8 * ranks
    return handoff.State("k", layer=0, base=of.ctypes.data, pages=pages, outer=16, parts=4, part_bytes=64)


def session(of: np.ndarray, **settings: object) -> handoff.Session:
    return handoff.Session([state(of)], page_tokens=16, **settings)


class Outlasted(handoff.Session):
    """A session that says that a peer outlasts its end."""

    def close(self) -> bool:
        super().close()
        return False


@pytest.mark.parametrize(("kind", "is_logged"), [(handoff.Session, False), (Outlasted, True)])
def test_a_with_statement_that_a_peer_outlasts_is_logged(
    kind: type[handoff.Session], is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    here = memory()
    with kind([state(here)], page_tokens=16):
        pass
    assert ("did not end in time" in caplog.text) is is_logged


def test_a_push_moves_its_pages_and_the_metadata() -> None:
    here, there = memory(), memory(0)
    with session(here) as prefill, session(there) as decode:
        receiving = decode.receive(7, [5, 6], [prefill.address], held=1, aux=True)
        assert receiving.poll in (handoff.Poll.BOOTSTRAPPING, handoff.Poll.WAITING_FOR_INPUT)
        sending = prefill.send(7, [2, 0, 1])
        assert prefill.pinned() == 3
        sending.produced(0, 2)
        sending.produced(2, 1)
        sending.finish(b"\x2a")
        assert receiving.wait(WAIT) is handoff.Poll.SUCCESS, receiving.error
        assert sending.wait(WAIT) is handoff.Poll.SUCCESS
        assert receiving.released and sending.released
        assert prefill.pinned() == 0
    assert (there[5 * PAGE : 7 * PAGE] == here[: 2 * PAGE]).all()
    assert not there[: 5 * PAGE].any() and not there[7 * PAGE :].any()
    layout = handoff.AuxLayout()
    aux = receiving.aux
    assert aux is not None and len(aux) == layout.slot_bytes and aux[0] == 0x2A
    begin, _ = layout.range("room")
    assert int.from_bytes(aux[begin : begin + 8], "little") == 7


def test_two_ranks_of_prefill_fill_one_of_decode() -> None:
    # Heads 0 and 1 are on rank 0, heads 2 and 3 on rank 1.
    whole = memory().reshape(8, 16, 4, 64)
    halves = [np.ascontiguousarray(whole[:, :, 2 * rank : 2 * rank + 2]) for rank in range(2)]
    there = memory(0)
    prefill = [
        handoff.Session([state(half)], page_tokens=16, tensor=(rank, 2)) for rank, half in enumerate(halves)
    ]
    with prefill[0], prefill[1], session(there) as decode:
        sendings = [rank.send(1, [3, 4]) for rank in prefill]
        receiving = decode.receive(1, [0, 7], [rank.address for rank in prefill])
        for sending in sendings:
            sending.produced(0, 2)
            sending.finish()
        assert receiving.wait(WAIT) is handoff.Poll.SUCCESS, receiving.error
    came = there.reshape(whole.shape)
    assert (came[0] == whole[3]).all() and (came[7] == whole[4]).all()


def test_a_delayed_pull_holds_nothing_until_its_use() -> None:
    here, there = memory(), memory(0)
    with session(here) as prefill, session(there) as decode:
        offering = prefill.offer(3, [1, 2])
        pulling = decode.pull(3, None, [prefill.address])
        time.sleep(0.2)
        assert pulling.poll is handoff.Poll.WAITING_FOR_INPUT and pulling.released
        assert not there.any() and prefill.pinned() == 2
        pulling.use([0, 1])
        assert pulling.wait(WAIT) is handoff.Poll.SUCCESS, pulling.error
        assert offering.wait(WAIT) is handoff.Poll.SUCCESS
        assert (there[: 2 * PAGE] == here[PAGE : 3 * PAGE]).all()
        with pytest.raises(ValueError):
            pulling.use([0, 1])


def eventually(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_p1_and_p7_the_defaults_are_the_documents() -> None:
    of_session = inspect.signature(handoff.Session).parameters
    assert (of_session["pin_reserve"].default, of_session["back_off"].default) == (2, 2.0)
    assert of_session["pin_limit"].default is None
    assert inspect.signature(handoff.Session.offer).parameters["timeout"].default == 360.0


def test_p5_an_offer_waits_while_98_of_100_pages_and_one_more_are_pinned() -> None:
    here, there = memory(), memory(0)
    with session(here, pin_limit=100) as prefill, session(there) as decode:
        offers = [prefill.offer(room, [0, 1]) for room in range(49)]
        eventually(lambda: prefill.pinned() == 98)
        last = prefill.offer(50, [2])
        eventually(lambda: prefill.pinned() == 99)
        waits = prefill.offer(51, [3])
        late = prefill.offer(52, [4], timeout=3.0)
        eventually(lambda: prefill.waiting() == 2)
        assert prefill.pinned() == 99 and waits.poll is handoff.Poll.BOOTSTRAPPING
        assert late.wait(WAIT) is handoff.Poll.FAILED and late.error == "full" and late.released
        pulling = decode.pull(0, [6, 7], [prefill.address])
        assert pulling.wait(WAIT) is handoff.Poll.SUCCESS, pulling.error
        eventually(lambda: (prefill.waiting(), prefill.pinned()) == (0, 98))
        pulling = decode.pull(51, [5], [prefill.address])
        assert pulling.wait(WAIT) is handoff.Poll.SUCCESS, pulling.error
        assert waits.wait(WAIT) is handoff.Poll.SUCCESS
        assert offers[0].wait(WAIT) is handoff.Poll.SUCCESS
        del offers, last
        eventually(lambda: prefill.pinned() == 0)
    assert (there[5 * PAGE : 6 * PAGE] == here[3 * PAGE : 4 * PAGE]).all()


def test_p6_a_pull_without_pages_ends_its_offer_and_the_next_pull_waits_two_seconds() -> None:
    here, there = memory(), memory(0)
    with session(here) as prefill, session(there) as decode:
        offers = [prefill.offer(room, [room]) for room in (1, 2)]
        pulling = decode.pull(1, None, [prefill.address])
        begin = time.monotonic()
        pulling.decline()
        assert pulling.poll is handoff.Poll.FAILED and pulling.error == "full"
        assert offers[0].wait(WAIT) is handoff.Poll.FAILED and offers[0].error == "full"
        with pytest.raises(ValueError):
            pulling.use([0])
        second = decode.pull(2, [0], [prefill.address])
        assert second.wait(WAIT) is handoff.Poll.SUCCESS, second.error
        assert time.monotonic() - begin >= 2.0
        assert (there[:PAGE] == here[2 * PAGE : 3 * PAGE]).all()


def test_a_delayed_pull_that_is_dropped_frees_its_offer() -> None:
    here, there = memory(), memory(0)
    with session(here) as prefill, session(there) as decode:
        offering = prefill.offer(3, [1, 2])
        decode.pull(3, None, [prefill.address]).abort()
        assert offering.wait(WAIT) is handoff.Poll.FAILED and offering.error == "draining"
        assert offering.released and prefill.pinned() == 0


def test_bad_arguments_have_typed_errors() -> None:
    here = memory()
    with pytest.raises(kvpool.InvalidArgumentError, match="reserve"):
        session(here, pin_limit=100, pin_reserve=101)
    with pytest.raises(kvpool.InvalidArgumentError, match="not memory"):
        handoff.Session([handoff.State("k", 0, 4096, 1, 1, 64)], page_tokens=16)
    with pytest.raises(kvpool.InvalidArgumentError, match="rule"):
        handoff.Session([handoff.State("k", 0, here.ctypes.data, 1, 1, 64, rule="half")], page_tokens=16)
    with pytest.raises(kvpool.InvalidArgumentError, match="does not exist"):
        session(here, tensor=(2, 2))
    with session(here) as one:
        with pytest.raises(kvpool.InvalidArgumentError, match="page"):
            one.send(1, [8])
        with pytest.raises(kvpool.InvalidArgumentError):
            one.receive(1, [0], [])
        with pytest.raises(kvpool.InvalidArgumentError):
            one.receive(1, [0], [one.address], prefill_tp=2**31)
        with pytest.raises(kvpool.InvalidArgumentError):
            one.send(1, [0], decode_tp=2**31)
        with pytest.raises(kvpool.InvalidArgumentError, match="twice"):
            one.receive(1, [0, 0], [one.address])
        sending = one.send(1, [0, 1])
        with pytest.raises(kvpool.Error) as repeated:
            one.send(1, [2])
        assert repeated.value.code == "in_progress"
        with pytest.raises(kvpool.InvalidArgumentError):
            sending.produced(1, 2)
        with pytest.raises(kvpool.InvalidArgumentError, match="0 of 2"):
            sending.finish()
        sending.produced(0, 2)
        with pytest.raises(kvpool.InvalidArgumentError, match="slot"):
            sending.finish(bytes(1 << 20))
    with pytest.raises(kvpool.ClosedError):
        one.send(2, [0])
    assert sending.poll is handoff.Poll.FAILED and sending.released


def test_an_int_out_of_range_is_an_invalid_argument() -> None:
    here = memory()
    with session(here) as one:
        sending = one.send(1, [0, 1])
        for wrong in (-1, 2**64):
            for call in (
                lambda number=wrong: one.send(number, [0]),
                lambda number=wrong: one.send(2, [number]),
                lambda number=wrong: one.send(2, [0], decode_tp=number),
                lambda number=wrong: one.offer(number, [0]),
                lambda number=wrong: one.receive(number, [0], [one.address]),
                lambda number=wrong: one.receive(2, [number], [one.address]),
                lambda number=wrong: one.receive(2, [0], [one.address], held=number),
                lambda number=wrong: one.receive(2, [0], [one.address], prefill_layers=[number]),
                lambda number=wrong: one.decline(number, [one.address]),
                lambda number=wrong: sending.produced(number, 1),
                lambda number=wrong: session(here, port=number),
                lambda number=wrong: session(here, pin_limit=number),
                lambda number=wrong: handoff.Session([state(here)], page_tokens=number),
                lambda number=wrong: handoff.AuxLayout(number),
                lambda number=wrong: handoff.Bootstrap(port=number),
            ):
                with pytest.raises(kvpool.InvalidArgumentError, match="out of range"):
                    call()


@pytest.mark.parametrize("address", ["foo", "foo:", ":80", "foo:0", "foo:65536", "foo:http", "::1", ""])
def test_an_address_that_no_peer_can_have_is_refused_at_once(address: str) -> None:
    here = memory()
    with session(here) as one, pytest.raises(kvpool.InvalidArgumentError, match="host:port"):
        one.receive(1, [0], [address])


def test_a_receive_without_layers_is_refused() -> None:
    here = memory()
    with session(here) as one, pytest.raises(kvpool.InvalidArgumentError):
        one.receive(1, [0], [one.address], prefill_layers=[])


def test_a_prefill_that_is_killed_fails_the_request_within_a_second() -> None:
    example = """
import sys, numpy as np
from kvpool import handoff
memory = np.zeros(8 * 4096, dtype="uint8")
state = handoff.State("k", layer=0, base=memory.ctypes.data, pages=8, outer=16, parts=4, part_bytes=64)
session = handoff.Session([state], page_tokens=16)
sending = session.send(1, [0, 1])
sending.produced(0, 1)
print(session.address, flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen([sys.executable, "-c", example], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        address = child.stdout.readline().decode().strip()
        there = memory(0)
        with session(there) as decode:
            receiving = decode.receive(1, [0, 1], [address])
            until = time.monotonic() + WAIT
            while receiving.poll is not handoff.Poll.TRANSFERRING:
                assert time.monotonic() < until, receiving.error
                time.sleep(0.001)
            begin = time.monotonic()
            os.kill(child.pid, signal.SIGKILL)
            assert receiving.wait(WAIT) is handoff.Poll.FAILED
            assert receiving.released and receiving.error == "unreachable"
            assert time.monotonic() - begin < 2.0
    finally:
        child.kill()
        child.wait()


def test_other_threads_go_on_while_a_session_that_is_garbage_ends() -> None:
    # The request is large, so that prefill is stopped within it. The end of decode's session waits for it.
    pages, page_bytes = 64, 4 << 20
    example = f"""
import sys, numpy as np
from kvpool import handoff
memory = np.full({pages * page_bytes}, 7, dtype="uint8")
state = handoff.State("k", 0, memory.ctypes.data, {pages}, 1, {page_bytes})
session = handoff.Session([state], page_tokens=16)
sending = session.send(1, range({pages}))
sending.produced(0, {pages})
print(session.address, flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen([sys.executable, "-c", example], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    ticks: list[float] = []
    is_over = threading.Event()

    def tick() -> None:
        while not is_over.wait(0.01):
            ticks.append(time.monotonic())

    ticking = threading.Thread(target=tick)
    try:
        assert child.stdout is not None
        address = child.stdout.readline().decode().strip()
        there = np.zeros(pages * page_bytes, dtype="uint8")
        decode = handoff.Session(
            [handoff.State("k", 0, there.ctypes.data, pages, 1, page_bytes)], page_tokens=16
        )
        receiving = decode.receive(1, range(pages), [address])
        until = time.monotonic() + WAIT
        while not there[::page_bytes].any():
            assert time.monotonic() < until, receiving.error
            time.sleep(0.0005)
        os.kill(child.pid, signal.SIGSTOP)
        ticking.start()
        begin = time.monotonic()
        ticks.append(begin)
        del decode
        took = time.monotonic() - begin
        time.sleep(0.1)
    finally:
        is_over.set()
        child.kill()
        child.wait()
    ticking.join()
    assert receiving.poll is handoff.Poll.FAILED
    assert took > 0.5, "the end waited for nothing: this test shows nothing"
    assert max(after - before for before, after in zip(ticks, ticks[1:], strict=False)) < 0.5


def test_the_page_of_the_hand_off_has_an_example_that_runs(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "operations" / "handoff.md"
    example = tmp_path / "example.py"
    example.write_text(page.read_text().split("```python\n")[1].split("```")[0])
    prefill = subprocess.Popen([sys.executable, str(example)], stdout=subprocess.PIPE, text=True)
    try:
        assert prefill.stdout is not None
        address = prefill.stdout.readline().strip()
        decode = subprocess.run(
            [sys.executable, str(example), address], capture_output=True, text=True, timeout=60, check=True
        )
        assert decode.stdout.split() == ["SUCCESS", "True"]
        assert prefill.stdout.readline().strip() == "SUCCESS"
        assert prefill.wait(timeout=60) == 0
    finally:
        prefill.kill()
        prefill.wait()


def test_the_bootstrap_server_answers() -> None:
    import urllib.request

    with handoff.Bootstrap() as server:
        with urllib.request.urlopen(f"http://{server.address}/health", timeout=10) as answer:
            assert answer.status == 200
