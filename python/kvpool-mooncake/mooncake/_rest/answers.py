"""JSON answers, and errors of handlers."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

log = logging.getLogger("mooncake.rest")


class Failure(Exception):
    """The answer to a failed request: a status, an error text, and further fields for the caller."""

    def __init__(self, status: int, error: str, **more: object) -> None:
        super().__init__(error)
        self.status = status
        self.said = {"error": error, **more}


def said(content: Mapping[str, object], status: int = 200) -> web.Response:
    """An answer in JSON."""
    return web.Response(status=status, text=json.dumps(content), content_type="application/json")


Handler = Callable[[Any, Any], Awaitable[web.StreamResponse]]


def answering(handler: Handler) -> Handler:
    """Wraps a handler so that its failures become answers: a Failure with its status, any other with 500 or
    501."""

    @functools.wraps(handler)
    async def answered(service: Any, request: Any) -> web.StreamResponse:
        begun = time.perf_counter()
        try:
            return await handler(service, request)
        except Failure as failure:
            return said(failure.said, failure.status)
        except NotImplementedError as error:
            return said({"error": str(error)}, 501)
        except Exception as error:
            log.exception("%s", handler.__name__)
            return said({"error": str(error)}, 500)
        finally:
            log.debug("%s: %.2f ms", handler.__name__, (time.perf_counter() - begun) * 1000)

    return answered


async def body_of(request: Any) -> dict[str, Any]:
    """The JSON object of a request. Raises Failure with 400 for anything else."""
    try:
        found = await request.json()
    except (ValueError, UnicodeDecodeError) as error:
        raise Failure(400, f"Malformed JSON body: {error}") from error
    if not isinstance(found, dict):
        raise Failure(400, "Request body must be a JSON object")
    return found


async def call(method: Callable[..., Any], *args: Any) -> Any:
    """Calls the store on a thread, because the call may wait for the pool."""
    return await asyncio.to_thread(method, *args)
