"""The pools that tests ask for by name."""

from live_pools import make_pool, own_pool, shared_pool

__all__ = ["make_pool", "own_pool", "shared_pool"]
