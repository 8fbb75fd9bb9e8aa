"""Structured objects and tables in a live pool, and the catalog of tables."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from mooncake.store import MooncakeDistributedStore

numpy = pytest.importorskip("numpy")

from mooncake.dataproto_catalog import DataProtoCatalog, DataProtoCatalogTransfer  # noqa: E402
from mooncake.structured_object_store import (  # noqa: E402
    FieldSchema,
    MooncakeBundleTransfer,
    StructuredMemberSlice,
    StructuredObjectPayload,
    export_ref,
    import_ref,
    infer_structure,
    raw_destination,
    tensor_object_buffer,
)


class PlainStore:
    """A store with only the four methods that a bundle needs."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, key: str, value: Any, config: Any = None) -> int:
        self.objects.setdefault(key, bytes(value))
        return 0

    def get(self, key: str) -> bytes:
        return self.objects.get(key, b"")

    def remove(self, key: str, force: bool = False) -> int:
        return 0 if self.objects.pop(key, None) is not None else -704

    def is_exist(self, key: str) -> int:
        return int(key in self.objects)


@pytest.fixture(params=["pool", "plain"])
def transfer(request: pytest.FixtureRequest, store: MooncakeDistributedStore, key: str) -> MooncakeBundleTransfer:
    return MooncakeBundleTransfer(store if request.param == "pool" else PlainStore(), key_prefix=key)


TEXTS = ["a", None, {"b": [1, 2.5, (3, "x")]}, b"\x00\xff", {1, 2}, numpy.float32(2.5), numpy.arange(3), [], {7: True}]


def same(left: object, right: object) -> bool:
    if isinstance(left, numpy.ndarray):
        return isinstance(right, numpy.ndarray) and left.dtype == right.dtype and numpy.array_equal(left, right)
    return type(left) is type(right) and left == right


def test_members_come_back_whole_and_in_parts(transfer: MooncakeBundleTransfer) -> None:
    grid = numpy.arange(60, dtype=numpy.int16).reshape(10, 6)
    rows = numpy.empty(len(TEXTS), dtype=object)
    for at, text in enumerate(TEXTS):
        rows[at] = text
    given = {"grid": grid, "rows": rows, "raw": b"bytes", "empty": numpy.empty((0, 3)), "tree": {"a": [1, None]}}
    ref = transfer.put_structured_object(StructuredObjectPayload({"kind": "x"}, given), chunk_bytes=17)
    whole = transfer.materialize(transfer.read_spec(ref))
    assert whole.metadata == {"kind": "x"}
    assert same(whole.objects["grid"], grid) and whole.objects["raw"] == b"bytes"
    assert whole.objects["tree"] == {"a": [1, None]} and whole.objects["empty"].shape == (0, 3)
    assert all(same(found, text) for found, text in zip(whole.objects["rows"], TEXTS))
    spec = transfer.read_spec({"manifest_key": ref.manifest_key}).select_members(["grid"])
    for axis, part in ((0, slice(2, 7)), (0, slice(1, 9, 3)), (1, slice(1, 5, 2))):
        sliced = spec.slice_member("grid", axis, part.start, part.stop, part.step or 1)
        expected = grid[part] if axis == 0 else grid[:, part]
        assert same(transfer.materialize(sliced).objects["grid"], expected)
    # Into places of the caller.
    place, memory, raw = numpy.zeros_like(grid), (ctypes.c_ubyte * grid.nbytes)(), bytearray(5)
    found = transfer.materialize_into(transfer.read_spec(ref), {"grid": place, "raw": raw})
    assert found.objects["grid"] is place and same(place, grid) and raw == b"bytes"
    transfer.materialize_into(spec, {"grid": raw_destination(ctypes.addressof(memory), len(memory))})
    assert bytes(memory) == grid.tobytes()
    for wrong in (numpy.zeros((5, 6), numpy.int16), raw_destination(ctypes.addressof(memory), 3)):
        with pytest.raises(ValueError):
            transfer.materialize_into(spec, {"grid": wrong})
    with pytest.raises(KeyError, match="nothing"):
        transfer.materialize(spec.select_members(["nothing"]))
    transfer.remove_bundle(ref)
    with pytest.raises(KeyError):
        transfer.materialize(transfer.read_spec({"manifest_key": ref.manifest_key}))
    transfer.remove_bundle({"manifest_key": ref.manifest_key})


def test_a_value_of_an_unknown_type_is_refused_and_leaves_nothing(transfer: MooncakeBundleTransfer) -> None:
    with pytest.raises(TypeError, match="cannot be stored"):
        transfer.put_object({"fine": b"x" * 100, "bad": object()})
    if isinstance(transfer.store, PlainStore):
        assert transfer.store.objects == {}
    for partition in ("", "a/b"):
        with pytest.raises(ValueError):
            transfer.put_object({"x": b"y"}, partition=partition)
    with pytest.raises(ValueError):
        transfer.put_object({"x": b"y"}, chunk_bytes=0)
    with pytest.raises(NotImplementedError):
        infer_structure("x", [], [], [])
    assert transfer.get_object(transfer.put_object("alone")) == "alone"


