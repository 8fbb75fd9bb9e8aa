"""Stands in for SGLang's package of kernels. No registry has a build of it for CPUs without AMX.

SGLang imports a few of its names on a CPU, and computes with torch on a machine without AMX kernels. This
module implements the names that SGLang calls, in torch. Every other name fails when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, out_cache_loc: Any, *_: Any
) -> None:
    """Notes the places of the cache for the new tokens of each request."""
    at = 0
    rows, starts, ends = (part.tolist() for part in (req_pool_indices, start_offset, end_offset))
    for row, start, end in zip(rows, starts, ends, strict=True):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[at : at + count].to(req_to_token.dtype)
        at += count


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no build for this CPU")

    return missing
