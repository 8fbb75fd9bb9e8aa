"""The ports of the pools that tests make."""

from __future__ import annotations

import itertools
import os

import live_pools

# The first port that Linux hands out by itself, with its own settings.
HANDED_OUT = 32768


def test_suites_side_by_side_have_ports_of_their_own() -> None:
    ports = [set(live_pools.ports_of(number)) for number in range(4321, 4321 + 8)]
    assert all(len(one) == 1500 for one in ports)
    assert not any(one & other for one, other in itertools.combinations(ports, 2))
    assert max(map(max, ports)) < HANDED_OUT


def test_a_pool_gets_ports_of_this_process() -> None:
    assert {live_pools.free_port() for _ in range(20)} <= set(live_pools.ports_of(os.getpid()))
