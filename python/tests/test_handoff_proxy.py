"""The example proxy, as a process of its own, in front of prefill and decode engines that are processes too.

This file is also the program of an engine: `python test_handoff_proxy.py prefill|decode NUMBER BOOTSTRAP`. An engine
computes KV that the prompt determines. Decode answers with the digest of the KV in its own pages.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import hashlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from kvpool import handoff
from kvpool.vllm.handoff import Parameters

PROXY = Path(__file__).parents[1] / "examples" / "handoff_proxy.py"
COMPLETIONS = "/v1/completions"
WAIT = 60.0
LAYERS = 2
HEADS = 4
HEAD_BYTES = 64
PAGE_TOKENS = 16
PAGE_BYTES = PAGE_TOKENS * HEADS * HEAD_BYTES
PAGES = 128
STATES = [(layer, kind) for layer in range(LAYERS) for kind in ("k", "v")]

T = TypeVar("T")


def page_count(prompt: str) -> int:
    """The number of pages of a prompt, in which each character is a token."""
    return -(-len(prompt) // PAGE_TOKENS)


def kv(prompt: str, state: int, page: int) -> bytes:
    """The KV of one page of a prompt, in one entry of STATES: PAGE_BYTES bytes."""
    return hashlib.shake_128(f"{prompt}|{STATES[state]}|{page}".encode()).digest(PAGE_BYTES)


def whole_kv(prompt: str) -> bytes:
    """The KV of a prompt: state after state, page after page."""
    return b"".join(kv(prompt, state, page) for state in range(len(STATES)) for page in range(page_count(prompt)))


# The engine.


class Engine:
    """An engine with a session over its KV memory, [state][page][byte]. It notes all requests."""

    def __init__(self, role: str, number: int, bootstrap: str):
        self.role = role
        self.name = f"{role}-{number}"
        self.bootstrap = f"http://{bootstrap}"
        self.memory = np.full((len(STATES), PAGES, PAGE_BYTES), 0xEE, dtype="uint8")
        states = [
            handoff.State(kind, layer, self.memory[at].ctypes.data, PAGES, HEADS, HEAD_BYTES, PAGE_TOKENS)
            for at, (layer, kind) in enumerate(STATES)
        ]
        self.session = handoff.Session(states, page_tokens=PAGE_TOKENS, name=self.name)
        # Prefill and decode have a request in different pages.
        self.free = list(range(PAGES) if role == "prefill" else reversed(range(PAGES)))
        self.freed = asyncio.Condition()
        self.told: list[dict[str, Any]] = []
        self.events: dict[str, asyncio.Event] = collections.defaultdict(asyncio.Event)
        self.tasks: set[asyncio.Task[None]] = set()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked = request.headers.get("X-Request-Id", "")
        self.told.append({"request": asked, **body})
        self.events[f"told-{asked}"].set()
        try:
            if not isinstance(body.get("prompt"), str | list):
                return web.json_response({"error": f"{self.name}: no prompt"}, status=400)
            if self.role in body.get("hold", ()):
                await self.events[f"go-{asked}"].wait()
            if self.role == "prefill":
                return await self.prefill(body)
            return await self.decode(request, asked, body)
        except asyncio.CancelledError:
            self.events[f"gone-{asked}"].set()
            raise

    async def prefill(self, body: dict[str, Any]) -> web.StreamResponse:
        """Computes a prompt and sends it, layer by layer."""
        params, prompt = body["kv_transfer_params"], body["prompt"]
        if (params.get("do_remote_decode"), body.get("max_tokens"), body.get("stream")) != (True, 1, False):
            return web.json_response({"error": f"{self.name}: not a request to prefill"}, status=400)
        room = params.get("room")
        room = secrets.randbits(63) if room is None else room
        pages = await self.taken(prompt)
        sending = self.session.send(room, pages, timeout=WAIT)
        self.give_back_after(sending, pages)
        for layer in range(LAYERS):
            self.compute(prompt, pages, {layer})
            sending.produced(0, len(pages), layer, 1)
        sending.finish()
        given = Parameters(room, (self.session.address,), 1, (LAYERS,), "push", len(prompt))
        return web.json_response({"choices": [{"text": "."}], "kv_transfer_params": given.answer()})

    async def decode(self, request: web.Request, asked: str, body: dict[str, Any]) -> web.StreamResponse:
        """Receives a prompt, or computes it, and answers with the digest of its KV."""
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        choices, source = [], ""
        for prompt in prompts:
            pages = await self.taken(prompt)
            source = await self.filled(prompt, pages, body.get("kv_transfer_params"))
            came = self.memory[:, pages].tobytes()
            choices.append({"text": hashlib.sha256(came).hexdigest(), "right": came == whole_kv(prompt)})
            await self.given_back(pages)
        answer = {"choices": choices, "engine": self.name, "kv_from": source}
        if not body.get("stream"):
            return web.json_response(answer)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(f"data: {json.dumps(answer)}\n\n".encode())
        await self.events[f"go-{asked}"].wait()
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def filled(self, prompt: str, pages: list[int], params: dict[str, Any] | None) -> str:
        """Fills the pages. Returns the name of the prefill engine with the sender's address, or "computed"."""
        if params is None:
            self.compute(prompt, pages, set(range(LAYERS)))
            return "computed"
        given = Parameters.read(params, "push")
        registered = await self.registered()
        receiving = self.session.receive(
            given.room,
            pages,
            given.senders,
            prefill_tp=given.prefill_ranks,
            prefill_layers=given.prefill_layers,
            timeout=WAIT,
        )
        try:
            poll = await asyncio.to_thread(receiving.wait, WAIT)
        except asyncio.CancelledError:
            receiving.abort()
            self.give_back_after(receiving, pages)
            raise
        if poll is not handoff.Poll.SUCCESS:
            assert receiving.released
            print(f"{self.name} computes a prompt, its hand-off failed: {receiving.error}", file=sys.stderr)
            self.compute(prompt, pages, set(range(LAYERS)))
            return "computed"
        return registered[given.senders[0]]

    def compute(self, prompt: str, pages: list[int], layers: set[int]) -> None:
        for at, (layer, _) in enumerate(STATES):
            if layer in layers:
                for page, own in enumerate(pages):
                    self.memory[at, own] = np.frombuffer(kv(prompt, at, page), dtype="uint8")

    async def taken(self, prompt: str) -> list[int]:
        """Takes pages for a prompt, as soon as there are enough."""
        count = page_count(prompt)
        async with self.freed:
            await self.freed.wait_for(lambda: len(self.free) >= count)
            pages, self.free = self.free[:count], self.free[count:]
        self.memory[:, pages] = 0xEE
        return pages

    async def given_back(self, pages: list[int]) -> None:
        async with self.freed:
            self.free += pages
            self.freed.notify_all()

    def give_back_after(self, transfer: handoff.Sending | handoff.Receiving, pages: list[int]) -> None:
        """Gives the pages back once no transfer touches them."""

        async def wait() -> None:
            await asyncio.to_thread(transfer.wait, 2 * WAIT)
            assert transfer.released
            await self.given_back(pages)

        task = asyncio.create_task(wait())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def register(self, number: int) -> None:
        """Registers this engine's rank at the bootstrap server, in vLLM's dialect."""
        rank = {"engine_id": self.name, "dp_rank": number, "tp_rank": 0, "pp_rank": 0, "addr": self.session.address}
        async with aiohttp.ClientSession(raise_for_status=True) as http:
            await http.post(f"{self.bootstrap}/register", json=rank)

    async def registered(self) -> dict[str, str]:
        """The names of the prefill engines, by the addresses of their ranks."""
        async with (
            aiohttp.ClientSession(raise_for_status=True) as http,
            http.get(f"{self.bootstrap}/query") as answer,
        ):
            groups = await answer.json()
        return {group["worker_addr"]["0"]["0"]: group["engine_id"] for group in groups.values()}

    async def tell(self, request: web.Request) -> web.Response:
        return web.json_response(self.told)

    async def await_event(self, request: web.Request) -> web.Response:
        await self.events[request.match_info["event"]].wait()
        return web.Response()

    async def set_event(self, request: web.Request) -> web.Response:
        self.events[request.match_info["event"]].set()
        return web.Response()

    async def run(self, number: int) -> None:
        """Serves until standard input ends."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(64))
        if self.role == "prefill":
            await self.register(number)
        app = web.Application()
        app.router.add_post(COMPLETIONS, self.complete)
        app.router.add_get("/told", self.tell)
        app.router.add_get("/events/{event}", self.await_event)
        app.router.add_post("/events/{event}", self.set_event)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{int(runner.addresses[0][1])}"
        print(json.dumps({"url": url, "address": self.session.address}), flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        # The server is not torn down in order, because it may hold requests.
        os._exit(0)


async def serve() -> None:
    role, number, bootstrap = sys.argv[1:]
    await Engine(role, int(number), bootstrap).run(int(number))


# The test's side.


def first_line(process: subprocess.Popen[str]) -> str:
    """The first line that a process prints; fails if none comes within WAIT."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], WAIT)
    line = process.stdout.readline() if ready else ""
    assert line, f"{process.args!r} printed nothing, its status is {process.poll()}"
    return line


