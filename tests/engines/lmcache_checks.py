"""Checks of a real LMCache over the pool: its own basic checks, over kvpool's plugins and kvpool's
`mooncake.store`."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from daemons import Pool, living_pool, with_path
from environments import Environment
from tally import Tally

HERE = Path(__file__).parent
KEYS = 8


def check(environment: Environment, work: Path, tally: Tally, only: set[str]) -> None:
    """Runs all checks, or only the parts in `only`."""
    parts = {"l2": check_l2, "remote": check_remote, "mooncake": check_mooncake}
    for part, run in parts.items():
        if not only or part in only:
            with living_pool(environment.commands, work / f"{part}-pool") as pool:
                run(environment, work, tally, pool)


def check_l2(environment: Environment, work: Path, tally: Tally, pool: Pool) -> None:
    """Checks the L2 adapter by LMCache's own test of adapters."""
    adapter = {
        "type": "plugin",
        "module_path": "kvpool.lmcache",
        "class_name": "KvpoolL2Adapter",
        "adapter_params": {"master": pool.master},
    }
    flags = ["--l2-adapter", json.dumps(adapter)]
    said = basic_check(environment, work / "l2.log", "test_l2_adapter", {}, *flags)
    judge(tally, "LMCache, L2 adapter", said)


def check_remote(environment: Environment, work: Path, tally: Tally, pool: Pool) -> None:
    """Checks the remote connector by LMCache's own test of connectors, and by a round trip."""
    plugin = "remote_storage_plugin.kvpool"
    extra = {
        f"{plugin}.module_path": "kvpool.lmcache",
        f"{plugin}.class_name": "KvpoolConnector",
        f"{plugin}.master": pool.master,
    }
    config = {"remote_url": "plugin://kvpool", "remote_storage_plugins": ["kvpool"]}
    env = configured(work / "remote.yaml", {**config, "extra_config": extra})
    said = basic_check(environment, work / "remote.log", "test_remote", env)
    judge(tally, "LMCache, remote connector", said)
    round_trips(environment, work, tally, "remote connector", config, extra)


def check_mooncake(environment: Environment, work: Path, tally: Tally, pool: Pool) -> None:
    """Checks LMCache's MooncakestoreConnector over kvpool's module by a round trip. LMCache's own test asks
    this connector for functions that it does not have."""
    extra = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "device_name": "",
        "master_server_address": f"127.0.0.1:{pool.port}",
        "global_segment_size": 0,
        "local_buffer_size": 16 << 20,
        "transfer_timeout": 5,
    }
    config = {"remote_url": f"mooncakestore://127.0.0.1:{pool.port}/"}
    round_trips(environment, work, tally, "MooncakestoreConnector", config, extra)


def round_trips(
    environment: Environment,
    work: Path,
    tally: Tally,
    name: str,
    config: dict[str, Any],
    extra: dict[str, Any],
) -> None:
    """Moves chunks there and back, with LMCache's stored description of each chunk and without it.

    Without the description, only the length tells whole chunks from cut chunks.
    """
    for described in (True, False):
        slug = f"{name.replace(' ', '-')}-{'described' if described else 'bare'}"
        # The two kinds must not find each other's chunks.
        salted = {**extra, "save_chunk_meta": described}
        env = configured(work / f"{slug}.yaml", {**config, "extra_config": salted})
        part = f"LMCache, {name}, {'with' if described else 'without'} descriptions"
        said = run(environment, work / f"{slug}.log", env, str(HERE / "lmcache_backend.py"), str(described))
        for line in said.splitlines():
            if line.startswith(("ok: ", "FAILED: ")):
                verdict, what = line.split(": ", 1)
                tally.check(part, what, "", verdict == "ok")
        tally.check(part, "runs to its end", "", "at its end" in said)


def configured(file: Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns the environment that makes LMCache read this configuration."""
    shared = {"chunk_size": 256, "local_cpu": False, "max_local_cpu_size": 1.0, "remote_serde": "naive"}
    # JSON is also YAML.
    file.write_text(json.dumps({**shared, **config}))
    return {"LMCACHE_CONFIG_FILE": str(file)}


def basic_check(environment: Environment, log: Path, mode: str, env: dict[str, str], *flags: str) -> str:
    """Returns the output of LMCache's basic check."""
    check = ["-m", "lmcache.v1.basic_check", "--mode", mode, "--num-keys", str(KEYS)]
    return run(environment, log, env, *check, *flags)


def run(environment: Environment, log: Path, env: dict[str, str], *arguments: str) -> str:
    """Returns the output of a program in LMCache's environment."""
    done = subprocess.run(
        [environment.python, *arguments],
        cwd=log.parent,
        env=with_path(environment.commands, LMCACHE_TRACK_USAGE="false", **env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    log.write_text(done.stdout)
    print(f"--- {arguments[0]} ended with {done.returncode}, its log is {log}", flush=True)
    return done.stdout


def judge(tally: Tally, name: str, said: str) -> None:
    """Checks that LMCache validated all phases, and in each phase as many keys as there are."""
    counts = re.findall(r"Validation.*?(\d+)/(\d+)", said)
    full = len(counts) >= 4 and all(some == whole == str(KEYS) for some, whole in counts)
    failed = re.findall(r".*(?:FAIL|Test Failed|Error closing).*", said)
    seen = ", ".join("/".join(count) for count in counts) + (f", {failed[0].strip()}" if failed else "")
    tally.check(name, "absent keys miss, stored ones are found and loaded right", seen, full and not failed)
