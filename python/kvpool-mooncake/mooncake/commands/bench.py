"""transfer_engine_bench: the bandwidth between two engines, with the original's flags.

`--mode=target` serves a buffer until a signal arrives, and prints the session's name. `--mode=initiator` reads
or writes that buffer for `--duration` seconds (`--segment_id=NAME`), and prints the bandwidth.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
import threading
import time

from mooncake.commands import flags
from mooncake.commands.flags import CommandLine, Flag, UsageError
from mooncake.commands.logging_flags import logging_flags
from mooncake.engine import TransferEngine, TransferOpcode

_UNITS = {"GB": 1000**3, "MB": 1000**2, "KB": 1000, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_BITS = {"Gb": 1000**3, "Mb": 1000**2, "Kb": 1000}

_HOST = "kvpool's engine moves host memory only"

FLAGS = (
    Flag("mode", "string", "initiator", "initiator: read or write the target's buffer; target: serve one"),
    Flag("operation", "string", "read", "read or write"),
    Flag("protocol", "string", "rdma", "rdma, or tcp; other names mean tcp"),
    Flag("device_name", "string", "", "The RDMA devices, separated by commas; all without"),
    Flag("local_server_name", "string", "127.0.0.1", "This session's host or host:port, as the other end reaches it"),
    Flag("segment_id", "string", "", "The target's session, host:port"),
    Flag("block_size", "uint64", 65536, "Bytes of each transfer"),
    Flag("batch_size", "int32", 128, "Transfers of each batch"),
    Flag("threads", "int32", 12, "Threads that submit batches"),
    Flag("duration", "int32", 10, "Seconds"),
    Flag("buffer_size", "uint64", 1073741824, "Bytes of this end's buffer"),
    Flag("init_mem", "bool", True, "Touch the buffer before"),
    Flag("report_unit", "string", "GB", "GB, GiB, Gb, MB, MiB, Mb, KB, KiB or Kb, a second"),
    Flag("report_precision", "uint32", 2, "Digits after the point"),
    Flag("metadata_server", "string", "P2PHANDSHAKE", "", "kvpool asks no metadata server"),
    Flag("auto_discovery", "bool", False, "", "devices are always found by themselves"),
    Flag("backend", "string", "classic", "", "there is one engine"),
    Flag("gpu_id", "int32", 0, "", _HOST),
    Flag("use_vram", "bool", True, "", _HOST),
    Flag("nic_priority_matrix", "string", "", "", "ports are paired by subnet and probed"),
    *logging_flags("transfer_engine_bench"),
)


def serve(line: CommandLine, log: logging.Logger) -> int:
    """Runs one end of a measurement."""
    mode, operation = line.text("mode"), line.text("operation")
    if mode not in ("initiator", "target"):
        raise UsageError(f"--mode={mode} is neither initiator nor target")
    if operation not in ("read", "write"):
        raise UsageError(f"--operation={operation} is neither read nor write")
    unit = line.text("report_unit")
    if unit not in {**_UNITS, **_BITS}:
        raise UsageError(f"--report_unit={unit} is none of {', '.join([*_UNITS, *_BITS])}")
    engine = TransferEngine()
    name, protocol = line.text("local_server_name"), line.text("protocol")
    if engine.initialize(name, line.text("metadata_server"), protocol, line.text("device_name")) != 0:
        return 1
    try:
        address = engine.allocate_managed_buffer(line.number("buffer_size"))
        if address and line.is_on("init_mem"):
            ctypes.memset(address, 1, line.number("buffer_size"))
        if not address:
            log.error("no buffer of %d bytes", line.number("buffer_size"))
            return 1
        if mode == "target":
            return _target(engine)
        return _initiator(engine, address, line, log)
    finally:
        engine.close()


def _target(engine: TransferEngine) -> int:
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stopping.set())
    print(f"target: --segment_id={engine.get_session_id()}", flush=True)
    stopping.wait()
    return 0


def _initiator(engine: TransferEngine, address: int, line: CommandLine, log: logging.Logger) -> int:
    target, block, batch = line.text("segment_id"), line.number("block_size"), line.number("batch_size")
    threads, seconds = line.number("threads"), line.number("duration")
    if min(block, batch, threads, seconds) < 1:
        raise UsageError("--block_size, --batch_size, --threads and --duration must be over 0")
    if threads * batch * block > line.number("buffer_size"):
        raise UsageError("--buffer_size is less than --threads x --batch_size x --block_size")
    there = engine.get_first_buffer_address(target)
    if not there:
        log.error("--segment_id=%s: no session answers, or it has no buffer", target)
        return 1
    opcode = TransferOpcode.Read if line.text("operation") == "read" else TransferOpcode.Write
    begun = time.monotonic()
    counts, failed = [0] * threads, threading.Event()

    def work(thread: int) -> None:
        offsets = [(thread * batch + number) * block for number in range(batch)]
        here, remote = [address + offset for offset in offsets], [there + offset for offset in offsets]
        while time.monotonic() - begun < seconds and not failed.is_set():
            if engine.batch_transfer_sync(target, here, remote, [block] * batch, opcode) != 0:
                failed.set()
                return
            counts[thread] += 1

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took = time.monotonic() - begun
    if failed.is_set():
        return 1
    unit, digits = line.text("report_unit"), line.number("report_precision")
    moved = sum(counts) * batch * block
    speed = moved * 8 / _BITS[unit] if unit in _BITS else moved / _UNITS[unit]
    route = engine.get_transport(target)
    done = f"{sum(counts)} batches in {took:.2f} s"
    print(f"{line.text('operation')} over {route}: {done}, {speed / took:.{digits}f} {unit}/s")
    return 0


def main() -> None:
    """Runs the command."""
    sys.exit(flags.run("transfer_engine_bench", __doc__ or "", FLAGS, serve))


if __name__ == "__main__":
    main()
