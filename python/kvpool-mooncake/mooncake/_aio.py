"""The asyncio forms: `async_NAME` for every method NAME."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any


class AsyncForms:
    """Gives each method of the class that it is mixed into a form to be awaited.

    The method runs in a thread of asyncio's own pool and lets others run meanwhile; its deadline bounds
    it. A form that is cancelled ends in its thread, which uses the buffers that were passed until then.
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
