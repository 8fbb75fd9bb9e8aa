"""The sources of flags besides the command line: flag files and configuration files.

A flag file has one flag on each line, as on a command line with `=`. A configuration file is JSON or YAML. It
names each flag without dashes, and has no nested values.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"[A-Za-z_][\w-]*")
_SINGLE = re.compile(r"'((?:[^']|'')*)'(.*)")


class Unreadable(Exception):
    """A file cannot be read; the message names it, and the line."""


def flagfile(path: str, program: str) -> list[str]:
    """Returns the flags of a flag file that are meant for a program."""
    found, is_meant = [], True
    for number, line in enumerate(_read("--flagfile", path).splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("-"):
            if line == "--":
                raise Unreadable(f"--flagfile={path}: line {number} is no flag")
            if is_meant:
                found.append(line)
        else:
            # The lines below are for programs that match these patterns.
            is_meant = any(fnmatch.fnmatch(program, pattern) for pattern in line.split())
    return found


def config(path: str) -> Iterator[tuple[str, str]]:
    """Yields the names and values of a configuration file."""
    text = _read("--config_path", path)
    if path.lower().endswith(".json") or text.lstrip().startswith("{"):
        return _json(path, text)
    return _yaml(path, text)


def _read(flag: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{flag}={path}: {error}") from error


def _json(path: str, text: str) -> Iterator[tuple[str, str]]:
    try:
        said = json.loads(text)
    except ValueError as error:
        raise Unreadable(f"--config_path={path}: {error}") from error
    if not isinstance(said, dict):
        raise Unreadable(f"--config_path={path} holds no object")
    for name, value in said.items():
        if isinstance(value, dict | list):
            raise Unreadable(f"--config_path={path}: {name} is neither text nor a number nor a bool")
        if value is not None:
            yield name, value if isinstance(value, str) else json.dumps(value)


def _yaml(path: str, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        line = line.rstrip()
        if not line or line.lstrip().startswith("#") or line in ("---", "..."):
            continue
        name, colon, behind = line.partition(":")
        value = _scalar(behind.strip()) if behind[:1] in ("", " ", "\t") else None
        if not colon or value is None or not _NAME.fullmatch(name.rstrip()):
            raise Unreadable(f"--config_path={path}: line {number} is not `name: value`")
        if value not in ("", "~", "null") or behind.lstrip()[:1] in ("'", '"'):
            yield name.rstrip(), value


def _scalar(text: str) -> str | None:
    """Returns a value, quoted or not, without a trailing comment. `None` for an invalid value."""
    if text.startswith("'"):
        match = _SINGLE.fullmatch(text)
        value, behind = (match[1].replace("''", "'"), match[2]) if match else ("", text)
    elif text.startswith('"'):
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except ValueError:
            return None
        behind = text[end:]
    else:
        value = "" if text.startswith("#") else text.partition(" #")[0].rstrip()
        return None if value[:1] and value[0] in "[]{}&*!|>%@`" else value
    return value if not behind.strip() or behind.lstrip().startswith("#") else None
