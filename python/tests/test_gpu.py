"""Blocks in the memory of a real GPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import kvpool
import pytest
from gpus import torch_on_gpu
from live_pools import LivePool

__all__ = ["torch_on_gpu"]

MIB = 1 << 20
LONG = 200_000_000
"""Some hundred milliseconds, in cycles of a GPU."""

_keys = (f"gpu-{n}" for n in itertools.count())


@pytest.fixture
def pool(torch_on_gpu: Any, shared_pool: LivePool) -> Iterator[kvpool.Pool]:
    with kvpool.Pool.connect(shared_pool.url) as pool:
        # The staging memory exists from here on. Its allocation may wait for the GPU.
        first = torch_on_gpu.zeros(MIB, dtype=torch_on_gpu.uint8, device="cuda")
        assert pool.batch_put(["first"], [first], upsert=True) == [True]
        yield pool


def some_bytes(torch: Any, count: int, seed: int = 1) -> Any:
    """Random bytes on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device="cuda", generator=generator)


def beside_a_capture(torch: Any, work: Callable[[], None]) -> None:
    """Runs `work` on another thread while this thread captures a graph, and replays the graph."""
    graph, counter = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph, capture_error_mode="global"):
        counter += 1
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        counter += 1
    graph.replay()
    torch.cuda.synchronize()
    assert counter.item() == 2


@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float32", "int64", "float8_e4m3fn"])
def test_a_tensor_of_any_type_comes_back(torch_on_gpu: Any, pool: kvpool.Pool, dtype: str) -> None:
    torch = torch_on_gpu
    source = some_bytes(torch, 64 << 10).view(getattr(torch, dtype))
    target = torch.zeros_like(source)
    key = next(_keys)
    assert pool.put(key, source) is True
    assert pool.batch_get([key], [target]) == [64 << 10]
    assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))
    # Other clients get the same bytes into host memory.
    assert pool.get(key) == source.view(torch.uint8).cpu().numpy().tobytes()


def test_one_batch_has_blocks_of_the_gpu_and_of_the_host(torch_on_gpu: Any, pool: kvpool.Pool) -> None:
    torch = torch_on_gpu
    on_gpu = some_bytes(torch, 4096)
    pinned = some_bytes(torch, 4096, seed=2).cpu().pin_memory()
    keys = [next(_keys) for _ in range(5)]
    address = (on_gpu.data_ptr() + 1000, 96)
    blocks = [on_gpu, b"host", address, pinned, [on_gpu[:7], on_gpu[4000:]]]
    assert pool.batch_put(keys, blocks) == [True] * 5
    whole = on_gpu.cpu().numpy().tobytes()
    expected = [whole, b"host", whole[1000:1096], pinned.numpy().tobytes(), whole[:7] + whole[4000:]]
    assert [pool.get(key) for key in keys] == expected
    back = torch.zeros(8192, dtype=torch.uint8, device="cuda")
    host = bytearray(4)
    pinned_back = torch.zeros(4096, dtype=torch.uint8).pin_memory()
    targets = [back[:4096], host, (back.data_ptr() + 5000, 96), pinned_back, [back[6000:6050], back[7000:7100]]]
    assert pool.batch_get(keys, targets) == [4096, 4, 96, 4096, 103]
    assert torch.equal(back[:4096], on_gpu) and torch.equal(back[5000:5096], on_gpu[1000:1096])
    assert bytes(host) == b"host" and torch.equal(pinned_back, pinned)
    assert torch.equal(back[6000:6050], torch.cat([on_gpu[:7], on_gpu[4000:4043]]))
    assert torch.equal(back[7000:7053], on_gpu[4043:]) and not back[7053:].any()
    # The bytes between the targets are unchanged.
    assert not back[4096:5000].any() and not back[5096:6000].any() and not back[6050:7000].any()


def test_a_chain_through_the_gpu_and_the_host_has_its_outcomes_in_order(torch_on_gpu: Any, pool: kvpool.Pool) -> None:
    on_gpu = some_bytes(torch_on_gpu, 4096)
    keys = [next(_keys) for _ in range(6)]
    blocks = [b"host", on_gpu, on_gpu[:7], b"there", on_gpu[7:], b"last"]
    assert pool.put(keys[3], b"there") is True
    stored = pool.batch_put(keys, blocks, parents=[None, *keys[:-1]])
    assert stored == [True, True, True, False, True, True]
    whole = on_gpu.cpu().numpy().tobytes()
    assert [pool.get(key) for key in keys] == [b"host", whole, whole[:7], b"there", whole[7:], b"last"]


def test_host_and_gpu_memory_in_one_block_is_refused(torch_on_gpu: Any, pool: kvpool.Pool) -> None:
    on_gpu = some_bytes(torch_on_gpu, 64)
    good, bad = next(_keys), next(_keys)
    stored, failed = pool.batch_put([good, bad], [b"x", [on_gpu, b"host"]])
    assert stored is True and isinstance(failed, kvpool.InvalidArgumentError)
    assert pool.is_exist([bad]) == [False]


