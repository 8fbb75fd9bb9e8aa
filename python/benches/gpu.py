"""The cost of a GPU's blocks: the same calls from GPU memory and from host memory, in turns.

    python python/benches/gpu.py [--rounds 15]

It needs torch with a CUDA GPU, and the commands on the path. A round has, in varying order:

- the call with blocks in GPU memory;
- the same call with blocks in host memory;
- a bare copy of as many bytes between the GPU and pinned host memory, with the wait for its end.

Each line gives the medians in 10^9 bytes a second. The ratio compares the GPU's call with the slower of the
other two in the same round. It is the median of the rounds, with the quartiles. All bytes are compared.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Callable

import kvpool
import torch
from processes import pool_of_processes

KIB, MIB = 1 << 10, 1 << 20
WARM_UP = 2
SHAPES = [(32, MIB, 1), (128, 256 * KIB, 1), (16, 8 * MIB, 1), (32, MIB, 64)]
"""Blocks of a call, bytes of a block, and its pieces. The pieces of several blocks lie side by side."""


class Blocks:
    """The blocks of a call on one device."""

    def __init__(self, shape: tuple[int, int, int], device: str) -> None:
        count, length, pieces = shape
        part = length // pieces
        self.memory = torch.zeros((pieces, count, part), dtype=torch.uint8, device=device)
        # The blocks are given by their addresses, as engines do: a tensor for each piece costs more than its
        # copy.
        start = self.memory.data_ptr()
        self.blocks = [
            [(start + (piece * count + block) * part, part) for piece in range(pieces)] for block in range(count)
        ]

    def fill(self, seed: int) -> None:
        """Writes random bytes."""
        torch.manual_seed(seed)
        self.memory.copy_(torch.randint(0, 256, self.memory.shape, dtype=torch.uint8))


def seconds(call: Callable[[], object]) -> float:
    """Returns the seconds of a call. The GPU has no other work."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def compare(pool: kvpool.Pool, way: str, shape: tuple[int, int, int], rounds: int) -> None:
    """Prints the results of puts and of gets for one shape of blocks."""
    count, length, pieces = shape
    on_gpu, on_host, back = Blocks(shape, "cuda"), Blocks(shape, "cpu"), Blocks(shape, "cuda")
    on_gpu.fill(1)
    on_host.fill(2)
    host_back, spare = Blocks(shape, "cpu"), Blocks(shape, "cpu")
    pinned = torch.zeros(count * length, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(count * length, dtype=torch.uint8, device="cuda")

    def bare(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def put(keys: list[str], blocks: Blocks) -> None:
        assert pool.batch_put(keys, blocks.blocks) == [True] * count

    def get(keys: list[str], blocks: Blocks) -> None:
        assert pool.batch_get(keys, blocks.blocks) == [length] * count

    times: dict[str, list[list[float]]] = {"put": [], "get": []}
    for number in range(WARM_UP + rounds):
        keys = [[f"{place}-{number}-{block}" for block in range(count)] for place in ("gpu", "host", "first")]
        back.memory.zero_()
        host_back.memory.zero_()
        calls: dict[str, list[Callable[[], object]]] = {
            "put": [lambda: put(keys[0], on_gpu), lambda: put(keys[1], on_host), lambda: bare(pinned, device)],
            "get": [lambda: get(keys[0], back), lambda: get(keys[1], host_back), lambda: bare(device, pinned)],
        }
        for verb, three in calls.items():
            # The first call after a pause is always slower, so it is not timed.
            if verb == "put":
                put(keys[2], on_host)
            else:
                get(keys[2], spare)
            taken = [0.0] * 3
            for turn in range(3):
                which = (turn + number) % 3
                taken[which] = seconds(three[which])
            times[verb].append(taken)
        assert torch.equal(back.memory, on_gpu.memory), "wrong bytes"
        assert torch.equal(host_back.memory, on_host.memory), "wrong bytes"
        pool.remove([key for some in keys for key in some], force=True)
    size = f"{length // MIB} MiB" if length >= MIB else f"{length // KIB} KiB"
    layers = f" in {pieces} pieces" if pieces > 1 else ""
    for verb, all_rounds in times.items():
        del all_rounds[:WARM_UP]
        ratios = [max(host, copy) / gpu for gpu, host, copy in all_rounds]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rates = [count * length / statistics.median(one) / 1e9 for one in zip(*all_rounds)]
        what = f"{way} {verb} {count} x {size}{layers}"
        print(
            f"{what:36} {rates[0]:8.2f} {rates[1]:8.2f} {rates[2]:8.2f}   {middle:.3f} ({low:.3f} .. {high:.3f})",
            flush=True,
        )


def main() -> None:
    # An interrupt also ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description="What a GPU's blocks cost.")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each line")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this host has no CUDA GPU that torch can use")
    print(f"{torch.cuda.get_device_name()}; GB/s: from the GPU, from the host, the bare copy; the ratio")
    with pool_of_processes("1GiB") as url:
        for way in ("shm", "tcp"):
            with kvpool.Pool.connect(url, transport=way, timeout=30.0) as pool:
                for shape in SHAPES:
                    compare(pool, way, shape, arguments.rounds)


if __name__ == "__main__":
    main()
