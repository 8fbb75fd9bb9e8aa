#!/usr/bin/env python3
"""Runs real inference engines over a real pool, and reports the results.

    tests/engines/run.py [vllm] [vllm-handoff] [lmcache] [sglang] [sglang-handoff] [--wheels DIRECTORY]
        [--only PART]

Each engine gets a virtual environment of its own in `KVPOOL_ENGINES_DIR` (target/engines unless set), made
once. It holds gigabytes of wheels, so `.ci/run` does not run this script. `cargo xtask wheels` builds the
project's wheels, unless a directory with them is given. The script ends with a table, and with a status other
than 0 when a check failed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import environments
import lmcache_checks
import sglang_checks
import sglang_handoff_checks
import vllm_checks
import vllm_handoff_checks
from tally import Tally

CHECKS = {
    "vllm": (environments.vllm, vllm_checks.check),
    "vllm-handoff": (environments.vllm, vllm_handoff_checks.check),
    "lmcache": (environments.lmcache, lmcache_checks.check),
    "sglang": (environments.sglang, sglang_checks.check),
    "sglang-handoff": (environments.sglang, sglang_handoff_checks.check),
}


def main() -> int:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("engines", nargs="*", help=f"of {', '.join(CHECKS)}; all unless told")
    arguments.add_argument("--wheels", type=Path, help="a directory with our two wheels")
    arguments.add_argument("--only", action="append", default=[], help="parts of an engine's checks, by name")
    options = arguments.parse_args()
    if unknown := set(options.engines) - set(CHECKS):
        arguments.error(f"no engine is called {', '.join(sorted(unknown))}")
    wheels = environments.built_wheels(options.wheels)
    tally = Tally()
    for engine in options.engines or CHECKS:
        make, check = CHECKS[engine]
        environment = make()
        environment.install_wheels(wheels)
        work = environments.directory() / f"{engine}-work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        check(environment, work, tally, set(options.only))
    print()
    print(tally.table())
    return 0 if tally.passed() else 1


if __name__ == "__main__":
    sys.exit(main())
