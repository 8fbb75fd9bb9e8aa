"""Command lines in the original's forms.

The forms are `-flag value`, `--flag value`, `-flag=value` and `--flag=value`. A bool also has `--flag`,
`--noflag` and `--flag=false`. The last of several values wins. `--flagfile`, `--fromenv`, `--tryfromenv` and
`--undefok` work as in the original, and so does `--config_path` if the command has it. Arguments after a bare
`--` are passed on unchanged.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from mooncake.commands import sources
from mooncake.commands.sources import Unreadable

_TRUE = {"true", "t", "yes", "y", "1"}
_FALSE = {"false", "f", "no", "n", "0"}
_HELP = {"h", "help", "helpfull", "helpshort", "helppackage", "helpxml", "helpon", "helpmatch"}
_WHOLE = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|[0-9]+)")
# The least and the greatest value of each kind of flag.
_RANGES = {
    "int32": (-(1 << 31), (1 << 31) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
    "uint32": (0, (1 << 32) - 1),
    "uint64": (0, (1 << 64) - 1),
}
# The depth limit ends a flag file that names itself.
_DEEPEST = 8

Value = str | int | float | bool


class UsageError(Exception):
    """An invalid command line; the message names the flag."""


@dataclass(frozen=True)
class Flag:
    """A flag of the original."""

    name: str
    kind: str
    """`string`, `bool`, `double`, `int32`, `int64`, `uint32` or `uint64`."""
    default: Value
    """The default value."""
    help: str
    ignored: str = ""
    """The reason why the flag has no effect; empty if it has an effect."""


@dataclass(frozen=True)
class CommandLine:
    """The parsed command line."""

    values: Mapping[str, Value]
    """Every flag's value, given or default."""
    given: frozenset[str]
    """The flags that were given."""
    rest: tuple[str, ...]
    """The arguments after `--`."""
    unknown: tuple[str, ...] = ()
    """Unknown names in the configuration file or in `--undefok`."""

    def text(self, name: str) -> str:
        """Returns a flag's value as text."""
        return str(self.values[name])

    def number(self, name: str) -> int:
        """Returns the value of an integer flag."""
        value = self.values[name]
        assert isinstance(value, int), f"invariant: {name} was declared as a number"
        return value

    def port(self, name: str) -> int:
        """Returns the value of a port flag. Raises UsageError for an invalid port."""
        value = self.number(name)
        if not 0 <= value < 65536:
            raise UsageError(f"--{name}={value} is no port")
        return value

    def is_on(self, name: str) -> bool:
        """Returns whether a bool flag is set."""
        return self.values[name] is True

    def passes_on(self, flag: str) -> bool:
        """Whether the arguments after `--` give this flag."""
        return any(arg == flag or arg.startswith(f"{flag}=") for arg in self.rest)


class _Reader:
    """Parses the words of a command line."""

    def __init__(self, flags: Sequence[Flag], program: str):
        self.known = {flag.name: flag for flag in flags}
        self.values: dict[str, Value] = {flag.name: flag.default for flag in flags}
        self.given: set[str] = set()
        self.rest: tuple[str, ...] = ()
        self.unknown: list[str] = []
        self._may_be_unknown: set[str] = set()
        self._program = program

    def read(self, args: Sequence[str], depth: int = 0) -> None:
        """Parses words. Raises UsageError."""
        waiting = list(args)
        for name in _values_of("undefok", waiting):
            self._may_be_unknown |= {each.replace("-", "_") for each in name.split(",")}
        while waiting:
            arg = waiting.pop(0)
            if arg == "--":
                self.rest = tuple(waiting)
                return
            if not arg.startswith("-") or arg.strip("-") == "":
                raise UsageError(f"{arg!r} is no flag")
            name, has_value, text = arg.lstrip("-").partition("=")
            name = name.replace("-", "_")
            if name in ("flagfile", "fromenv", "tryfromenv", "undefok"):
                text = text if has_value else self._next(name, waiting)
                self._indirect(name, text, depth)
                continue
            flag = self._flag(name, is_bare=not has_value)
            if flag is None:
                # A value of an unknown flag looks like a stray word, so the flag counts as a flag without a
                # value, as in gflags.
                self.unknown.append(name)
                continue
            if flag.name != name:
                self._set(flag, "false")
                continue
            if not has_value and flag.kind == "bool":
                # The word after a bool flag is its value only if the word is a bool.
                text = waiting.pop(0) if waiting and waiting[0].lower() in _TRUE | _FALSE else "true"
            elif not has_value:
                text = self._next(name, waiting)
            self._set(flag, text)

    def configure(self, path: str) -> None:
        """Applies a configuration file to the flags that the command line did not give."""
        on_the_line = frozenset(self.given)
        for name, text in sources.config(path):
            flag = self.known.get(name)
            if flag is None:
                self.unknown.append(name)
            elif name not in on_the_line:
                self._set(flag, text)

    def _indirect(self, name: str, text: str, depth: int) -> None:
        if name == "flagfile":
            if depth == _DEEPEST:
                raise UsageError(f"--flagfile={text}: {_DEEPEST} files name each other")
            for path in filter(None, text.split(",")):
                self.read(sources.flagfile(path, self._program), depth + 1)
        elif name != "undefok":
            for each in filter(None, text.split(",")):
                value = os.environ.get(f"FLAGS_{each}")
                if value is not None:
                    self.read([f"--{each}={value}"], _DEEPEST)
                elif name == "fromenv":
                    raise UsageError(f"--fromenv={each}: the variable FLAGS_{each} is not set")

    def _next(self, name: str, waiting: list[str]) -> str:
        if not waiting:
            raise UsageError(f"--{name} needs a value")
        return waiting.pop(0)

    def _flag(self, name: str, is_bare: bool) -> Flag | None:
        """Returns the flag of a name, or the bool flag of `no` and a name. `None` for an unknown flag that is
        allowed."""
        flag = self.known.get(name)
        if flag is None and is_bare and name.startswith("no"):
            negated = self.known.get(name.removeprefix("no"))
            if negated is not None and negated.kind == "bool":
                return negated
        if flag is None and name not in self._may_be_unknown:
            near = difflib.get_close_matches(name, self.known, n=1, cutoff=0.7)
            hint = f"; is --{near[0]} meant?" if near else ""
            raise UsageError(f"unknown flag --{name}{hint}")
        return flag

    def _set(self, flag: Flag, text: str) -> None:
        self.values[flag.name] = _typed(flag, text)
        self.given.add(flag.name)


