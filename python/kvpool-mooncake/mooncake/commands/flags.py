"""Command lines as the original's commands take them.

`-flag value`, `--flag value`, `-flag=value`, `--flag=value`; a bool also as `--flag`, `--noflag` and
`--flag=false`. What follows a bare `--` is passed on as it is.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_TRUE = {"true", "t", "yes", "y", "1"}
_FALSE = {"false", "f", "no", "n", "0"}

Value = str | int | float | bool


class UsageError(Exception):
    """The command line cannot be understood; the message names the flag."""


@dataclass(frozen=True)
class Flag:
    """A flag that the original documents."""

    name: str
    default: Value
    """What it is when it is not given; its type is the flag's."""
    help: str
    ignored: str = ""
    """Why it means nothing here; empty when it does."""


@dataclass(frozen=True)
class CommandLine:
    """What a command line says."""

    values: Mapping[str, Value]
    """Every flag's value, given or default."""
    given: frozenset[str]
    """The flags that were given."""
    rest: tuple[str, ...]
    """What stood behind `--`."""

    def text(self, name: str) -> str:
        """A flag's value as text."""
        return str(self.values[name])

    def number(self, name: str) -> int:
        """The value of a flag that is a number."""
        value = self.values[name]
        assert isinstance(value, int), f"invariant: {name} was declared as a number"
        return value

    def port(self, name: str) -> int:
        """The value of a flag that is a port. Raises UsageError when it is none."""
        value = self.number(name)
        if not 0 <= value < 65536:
            raise UsageError(f"--{name}={value} is no port")
        return value

    def is_on(self, name: str) -> bool:
        """Whether a bool is set."""
        return self.values[name] is True

    def passes_on(self, flag: str) -> bool:
        """Whether what stood behind `--` gives this flag."""
        return any(arg == flag or arg.startswith(f"{flag}=") for arg in self.rest)


def parse(flags: Sequence[Flag], args: Sequence[str]) -> CommandLine:
    """Reads a command line. Raises UsageError for what is not among the flags or not of their types."""
    known = {flag.name: flag for flag in flags}
    values: dict[str, Value] = {flag.name: flag.default for flag in flags}
    given: set[str] = set()
    waiting = list(args)
    while waiting:
        arg = waiting.pop(0)
        if arg == "--":
            return CommandLine(values, frozenset(given), tuple(waiting))
        if not arg.startswith("-") or arg.strip("-") == "":
            raise UsageError(f"{arg!r} is no flag")
        name, has_value, text = arg.lstrip("-").partition("=")
        name = name.replace("-", "_")
        flag = known.get(name)
        if flag is None and name.startswith("no") and not has_value:
            negated = known.get(name.removeprefix("no"))
            if negated is not None and isinstance(negated.default, bool):
                values[negated.name] = False
                given.add(negated.name)
                continue
        if flag is None:
            raise UsageError(f"unknown flag --{name}")
        if not has_value and isinstance(flag.default, bool):
            # A word behind it is its value only if it can be one.
            text = waiting.pop(0) if waiting and waiting[0].lower() in _TRUE | _FALSE else "true"
        elif not has_value:
            if not waiting:
                raise UsageError(f"--{name} needs a value")
            text = waiting.pop(0)
        values[name] = _typed(flag, text)
        given.add(name)
    return CommandLine(values, frozenset(given), ())


def _typed(flag: Flag, text: str) -> Value:
    if isinstance(flag.default, bool):
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise UsageError(f"--{flag.name}={text} is neither true nor false")
    if isinstance(flag.default, str):
        return text
    try:
        return type(flag.default)(text)
    except ValueError:
        kind = "whole number" if isinstance(flag.default, int) else "number"
        raise UsageError(f"--{flag.name}={text} is no {kind}") from None


def run(
    program: str,
    about: str,
    flags: Sequence[Flag],
    main: Callable[[CommandLine, logging.Logger], int],
    args: Sequence[str] | None = None,
) -> int:
    """Runs a command with its command line; its exit code, 2 for a command line that is wrong."""
    args = sys.argv[1:] if args is None else args
    if any(arg in ("-h", "-help", "--help") for arg in _before_rest(args)):
        print(f"{program}: {about}\n")
        for flag in flags:
            note = f"ignored: {flag.ignored}" if flag.ignored else flag.help
            print(f"  --{flag.name} (default {flag.default!r})\n      {note}")
        return 0
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    log = logging.getLogger(program)
    try:
        line = parse(flags, args)
        for flag in flags:
            if flag.ignored and flag.name in line.given:
                log.warning("--%s is ignored: %s", flag.name, flag.ignored)
        return main(line, log)
    except UsageError as error:
        log.error("%s (see %s --help)", error, program)
        return 2


def _before_rest(args: Sequence[str]) -> Sequence[str]:
    return args[: args.index("--")] if "--" in args else args
