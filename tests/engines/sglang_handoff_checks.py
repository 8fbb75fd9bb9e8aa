"""Two real SGLang engines: one computes prompts, the other decodes them.

Decode gets another prompt of the same length. It must still answer like one engine that computes and decodes
prefill's prompt. It can do so only with prefill's KV cache and metadata.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import sglang_faults
from daemons import free_port, with_path
from environments import Environment
from live_engines import LiveEngine, live_engines
from tally import Tally

HERE = Path(__file__).parent
PROGRAM = HERE / "sglang_live.py"
# Stand-ins for packages without a build for this machine, and a plugin.
CPU = HERE / "sglang_cpu"
# At most three chunks of 256 tokens.
PROMPT_TOKENS = 600
ANSWER_TOKENS = 16
ROOMS = (7_001, 7_002)


def prompt(seed: int) -> list[int]:
    """Returns a prompt. The prompts of all seeds have the same last token."""
    numbers = [3 + (at * 7 + seed * 131 + (at * seed) % 97) % 500 for at in range(PROMPT_TOKENS - 1)]
    return [*numbers, 5]


def variables() -> dict[str, str]:
    """Returns the environment variables of every SGLang process on a CPU."""
    path = os.pathsep.join([str(CPU), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        "PYTHONPATH": path,
        "SGLANG_USE_CPU_ENGINE": "1",
        "MOONCAKE_PROTOCOL": "tcp",
        "SGLANG_HOST_IP": "127.0.0.1",
    }


def check(environment: Environment, work: Path, tally: Tally, only: set[str]) -> None:
    """Runs all checks, or only the parts in `only`."""
    sglang_faults.check(environment, work, tally, only, variables())
    subprocess.run([environment.python, HERE / "tiny_model.py", work / "llama"], check=True)
    for backend in ("mooncake", "kvpool"):
        if not only or f"{backend}-classes" in only:
            for ranks in ("1:1", "2:1", "1:2"):
                check_classes(environment, work, tally, backend, ranks)
        if not only or backend in only:
            check_engines(environment, work / backend, tally, backend)


def check_classes(environment: Environment, work: Path, tally: Tally, backend: str, ranks: str) -> None:
    """Checks SGLang's classes of a back end without a model: the bytes, the metadata and the polls."""
    name = f"SGLang, {backend}, {ranks.replace(':', ' to ')} ranks"
    log = work / f"{backend}-{ranks.replace(':', '-')}.log"
    done = subprocess.run(
        [environment.python, HERE / "sglang_classes.py", backend, ranks, str(free_port())],
        cwd=work,
        env=with_path(
            environment.commands, KVPOOL_HANDOFF_DECODE_RANKS=ranks.rpartition(":")[2], **variables()
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    log.write_text(done.stdout)
    for line in done.stdout.splitlines():
        if line.startswith(("ok: ", "FAILED: ")):
            verdict, what = line.split(": ", 1)
            tally.check(name, what, "", verdict == "ok")
    ended = done.returncode == 0 and "at its end" in done.stdout
    tally.check(name, "runs to its end", f"status {done.returncode}, see {log}", ended)


def check_engines(environment: Environment, work: Path, tally: Tally, backend: str) -> None:
    """Checks whole engines over a back end."""
    name = f"SGLang, {backend}"
    work.mkdir(parents=True)
    options: dict[str, Any] = {"model_path": str(work.parent / "llama")}
    wanted = reference(environment, work, options)
    port = free_port()
    shared = {**options, "disaggregation_transfer_backend": backend, "disaggregation_bootstrap_port": port}
    # By default decode pins host memory for preempted requests, which needs CUDA.
    kept = {"decode": {"disaggregation_decode_retraction_backup": "cpu_tensor"}}
    engines = {
        mode: ({**shared, **kept.get(mode, {}), "disaggregation_mode": mode}, variables())
        for mode in ("prefill", "decode")
    }
    with live_engines(environment, PROGRAM, work, engines) as running:
        for at, room in enumerate(ROOMS):
            got = hand_off(running, prompt(at), prompt(at + 10), port, room)
            tokens = got.get("tokens") or []
            same = sum(one == two for one, two in zip(tokens, wanted[at], strict=False))
            right = len(tokens) == ANSWER_TOKENS and tokens == wanted[at]
            seen = got.get("failed") or f"{same} of {ANSWER_TOKENS} in {got.get('seconds')} s"
            tally.check(name, "decode answers a swapped prompt as one engine does", seen, right)


def hand_off(
    running: dict[str, LiveEngine], asked: list[int], swapped: list[int], port: int, room: int
) -> dict[str, Any]:
    """Returns decode's answer to a prompt in the place of prefill's."""
    shared = {"port": port, "room": room}
    running["decode"].send(f"decode-{room}", prompt=swapped, tokens=ANSWER_TOKENS, **shared)
    running["prefill"].send(f"prefill-{room}", prompt=asked, tokens=ANSWER_TOKENS, **shared)
    return running["decode"].answer(f"decode-{room}")


def reference(environment: Environment, work: Path, options: dict[str, Any]) -> list[list[int]]:
    """Returns the answers of an engine that does both."""
    with live_engines(environment, PROGRAM, work, {"reference": (options, variables())}) as running:
        answers = [
            running["reference"].ask(f"plain-{at}", prompt=prompt(at), tokens=ANSWER_TOKENS)
            for at in range(len(ROOMS))
        ]
    return [answer.get("tokens") or [] for answer in answers]
