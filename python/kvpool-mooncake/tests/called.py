"""The methods of the drop-in that the tests of this run have called and that returned."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# The modules whose classes replace the original's pool and engine.
MODULES = ("mooncake.store", "mooncake.engine", "mooncake.structured_object_store", "mooncake.dataproto_catalog")
# `Class.method` of every method that has returned.
RETURNED: set[str] = set()
# The files from which this run has collected tests, with the files whose tests all skip.
FILES: set[Path] = set()


def methods() -> dict[str, tuple[type, str]]:
    """Returns every method of the original's classes that is here: `Class.method`, with the class that has it
    here."""
    recorded = json.loads((HERE / "names-0.3.13.json").read_text())["modules"]
    found = {}
    for module in MODULES:
        for name, members in recorded[module].items():
            known = getattr(importlib.import_module(module), name, None)
            # Other classes implement a protocol, so nothing calls its own methods.
            is_there = inspect.isclass(known) and not getattr(known, "_is_protocol", False)
            for member in members or () if is_there else ():
                here = inspect.getattr_static(known, member, None)
                if inspect.isfunction(here) or isinstance(here, (staticmethod, classmethod)):
                    found[f"{name}.{member}"] = (known, member)
    return found


def record() -> None:
    """Starts recording."""
    for name, (known, member) in methods().items():
        here = inspect.getattr_static(known, member)
        if isinstance(here, staticmethod):
            setattr(known, member, staticmethod(_recorded(name, here.__func__)))
        elif inspect.isfunction(here):
            setattr(known, member, _recorded(name, here))


def _recorded(name: str, function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        answer = function(*args, **kwargs)
        RETURNED.add(name)
        return answer

    return call
