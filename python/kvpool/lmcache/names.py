"""The names of LMCache's objects in the pool.

```
lmcache:meta-llama/Llama-3.1-8B@1000100@0@@bfloat16@fp8@9f86d081884c7d65...
        └──────────┬──────────┘ └──┬──┘ │ │└───┬──┘ └┬┘ └──────┬────────
                 model           rank group│  types serde   LMCache's hash
                                      cache_salt
```

This is a name of the L2 adapter. With a `salt` it begins with `lmcache-3bad8bd78c1c2648:`, where the digits are
the start of the salt's SHA-256. LMCache's hash comes last: the pool needs the least memory for keys that end
with 64 hex digits.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

Owner = tuple[str, int, int]
"""The model, the rank and the group of an object."""
Shapes = tuple[tuple[int, ...], ...]
"""The shapes of all parts of an object."""


class Names:
    """Names of objects by their keys and element types.

    LMCache's keys have no element types, and not every call of LMCache gives them. So this class keeps the
    types of an owner's objects. An unlock and a delete mean an object of any type.
    """

    def __init__(self, serde: str = "", salt: str = "") -> None:
        """`serde` and `salt` are the settings. `serde` names the way in which LMCache serializes objects before
        it stores them."""
        self._serde = serde
        self._start = start(salt)
        self._lock = threading.Lock()
        # The last types of an owner are its present types.
        self._types: dict[Owner, list[str]] = {}
        # The shapes that the last lookup gave.
        self._shapes: dict[Owner, Shapes] = {}

    def of_lookup(self, keys: Sequence[Any], layouts: Any) -> list[str | None]:
        """Returns the names of objects with these layouts, by group. None if the types are not known."""
        # LMCache's benchmark passes a layout without types, and scripts pass one layout or None.
        by_group = layouts if isinstance(layouts, Mapping) else {}
        return [self._of_lookup(key, by_group.get(key.object_group_id)) for key in keys]

    def of_objects(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[str | None]:
        """Returns the names for a store or a load of these objects.

        Without a serde, the name is None if the object's types or shapes differ from those of the last lookup:
        LMCache may have serialized the object. Before the first lookup, it is None for an object that looks
        serialized. With a serde, it is None if no lookup has given the types.
        """
        return [self._of_object(key, item) for key, item in zip(keys, objects, strict=True)]

    def of_all_types(self, key: Any) -> list[str]:
        """Returns the names of an object, one for each of the types that were ever known."""
        with self._lock:
            return [self._name(key, types) for types in self._types.get(_owner(key), ())]

    def _of_lookup(self, key: Any, layout: Any) -> str | None:
        with self._lock:
            known = self._types.setdefault(_owner(key), [])
            if layout is not None and layout.dtypes:
                _make_present(known, _text(layout.dtypes))
                self._shapes[_owner(key)] = _plain(layout.shapes)
            return self._name(key, known[-1]) if known else None

    def _of_object(self, key: Any, item: Any) -> str | None:
        with self._lock:
            known = self._types.setdefault(_owner(key), [])
            if not self._serde:
                types, shapes = _parts_of(item)
                if _owner(key) not in self._shapes and _looks_serialized(item):
                    return None
                if not known:
                    known.append(types)
                # Equal types are not enough: bytes are also the type of an 8-bit cache.
                fits = types == known[-1] and shapes == self._shapes.get(_owner(key), shapes)
                return self._name(key, types) if fits else None
            # The object's own type is that of the serialized bytes.
            return self._name(key, known[-1]) if known else None

    def _name(self, key: Any, types: str) -> str:
        model, rank, group = _owner(key)
        form = f"{types}@{self._serde}" if self._serde else types
        return f"{self._start}:{model}@{rank:x}@{group}@{key.cache_salt}@{form}@{key.chunk_hash.hex()}"


def start(salt: str) -> str:
    """Returns the start of all names with a setting `salt`."""
    # A digest, because the salt may contain any character.
    return f"lmcache-{hashlib.sha256(salt.encode()).hexdigest()[:16]}" if salt else "lmcache"


def _owner(key: Any) -> Owner:
    return key.model_name, key.kv_rank, key.object_group_id


def _parts_of(item: Any) -> tuple[str, Shapes]:
    """Returns the element types and the shapes of an object's parts."""
    about = item.metadata
    if about.dtypes is None or about.shapes is None:
        # An object of LMCache's own checks lists no parts, so LMCache's `get_dtypes` fails for it.
        return _text([about.dtype]), _plain([about.shape])
    return _text(about.dtypes), _plain(about.shapes)


def _looks_serialized(item: Any) -> bool:
    """Whether an object is a row of bytes, as every serialized object of LMCache is.

    A KV cache has more dimensions, and an object of LMCache's own checks lists no parts.
    """
    about = item.metadata
    if about.dtypes is None or about.shapes is None:
        return False
    return _text(about.dtypes) == "uint8" and len(about.shapes[0]) == 1


def _plain(shapes: Sequence[Sequence[int]]) -> Shapes:
    return tuple(tuple(shape) for shape in shapes)


def _text(types: Sequence[Any]) -> str:
    """Returns the element types of all parts of an object, as text."""
    return "+".join(str(one).removeprefix("torch.") for one in types)


def _make_present(known: list[str], types: str) -> None:
    if types in known:
        known.remove(types)
    known.append(types)
