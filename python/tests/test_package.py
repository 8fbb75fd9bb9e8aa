"""The installed package, as a newcomer finds it."""

import os
import subprocess
import sys

import kvpool


def test_the_version_is_a_number() -> None:
    assert kvpool.__version__[0].isdigit()


def test_a_pool_lives_with_the_commands_of_the_wheel(shared_pool) -> None:
    status = shared_pool.kvctl("status")
    assert "node-0" in str(status)


def said(rust_log: str | None) -> str:
    """What a process that looks for a master in vain says on standard error."""
    nobody = "http://127.0.0.1:1"
    script = f"""
import kvpool
try:
    kvpool.Pool.connect({nobody!r}, timeout=0.2)
except kvpool.Error:
    pass
"""
    env = {name: value for name, value in os.environ.items() if name != "RUST_LOG"}
    if rust_log is not None:
        env["RUST_LOG"] = rust_log
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stderr


def test_the_native_half_logs_what_it_is_asked_to() -> None:
    assert said(None) == ""
    assert said("") == ""
    assert "kvpool" in said("debug")
    assert "kvpool logs nothing: bad log filter `kvpool=loud`" in said("kvpool=loud")
