"""mooncake.engine between two real processes: the bytes that arrive, the refusals, and the results of every
call."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool._native import PeerEngine
from mooncake import _engine_session
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

MIB = 1 << 20
PEER = Path(__file__).with_name("engine_peer.py")
pattern = runpy.run_path(str(PEER))["pattern"]


class PeerProcess:
    """Another process with an engine of its own."""

    def __init__(self, env: dict[str, str] | None = None):
        self.process = subprocess.Popen(
            [sys.executable, str(PEER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            text=True,
        )
        assert self("initialize", "127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self.session: str = self("get_session_id")

    def begin(self, *call: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()

    def answer(self):
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the peer process has ended"
        return json.loads(line)

    def __call__(self, *call: object):
        self.begin(*call)
        return self.answer()

    def buffer(self, length: int, seed: int = 1) -> int:
        address = self("allocate_managed_buffer", length)
        assert address > 0
        assert self("fill", address, length, seed) == 0
        return address

    def suspend(self) -> None:
        """Stops the process. Returns when all of its threads have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def started(monkeypatch: pytest.MonkeyPatch | None = None, **env: str) -> TransferEngine:
    for name, value in env.items():
        assert monkeypatch
        monkeypatch.setenv(name, value)
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    engine = started()
    yield engine
    engine.close()


@pytest.fixture
def peer() -> Iterator[PeerProcess]:
    peer = PeerProcess()
    yield peer
    peer.stop()


def local(engine: TransferEngine, length: int, seed: int = 2) -> int:
    address = engine.allocate_managed_buffer(length)
    assert address > 0
    assert engine.write_bytes_to_buffer(address, pattern(length, seed), length) == 0
    return address


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("length", [1, 4096, 65537, 300_000, 20 * MIB])
def test_bytes_arrive_as_they_were_both_ways(engine, peer, length) -> None:
    there, here = peer.buffer(length, 1), local(engine, length, 2)
    assert engine.transfer_sync_write(peer.session, here, there, length) == 0
    assert peer("digest", there, length) == sha(pattern(length, 2))
    assert peer("fill", there, length, 3) == 0
    assert engine.transfer_sync_read(peer.session, here, there, length) == 0
    assert engine.read_bytes_from_buffer(here, length) == pattern(length, 3)


def test_a_transfer_of_256_mib_arrives_completely(engine, peer) -> None:
    length = 256 * MIB
    there, here = peer.buffer(length, 1), local(engine, length, 2)
    assert engine.transfer_sync_write(peer.session, here, there, length) == 0
    assert peer("digest", there, length) == sha(pattern(length, 2))


def test_opcodes_and_batches_move_the_ranges_they_name(engine, peer) -> None:
    there, here = peer.buffer(MIB, 1), local(engine, MIB, 2)
    part = 4096
    # Two ranges adjacent at the peer, one apart, and an empty one.
    buffers = [here + 8 * part, here, here + 2 * part, here]
    remotes = [there, there + part, there + 100 * part, there]
    lengths = [part, part, part, 0]
    want = bytearray(pattern(MIB, 1))
    source = pattern(MIB, 2)
    for buffer, remote, length in zip(buffers, remotes, lengths, strict=True):
        want[remote - there : remote - there + length] = source[buffer - here : buffer - here + length]
    assert engine.batch_transfer_sync_write(peer.session, buffers, remotes, lengths) == 0
    assert peer("digest", there, MIB) == sha(bytes(want))
    assert engine.batch_transfer_sync_read(peer.session, [here], [there], [MIB]) == 0
    assert engine.read_bytes_from_buffer(here, MIB) == bytes(want)
    assert engine.transfer_sync(peer.session, here, there + part, part, TransferOpcode.Write) == 0
    want[part : 2 * part] = want[:part]
    assert engine.batch_transfer_sync(peer.session, [here], [there], [MIB], TransferOpcode.Read) == 0
    assert engine.read_bytes_from_buffer(here, MIB) == bytes(want)
    assert engine.transfer_sync(peer.session, here, there, part, 7) == -1  # type: ignore[arg-type]


