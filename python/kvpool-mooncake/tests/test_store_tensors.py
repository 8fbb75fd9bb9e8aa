"""PyTorch tensors as objects."""

from __future__ import annotations

import ctypes

import pytest
from mooncake._tensor_format import decode_header, encode_header
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from lent_memory import Memory


def test_a_header_describes_its_tensor() -> None:
    header = encode_header("bfloat16", [3, 0, 5])
    assert len(header) % 64 == 0
    assert decode_header(memoryview(header + b"data")) == ("bfloat16", [3, 0, 5], len(header))


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"KVT1",
        b"nope" * 100,
        b"KVT1\xff\xff\xff\xff" + b"x" * 64,
        b"KVT1\x02\x00\x00\x00[]" + b"\0" * 64,
    ],
)
def test_an_invalid_header_is_refused(bad: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode_header(memoryview(bad))


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def test_a_tensor_comes_back_with_its_type_and_shape(
    store: MooncakeDistributedStore, key: str, torch
) -> None:
    tensors = [
        torch.randn(3, 4),
        torch.arange(10, dtype=torch.int64),
        torch.randn(5, 2).to(torch.bfloat16),
        torch.tensor(7, dtype=torch.uint8),
        torch.tensor([True, False]),
        torch.randn(4, 6).t(),
        torch.empty(0, 3),
    ]
    keys = [f"{key}-{n}" for n in range(len(tensors))]
    assert store.put_tensor(keys[0], tensors[0]) == 0
    assert store.batch_put_tensor(keys[1:], tensors[1:]) == [0] * (len(tensors) - 1)
    for tensor, got in zip(tensors, store.batch_get_tensor(keys)):
        assert got.dtype == tensor.dtype and got.shape == tensor.shape
        assert torch.equal(got, tensor)
    # The tensor belongs to the caller, and is writable.
    got = store.get_tensor(keys[0])
    got += 1
    assert torch.equal(store.get_tensor(keys[0]), tensors[0])


def test_a_miss_and_an_object_without_a_tensor_are_none(store: MooncakeDistributedStore, key: str, torch) -> None:
    assert store.get_tensor(key) is None
    assert store.put(key, b"no tensor" * 100) == 0
    assert store.get_tensor(key) is None
    assert store.batch_get_tensor([key, f"{key}-none"]) == [None, None]
    with pytest.raises(TypeError, match="Tensor"):
        store.put_tensor(f"{key}-2", [1, 2])


def test_a_published_tensor_takes_a_configuration_and_an_upsert_replaces(
    store: MooncakeDistributedStore, key: str, torch
) -> None:
    one, two = torch.ones(3), torch.zeros(2, 2)
    assert store.pub_tensor(key, one, ReplicateConfig(with_hard_pin=True)) == 0
    assert store.remove(key) == -706
    assert store.put_tensor(key, two) == 0
    assert torch.equal(store.get_tensor(key), one)
    assert store.upsert_tensor(key, two) == 0
    assert torch.equal(store.get_tensor(key), two)
    assert store.batch_upsert_tensor([key], [one]) == [0]
    assert store.upsert_pub_tensor(key, two, ReplicateConfig()) == 0
    assert store.batch_upsert_pub_tensor([key], [one], ReplicateConfig()) == [0]
    assert store.batch_pub_tensor([f"{key}-b"], [two], ReplicateConfig()) == [0]
    assert torch.equal(store.get_tensor(key), one)


def test_a_tensor_is_read_into_memory_and_put_from_there(
    store: MooncakeDistributedStore, key: str, torch, memory: type[Memory]
) -> None:
    tensor = torch.randn(16, 16)
    assert store.put_tensor(key, tensor) == 0
    size = store.get_size(key)
    place = memory(size)
    got = store.get_tensor_into(key, place.ptr, place.size)
    assert torch.equal(got, tensor)
    assert place.ptr <= got.data_ptr() < place.ptr + size
    assert store.get_tensor_into(key, place.ptr, size - 1) is None
    assert store.batch_get_tensor_into([key, f"{key}-none"], [place.ptr] * 2, [size] * 2)[1] is None
    assert store.put_tensor_from(f"{key}-2", place.ptr, size) == 0
    assert torch.equal(store.get_tensor(f"{key}-2"), tensor)
    assert store.batch_put_tensor_from([f"{key}-4", f"{key}-5"], [place.ptr, 0], [size] * 2) == [0, -600]
    other = torch.ones(16, 16)
    assert store.upsert_tensor(f"{key}-4", other) == 0
    assert store.upsert_tensor_from(f"{key}-4", place.ptr, size) == 0
    assert store.batch_upsert_tensor_from([f"{key}-5"], [place.ptr], [size]) == [0]
    assert all(torch.equal(got, tensor) for got in store.batch_get_tensor([f"{key}-4", f"{key}-5"]))
    ctypes.memset(place.ptr, 0, 4)
    assert store.put_tensor_from(f"{key}-3", place.ptr, size) == -600
    assert store.put_tensor_from(f"{key}-3", 0, size) == -600


def test_a_lazy_conjugate_or_negative_is_put_with_its_own_values(
    store: MooncakeDistributedStore, key: str, torch
) -> None:
    tensor = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1)
    conjugate, negative = tensor.conj(), tensor.conj().imag
    assert conjugate.is_conj() and negative.is_neg()
    assert store.batch_put_tensor([f"{key}-0", f"{key}-1"], [conjugate, negative]) == [0, 0]
    for got, wanted in zip(store.batch_get_tensor([f"{key}-0", f"{key}-1"]), (conjugate, negative)):
        assert torch.equal(got, wanted.resolve_conj().resolve_neg())
    # Bytes that were read into such a tensor would show other values.
    assert store.get_tensor_into_cuda(f"{key}-0", torch.zeros(6, dtype=torch.complex64).conj()) == -600


