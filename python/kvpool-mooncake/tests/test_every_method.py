"""Every method of the original that is here was called by a test of this run. Runs last: see conftest.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import called
import pytest
from test_names import page

# Parts of the names of methods that need torch.
NEEDS_TORCH = "tensor", "cuda"


def test_every_method_was_called_and_returned(request: pytest.FixtureRequest) -> None:
    files = {Path(item.path).name for item in request.session.items}
    there = {file.name for file in Path(__file__).parent.glob("test_*.py")}
    if request.config.getoption("keyword") or request.config.getoption("markexpr") or files != there:
        pytest.skip("this run has not all tests")
    said = {name: here for module in called.MODULES for name, here in page()[module].items()}
    # A method that cannot mean anything here raises.
    wanted = {name for name in called.methods() if said[name] != "no"}
    if importlib.util.find_spec("torch") is None:
        wanted = {name for name in wanted if not any(part in name for part in NEEDS_TORCH)}
    assert len(wanted) > 100
    missing = sorted(wanted - called.RETURNED)
    assert not missing, f"not called: {', '.join(missing)}"
