"""Faults of a pair of SGLang engines during hand-offs: over kvpool's back end, and over SGLang's own.

After a failed hand-off, SGLang's decode ends the request and computes nothing itself. So the times are those
until the end of a request. They are facts. Over kvpool's back end a request that does not end is a failure.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import environments
from daemons import free_port
from environments import Environment
from faults import HERE, Engines, fail, wide_model
from live_engines import LiveEngine
from tally import Tally

PROGRAM = HERE / "sglang_live.py"
# 300 MiB of KV cache.
PROMPT_TOKENS = 600
ANSWER_TOKENS = 4
# A fault within a chunk happens after prefill has sent this many bytes.
SENT_BYTES = 8 << 20
HANG_SECONDS = 30.0
FIRST_SECONDS = 120.0
TTL_SECONDS = 8
PARTS = ("kvpool", "mooncake", "mooncake-own")


def prompt(seed: int) -> list[int]:
    """Returns a prompt. No two seeds have the same first token."""
    return [3 + (at * 7 + seed * 131) % 500 for at in range(PROMPT_TOKENS)]


def check(
    environment: Environment, work: Path, tally: Tally, only: set[str], variables: dict[str, str]
) -> None:
    """Runs the faults over the back ends in `only`: `faults` for all, or `faults-PART`. They take long, so they
    run only when named. `variables` are the environment variables of every SGLang process."""
    wanted = [part for part in PARTS if only & {"faults", f"faults-{part}"}]
    if not wanted:
        return
    model = wide_model(environment, work)
    for part in wanted:
        env = dict(variables)
        name = f"SGLang, {part}"
        if part == "mooncake-own":
            name = "SGLang, mooncake, Mooncake's engine"
            try:
                path = environments.beside(environment, "mooncake", environments.MOONCAKE)
            except RuntimeError as error:
                tally.fact(name, "does not run here", error)
                continue
            env["PYTHONPATH"] = os.pathsep.join([str(path), env["PYTHONPATH"]])
        directory = work / f"faults-{part}"
        directory.mkdir(parents=True)
        backend = part.removesuffix("-own")
        engines = Engines(environment, PROGRAM, directory, tally, name, backend == "kvpool")
        engines.run(Faults(engines, str(model), backend, env).run)


class Faults:
    """The faults of one back end."""

    def __init__(self, engines: Engines, model: str, backend: str, variables: dict[str, str]):
        self._engines = engines
        self._model = model
        self._backend = backend
        self._variables = variables
        self._room = 8_000
        self._port = 0

    def run(self) -> None:
        """Runs all faults."""
        with self._engine("decode") as decode:
            with self._pair(decode, TTL_SECONDS) as prefill:
                self._never_asks(prefill)
                self._within(prefill, decode, "kill -9 of prefill within a chunk")
            with self._pair(decode) as prefill:
                self._before(prefill, decode, "kill -9 of prefill before the offer", 1.0, is_killed=True)
            with self._pair(decode) as prefill:
                ended = self._before(
                    prefill, decode, "SIGSTOP of prefill before the offer", 4.0, is_killed=False
                )
                prefill.thaw()
                if ended:
                    self._decode_dies(prefill, decode, "kill -9 of decode within a chunk")
                else:
                    told = "not tried: decode still waits for the prefill that was stopped"
                    self._engines.fact("kill -9 of decode within a chunk", told)

    def _engine(self, role: str, ttl: int | None = None) -> AbstractContextManager[LiveEngine]:
        """An engine that ends with the block."""
        options: dict[str, Any] = {
            "model_path": self._model,
            "max_total_tokens": 2048,
            "disaggregation_mode": role,
            "disaggregation_transfer_backend": self._backend,
        }
        # A waiting decode engine keeps a core busy, so a thread that others wait for would not run.
        env = {"OMP_NUM_THREADS": "1", **self._variables}
        if role == "decode":
            # By default decode pins host memory for preempted requests, which needs CUDA.
            options["disaggregation_decode_retraction_backup"] = "cpu_tensor"
        else:
            self._port = free_port()
            options["disaggregation_bootstrap_port"] = self._port
        if ttl is not None:
            env |= {"KVPOOL_HANDOFF_TIMEOUT": str(ttl), "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(ttl)}
        return self._engines.live(role, options, env)

    @contextlib.contextmanager
    def _pair(self, decode: LiveEngine, ttl: int | None = None) -> Iterator[LiveEngine]:
        """A prefill engine that has already handed a prompt off."""
        with self._engine("prefill", ttl) as prefill:
            request = self._ask(decode, self._room + 1)
            self._ask(prefill, self._room + 1)
            self._room += 1
            # The first prompt of an engine takes long.
            answer = decode.answer(request, FIRST_SECONDS)
            came = len(answer.get("tokens") or []) == ANSWER_TOKENS
            seen = answer.get("failed") or f"{answer.get('seconds')} s"
            self._engines.report("without a fault decode answers", seen, came)
            yield prefill

    def _before(
        self, prefill: LiveEngine, decode: LiveEngine, what: str, limit: float, is_killed: bool
    ) -> bool:
        """Decode asks for a prompt that prefill does not know. Returns whether the request ended."""
        self._room += 1
        request = self._ask(decode, self._room)
        time.sleep(2.0)
        since = fail(prefill, is_killed)
        return self._ended(decode, request, f"{what}: decode's request ends after", since, f"limit {limit:g} s")

    def _within(self, prefill: LiveEngine, decode: LiveEngine, what: str) -> None:
        request, _ = self._begin(prefill, decode, what)
        since = fail(prefill, is_killed=True)
        self._ended(decode, request, f"{what}: decode's request ends after", since, "limit 1 s")

    def _decode_dies(self, prefill: LiveEngine, decode: LiveEngine, what: str) -> None:
        _, given = self._begin(prefill, decode, what)
        since = fail(decode, is_killed=True)
        self._ended(prefill, given, f"{what}: prefill's request and its pages end after", since, "limit 1 s")

    def _never_asks(self, prefill: LiveEngine) -> None:
        self._room += 1
        given = self._ask(prefill, self._room)
        what = "a decode that never says done (it never asks): prefill's request ends after its start by"
        self._ended(prefill, given, what, time.monotonic(), f"TTL {TTL_SECONDS} s")

    def _begin(self, prefill: LiveEngine, decode: LiveEngine, what: str) -> tuple[str, str]:
        """Returns the requests of decode and of prefill, once prefill has sent some bytes."""
        self._room += 1
        before = bytes_sent(prefill)
        asked, given = self._ask(decode, self._room), self._ask(prefill, self._room)
        end = time.monotonic() + HANG_SECONDS
        while (sent := bytes_sent(prefill) - before) < SENT_BYTES:
            if time.monotonic() > end:
                raise RuntimeError("prefill sent nothing")
        self._engines.fact(f"{what}: sent then", f"{sent >> 20} of 300 MiB")
        return asked, given

    def _ask(self, engine: LiveEngine, room: int) -> str:
        request = f"request-{room}"
        engine.send(request, prompt=prompt(room), tokens=ANSWER_TOKENS, port=self._port, room=room)
        return request

    def _ended(self, engine: LiveEngine, request: str, what: str, since: float, limit: str) -> bool:
        answer = engine.answer(request, HANG_SECONDS)
        if "at" not in answer:
            self._engines.report(what, f"not within {HANG_SECONDS:g} s ({limit})", False)
            return False
        finished = answer.get("finished") or {}
        why = str(answer.get("failed") or finished.get("message") or finished.get("type"))
        self._engines.report(what, f"{answer['at'] - since:.3f} s ({limit}): {why[:60]}", True)
        return True


def bytes_sent(engine: LiveEngine) -> int:
    """Returns the bytes that an engine's processes have sent over TCP on open connections."""
    sockets = subprocess.run(["ss", "-tinpHO"], stdout=subprocess.PIPE, text=True, check=True).stdout
    sent = 0
    for line in sockets.splitlines():
        pids = {int(pid) for pid in re.findall(r"pid=(\d+)", line)}
        count = re.search(r"bytes_sent:(\d+)", line)
        if count and any(engine.owns(pid) for pid in pids):
            sent += int(count[1])
    return sent