def test_memory_that_is_not_registered_is_not_touched(engine, peer) -> None:
    length = 40 * MIB
    there, here = peer.buffer(length, 1), local(engine, length, 2)
    for address in (there - 1, there + length - 8, there + length, 0, 8):
        assert engine.transfer_sync_write(peer.session, here, address, 16) == -1
        assert engine.transfer_sync_read(peer.session, here, address, 16) == -1
    # It is so large that it goes in pieces, and only its last piece would lie outside.
    assert engine.transfer_sync_write(peer.session, here, there + 1, length) == -1
    assert engine.batch_transfer_sync_write(peer.session, [here], [there + length - 8], [16]) == -1
    assert engine.transfer_sync_read(peer.session, here, there + 1, length) == -1
    assert peer("digest", there, length) == sha(pattern(length, 1))


def test_a_refused_range_is_logged_with_the_nearest_registered_range(engine, peer, caplog) -> None:
    there, here = peer.buffer(MIB, 1), local(engine, MIB, 2)
    outside = there + MIB - 8
    for transfer in (engine.transfer_sync_write, engine.transfer_sync_read):
        caplog.clear()
        assert transfer(peer.session, here, outside, 16) == -1
        assert f"16 bytes at {outside:#x}" in caplog.text
        assert f"{MIB} bytes at {there:#x}" in caplog.text
    assert peer("unregister_memory", there) == 0
    caplog.clear()
    assert engine.transfer_sync_read(peer.session, here, there, 16) == -1
    assert f"16 bytes at {there:#x}" in caplog.text and "registered no memory" in caplog.text


def test_unregistered_memory_is_refused_at_once(engine, peer) -> None:
    there, here = peer.buffer(MIB, 1), local(engine, MIB, 2)
    assert engine.transfer_sync_write(peer.session, here, there, 4096) == 0
    before = peer("digest", there, MIB)
    assert peer("unregister_memory", there) == 0
    assert peer("unregister_memory", there) == -1
    assert engine.transfer_sync_write(peer.session, here + 8192, there, 8192) == -1
    assert engine.transfer_sync_read(peer.session, here, there, 8192) == -1
    assert peer("digest", there, MIB) == before


def test_unregistering_waits_until_nothing_touches_the_range(engine, peer) -> None:
    """A range that was unregistered no longer changes, however many writes were in progress."""
    length = 16 * MIB
    there = peer.buffer(length, 1)
    here = local(engine, length, 2)
    stop = threading.Event()
    results: list[int] = []

    def write() -> None:
        while not stop.is_set():
            results.append(engine.transfer_sync_write(peer.session, here, there, length))
            if results[-1] != 0:
                return

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    while not results:
        time.sleep(0.01)
    assert peer("unregister_memory", there) == 0
    assert peer("fill", there, length, 9) == 0
    first = peer("digest", there, length)
    stop.set()
    for writer in writers:
        writer.join(30)
        assert not writer.is_alive()
    assert results[0] == 0 and -1 in results
    assert first == peer("digest", there, length) == sha(pattern(length, 9))


def test_a_wrong_or_missing_secret_moves_nothing(monkeypatch) -> None:
    peer = PeerProcess({"KVPOOL_ENGINE_SECRET": "right"})
    try:
        there = peer.buffer(MIB, 1)
        for secret, code in [("wrong", -1), ("", -1), ("right", 0)]:
            engine = started(monkeypatch, KVPOOL_ENGINE_SECRET=secret)
            here = local(engine, MIB, 2)
            before = peer("digest", there, MIB)
            assert engine.transfer_sync_write(peer.session, here, there, MIB) == code
            assert engine.transfer_sync_read(peer.session, here, there, MIB) == code
            assert engine.send_probe(peer.session) == code
            assert (engine.get_first_buffer_address(peer.session) == there) == (code == 0)
            if code:
                assert peer("digest", there, MIB) == before
            engine.close()
        assert peer("digest", there, MIB) == sha(pattern(MIB, 2))
    finally:
        peer.stop()


