"""The cost of calling through Python: the same calls, alternately through Python and through Rust.

    python python/benches/cost.py [--rounds 300]

The script starts a pool from the commands on the path, and `timed`, which makes calls on request. `timed` is an
example of the client's crate: `cargo build --release -p kvpool-client --example timed`. A pair is one call
through Python and one through Rust, directly after each other; the order alternates. The script prints the
medians, and the median and quartiles of the pairs' ratios. Use release builds and a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kvpool
import numpy as np
from processes import pool_of_processes

MIB = 1 << 20
BLOCKS, KEYS = 32, 1024
WARM_UP = 20
ROOT = Path(__file__).parents[2]


class Rust:
    """The same calls in a process of their own."""

    def __init__(self, program: Path, url: str) -> None:
        self.process = subprocess.Popen(
            [program, url, str(KEYS), str(MIB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, line: str) -> int:
        """Returns the nanoseconds of one call, timed as `timed` does."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


def aligned_like(array: np.ndarray) -> np.ndarray:
    """Zeroes of the same shape that begin on a page, like the memory of `timed`.

    Most numpy arrays begin inside a cache line, and a copy to such an address costs some per cent more.
    """
    room = np.zeros(array.nbytes + 4096, dtype="uint8")
    start = -room.ctypes.data % 4096
    return room[start : start + array.nbytes].reshape(array.shape)


def timed(call: Callable[[], object]) -> int:
    """Returns the nanoseconds of the second of two calls, so that no measured side has just been woken."""
    call()
    began = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - began


def compare(
    what: str, goal: float, rounds: int, python: Callable[[], object], rust: Callable[[], int]
) -> None:
    """Prints one line of the table."""
    pairs = []
    for number in range(WARM_UP + rounds):
        if number % 2:
            mine = timed(python)
            pairs.append((mine, rust()))
        else:
            other = rust()
            pairs.append((timed(python), other))
    del pairs[:WARM_UP]
    in_python, in_rust = zip(*pairs)
    low, middle, high = statistics.quantiles((mine / other for mine, other in pairs), n=4)
    print(
        f"{what:36} {statistics.median(in_python) / 1e3:9.1f} us {statistics.median(in_rust) / 1e3:9.1f} us"
        f"   {middle:.3f} ({low:.3f} .. {high:.3f})   goal {goal:.2f}"
    )


def main() -> None:
    # An interrupt also ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description="What calling through Python costs.")
    parser.add_argument("--rounds", type=int, default=300, help="pairs of calls a line")
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    parser.add_argument("--timed", type=Path, default=target / "release/examples/timed")
    arguments = parser.parse_args()
    if not arguments.timed.exists():
        sys.exit("build it first: cargo build --release -p kvpool-client --example timed")

    with pool_of_processes() as url, kvpool.Pool.connect(url) as pool:
        names = [f"cost-{n}" for n in range(BLOCKS)]
        texts = [f"cost-text-{n}" for n in range(KEYS)]
        digests = kvpool.chain_keys(kvpool.Namespace(), 1, range(KEYS))
        blocks = np.random.default_rng(1).integers(0, 256, (BLOCKS, MIB), dtype="uint8")
        pool.batch_put(names, list(blocks))
        pool.batch_put([*texts, *digests], [b"x"] * (2 * KEYS))
        into = list(aligned_like(blocks))
        rust = Rust(arguments.timed, url)
        print(f"{'':36} {'Python':>12} {'Rust':>12}   ratio of pairs, median (quartiles)")
        compare(
            "batch_get 32 x 1 MiB, shm", 1.05, arguments.rounds,
            lambda: pool.batch_get(names, into), lambda: rust.call(f"get {BLOCKS}"),
        )
        compare(
            "is_exist 1024 digests", 1.15, arguments.rounds,
            lambda: pool.is_exist(digests), lambda: rust.call(f"exist {KEYS}"),
        )
        named = [f"cost@tp_rank:0@{n:064x}" for n in range(KEYS)]
        pool.batch_put(named, [b"x"] * KEYS)
        compare(
            "is_exist 1024 texts", 1.15, arguments.rounds,
            lambda: pool.is_exist(texts), lambda: rust.call(f"exist-text {KEYS}"),
        )
        compare(
            "is_exist 1024 engine's names", 1.15, arguments.rounds,
            lambda: pool.is_exist(named), lambda: rust.call(f"exist-named {KEYS}"),
        )
        with contextlib.suppress(ImportError):
            from mooncake.store import MooncakeDistributedStore

            store = MooncakeDistributedStore()
            assert store.setup("localhost", "P2PHANDSHAKE", 0, MIB, "tcp", "", url[7:]) == 0
            compare(
                "mooncake: batch_is_exist 1024", 1.15, arguments.rounds,
                lambda: store.batch_is_exist(named), lambda: rust.call(f"exist-named {KEYS}"),
            )
            pointers = [target.ctypes.data for target in into]
            compare(
                "mooncake: batch_get_into 32 x 1 MiB", 1.05, arguments.rounds,
                lambda: store.batch_get_into(names, pointers, [MIB] * BLOCKS),
                lambda: rust.call(f"get {BLOCKS}"),
            )
            assert store.close() == 0
        assert all((target == block).all() for target, block in zip(into, blocks))
        assert pool.counters()["shm_read_bytes"] >= arguments.rounds * BLOCKS * MIB
        rust.process.kill()


if __name__ == "__main__":
    main()
