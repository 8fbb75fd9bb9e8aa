"""The store and the engine with the memory of a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
from mooncake._base import Refusals
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore
from mooncake.structured_object_store import MooncakeBundleTransfer, raw_destination, tensor_object_buffer
from gpus import torch_on_gpu

__all__ = ["torch_on_gpu"]

MIB = 1 << 20


def some_bytes(torch: Any, count: int, seed: int = 1) -> Any:
    """Random bytes on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device="cuda", generator=generator)


def test_addresses_of_a_gpu_are_put_from_and_got_into(
    torch_on_gpu: Any, store: MooncakeDistributedStore, key: str
) -> None:
    torch = torch_on_gpu
    source, target = some_bytes(torch, MIB), torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    assert store.register_buffer(source.data_ptr(), MIB) == 0
    assert store.register_buffer(target.data_ptr(), MIB) == 0
    assert store.put_from(key, source.data_ptr(), MIB) == 0
    assert store.get_into(key, target.data_ptr(), MIB) == MIB
    assert torch.equal(source, target)
    assert store.get(key) == source.cpu().numpy().tobytes()
    assert store.unregister_buffer(source.data_ptr()) == 0
    assert store.unregister_buffer(target.data_ptr()) == 0


def test_a_batch_mixes_the_gpu_and_the_host(
    torch_on_gpu: Any, store: MooncakeDistributedStore, key: str
) -> None:
    torch = torch_on_gpu
    on_gpu, on_host = some_bytes(torch, 8192), some_bytes(torch, 8192, seed=2).cpu()
    keys = [f"{key}-{at}" for at in range(2)]
    addresses = [on_gpu.data_ptr(), on_host.data_ptr()]
    assert store.batch_put_from(keys, addresses, [8192, 8192]) == [0, 0]
    back = torch.zeros(8192, dtype=torch.uint8, device="cuda")
    host_back = torch.zeros(8192, dtype=torch.uint8)
    # Each block is read into the other kind of memory.
    assert store.batch_get_into(keys, [host_back.data_ptr(), back.data_ptr()], [8192, 8192]) == [8192, 8192]
    assert torch.equal(host_back, on_gpu.cpu()) and torch.equal(back.cpu(), on_host)


def test_a_block_has_many_pieces_on_the_gpu(
    torch_on_gpu: Any, store: MooncakeDistributedStore, key: str
) -> None:
    torch = torch_on_gpu
    layers = some_bytes(torch, 32 * 65536).view(32, 65536)
    back = torch.zeros_like(layers)
    pieces = [layer.data_ptr() for layer in layers]
    assert store.batch_put_from_multi_buffers([key], [pieces], [[65536] * 32]) == [0]
    pieces = [layer.data_ptr() for layer in back]
    assert store.batch_get_into_multi_buffers([key], [pieces], [[65536] * 32]) == [32 * 65536]
    assert torch.equal(layers, back)


def test_a_put_from_an_address_follows_the_default_stream(
    torch_on_gpu: Any, store: MooncakeDistributedStore, key: str
) -> None:
    torch = torch_on_gpu
    block = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    block.fill_(6)
    assert store.put_from(key, block.data_ptr(), MIB) == 0
    assert store.get(key) == b"\x06" * MIB


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_of_a_gpu_are_stored_and_read_into_tensors(
    torch_on_gpu: Any, store: MooncakeDistributedStore, key: str, dtype: str
) -> None:
    torch = torch_on_gpu
    tensor = torch.randn(100, 64, device="cuda").to(getattr(torch, dtype))
    assert store.put_tensor(key, tensor) == 0
    assert torch.equal(store.get_tensor(key).cpu(), tensor.cpu())
    place = torch.zeros_like(tensor)
    assert store.get_tensor_into_cuda(key, place) == tensor.numel() * tensor.element_size()
    assert torch.equal(place, tensor)
    wrong = torch.zeros(64, 100, device="cuda", dtype=tensor.dtype)
    assert store.get_tensor_into_cuda(key, wrong) == -600


def test_encoded_tensors_are_not_looked_for_on_a_gpu(
    torch_on_gpu: Any, store: MooncakeDistributedStore, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch = torch_on_gpu
    assert store.put_tensor(key, torch.ones(4, 4)) == 0
    size = store.get_size(key)
    place = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    # Warnings of earlier calls leave out no line of this one.
    store._refusals = Refusals()
    assert store.get_tensor_into(key, place.data_ptr(), size) is None
    assert "get_tensor_into_cuda" in caplog.text
    # The GPU memory may hold a tensor with its header, but Python does not read it.
    assert store.get_into(key, place.data_ptr(), size) == size
    assert store.put_tensor_from(f"{key}-2", place.data_ptr(), size) == -600
    assert store.put_tensor_with_tp_from(f"{key}-2", place.data_ptr(), size, 0, 2, 0) == -600
    assert store.put_tensor_with_parallelism_from(f"{key}-2", place.data_ptr(), size) == -600
    assert store.put_from(f"{key}-2", place.data_ptr(), size) == 0
    assert torch.equal(store.get_tensor(f"{key}-2"), torch.ones(4, 4))


def test_range_reads_into_a_gpu_are_refused(
    torch_on_gpu: Any, store: MooncakeDistributedStore, key: str
) -> None:
    torch = torch_on_gpu
    source = some_bytes(torch, MIB)
    assert store.put_from(key, source.data_ptr(), MIB) == 0
    target = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    assert store.register_buffer(target.data_ptr(), MIB) == 0
    # Lists for each buffer: its keys, and for each key the places, offsets and sizes.
    read = store.get_into_ranges([target.data_ptr()], [[key]], [[[0]]], [[[0]]], [[[4096]]])
    assert read == [[[-600]]] and not target.any()


def test_members_of_a_structured_object_are_of_the_host(
    torch_on_gpu: Any, store: MooncakeDistributedStore, key: str
) -> None:
    place = torch_on_gpu.zeros(4096, dtype=torch_on_gpu.uint8, device="cuda")
    transfer = MooncakeBundleTransfer(store, key)
    with pytest.raises(ValueError, match="no memory of the host"):
        transfer.put_object({"t": tensor_object_buffer(place.data_ptr(), 4096, place)})
    spec = transfer.read_spec(transfer.put_object({"b": b"bytes"}))
    with pytest.raises(ValueError, match="no memory of the host"):
        transfer.materialize_into(spec, {"b": raw_destination(place.data_ptr(), 4096, place)})
    # Pinned host memory counts as host memory.
    pinned = torch_on_gpu.zeros(4096, dtype=torch_on_gpu.uint8).pin_memory()
    transfer.materialize_into(spec, {"b": raw_destination(pinned.data_ptr(), 4096, pinned)})
    assert bytes(pinned[:5].tolist()) == b"bytes"
    assert store.register_buffer(pinned.data_ptr(), 4096) == 0
    assert store.put_from(f"{key}-pinned", pinned.data_ptr(), 4096) == 0


def test_the_engine_refuses_memory_of_a_gpu(torch_on_gpu: Any) -> None:
    memory = some_bytes(torch_on_gpu, MIB)
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.data_ptr(), MIB) < 0
    own = f"127.0.0.1:{engine.get_rpc_port()}"
    host = torch_on_gpu.zeros(MIB, dtype=torch_on_gpu.uint8)
    assert engine.register_memory(host.data_ptr(), MIB) == 0
    assert engine.transfer_sync_write(own, memory.data_ptr(), host.data_ptr(), MIB) < 0
    assert engine.transfer_sync_read(own, memory.data_ptr(), host.data_ptr(), MIB) < 0
    assert not host.any()
