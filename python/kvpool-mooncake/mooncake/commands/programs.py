"""Finding kvpool's own commands, and running one as a child."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# SIGHUP ends the original's commands, and no daemon of kvpool.
_SENT_FOR: dict[int, int] = {signal.SIGHUP: signal.SIGTERM}


class NotFound(Exception):
    """A command of kvpool is neither beside the interpreter nor on the path."""


def find(command: str) -> str:
    """Returns the path of a command: beside the interpreter, where the wheel puts it, or on the path."""
    beside = Path(sys.executable).parent / command
    if os.access(beside, os.X_OK):
        return str(beside)
    on_path = shutil.which(command)
    if on_path is None:
        raise NotFound(f"{command} is neither beside {sys.executable} nor on PATH")
    return on_path


class Child:
    """A command as a child of this process. It gets this process's signals, and does not outlive it.

    A SIGHUP ends the child, unless this process was started without it, as by nohup.

    Make it on the main thread, before the process has other threads.
    """

    def __init__(self, program: str, args: Sequence[str]):
        self._early: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        for number in _PASSED_ON:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        parent = os.getpid()
        libc = ctypes.CDLL(None, use_errno=True)

        def die_with_parent() -> None:
            # The kernel sends this signal, so it works after kill -9 too. The parent may have died before this
            # call.
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        self._process = subprocess.Popen([program, *args], preexec_fn=die_with_parent)
        for early in self._early:
            self._process.send_signal(early)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        number = _SENT_FOR.get(number, number)
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)

    def wait(self) -> int:
        """Waits for the end of the command. Returns its exit code, or 128 plus the number of the signal that
        ended it."""
        assert self._process, "invariant: set when the child was made"
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def kill(self) -> None:
        """Kills the command at once, and waits for its end."""
        assert self._process, "invariant: set when the child was made"
        self._process.kill()
        self._process.wait()