def wait_for_end(engine: TransferEngine, batch: int, seconds: float = 30.0) -> int:
    end = time.monotonic() + seconds
    while (status := engine.transfer_check_status(batch)) == 0:
        assert time.monotonic() < end, "the transfer does not end"
        time.sleep(0.002)
    return status


def test_background_transfers_say_how_they_stand(engine, peer) -> None:
    there, here = peer.buffer(4 * MIB, 1), local(engine, 4 * MIB, 2)
    write = engine.transfer_submit_write(peer.session, here, there, 4 * MIB)
    assert write > 0 and wait_for_end(engine, write) == 1
    assert engine.transfer_check_status(write) == 1
    assert peer("digest", there, 4 * MIB) == sha(pattern(4 * MIB, 2))
    assert peer("fill", there, 4 * MIB, 3) == 0
    reads = [
        engine.batch_transfer_async_read(peer.session, [here + at], [there + at], [MIB])
        for at in range(0, 4 * MIB, MIB)
    ]
    assert all(read > 0 for read in reads) and engine.get_batch_transfer_status(reads) == 0
    assert engine.read_bytes_from_buffer(here, 4 * MIB) == pattern(4 * MIB, 3)
    bad = engine.batch_transfer_async_write(peer.session, [here], [there + MIB], [4 * MIB])
    assert bad > 0 and wait_for_end(engine, bad) == -1
    good = engine.batch_transfer_async(peer.session, [here], [there], [16], TransferOpcode.Write)
    assert engine.get_batch_transfer_status([good, bad]) == -1
    assert engine.get_batch_transfer_status([good]) == 0
    assert engine.get_batch_transfer_status([]) == 0
    for unknown in (0, -1, 10**9, 1 << 70):
        assert engine.transfer_check_status(unknown) == -1
        assert engine.get_batch_transfer_status([unknown]) == -1


def test_a_stopped_peer_costs_no_more_than_the_deadline(monkeypatch, peer) -> None:
    engine = started(monkeypatch, KVPOOL_ENGINE_TIMEOUT="1")
    there, here = peer.buffer(64 * MIB, 1), local(engine, 64 * MIB, 2)
    assert engine.transfer_sync_write(peer.session, here, there, 16) == 0
    peer.suspend()
    begun = time.monotonic()
    assert engine.transfer_sync_write(peer.session, here, there, 64 * MIB) == -1
    assert engine.transfer_sync_read(peer.session, here, there, 16) == -1
    assert time.monotonic() - begun < 5
    batch = engine.transfer_submit_write(peer.session, here, there, 64 * MIB)
    assert wait_for_end(engine, batch, 5) == -2
    peer.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 10
    while engine.transfer_sync_write(peer.session, here, there, 16) != 0:
        assert time.monotonic() < deadline
    engine.close()


def test_a_stopped_peer_that_was_never_reached_costs_the_deadline(monkeypatch, peer) -> None:
    """The kernel would round a socket's timeout of 3 s up by as much as a quarter of a second."""
    engine = started(monkeypatch, KVPOOL_ENGINE_TIMEOUT="3")
    here = local(engine, 4096)
    peer.suspend()
    lasted = []
    for _ in range(3):
        begun = time.monotonic()
        assert engine.transfer_sync_write(peer.session, here, 4096, 16) == -1
        lasted.append(time.monotonic() - begun)
    # A busy machine may delay one of the calls.
    assert 2.9 < min(lasted) < 3.15
    engine.close()


