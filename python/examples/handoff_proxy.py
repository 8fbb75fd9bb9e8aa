"""A proxy in front of vLLM engines that compute prompts (prefill) and engines that answer them (decode).

```
python handoff_proxy.py --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000 --listen 0.0.0.0:8080
```

All engines run `KvpoolConnector` with `handoff`. Repeat `--prefill` and `--decode` for more engines. Each
request goes to a prefill engine first, with one token to answer. Then it goes to a decode engine, with the
`kv_transfer_params` of prefill's answer. The engines take turns, so that each prefill engine meets each decode
engine.

- If prefill does not answer, decode computes the prompt itself.
- If decode does not answer, the client gets status 502, or 504 after `--timeout` seconds without a byte.
- A room holds the KV of one sequence. So decode itself computes requests for several prompts or several
  answers.

With `--together` the proxy asks decode at once, when it knows the address of prefill's ranks. Decode then takes
layers while prefill computes. This needs `handoff = push`. The proxy needs aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import itertools
import logging
import math
import secrets
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
from aiohttp import web

logger = logging.getLogger("handoff_proxy")

PATHS = ("/v1/completions", "/v1/chat/completions")
PASSED = ("Authorization", "X-Request-Id")
CONNECT_SECONDS = 5.0
# vLLM closes an idle connection after 5 s. A request on a connection that is being closed would fail.
IDLE_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Asked:
    """A client's request, in the form for both engines."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]

    def is_one_sequence(self) -> bool:
        """Whether the request has one prompt and one answer."""
        prompt = self.body.get("prompt")
        is_batch = isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(one, int) for one in prompt)
        is_one_answer = all(self.body.get(name) in (None, 1) for name in ("n", "best_of"))
        return not is_batch and is_one_answer and not self.body.get("use_beam_search")