def test_a_block_in_layers_comes_back_to_other_places(torch_on_gpu: Any, pool: kvpool.Pool) -> None:
    torch = torch_on_gpu
    # As in engines, the blocks of each layer are adjacent.
    layers = some_bytes(torch, 64 * 8 * 16384).view(64, 8, 16384)
    keys = [next(_keys) for _ in range(8)]
    assert pool.batch_put(keys, [list(layers[:, block]) for block in range(8)]) == [True] * 8
    back = torch.zeros_like(layers)
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    assert pool.batch_get(keys, [list(back[:, place]) for place in order]) == [64 * 16384] * 8
    assert torch.equal(back[:, order], layers)


def test_more_than_the_staging_memory_goes_in_one_call(torch_on_gpu: Any, make_pool: Any) -> None:
    torch = torch_on_gpu
    living = make_pool(segment="512MiB")
    with kvpool.Pool.connect(living.url) as pool:
        source = some_bytes(torch, 320 * MIB)
        keys = [next(_keys) for _ in range(320)]
        assert pool.batch_put(keys, list(source.split(MIB))) == [True] * 320
        back = torch.zeros_like(source)
        assert pool.batch_get(keys, list(back.split(MIB))) == [MIB] * 320
        assert torch.equal(back, source)


@pytest.mark.parametrize("stream", ["default", "own"])
def test_a_put_waits_for_the_work_that_computes_the_block(
    torch_on_gpu: Any, pool: kvpool.Pool, stream: str
) -> None:
    torch = torch_on_gpu
    block = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    key = next(_keys)
    with torch.cuda.stream(torch.cuda.Stream() if stream == "own" else torch.cuda.default_stream()):
        torch.cuda._sleep(LONG)
        block.fill_(7)
        assert pool.put(key, block) is True
    assert pool.get(key) == b"\x07" * MIB


def test_a_put_on_another_thread_waits_beside_a_capture(torch_on_gpu: Any, pool: kvpool.Pool) -> None:
    torch = torch_on_gpu
    block = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    stream, key = torch.cuda.Stream(), next(_keys)
    outcomes: list[bool] = []
    torch.cuda.synchronize()

    def move() -> None:
        with torch.cuda.stream(stream):
            outcomes.append(pool.put(key, block))

    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        block.fill_(7)
    beside_a_capture(torch, move)
    assert outcomes == [True] and pool.get(key) == b"\x07" * MIB


@pytest.mark.parametrize("stream", ["default", "own"])
def test_a_get_waits_for_the_work_that_uses_the_target(
    torch_on_gpu: Any, pool: kvpool.Pool, stream: str
) -> None:
    torch = torch_on_gpu
    key = next(_keys)
    assert pool.put(key, b"\x09" * MIB) is True
    target = torch.full((MIB,), 3, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if stream == "own" else torch.cuda.default_stream()):
        torch.cuda._sleep(LONG)
        before = target.clone()
        assert pool.batch_get([key], [target]) == [MIB]
        after = target.clone()
    torch.cuda.synchronize()
    assert bool((before == 3).all()) and bool((after == 9).all())


def test_an_address_follows_the_default_stream(torch_on_gpu: Any, pool: kvpool.Pool) -> None:
    torch = torch_on_gpu
    block = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    key = next(_keys)
    torch.cuda._sleep(LONG)
    block.fill_(5)
    assert pool.put(key, (block.data_ptr(), MIB)) is True
    assert pool.get(key) == b"\x05" * MIB


def test_cupy_arrays_name_their_stream(torch_on_gpu: Any, pool: kvpool.Pool) -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    source = cupy.arange(4096, dtype="float32")
    target = cupy.zeros(4096, dtype="float32")
    key = next(_keys)
    assert pool.put(key, source) is True
    assert pool.batch_get([key], [target]) == [16384]
    assert bool((source == target).all())
    (failed,) = pool.batch_get([key], [target.reshape(64, 64).T])
    assert isinstance(failed, kvpool.InvalidArgumentError)
    key = next(_keys)
    block = cupy.zeros(MIB, dtype="uint8")
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, torch_on_gpu.cuda.stream(torch_on_gpu.cuda.ExternalStream(stream.ptr)):
        torch_on_gpu.cuda._sleep(LONG)
        block.fill(7)
        assert pool.put(key, block) is True
    assert pool.get(key) == b"\x07" * MIB


def test_memory_outside_an_allocation_is_refused(torch_on_gpu: Any, pool: kvpool.Pool) -> None:
    block = some_bytes(torch_on_gpu, 4096)
    good, bad = next(_keys), next(_keys)
    # The processor would read memory that it cannot access.
    for outside in [(block.data_ptr(), 1 << 42), (block.data_ptr() - (1 << 42), (1 << 42) + 8)]:
        stored, failed = pool.batch_put([good, bad], [b"x", outside], upsert=True)
        assert stored is True and isinstance(failed, kvpool.InvalidArgumentError)
        with pytest.raises(kvpool.InvalidArgumentError):
            pool.register_buffer(outside)


