"""Two real vLLM engines: one computes prompts, the other decodes them.

The **swapped prompt** proves a hand-off. Decode gets another prompt of the same length and with the same last
token, and must still give prefill's answer. It can do so only with prefill's KV cache.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import vllm_faults
from daemons import Pool, free_port, living_pool
from environments import Environment
from live_engines import LiveEngine, live_engines
from tally import Tally

HERE = Path(__file__).parent
PROGRAM = HERE / "vllm_live.py"
PROMPT_TOKENS = 600
ANSWER_TOKENS = 24
# On a CPU, blocks of vLLM have 128 tokens: of 600 tokens the pool can have the first 512.
SHARED = 512
NOTICED_SECONDS = 1.0
ANSWERED_SECONDS = 5.0


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """Returns a prompt. The prompts of all seeds have the same last token."""
    numbers = [3 + (at * 7 + seed * 131 + (at * seed) % 97) % 500 for at in range(tokens - 1)]
    return [*numbers, 5]


class Pair:
    """A prefill and a decode engine, and their requests."""

    def __init__(self, name: str, engines: dict[str, LiveEngine], tally: Tally):
        self.name = name
        self.prefill = engines["prefill"]
        self.decode = engines["decode"]
        self.tally = tally
        self._asked = 0

    def name_of_request(self, what: str) -> str:
        """Returns a name that was not used yet."""
        self._asked += 1
        return f"{what}-{self._asked}."

    def plain(self, engine: LiveEngine, tokens: list[int]) -> list[int]:
        """Returns the answer without a hand-off."""
        answer = engine.ask(self.name_of_request("plain"), prompt=tokens, tokens=ANSWER_TOKENS)
        return answer.get("tokens") or []

    def check_swapped(self, what: str, asked: list[int], got: dict[str, Any]) -> None:
        """Checks that decode's answer to another prompt is prefill's answer to `asked`."""
        wanted = self.plain(self.prefill, asked)
        tokens = got.get("tokens") or []
        same = sum(one == two for one, two in zip(tokens, wanted, strict=False))
        seen = got.get("failed") or f"{same} of {ANSWER_TOKENS} in {got.get('seconds')} s"
        right = len(wanted) == ANSWER_TOKENS and tokens == wanted
        self.tally.check(self.name, what, seen, right)


def model(environment: Environment, work: Path) -> str:
    """Returns the directory of a tiny model."""
    directory = work / "llama"
    if not directory.exists():
        subprocess.run([environment.python, HERE / "tiny_model.py", directory], check=True)
    return str(directory)


def check(environment: Environment, work: Path, tally: Tally, only: set[str]) -> None:
    """Runs all checks, or only the parts in `only`."""
    vllm_faults.check(environment, work, tally, only)
    if only and all(part.startswith("faults") for part in only):
        return
    directory = model(environment, work)
    if not only or "mooncake" in only:
        check_mooncake(environment, work / "mooncake", directory, tally)
    for mode in ("push", "pull", "delayed"):
        if not only or mode in only:
            check_mode(environment, work / mode, directory, tally, mode)
    for ranks in ((2, 1), (1, 2)):
        name = f"ranks-{ranks[0]}-{ranks[1]}"
        if not only or name in only:
            check_ranks(environment, work / name, directory, tally, ranks)


def check_mooncake(environment: Environment, work: Path, directory: str, tally: Tally) -> None:
    """Checks vLLM's own connector over kvpool's `mooncake.engine`."""
    work.mkdir(parents=True)
    port = free_port()
    env = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)}
    engine_id = "prefill-engine"

    def connector(role: str) -> dict[str, Any]:
        return {
            "kv_connector": "MooncakeConnector",
            "kv_role": role,
            "engine_id": engine_id if role == "kv_producer" else "decode-engine",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }

    wanted = {
        name: ({"model": directory, "connector": connector(role)}, env)
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    }
    with live_engines(environment, PROGRAM, work, wanted) as engines:
        pair = Pair("MooncakeConnector", engines, tally)
        for transfer, (asked, swapped) in enumerate(((1, 2), (3, 4))):
            prefilled = pair.prefill.ask(
                pair.name_of_request("prefill"),
                prompt=prompt(asked),
                tokens=1,
                kv={"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"transfer-{transfer}"},
            )
            tally.check(pair.name, "prefill answers", prefilled.get("failed", ""), "tokens" in prefilled)
            got = pair.decode.ask(
                pair.name_of_request("decode"),
                prompt=prompt(swapped),
                tokens=ANSWER_TOKENS,
                kv={
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "transfer_id": f"transfer-{transfer}",
                    "remote_engine_id": engine_id,
                    "remote_bootstrap_addr": f"http://127.0.0.1:{port}",
                },
            )
            pair.check_swapped("decode answers a swapped prompt as prefill does", prompt(asked), got)
        others = [pair.plain(pair.decode, prompt(seed)) for seed in (1, 5)]
        tally.check(pair.name, "without a hand-off prompts have answers of their own", "", others[0] != others[1])


def kvpool_connector(pool: Pool, role: str, mode: str, **extra: Any) -> dict[str, Any]:
    """Returns vLLM's settings for kvpool's connector."""
    return {
        "kv_connector": "KvpoolConnector",
        "kv_connector_module_path": "kvpool.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"master": pool.master, "handoff": mode, **extra},
    }


def ask_prefill(pair: Pair, tokens: list[int], **kv: Any) -> dict[str, Any]:
    """Returns prefill's answer, with the parameters for decode."""
    asked = {"do_remote_decode": True, "do_remote_prefill": False, **kv}
    return pair.prefill.ask(pair.name_of_request("prefill"), prompt=tokens, tokens=1, kv=asked)