def test_a_tensor_is_split_for_parallel_ranks(
    store: MooncakeDistributedStore, key: str, torch, memory: type[Memory]
) -> None:
    tensor = torch.arange(24).reshape(4, 6)
    assert store.put_tensor_with_tp(key, tensor, tp_size=3, split_dim=1) == 0
    assert store.is_exist(f"{key}_tp_2") == 1
    shards = [store.get_tensor_with_tp(key, rank, 3, 1) for rank in range(3)]
    assert torch.equal(torch.cat(shards, dim=1), tensor)
    assert store.get_tensor_with_tp(key, 3, 3, 1) is None
    assert store.put_tensor_with_tp(f"{key}-whole", tensor) == 0
    assert torch.equal(store.get_tensor_with_tp(f"{key}-whole"), tensor)
    assert store.batch_put_tensor_with_tp([f"{key}-a", f"{key}-b"], [tensor, tensor[0]], 0, 2, 1) == [0, -600]
    assert torch.equal(store.batch_get_tensor_with_tp([f"{key}-a"], 1, 2)[0], tensor[:, 3:])
    assert store.put_tensor_with_tp(f"{key}-c", tensor, tp_size=0) == -600
    assert store.put_tensor_with_tp(f"{key}-c", tensor, tp_size=5) == -600
    # The whole tensor in memory is split by the put.
    place = memory(store.get_size(f"{key}-whole"))
    assert store.get_tensor_with_tp_into(f"{key}-whole", place.ptr, place.size) is not None
    assert store.put_tensor_with_tp_from(f"{key}-d", place.ptr, place.size, 0, 2, 0) == 0
    assert torch.equal(store.get_tensor_with_tp(f"{key}-d", 1, 2), tensor[2:])
    pinned = ReplicateConfig(with_hard_pin=True)
    assert store.pub_tensor_with_tp(f"{key}-e", tensor, pinned, 0, 2, 0) == 0
    assert store.batch_pub_tensor_with_tp([f"{key}-f"], [tensor], pinned, 0, 2, 0) == [0]
    half = memory(store.get_size(f"{key}-e_tp_1"))
    for name in ("e", "f"):
        (got,) = store.batch_get_tensor_with_tp_into([f"{key}-{name}"], [half.ptr], [half.size], 1, 2)
        assert torch.equal(got, tensor[2:])