class EngineProcess:
    """An engine, from outside. It ends when its standard input ends, and so never outlives the tests."""

    def __init__(self, role: str, number: int, bootstrap: str):
        self.name = f"{role}-{number}"
        self.process = subprocess.Popen(
            [sys.executable, __file__, role, str(number), bootstrap],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = self.address = ""

    def read_addresses(self) -> None:
        line = json.loads(first_line(self.process))
        self.url, self.address = line["url"], line["address"]

    def kill(self) -> None:
        """kill -9, and waits until the process is gone."""
        self.process.kill()
        self.process.wait()

    def hang(self) -> None:
        """Stops the process, and waits until it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)


class Engines:
    """The engines of a test, which share a bootstrap server."""

    def __init__(self, stack: contextlib.ExitStack, bootstrap: str):
        self._stack = stack
        self._bootstrap = bootstrap
        self._numbers = dict.fromkeys(("prefill", "decode"), 0)
        self.prefill: list[EngineProcess] = []
        self.decode: list[EngineProcess] = []

    def start(self, *roles: str) -> list[EngineProcess]:
        """Starts one engine for each role, all at the same time."""
        started = []
        for role in roles:
            engine = EngineProcess(role, self._numbers[role], self._bootstrap)
            self._stack.callback(engine.kill)
            self._numbers[role] += 1
            started.append(engine)
        for engine in started:
            engine.read_addresses()
        return started


class ProxyProcess:
    """The proxy, from outside."""

    def __init__(self, process: subprocess.Popen[str], log: Path):
        self.process = process
        self.url = next(word for word in first_line(process).split() if word.startswith("http://"))
        self._log = log

    def log(self) -> str:
        return self._log.read_text()


StartProxy = Callable[..., ProxyProcess]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """Two prefill and three decode engines."""
    with handoff.Bootstrap() as bootstrap, contextlib.ExitStack() as stack:
        engines = Engines(stack, bootstrap.address)
        started = engines.start("prefill", "prefill", "decode", "decode", "decode")
        engines.prefill, engines.decode = started[:2], started[2:]
        yield engines


@pytest.fixture
def start_proxy(tmp_path: Path) -> Iterator[StartProxy]:
    """Starts a proxy before some engines. It ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(prefill: list[EngineProcess], decode: list[EngineProcess], *flags: str) -> ProxyProcess:
            command = [sys.executable, str(PROXY), "--listen", "127.0.0.1:0", *flags]
            command += [word for engine in prefill for word in ("--prefill", engine.url)]
            # A slash at the end is allowed.
            command += [word for engine in decode for word in ("--decode", f"{engine.url}/")]
            log = tmp_path / f"proxy-{secrets.token_hex(4)}.log"
            with log.open("w") as errors:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return ProxyProcess(process, log)

        yield start


def run(scenario: Callable[[aiohttp.ClientSession], Awaitable[T]]) -> T:
    """Runs a scenario with an HTTP client. Fails if an answer takes longer than WAIT."""

    async def with_client() -> T:
        timeout, connector = aiohttp.ClientTimeout(total=WAIT), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            return await scenario(http)

    return asyncio.run(with_client())


def ask(http: aiohttp.ClientSession, proxy: ProxyProcess, name: str, **body: Any) -> Any:
    """Asks for a completion of a prompt of 1 to 4 pages."""
    wanted = {"prompt": prompt_of(name), "max_tokens": 16, **body}
    return http.post(proxy.url + COMPLETIONS, json=wanted, headers={"X-Request-Id": name})


async def answer_of(
    http: aiohttp.ClientSession, proxy: ProxyProcess, name: str, **body: Any
) -> tuple[int, dict[str, Any]]:
    """Returns the status and the body of an answer."""
    async with ask(http, proxy, name, **body) as answer:
        return answer.status, await answer.json()


def prompt_of(name: str) -> str:
    return f"The prompt of {name}. " * (1 + sum(name.encode()) % 3)


async def event(http: aiohttp.ClientSession, engine: EngineProcess, name: str) -> None:
    """Waits until an engine has received a request (`told-NAME`) or lost its caller (`gone-NAME`)."""
    async with http.get(f"{engine.url}/events/{name}") as answer:
        assert answer.status == 200


async def let_go(http: aiohttp.ClientSession, engine: EngineProcess, name: str) -> None:
    """Lets an engine continue with a request that it holds."""
    async with http.post(f"{engine.url}/events/go-{name}") as answer:
        assert answer.status == 200


async def told_to(http: aiohttp.ClientSession, engine: EngineProcess, names: list[str]) -> dict[str, dict[str, Any]]:
    """Returns the requests that an engine received, by their names. It received each at most once."""
    async with http.get(f"{engine.url}/told") as answer:
        told = [one for one in await answer.json() if one["request"] in names]
    by_name = {one["request"]: one for one in told}
    assert len(by_name) == len(told), "a request came twice"
    return by_name


def check_right(name: str, answer: tuple[int, dict[str, Any]], kv_from: str | None = None) -> None:
    """Checks that the answer is the digest of the KV of the prompt of `name`."""
    status, body = answer
    assert status == 200, body
    choice = body["choices"][0]
    assert choice == {"text": hashlib.sha256(whole_kv(prompt_of(name))).hexdigest(), "right": True}
    assert kv_from is None or body["kv_from"] == kv_from


@pytest.mark.parametrize("is_together", [False, True], ids=["in-turn", "together"])
def test_each_request_is_between_one_prefill_and_one_decode(
    engines: Engines, start_proxy: StartProxy, is_together: bool
) -> None:
    proxy = start_proxy(engines.prefill, engines.decode, *["--together"] * is_together)
    names = [f"{'together' if is_together else 'in-turn'}-{number}" for number in range(24)]

    async def scenario(http: aiohttp.ClientSession) -> tuple[list[Any], dict[str, Any]]:
        answers = [await answer_of(http, proxy, name) for name in names[:6]]
        answers += await asyncio.gather(*(answer_of(http, proxy, name) for name in names[6:]))
        told = {one.name: await told_to(http, one, names) for one in engines.prefill + engines.decode}
        return answers, told

    answers, told = run(scenario)
    prefill = {one.name: one for one in engines.prefill}
    decode = {one.name: one for one in engines.decode}
    pairs: collections.Counter[tuple[str, str]] = collections.Counter()
    rooms, rooms_of_proxy = set(), 0
    for name, answer in zip(names, answers, strict=True):
        # Decode learns the source of the bytes from the bootstrap server, not from the proxy.
        by, to = answer[1]["kv_from"], answer[1]["engine"]
        check_right(name, answer)
        pairs[by, to] += 1
        assert {engine for engine, requests in told.items() if name in requests} == {by, to}
        of_prefill, of_decode = (told[engine][name]["kv_transfer_params"] for engine in (by, to))
        room = of_decode["room"]
        rooms.add(room)
        assert of_decode["do_remote_prefill"] and of_decode["senders"] == [prefill[by].address]
        if "room" in of_prefill:
            rooms_of_proxy += 1
            assert is_together and of_prefill.pop("room") == room and of_decode["tokens"] is None
        assert of_prefill == {"do_remote_decode": True, "do_remote_prefill": False}
        assert told[to][name]["max_tokens"] == 16
    assert pairs == {(by, to): 4 for by in prefill for to in decode}
    assert len(rooms) == len(names)
    # The first request to each prefill engine gives the engine's address.
    assert rooms_of_proxy == (len(names) - 2 if is_together else 0)


def test_two_and_two_engines_make_four_pairs(engines: Engines, start_proxy: StartProxy) -> None:
    proxy = start_proxy(engines.prefill, engines.decode[:2])

    async def scenario(http: aiohttp.ClientSession) -> list[Any]:
        return [await answer_of(http, proxy, f"two-{number}") for number in range(4)]

    assert len({(answer["kv_from"], answer["engine"]) for _, answer in run(scenario)}) == 4


def test_together_decode_takes_the_prompt_while_prefill_computes(
    engines: Engines, start_proxy: StartProxy
) -> None:
    prefill, decode = engines.prefill[0], engines.decode[0]
    proxy = start_proxy([prefill], [decode], "--together")

    async def scenario(http: aiohttp.ClientSession) -> None:
        check_right("before", await answer_of(http, proxy, "before"), prefill.name)
        asking = asyncio.create_task(answer_of(http, proxy, "at-once", hold=["prefill"]))
        await event(http, prefill, "told-at-once")
        await event(http, decode, "told-at-once")
        await let_go(http, prefill, "at-once")
        check_right("at-once", await asking, prefill.name)

    run(scenario)


def test_a_stream_goes_on_piece_by_piece(engines: Engines, start_proxy: StartProxy) -> None:
    proxy = start_proxy(engines.prefill[:1], engines.decode[:1])

    async def scenario(http: aiohttp.ClientSession) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 4}
        async with ask(http, proxy, "stream", **options) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            first = (await answer.content.readuntil(b"\n\n")).removeprefix(b"data: ")
            check_right("stream", (answer.status, json.loads(first)), engines.prefill[0].name)
            # Decode has not sent the rest yet.
            await let_go(http, engines.decode[0], "stream")
            assert await answer.content.read() == b"data: [DONE]\n\n"
        told = (await told_to(http, engines.prefill[0], ["stream"]))["stream"]
        assert not {"stream_options", "min_tokens"} & told.keys(), "vLLM refuses them with one token to answer"

    run(scenario)


