"""Bundles and structured objects of `mooncake.structured_object_store`, over live daemons."""

from __future__ import annotations

import uuid
from typing import Any

import mooncake.structured_object_store as structured
import numpy as np
import pytest
from lent_memory import Memory
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from mooncake.structured_object_store import (
    BundleTransferPolicy,
    MooncakeBundleTransfer,
    RemoteBundleRef,
    StructuredMemberSlice,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
    raw_destination,
    tensor_object_buffer,
)


class WithoutRanges:
    """A store with only the four methods of `BundleStore`."""

    def __init__(self, store: MooncakeDistributedStore) -> None:
        self.store, self.refuse = store, ""

    def put(self, key: str, value: Any, config: Any = None) -> int:
        return -200 if self.refuse and self.refuse in key else self.store.put(key, value, config)

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def remove(self, key: str, force: bool = False) -> int:
        return -706 if self.refuse and self.refuse in key else self.store.remove(key, force)

    def is_exist(self, key: str) -> int:
        return self.store.is_exist(key)


@pytest.fixture
def prefix() -> str:
    return f"structured-{uuid.uuid4().hex}"


@pytest.fixture(params=["whole surface", "four methods"])
def transfer(request: pytest.FixtureRequest, store: MooncakeDistributedStore, prefix: str) -> MooncakeBundleTransfer:
    over = store if request.param == "whole surface" else WithoutRanges(store)
    return MooncakeBundleTransfer(over, prefix)


def left(store: MooncakeDistributedStore, prefix: str) -> int:
    """Returns how many objects a prefix has, and removes them."""
    return store.remove_by_regex(f"^{prefix}/", True)


def test_a_bundle_has_a_manifest_metadata_and_chunks(
    store: MooncakeDistributedStore, transfer: MooncakeBundleTransfer, prefix: str
) -> None:
    ref = transfer.put_bundle(b"about", {"a": bytes(range(10)), "b": b"", "c": np.arange(3.0)}, "part", 4)
    base = ref.manifest_key.removesuffix("/manifest")
    assert base.startswith(f"{prefix}/part/")
    assert ref.manifest["meta"]["bytes"] == 5 and ref.manifest["buffers"]["a"]["bytes"] == 10
    assert [chunk["key"] for chunk in ref.manifest["buffers"]["a"]["chunks"]] == [
        f"{base}/buffer/a/chunk/{number}" for number in range(3)
    ]
    assert store.get(f"{base}/buffer/a/chunk/2") == bytes([8, 9])
    assert ref.manifest["buffers"]["b"] == {"key": f"{base}/buffer/b", "bytes": 0, "chunks": []}
    # Known only by its key and removed completely. A second removal finds nothing.
    transfer.remove_bundle({"manifest_key": ref.manifest_key})
    assert left(store, prefix) == 0
    transfer.remove_bundle(ref)
    transfer.remove_bundle({"manifest_key": ref.manifest_key})


@pytest.mark.parametrize("chunk_bytes", [7, 1 << 20])
def test_members_come_back_as_they_were_put(
    store: MooncakeDistributedStore, transfer: MooncakeBundleTransfer, prefix: str, chunk_bytes: int
) -> None:
    members = {
        "floats": np.arange(12, dtype=np.float32).reshape(3, 4),
        "column": np.arange(12).reshape(3, 4)[:, 1],
        "one": np.array(7, dtype=np.int16),
        "none": np.empty((0, 3)),
        "flags": np.array([True, False]),
        "days": np.array(["2020-01-01"], dtype="datetime64[D]"),
        "text": np.array(["a", "xyz"]),
        "bytes": b"plain",
        "view": memoryview(b"abcdef")[::2],
    }
    ref = transfer.put_structured_object(StructuredObjectPayload({"m": [1, None]}, members), chunk_bytes=chunk_bytes)
    # The same holds in a process that has only the key.
    for known in (ref, {"manifest_key": ref.manifest_key}):
        result = transfer.materialize(transfer.read_spec(known))
        assert isinstance(result, StructuredObjectResult) and result.metadata["m"] == [1, None]
        assert result.objects.pop("bytes") == b"plain" and result.objects.pop("view") == b"ace"
        assert list(result.objects) == list(members)[:-2]
        for name, value in result.objects.items():
            assert value.dtype == members[name].dtype and value.shape == members[name].shape
            assert (value == members[name]).all()
        transfer.release_result(result)
    transfer.remove_bundle(ref)
    assert left(store, prefix) == 0


