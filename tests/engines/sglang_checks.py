"""Checks of SGLang's hierarchical cache over the pool.

They run SGLang's own test of the Mooncake store over kvpool's module. They also run kvpool's backend, created
by SGLang's factory, over SGLang's host memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

from daemons import living_pool, with_path
from environments import Environment
from tally import Tally

HERE = Path(__file__).parent
MOONCAKE_TEST = "sglang.srt.mem_cache.storage.mooncake_store.test_mooncake_store"


def check(environment: Environment, work: Path, tally: Tally, only: set[str]) -> None:
    """Runs all checks, or only the parts in `only`."""
    if not only or "mooncake" in only:
        with living_pool(environment.commands, work / "mooncake-pool") as pool:
            env = {
                "MOONCAKE_MASTER": f"127.0.0.1:{pool.port}",
                "MOONCAKE_PROTOCOL": "tcp",
                "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
                "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
                "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(256 << 20),
            }
            said = run(environment, work / "mooncake.log", "-m", MOONCAKE_TEST, **env)
            passed = "All tests passed" in said
            tally.check("SGLang, mooncake_store", "its own test passes", last_line(said), passed)
    if not only or "backend" in only:
        with living_pool(environment.commands, work / "backend-pool") as pool:
            said = run(environment, work / "backend.log", str(HERE / "sglang_backend.py"), pool.master)
            for line in said.splitlines():
                if line.startswith(("ok: ", "FAILED: ")):
                    verdict, what = line.split(": ", 1)
                    tally.check("SGLang, dynamic backend", what, "", verdict == "ok")
            tally.check("SGLang, dynamic backend", "runs to its end", last_line(said), "at its end" in said)


def run(environment: Environment, log: Path, *arguments: str, **env: str) -> str:
    """Returns the output of a program in SGLang's environment."""
    done = subprocess.run(
        [environment.python, *arguments],
        cwd=log.parent,
        env=with_path(environment.commands, **env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    log.write_text(done.stdout)
    print(f"--- {arguments[0]} ended with {done.returncode}, its log is {log}", flush=True)
    return done.stdout if done.returncode == 0 else f"{done.stdout}\nstatus {done.returncode}"


def last_line(said: str) -> str:
    """Returns the last printed line."""
    return said.strip().rsplit("\n", 1)[-1][-80:]
