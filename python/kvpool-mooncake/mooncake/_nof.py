"""Segments on NVMe over fabrics. kvpool has none."""

from __future__ import annotations


class MooncakeDistributedNoFRegister:
    """The original's registration of NVMe-over-fabrics targets; every method raises NotImplementedError."""

    def real_register(self, *_args: object) -> int:
        """Not supported: raises NotImplementedError."""
        raise NotImplementedError("real_register: kvpool has no segments on NVMe over fabrics")

    def real_unregister_by_endpoint(self, *_args: object) -> int:
        """Not supported: raises NotImplementedError."""
        raise NotImplementedError("real_unregister_by_endpoint: kvpool has no segments on NVMe over fabrics")
