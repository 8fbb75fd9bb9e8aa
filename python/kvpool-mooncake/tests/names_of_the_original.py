"""Writes the public names of an installed original as JSON, for `names-0.3.13.json`.

Run it with the interpreter of an environment that has `mooncake-transfer-engine` and not this package:

    python names_of_the_original.py > names-0.3.13.json

Native modules are imported. Python modules are parsed, since some of them need a GPU to be imported.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
from importlib import metadata
from pathlib import Path

PACKAGE = "mooncake"
DISTRIBUTION = "mooncake-transfer-engine"


def main() -> None:
    """Writes the names to standard output."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations, "the original is not installed"
    root = Path(next(iter(spec.submodule_search_locations)))
    modules: dict[str, dict[str, object]] = {}
    for file in sorted(root.iterdir()):
        name = file.name.partition(".")[0]
        if name.startswith("_") and name != "__init__":
            continue
        if file.suffix == ".py":
            modules[f"{PACKAGE}.{name}".removesuffix(".__init__")] = parsed(file)
        elif name in ("store", "engine"):
            modules[f"{PACKAGE}.{name}"] = imported(f"{PACKAGE}.{name}")
    scripts = [point.name for point in metadata.distribution(DISTRIBUTION).entry_points]
    said = {"version": metadata.version(DISTRIBUTION), "commands": sorted(scripts), "modules": modules}
    print(json.dumps(said, indent=1, sort_keys=True))


def imported(name: str) -> dict[str, object]:
    """Returns the names of a native module. For a class, also the names of its members."""
    module = importlib.import_module(name)
    found: dict[str, object] = {}
    for public in sorted(name for name in dir(module) if not name.startswith("_")):
        value = getattr(module, public)
        members = sorted(member for member in dir(value) if not member.startswith("_"))
        found[public] = members if inspect.isclass(value) else None
    return found


def parsed(file: Path) -> dict[str, object]:
    """Returns the names that a Python module defines at its top level. For a class, also its methods and
    fields."""
    found: dict[str, object] = {}
    for node in ast.parse(file.read_text()).body:
        for name in defined(node):
            found[name] = members(node) if isinstance(node, ast.ClassDef) else None
        match node:
            # The module re-exports this name.
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=names)):
                found |= {name.value: None for name in names if isinstance(name, ast.Constant)} | found
    return found


def members(node: ast.ClassDef) -> list[str]:
    """The public methods and fields of a class."""
    return sorted({name for inner in node.body for name in defined(inner)})


def defined(node: ast.stmt) -> list[str]:
    """The public names that a statement binds."""
    names: list[str] = []
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            names = [name]
        case ast.Assign(targets=targets):
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            names = [name]
    return [name for name in names if not name.startswith("_")]


if __name__ == "__main__":
    main()