def test_a_peer_that_dies_in_the_middle_fails_the_transfer(engine, peer) -> None:
    length = 256 * MIB
    there, here = peer.buffer(length, 1), engine.allocate_managed_buffer(length)
    # The peer is stopped first, so that it is certainly within the transfer.
    peer.suspend()
    batch = engine.transfer_submit_write(peer.session, here, there, length)
    time.sleep(0.3)
    assert engine.transfer_check_status(batch) == 0
    peer.process.kill()
    begun = time.monotonic()
    assert wait_for_end(engine, batch, 10) == -1
    assert engine.transfer_sync_write(peer.session, here, there, length) == -1
    assert engine.send_probe(peer.session) == -1
    assert time.monotonic() - begun < 10


def test_closing_in_the_middle_of_a_transfer_takes_no_memory_away(monkeypatch, peer) -> None:
    engine = started(monkeypatch, KVPOOL_ENGINE_TIMEOUT="4")
    length = 64 * MIB
    there, here = peer.buffer(length, 1), local(engine, length, 2)
    peer.suspend()
    assert engine.transfer_submit_write(peer.session, here, there, length) > 0
    engine.close()
    # The transfer continues to read the buffer: if it had been freed, this process would have ended.
    peer.process.send_signal(signal.SIGCONT)
    time.sleep(3)
    assert peer("send_probe", peer.session) == 0


def test_other_threads_run_while_close_waits_for_a_call(monkeypatch, peer) -> None:
    engine = started(monkeypatch, KVPOOL_ENGINE_TIMEOUT="4")
    length = 64 * MIB
    there, here = peer.buffer(length, 1), local(engine, length, 2)
    peer.suspend()
    codes: list[int] = []

    def write() -> None:
        codes.append(engine.transfer_sync_write(peer.session, here, there, length))

    # The write outlasts the 2 s that `close` waits for it.
    calls = [threading.Thread(target=write), threading.Thread(target=engine.close)]
    longest, last = 0.0, time.monotonic()
    for call in calls:
        call.start()
        time.sleep(0.2)
    while any(call.is_alive() for call in calls):
        time.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    # If a call kept the interpreter's lock, this thread would have stood still for as long as the call waits.
    assert codes == [-1] and longest < 1


def listener_of(port: int) -> int:
    """Returns this process's file descriptor that listens at a port."""
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    listens = "0A"
    inode = next(line[9] for line in lines if line[3] == listens and line[1].endswith(f":{port:04X}"))
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") == f"socket:[{inode}]":
                return int(number)
    raise AssertionError(f"no file descriptor listens at port {port}")


def runs_python_while_the_last_call_ends_the_session() -> bool:
    """Closes an engine during a call of another thread, which then ends the session. Returns whether this thread
    has run Python code between the end of the listener and the return of the call."""
    engine = PeerEngine("127.0.0.1", 0, "ends", "")
    # The end of the session waits for the thread of each connection.
    callers = [PeerEngine("127.0.0.1", 0, "calls", "") for _ in range(8)]
    for caller in callers:
        assert caller.first_registered(f"127.0.0.1:{engine.port()}", 10.0) is None
    listener = listener_of(engine.port())
    # A call through it keeps the interpreter's lock. The module `fcntl` releases the lock.
    libc = ctypes.PyDLL(None)
    ended: list[bool] = []

    def call(silent: str) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            engine.first_registered(silent, 3.0)
        ended.append(True)

    has_run = False
    with socket.create_server(("127.0.0.1", 0)) as silent:
        calling = threading.Thread(target=call, args=(f"127.0.0.1:{silent.getsockname()[1]}",))
        calling.start()
        time.sleep(0.1)
        # The call outlasts the 2 s that `close` waits for it.
        assert not engine.close()
        while not ended and not has_run:
            if libc.fcntl(listener, fcntl.F_GETFD) >= 0:
                time.sleep(1e-5)
            else:
                has_run = not ended
        calling.join(10)
    for caller in callers:
        caller.close()
    return has_run