def test_members_are_selected_and_cut_along_their_first_axis(transfer: MooncakeBundleTransfer) -> None:
    rows = np.arange(40).reshape(10, 4)
    ref = transfer.put_structured_object(StructuredObjectPayload(buffers={"t": rows, "b": b"x"}), chunk_bytes=50)
    spec = transfer.read_spec(ref)
    assert isinstance(spec, StructuredObjectReadSpec)
    assert transfer.materialize(spec.select_members(["b", "b"])).objects == {"b": b"x"}
    assert spec.select_members(["b"]).select_members(None) == spec
    for start, end, step in ((2, 7, 1), (0, 10, 3), (-3, 99, 1), (5, 5, 1)):
        cut = spec.slice_member("t", 0, 1, 2).slice_member("t", 0, start, end, step)
        assert cut.member_slice("t") == StructuredMemberSlice(0, start, end, step)
        assert (transfer.materialize(cut).objects["t"] == rows[start:end:step]).all()
    assert spec.member_slice("t") is None
    with pytest.raises(KeyError, match="none"):
        transfer.materialize(spec.select_members(["none"]))
    with pytest.raises(ValueError, match="no member"):
        transfer.materialize(spec.select_members([]))
    for name, axis, step in (("t", 1, 1), ("t", 0, 0), ("t", 0, -1), ("b", 0, 1)):
        with pytest.raises(ValueError, match=f"the member {name} cannot be cut"):
            transfer.materialize(spec.slice_member(name, axis, 0, 1, step))


def test_members_are_read_into_the_callers_memory(transfer: MooncakeBundleTransfer, memory: type[Memory]) -> None:
    rows = np.arange(8.0).reshape(4, 2)
    spec = transfer.read_spec(transfer.put_object({"t": rows, "b": b"bytes"}, chunk_bytes=24))
    into, raw = np.zeros((4, 2)), memory(8)
    found = transfer.materialize_into(spec, {"t": into, "b": raw_destination(raw.ptr, 8, raw), "other": 1}).objects
    assert found["t"] is into and (into == rows).all()
    assert bytes(raw)[:5] == b"bytes" and found["b"].ptr == raw.ptr
    exact = memory(32)
    cut = spec.select_members(["t"]).slice_member("t", 0, 1, 3)
    transfer.materialize_into(cut, {"t": raw_destination(exact.ptr, 32, exact, pre_registered=True)})
    assert bytes(exact) == rows[1:3].tobytes()
    read_only = np.zeros((4, 2))
    read_only.flags.writeable = False
    wrong = [np.zeros((4, 3)), np.zeros((4, 2), np.float32), np.zeros((8, 2))[::2], read_only]
    for into in wrong:
        with pytest.raises(ValueError, match="the member t|destination"):
            transfer.materialize_into(spec, {"t": into})
    with pytest.raises(TypeError):
        transfer.materialize_into(spec, {"t": bytearray(64)})
    with pytest.raises(ValueError, match="needs 5 bytes"):
        transfer.materialize_into(spec, {"b": raw_destination(raw.ptr, 4)})
    with pytest.raises(ValueError, match="0x1000"):
        transfer.materialize_into(spec, {"b": raw_destination(0x1000, 8)})
    with pytest.raises(ValueError, match="0x1000"):
        transfer.put_object({"t": tensor_object_buffer(0x1000, 64)})


