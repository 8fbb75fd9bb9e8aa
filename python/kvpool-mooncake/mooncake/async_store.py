"""The asyncio variants of a store's methods."""

from mooncake.store import MooncakeDistributedStore, MooncakeDistributedStoreAsync

__all__ = ["MooncakeDistributedStore", "MooncakeDistributedStoreAsync"]