def test_other_threads_run_while_the_last_call_of_a_closed_engine_ends_the_session() -> None:
    interval = sys.getswitchinterval()
    # No thread loses the interpreter's lock before it releases the lock itself.
    sys.setswitchinterval(30)
    try:
        assert any(runs_python_while_the_last_call_ends_the_session() for _ in range(3))
    finally:
        sys.setswitchinterval(interval)


def test_both_sides_write_to_each_other_from_eight_threads(engine, peer) -> None:
    size, threads, rounds = MIB, 8, 6
    there, here = peer.buffer(size * threads, 1), engine.allocate_managed_buffer(size * threads)
    sources = [local(engine, size, 100 + number) for number in range(threads)]
    their_source = peer.buffer(size * threads, 50)
    session = engine.get_session_id()
    failures: list[str] = []

    def work(number: int) -> None:
        for _ in range(rounds):
            if engine.transfer_sync_write(peer.session, sources[number], there + number * size, size):
                failures.append(f"write {number}")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for _ in range(rounds):
        if peer("transfer_sync_write", session, their_source, here, size * threads):
            failures.append("the peer's write")
    for worker in workers:
        worker.join(60)
    assert not failures
    want = b"".join(pattern(size, 100 + number) for number in range(threads))
    assert peer("digest", there, size * threads) == sha(want)
    assert engine.read_bytes_from_buffer(here, size * threads) == pattern(size * threads, 50)


def test_notifies_follow_the_bytes(engine, peer) -> None:
    there, here = peer.buffer(MIB, 1), local(engine, MIB, 2)
    assert peer("notifies") == []
    for number in range(3):
        notify = TransferNotify(f"request-{number}", "kv \u00e4 done")
        opcode = TransferOpcode.Write
        assert engine.transfer_sync(peer.session, here, there, MIB, opcode, notify) == 0
    assert peer("digest", there, MIB) == sha(pattern(MIB, 2))
    assert peer("notifies") == [[f"request-{number}", "kv \u00e4 done"] for number in range(3)]
    assert peer("notifies") == []
    # A failed transfer sends no message.
    refused = engine.batch_transfer_sync(peer.session, [here], [8], [16], opcode, notify)
    assert refused == -1 and peer("notifies") == []


def test_the_first_registered_address_and_probes(engine, peer) -> None:
    assert engine.get_first_buffer_address(peer.session) == 0
    first = peer.buffer(4096)
    peer.buffer(4096)
    assert engine.get_first_buffer_address(peer.session) == first
    assert engine.send_probe(peer.session) == 0
    assert engine.send_probe("127.0.0.1:1") == -1
    assert engine.send_probe("no such host.invalid:1") == -1
    assert engine.get_first_buffer_address("nonsense") == 0


def test_registering_takes_this_processs_own_memory_only(engine) -> None:
    memory = ctypes.create_string_buffer(8192)
    address = ctypes.addressof(memory)
    assert engine.register_memory(address, 8192) == 0
    assert engine.register_memory(address, 8192, "cpu:0") == -1
    assert engine.register_memory(address + 4096, 8192) == -1
    for wrong, length in [(0, 4096), (8, 8), (address, 1 << 62), (-1, 8), (1 << 64, 8), (address, -1)]:
        assert engine.register_memory(wrong, length) == -1
    assert engine.unregister_memory(address + 1) == -1
    assert engine.unregister_memory(address) == 0
    assert engine.unregister_memory(address) == -1
    assert engine.batch_register_memory([address, address + 4096], [4096, 4096], ["*", "*"]) == 0
    assert engine.batch_unregister_memory([address, address + 4096]) == 0
    # The batch registers all ranges or none.
    assert engine.batch_register_memory([address, 8], [4096, 8]) == -1
    assert engine.batch_register_memory([address], [4096, 8]) == -1
    assert engine.unregister_memory(address) == -1
    assert engine.batch_unregister_memory([address]) == -1