def pairs(prefill: Sequence[str], decode: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields pairs of a prefill and a decode engine without end: engines take turns, and all pairs occur."""
    turns, shifts = math.lcm(len(prefill), len(decode)), math.gcd(len(prefill), len(decode))
    for turn in itertools.count():
        # Two and two engines in step would only ever make two pairs.
        shift = turn // turns % shifts
        yield prefill[turn % len(prefill)], decode[(turn + shift) % len(decode)]


class Proxy:
    """Pairs a prefill and a decode engine for each request."""

    def __init__(self, prefill: list[str], decode: list[str], *, together: bool, timeout: float):
        """`timeout`: for how many seconds an engine may send nothing."""
        self._pairs = pairs(prefill, decode)
        self._together = together
        self._timeout = timeout
        self._known: dict[str, dict[str, Any]] = {}
        self._prefilling: set[asyncio.Task[Any]] = set()
        self._http: aiohttp.ClientSession | None = None

    async def serve(self, app: web.Application) -> Any:
        """Keeps one client session while the application runs."""
        # With a limit, requests to decode could hold all connections while prefill waits for a connection.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=self._timeout)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._http:
            yield
            for task in self._prefilling:
                task.cancel()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answers a request for a completion."""
        try:
            body = await request.json()
        except (ValueError, LookupError, RecursionError) as error:
            # LookupError: the request names a charset that Python does not know.
            return _error(400, f"the body is not JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, "the body is not a JSON object")
        # A client must not choose the address from which decode takes KV.
        body.pop("kv_transfer_params", None)
        headers = {name: request.headers[name] for name in PASSED if name in request.headers}
        asked = Asked(request.path, body, headers)
        prefill, decode = next(self._pairs)
        try:
            answer = await self._answered(asked, prefill, decode)
        except TimeoutError as error:
            logger.warning("decode %s did not answer in time: %s", decode, error)
            return _error(504, f"decode {decode} did not answer in time: {error}")
        except aiohttp.ClientError as error:
            logger.warning("decode %s did not answer: %s", decode, error)
            return _error(502, f"decode {decode} did not answer: {error}")
        return await self._passed_on(request, decode, answer)

    async def _answered(self, asked: Asked, prefill: str, decode: str) -> aiohttp.ClientResponse:
        """Returns decode's answer. Raises ClientError or TimeoutError if decode does not answer."""
        if not asked.is_one_sequence():
            return await self._decoded(asked, decode, None)
        known = self._known.get(prefill) if self._together else None
        if known is not None:
            return await self._at_once(asked, prefill, decode, known)
        return await self._decoded(asked, decode, await self._prefilled(asked, prefill, None))

    async def _at_once(
        self, asked: Asked, prefill: str, decode: str, known: dict[str, Any]
    ) -> aiohttp.ClientResponse:
        room = secrets.randbits(63)
        params = {**known, "room": room, "tokens": None}
        first = asyncio.create_task(self._prefilled(asked, prefill, room))
        # The event loop keeps only weak references to its tasks.
        self._prefilling.add(first)
        first.add_done_callback(self._prefilling.discard)
        second = asyncio.create_task(self._decoded(asked, decode, params))
        try:
            await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
            if not second.done() and first.result() is None:
                # Prefill does not compute the prompt, so decode must not wait for it.
                second.cancel()
                self._known.pop(prefill, None)
                return await self._decoded(asked, decode, None)
            return await second
        except BaseException:
            # Decode does not answer, or the client has gone: no engine takes the KV.
            first.cancel()
            second.cancel()
            raise

    async def _prefilled(self, asked: Asked, engine: str, room: int | None) -> dict[str, Any] | None:
        """Returns the parameters for decode; `None` if prefill did not compute the prompt."""
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if room is not None:
            params["room"] = room
        body = {**asked.body, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
        body.pop("stream_options", None)
        # vLLM refuses a minimum number of tokens above the maximum.
        body.pop("min_tokens", None)
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        try:
            async with self._session.post(f"{engine}{asked.path}", json=body, headers=asked.headers) as response:
                response.raise_for_status()
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.warning("prefill %s did not compute a prompt, decode computes it: %s", engine, error)
            return None
        given = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
        if not isinstance(given, dict):
            logger.warning("prefill %s answered without kv_transfer_params, decode computes the prompt", engine)
            return None
        if given.get("mode") == "push":
            self._known[engine] = given
        return given

    async def _decoded(
        self, asked: Asked, engine: str, params: dict[str, Any] | None
    ) -> aiohttp.ClientResponse:
        body = asked.body if params is None else {**asked.body, "kv_transfer_params": params}
        return await self._session.post(f"{engine}{asked.path}", json=body, headers=asked.headers)

    async def _passed_on(
        self, request: web.Request, engine: str, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Passes the answer on to the client, piece by piece."""
        async with answer:
            kind = answer.headers.get("Content-Type", "application/json")
            passed = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
            await passed.prepare(request)
            try:
                async for piece in answer.content.iter_any():
                    await passed.write(piece)
            except aiohttp.ClientConnectionResetError:
                # The client has gone. The end of the block also ends decode's connection.
                return passed
            except (aiohttp.ClientError, TimeoutError) as error:
                logger.warning("the answer of decode %s broke off: %s", engine, error)
                # To the client an orderly end would look like the whole answer.
                if request.transport is not None:
                    request.transport.abort()
                return passed
            await passed.write_eof()
        return passed

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._http is not None, "invariant: requests come only while the application runs"
        return self._http


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)


def engine_url(text: str) -> str:
    """An engine's URL, without a slash at its end. Raises ArgumentTypeError for another text."""
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://10.0.0.1:8000")
    return text.rstrip("/")


def address(text: str) -> tuple[str, int]:
    """A host and a port. Raises ArgumentTypeError for another text."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address such as 0.0.0.0:8080")
    return host.removeprefix("[").removesuffix("]"), int(port)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--prefill", action="append", required=True, metavar="URL", type=engine_url)
    arguments.add_argument("--decode", action="append", required=True, metavar="URL", type=engine_url)
    arguments.add_argument(
        "--listen",
        default="127.0.0.1:8080",
        metavar="HOST:PORT",
        type=address,
        help="with port 0 any free port, which the first line of the output names",
    )
    arguments.add_argument("--together", action="store_true", help="ask prefill and decode at once")
    arguments.add_argument(
        "--timeout",
        default=600.0,
        metavar="SECONDS",
        type=float,
        help="how long an engine may send nothing (default: %(default)s)",
    )
    options = arguments.parse_args()
    logging.basicConfig(level=logging.INFO)
    host, port = options.listen
    proxy = Proxy(options.prefill, options.decode, together=options.together, timeout=options.timeout)
    app = web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(proxy.serve)
    for path in PATHS:
        app.router.add_post(path, proxy.answer)
    # With handler_cancellation, engines stop computing for a client that has gone.
    web.run_app(app, host=host, port=port, handler_cancellation=True, print=functools.partial(print, flush=True))


if __name__ == "__main__":
    main()