def test_a_decode_that_is_killed_is_an_error_and_not_a_wait(engines: Engines, start_proxy: StartProxy) -> None:
    waiting, streaming = engines.start("decode", "decode")
    proxy = start_proxy(engines.prefill[:1], [waiting, streaming])

    async def scenario(http: aiohttp.ClientSession) -> None:
        asking = asyncio.create_task(answer_of(http, proxy, "killed", hold=["decode"]))
        await event(http, waiting, "told-killed")
        waiting.kill()
        status, body = await asking
        assert status == 502 and f"decode {waiting.url} did not answer" in body["error"]

        async with ask(http, proxy, "cut", stream=True) as answer:
            assert answer.status == 200
            await answer.content.readuntil(b"\n\n")
            streaming.kill()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()

        status, body = await answer_of(http, proxy, "refused")
        assert status == 502 and f"decode {waiting.url} did not answer" in body["error"]

    run(scenario)
    assert f"the answer of decode {streaming.url} broke off" in proxy.log()
    assert "Traceback" not in proxy.log()


def test_decode_computes_the_prompt_of_a_prefill_that_is_killed(
    engines: Engines, start_proxy: StartProxy
) -> None:
    (prefill,) = engines.start("prefill")
    decode = engines.decode[0]
    proxy = start_proxy([prefill], [decode], "--together")

    async def scenario(http: aiohttp.ClientSession) -> None:
        check_right("alive", await answer_of(http, proxy, "alive"), prefill.name)
        asking = asyncio.create_task(answer_of(http, proxy, "orphan", hold=["prefill"]))
        await event(http, prefill, "told-orphan")
        await event(http, decode, "told-orphan")
        prefill.kill()
        check_right("orphan", await asking, "computed")
        check_right("dead", await answer_of(http, proxy, "dead"), "computed")

    run(scenario)
    assert proxy.log().count(f"prefill {prefill.url} did not compute a prompt") == 2