def test_a_block_that_is_missing_leaves_its_target_alone(torch_on_gpu: Any, pool: kvpool.Pool) -> None:
    target = some_bytes(torch_on_gpu, 4096)
    before = target.clone()
    assert pool.batch_get([next(_keys)], [target]) == [None]
    assert torch_on_gpu.equal(target, before)


def test_a_registered_tensor_is_used_by_its_parts(torch_on_gpu: Any, pool: kvpool.Pool) -> None:
    cache = some_bytes(torch_on_gpu, MIB)
    key = next(_keys)
    with pool.register_buffer(cache) as registration:
        assert pool.put(key, cache[:4096]) is True
        assert pool.batch_get([key], [(registration.address + 8192, 4096)]) == [4096]
    assert torch_on_gpu.equal(cache[8192:12288], cache[:4096])


def test_threads_with_streams_of_their_own_get_their_own_blocks(torch_on_gpu: Any, pool: kvpool.Pool) -> None:
    torch = torch_on_gpu
    right: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for round in range(20):
                source = some_bytes(torch, 3 * MIB + 5, seed=number * 100 + round)
                target = torch.zeros_like(source)
                key = f"thread-{number}-{round}"
                done = [pool.put(key, source), pool.batch_get([key], [target])]
                if done == [True, [3 * MIB + 5]] and torch.equal(source, target):
                    right.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(right) == 6 * 20


def test_blocks_move_beside_the_capture_of_a_graph(torch_on_gpu: Any, make_pool: Any) -> None:
    torch = torch_on_gpu
    block, other = some_bytes(torch, MIB), torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    outcomes: list[Any] = []
    url = make_pool().url

    def move() -> None:
        # A client of its own allocates pinned memory and streams during the capture.
        with kvpool.Pool.connect(url) as pool:
            outcomes.append(pool.put("captured", (block.data_ptr(), MIB)))
            outcomes.append(pool.batch_get(["captured"], [(other.data_ptr(), MIB)]))

    beside_a_capture(torch, move)
    assert outcomes == [True, [MIB]] and torch.equal(other, block)


EXPANDABLE = """
import sys, kvpool, torch
pieces = [torch.randint(0, 256, (15 << 20,), dtype=torch.uint8, device="cuda") for _ in range(4)]
whole = torch.randint(0, 256, (60 << 20,), dtype=torch.uint8, device="cuda")
with kvpool.Pool.connect(sys.argv[1]) as pool:
    for name, block in [("pieces", pieces), ("whole", whole)]:
        back = torch.zeros(60 << 20, dtype=torch.uint8, device="cuda")
        source = torch.cat(pieces) if name == "pieces" else block
        assert pool.put(name, block) is True
        assert pool.batch_get([name], [back[: source.numel()]]) == [source.numel()]
        assert torch.equal(back[: source.numel()], source), name
print("same")
"""


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_memory_of_every_allocator_of_torch_is_known(
    torch_on_gpu: Any, make_pool: Any, setting: str
) -> None:
    url = make_pool(segment="512MiB").url
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
    command = [sys.executable, "-c", EXPANDABLE, url]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "same", done.stderr[-2000:]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_connectors_staging_gathers_and_scatters(torch_on_gpu: Any, device: str) -> None:
    from kvpool.vllm.memory import group_memory

    torch = torch_on_gpu
    blocks = 32
    # Two layers with keys before values in each block, and a layer whose heads are outside its blocks.
    caches = [some_bytes(torch, blocks * 8192, seed=at).view(blocks, 2, 16, 256).to(device) for at in (1, 2)]
    caches.append(some_bytes(torch, 4 * blocks * 1024, seed=3).view(4, blocks, 1024).transpose(0, 1).to(device))
    memory = group_memory(caches, blocks, kept=False, stage=True, staging_bytes=1 << 20)
    assert memory.staging is not None and memory.direct is False
    before = [cache.clone() for cache in caches]
    if device == "cuda":
        torch.cuda._sleep(LONG)
    for cache in caches:
        cache.add_(1)
    copies = memory.staging.gather([3, 30, 7], memory.staging.mark())
    for at, block in enumerate([3, 30, 7]):
        row = copies.tensor[at]
        expected = [(cache[block] + 1).reshape(-1) for cache in before]
        assert sorted(row.tolist()) == sorted(torch.cat(expected).tolist())
    memory.staging.scatter([10, 11, 12], copies, memory.staging.mark())
    for cache in caches:
        for source, target in zip([3, 30, 7], [10, 11, 12]):
            assert torch.equal(cache[target], cache[source])
    untouched = [block for block in range(blocks) if block not in (10, 11, 12)]
    for cache, old in zip(caches, before):
        assert torch.equal(cache[untouched], old[untouched] + 1)
