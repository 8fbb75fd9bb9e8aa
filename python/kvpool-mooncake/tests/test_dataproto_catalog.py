"""The catalog of tables, and transfers that keep it correct, over live daemons."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mooncake.dataproto_catalog import DataProtoCatalog, DataProtoCatalogTransfer, logger
from mooncake.store import MooncakeDistributedStore
from mooncake.structured_object_store import MooncakeBundleTransfer, export_ref


class World:
    """A catalog, a transfer over it, and the objects of the store."""

    def __init__(self, store: MooncakeDistributedStore) -> None:
        self.store = store
        self.prefix = f"catalog-{uuid.uuid4().hex}"
        self.tables = MooncakeBundleTransfer(store, self.prefix)
        self.catalog = DataProtoCatalog()
        self.calls: list[str] = []
        # How many calls of a method fail, before or after the catalog has performed them.
        self.lose_before: dict[str, int] = {}
        self.lose_after: dict[str, int] = {}
        self.transfer = DataProtoCatalogTransfer(self.tables, self.call)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(method)
        self._lose(self.lose_before, method)
        answer = getattr(self.catalog, method)(*args, **kwargs)
        self._lose(self.lose_after, method)
        return answer

    @staticmethod
    def _lose(left: dict[str, int], method: str) -> None:
        if left.get(method, 0) > 0:
            left[method] -= 1
            raise ConnectionError("the call was lost")

    def objects(self) -> int:
        """Returns how many objects are in the store, and removes them."""
        return self.store.remove_by_regex(f"^{self.prefix}/", True)

    def made(self, **columns: Any) -> dict[str, Any]:
        """Puts a table without telling the catalog. Returns its handle."""
        return export_ref(self.tables.put({"batch": columns}))


@pytest.fixture
def world(store: MooncakeDistributedStore) -> Iterator[World]:
    world = World(store)
    yield world
    world.objects()


ROWS = {"batch": {"a": np.arange(2.0)}, "meta_info": {"m": 1}}


def first(answer: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The only table of an answer."""
    ((name, handle),) = answer["handles"].items()
    return name, handle


def test_a_table_is_put_resolved_extended_and_removed(world: World) -> None:
    transfer = world.transfer
    answer = transfer.put(ROWS, partition="p", keys=["x", "y"], tags=[{"s": 1}, {}])
    assert answer == {"keys": ["x", "y"], "tags": [{"s": 1}, {}], "fields": ["a"], "retired_handles": []}
    assert transfer.list() == {"p": {"x": {"s": 1}, "y": {}}} == transfer.list("p") and transfer.list("q") == {}
    found = transfer.resolve("p", ["y", "x"])
    name, handle = first(found)
    assert found["field_groups"] == [{"fields": ["a"], "locations": [(name, 1), (name, 0)]}]
    assert found["meta_info"] == {"m": 1}
    more = {"batch": {"b": np.ones(2)}}
    longer = transfer.append(name, handle, more, partition="p", keys=["x", "y"], stage="second")
    assert longer["fields"] == ["a", "b"]
    # The old handle is stale now, and its new columns are removed.
    with pytest.raises(ValueError, match="has changed"):
        transfer.append(name, handle, {"batch": {"c": np.ones(2)}}, partition="p", keys=["x", "y"], stage="third")
    now = transfer.resolve("p", ["x"], ["b"])
    assert now["field_groups"] == [{"fields": ["b"], "locations": [(name, 0)]}]
    assert world.tables.get(first(now)[1], fields=["b"])["batch"]["b"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="not row"):
        transfer.append(name, first(now)[1], {"batch": {"c": np.ones(2)}}, partition="p", keys=["y", "x"], stage="s")
    transfer.remove("p", ["x", "y", "unknown"])
    assert transfer.list() == {}
    # Two reads still use the table.
    assert world.tables.get(first(now)[1])["batch"]["a"].tolist() == [0.0, 1.0]
    transfer.release_read(found["read_token"])
    transfer.release_read(now["read_token"])
    transfer.release_read(now["read_token"])
    transfer.close()
    assert world.objects() == 0


