"""The public names of the original: recorded, on the page, and in the package as the page says."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
import tomllib
from pathlib import Path

import mooncake.engine
import mooncake.store
import pytest

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "names-0.3.13.json").read_text())
PAGE = (HERE.parent / "NAMES.md").read_text()
# Modules that need a package which the wheel does not depend on.
NEEDS = {"mooncake.mooncake_store_service": "aiohttp"}


def recorded() -> dict[str, set[str]]:
    """The names of each module, members as `Class.member`."""
    return {
        module: {full for name, members in names.items() for full in (name, *(f"{name}.{m}" for m in members or ()))}
        for module, names in RECORDED["modules"].items()
        if names
    }


def page() -> dict[str, dict[str, str]]:
    """Returns the page's word for each name of each module."""
    said: dict[str, dict[str, str]] = {}
    for part in PAGE.split("\n## ")[1:]:
        rows = re.findall(r"^\| (`.*?) \| (works|differently|no) \|", part, re.MULTILINE)
        title = part.splitlines()[0].strip("`")
        said[title] = {name: here for names, here in rows for name in re.findall("`([^`]+)`", names)}
    return said


def is_there(module: object, name: str) -> bool:
    """Whether a module has a name, or whether a class of the module has a member."""
    outer, _, member = name.partition(".")
    if not member:
        return hasattr(module, outer)
    found = getattr(module, outer, None)
    if inspect.isclass(found) and issubclass(found, enum.Enum):
        return hasattr(next(iter(found)), member)
    fields = {field for base in getattr(found, "__mro__", ()) for field in getattr(base, "__annotations__", {})}
    if hasattr(found, member) or member in fields:
        return True
    # The constructor may set the attribute.
    return inspect.isclass(found) and f"self.{member} = " in inspect.getsource(found)


def test_the_page_has_every_name_and_no_other() -> None:
    said = page()
    commands = said.pop("Commands")
    assert set(commands) == set(RECORDED["commands"])
    assert {module: set(names) for module, names in said.items()} == recorded()
    kinds = "works", "differently", "no"
    counts = [sum(list(names.values()).count(here) for names in said.values()) for here in kinds]
    assert f"Of {sum(counts)} names, {counts[0]} work, {counts[1]} work differently, and {counts[2]} do not." in PAGE


@pytest.mark.parametrize("name", sorted(recorded()))
def test_the_package_has_the_names_of_the_page(name: str) -> None:
    said = page()[name]
    wanted = {public for public, here in said.items() if here != "no"}
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        assert not wanted
        return
    assert sorted(public for public in wanted if not is_there(module, public)) == []


def test_every_command_of_the_original_is_one_of_the_wheel() -> None:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    assert set(project["scripts"]) == set(RECORDED["commands"])
    for place in project["scripts"].values():
        module, _, function = place.partition(":")
        if module in NEEDS:
            pytest.importorskip(NEEDS[module])
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("module", [mooncake.store, mooncake.engine])
def test_no_helper_of_ours_is_public(module: object) -> None:
    public = {name for name in dir(module) if not name.startswith("_")}
    extra = public - {name for name in recorded()[module.__name__] if "." not in name}
    # Releases before 0.3.13 had this class in the module.
    assert extra <= {"MooncakeDistributedStoreAsync"}
    assert public == set(module.__all__)
