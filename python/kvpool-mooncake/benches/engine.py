"""The cost of a transfer beside a bare TCP socket: the same bytes and the same two processes, in one run.

    python benches/engine.py [MIB] [ROUNDS]

A peer process receives. Each round sends the bytes in turn through a plain socket into existing memory, by
`transfer_sync_write`, and by `transfer_sync_read`. The script prints the medians.
"""

from __future__ import annotations

import hashlib
import mmap
import multiprocessing
import multiprocessing.connection
import socket
import statistics
import sys
import time

from mooncake.engine import TransferEngine

MIB = 1 << 20


def receive(pipe: multiprocessing.connection.Connection, length: int) -> None:
    """The peer: an engine with a buffer, and a plain socket that fills another buffer."""
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    address = engine.allocate_managed_buffer(length)
    plain = memoryview(mmap.mmap(-1, length))
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((engine.get_session_id(), address, listener.getsockname()[1]))
    connection, _ = listener.accept()
    while True:
        match pipe.recv():
            case "receive":
                got = 0
                while got < length:
                    got += connection.recv_into(plain[got:], min(4 * MIB, length - got))
                connection.sendall(b".")
            case "digest":
                pipe.send(hashlib.sha256(engine.read_bytes_from_buffer(address, length)).digest())
            case _:
                return


def main() -> None:
    """Measures and prints."""
    length = int(sys.argv[1] if len(sys.argv) > 1 else 256) * MIB
    rounds = int(sys.argv[2] if len(sys.argv) > 2 else 7)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    peer = context.Process(target=receive, args=(theirs, length), daemon=True)
    peer.start()
    session, remote, port = pipe.recv()
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    local = engine.allocate_managed_buffer(length)
    data = hashlib.sha256(b"seed").digest() * (length // 32)
    assert engine.write_bytes_to_buffer(local, data, length) == 0
    plain = socket.create_connection(("127.0.0.1", port))

    def bare() -> None:
        pipe.send("receive")
        plain.sendall(data)
        assert plain.recv(1) == b"."

    def write() -> None:
        assert engine.transfer_sync_write(session, local, remote, length) == 0

    def read() -> None:
        assert engine.transfer_sync_read(session, local, remote, length) == 0

    ways = {"bare socket": bare, "transfer_sync_write": write, "transfer_sync_read": read}
    took: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            # The first round touches all memory for the first time, so it is not counted.
            if round_:
                took[name].append(time.perf_counter() - begun)
    pipe.send("digest")
    assert pipe.recv() == hashlib.sha256(data).digest(), "other bytes have arrived"
    base = statistics.median(took["bare socket"])
    print(f"{length // MIB} MiB over loopback, median of {rounds} rounds")
    for name, times in took.items():
        median = statistics.median(times)
        print(f"  {name:20} {length / median / 1e9:6.2f} GB/s  {base / median:5.2f} of the bare socket")
    pipe.send("end")
    peer.join(10)
    engine.close()


if __name__ == "__main__":
    main()
