"""The argument types of the pool's methods, for annotations of callers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool._native import Block, CudaArray, Key, Memory, Tensor, WritableBlock

    __all__ = ["Block", "CudaArray", "Key", "Memory", "Tensor", "WritableBlock"]
