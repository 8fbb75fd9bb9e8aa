"""Tables of `mooncake.structured_object_store`, over live daemons."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable
from typing import Any

import mooncake.structured_object_store as structured
import numpy as np
import pytest
from lent_memory import Memory
from mooncake.store import MooncakeDistributedStore
from mooncake.structured_object_store import (
    FieldSchema,
    MooncakeBundleTransfer,
    MooncakeDataProtoRef,
    StructuredFieldLocation,
    StructuredMemberSlice,
    raw_destination,
)

pytest.importorskip("msgpack", reason="msgpack is not installed")


@dataclasses.dataclass
class Sectioned:
    """An object with the sections of a table."""

    batch: Any = None
    non_tensor_batch: Any = None
    meta_info: Any = None


def objects(*rows: Any) -> Any:
    found = np.empty(len(rows), dtype=object)
    found[:] = rows
    return found


IDS = np.arange(12).reshape(4, 3)
BATCH = {"ids": IDS, "score": np.arange(4.0)}
VALUES = {
    "uid": objects("a", "é\0b", "", None),
    "blob": objects(b"1", b"", b"333", b"4"),
    "count": objects(1, None, 3, -4),
    "tokens": objects([1], [2, 3], [], None),
    "turns": objects([{"role": "u", "content": None}], [], {1: (2, 3)}, "x"),
    "rows": objects(np.zeros((2, 2)), np.ones((1, 3)), None, np.zeros(0)),
    "plain": np.array(["p", "q", "r", "s"]),
}
META = {"t": 1.0, "k": [1]}
SPLIT_ROWS = [slice(1, 3), slice(None), slice(-2, None), slice(0, 4, 2), slice(2, 99), [3, 0, 0], [-1], []]


@pytest.fixture
def prefix() -> str:
    return f"table-{uuid.uuid4().hex}"


@pytest.fixture
def transfer(store: MooncakeDistributedStore, prefix: str) -> MooncakeBundleTransfer:
    return MooncakeBundleTransfer(store, prefix, default_chunk_bytes=41)


@pytest.fixture
def table(transfer: MooncakeBundleTransfer) -> MooncakeDataProtoRef:
    return transfer.put(Sectioned(BATCH, VALUES, META), namespace="ns", partition="p", stage="made")


def same(found: Any, wanted: Any) -> bool:
    """Whether values are equal and of the same types, also their parts."""
    if isinstance(wanted, np.ndarray):
        alike = type(found) is np.ndarray and found.dtype == wanted.dtype and found.shape == wanted.shape
        return alike and all(same(a, b) for a, b in zip(found.flat, wanted.flat))
    if isinstance(wanted, (list, tuple)):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, dict):
        return type(found) is dict and list(found) == list(wanted) and all(same(found[k], wanted[k]) for k in wanted)
    return type(found) is type(wanted) and bool(found == wanted)


def test_a_table_comes_back_as_it_was_put(transfer: MooncakeBundleTransfer, table: MooncakeDataProtoRef) -> None:
    wanted = {"batch": BATCH, "non_tensor_batch": VALUES, "meta_info": META}
    assert same(transfer.get(table), wanted)
    assert same(transfer.get_dataproto(table), wanted)
    assert table.batch_size == 4 and (table.namespace, table.partition) == ("ns", "p")
    assert table.field_index["uid"] == StructuredFieldLocation("made", "non_tensor_batch.uid", "non_tensor_batch")
    codecs = {name: said["codec"] for name, said in table.encoded_non_tensor.items()}
    assert codecs == {
        "uid": "utf8_ragged", "blob": "bytes_ragged", "count": "ndarray", "tokens": "typed_ragged",
        "turns": "msgpack_ragged", "rows": "typed_ragged",
    }
    made = transfer.get(table, data_cls=Sectioned, fields=["score"])
    wanted = {"batch": {"score": BATCH["score"]}, "non_tensor_batch": {}, "meta_info": META}
    assert same(dataclasses.asdict(made), wanted)

    class Maker:
        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    made = transfer.get(table, data_cls=Maker, fields=["uid"])
    assert same(made, (({}, {"uid": VALUES["uid"]}), {"meta_info": META}))


@pytest.mark.parametrize("rows", SPLIT_ROWS)
def test_rows_are_read_alone(transfer: MooncakeBundleTransfer, table: MooncakeDataProtoRef, rows: Any) -> None:
    found = transfer.get(table, rows=rows)
    assert same(found["batch"], {name: column[rows] for name, column in BATCH.items()}) or rows == []
    assert same(found["non_tensor_batch"], {name: column[rows] for name, column in VALUES.items()}) or rows == []
    columns = [*found["batch"].values(), *found["non_tensor_batch"].values()]
    assert len(columns) == 9 and all(len(column) == len(IDS[rows]) for column in columns)


def test_invalid_rows_are_refused(transfer: MooncakeBundleTransfer, table: MooncakeDataProtoRef) -> None:
    assert same(transfer.get(table, fields=["ids"], rows=StructuredMemberSlice(0, 1, 3))["batch"]["ids"], IDS[1:3])
    for rows, error in (
        ([4], IndexError), ([-5], IndexError), (slice(None, None, -1), ValueError), (1, TypeError), ("12", TypeError),
        ([True, False, True, False], TypeError), ([np.bool_(True)], TypeError), ([1.5], TypeError), (["1"], TypeError),
        (StructuredMemberSlice(1, 0, 1), ValueError),
    ):
        with pytest.raises(error):
            transfer.get(table, rows=rows)


def test_columns_and_metadata_are_chosen(transfer: MooncakeBundleTransfer, table: MooncakeDataProtoRef) -> None:
    def names(**how: Any) -> list[list[str]]:
        return [list(part) for part in transfer.get(table, **how).values()]

    assert names(fields=["uid", "ids", "uid"], meta_info_keys=["k", "none"]) == [["ids"], ["uid"], ["k"]]
    assert names(batch_fields=["score"], non_tensor_fields=["count"]) == [["score"], ["count"], ["t", "k"]]
    assert names(batch_fields=["score"], meta_info_keys=[]) == [["score"], [], []]
    assert names(non_tensor_fields=["blob"]) == [[], ["blob"], ["t", "k"]]
    assert names(fields=[]) == [[], [], ["t", "k"]]
    flat = transfer.get(table, type="dict", fields=["ids", "uid", "plain"])
    assert same(flat, {**META, "ids": IDS, "uid": list(VALUES["uid"]), "plain": VALUES["plain"]})
    for how, error in (
        ({"fields": ["none"]}, KeyError), ({"fields": ["t"]}, KeyError), ({"type": "other"}, ValueError),
        ({"fields": ["ids"], "batch_fields": ["ids"]}, ValueError),
    ):
        with pytest.raises(error):
            transfer.get(table, **how)
    with pytest.raises(ValueError, match="several sections"):
        transfer.get(transfer.put(Sectioned({"a": IDS}, None, {"a": 1})), type="dict")


def test_columns_are_read_into_the_callers_memory(
    transfer: MooncakeBundleTransfer, table: MooncakeDataProtoRef, memory: type[Memory]
) -> None:
    into, part, raw = np.zeros((4, 3), np.int64), np.zeros(2), memory(96)
    found = transfer.get(table, destinations={"ids": into, "other": into})
    assert found["batch"]["ids"] is into and (into == IDS).all()
    transfer.get(table, fields=["score"], rows=[3, 1], destinations={"score": part})
    assert part.tolist() == [3.0, 1.0]
    transfer.get(table, fields=["ids"], destinations={"ids": raw_destination(raw.ptr, 96, raw)})
    assert bytes(raw) == IDS.tobytes()
    with pytest.raises(ValueError, match="needs 96 bytes"):
        transfer.get(table, destinations={"ids": raw_destination(raw.ptr, 95)})
    with pytest.raises(ValueError, match="shape"):
        transfer.get(table, rows=[0], destinations={"ids": into})
    with pytest.raises(TypeError, match="the column count has Python values"):
        transfer.get(table, fields=["count"], destinations={"count": np.zeros(4)})
    assert transfer.get(table, fields=["ids"], destinations={"count": np.zeros(4)})["batch"]["ids"].shape == (4, 3)


def test_a_dict_has_columns_and_metadata(transfer: MooncakeBundleTransfer) -> None:
    given = {
        "a": np.zeros(2), "texts": ["x", "y"], "pairs": (1, 2), "objects": objects({"k": 1}, None),
        "word": "ab", "three": [1, 2, 3], "none": None, "scalar": np.float32(1),
    }
    ref = transfer.put(given, type="dict")
    assert ref.batch_size == 2 and list(ref.meta_info) == ["word", "three", "none", "scalar"]
    found = transfer.get(ref, type="dict")
    columns = {"texts": ["x", "y"], "pairs": [1, 2], "objects": [{"k": 1}, None]}
    assert same({name: found[name] for name in columns}, columns) and same(found["a"], given["a"])
    assert same(transfer.get(transfer.put({"only": ["x"]}, type="dict"), type="dict"), {"only": ["x"]})
    assert transfer.get(transfer.put({}, type="dict"), type="dict") == {}
    assert transfer.put({"batch": {"a": IDS}, "meta_info": META}).meta_info == META
    for data, how, error in (
        ({"a": np.zeros(2), "b": np.zeros(3)}, "dict", ValueError), ([1], "dict", TypeError),
        (3, "dataproto", TypeError), ({}, "other", ValueError), ({"a": ["x"], "b": ["x", "y"]}, "dict", ValueError),
    ):
        with pytest.raises(error):
            transfer.put(data, type=how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        Sectioned({"a": IDS, "b": np.zeros(3)}),
        Sectioned({"a": IDS}, {"b": objects("x")}),
        Sectioned({"a": IDS}, {"a": objects("a", "b", "c", "d")}),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    transfer: MooncakeBundleTransfer, store: MooncakeDistributedStore, prefix: str, data: Any
) -> None:
    with pytest.raises(ValueError):
        transfer.put(data)
    for column in (np.float32(3), np.array(3), 5, [1, 2]):
        with pytest.raises(TypeError):
            transfer.put(Sectioned({"i": column}))
    with pytest.raises(TypeError, match="batch_size"):
        transfer.put(Sectioned({"t": structured.tensor_object_buffer(1, 1)}))
    assert store.remove_by_regex(f"^{prefix}/", True) == 0


SCHEMAS: list[tuple[FieldSchema, Any, Any]] = [
    (FieldSchema("msgpack_ragged"), objects(1, None, "x"), objects(1, None, "x")),
    (FieldSchema("utf8_ragged"), objects(None, "x"), objects(None, "x")),
    (FieldSchema("ndarray", metadata={"dtype": "float32"}), objects(1, 2), objects(1.0, 2.0)),
    (FieldSchema("typed_ragged", metadata={"dtype": "float32"}), objects([1], [2, 3]), objects([1.0], [2.0, 3.0])),
    (FieldSchema("typed_ragged"), objects([[1, 2], [3, 4]], [[5, 6]]), objects([[1, 2], [3, 4]], [[5, 6]])),
    (FieldSchema("typed_ragged"), objects(None, None), objects(None, None)),
    (FieldSchema("typed_ragged", metadata={"dtype": "bfloat16"}), objects(None), objects(None)),
    (FieldSchema("bytes_ragged", False), objects(b"", bytearray(b"x")), objects(b"", b"x")),
]


@pytest.mark.parametrize(("schema", "rows", "wanted"), SCHEMAS)
def test_a_schema_chooses_how_a_column_is_written(
    transfer: MooncakeBundleTransfer, schema: FieldSchema, rows: Any, wanted: Any
) -> None:
    ref = transfer.put_dataproto(Sectioned(None, {"f": rows}), field_schemas={"f": schema, "other": schema})
    assert ref.encoded_non_tensor["f"]["codec"] == schema.codec
    assert same(transfer.get(ref)["non_tensor_batch"]["f"], wanted)


@pytest.mark.parametrize(
    ("rows", "schema"),
    [
        (objects("a"), FieldSchema("json")),
        (objects(b"a"), FieldSchema("utf8_ragged")),
        (objects("a"), FieldSchema("bytes_ragged")),
        (objects("a"), FieldSchema("ndarray")),
        (objects({"a": 1}), FieldSchema("typed_ragged")),
        (objects("a", None), FieldSchema("utf8_ragged", nullable=False)),
        (objects(object()), None),
        (objects({1, 2}), None),
        (objects(1 << 70), None),
    ],
)
def test_a_row_that_cannot_be_written_names_its_field(
    transfer: MooncakeBundleTransfer, rows: Any, schema: FieldSchema | None
) -> None:
    with pytest.raises(ValueError, match="'f'"):
        transfer.put(Sectioned(None, {"f": rows}), field_schemas={"f": schema} if schema else None)


VALUES_INSIDE = [
    objects({"a": (1, [2.5, True]), "n": None}, [b"x", {"y": np.arange(3)}]),
    objects(1, 2.5),
    objects(True, None),
    objects(None, None),
    objects(np.int64(3), 4.0),
    objects([1, 2.0], [True]),
    objects((1, 2), (3,)),
    objects(np.array(["a"]), np.zeros(2)),
]


@pytest.mark.parametrize("rows", VALUES_INSIDE)
def test_python_values_keep_their_types(transfer: MooncakeBundleTransfer, rows: Any) -> None:
    wanted = objects(*[row.item() if isinstance(row, np.generic) else row for row in rows])
    assert same(transfer.get(transfer.put(Sectioned(None, {"f": rows})))["non_tensor_batch"]["f"], wanted)


def test_columns_are_added_in_stages(
    transfer: MooncakeBundleTransfer, table: MooncakeDataProtoRef, store: MooncakeDistributedStore, prefix: str
) -> None:
    more = Sectioned({"loss": np.ones(4)}, {"note": objects("a", None, "c", "d")}, {"t": 2.0})
    longer = transfer.append_dataproto_fields(table, more, stage="trained")
    assert list(longer.stage_refs) == ["made", "trained"] and "loss" not in table.field_index
    found = transfer.get(longer, fields=["uid", "loss", "note"])
    assert same(found["batch"]["loss"], np.ones(4)) and found["meta_info"]["t"] == 2.0
    for data, stage, error in (
        (more, "again", ValueError), (Sectioned({"x": np.ones(3)}), "s", ValueError), (Sectioned(), "s", ValueError),
    ):
        with pytest.raises(error):
            transfer.append_dataproto_fields(longer, data, stage=stage)
    # The same stage a second time, and a column that a column of the other section replaces.
    twice = transfer.append_dataproto_fields(longer, Sectioned({"x": np.zeros(4)}), stage="trained")
    assert same(transfer.get(twice, fields=["loss", "x"])["batch"], {"loss": np.ones(4), "x": np.zeros(4)})
    again = transfer.append_dataproto_fields(
        twice, Sectioned({"note": np.arange(4)}), stage="trained", overwrite=True
    )
    assert same(transfer.get(again, fields=["note", "x", "loss"])["batch"]["note"], np.arange(4))
    view = transfer.dataproto_manifest_view(again)
    assert view["batch_size"] == 4 and view["meta_info_keys"] == ["t", "k"]
    assert view["batch_fields"]["ids"]["spec"] == {"encoding": "ndarray", "dtype": "<i8", "shape": [4, 3]}
    assert view["stages"]["made"]["dataproto"]["namespace"] == "ns"
    # A withdrawn append leaves the earlier table.
    transfer.cleanup_dataproto_append(longer, again)
    assert same(transfer.get(longer, fields=["loss"])["batch"]["loss"], np.ones(4))
    with pytest.raises(RuntimeError):
        transfer.get(again, fields=["x"])
    transfer.cleanup_dataproto(longer)
    transfer.cleanup_dataproto(longer)
    with pytest.raises(RuntimeError):
        transfer.get(table)
    assert store.remove_by_regex(f"^{prefix}/", True) == 0


def test_a_handle_carries_a_table_to_another_process(
    transfer: MooncakeBundleTransfer, table: MooncakeDataProtoRef, store: MooncakeDistributedStore, prefix: str
) -> None:
    handle = structured.export_ref(table)
    assert handle == structured.export_dataproto_ref(table) and handle["type"] == structured.DATAPROTO_REF_HANDLE_TYPE
    assert handle["version"] == structured.DATAPROTO_REF_HANDLE_VERSION and handle[structured.STORAGE_GROUP_ID]
    received = json.loads(json.dumps(handle))
    assert structured.is_dataproto_ref_handle(received) and not structured.is_dataproto_ref_handle(table)
    other = MooncakeBundleTransfer(store)
    wanted = {"batch": BATCH, "non_tensor_batch": VALUES, "meta_info": META}
    assert same(other.get(received), wanted) and same(other.get(structured.import_ref(received)), wanted)
    assert structured.export_ref(structured.import_dataproto_ref(received)) == handle
    breakages: list[Callable[[dict[str, Any]], Any]] = [
        lambda h: {}, lambda h: {**h, "version": 2}, lambda h: {k: v for k, v in h.items() if k != "batch_size"},
        lambda h: {**h, "field_index": {"a": {"other": 1}}}, lambda h: {**h, "stage_refs": 3},
    ]
    for broken in breakages:
        with pytest.raises(ValueError):
            other.get(broken(handle))
    with pytest.raises(TypeError):
        structured.export_ref(handle)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        other.get(3)  # type: ignore[arg-type]
    other.cleanup_dataproto(received)
    assert store.remove_by_regex(f"^{prefix}/", True) == 0


def test_tensors_are_columns(transfer: MooncakeBundleTransfer) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    batch = {"ids": torch.arange(12).reshape(4, 3), "half": torch.ones(4, dtype=torch.bfloat16)}
    rows = objects(torch.zeros(2), torch.ones(1, 2), None, torch.zeros(0))
    mixed = objects({"t": torch.arange(2)}, 1, 2, 3)
    ref = transfer.put(Sectioned(batch, {"rows": rows, "mixed": mixed}))
    found = transfer.get(ref, rows=[3, 1, 0])
    for name, column in batch.items():
        assert found["batch"][name].dtype == column.dtype
        assert torch.equal(found["batch"][name], column[[3, 1, 0]])
    for at, row in enumerate([3, 1, 0]):
        assert torch.equal(found["non_tensor_batch"]["rows"][at], rows[row])
    assert torch.equal(found["non_tensor_batch"]["mixed"][2]["t"], torch.arange(2))