def ask_decode(pair: Pair, tokens: list[int], kv: Any) -> dict[str, Any]:
    """Returns decode's answer to a prompt that is handed off."""
    return pair.decode.ask(pair.name_of_request("decode"), prompt=tokens, tokens=ANSWER_TOKENS, kv=kv)


def check_mode(environment: Environment, work: Path, directory: str, tally: Tally, mode: str) -> None:
    """Checks kvpool's connector in one mode."""
    with living_pool(environment.commands, work) as pool:
        wanted = {
            # Decode saves nothing, because it would save another prompt's blocks under a swapped prompt.
            name: ({"model": directory, "connector": kvpool_connector(pool, role, mode)}, {})
            for name, role in (("prefill", "kv_both"), ("decode", "kv_consumer"))
        }
        with live_engines(environment, PROGRAM, work, wanted) as engines:
            pair = Pair(f"KvpoolConnector, {mode}", engines, tally)
            prefilled = ask_prefill(pair, prompt(1))
            kv = prefilled.get("kv") or {}
            named = kv.get("mode") == mode and len(kv.get("senders", ())) == 1
            tally.check(pair.name, "prefill names the room and its address", prefilled.get("failed", ""), named)
            got = ask_decode(pair, prompt(2), kv)
            pair.check_swapped("decode answers a swapped prompt as prefill does", prompt(1), got)
            check_pool(pair)
            if mode == "push":
                check_decode_first(pair, kv["senders"])
            check_death(pair, kv.get("senders", []), mode)


def check_pool(pair: Pair) -> None:
    """Prefill's blocks are in the pool too, and decode takes only the rest from prefill."""
    answer = pair.decode.ask(pair.name_of_request("plain"), prompt=prompt(1), tokens=ANSWER_TOKENS)
    found = answer.get("cached")
    pair.tally.check(pair.name, "an engine without a hand-off finds tokens in the pool", found, found == SHARED)
    kv = ask_prefill(pair, prompt(3)).get("kv")
    got = ask_decode(pair, prompt(3), kv)
    pair.check_swapped("decode takes blocks from the pool and the rest from prefill", prompt(3), got)