def test_one_value_is_an_object_too(transfer: MooncakeBundleTransfer) -> None:
    assert transfer.get_object(transfer.put_object(b"value")) == b"value"
    assert (transfer.get_object(transfer.put_object(np.arange(4))) == np.arange(4)).all()
    assert transfer.get_object(transfer.put_object({})) == {}
    for value in ("text", 3, None, [1], (1,), np.array([None]), np.zeros(2, [("a", "i4")])):
        with pytest.raises(TypeError):
            transfer.put_object(value)
        with pytest.raises(TypeError):
            transfer.put_object({"member": value})


def test_a_put_that_fails_leaves_nothing(store: MooncakeDistributedStore, prefix: str) -> None:
    over = WithoutRanges(store)
    transfer = MooncakeBundleTransfer(over, prefix)
    for refuse, policy in (("buffer/b", None), ("manifest", None), ("buffer/b", BundleTransferPolicy(4, "parallel"))):
        over.refuse = refuse
        with pytest.raises(RuntimeError, match="-200"):
            transfer.put_bundle(b"m", {"a": b"1", "b": b"2", "c": b"3"}, policy=policy)
        assert left(store, prefix) == 0
    over.refuse = ""
    ref = transfer.put_bundle(b"m", {"a": b"1", "b": b"2"})
    over.refuse = "buffer/b"
    with pytest.raises(RuntimeError, match="-706"):
        transfer.remove_bundle(ref)
    over.refuse = ""
    # The manifest stays, so that the removal can be repeated by its key.
    transfer.remove_bundle({"manifest_key": ref.manifest_key})
    assert left(store, prefix) == 0


def test_an_object_that_is_gone_is_an_error_that_names_it(
    store: MooncakeDistributedStore, transfer: MooncakeBundleTransfer
) -> None:
    ref = transfer.put_object({"a": b"1", "t": np.zeros(3)})
    chunk = ref.manifest["buffers"]["t"]["key"]
    assert store.remove(chunk, True) == 0
    with pytest.raises(RuntimeError, match=chunk):
        transfer.get_object(ref)
    transfer.remove_bundle(ref)
    with pytest.raises(RuntimeError, match="there is no bundle"):
        transfer.get_object({"manifest_key": ref.manifest_key})


def test_chunks_are_put_by_policy(store: MooncakeDistributedStore, prefix: str) -> None:
    transfer = MooncakeBundleTransfer(store, prefix, 1000)
    data = np.random.default_rng(3).bytes(64_321)
    config = ReplicateConfig(with_hard_pin=True)
    for policy in (
        BundleTransferPolicy(4, "parallel"),
        BundleTransferPolicy(4, "batch", "zero_copy"),
        BundleTransferPolicy(copy_mode="copy"),
    ):
        assert transfer.get_object(transfer.put_object(data, policy=policy, config=config)) == data
    assert transfer.get_object(transfer.put_object(data, max_inflight_put=3)) == data
    for bad in (BundleTransferPolicy(0), BundleTransferPolicy(1, "x"), BundleTransferPolicy(1, "auto", "x")):
        with pytest.raises(ValueError):
            transfer.put_bundle(b"", {}, policy=bad)
    left(store, prefix)


