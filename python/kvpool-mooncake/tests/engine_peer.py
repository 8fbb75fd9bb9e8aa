"""A peer process for the tests of mooncake.engine. It reads calls from its input, one on each line, and
performs them.

A line is a JSON list: the name of a method of `TransferEngine` or of a function below, and its arguments.
The answer is a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys

from mooncake.engine import TransferEngine

engine = TransferEngine()


def fill(address: int, length: int, seed: int) -> int:
    """Fills memory with the bytes of `pattern`."""
    return engine.write_bytes_to_buffer(address, pattern(length, seed), length)


def digest(address: int, length: int) -> str:
    """The SHA-256 of memory."""
    return hashlib.sha256(engine.read_bytes_from_buffer(address, length)).hexdigest()


def notifies() -> list[list[str]]:
    """Returns the messages that peers have left."""
    return [[notify.name, notify.msg] for notify in engine.get_notifies()]


def pattern(length: int, seed: int) -> bytes:
    """Returns bytes that depend on the place and the seed."""
    block = hashlib.sha256(str(seed).encode()).digest() * 128
    numbered = b"".join((index).to_bytes(8, "little") + block[8:] for index in range(length // 4096 + 1))
    return numbered[:length]


def main() -> None:
    functions = {"fill": fill, "digest": digest, "notifies": notifies}
    for line in sys.stdin:
        name, *args = json.loads(line)
        function = functions.get(name) or getattr(engine, name)
        print(json.dumps(function(*args)), flush=True)


if __name__ == "__main__":
    main()