def test_an_engine_that_is_stopped_is_not_waited_for_without_end(
    engines: Engines, start_proxy: StartProxy
) -> None:
    prefill, decode = engines.start("prefill", "decode")
    before_decode = start_proxy(engines.prefill[:1], [decode], "--timeout", "5")
    before_prefill = start_proxy([prefill], engines.decode[:1], "--timeout", "5")
    prefill.hang()
    decode.hang()

    async def scenario(http: aiohttp.ClientSession) -> None:
        (status, body), computed = await asyncio.gather(
            answer_of(http, before_decode, "no-decode"), answer_of(http, before_prefill, "no-prefill")
        )
        assert status == 504 and f"decode {decode.url} did not answer in time" in body["error"]
        check_right("no-prefill", computed, "computed")

    run(scenario)


def test_bad_requests_are_refused(engines: Engines, start_proxy: StartProxy) -> None:
    proxy = start_proxy(engines.prefill[:1], engines.decode[:1])
    bad = [
        (b'{"prompt": "broken', "application/json"),
        (b"", "application/json"),
        (b'\xff\xfe{"prompt"', "application/json"),
        (b'["a list"]', "application/json"),
        (b'"a text"', "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"prompt": "a"}', "application/json; charset=unheard-of"),
    ]

    async def scenario(http: aiohttp.ClientSession) -> None:
        for data, kind in bad:
            headers = {"Content-Type": kind, "X-Request-Id": "bad"}
            async with http.post(proxy.url + COMPLETIONS, data=data, headers=headers) as answer:
                assert answer.status == 400, (data[:20], kind)
                assert "JSON" in (await answer.json())["error"]
        for engine in (engines.prefill[0], engines.decode[0]):
            assert not await told_to(http, engine, ["bad"]), "no engine sees it"
        # The engines themselves refuse a request that is JSON.
        status, body = await answer_of(http, proxy, "no-prompt", prompt=None)
        assert status == 400 and body["error"] == f"{engines.decode[0].name}: no prompt"
        async with http.get(proxy.url + COMPLETIONS) as answer:
            assert answer.status == 405
        async with http.post(f"{proxy.url}/elsewhere") as answer:
            assert answer.status == 404
        check_right("good", await answer_of(http, proxy, "good"), engines.prefill[0].name)

    run(scenario)


def test_decode_itself_computes_requests_of_several_sequences(engines: Engines, start_proxy: StartProxy) -> None:
    prefill, decode = engines.prefill[0], engines.decode[0]
    proxy = start_proxy([prefill], [decode])
    batch = [prompt_of("one of the batch"), prompt_of("two of the batch")]

    async def scenario(http: aiohttp.ClientSession) -> None:
        status, body = await answer_of(http, proxy, "batch", prompt=batch)
        assert status == 200 and body["kv_from"] == "computed"
        digests = [hashlib.sha256(whole_kv(prompt)).hexdigest() for prompt in batch]
        assert [choice["text"] for choice in body["choices"]] == digests
        check_right("several", await answer_of(http, proxy, "several", n=2), "computed")
        assert not await told_to(http, prefill, ["batch", "several"])

    run(scenario)


def test_a_client_does_not_choose_from_where_decode_takes_kv(
    engines: Engines, start_proxy: StartProxy
) -> None:
    decode = engines.decode[0]
    proxy = start_proxy(engines.prefill[:1], [decode])
    chosen = {"do_remote_prefill": True, "room": 1, "senders": ["127.0.0.1:1"]}

    async def scenario(http: aiohttp.ClientSession) -> None:
        answer = await answer_of(http, proxy, "chosen", kv_transfer_params=chosen)
        check_right("chosen", answer, engines.prefill[0].name)
        answer = await answer_of(http, proxy, "chosen-2", n=2, kv_transfer_params=chosen)
        check_right("chosen-2", answer, "computed")
        told = await told_to(http, decode, ["chosen", "chosen-2"])
        assert told["chosen"]["kv_transfer_params"]["senders"] == [engines.prefill[0].address]
        assert "kv_transfer_params" not in told["chosen-2"]

    run(scenario)


def test_engines_stop_with_the_request_of_a_client_that_has_gone(
    engines: Engines, start_proxy: StartProxy
) -> None:
    prefill, decode = engines.prefill[0], engines.decode[0]
    proxy = start_proxy([prefill], [decode], "--together")

    async def scenario(http: aiohttp.ClientSession) -> None:
        # The first request goes to the engines in turn, the third to both at the same time.
        for name, engines_of_it in (("gone-1", [prefill]), ("stays", []), ("gone-2", [prefill, decode])):
            hold = ["prefill"] if engines_of_it else []
            asking = asyncio.create_task(answer_of(http, proxy, name, hold=hold))
            for engine in engines_of_it:
                await event(http, engine, f"told-{name}")
            if not engines_of_it:
                check_right(name, await asking)
                continue
            asking.cancel()
            for engine in engines_of_it:
                await event(http, engine, f"gone-{name}")
        assert not await told_to(http, decode, ["gone-1"])

    run(scenario)


def test_more_requests_wait_at_once_than_a_client_has_connections_by_default(
    engines: Engines, start_proxy: StartProxy
) -> None:
    decode = engines.decode[0]
    proxy = start_proxy(engines.prefill[:1], [decode])
    names = [f"many-{number}" for number in range(101)]

    async def scenario(http: aiohttp.ClientSession) -> None:
        asking = [asyncio.create_task(answer_of(http, proxy, name, n=2, hold=["decode"])) for name in names]
        for name in names:
            await event(http, decode, f"told-{name}")
        for name in names:
            await let_go(http, decode, name)
        for name, answer in zip(names, await asyncio.gather(*asking), strict=True):
            check_right(name, answer, "computed")

    run(scenario)


def test_a_bad_command_line_is_refused_at_start() -> None:
    good = {"--prefill": "http://127.0.0.1:1", "--decode": "http://127.0.0.1:1", "--listen": "127.0.0.1:0"}
    bad = [("--prefill", "127.0.0.1:8000"), ("--decode", "http:///v1"), ("--listen", "8080"), ("--listen", "a:b")]
    started = []
    for name, value in bad:
        words = [word for pair in {**good, name: value}.items() for word in pair]
        process = subprocess.Popen([sys.executable, str(PROXY), *words], stderr=subprocess.PIPE, text=True)
        started.append((process, name, value))
    try:
        for process, name, value in started:
            _, errors = process.communicate(timeout=WAIT)
            assert process.returncode == 2 and f"argument {name}: {value!r} is not" in errors
    finally:
        for process, _, _ in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    asyncio.run(serve())