def test_tensors_are_members(transfer: MooncakeBundleTransfer, store: MooncakeDistributedStore, key: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.randn(6, 5).to(torch.bfloat16)
    assert store.put_tensor(key, tensor) == 0
    size = store.get_size(key)
    memory = (ctypes.c_ubyte * size)()
    assert store.get_tensor_into(key, ctypes.addressof(memory), size) is not None
    nested = torch.nested.nested_tensor([torch.randn(2), torch.randn(4)], layout=torch.jagged)
    encoded = tensor_object_buffer(ctypes.addressof(memory), size, memory, batch_size=6)
    assert len(encoded) == 6
    given = {"a": tensor, "b": tensor.t(), "c": encoded, "d": nested, "e": [tensor, {"x": tensor[0]}]}
    found = transfer.get_object(transfer.put_object(given, chunk_bytes=13))
    assert torch.equal(found["a"], tensor) and torch.equal(found["b"], tensor.t()) and torch.equal(found["c"], tensor)
    assert all(map(torch.equal, found["d"].unbind(), nested.unbind()))
    assert torch.equal(found["e"][0], tensor) and torch.equal(found["e"][1]["x"], tensor[0])


def table(rows: int = 4) -> dict[str, dict[str, Any]]:
    ids = numpy.arange(rows * 3).reshape(rows, 3)
    texts = numpy.empty(rows, dtype=object)
    for at in range(rows):
        texts[at] = {"text": "x" * at, "tokens": list(range(at))}
    return {"batch": {"ids": ids}, "non_tensor_batch": {"texts": texts}, "meta_info": {"step": 7}}


def test_fields_and_rows_of_a_table_are_read(transfer: MooncakeBundleTransfer) -> None:
    given = table()
    ref = import_ref(export_ref(transfer.put(given, partition="train")))
    ids, texts = given["batch"]["ids"], given["non_tensor_batch"]["texts"]
    assert (ref.batch_size, ref.partition, ref.meta_info) == (4, "train", {"step": 7})
    whole = transfer.get(ref)
    assert same(whole["batch"]["ids"], ids) and list(whole["non_tensor_batch"]["texts"]) == list(texts)
    for rows in (slice(1, 3), slice(0, 4, 2), [3, 0, 3], [-1], [], StructuredMemberSlice(0, 1, 4)):
        at = slice(rows.start, rows.end) if isinstance(rows, StructuredMemberSlice) else rows
        at = numpy.array(at, dtype=int) if isinstance(at, list) else at
        part = transfer.get_dataproto(ref, rows=rows)
        assert same(part["batch"]["ids"], ids[at])
        assert list(part["non_tensor_batch"]["texts"]) == list(texts[at])
    assert set(transfer.get(ref, type="dict", fields=["ids"])) == {"ids", "step"}
    place = numpy.zeros((2, 3), ids.dtype)
    assert transfer.get(ref, batch_fields=["ids"], rows=[2, 1], destinations={"ids": place})["batch"]["ids"] is place
    assert same(place, ids[[2, 1]])
    for wrong, error in (([4], IndexError), ("rows", TypeError), (slice(3, 0, -1), ValueError)):
        with pytest.raises(error):
            transfer.get(ref, rows=wrong)
    with pytest.raises(KeyError):
        transfer.get(ref, fields=["none"])
    view = transfer.dataproto_manifest_view(ref)
    assert view["batch_fields"]["ids"]["spec"]["shape"] == [4, 3]
    transfer.cleanup_dataproto(ref)
    with pytest.raises(KeyError):
        transfer.get(ref)


def test_fields_are_appended_and_taken_back(transfer: MooncakeBundleTransfer) -> None:
    first = transfer.put(table(), stage="a")
    score = {"score": numpy.arange(4.0)}
    for stage in ("a", "b"):
        second = transfer.append_dataproto_fields(first, score, stage=stage)
        assert same(transfer.get(second)["batch"]["score"], score["score"])
        assert "score" not in transfer.get(first)["batch"]
        transfer.cleanup_dataproto_append(first, second)
        assert set(transfer.get(first)["batch"]) == {"ids"}
    with pytest.raises(ValueError, match="already"):
        transfer.append_dataproto_fields(first, {"ids": numpy.zeros((4, 3))}, stage="b")
    with pytest.raises(ValueError, match="rows"):
        transfer.append_dataproto_fields(first, {"score": numpy.zeros(3)}, stage="b")
    replaced = transfer.append_dataproto_fields(first, {"ids": numpy.ones((4, 3))}, stage="a", overwrite=True)
    assert transfer.get(replaced)["batch"]["ids"].sum() == 12
    transfer.cleanup_dataproto(replaced)
    if isinstance(transfer.store, PlainStore):
        assert transfer.store.objects == {}


def test_a_flat_table_is_sorted_into_its_sections(transfer: MooncakeBundleTransfer) -> None:
    flat = {"ids": numpy.zeros((3, 2)), "texts": ["a", "b", "c"], "name": "n", "list": [1, 2]}
    ref = transfer.put(flat, type="dict")
    assert ref.batch_size == 3 and ref.field_index["texts"].section == "non_tensor_batch"
    found = transfer.get(ref, type="dict")
    assert found["texts"] == ["a", "b", "c"] and found["name"] == "n" and found["list"] == [1, 2]
    with pytest.raises(ValueError, match="ambiguous"):
        transfer.put({"a": [1], "b": [1, 2]}, type="dict")
    schema = {"b": FieldSchema("json", metadata={"section": "meta_info"})}
    assert transfer.put({"a": [1], "b": [1, 2]}, type="dict", field_schemas=schema).meta_info == {"b": [1, 2]}
    strict = {"texts": FieldSchema("json", nullable=False)}
    with pytest.raises(ValueError, match="nullable"):
        transfer.put({"texts": ["a", None]}, type="dict", field_schemas=strict)
    with pytest.raises(ValueError):
        transfer.put({}, type="list")  # type: ignore[arg-type]


class Fields(dict):  # type: ignore[type-arg]
    """A plain batch whose length is its number of rows."""

    def __len__(self) -> int:
        return len(next(iter(self.values())))


def test_a_catalog_removes_the_objects_that_no_row_needs(store: MooncakeDistributedStore, key: str) -> None:
    plain = PlainStore()
    transfer, catalog = MooncakeBundleTransfer(plain, key_prefix=key), DataProtoCatalog()
    calls = DataProtoCatalogTransfer(transfer, lambda method, *args, **how: getattr(catalog, method)(*args, **how))
    answer = calls.put(Fields(ids=numpy.arange(2)), partition="p", keys=["a", "b"], tags=[{"n": 1}, {"n": 2}])
    assert answer["fields"] == ["ids"] and calls.list() == {"p": {"a": {"n": 1}, "b": {"n": 2}}}
    plan = calls.resolve("p", ["b", "a"])
    (fragment, handle), = plan["handles"].items()
    assert plan["field_groups"] == [{"fields": ["ids"], "locations": [(fragment, 1), (fragment, 0)]}]
    rows = [row for _, row in plan["field_groups"][0]["locations"]]
    assert list(transfer.get(handle, rows=rows)["batch"]["ids"]) == [1, 0]
    calls.append(fragment, handle, Fields(score=numpy.ones(2)), partition="p", keys=["a", "b"], stage="default")
    with pytest.raises(ValueError, match="stale"):
        calls.append(fragment, handle, Fields(more=numpy.ones(2)), partition="p", keys=["a", "b"], stage="default")
    # A pinned read keeps the objects; its end removes them.
    calls.remove("p", ["a", "b"])
    assert plain.objects
    calls.release_read(plan["read_token"])
    assert plain.objects == {}
    calls.put(Fields(ids=numpy.arange(2)), partition="p", keys=["a", "b"])
    calls.put(Fields(ids=numpy.arange(1)), partition="p", keys=["a"])
    with pytest.raises(ValueError, match="not ready"):
        catalog.resolve("p", ["a"], ["none"])
    calls.drain()
    assert plain.objects == {}
    with pytest.raises(RuntimeError, match="drained"):
        calls.put(None, partition="p", keys=["a"], tags=[{}])


def test_a_failed_publication_is_tried_again() -> None:
    plain, catalog, failures = PlainStore(), DataProtoCatalog(), [1, 1, 1]

    def call(method: str, *args: Any, **how: Any) -> Any:
        if method == "publish" and failures:
            failures.pop()
            raise ConnectionError("the catalog is away")
        return getattr(catalog, method)(*args, **how)

    calls = DataProtoCatalogTransfer(MooncakeBundleTransfer(plain), call)
    with pytest.raises(ConnectionError):
        calls.put(Fields(ids=numpy.arange(1)), partition="p", keys=["a"])
    with pytest.raises(RuntimeError, match="wait"):
        calls.put(None, partition="p", keys=["b"], tags=[{}])
    assert catalog.list() == {}
    calls.put(None, partition="p", keys=["b"], tags=[{}])
    assert set(catalog.list()["p"]) == {"a", "b"}
    calls.close()
