"""What a real LMCache does with the pool: its own basic checks, over our plugins and our `mooncake.store`."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from daemons import Pool, living_pool, with_path
from environments import Environment
from tally import Tally

KEYS = 8


def check(environment: Environment, work: Path, tally: Tally, only: set[str]) -> None:
    """All checks, or those parts that are named in `only`."""
    parts = {"l2": check_l2, "remote": check_remote, "mooncake": check_mooncake}
    for part, run in parts.items():
        if not only or part in only:
            with living_pool(environment.commands, work / f"{part}-pool") as pool:
                run(environment, work, tally, pool)


def check_l2(environment: Environment, work: Path, tally: Tally, pool: Pool) -> None:
    """The L2 adapter, by LMCache's own test of it."""
    adapter = {
        "type": "plugin",
        "module_path": "kvpool.lmcache",
        "class_name": "KvpoolL2Adapter",
        "adapter_params": {"master": pool.master},
    }
    said = basic_check(environment, work / "l2.log", "test_l2_adapter", {}, "--l2-adapter", json.dumps(adapter))
    judge(tally, "LMCache, L2 adapter", said)


def check_remote(environment: Environment, work: Path, tally: Tally, pool: Pool) -> None:
    """The remote connector, by LMCache's own test of one."""
    plugin = "remote_storage_plugin.kvpool"
    config = {
        "remote_url": "plugin://kvpool",
        "remote_storage_plugins": ["kvpool"],
        "extra_config": {
            f"{plugin}.module_path": "kvpool.lmcache",
            f"{plugin}.class_name": "KvpoolConnector",
            f"{plugin}.master": pool.master,
        },
    }
    said = basic_check(environment, work / "remote.log", "test_remote", configured(work / "remote.yaml", config))
    judge(tally, "LMCache, remote connector", said)


def check_mooncake(environment: Environment, work: Path, tally: Tally, pool: Pool) -> None:
    """LMCache's MooncakestoreConnector over our module, by the same test."""
    config = {
        "remote_url": f"mooncakestore://127.0.0.1:{pool.port}/",
        "extra_config": {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "device_name": "",
            "master_server_address": f"127.0.0.1:{pool.port}",
            "global_segment_size": 0,
            "local_buffer_size": 16 << 20,
            "transfer_timeout": 5,
        },
    }
    env = configured(work / "mooncake.yaml", config)
    said = basic_check(environment, work / "mooncake.log", "test_remote", env)
    judge(tally, "LMCache, MooncakestoreConnector", said)


def configured(file: Path, config: dict[str, Any]) -> dict[str, str]:
    """The environment that makes LMCache read this configuration."""
    shared = {"chunk_size": 256, "local_cpu": False, "max_local_cpu_size": 1.0, "remote_serde": "naive"}
    # JSON is YAML too.
    file.write_text(json.dumps({**shared, **config}))
    return {"LMCACHE_CONFIG_FILE": str(file)}


def basic_check(environment: Environment, log: Path, mode: str, env: dict[str, str], *flags: str) -> str:
    """What LMCache's basic check prints."""
    command = [environment.python, "-m", "lmcache.v1.basic_check", "--mode", mode, "--num-keys", str(KEYS)]
    done = subprocess.run(
        [*command, *flags],
        cwd=log.parent,
        env=with_path(environment.commands, LMCACHE_TRACK_USAGE="false", **env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    log.write_text(done.stdout)
    print(f"--- LMCache's {mode} ended with {done.returncode}, its log is {log}", flush=True)
    return done.stdout


def judge(tally: Tally, name: str, said: str) -> None:
    """What the check validated is as many keys as there are, each time, and it validated all phases."""
    counts = re.findall(r"Validation.*?(\d+)/(\d+)", said)
    full = len(counts) >= 4 and all(some == whole == str(KEYS) for some, whole in counts)
    failed = re.findall(r".*(?:FAIL|Test Failed|Error closing).*", said)
    seen = ", ".join("/".join(count) for count in counts) + (f", {failed[0].strip()}" if failed else "")
    tally.check(name, "absent keys miss, stored ones are found and loaded right", seen, full and not failed)
