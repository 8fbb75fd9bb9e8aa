"""Checks of a real vLLM over the pool: of two engines, one after the other, the second reuses the first one's
blocks."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daemons import Pool, living_pool, with_path
from environments import Environment
from tally import Tally

HERE = Path(__file__).parent
# On a CPU, blocks of vLLM have 128 tokens: of 600 tokens the pool can have the first 512.
SHARED = [512, 512]
NOTHING = [0, 0]
# The original takes 61 s until it reports that a dead owner's block is gone.
SECONDS_AFTER_DEATH = 10.0
WINDOW = 256


@dataclasses.dataclass
class Setting:
    """The environment of the checks."""

    environment: Environment
    work: Path
    tally: Tally

    def run(
        self,
        part: str,
        settings: dict[str, Any],
        during: Callable[[], None] | None = None,
        **env: str,
    ) -> Any:
        """Runs an engine for its whole life. Returns its answers. `during` runs while a ready engine waits."""
        command = [self.environment.python, HERE / "vllm_engine.py"]
        if during is not None:
            gate = self.work / f"{part}.go"
            for file in (gate, gate.parent / "ready"):
                file.unlink(missing_ok=True)
            settings = {**settings, "wait_for": str(gate)}
        log = self.work / f"{part}.log"
        print(f"--- {part}: an engine runs, its log is {log}", flush=True)
        with log.open("wb") as out:
            engine = subprocess.Popen(
                [*command, json.dumps(settings)],
                cwd=self.work,
                env=with_path(self.environment.commands, VLLM_LOGGING_LEVEL="INFO", **env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            if during is not None:
                while not (self.work / "ready").exists() and engine.poll() is None:
                    time.sleep(0.05)
                during()
                gate.touch()
            status = engine.wait(timeout=400)
        finally:
            engine.kill()
        answer = log.read_text(errors="replace").strip().rsplit("\n", 1)[-1]
        if status != 0 or not answer.startswith("{"):
            return {"tokens": None, "cached": None, "seconds": None, "failed": f"status {status}, see {log}"}
        return json.loads(answer)

    def model(self, name: str, *flags: str) -> str:
        """Returns the directory of a tiny model."""
        model = self.work / name
        if not model.exists():
            subprocess.run([self.environment.python, HERE / "tiny_model.py", model, *flags], check=True)
        return str(model)


def kvpool_connector(pool: Pool, **extra: Any) -> dict[str, Any]:
    """Returns vLLM's settings for kvpool's connector."""
    return {
        "kv_connector": "KvpoolConnector",
        "kv_connector_module_path": "kvpool.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"master": pool.master, **extra},
    }


MOONCAKE_CONNECTOR = {
    "kv_connector": "MooncakeStoreConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def mooncake_environment(pool: Pool, work: Path) -> dict[str, str]:
    """Writes the file that the upstream connector reads, for a pool of kvpool."""
    file = work / f"mooncake-{pool.port}.json"
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{pool.port}",
        "protocol": "tcp",
        "device_name": "",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": 16 << 20,
    }
    file.write_text(json.dumps(settings))
    return {"MOONCAKE_CONFIG_PATH": str(file)}


def check(environment: Environment, work: Path, tally: Tally, only: set[str]) -> None:
    """Runs all checks, or only the parts in `only`."""
    setting = Setting(environment, work, tally)
    model = setting.model("llama")
    plain = setting.run("reference", {"model": model})
    answers = plain["tokens"] or []
    tally.check("vLLM", "without a connector it answers", f"{len(answers)} answers", bool(answers))
    if wants(only, "connector"):
        with living_pool(environment.commands, work / "connector-pool") as pool:
            check_sharing(setting, "KvpoolConnector", model, plain, kvpool_connector(pool))
            check_death(setting, "KvpoolConnector", pool, model, plain, kvpool_connector(pool))
    if wants(only, "staging"):
        with living_pool(environment.commands, work / "staging-pool") as pool:
            staged = kvpool_connector(pool, staging="always", transport="tcp")
            check_sharing(setting, "KvpoolConnector, staged", model, plain, staged)
    if wants(only, "window"):
        windowed = setting.model("windowed", "--window", str(WINDOW))
        wanted = setting.run("window-reference", {"model": windowed})
        with living_pool(environment.commands, work / "window-pool") as pool:
            name, ours = "KvpoolConnector, two groups", kvpool_connector(pool)
            check_sharing(setting, name, windowed, wanted, ours, None)
            check_death(setting, name, pool, windowed, wanted, ours)
    if wants(only, "ranks"):
        ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        # By default vLLM requires a NUMA node for each rank.
        cores = sorted(os.sched_getaffinity(0))
        env = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
        wanted = setting.run("ranks-reference", {"model": model, "engine": ranks}, **env)
        with living_pool(environment.commands, work / "ranks-pool") as pool:
            name, ours = "KvpoolConnector, two ranks", kvpool_connector(pool)
            check_sharing(setting, name, model, wanted, ours, engine=ranks, **env)
            check_death(setting, name, pool, model, wanted, ours, engine=ranks, **env)
    if wants(only, "mooncake"):
        with living_pool(environment.commands, work / "mooncake-pool") as pool:
            env = mooncake_environment(pool, work)
            name, theirs = "MooncakeStoreConnector", MOONCAKE_CONNECTOR
            check_sharing(setting, name, model, plain, theirs, **env)
            check_death(setting, name, pool, model, plain, theirs, **env)


def wants(only: set[str], part: str) -> bool:
    """Whether the part is requested."""
    return not only or part in only


def answers_alike(answer: Any, plain: Any) -> bool:
    """Whether there are answers, and they equal the answers without a connector."""
    return bool(plain["tokens"]) and answer["tokens"] == plain["tokens"]


def check_sharing(
    setting: Setting,
    name: str,
    model: str,
    plain: Any,
    connector: dict[str, Any],
    shared: list[int] | None = SHARED,
    engine: dict[str, Any] | None = None,
    **env: str,
) -> None:
    """The second engine takes the first engine's blocks from the pool, and gives the same answers."""
    tally = setting.tally
    slug = name.replace(" ", "-").replace(",", "")
    settings = {"model": model, "connector": connector, "engine": engine or {}}
    first = setting.run(f"{slug}-first", settings, **env)
    tally.check(name, "the first engine finds nothing", first["cached"], first["cached"] == NOTHING)
    same = answers_alike(first, plain)
    tally.check(name, "and answers as without a connector", first.get("failed", ""), same)
    second = setting.run(f"{slug}-second", settings, **env)
    found = second["cached"]
    # The shareable part of a model with windows depends on its block sizes, and may be less than all.
    enough = found == shared if shared else bool(found) and min(found) >= SHARED[0] // 2
    tally.check(name, "the second has cached tokens", found, enough)
    same = answers_alike(second, plain)
    tally.check(name, "and answers the same", f"{second['seconds']} s", same)


def check_death(
    setting: Setting,
    name: str,
    pool: Pool,
    model: str,
    plain: Any,
    connector: dict[str, Any],
    engine: dict[str, Any] | None = None,
    **env: str,
) -> None:
    """After a kill of the node, with the blocks put, the right answer comes within seconds."""
    slug = name.replace(" ", "-").replace(",", "")
    settings = {"model": model, "connector": connector, "engine": engine or {}}
    after = setting.run(f"{slug}-after-death", settings, lambda: pool.kill("kvstore-node"), **env)
    seconds = after["seconds"]
    # The engine computes all blocks that it would have loaded. This takes as long as without a pool.
    in_time = seconds is not None and seconds < (plain["seconds"] or 0) + SECONDS_AFTER_DEATH
    same = answers_alike(after, plain)
    tally = setting.tally
    tally.check(name, "after kill -9 of the node it answers the same", after.get("failed", ""), same)
    tally.check(name, "within seconds of being asked", f"{seconds} s", in_time)
