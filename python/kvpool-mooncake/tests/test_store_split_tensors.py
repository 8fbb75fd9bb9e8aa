"""Tensors that are split over ranks: writers and readers of the same split, and of different splits."""

from __future__ import annotations

import threading
import types

import pytest
from mooncake.store import MooncakeDistributedStore, ParallelAxis, ReadTarget, ReplicateConfig, TensorParallelism
from lent_memory import Memory

torch = pytest.importorskip("torch", reason="torch is not installed")


def tp(rank: int, size: int, dim: int, *others: ParallelAxis) -> TensorParallelism:
    return TensorParallelism([*others, ParallelAxis("tp", rank, size, split_dim=dim)])


def shard(rank: int, size: int, dim: int, *others: ParallelAxis) -> ReadTarget:
    return ReadTarget("shard", tp(rank, size, dim, *others))


def put_shards(store: MooncakeDistributedStore, key: str, tensor, size: int, dim: int) -> None:
    """Each rank puts its own shard, as the ranks of a group do."""
    for rank, part in enumerate(tensor.chunk(size, dim)):
        assert store.put_tensor_with_parallelism(key, part, tp(rank, size, dim)) == 0


@pytest.mark.parametrize("shape", [(16,), (8, 12), (24, 8, 5), (3, 24, 7), (40, 8), (2, 20, 16)])
def test_four_writers_are_read_by_two_by_one_and_by_eight(
    store: MooncakeDistributedStore, key: str, shape: tuple[int, ...]
) -> None:
    for dim in range(len(shape)):
        if shape[dim] % 4:
            continue
        tensor = torch.randn(shape)
        name = f"{key}-{dim}"
        put_shards(store, name, tensor, 4, dim)
        for size in (1, 2, 3, 4, 8):
            if shape[dim] % size:
                assert store.get_tensor_with_parallelism(name, shard(0, size, dim)) is None
                continue
            for rank, expected in enumerate(tensor.chunk(size, dim)):
                got = store.get_tensor_with_parallelism(name, shard(rank, size, dim))
                assert got is not None and torch.equal(got, expected), (dim, size, rank)
        assert torch.equal(store.get_tensor_with_parallelism(name, ReadTarget("full", tp(1, 2, dim))), tensor)


