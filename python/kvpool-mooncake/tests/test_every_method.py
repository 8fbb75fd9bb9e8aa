"""A test of this run has called every method of the original that is here. Runs last: see conftest.py.

Where several processes run the tests, the process that started them checks this at the end.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import called
import pytest
from test_names import page

# Parts of the names of methods that need torch.
NEEDS_TORCH = "tensor", "cuda"
# Options by which a run leaves tests out.
LEAVES_OUT = "keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise"
HERE = Path(__file__).parent


def has_all_tests(args: Iterable[str], files: Iterable[Path]) -> bool:
    """Whether a run with these arguments, which has collected these files, has all tests of this folder. It may
    also have the tests of the other suite."""
    return set(HERE.glob("test_*.py")) <= set(files) and not any("::" in arg for arg in args)


def leaves_out(config: pytest.Config) -> bool:
    # These two options are absent when pytest runs without its cache, as in pytest.ini.
    return any(config.getoption(option, None) for option in LEAVES_OUT)


def test_a_run_of_both_suites_has_all_tests_of_this_one() -> None:
    here, other = list(HERE.glob("test_*.py")), HERE.parents[1] / "tests/test_pool.py"
    assert has_all_tests(["python/tests", "python/kvpool-mooncake/tests"], [*here, other])
    assert not has_all_tests(["python"], here[1:])
    assert not has_all_tests(["python", "python/tests/test_pool.py::test_a"], here)


def test_files_whose_tests_need_a_missing_package_count(request: pytest.FixtureRequest) -> None:
    config = request.config
    asked = {(config.invocation_params.dir / arg).resolve() for arg in config.args}
    if leaves_out(config) or not asked & {HERE, *HERE.parents}:
        pytest.skip("this run has not all files")
    assert has_all_tests(config.args, called.FILES)


def never_returned(config: pytest.Config) -> list[str] | None:
    """The methods that no test of this run has called, or that always raised. None if the run has not all tests."""
    if leaves_out(config) or not has_all_tests(config.args, called.FILES):
        return None
    said = {name: here for module in called.MODULES for name, here in page()[module].items()}
    # A method without a meaning here raises.
    wanted = {name for name in called.methods() if said[name] != "no"}
    if importlib.util.find_spec("torch") is None:
        wanted = {name for name in wanted if not any(part in name for part in NEEDS_TORCH)}
    assert len(wanted) > 100
    return sorted(wanted - called.RETURNED)


def test_every_method_was_called_and_returned(request: pytest.FixtureRequest) -> None:
    missing = never_returned(request.config)
    if missing is None:
        pytest.skip("this run has not all tests")
    assert not missing, f"not called: {', '.join(missing)}"
