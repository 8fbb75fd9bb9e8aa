"""A proxy in front of vLLM engines that compute prompts (prefill) and engines that answer them (decode).

```
python handoff_proxy.py --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000 --listen 0.0.0.0:8080
```

All engines run `KvpoolConnector` with `handoff`. Each request goes to a prefill engine, with one token to
answer, and then to a decode engine, with the `kv_transfer_params` of prefill's answer. The engines take
turns. If prefill does not answer, decode computes the prompt itself.

With `--together` decode is asked at once, once the proxy has learned the address of prefill's ranks: decode
then takes layers while prefill computes. Only with `handoff = push`. It needs aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import secrets
from typing import Any

import aiohttp
from aiohttp import web

logger = logging.getLogger("handoff_proxy")

PATHS = ("/v1/completions", "/v1/chat/completions")
PASSED = ("Authorization", "X-Request-Id")


class Proxy:
    """Pairs a prefill and a decode engine for each request."""

    def __init__(self, prefill: list[str], decode: list[str], together: bool):
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)
        self._together = together
        self._known: dict[str, dict[str, Any]] = {}
        self._http: aiohttp.ClientSession | None = None

    async def serve(self, app: web.Application) -> Any:
        """Keeps one client session as long as the application runs."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as self._http:
            yield

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answers a request for a completion."""
        try:
            body = await request.json()
        except ValueError:
            return web.json_response({"error": "the body is no JSON"}, status=400)
        headers = {name: request.headers[name] for name in PASSED if name in request.headers}
        prefill, decode = next(self._prefill), next(self._decode)
        known = self._known.get(prefill) if self._together else None
        try:
            if known is not None:
                answer = await self._at_once(request.path, body, headers, prefill, decode, known)
            else:
                params = await self._prefilled(prefill, request.path, body, headers, None)
                answer = await self._asked(request.path, body, headers, decode, params)
        except aiohttp.ClientError as error:
            return web.json_response({"error": f"decode {decode} does not answer: {error}"}, status=502)
        return await self._passed_on(request, answer)

    async def _at_once(
        self,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str],
        prefill: str,
        decode: str,
        known: dict[str, Any],
    ) -> aiohttp.ClientResponse:
        room = secrets.randbits(63)
        params = {**known, "room": room, "tokens": None}
        first = asyncio.create_task(self._prefilled(prefill, path, body, headers, room))
        asked = asyncio.create_task(self._asked(path, body, headers, decode, params))
        await asyncio.wait([first, asked], return_when=asyncio.FIRST_COMPLETED)
        if first.done() and first.result() is None and not asked.done():
            # Nobody computes the prompt: decode must not wait for it.
            asked.cancel()
            self._known.pop(prefill, None)
            return await self._asked(path, body, headers, decode, None)
        return await asked

    async def _prefilled(
        self, engine: str, path: str, body: dict[str, Any], headers: dict[str, str], room: int | None
    ) -> dict[str, Any] | None:
        """The parameters for decode; `None` if prefill did not compute the prompt."""
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if room is not None:
            params["room"] = room
        asked = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
        asked.pop("stream_options", None)
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        try:
            async with self._session.post(f"{engine}{path}", json=asked, headers=headers) as response:
                response.raise_for_status()
                answer = await response.json()
        except (aiohttp.ClientError, ValueError) as error:
            logger.warning("prefill %s did not answer, decode computes the prompt: %s", engine, error)
            return None
        given: dict[str, Any] | None = answer.get("kv_transfer_params")
        if given and given.get("mode") == "push":
            self._known[engine] = given
        return given

    async def _asked(
        self,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str],
        engine: str,
        params: dict[str, Any] | None,
    ) -> aiohttp.ClientResponse:
        asked = body if params is None else {**body, "kv_transfer_params": params}
        return await self._session.post(f"{engine}{path}", json=asked, headers=headers)

    async def _passed_on(
        self, request: web.Request, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Passes the answer on, piece by piece."""
        async with answer:
            kind = answer.headers.get("Content-Type", "application/json")
            passed = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
            await passed.prepare(request)
            async for piece in answer.content.iter_any():
                await passed.write(piece)
            await passed.write_eof()
        return passed

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._http is not None, "invariant: requests come only while the application runs"
        return self._http


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--prefill", action="append", required=True, metavar="URL")
    arguments.add_argument("--decode", action="append", required=True, metavar="URL")
    arguments.add_argument("--listen", default="127.0.0.1:8080", metavar="HOST:PORT")
    arguments.add_argument("--together", action="store_true", help="ask prefill and decode at once")
    options = arguments.parse_args()
    logging.basicConfig(level=logging.INFO)
    host, _, port = options.listen.rpartition(":")
    proxy = Proxy(options.prefill, options.decode, options.together)
    app = web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(proxy.serve)
    for path in PATHS:
        app.router.add_post(path, proxy.answer)
    web.run_app(app, host=host, port=int(port))


if __name__ == "__main__":
    main()