def test_managed_buffers_come_and_go(engine) -> None:
    address = engine.allocate_managed_buffer(10_000)
    assert engine.read_bytes_from_buffer(address, 10_000) == bytes(10_000)
    assert engine.write_bytes_to_buffer(address, b"hello", 5) == 0
    assert engine.read_bytes_from_buffer(address, 5) == b"hello"
    assert engine.write_bytes_to_buffer(address, b"hello", 6) == -1
    assert engine.write_bytes_to_buffer(8, b"hello", 5) == -1
    with pytest.raises(ValueError):
        engine.read_bytes_from_buffer(8, 16)
    assert engine.free_managed_buffer(address, 9_999) == -1
    assert engine.free_managed_buffer(address, 10_000) == 0
    assert engine.free_managed_buffer(address, 10_000) == -1
    assert engine.allocate_managed_buffer(0) == 0
    assert engine.allocate_managed_buffer(-1) == 0
    assert engine.allocate_managed_buffer(1 << 62) == 0


def test_wrong_local_addresses_are_refused_and_not_followed(engine, peer) -> None:
    there = peer.buffer(4096)
    for wrong in (0, 8, 1 << 46, (1 << 63) - 4096, -5, 1 << 70):
        assert engine.transfer_sync_write(peer.session, wrong, there, 4096) == -1
        assert engine.transfer_sync_read(peer.session, wrong, there, 4096) == -1
        assert engine.transfer_submit_write(peer.session, wrong, there, 4096) == 0
        assert engine.batch_transfer_async_read(peer.session, [wrong], [there], [4096]) == 0
    here = local(engine, 4096)
    assert engine.batch_transfer_sync_write(peer.session, [here], [there, there], [16]) == -1
    for target in ("", "nonsense", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999"):
        assert engine.transfer_sync_write(target, here, there, 16) == -1


Call = Callable[[TransferEngine], object]


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.transfer_sync_write(1, 2, 3, 4),
        lambda e: e.transfer_sync_write("a:1", "b", 3, 4),
        lambda e: e.transfer_sync_read("a:1", 2, None, 4),
        lambda e: e.batch_transfer_sync_write("a:1", 2, 3, 4),
        lambda e: e.batch_transfer_sync_write("a:1", [2.5], [3], [4]),
        lambda e: e.transfer_sync("a:1", 2, 3, 4, "write"),
        lambda e: e.transfer_sync("a:1", 2, 3, 4, TransferOpcode.Read, "notify"),
        lambda e: e.register_memory("x", 1),
        lambda e: e.register_memory(1, None),
        lambda e: e.unregister_memory([]),
        lambda e: e.transfer_check_status("1"),
        lambda e: e.get_batch_transfer_status(["1"]),
        lambda e: e.get_first_buffer_address(5),
        lambda e: e.allocate_managed_buffer("1"),
        lambda e: e.write_bytes_to_buffer(1, 5, 1),
        lambda e: e.initialize(1, 2, 3, 4),
    ],
)
def test_wrong_types_raise_type_error(engine, call: Call) -> None:
    with pytest.raises(TypeError):
        call(engine)


def test_an_engine_that_is_not_initialized_or_closed_answers_with_codes() -> None:
    fresh, closed = TransferEngine(), started()
    closed.close()
    closed.close()
    for engine in (fresh, closed):
        assert engine.get_rpc_port() == -1
        assert engine.get_session_id() == ""
        assert engine.register_memory(4096, 4096) == -1
        assert engine.unregister_memory(4096) == -1
        assert engine.allocate_managed_buffer(16) == 0
        assert engine.transfer_sync_write("127.0.0.1:1", 1, 2, 3) == -1
        assert engine.transfer_submit_write("127.0.0.1:1", 1, 2, 3) == 0
        assert engine.batch_transfer_async_write("127.0.0.1:1", [1], [2], [3]) == 0
        assert engine.transfer_check_status(1) == -1
        assert engine.get_batch_transfer_status([1]) == -1
        assert engine.get_first_buffer_address("127.0.0.1:1") == 0
        assert engine.get_notifies() == []
        assert engine.send_probe("127.0.0.1:1") == -1
        assert json.loads(engine.get_local_topology())
        assert engine.get_engine() is engine


