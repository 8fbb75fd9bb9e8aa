"""mooncake.engine over RDMA: this process moves bytes from and to another one's memory, in a guest.

engine.py HOST: the test. engine.py HOST peer: the other process, which does what its input says, a line each.
"""

import ctypes
import logging
import subprocess
import sys

from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

LENGTH = 16 << 20
# The device of the guest.
DEVICE = "rxe0"


def pattern(seed: int) -> bytes:
    return bytes((at * 7 + seed) % 251 for at in range(4096)) * (LENGTH // 4096)


def started(host: str) -> TransferEngine:
    engine = TransferEngine()
    assert engine.initialize(host, "P2PHANDSHAKE", "rdma", DEVICE) == 0
    return engine


def peer(host: str) -> None:
    engine = started(host)
    address = engine.allocate_managed_buffer(LENGTH)
    print(engine.get_session_id(), address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["fill", seed]:
                answer = engine.write_bytes_to_buffer(address, pattern(int(seed)), LENGTH)
            case ["holds", seed]:
                answer = engine.read_bytes_from_buffer(address, LENGTH) == pattern(int(seed))
            case ["unregister"]:
                answer = engine.unregister_memory(address)
            case _:
                answer = [(notify.name, notify.msg) for notify in engine.get_notifies()]
        print(answer, flush=True)


def main(host: str) -> None:
    other = subprocess.Popen(
        [sys.executable, __file__, host, "peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin and other.stdout
    session, there = other.stdout.readline().split()

    def ask(line: str) -> str:
        assert other.stdin and other.stdout
        print(line, file=other.stdin, flush=True)
        return other.stdout.readline().strip()

    engine, address = started(host), int(there)
    assert DEVICE in engine.get_local_topology(), engine.get_local_topology()
    here = engine.allocate_managed_buffer(LENGTH)
    assert engine.write_bytes_to_buffer(here, pattern(1), LENGTH) == 0
    assert engine.transfer_sync_write(session, here, address, LENGTH) == 0
    assert engine.get_transport(session) == "rdma"
    assert ask("holds 1") == "True"

    # What is not registered here is registered for the transfer.
    own = (ctypes.c_char * LENGTH)()
    assert ask("fill 2") == "0"
    batch = engine.batch_transfer_async_read(session, [ctypes.addressof(own)], [address], [LENGTH])
    assert batch > 0 and engine.get_batch_transfer_status([batch]) == 0
    assert own.raw == pattern(2)

    notify = TransferNotify("done", "all of it")
    assert engine.transfer_sync(session, here, address, 4096, TransferOpcode.Write, notify) == 0
    assert ask("notifies") == "[('done', 'all of it')]"

    assert engine.transfer_sync_read(session, here, address + 1, LENGTH) == -1
    assert ask("unregister") == "0"
    assert engine.transfer_sync_read(session, here, address, 4096) == -1
    assert engine.get_transport(session) == "rdma"
    engine.close()
    other.kill()
    other.wait()
    print("== a write, a read and a notification over RDMA, and two refusals")


logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
if sys.argv[2:] == ["peer"]:
    peer(sys.argv[1])
else:
    main(sys.argv[1])
