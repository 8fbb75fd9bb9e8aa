"""The installed package, as a new user finds it."""

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kvpool
from kvpool import _native


def test_the_version_is_a_number() -> None:
    assert kvpool.__version__[0].isdigit()


def test_a_pool_lives_with_the_commands_of_the_wheel(shared_pool) -> None:
    status = shared_pool.kvctl("status")
    assert "node-0" in str(status)


def documented() -> Iterator[tuple[str, str, str]]:
    """Yields each class, function, method and property of the stub file: its docstring there, and the
    module's."""
    stub = Path(kvpool.__file__).with_name("_native.pyi")
    for node in ast.parse(stub.read_text()).body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or not hasattr(_native, node.name):
            continue
        owner = getattr(_native, node.name)
        yield node.name, ast.get_docstring(node) or "", inspect.cleandoc(owner.__doc__ or "")
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and not part.name.startswith("__"):
                doc = getattr(owner, part.name).__doc__ or ""
                yield f"{node.name}.{part.name}", ast.get_docstring(part) or "", inspect.cleandoc(doc)


def test_editors_show_the_docstrings_of_the_module() -> None:
    found = list(documented())
    assert len(found) > 100
    for name, here, there in found:
        assert here == there, name
    methods = [there for name, _, there in found if name.startswith("Pool.")]
    assert len(methods) > 30 and all(methods)


def said(rust_log: str | None) -> str:
    """Returns the standard error of a process that looks for an absent master."""
    nobody = "http://127.0.0.1:1"
    script = f"""
import kvpool
try:
    kvpool.Pool.connect({nobody!r}, timeout=0.2)
except kvpool.Error:
    pass
"""
    env = {name: value for name, value in os.environ.items() if name != "RUST_LOG"}
    if rust_log is not None:
        env["RUST_LOG"] = rust_log
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stderr


def test_the_native_half_logs_by_the_filter() -> None:
    assert said(None) == ""
    assert said("") == ""
    assert "kvpool" in said("debug")
    assert "kvpool logs nothing: bad log filter `kvpool=loud`" in said("kvpool=loud")