def test_missing_rdma_is_logged_once_and_bytes_go_over_tcp(caplog, peer) -> None:
    engine = TransferEngine()
    with caplog.at_level("INFO", "mooncake"):
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "no-such-device") == 0
        # The reason depends on the host: no library, no device, or no device of that name.
        said = [record.getMessage() for record in caplog.records if "bytes go over TCP" in record.getMessage()]
        assert len(said) == 1 and engine.get_session_id() in said[0]
        caplog.clear()
        there, here = peer.buffer(MIB, 1), local(engine, MIB, 2)
        for _ in range(3):
            assert engine.transfer_sync_write(peer.session, here, there, MIB) == 0
        assert peer("digest", there, MIB) == sha(pattern(MIB, 2))
        assert engine.get_transport(peer.session) == "tcp"
        said = [record.getMessage() for record in caplog.records if peer.session in record.getMessage()]
        assert len(said) == 1 and "bytes go over TCP: " in said[0]
    assert json.loads(engine.get_local_topology()) == {"cpu:0": [[], []]}
    engine.close()


def may_copy_from(process: int, address: int) -> bool:
    """Whether the kernel lets this process copy a byte from another one."""
    byte = ctypes.create_string_buffer(1)
    into = (ctypes.c_size_t * 2)(ctypes.addressof(byte), 1)
    from_process = (ctypes.c_size_t * 2)(address, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.process_vm_readv(process, into, 1, from_process, 1, 0) == 1


@pytest.mark.parametrize("setting", ["true", "false"])
def test_large_reads_are_copied_from_a_peer_on_this_host(monkeypatch, caplog, peer, setting) -> None:
    length = 20 * MIB + 17
    engine = started(monkeypatch, KVPOOL_ENGINE_DIRECT_READS=setting)
    try:
        there, here = peer.buffer(length, 1), engine.allocate_managed_buffer(length)
        copied = setting == "true" and may_copy_from(peer.process.pid, there)
        with caplog.at_level("INFO", "mooncake"):
            for seed in range(5):
                assert peer("fill", there, length, seed) == 0
                assert engine.transfer_sync_read(peer.session, here, there, length) == 0
                assert engine.read_bytes_from_buffer(here, length) == pattern(length, seed)
        said = [record.getMessage() for record in caplog.records if peer.session in record.getMessage()]
        assert len(said) == 1
        # Copies that fail three times would change the route.
        assert said[0].endswith("large reads are copied from its process") == copied
        # A peer that is gone, and memory that is not registered any more, are not read.
        assert peer("unregister_memory", there) == 0
        assert engine.transfer_sync_read(peer.session, here, there, length) == -1
        peer.stop()
        assert engine.transfer_sync_read(peer.session, here, there, length) == -1
    finally:
        engine.close()


def test_the_transport_to_a_peer_is_reported(engine, peer, caplog) -> None:
    assert engine.get_transport(peer.session) == "tcp"
    assert engine.get_transport("127.0.0.1:1") == ""
    assert engine.get_transport("nonsense") == ""
    with pytest.raises(TypeError):
        engine.get_transport(7)
    engine.close()
    assert engine.get_transport(peer.session) == ""


def test_initialize_returns_whether_the_session_runs(caplog, monkeypatch) -> None:
    engine = TransferEngine()
    assert engine.initialize("", "P2PHANDSHAKE", "tcp", "") == -1
    assert engine.initialize("127.0.0.1:xyz", "P2PHANDSHAKE", "tcp", "") == -1
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", None) == 0
    assert engine.get_session_id() == f"127.0.0.1:{engine.get_rpc_port()}"
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
    engine.close()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        name = f"127.0.0.1:{taken.getsockname()[1]}"
        second = TransferEngine()
        caplog.clear()
        assert second.initialize(name, "P2PHANDSHAKE", "tcp", "") == 0
        assert second.get_session_id() != name
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == 1 and second.get_session_id() in said[0]
        assert f"port {taken.getsockname()[1]} cannot be used" in said[0]
        # A caller that names a loopback address wants no connections from other hosts, whatever the port is.
        with socket.socket() as outside:
            assert outside.connect_ex(("127.0.0.2", second.get_rpc_port())) != 0
        second.close()
        # Without the handshake, peers have only the name.
        assert TransferEngine().initialize(name, "http://127.0.0.1:1/metadata", "tcp", "") == -1
    caplog.clear()
    third = TransferEngine()
    assert third.initialize_ext("127.0.0.1", "P2PHANDSHAKE", "barex", "", "http") == 0
    lines = [record for record in caplog.records if "barex" in record.getMessage()]
    assert len(lines) == 1 and "TCP" in lines[0].getMessage()
    third.close()
    monkeypatch.setenv("KVPOOL_ENGINE_TIMEOUT", "never")
    assert TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1


def test_a_free_port_and_a_name_that_resolves_are_no_warning(caplog) -> None:
    # Another process may take a port before the engine does.
    for _ in range(10):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            name = f"localhost:{free.getsockname()[1]}"
        caplog.clear()
        engine = TransferEngine()
        assert engine.initialize(name, "P2PHANDSHAKE", "tcp", "") == 0
        session = engine.get_session_id()
        engine.close()
        if session == name:
            break
    assert session == name
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_port_that_is_taken_at_the_first_address_of_a_name_is_taken(caplog, monkeypatch) -> None:
    # Peers try the addresses in this order, as those of "localhost". This host has no address of the first range.
    monkeypatch.setattr(_engine_session, "_addresses", lambda _: ["192.0.2.1", "127.0.0.2", "127.0.0.1"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        port = taken.getsockname()[1]
        name = f"two-addresses:{port}"
        assert TransferEngine().initialize(name, "http://127.0.0.1:1/metadata", "tcp", "") == -1
        engine = TransferEngine()
        assert engine.initialize(name, "P2PHANDSHAKE", "tcp", "") == 0
        assert engine.get_session_id() != name
        assert f"port {port} cannot be used" in caplog.text
        with socket.socket() as caller:
            assert caller.connect_ex(("127.0.0.2", engine.get_rpc_port())) == 0
        engine.close()


def test_a_host_name_that_cannot_be_resolved_is_warned_of(caplog, monkeypatch) -> None:
    monkeypatch.setenv("KVPOOL_ENGINE_SECRET", "a secret")
    # A label has at most 63 characters, so no resolver asks a server for this name.
    host = "x" * 64
    engine = TransferEngine()
    assert engine.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.get_session_id() == f"{host}:{engine.get_rpc_port()}"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and f"cannot resolve the host name '{host}'" in said[0]
    engine.close()


def test_a_session_without_a_secret_beyond_this_machine_is_warned_of(caplog) -> None:
    engine = TransferEngine()
    assert engine.initialize("0.0.0.0", "P2PHANDSHAKE", "tcp", "") == 0
    assert any("KVPOOL_ENGINE_SECRET" in record.getMessage() for record in caplog.records)
    engine.close()


def test_a_forked_child_does_not_hang_on_its_parents_engine(engine) -> None:
    address = local(engine, 4096)
    child = os.fork()
    if child == 0:
        code = engine.transfer_sync_write(engine.get_session_id() or "127.0.0.1:1", address, address, 16)
        engine.close()
        os._exit(0 if code == -1 else 1)
    deadline = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.01)
    assert ended[1] == 0
    assert engine.transfer_sync_write(engine.get_session_id(), address, address + 2048, 16) == 0