def parse(flags: Sequence[Flag], args: Sequence[str], program: str = "") -> CommandLine:
    """Parses a command line. Raises UsageError for an unknown flag or a value of the wrong type."""
    reader = _Reader(flags, program)
    try:
        reader.read(args)
        path = reader.values.get("config_path")
        if path:
            reader.configure(str(path))
    except Unreadable as error:
        raise UsageError(str(error)) from error
    return CommandLine(
        reader.values, frozenset(reader.given), reader.rest, tuple(dict.fromkeys(reader.unknown))
    )


def _values_of(name: str, args: Sequence[str]) -> list[str]:
    """Returns all values of one flag in the words."""
    found = []
    for at, arg in enumerate(args):
        if arg == "--":
            break
        bare, has_value, text = arg.lstrip("-").partition("=")
        if arg.startswith("-") and bare == name:
            found.append(text if has_value else "".join(args[at + 1 : at + 2]))
    return found


def _typed(flag: Flag, text: str) -> Value:
    said = f"--{flag.name}={text}"
    if flag.kind == "bool":
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise UsageError(f"{said} is neither true nor false")
    if flag.kind == "string":
        return text
    if flag.kind == "double":
        try:
            return float(text)
        except ValueError:
            raise UsageError(f"{said} is no number") from None
    if not _WHOLE.fullmatch(text.strip()):
        raise UsageError(f"{said} is no whole number")
    value = int(text, 16 if "x" in text.lower() else 10)
    least, most = _RANGES[flag.kind]
    if not least <= value <= most:
        raise UsageError(f"{said} is not between {least} and {most}")
    return value


def run(
    program: str,
    about: str,
    flags: Sequence[Flag],
    main: Callable[[CommandLine, logging.Logger], int],
    args: Sequence[str] | None = None,
) -> int:
    """Runs a command with its command line. Returns its exit code: 2 for an invalid command line."""
    args = sys.argv[1:] if args is None else args
    asked = {arg.lstrip("-").partition("=")[0] for arg in _before_rest(args) if arg.startswith("-")}
    if asked & _HELP:
        print(f"{program}: {about}\n")
        for flag in flags:
            note = f"no effect: {flag.ignored}" if flag.ignored else flag.help
            print(f"  --{flag.name} ({flag.kind}, default {flag.default!r})\n      {note}")
        return 0
    if "version" in asked:
        print(f"{program} of kvpool-mooncake {metadata.version('kvpool-mooncake')}")
        return 0
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    log = logging.getLogger(program)
    try:
        line = parse(flags, args, program)
        for flag in flags:
            if flag.ignored and flag.name in line.given:
                log.warning("--%s has no effect: %s", flag.name, flag.ignored)
        for name in line.unknown:
            log.warning("%s has no effect: %s has no such flag", name, program)
        return main(line, log)
    except UsageError as error:
        log.error("%s (see %s --help)", error, program)
        return 2


def _before_rest(args: Sequence[str]) -> Sequence[str]:
    return args[: args.index("--")] if "--" in args else args
