"""The GPU of this host, for the tests that need one."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def torch_on_gpu() -> Any:
    """Returns torch if it has a CUDA GPU. Otherwise skips the test."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU")
    return torch
