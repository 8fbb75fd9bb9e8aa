"""The ports of the pools that tests make."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import live_pools
import pytest

# The first port that Linux assigns by itself, with its default settings.
HANDED_OUT = 32768


def test_suites_side_by_side_have_ports_of_their_own(tmp_path: Path) -> None:
    # Some processes have the same remainder, as in two runs of both suites.
    taken = [live_pools.Ports(tmp_path, process) for process in (8, 9, 16, 17, 3, 5, 7, 15)]
    ports = [set(one.range) for one in taken]
    assert all(len(one) == 1500 for one in ports)
    assert not any(one & other for one, other in itertools.combinations(ports, 2))
    assert max(map(max, ports)) < HANDED_OUT
    with pytest.raises(RuntimeError, match="taken"):
        live_pools.Ports(tmp_path, 8)
    taken[3].lock.close()
    assert live_pools.Ports(tmp_path, 8).range == taken[3].range


def test_a_process_that_ends_gives_its_ports_back(tmp_path: Path) -> None:
    code = "import live_pools, pathlib, sys; print(live_pools.Ports(pathlib.Path(sys.argv[1]), 8).range.start)"
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            cwd=Path(live_pools.__file__).parent,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert int(ended.stdout) == live_pools.RANGES[0].start


def test_a_pool_gets_ports_of_this_process() -> None:
    assert {live_pools.free_port() for _ in range(20)} <= set(live_pools.PORTS.range)