def test_a_part_comes_into_memory_with_its_header(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    tensor = torch.arange(64 * 32, dtype=torch.bfloat16).reshape(64, 32)
    put_shards(store, key, tensor, 4, 1)
    place = memory(64 + 64 * 16 * 2)
    got = store.get_tensor_with_parallelism_into(key, place.ptr, place.size, shard(1, 2, 1))
    assert torch.equal(got, tensor[:, 16:])
    assert place.ptr <= got.data_ptr() < place.ptr + place.size
    # The encoded tensors in memory are put again.
    assert store.put_tensor_from(f"{key}-2", place.ptr, place.size) == 0
    assert torch.equal(store.get_tensor(f"{key}-2"), tensor[:, 16:])
    assert store.get_tensor_with_parallelism_into(key, place.ptr, place.size - 1, shard(1, 2, 1)) is None
    assert store.get_tensor_with_parallelism_into(key, 0, place.size, shard(1, 2, 1)) is None
    # With more ranks there are gaps between the rows of a part.
    small = memory(64 + 64 * 4 * 2)
    got = store.batch_get_tensor_with_parallelism_into(
        [key, f"{key}-none"], [small.ptr] * 2, [small.size] * 2, [shard(5, 8, 1)] * 2
    )
    assert torch.equal(got[0], tensor[:, 20:24]) and got[1] is None


def test_a_whole_tensor_in_memory_is_split_on_the_way(
    store: MooncakeDistributedStore, key: str, memory: type[Memory]
) -> None:
    tensor = torch.randn(12, 8)
    assert store.put_tensor(key, tensor) == 0
    place = memory(store.get_size(key))
    assert store.get_tensor_into(key, place.ptr, place.size) is not None
    assert store.put_tensor_with_parallelism_from(f"{key}-a", place.ptr, place.size, tp(0, 4, 0)) == 0
    assert torch.equal(store.get_tensor_with_parallelism(f"{key}-a", shard(1, 2, 0)), tensor[6:])
    codes = store.batch_put_tensor_with_parallelism_from(
        [f"{key}-b", f"{key}-c"], [place.ptr, 0], [place.size] * 2, [tp(0, 2, 1), None]
    )
    assert codes == [0, -600]
    assert torch.equal(store.get_tensor_with_tp(f"{key}-b", 1, 2, 1), tensor[:, 4:])
    assert store.upsert_tensor_with_parallelism_from(f"{key}-a", place.ptr, place.size, tp(0, 2, 1)) == 0
    assert store.batch_upsert_tensor_with_parallelism_from([f"{key}-b"], [place.ptr], [place.size]) == [0]
    assert torch.equal(store.get_tensor_with_parallelism(f"{key}-a", shard(0, 2, 1)), tensor[:, :4])
    assert torch.equal(store.get_tensor_with_parallelism(f"{key}-b"), tensor)


@pytest.mark.parametrize(
    "other", [ParallelAxis("dp", 1, 2), ParallelAxis("ep", 0, 2, expert_id=11), ParallelAxis("pp", 1, 3, stage_id=7)]
)
def test_more_axes_name_a_shard_in_any_order(store: MooncakeDistributedStore, key: str, other: ParallelAxis) -> None:
    tensor = torch.randn(8, 12)
    for rank in range(4):
        assert store.put_tensor_with_parallelism(key, tensor, tp(rank, 4, 1, other)) == 0
    turned = ReadTarget("shard", TensorParallelism([ParallelAxis("tp", 1, 2, split_dim=1), other]))
    assert torch.equal(store.get_tensor_with_parallelism(key, turned), tensor[:, 6:])
    assert torch.equal(store.get_tensor_with_parallelism(key, ReadTarget("full", tp(0, 2, 1, other))), tensor)
    stored = ReadTarget("as_stored", tp(3, 4, 1, other))
    assert torch.equal(store.get_tensor_with_parallelism(key, stored), tensor[:, 9:])
    # The other group has put nothing.
    elsewhere = ParallelAxis("dp", 0, 2)
    assert store.get_tensor_with_parallelism(key, shard(0, 4, 1, elsewhere)) is None


def test_an_axis_without_a_split_names_an_object(store: MooncakeDistributedStore, key: str) -> None:
    tensor = torch.randn(3)
    expert = TensorParallelism([ParallelAxis("ep", 1, 2, expert_id=3)])
    assert store.put_tensor_with_parallelism(key, tensor, expert) == 0
    assert torch.equal(store.get_tensor_with_parallelism(key, ReadTarget("shard", expert)), tensor)
    assert store.get_tensor_with_parallelism(key, ReadTarget("full", expert)) is None
    assert store.get_tensor_with_parallelism(key) is None


def test_writers_share_a_whole_tensor(store: MooncakeDistributedStore, key: str) -> None:
    tensor = torch.randn(6, 8)
    partitions = [types.SimpleNamespace(rank=rank, size=4, split_dim=1) for rank in range(4)]
    for partition in partitions[:3]:
        assert store.put_tensor_with_parallelism(key, tensor, writer_partition=partition) == 0
    assert store.get_tensor_with_parallelism(key, ReadTarget("full")) is None
    assert store.batch_put_tensor_with_parallelism([key], [tensor], writer_partitions=partitions[3:]) == [0]
    assert torch.equal(store.get_tensor_with_parallelism(key, ReadTarget("full")), tensor)
    assert torch.equal(store.get_tensor_with_parallelism(key, shard(1, 2, 1)), tensor[:, 4:])
    assert store.put_tensor_with_parallelism(key, tensor, tp(0, 4, 1), writer_partition=partitions[0]) == -600
    uneven = types.SimpleNamespace(rank=0, size=4, split_dim=0)
    assert store.put_tensor_with_parallelism(key, tensor, writer_partition=uneven) == -600
    assert store.put_tensor_with_parallelism(key, tensor, writer_partition="0 of 4") == -600


def test_shards_of_the_older_interface_are_read_in_other_splits(store: MooncakeDistributedStore, key: str) -> None:
    tensor = torch.randn(10, 6)
    assert store.put_tensor_with_tp(key, tensor, tp_size=4, split_dim=0) == 0
    assert torch.equal(store.get_tensor_with_parallelism(key, shard(1, 2, 0)), tensor[5:])
    put_shards(store, f"{key}-2", tensor, 2, 1)
    assert torch.equal(store.get_tensor_with_tp(f"{key}-2", 1, 2, 1), tensor[:, 3:])


def test_a_shard_that_is_missing_or_replaced_is_a_miss(store: MooncakeDistributedStore, key: str) -> None:
    tensor = torch.randn(8, 4)
    put_shards(store, key, tensor, 4, 0)
    assert store.remove(f"{key}_tp_2", force=True) == 0
    assert store.get_tensor_with_parallelism(key, ReadTarget("full", tp(0, 4, 0))) is None
    assert store.get_tensor_with_parallelism(key, shard(1, 2, 0)) is None
    assert torch.equal(store.get_tensor_with_parallelism(key, shard(0, 2, 0)), tensor[:4])
    # Another writer replaced one shard: the reader gets no mixture.
    assert store.upsert_tensor(f"{key}_tp_0", torch.zeros(1, 4)) == 0
    assert store.get_tensor_with_parallelism(key, shard(0, 2, 0)) is None
    # Without the manifest the split is unknown.
    assert store.remove(f"{key}__parallelism_manifest", force=True) == 0
    assert store.get_tensor_with_parallelism(key, shard(1, 4, 0)) is None


def test_an_upsert_replaces_the_split(store: MooncakeDistributedStore, key: str) -> None:
    first, second = torch.randn(8, 4), torch.randn(8, 4)
    put_shards(store, key, first, 4, 0)
    for rank, part in enumerate(second.chunk(2, 1)):
        assert store.upsert_tensor_with_parallelism(key, part, tp(rank, 2, 1)) == 0
    assert torch.equal(store.get_tensor_with_parallelism(key, ReadTarget("full", tp(0, 2, 1))), second)
    assert store.get_tensor_with_parallelism(key, shard(0, 2, 0)) is None
    parts = [*second.chunk(2, 0)]
    for rank, part in enumerate(parts):
        codes = store.batch_upsert_tensor_with_parallelism([key], [part], [tp(rank, 2, 0)], ReplicateConfig())
        assert codes == [0]
    assert torch.equal(store.get_tensor_with_parallelism(key, shard(3, 4, 0)), second[6:])


def test_ranks_put_and_get_at_the_same_time(store: MooncakeDistributedStore, key: str) -> None:
    tensor = torch.randn(64, 256)
    codes: list[int] = []

    def put(rank: int) -> None:
        codes.append(store.put_tensor_with_parallelism(key, tensor.chunk(4, 1)[rank], tp(rank, 4, 1)))

    def get(rank: int) -> None:
        got = store.get_tensor_with_parallelism(key, shard(rank, 2, 1))
        codes.append(0 if torch.equal(got, tensor.chunk(2, 1)[rank]) else 1)

    for work, ranks in ((put, 4), (get, 2)):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert codes == [0] * 6


def test_batches_answer_each_key(store: MooncakeDistributedStore, key: str) -> None:
    tensors = [torch.randn(4, 4), torch.randn(6)]
    keys = [f"{key}-a", f"{key}-b"]
    assert store.batch_put_tensor_with_parallelism(keys, tensors) == [0, 0]
    assert all(map(torch.equal, store.batch_get_tensor_with_parallelism(keys), tensors))
    assert store.batch_put_tensor_with_parallelism(keys, tensors, [None]) == [-600, -600]
    bad = tp(0, 2, 1)
    assert store.batch_put_tensor_with_parallelism([f"{key}-c", f"{key}-d"], tensors, [bad, bad]) == [0, -600]
    got = store.batch_get_tensor_with_parallelism([f"{key}-c", key], [shard(0, 2, 1), None])
    assert torch.equal(got[0], tensors[0]) and got[1] is None
    assert store.batch_get_tensor_with_parallelism(keys, [None]) == [None, None]
    with pytest.raises(TypeError):
        store.put_tensor_with_parallelism(key, [1, 2])


@pytest.mark.parametrize(
    "axes",
    [
        [],
        [ParallelAxis("tp", 0, 2)],
        [ParallelAxis("tp", 2, 2, split_dim=0)],
        [ParallelAxis("tp", -1, 2, split_dim=0)],
        [ParallelAxis("tp", 0, 2, split_dim=-1)],
        [ParallelAxis("tp", 0, 2, split_dim=5)],
        [ParallelAxis("dp", 0, 2, split_dim=0)],
        [ParallelAxis("ep", 0, 2)],
        [ParallelAxis("pp", 0, 2)],
        [ParallelAxis("xx", 0, 2)],
        [ParallelAxis("dp", 0, 2), ParallelAxis("dp", 1, 2)],
        [ParallelAxis("dp", 0, 2), ParallelAxis("tp", 0, 3, split_dim=0)],
    ],
)
def test_invalid_axes_are_refused(store: MooncakeDistributedStore, key: str, axes: list[ParallelAxis]) -> None:
    split = TensorParallelism(axes)
    assert store.put_tensor_with_parallelism(key, torch.zeros(4, 4), split) == -600
    assert store.get_tensor_with_parallelism(key, ReadTarget("shard", split)) is None


def test_a_target_has_one_of_three_modes() -> None:
    with pytest.raises(RuntimeError, match="as_stored"):
        ReadTarget("some")
    target = ReadTarget()
    with pytest.raises(RuntimeError):
        target.mode = "all"
    assert target.mode == "as_stored" and target.parallelism is None
