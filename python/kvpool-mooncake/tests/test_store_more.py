"""Embedding tables, safetensors, tensors into tensors, types, and methods without a meaning here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mooncake import store as module
from mooncake.store import (
    EngramStore,
    EngramStoreConfig,
    MooncakeDistributedNoFRegister,
    MooncakeDistributedStore,
    QueryTaskResponse,
    ReplicateConfig,
    SoftPinAction,
    TaskStatus,
    TaskType,
)
from live_pools import LivePool


def test_rows_of_embedding_tables_are_looked_up(store: MooncakeDistributedStore, key: str) -> None:
    numpy = pytest.importorskip("numpy")
    config = EngramStoreConfig([17, 19, 23], 8)
    layer = int(key[-7:], 16)
    tables = EngramStore(layer, config, store)
    assert tables.get_store_keys() == [f"engram:l{layer}:h{head}" for head in range(3)]
    assert (tables.get_num_heads(), tables.get_embedding_dim()) == (3, 8)
    with pytest.raises(RuntimeError, match="cannot be read"):
        tables.lookup([[[0, 0, 0]]])
    values = [numpy.random.rand(rows, 8).astype(numpy.float32) for rows in tables.get_table_vocab_sizes()]
    with pytest.raises(RuntimeError, match="shape"):
        tables.populate([values[0][:-1], *values[1:]])
    with pytest.raises(RuntimeError, match="heads"):
        tables.populate(values[:2])
    tables.populate(values)
    with pytest.raises(RuntimeError, match="already"):
        tables.populate(values)
    ids = numpy.array([[[0, 1, 22], [16, 18, 0], [0, 1, 22]], [[5, 5, 5], [4, 3, 2], [1, 1, 1]]])
    found = tables.lookup(ids)
    assert found.shape == (2, 3, 3, 8)
    for head in range(3):
        assert numpy.array_equal(found[:, :, head], values[head][ids[:, :, head]])
    assert numpy.array_equal(tables.lookup(ids.tolist()), found)
    for wrong in ([], [[[0, 1]]], [[[0, 1, 23]]], [[[-1, 1, 2]]], [[[True, False, True]]], [[[0.5, 1.0, 2.0]]], "rows"):
        with pytest.raises(RuntimeError):
            tables.lookup(wrong)
    assert tables.remove_from_store(force=True) == 3
    assert tables.remove_from_store() == 0
    with pytest.raises(RuntimeError, match="without a store"):
        EngramStore(1, config).lookup(ids)
    for bad in (EngramStoreConfig([], 8), EngramStoreConfig([1], 0), EngramStoreConfig([0], 8)):
        with pytest.raises(ValueError):
            EngramStore(1, bad)


def test_all_embedding_tables_are_put_or_the_error_has_their_number(
    store: MooncakeDistributedStore, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy = pytest.importorskip("numpy")
    tables = EngramStore(int(key[-7:], 16), EngramStoreConfig([3, 3], 2), store)
    good, bad = numpy.ones((3, 2), numpy.float32), numpy.array([["x", "y"]] * 3)
    with pytest.raises(RuntimeError, match="head 1"):
        tables.populate([good, bad])
    assert store.batch_is_exist(tables.get_store_keys()) == [0, 0]
    # The second table exceeds the largest object. Its zeros take no memory, because nothing reads them.
    wide = EngramStore(int(key[-7:], 16), EngramStoreConfig([1, 1 << 15], 1 << 14), store)
    with pytest.raises(RuntimeError, match="head 1 has 2147483648 bytes"):
        wide.populate([numpy.ones((1, 1 << 14), numpy.float32), numpy.zeros((1 << 15, 1 << 14), numpy.float32)])
    assert store.batch_is_exist(wide.get_store_keys()) == [0, 0]
    with pytest.raises(RuntimeError, match="no table is put"):
        EngramStore(1, EngramStoreConfig([3], 2), MooncakeDistributedStore()).populate([good])
    put = store.batch_put_from
    # The second table's memory is invalid, so only its put fails.
    monkeypatch.setattr(store, "batch_put_from", lambda keys, ptrs, sizes: put(keys, ptrs, [sizes[0], -1]))
    with pytest.raises(RuntimeError, match="1 of 2 tables are put"):
        tables.populate([good, good])
    assert store.batch_is_exist(tables.get_store_keys()) == [1, 0]


def test_a_tensor_goes_to_a_safetensors_file_and_back(
    store: MooncakeDistributedStore, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    tensor, file = torch.randn(5, 7).to(torch.bfloat16), str(tmp_path / "one.safetensors")
    assert store.save_tensor_to_safetensor(key, file) == -704
    assert store.put_tensor(key, tensor) == 0
    assert store.save_tensor_to_safetensor(key, file) == 0
    assert store.save_tensor_to_safetensor(key, str(tmp_path / "none" / "x")) == -600
    assert store.remove(key, force=True) == 0
    assert torch.equal(store.load_tensor_from_safetensor(key, file), tensor)
    assert torch.equal(store.get_tensor(key), tensor)
    # Under another key, and under the file's own name.
    assert torch.equal(store.load_tensor_from_safetensor(f"{key}-2", file), tensor)
    assert key not in caplog.text or "first tensor" in caplog.text
    assert torch.equal(store.load_tensor_from_safetensor(file_name=file), tensor)
    assert torch.equal(store.get_tensor(file), tensor)
    assert store.load_tensor_from_safetensor(key, str(tmp_path / "missing")) is None
    (tmp_path / "bad").write_bytes(b"nonsense")
    assert store.load_tensor_from_safetensor(key, str(tmp_path / "bad")) is None
    assert MooncakeDistributedStore().save_tensor_to_safetensor(key, file) == -600
    assert MooncakeDistributedStore().load_tensor_from_safetensor(key, file) is None


def test_a_tensor_is_read_into_a_tensor(store: MooncakeDistributedStore, key: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor, place = torch.randn(6, 4), torch.zeros(6, 4)
    assert store.get_tensor_into_cuda(key, place) == -704
    assert store.put_tensor(key, tensor) == 0
    assert store.get_tensor_into_cuda(key, place) == 96
    assert torch.equal(place, tensor)
    assert store.get_tensor_into_cuda(key, torch.zeros(4, 6)) == -600
    assert store.get_tensor_into_cuda(key, torch.zeros(3, 4)) == -600
    assert store.get_tensor_into_cuda(key, torch.zeros(4, 6).t()) == -600
    assert store.get_tensor_into_cuda(key, torch.zeros(6, 4, dtype=torch.int32)) == -600
    assert store.put_tensor(f"{key}-empty", torch.empty(0, 3)) == 0
    places = [torch.zeros(6, 4), torch.empty(0, 3)]
    assert store.batch_get_tensor_into_cuda([key, f"{key}-empty"], places) == [96, 0]
    assert store.batch_get_tensor_into_cuda([key], places) == [-600]
    with pytest.raises(TypeError):
        store.get_tensor_into_cuda(key, [1])


def test_tasks_and_states_have_the_numbers_of_the_original() -> None:
    assert [status.name for status in TaskStatus] == ["PENDING", "PROCESSING", "FAILED", "SUCCESS"]
    assert [int(status) for status in TaskStatus] == [0, 1, 2, 3]
    assert [kind.name for kind in TaskType] == ["REPLICA_COPY", "REPLICA_MOVE"]
    assert module.FAILED is TaskStatus.FAILED and module.PROCESSING is TaskStatus.PROCESSING
    assert module.COMPLETE == 3 and module.GENERAL == 9
    answer = QueryTaskResponse()
    assert (answer.id, answer.status, answer.message) == ((0, 0), TaskStatus.PENDING, "")


def test_an_action_pins_softly(store: MooncakeDistributedStore, key: str) -> None:
    config = ReplicateConfig()
    assert config.soft_pin_action is SoftPinAction.PRESERVE
    config.soft_pin_action, config.soft_pin_ttl_ms = SoftPinAction.ENABLE, 60_000
    assert store.put(key, b"pinned", config) == 0
    config.soft_pin_ttl_ms = -1
    assert store.put(f"{key}-2", b"pinned", config) == -600


Call = Callable[[MooncakeDistributedStore], object]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda s: s.mount_segment("/dev/shm/x", 4096), "allocate_and_mount_segment"),
        (lambda _: MooncakeDistributedNoFRegister().real_register("a", 1, "b", 1, 2, 3, "c"), "fabrics"),
        (lambda _: MooncakeDistributedNoFRegister().real_unregister_by_endpoint("a", 1, "b", 1, "c"), "fabrics"),
    ],
)
def test_methods_without_a_meaning_raise_with_the_reason(store: MooncakeDistributedStore, call: Call, why: str) -> None:
    with pytest.raises(NotImplementedError, match=why):
        call(store)


def test_the_ssd_of_a_store_leaves_the_pool(
    own_pool: LivePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(64 << 20))
    given = {"global_segment_size": 32 << 20, "master_server_addr": own_pool.url, "local_hostname": "127.0.0.1"}
    plain = MooncakeDistributedStore()
    assert plain.setup(given) == 0
    assert plain.unmount_local_disk_segment() == -101
    plain.close()
    store = MooncakeDistributedStore()
    assert store.setup({**given, "enable_ssd_offload": "true", "ssd_offload_path": str(tmp_path)}) == 0
    assert store.put(key, b"kept", ReplicateConfig(preferred_segment=store.get_hostname())) == 0
    assert store.unmount_local_disk_segment(-1) == -600
    assert store.unmount_local_disk_segment() == 0
    # A reader gets a clean miss instead of a node that is about to leave.
    assert store.is_exist(key) == 0
    store.close()
    later = MooncakeDistributedStore()
    assert later.setup({**given, "enable_ssd_offload": "true", "ssd_offload_path": str(tmp_path)}) == 0
    assert later.get(key) == b"kept"
    later.close()
