"""Other parts of mooncake.engine: RPC, shared segments, names of the original, and the bench command."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from mooncake import engine as module
from mooncake.engine import (
    ReceivedTensor,
    RpcInterface,
    SharedSegment,
    TransferEngine,
    TransferNotify,
    TransferOpcode,
    create_rpc_client,
    create_rpc_server,
)
from live_pools import Daemon, free_port, wait_until


@pytest.fixture
def server() -> Iterator[tuple[RpcInterface, str]]:
    """A server that is listening, and its address."""
    address = f"127.0.0.1:{free_port()}"
    rpc = RpcInterface()
    assert not rpc.start_server_async()
    assert rpc.initialize_server(address)
    assert rpc.start_server_async()
    yield rpc, address
    rpc.stop_server()


def test_bytes_come_to_the_callback(server: tuple[RpcInterface, str]) -> None:
    rpc, address = server
    got: list[dict[str, object]] = []
    rpc.set_data_receive_callback(got.append)
    client = create_rpc_client()
    for data in (b"", b"hello", bytearray(b"x" * (3 << 20))):
        assert client.send_data(address, data) == 0
    assert [len(one["data"]) for one in got] == [0, 5, 3 << 20]
    assert got[1]["data"] == b"hello" and str(got[1]["source"]).startswith("127.0.0.1:")
    rpc.stop_server()
    assert client.send_data("127.0.0.1:1", b"x") == -1
    assert client.send_data("nonsense", b"x") == -1
    assert client.send_data("127.0.0.1:99999", b"x") == -1
    beyond = RpcInterface()
    assert beyond.initialize_server("127.0.0.1:99999") and not beyond.start_server_async()
    assert RpcInterface().send_data(address, b"x") == -1


def test_a_callback_that_raises_is_a_failure_of_its_send(server: tuple[RpcInterface, str]) -> None:
    rpc, address = server
    got: list[object] = []

    def callback(message: dict[str, object]) -> None:
        got.append(message["data"])
        if message["data"] == b"bad":
            raise ValueError("no such thing")

    rpc.set_data_receive_callback(callback)
    client = create_rpc_client()
    assert client.send_data(address, b"good") == 0
    assert client.send_data(address, b"bad") == -1
    assert client.send_data(address, b"good") == 0
    assert got == [b"good", b"bad", b"good"], "a message that failed is not sent again"


def test_tensors_come_with_their_type_and_shape(server: tuple[RpcInterface, str]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rpc, address = server
    got: list[ReceivedTensor] = []
    rpc.set_tensor_receive_callback(got.append)
    client = create_rpc_client()
    tensor = torch.randn(3, 4, 5, 2, 2).to(torch.bfloat16)
    assert client.send_tensor(address, tensor.transpose(0, 1)) == 0
    assert client.send_tensor(address, torch.empty(0)) == 0
    assert client.send_tensor(address, [1, 2]) == -1
    first = got[0]
    assert (first.dtype, first.shape, first.total_bytes) == ("bfloat16", [4, 3, 5, 2, 2], 480)
    back = torch.frombuffer(bytearray(first.get_memory_view()), dtype=torch.bfloat16).reshape(first.shape)
    assert torch.equal(back, tensor.transpose(0, 1))
    assert got[1].get_data_as_bytes() == b"" and got[1].get_data_size() == 0


def test_a_slow_callback_gets_a_message_once(server: tuple[RpcInterface, str]) -> None:
    rpc, address = server
    got: list[dict[str, object]] = []

    def callback(message: dict[str, object]) -> None:
        got.append(message)
        if message["data"] == b"slow":
            time.sleep(1.5)

    rpc.set_data_receive_callback(callback)
    client = RpcInterface()
    assert client.initialize_client(timeout_seconds=1)
    assert client.send_data(address, b"quick") == 0
    assert client.send_data(address, b"slow") == -1
    assert client.send_data(address, b"quick") == 0
    assert [message["data"] for message in got] == [b"quick", b"slow", b"quick"]


class Closing:
    """A receiver that answers the first message of each connection. It closes the connection then, or when it has
    another message."""

    def __init__(self, *, reads_another: bool) -> None:
        self.messages: list[bytes] = []
        self.closed = 0
        self._reads_another = reads_another
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._listener.accept()[0] as connection, connection.makefile("rb") as file:
                    self._read(file)
                    connection.sendall(b"\x01")
                    if self._reads_another:
                        self._read(file)
                self.closed += 1

    def _read(self, file: BinaryIO) -> None:
        _, description, length = struct.unpack("!4sIQ", file.read(16))
        file.read(description)
        self.messages.append(file.read(length))

    def close(self) -> None:
        self._listener.close()


def test_a_receiver_that_closes_the_connection_has_a_message_once() -> None:
    with contextlib.closing(Closing(reads_another=True)) as receiver:
        client = create_rpc_client()
        assert client.send_data(receiver.address, b"first") == 0
        # The receiver has the message, and its answer is lost.
        assert client.send_data(receiver.address, b"second") == -1
        assert receiver.messages == [b"first", b"second"]


def test_a_connection_that_the_receiver_closed_between_two_messages_is_replaced() -> None:
    with contextlib.closing(Closing(reads_another=False)) as receiver:
        client = create_rpc_client()
        for number in range(1, 4):
            assert client.send_data(receiver.address, b"x") == 0
            wait_until(lambda closed=number: receiver.closed == closed, what="the end of the connection")
        assert receiver.messages == [b"x"] * 3


def test_sends_are_awaited(server: tuple[RpcInterface, str]) -> None:
    rpc, address = server
    got: list[object] = []
    rpc.set_data_receive_callback(got.append)

    async def send() -> None:
        client, loop = create_rpc_client(), asyncio.get_running_loop()
        codes = await asyncio.gather(*(client.send_data_async(address, b"%d" % n, loop) for n in range(20)))
        assert codes == [0] * 20
        if importlib.util.find_spec("torch") is not None:
            tensor = importlib.import_module("torch").zeros(3)
            assert await client.send_tensor_async(address, tensor, loop) == 0
        with pytest.raises(RuntimeError, match="127.0.0.1:1"):
            await client.send_data_async("127.0.0.1:1", b"x", loop)

    asyncio.run(send())
    assert len(got) == 20


def test_a_server_may_take_the_callers_thread() -> None:
    address = f"127.0.0.1:{free_port()}"
    rpc, client = RpcInterface(), RpcInterface()
    got: list[object] = []
    rpc.set_data_receive_callback(got.append)
    assert rpc.initialize_server(address) and client.initialize_client(2, 5)
    serving = threading.Thread(target=rpc.start_server)
    serving.start()
    wait_until(lambda: client.send_data(address, b"x") == 0, what="the server")
    rpc.stop_server()
    serving.join(10)
    assert not serving.is_alive() and len(got) == 1


def test_a_burst_of_connections_is_not_reset(server: tuple[RpcInterface, str]) -> None:
    rpc, address = server
    rpc.set_data_receive_callback(lambda _: None)
    host, _, port = address.rpartition(":")
    # More connections at a time than the server accepts before its next turn.
    with contextlib.ExitStack() as opened:
        for _ in range(200):
            opened.enter_context(socket.create_connection((host, int(port)), 5))
        assert create_rpc_client().send_data(address, b"x") == 0


def test_received_bytes_are_handed_out() -> None:
    data = module.ReceivedData("127.0.0.1:1", b"abc")
    assert (data.get_bytes(), bytes(data.get_memory_view()), data.data_size) == (b"abc", b"abc", 3)


def test_a_received_tensor_is_handed_out_without_torch() -> None:
    tensor = ReceivedTensor("127.0.0.1:1", "float16", [1, 2], b"abcd")
    assert (tensor.get_data_as_bytes(), bytes(tensor.get_memory_view())) == (b"abcd", b"abcd")
    assert tensor.get_data_size() == tensor.total_bytes == 4


def test_a_server_is_made_for_every_interface() -> None:
    rpc = create_rpc_server()
    assert isinstance(rpc, module.CoroRPCInterface)
    rpc.stop_server()


def test_processes_share_a_segment() -> None:
    with pytest.raises(TypeError):
        SharedSegment()
    assert SharedSegment.supported() and not SharedSegment.supported(host_register=True)
    with pytest.raises(RuntimeError, match="host memory"):
        SharedSegment.create("s", 4096, 2, 0, mmap=False)
    with pytest.raises(RuntimeError, match="cannot be"):
        SharedSegment.create("s", 4096, 2, 2)
    mine, blob = SharedSegment.create("s", 8192, 2, 0)
    assert not mine.ready() and mine.base_addr() == 0 and mine.size() == 8192
    # The other rank is another process.
    program = (
        "import ctypes, sys; from mooncake.engine import SharedSegment\n"
        "segment, blob = SharedSegment.create('s', 8192, 2, 1); print(blob.decode(), flush=True)\n"
        "segment.complete([sys.stdin.readline(), blob]); ctypes.memset(segment.base_addr() + 4096, 7, 16)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin and other.stdout
        theirs = other.stdout.readline()
        with pytest.raises(RuntimeError):
            mine.complete([blob])
        with pytest.raises(RuntimeError):
            mine.complete([blob, json.dumps({"name": "t", "size": 1})])
        mine.complete([blob, theirs])
        other.stdin.write(blob.decode() + "\n")
        other.stdin.close()
        assert other.wait(30) == 0
    assert mine.ready() and mine.device_addr() == 0
    assert ctypes.string_at(mine.base_addr() + 4096, 16) == b"\x07" * 16


Call = Callable[[TransferEngine], object]


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.transfer_write_on_cuda("a:1", 1, 2, 3),
        lambda e: e.transfer_read_on_cuda("a:1", 1, 2, 3, stream_ptr=0),
        lambda e: e.batch_transfer_write_on_cuda("a:1", [1], [2], [3]),
        lambda e: e.batch_transfer_read_on_cuda("a:1", [1], [2], [3], transport_hint="tcp"),
        lambda e: e.get_engine_ptr(),
        lambda e: e.warmup_efa_segment("a:1"),
    ],
)
def test_methods_that_need_a_gpu_or_the_original_raise(call: Call) -> None:
    with pytest.raises(NotImplementedError, match="kvpool"):
        call(TransferEngine())


def test_names_of_the_original_are_present() -> None:
    assert TransferEngine.TransferOpcode is TransferOpcode and module.Read is TransferOpcode.Read
    assert isinstance(TransferEngine().get_engine(), module.InnerTransferEngine)
    notify = TransferNotify()
    notify.name, notify.msg = "a", "b"
    assert notify == TransferNotify("a", "b")
    assert not any(getattr(module, name) for name in dir(module) if name.startswith("SUPPORT_"))


def test_a_text_that_is_no_utf_8_is_a_failure() -> None:
    engine = TransferEngine()
    assert engine.initialize("\ud800", "P2PHANDSHAKE", "tcp", "") == -1
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    address = engine.allocate_managed_buffer(4096)
    assert engine.write_bytes_to_buffer(address, "\ud800", 1) == -1  # type: ignore[arg-type]
    engine.close()


def test_a_write_to_an_unknown_peer_fails_by_its_status() -> None:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    address = engine.allocate_managed_buffer(4096)
    for nobody in ("127.0.0.1:1", "nobody"):
        begun = engine.transfer_submit_write(nobody, address, 4096, 16, transport_hint="tcp")
        assert begun >= 0
        wait_until(lambda: engine.transfer_check_status(begun) == -1, what="the failure")
    assert engine.transfer_submit_write("127.0.0.1:1", -1, 4096, 16) == 0
    assert engine.transfer_check_status(0) == -1
    engine.close()


def test_the_bench_measures_between_two_processes(tmp_path: Path) -> None:
    log = tmp_path / "target"
    common = ["--protocol=tcp", "--buffer_size=8388608"]
    target = Daemon("transfer_engine_bench", "--mode=target", *common, log=log)
    try:
        wait_until(lambda: "--segment_id=" in log.read_text(), what="the target")
        line = next(line for line in log.read_text().splitlines() if line.startswith("target: "))
        initiator = [*common, line.removeprefix("target: "), "--threads=2", "--batch_size=4", "--duration=1"]
        for more in (["--operation=write", "--report_unit=Gb"], ["--report_precision=1"]):
            command = ["transfer_engine_bench", *initiator, *more]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            assert " over tcp: " in done.stdout and "/s" in done.stdout
        bad = subprocess.run(["transfer_engine_bench", *initiator, "--threads=99"], capture_output=True, timeout=60)
        assert bad.returncode != 0
    finally:
        target.kill()
    gone = subprocess.run(["transfer_engine_bench", *initiator], capture_output=True, text=True, timeout=90)
    assert gone.returncode == 1 and "no session answers" in gone.stderr


def test_the_topology_is_printed_as_json() -> None:
    done = subprocess.run(["transfer_engine_topology_dump"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "cpu:0" in json.loads(done.stdout.partition(": ")[2])
    warned = subprocess.run(
        ["transfer_engine_topology_dump", "--backend=tent"], capture_output=True, text=True, timeout=60
    )
    assert "--backend has no effect" in warned.stderr
