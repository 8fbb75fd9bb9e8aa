"""Embedding tables of one layer, with one object for each head. Callers look up rows of the tables."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

from mooncake import _codes
from mooncake._objects import ObjectMethods

_ITEM = 4


@dataclasses.dataclass
class EngramStoreConfig:
    """The number of rows of each head's table, and the number of float32 values in a row."""

    table_vocab_sizes: list[int] = dataclasses.field(default_factory=lambda: [1024])
    embedding_dim: int = 64


class EngramStore:
    """The tables of one layer in a store, under the keys `engram:lLAYER:hHEAD`."""

    def __init__(self, layer_id: int, config: EngramStoreConfig, store: ObjectMethods | None = None) -> None:
        """Raises ValueError for a configuration without tables, rows or values."""
        rows = [int(size) for size in config.table_vocab_sizes]
        if not rows or min(rows) <= 0 or config.embedding_dim <= 0:
            raise ValueError(f"tables of {rows} rows with {config.embedding_dim} values each cannot be")
        if store is not None and not isinstance(store, ObjectMethods):
            raise RuntimeError(f"store must be a MooncakeDistributedStore, not {type(store).__name__}")
        self._rows = rows
        self._width = int(config.embedding_dim)
        self._keys = [f"engram:l{layer_id}:h{head}" for head in range(len(rows))]
        self._store = store

    def get_table_vocab_sizes(self) -> list[int]:
        """The number of rows of each head's table."""
        return list(self._rows)

    def get_embedding_dim(self) -> int:
        """The number of values in a row."""
        return self._width

    def get_num_heads(self) -> int:
        """The number of tables."""
        return len(self._rows)

    def get_store_keys(self) -> list[str]:
        """The key of each head's table."""
        return list(self._keys)

    def populate(self, embedding_buffers: Sequence[Any]) -> None:
        """Puts one float32 array [rows, values] for each head. Raises RuntimeError, also if a table exists.

        It puts nothing unless all arrays fit and the pool has none of the tables. If a table cannot be put, the
        error tells how many tables were put.
        """
        numpy = _numpy()
        store = self._needed()
        if len(embedding_buffers) != len(self._rows):
            raise RuntimeError(f"{len(embedding_buffers)} tables are given for {len(self._rows)} heads")
        tables = []
        for head, (table, rows) in enumerate(zip(embedding_buffers, self._rows)):
            if not isinstance(table, numpy.ndarray) or table.shape != (rows, self._width):
                raise RuntimeError(f"the table of head {head} must be an array of shape {(rows, self._width)}")
            try:
                tables.append(numpy.ascontiguousarray(table, dtype=numpy.float32))
            except (TypeError, ValueError) as error:
                raise RuntimeError(f"the table of head {head} has values that are no float32: {error}") from error
            most = store._native.max_block()
            if 0 < most < tables[-1].nbytes:
                raise RuntimeError(f"the table of head {head} has {tables[-1].nbytes} bytes, an object at most {most}")
        known = store.batch_is_exist(self._keys)
        if min(known) < 0:
            raise RuntimeError(f"no table is put: the pool does not say which are there: {known}")
        present = [key for key, code in zip(self._keys, known) if code == 1]
        if present:
            raise RuntimeError(f"the tables {', '.join(present)} are in the store already")
        codes = store.batch_put_from(
            self._keys, [table.ctypes.data for table in tables], [table.nbytes for table in tables]
        )
        if any(code != _codes.OK for code in codes):
            raise RuntimeError(f"{codes.count(_codes.OK)} of {len(codes)} tables are put, the others not: {codes}")

    def lookup(self, row_ids: Any) -> Any:
        """Looks up an array [batch, tokens, heads] of row numbers. Returns float32 [batch, tokens, heads,
        values].

        Raises RuntimeError for another shape, a row outside its table, or an absent table.
        """
        numpy = _numpy()
        store = self._needed()
        try:
            given = numpy.asarray(row_ids)
            if given.dtype.kind not in "iu":
                raise TypeError(f"it is {given.dtype}")
            ids = numpy.ascontiguousarray(given, dtype=numpy.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise RuntimeError(f"row_ids is no array of integers: {error}") from error
        if ids.ndim != 3 or ids.size == 0 or ids.shape[2] != len(self._rows):
            raise RuntimeError(f"row_ids must have the shape [batch, tokens, {len(self._rows)}], not {ids.shape}")
        found = numpy.empty((*ids.shape, self._width), dtype=numpy.float32)
        row = self._width * _ITEM
        for head, (key, rows) in enumerate(zip(self._keys, self._rows)):
            wanted, places = numpy.unique(ids[:, :, head], return_inverse=True)
            if wanted[0] < 0 or wanted[-1] >= rows:
                raise RuntimeError(f"the table of head {head} has {rows} rows: {wanted[0]} to {wanted[-1]} are asked")
            # Each row is read once, however often the array names it.
            table = numpy.empty((len(wanted), self._width), dtype=numpy.float32)
            codes = store._native.get_ranges(
                [key] * len(wanted),
                [table.ctypes.data + at * row for at in range(len(wanted))],
                [row] * len(wanted),
                [int(number) * row for number in wanted],
            )
            if any(code != row for code in codes):
                raise RuntimeError(f"the table {key} cannot be read: {min(codes)}")
            found[:, :, head] = table[places.reshape(ids.shape[:2])]
        return found

    def remove_from_store(self, force: bool = False) -> int:
        """Removes the tables. Returns how many were present. Raises RuntimeError if one cannot be removed."""
        codes = self._needed().batch_remove(self._keys, force)
        for key, code in zip(self._keys, codes):
            if code not in (_codes.OK, _codes.NOT_FOUND):
                raise RuntimeError(f"the table {key} is not removed: {code}")
        return codes.count(_codes.OK)

    def _needed(self) -> ObjectMethods:
        if self._store is None:
            raise RuntimeError("the EngramStore was made without a store")
        return self._store


def _numpy() -> Any:
    return importlib.import_module("numpy")