def test_keys_take_fields_from_several_tables(world: World) -> None:
    catalog = world.catalog
    ab, bc = world.made(a=np.zeros(2), b=np.zeros(2)), world.made(b=np.ones(2), c=np.ones(2))
    one, two = (next(iter(handle["stage_refs"].values()))["manifest_key"] for handle in (ab, bc))
    assert catalog.update("p", ["x", "y"], tags=[{"t": 1}, {"t": 2}])["fields"] == []
    assert catalog.update("p", ["x", "y"], handle=ab)["fields"] == ["a", "b"]
    assert catalog.update("p", ["y", "x"], handle=bc)["tags"] == [{"t": 2}, {"t": 1}]
    groups = catalog.resolve("p", ["x", "y"])["field_groups"]
    assert groups == [
        {"fields": ["a"], "locations": [(one, 0), (one, 1)]},
        {"fields": ["b", "c"], "locations": [(two, 1), (two, 0)]},
    ]
    assert catalog.update("p", ["z"], tags=[{}])["keys"] == ["z"]
    for keys, fields, text in ((["z"], None, "none"), (["x"], ["d"], "'d'"), (["x", "no"], None, "no")):
        with pytest.raises(ValueError, match=text):
            catalog.resolve("p", keys, fields)
    # These tables belong to the caller, so the catalog never retires them.
    assert catalog.remove("p", ["x", "y", "z"]) == {"retired_handles": []}
    assert catalog.drain() == {"retired_handles": []}
    world.tables.cleanup_dataproto(ab)
    world.tables.cleanup_dataproto(bc)
    assert world.objects() == 0


def test_a_published_table_is_retired_until_its_removal_is_acknowledged(world: World) -> None:
    catalog = world.catalog
    old, new = world.made(a=np.zeros(2)), world.made(a=np.ones(2))
    assert catalog.publish("one", "p", ["x", "y"], handle=old)["retired_handles"] == []
    read = catalog.resolve("p", ["x"], pin=True)["read_token"]
    catalog.ack_publication("one")
    assert catalog.publish("two", "p", ["x", "y"], handle=new)["retired_handles"] == []
    with pytest.raises(RuntimeError, match="1 reads"):
        catalog.drain()
    assert catalog.release_read(read) == {"retired_handles": [old]}
    assert catalog.release_read(999) == {"retired_handles": [old]}
    with pytest.raises(ValueError, match="retired"):
        catalog.update("p", ["x", "y"], handle=old)
    assert catalog.ack_retired([old]) == {"retired_handles": []}
    # A repeated operation changes nothing. Once acknowledged, it would be a new operation.
    assert catalog.publish("two", "p", ["x", "y"], handle=old)["fields"] == ["a"]
    assert catalog.remove("p", ["x"]) == {"retired_handles": []}
    assert catalog.drain() == {"retired_handles": [new]}
    with pytest.raises(RuntimeError, match="drained"):
        catalog.update("p", ["x"], tags=[{}])
    rejected = catalog.publish_append("three", "f", "p", ["x", "y"], previous_handle=new, handle=new)
    assert "drained" in rejected["append_rejected"]


def test_handles_differ_by_their_parts(world: World) -> None:
    # An answer is a copy for its caller, and the truth value of an array raises.
    catalog, handle = world.catalog, world.made(a=np.zeros(2))
    handle["meta_info"] = {"scale": np.ones(3), "pair": (1, float("nan"))}
    assert catalog.publish("one", "p", ["x", "y"], handle=copy.deepcopy(handle))["fields"] == ["a"]
    assert catalog.update("q", ["x", "y"], handle=copy.deepcopy(handle))["fields"] == ["a"]
    with pytest.raises(ValueError, match="another handle"):
        catalog.update("q", ["x", "y"], handle={**handle, "meta_info": {"scale": np.zeros(3), "pair": [1, 2]}})
    other = dict(world.made(b=np.zeros(2)), meta_info=copy.deepcopy(handle["meta_info"]))
    catalog.update("p", ["x", "y"], handle=other)
    assert catalog.resolve("p", ["x"])["fields"] == ["a", "b"]
    (name,) = catalog.resolve("p", ["x"], ["a"])["handles"]
    longer = export_ref(world.tables.append_dataproto_fields(handle, {"batch": {"c": np.ones(2)}}, stage="more"))
    appended = catalog.publish_append(
        "two", name, "p", ["x", "y"], previous_handle=copy.deepcopy(handle), handle=longer
    )
    assert appended["fields"] == ["a", "b", "c"]
    catalog.remove("p", ["x", "y"])
    (retired,) = catalog.remove("q", ["x", "y"])["retired_handles"]
    # The earlier table has fewer parts: their removal is not the removal of the table.
    assert len(catalog.ack_retired([copy.deepcopy(handle)])["retired_handles"]) == 1
    assert catalog.ack_retired([copy.deepcopy(retired)]) == {"retired_handles": []}


