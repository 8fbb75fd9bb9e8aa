"""The example of the README is the file, and the file runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from live_pools import LivePool

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "python/examples/share.py"


def test_the_example_runs(shared_pool: LivePool) -> None:
    pytest.importorskip("numpy")
    command = [sys.executable, str(EXAMPLE), shared_pool.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "6 blocks of 131072 bytes, equal: True\n"


def test_the_readme_shows_the_example_as_it_is() -> None:
    assert f"```python\n{EXAMPLE.read_text()}```" in (ROOT / "README.md").read_text()
