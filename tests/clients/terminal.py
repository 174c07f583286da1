"""A command on a terminal of its own: a real process behind a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from types import TracebackType
from typing import Any, Self

DEADLINE = 90.0
"""Seconds; the machine may be busy."""

SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")

COMMAND = [sys.executable, "-m", "rlcore.cli"]


class Terminal:
    """``with Terminal("chat", "--url", url) as terminal: terminal.send("hello\\r")``."""

    def __init__(self, *words: str, columns: int = 80, rows: int = 24, **env: str) -> None:
        self.words = [*COMMAND, *words]
        self.size = (rows, columns)
        self.env = {
            k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")
        }
        self.env |= {"TERM": "xterm-256color", **env}
        self.raw = ""

    def __enter__(self) -> Self:
        self.master, self.slave = os.openpty()
        termios.tcsetwinsize(self.slave, self.size)
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            self.words,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=self.env,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self.master)
        os.close(self.slave)

    @property
    def settings(self) -> list[Any]:
        return termios.tcgetattr(self.slave)

    @property
    def text(self) -> str:
        """All that was written, without the sequences that move and colour it."""
        return SEQUENCE.sub("", self.raw)

    def send(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        termios.tcsetwinsize(self.slave, (rows, columns))

    def wait_for(self, pattern: str, after: int = 0) -> int:
        """Read until the text holds the pattern after that place; where the match ends."""
        deadline = time.monotonic() + DEADLINE
        while (found := re.search(pattern, self.text[after:])) is None:
            self._read(deadline, f"{pattern!r} did not come; there is:\n{self.text[-3000:]}")
        return after + found.end()

    def wait_end(self) -> int:
        """Read until the command has ended; its exit code."""
        deadline = time.monotonic() + DEADLINE
        while (code := self.process.poll()) is None:
            self._read(deadline, f"it does not end; there is:\n{self.text[-3000:]}")
        while self._ready(0.1):
            self.raw += os.read(self.master, 65536).decode(errors="replace")
        return code

    def _read(self, deadline: float, otherwise: str) -> None:
        assert time.monotonic() < deadline, otherwise
        if self._ready(0.1):
            self.raw += os.read(self.master, 65536).decode(errors="replace")

    def _ready(self, seconds: float) -> bool:
        return bool(select.select([self.master], [], [], seconds)[0])


def _take_terminal() -> None:
    """Ctrl-C reaches the process, also where the tests run in the background and ignore it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