@pytest.mark.parametrize("name", ["", "a/b", 3])
def test_bad_names_and_sizes_are_refused(store: MooncakeDistributedStore, prefix: str, name: Any) -> None:
    transfer = MooncakeBundleTransfer(store, prefix)
    with pytest.raises(ValueError):
        transfer.put_bundle(b"", {}, partition=name)
    with pytest.raises(ValueError):
        transfer.put_bundle(b"", {name: b"x"})
    with pytest.raises(ValueError):
        transfer.put_bundle(b"", {}, chunk_bytes=0)
    with pytest.raises(ValueError):
        MooncakeBundleTransfer(store, "")
    with pytest.raises(ValueError):
        MooncakeBundleTransfer(store, default_chunk_bytes=-1)
    with pytest.raises(TypeError):
        transfer.put_bundle({"no": "bytes"}, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        StructuredObjectPayload({})
    with pytest.raises(TypeError, match="JSON"):
        transfer.put_structured_object(StructuredObjectPayload({"a": object()}, {}))
    with pytest.raises(ValueError):
        transfer.put_structured_object(StructuredObjectPayload({structured.STRUCTURED_FIELD_SPECS_KEY: 1}, {}))
    with pytest.raises(ValueError):
        transfer.remove_bundle({})
    with pytest.raises(TypeError):
        transfer.remove_bundle(3)  # type: ignore[arg-type]
    assert left(store, prefix) == 0


def test_an_object_of_other_bytes_is_no_structured_object(
    store: MooncakeDistributedStore, transfer: MooncakeBundleTransfer, key: str
) -> None:
    with pytest.raises(ValueError):
        transfer.get_object(transfer.put_bundle(b"no JSON", {}))
    with pytest.raises(ValueError):
        transfer.get_object(transfer.put_bundle(b"[1]", {}))
    assert store.put(key, b'{"layout": "other"}') == 0
    with pytest.raises(ValueError, match="no manifest"):
        transfer.get_object(RemoteBundleRef(key, {}))


def test_tensors_are_members(transfer: MooncakeBundleTransfer, store: MooncakeDistributedStore, key: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensors = {
        "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "turned": torch.arange(6).reshape(2, 3).t(),
        "one": torch.tensor(2.5),
        "none": torch.empty(0, 4),
    }
    ref = transfer.put_object(tensors, chunk_bytes=5)
    for name, tensor in transfer.get_object(ref).items():
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])
    into = torch.zeros(3, 2, dtype=torch.int64)
    transfer.materialize_into(transfer.read_spec(ref), {"turned": into})
    assert torch.equal(into, tensors["turned"])
    for wrong in (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 2), np.zeros((3, 2), np.int64)):
        with pytest.raises((ValueError, TypeError)):
            transfer.materialize_into(transfer.read_spec(ref), {"turned": wrong})
    conjugate = torch.complex(torch.arange(3.0), torch.ones(3)).conj()
    ref = transfer.put_object({"c": conjugate})
    assert torch.equal(transfer.get_object(ref)["c"], conjugate.resolve_conj())
    with pytest.raises(ValueError, match="lazy"):
        transfer.materialize_into(transfer.read_spec(ref), {"c": torch.zeros(3, dtype=torch.complex64).conj()})
    # A tensor with its header, as get_tensor_into writes it.
    assert store.put_tensor(key, tensors["half"]) == 0
    size = store.get_size(key)
    room = Memory(size)
    assert store.get_tensor_into(key, room.ptr, size) is not None
    ref = transfer.put_object({"t": tensor_object_buffer(room.ptr, size, room)})
    assert torch.equal(transfer.get_object(ref)["t"], tensors["half"])
    with pytest.raises(ValueError):
        transfer.put_object({"t": tensor_object_buffer(0, size)})


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_arrays_of_ml_dtypes_keep_their_dtype(transfer: MooncakeBundleTransfer, name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    pytest.importorskip("msgpack", reason="msgpack is not installed")
    array = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name))
    found = transfer.get_object(transfer.put_object(array))
    assert found.dtype == array.dtype and (found == array).all()
    rows = np.empty(2, dtype=object)
    rows[:] = [array, array[0]]
    column = transfer.get(transfer.put({"non_tensor_batch": {"rows": rows}}))["non_tensor_batch"]["rows"]
    assert column[1].dtype == array.dtype and (column[1] == array[0]).all()


def test_the_module_has_its_constants() -> None:
    assert structured.MISSING_OBJECT_ERROR == -704 and not structured.MISSING
    assert repr(structured.MISSING) == "<MISSING>"
    assert structured.DEFAULT_BUNDLE_CHUNK_BYTES == structured.AUTO_PARALLEL_MIN_BYTES == 64 << 20
    assert structured.AUTO_PARALLEL_MIN_CHUNKS == 8