def check_decode_first(pair: Pair, senders: list[str]) -> None:
    """Decode asks before prefill computes: a proxy that knows prefill sends both requests at once."""
    room = 77
    kv = {"do_remote_prefill": True, "room": room, "senders": senders}
    name = pair.name_of_request("decode")
    pair.decode.send(name, prompt=prompt(5), tokens=ANSWER_TOKENS, kv=kv)
    time.sleep(1.0)
    ask_prefill(pair, prompt(4), room=room)
    got = pair.decode.answer(name)
    pair.check_swapped("decode may ask before prefill computes", prompt(4), got)


def check_death(pair: Pair, senders: list[str], mode: str) -> None:
    """Prefill is killed while decode waits for it, or, in a mode where prefill comes first, before decode asks.

    Decode takes the blocks in the pool, and computes the rest."""
    asked = prompt(8)
    wanted = pair.plain(pair.prefill, prompt(8))
    kv = {"do_remote_prefill": True, "room": 78, "senders": senders, "mode": mode}
    name = pair.name_of_request("decode")
    waited = 0.0
    if mode == "push":
        began = time.monotonic()
        pair.decode.send(name, prompt=asked, tokens=ANSWER_TOKENS, kv=kv)
        time.sleep(2.0)
        pair.prefill.kill()
        waited = time.monotonic() - began
    else:
        kv = ask_prefill(pair, prompt(8)).get("kv") or kv
        pair.prefill.kill()
        pair.decode.send(name, prompt=asked, tokens=ANSWER_TOKENS, kv=kv)
    killed = time.monotonic()
    got = pair.decode.answer(name)
    seconds = time.monotonic() - killed
    tokens = got.get("tokens") or []
    right = len(wanted) == ANSWER_TOKENS and tokens == wanted
    pair.tally.check(pair.name, "after kill -9 of prefill decode computes the answer", got.get("failed", ""), right)
    within = f"{seconds:.3f} s"
    pair.tally.check(pair.name, "within 5 s", within, seconds < ANSWERED_SECONDS)
    noticed = noticed_after(pair.decode.log_text())
    if noticed is not None:
        noticed = round(noticed - waited, 3)
    in_time = noticed is not None and noticed < NOTICED_SECONDS
    pair.tally.check(pair.name, "and notices the death within 1 s", f"{noticed} s", in_time)


def noticed_after(log: str) -> float | None:
    """Returns the last time that decode waited in vain, according to its log."""
    found = re.findall(r"did not come from prefill within ([0-9.]+) s", log)
    return float(found[-1]) if found else None


def check_ranks(
    environment: Environment, work: Path, directory: str, tally: Tally, ranks: tuple[int, int]
) -> None:
    """Checks different numbers of tensor parallel ranks."""
    # By default vLLM requires a NUMA node for each rank.
    cores = sorted(os.sched_getaffinity(0))
    with living_pool(environment.commands, work) as pool:
        wanted = {}
        for name, role, count in (("prefill", "kv_both", ranks[0]), ("decode", "kv_consumer", ranks[1])):
            connector = kvpool_connector(pool, role, "push", handoff_decode_ranks=ranks[1])
            settings: dict[str, Any] = {"model": directory, "connector": connector}
            env = {}
            if count > 1:
                settings["engine"] = {"tensor_parallel_size": count, "distributed_executor_backend": "mp"}
                env = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
            wanted[name] = (settings, env)
        with live_engines(environment, PROGRAM, work, wanted) as engines:
            pair = Pair(f"KvpoolConnector, {ranks[0]} to {ranks[1]} ranks", engines, tally)
            for asked, swapped in ((1, 2), (3, 4)):
                kv = ask_prefill(pair, prompt(asked)).get("kv")
                got = ask_decode(pair, prompt(swapped), kv)
                pair.check_swapped("decode answers a swapped prompt as prefill does", prompt(asked), got)
