"""Faults of a pair of vLLM engines during hand-offs: over kvpool's connector, and over vLLM's own two
connectors.

An engine lives until a fault kills it. The model is wide, so that a hand-off takes long enough for a fault.
Times are facts. A check fails when the answer is wrong, or when nothing happened after several times the limit.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import environments
from daemons import free_port, living_pool
from environments import Environment
from faults import HERE, Engines, fail, wide_model
from live_engines import LiveEngine
from tally import Tally

PROGRAM = HERE / "vllm_live.py"
# Four blocks of 128 tokens, which have 64 MiB each.
PROMPT_TOKENS = 500
ANSWER_TOKENS = 12
BLOCK_BYTES = 64 << 20
BLOCKS = 4
HANG_SECONDS = 15.0
# A loaded machine computes a prompt in ten seconds.
OUR_HANG_SECONDS = 60.0
TTL_SECONDS = 8
# The lines that the connectors and vLLM print when blocks do not arrive.
NOTICED = r"did not come from prefill|pulling kv_caches for .* failed|KV load failure|transfer_failed|handshake failed"
PARTS = ("mooncake", "mooncake-own", "nixl", "push", "pull")


def prompt(seed: int) -> list[int]:
    """Returns a prompt. The prompts of all seeds have the same last token and different first pages."""
    numbers = [3 + (at * 7 + seed * 131 + (at * seed) % 97) % 500 for at in range(PROMPT_TOKENS - 1)]
    return [*numbers, 5]


class Connector(abc.ABC):
    """A connector of vLLM: its settings, and the parameters of a hand-off."""

    is_ours = False
    asks_first = True
    """Whether decode may ask for a prompt that prefill has not computed."""
    holds = True
    """Whether prefill moves the bytes and reports the end of the transfer."""
    variables: dict[str, str]
    own_ttl = ""
    """How long prefill keeps blocks for decode by default."""

    @abc.abstractmethod
    def settings(self, role: str, ttl: int | None) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns vLLM's settings and the environment variables of the next engine. `ttl`: a short time to keep
        blocks."""

    def give(self, transfer: int) -> dict[str, Any]:
        """The parameters of prefill's request."""
        return {"do_remote_decode": True, "do_remote_prefill": False}

    @abc.abstractmethod
    def take(self, transfer: int, answered: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the parameters of decode's request. `answered`: the parameters in prefill's answer, if there
        is one."""


class Kvpool(Connector):
    """kvpool's connector."""

    is_ours = True
    own_ttl = "300 s"

    def __init__(self, mode: str, master: str):
        self._mode = mode
        self._master = master
        self._senders: list[str] = []
        self.holds = mode == "push"

    def settings(self, role: str, ttl: int | None) -> tuple[dict[str, Any], dict[str, str]]:
        extra: dict[str, Any] = {"master": self._master, "handoff": self._mode}
        # The pool has no store node. A save must not keep blocks longer than the hand-off.
        extra |= {"put_timeout": 0.1, "retry_after": 3600.0}
        if ttl is not None:
            extra["handoff_timeout"] = ttl
        connector = {
            "kv_connector": "KvpoolConnector",
            "kv_connector_module_path": "kvpool.vllm",
            "kv_role": "kv_both" if role == "prefill" else "kv_consumer",
            "kv_connector_extra_config": extra,
        }
        return connector, {}

    def give(self, transfer: int) -> dict[str, Any]:
        return {**super().give(transfer), "room": transfer}

    def take(self, transfer: int, answered: dict[str, Any] | None) -> dict[str, Any]:
        if answered is not None:
            self._senders = answered["senders"]
            return answered
        return {"do_remote_prefill": True, "room": transfer, "senders": self._senders, "mode": self._mode}


class Mooncake(Connector):
    """vLLM's connector for Mooncake, over Mooncake's engine or over kvpool's."""

    own_ttl = "480 s"

    def __init__(self, path: Path | None):
        self._path = path
        self._engine = 0
        self._port = 0

    def settings(self, role: str, ttl: int | None) -> tuple[dict[str, Any], dict[str, str]]:
        env = {"VLLM_HOST_IP": "127.0.0.1"}
        if role == "prefill":
            self._engine += 1
            self._port = free_port()
        env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(self._port)
        if ttl is not None:
            env["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = str(ttl)
        if self._path is not None:
            env["PYTHONPATH"] = str(self._path)
        connector = {
            "kv_connector": "MooncakeConnector",
            "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
            "engine_id": f"prefill-{self._engine}" if role == "prefill" else "decode",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }
        return connector, env

    def give(self, transfer: int) -> dict[str, Any]:
        return {**super().give(transfer), "transfer_id": f"transfer-{transfer}"}

    def take(self, transfer: int, answered: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": f"transfer-{transfer}",
            "remote_engine_id": f"prefill-{self._engine}",
            "remote_bootstrap_addr": f"http://127.0.0.1:{self._port}",
        }


class Nixl(Connector):
    """vLLM's connector for NIXL, over UCX. Decode reads the blocks itself."""

    asks_first = False
    holds = False
    own_ttl = "30 s, and longer while decode says that it lives"

    def __init__(self, path: Path):
        self._path = path

    def settings(self, role: str, ttl: int | None) -> tuple[dict[str, Any], dict[str, str]]:
        extra = {} if ttl is None else {"kv_lease_duration": ttl}
        connector = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": extra,
        }
        env = {
            "PYTHONPATH": str(self._path),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            # As between hosts without RDMA: on one host UCX would access the memory of the other process.
            "UCX_TLS": "tcp",
        }
        return connector, env

    def take(self, transfer: int, answered: dict[str, Any] | None) -> dict[str, Any]:
        return answered or {}


def check(environment: Environment, work: Path, tally: Tally, only: set[str]) -> None:
    """Runs the faults over each connector, or over those in `only`: `faults` or `faults-PART`."""
    wanted = [part for part in PARTS if not only or only & {"faults", f"faults-{part}"}]
    if not wanted:
        return
    model = wide_model(environment, work)
    for part in wanted:
        directory = work / f"faults-{part}"
        directory.mkdir(parents=True)
        # There is no store node, because blocks in the pool would not be handed off.
        with living_pool(environment.commands, directory, node=False) as pool:
            try:
                name, connector = connector_of(environment, part, pool.master)
            except RuntimeError as error:
                tally.fact(part, "does not run here", error)
                continue
            engines = Engines(environment, PROGRAM, directory, tally, name, connector.is_ours)
            engines.run(Faults(engines, str(model), connector).run)


def connector_of(environment: Environment, part: str, master: str) -> tuple[str, Connector]:
    """Returns a connector and its name. Raises RuntimeError if its packages cannot be installed."""
    if part == "mooncake":
        return "MooncakeConnector, mooncake.engine of kvpool", Mooncake(None)
    if part == "mooncake-own":
        path = environments.beside(environment, "mooncake", environments.MOONCAKE)
        return "MooncakeConnector, Mooncake's engine", Mooncake(path)
    if part == "nixl":
        return "NixlConnector", Nixl(environments.beside(environment, "nixl", environments.NIXL))
    return f"KvpoolConnector, {part}", Kvpool(part, master)


class Faults:
    """The faults of one connector."""

    def __init__(self, engines: Engines, model: str, connector: Connector):
        self._engines = engines
        self._model = model
        self._connector = connector
        self._asked = 0
        self._plain_seconds = 0.0

    def run(self) -> None:
        """Runs all faults."""
        with self._engine("decode") as decode:
            with self._pair(decode) as prefill:
                self._before(prefill, decode, "SIGSTOP of prefill before the offer", 4.0, is_killed=False)
                prefill.thaw()
                self._within(prefill, decode, "SIGSTOP of prefill within a chunk", 4.0, is_killed=False)
                prefill.thaw()
                self._within(prefill, decode, "kill -9 of prefill within a chunk", 1.0, is_killed=True)
            if self._connector.holds:
                with self._pair(decode) as prefill:
                    self._before_done(prefill, decode, "kill -9 of prefill before Done", 1.0)
            else:
                told = "decode reads by itself: prefill says no Done"
                if self._connector.is_ours:
                    told = "not tried: one call writes a pull and ends it, and nothing here can stop between"
                self._engines.fact("kill -9 of prefill before Done", told)
            with self._pair(decode, TTL_SECONDS) as prefill:
                self._never_done(prefill, "a decode that never says done")
                self._before(prefill, decode, "kill -9 of prefill before the offer", 1.0, is_killed=True)
            with self._pair(decode) as prefill:
                self._decode_fails(prefill, decode, "SIGSTOP of decode within a chunk", 4.0, is_killed=False)
        # A decode that continues after SIGSTOP would be killed while it computes, perhaps before it asks.
        with self._engine("decode") as decode, self._pair(decode) as prefill:
            self._decode_fails(prefill, decode, "kill -9 of decode within a chunk", 1.0, is_killed=True)

    def _engine(self, role: str, ttl: int | None = None) -> AbstractContextManager[LiveEngine]:
        """An engine that ends with the block."""
        connector, env = self._connector.settings(role, ttl)
        settings = {
            "model": self._model,
            "connector": {"kv_load_failure_policy": "recompute", **connector},
            "watch": True,
        }
        return self._engines.live(role, settings, {"VLLM_CPU_KVCACHE_SPACE": "2", **env})

    @contextlib.contextmanager
    def _pair(self, decode: LiveEngine, ttl: int | None = None) -> Iterator[LiveEngine]:
        """A prefill engine that has already handed a prompt off."""
        with self._engine("prefill", ttl) as prefill:
            asked, swapped = prompt(self._number()), prompt(self._number())
            got = self._hand_off(prefill, decode, asked, swapped)
            wanted = self._plain(prefill, asked)
            tokens = got.get("tokens") or []
            verdict = "right" if tokens == wanted else "wrong"
            seen = got.get("failed") or f"{verdict}, in {got['seconds']} s"
            what = "without a fault decode answers a swapped prompt as prefill does"
            self._engines.report(what, seen, tokens == wanted)
            yield prefill

    def _before(
        self, prefill: LiveEngine, decode: LiveEngine, what: str, limit: float, is_killed: bool
    ) -> None:
        """Decode asks for a prompt that prefill did not compute. With a connector that cannot do so, prefill
        computes the prompt, and fails before decode asks."""
        asked, transfer = prompt(self._number()), self._number()
        wanted = self._plain(prefill, asked)
        answered = None if self._connector.asks_first else self._give(prefill, asked, transfer)
        request = self._name_of("decode")
        kv = self._connector.take(transfer, answered)
        if self._connector.asks_first:
            self._send(decode, request, asked, kv)
            time.sleep(1.0)
        since = fail(prefill, is_killed)
        if not self._connector.asks_first:
            what = f"{what} (before decode asks)"
            self._send(decode, request, asked, kv)
        self._outcome(decode, request, wanted, what, since, limit)

    def _within(
        self, prefill: LiveEngine, decode: LiveEngine, what: str, limit: float, is_killed: bool
    ) -> None:
        asked = prompt(self._number())
        wanted = self._plain(prefill, asked)
        request = self._begin(prefill, decode, asked)
        since = fail(prefill, is_killed)
        self._say_how_far(decode, what)
        self._outcome(decode, request, wanted, what, since, limit)

    def _before_done(self, prefill: LiveEngine, decode: LiveEngine, what: str, limit: float) -> None:
        asked = prompt(self._number())
        wanted = self._plain(prefill, asked)
        prefill.ask(self._name_of("call"), call="hold")
        request = self._begin(prefill, decode, asked)
        time.sleep(3.0)
        since = fail(prefill, is_killed=True)
        self._say_how_far(decode, what)
        self._outcome(decode, request, wanted, what, since, limit)

    def _never_done(self, prefill: LiveEngine, what: str) -> None:
        """Decode does not ask for a prompt that prefill keeps for it."""
        free = self._settled(prefill)
        since = time.monotonic()
        self._give(prefill, prompt(self._number()), self._number())
        pinned = time.monotonic()
        self._pins(prefill, f"{what} (it never asks)", free, since, pinned, f"TTL {TTL_SECONDS} s")

    def _decode_fails(
        self, prefill: LiveEngine, decode: LiveEngine, what: str, limit: float, is_killed: bool
    ) -> None:
        free = self._settled(prefill)
        since = time.monotonic()
        self._begin(prefill, decode, prompt(self._number()))
        failed = fail(decode, is_killed)
        self._say_how_far(decode, what)
        self._pins(prefill, what, free, since, failed, f"limit {limit:g} s")

    def _pins(
        self, prefill: LiveEngine, what: str, free: int, since: float, from_then: float, limit: str
    ) -> None:
        """Checks whether and when prefill frees the blocks that it kept."""
        kept = prefill.wait_seen(lambda seen: bool(seen["blocks"] >= free + BLOCKS), since, HANG_SECONDS)
        if kept is None:
            self._engines.report(f"{what}: prefill keeps blocks", "none", False)
            return
        end = prefill.wait_seen(
            lambda seen: bool(seen["blocks"] <= free and seen["pins"] == 0), max(from_then, kept["at"]), HANG_SECONDS
        )
        if end is None:
            seen = f"{prefill.last_seen()['blocks'] - free} blocks still, after {HANG_SECONDS:g} s"
            seen += f" (its own limit: {self._connector.own_ttl})"
        else:
            seen = f"{end['at'] - from_then:.3f} s ({limit})"
        self._engines.report(f"{what}: prefill's {kept['blocks'] - free} blocks are free after", seen, end is not None)

    def _outcome(
        self, decode: LiveEngine, request: str, wanted: list[int], what: str, since: float, limit: float
    ) -> None:
        """Reports decode's result after the fault."""
        hang = OUR_HANG_SECONDS if self._connector.is_ours else HANG_SECONDS
        got = decode.answer(request, hang)
        noticed = decode.line_after(NOTICED, since)
        seen = "it says nothing" if noticed is None else f"{noticed - since:.3f} s (limit {limit:g} s)"
        self._engines.fact(f"{what}: decode knows after", seen)
        tokens = got.get("tokens")
        if tokens is None:
            self._engines.report(f"{what}: decode answers", f"nothing in {hang:g} s", False)
            return
        same = "the right answer" if tokens == wanted else "a wrong answer"
        computed = f"prefill computed the same alone in {self._plain_seconds:.1f} s"
        seen = f"{same} after {got['at'] - since:.3f} s (limit 5 s; {computed})"
        self._engines.report(f"{what}: decode answers", seen, len(wanted) == ANSWER_TOKENS and tokens == wanted)

    def _settled(self, prefill: LiveEngine) -> int:
        """Returns the blocks that prefill keeps once nothing changes."""
        end = time.monotonic() + HANG_SECONDS
        while prefill.last_seen()["blocks"] and time.monotonic() < end:
            time.sleep(0.1)
        return int(prefill.last_seen()["blocks"])

    def _say_how_far(self, decode: LiveEngine, what: str) -> None:
        came = decode.last_seen().get("bytes", 0) >> 20
        # A decode that was killed or stopped does not read its input.
        with contextlib.suppress(OSError):
            decode.send(self._name_of("call"), call="unmark")
        self._engines.fact(f"{what}: KV in decode then", f"{came} of {BLOCKS * BLOCK_BYTES >> 20} MiB")

    def _begin(self, prefill: LiveEngine, decode: LiveEngine, asked: list[int]) -> str:
        """Returns decode's request once its first bytes have arrived."""
        transfer = self._number()
        answered = self._give(prefill, asked, transfer)
        self._mark_quiet(decode)
        request = self._name_of("decode")
        since = time.monotonic()
        self._send(decode, request, asked, self._connector.take(transfer, answered))
        if decode.wait_seen(lambda seen: bool(seen.get("bytes", 0) > 0), since, HANG_SECONDS) is None:
            raise RuntimeError("no byte came from prefill")
        return request

    def _mark_quiet(self, decode: LiveEngine) -> None:
        """Makes decode count bytes once none arrive any more: an earlier transfer may continue after
        SIGCONT."""
        end = time.monotonic() + HANG_SECONDS
        while time.monotonic() < end:
            decode.ask(self._name_of("call"), call="mark")
            since = time.monotonic()
            if decode.wait_seen(lambda seen: bool(seen.get("bytes", 0) > 0), since, 1.0) is None:
                return

    def _hand_off(
        self, prefill: LiveEngine, decode: LiveEngine, asked: list[int], swapped: list[int]
    ) -> dict[str, Any]:
        transfer = self._number()
        answered = self._give(prefill, asked, transfer)
        request = self._name_of("decode")
        self._send(decode, request, swapped, self._connector.take(transfer, answered))
        return decode.answer(request, HANG_SECONDS)

    def _give(self, prefill: LiveEngine, asked: list[int], transfer: int) -> dict[str, Any]:
        """Returns prefill's answer for decode."""
        kv = self._connector.give(transfer)
        answer = prefill.ask(self._name_of("prefill"), prompt=asked, tokens=1, kv=kv)
        if "tokens" not in answer:
            raise RuntimeError(f"prefill did not answer: {answer['failed']}")
        return answer.get("kv") or {}

    def _send(self, decode: LiveEngine, request: str, asked: list[int], kv: dict[str, Any]) -> None:
        decode.send(request, prompt=asked, tokens=ANSWER_TOKENS, kv=kv)

    def _plain(self, engine: LiveEngine, asked: list[int]) -> list[int]:
        """Returns the answer without a hand-off."""
        answer = engine.ask(self._name_of("plain"), prompt=asked, tokens=ANSWER_TOKENS)
        self._plain_seconds = answer.get("seconds", 0.0)
        return answer.get("tokens") or []

    def _number(self) -> int:
        self._asked += 1
        return self._asked

    def _name_of(self, what: str) -> str:
        return f"{what}-{self._number()}."
