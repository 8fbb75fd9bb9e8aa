"""The places into which a read of a part of a split tensor writes, without a pool and without torch."""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from kvpool._native import is_host_memory
from lent_memory import Memory
from mooncake._base import Refusals
from mooncake._parallel_read import ParallelReadMethods, _Part
from mooncake._parallel_types import Manifest, ReadTarget
from mooncake._tensor_format import encode_header


class Dtype:
    itemsize = 2


class Native:
    """Stands for the native store: copies like it, and records the fragments."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self._objects = objects
        self.spans: list[tuple[int, int]] = []
        self.looks: list[tuple[list[int], list[int], bool]] = []

    def is_set_up(self) -> bool:
        return True

    def are_of_host(self, addresses: list[int], lengths: list[int], write: bool) -> list[bool]:
        self.looks.append((addresses, lengths, write))
        return [is_host_memory(address, length, write) for address, length in zip(addresses, lengths)]

    def get_ranges(self, keys: list[str], places: list[int], lengths: list[int], offsets: list[int]) -> list[int]:
        for key, place, length, offset in zip(keys, places, lengths, offsets):
            assert offset + length <= len(self._objects[key])
            ctypes.memmove(place, self._objects[key][offset : offset + length], length)
            self.spans.append((place, place + length))
        return lengths


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch")
    module.__dict__.update(dtype=Dtype, bfloat16=Dtype())
    monkeypatch.setitem(sys.modules, "torch", module)


def cut(data: bytes, manifest: Manifest, start: int, end: int) -> bytes:
    """The bytes of a range along the split dimension."""
    rows = 1
    for length in manifest.shape[: manifest.split_dim]:
        rows *= length
    row = len(data) // rows
    unit = row // manifest.shape[manifest.split_dim]
    return b"".join(data[at * row + start * unit : at * row + end * unit] for at in range(rows))


@pytest.mark.parametrize(
    ("shape", "dim"), [((24,), 0), ((8, 24), 1), ((16, 24), 1), ((17, 24), 1), ((40, 24, 3), 1), ((5, 7, 12), 2)]
)
@pytest.mark.parametrize("writers", [1, 2, 4, 5])
@pytest.mark.parametrize("readers", [1, 2, 3, 4])
def test_no_two_fragments_of_a_read_have_the_same_memory(
    shape: tuple[int, ...], dim: int, writers: int, readers: int
) -> None:
    manifest = Manifest("bfloat16", shape, dim, writers)
    count = Dtype.itemsize
    for length in shape:
        count *= length
    data = random.Random(1).randbytes(count)
    objects = {}
    for rank in range(writers):
        first, last = manifest.span(rank)
        shard = cut(data, manifest, first, last)
        objects[f"shard {rank}"] = encode_header("bfloat16", manifest.shape_of(first, last)) + shard
    for rank in range(readers):
        start, end = manifest.span(rank, readers)
        wanted = cut(data, manifest, start, end)
        store: Any = ParallelReadMethods.__new__(ParallelReadMethods)
        store._native = Native(objects)
        store._refusals = Refusals()
        place = Memory(len(wanted))
        assert store._read_part("tensor", _Part(manifest, list(objects), start, end), place.ptr)
        assert bytes(place) == wanted
        spans = sorted(store._native.spans)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


def test_a_header_is_not_written_to_memory_that_can_only_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest("bfloat16", (8,), 0, 1)
    header = encode_header("bfloat16", (8,))
    part = _Part(manifest, ["shard"], 0, 8)
    store: Any = ParallelReadMethods.__new__(ParallelReadMethods)
    store._native = Native({"shard": header + bytes(16)})
    store._refusals = Refusals()
    monkeypatch.setattr(store, "_source", lambda *_: part)
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    first = ctypes.c_char.from_buffer(memory)
    at = ctypes.addressof(first)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # Only the header is on the first page.
    assert protect(at, page, mmap.PROT_READ) == 0
    assert store._get_split_into("tensor", at + page - len(header), len(header) + 16, None) is None
    assert store._native.spans == []
    assert protect(at, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    del first
    memory.close()


def test_the_memory_of_many_keys_is_looked_up_in_one_call() -> None:
    store: Any = ParallelReadMethods.__new__(ParallelReadMethods)
    store._native = Native({})
    store._refusals = Refusals()
    places = [Memory(64) for _ in range(256)]
    keys = [f"key {n}" for n in range(len(places))]
    addresses, sizes = [place.ptr for place in places], [place.size for place in places]
    addresses[7] = 4096
    assert store._sizes_on_host(keys, addresses, sizes) == [64] * 7 + [-1] + [64] * 248
    assert store._native.looks == [(addresses, sizes, False)]


def test_a_call_that_is_wrong_each_time_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    store: Any = ParallelReadMethods.__new__(ParallelReadMethods)
    store._native = Native({})
    calls: list[tuple[Callable[[], object], object, str]] = [
        (lambda: store._sizes_on_host(["a"], [4096], [8]), [-1], "a: 8 bytes at 0x1000 are no memory of the host"),
        (lambda: store._get_split("a", ReadTarget(mode="shard")), None, "a: a shard is read with a parallelism"),
        (lambda: store._decoded("a", memoryview(b"")), None, "get of a tensor: 1 of 1 failed with -600: a: "),
    ]
    for call, answer, reason in calls:
        store._refusals = Refusals()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="mooncake"):
            assert [call() for _ in range(3)] == [answer] * 3
        (line,) = [record.getMessage() for record in caplog.records]
        assert reason in line
