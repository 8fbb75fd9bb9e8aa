"""The asyncio variants: `async_NAME` for every method NAME."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any


class AsyncForms:
    """Mixin that gives each method of a class an awaitable variant.

    The method runs in a thread of asyncio's pool, at most until its deadline. After a cancellation the thread
    continues to the end of the method, and uses the buffers until then.
    """

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        plain = name.removeprefix("async_")
        method = None
        if plain != name and not plain.startswith("_"):
            method = getattr(type(self), plain, None)
        if not callable(method):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        bound = getattr(self, plain)

        @functools.wraps(bound)
        async def later(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(bound, *args, **kwargs)

        return later
