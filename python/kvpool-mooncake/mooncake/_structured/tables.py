"""Tables of rows: fields of tensors and arrays ("batch"), other fields ("non_tensor_batch"), and metadata."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mooncake._structured.members import is_tensor
from mooncake._structured.refs import FieldSchema, MooncakeDataProtoRef, StructuredMemberSlice

SECTIONS = ("batch", "non_tensor_batch", "meta_info")


def split(data: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The three parts of a table: of an object with these attributes, of a mapping of them, or a plain batch."""
    if isinstance(data, Mapping):
        if data and set(data) <= set(SECTIONS) and all(_is_mapping(part) for part in data.values()):
            return _dict(data.get("batch")), _dict(data.get("non_tensor_batch")), _dict(data.get("meta_info"))
        return dict(data), {}, {}
    return tuple(_dict(getattr(data, name, None)) for name in SECTIONS)  # type: ignore[return-value]


def from_flat(data: Mapping[str, Any], schemas: Mapping[str, FieldSchema]) -> dict[str, dict[str, Any]]:
    """The parts of a flat mapping: dense fields of one length are the batch, lists of it are other fields.

    A schema's section wins. Raises ValueError if the length is not clear.
    """
    if not isinstance(data, Mapping):
        raise TypeError("a flat table must be a mapping")
    sections = {name: schema.metadata.get("section") for name, schema in schemas.items() if name in data}
    unknown = [section for section in sections.values() if section not in (None, *SECTIONS)]
    if unknown:
        raise ValueError(f"a section is one of {', '.join(SECTIONS)}, not {unknown[0]!r}")
    count = _rows(data, sections)
    parts: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, value in data.items():
        section = sections.get(name) or _section(value, count)
        if section == "non_tensor_batch" and not isinstance(value, np.ndarray):
            value = objects(value)
        parts[section][name] = value
    return parts


def to_flat(table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The fields and the metadata in one mapping, other fields as lists. Raises ValueError for a name used twice."""
    flat: dict[str, Any] = {}
    for section in ("meta_info", "batch", "non_tensor_batch"):
        for name, value in table[section].items():
            if name in flat:
                raise ValueError(f"the name {name!r} is in two sections")
            is_objects = isinstance(value, np.ndarray) and value.dtype == object
            flat[name] = value.tolist() if is_objects else value
    return flat


def batch_size(parts: Sequence[Mapping[str, Any]]) -> int:
    """The rows of all fields. Raises ValueError if they differ."""
    sizes = {len(value) for part in parts for value in part.values()}
    if len(sizes) > 1:
        raise ValueError(f"the fields have different numbers of rows: {sorted(sizes)}")
    return sizes.pop() if sizes else 0


def check_schemas(fields: Mapping[str, Any], schemas: Mapping[str, FieldSchema]) -> None:
    """Raises ValueError for a row without a value in a field that must have them all."""
    for name, schema in schemas.items():
        value = fields.get(name)
        if not schema.nullable and isinstance(value, np.ndarray) and value.dtype == object:
            if any(item is None for item in value):
                raise ValueError(f"the field {name!r} has a row without a value and is not nullable")


def select(
    ref: MooncakeDataProtoRef,
    fields: Sequence[str] | None,
    batch_fields: Sequence[str] | None,
    other_fields: Sequence[str] | None,
) -> list[str]:
    """The names of the fields to read. Raises KeyError for an unknown one."""
    if fields is not None and (batch_fields is not None or other_fields is not None):
        raise ValueError("fields excludes batch_fields and non_tensor_fields")
    names = [*(batch_fields or ()), *(other_fields or ())]
    if fields is not None:
        names = list(fields)
    elif batch_fields is None and other_fields is None:
        names = list(ref.field_index)
    unknown = [name for name in names if name not in ref.field_index]
    if unknown:
        raise KeyError(f"the table has no fields {', '.join(map(str, unknown))}")
    return names


def chosen_rows(rows: Any, count: int) -> StructuredMemberSlice | list[int] | None:
    """A slice, a list of row numbers, or `None` for all rows. Raises IndexError, TypeError or ValueError."""
    if rows is None:
        return None
    if isinstance(rows, StructuredMemberSlice):
        if rows.axis != 0 or rows.step < 1:
            raise ValueError("rows are sliced along axis 0, forwards")
        return rows
    if isinstance(rows, slice):
        start, end, step = rows.indices(count)
        if step < 1:
            raise ValueError("the step of a slice of rows must be over 0")
        return StructuredMemberSlice(0, start, max(end, start), step)
    if isinstance(rows, (str, bytes, bytearray)) or not hasattr(rows, "__iter__"):
        raise TypeError("rows are a slice or a sequence of row numbers")
    found = []
    for row in rows:
        number = operator.index(row)
        if not -count <= number < count:
            raise IndexError(f"there is no row {number} of {count}")
        found.append(number % count)
    return found


def build(table: dict[str, Any], data_cls: Any) -> Any:
    """The table as a dict, or as an object of a class. Raises TypeError for a class that takes no table."""
    if data_cls in (None, dict):
        return table
    try:
        if callable(getattr(data_cls, "from_dict", None)):
            return data_cls.from_dict(table["batch"], table["non_tensor_batch"], meta_info=table["meta_info"])
        return data_cls(**table)
    except TypeError as error:
        raise TypeError(f"{data_cls!r} cannot be constructed from batch, non_tensor_batch and meta_info") from error


def objects(values: Sequence[Any]) -> Any:
    """A one-dimensional array of values, also of lists and arrays."""
    array = np.empty(len(values), dtype=object)
    for at, value in enumerate(values):
        array[at] = value
    return array


def _is_mapping(value: Any) -> bool:
    return value is None or callable(getattr(value, "items", None))


def _dict(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not _is_mapping(value):
        raise TypeError(f"a part of a table must be a mapping, not {type(value).__name__}")
    return dict(value.items())


def _is_dense(value: Any) -> bool:
    return (is_tensor(value) or (isinstance(value, np.ndarray) and value.dtype != object)) and value.ndim > 0


def _is_list(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _rows(data: Mapping[str, Any], sections: Mapping[str, Any]) -> int:
    said = {len(data[name]) for name, section in sections.items() if section in SECTIONS[:2]}
    free = [value for name, value in data.items() if sections.get(name) != "meta_info"]
    dense = {len(value) for value in free if _is_dense(value)}
    for sizes in (said, dense, {len(value) for value in free if _is_list(value)}):
        if len(sizes) > 1:
            raise ValueError(f"the number of rows is ambiguous: {sorted(sizes)}; give a FieldSchema with a section")
        if sizes:
            return sizes.pop()
    return 0


def _section(value: Any, count: int) -> str:
    if count and _is_dense(value) and len(value) == count:
        return "batch"
    return "non_tensor_batch" if count and _is_list(value) and len(value) == count else "meta_info"