def test_bad_arguments_change_nothing(world: World) -> None:
    catalog, handle = world.catalog, world.made(a=np.zeros(2))
    for keys in ([], ["x", "x"], [""], [1], "x"):
        with pytest.raises(ValueError):
            catalog.update("p", keys, tags=[{}] * len(keys))
        with pytest.raises(ValueError):
            catalog.remove("p", keys)
    bad: list[tuple[Any, dict[str, Any]]] = [
        ("", {"tags": [{}]}), (3, {"tags": [{}]}), ("p", {}), ("p", {"tags": []}), ("p", {"tags": ["t"]}),
        ("p", {"handle": {}}), ("p", {"handle": handle}),
    ]
    for partition, how in bad:
        with pytest.raises((ValueError, TypeError)):
            catalog.update(partition, ["x"], **how)
    with pytest.raises(ValueError):
        catalog.publish("", "p", ["x"], tags=[{}])
    assert catalog.list() == {}
    assert catalog.publish("op", "p", ["x", "y"], handle=handle)["fields"] == ["a"]
    other = dict(handle, meta_info={"new": 1})
    with pytest.raises(ValueError, match="another handle"):
        catalog.update("p", ["x", "y"], handle=other)
    # Tables of different metadata cannot be read together.
    catalog.update("p", ["u", "v"], handle=dict(world.made(a=np.zeros(2)), meta_info={"m": 1}))
    catalog.update("p", ["w", "z"], handle=dict(world.made(a=np.zeros(2)), meta_info={"m": 2}))
    with pytest.raises(ValueError, match="'m'"):
        catalog.resolve("p", ["u", "w"])


def test_a_table_that_does_not_fit_its_keys_is_not_put(world: World) -> None:
    for keys in (["x"], ["x", "y", "z"], ["x", "x"]):
        with pytest.raises(ValueError):
            world.transfer.put(ROWS, partition="p", keys=keys)
    with pytest.raises(ValueError):
        world.transfer.put(ROWS, partition="p", keys=["x", ""])
    assert world.objects() == 0


@pytest.mark.parametrize("lost", ["lose_before", "lose_after"])
def test_a_lost_call_is_repeated_and_changes_things_once(world: World, lost: str) -> None:
    getattr(world, lost)["publish"] = 1
    answer = world.transfer.put(ROWS, partition="p", keys=["x", "y"])
    assert answer["fields"] == ["a"] and world.calls.count("publish") == 2
    name, handle = first(world.transfer.resolve("p", ["x"]))
    getattr(world, lost)["publish_append"] = 1
    more = {"batch": {"b": np.ones(2)}}
    answer = world.transfer.append(name, handle, more, partition="p", keys=["x", "y"], stage="s")
    assert answer["fields"] == ["a", "b"] and world.calls.count("publish_append") == 2


@pytest.mark.parametrize("lost", ["lose_before", "lose_after"])
def test_a_publication_of_unknown_outcome_is_finished_later(world: World, lost: str) -> None:
    getattr(world, lost)["publish"] = 3
    with pytest.raises(ConnectionError):
        world.transfer.put(ROWS, partition="p", keys=["x", "y"])
    with pytest.raises(RuntimeError, match="1 publications"):
        world.transfer.close()
    world.transfer.close()
    assert list(world.transfer.list("p")["p"]) == ["x", "y"]
    world.transfer.drain()
    assert world.objects() == 0
    # A drained catalog takes nothing more, so the bytes are removed.
    with pytest.raises(RuntimeError, match="drained"):
        world.transfer.put(ROWS, partition="p", keys=["x", "y"])
    assert world.objects() == 0


def test_a_retired_table_that_cannot_be_removed_is_removed_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.transfer.put(ROWS, partition="p", keys=["x", "y"])

    def refuse(handle: Any) -> None:
        raise RuntimeError("leased")

    with monkeypatch.context() as patch:
        patch.setattr(world.tables, "cleanup_dataproto", refuse)
        answer = world.transfer.put(ROWS, partition="p", keys=["x", "y"])
        assert len(answer["retired_handles"]) == 1
    world.transfer.remove("p", ["x", "y"])
    assert world.objects() == 0


def test_results_are_kept_with_their_output(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Output:
        pass

    released: list[Any] = []
    stuck: set[Any] = {"r2"}

    def release(result: Any) -> None:
        if result in stuck:
            raise RuntimeError("still in use")
        released.append(result)

    monkeypatch.setattr(world.tables, "release_result", release)
    output = Output()
    world.transfer.attach_results(output, ["r1"])
    world.transfer.attach_results(output, ["r2"])
    world.transfer.release_result(output)
    world.transfer.release_result(output)
    assert released == ["r1"]
    with pytest.raises(RuntimeError, match="1 results"):
        world.transfer.discard_results([], strict=True)
    stuck.clear()
    world.transfer.discard_results(["r3"])
    assert released == ["r1", "r2", "r3"]
    world.transfer.close()
    assert logger.name == "mooncake.dataproto_catalog"
