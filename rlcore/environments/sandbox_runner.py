"""Runs a program and its tests inside the sandbox; started with ``python -I -S``.

Standard input is JSON: ``program``, ``tests`` (Python sources), ``mark`` (a random word), and ``guard``
(whether to add the weak sandbox's audit hook). A result line starts with the mark, which the program
does not know: printing a lucky line, or leaving early, passes nothing. A program that searches the
interpreter for the mark can forge results; the sandbox keeps programs from the machine, not from the
tests they run beside.
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

REFUSED = (
    "socket.", "subprocess.", "ctypes.", "shutil.", "os.system", "os.fork", "os.exec", "os.spawn",
    "os.posix_spawn", "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link",
    "os.symlink", "os.chmod", "os.chown", "os.truncate",
)  # fmt: skip
"""Audit events, by prefix, that the weak sandbox answers with PermissionError."""


def guard(event: str, arguments: tuple[Any, ...]) -> None:
    """Holds back honest mistakes. Whoever wants to get around an audit hook can."""
    if event.startswith(REFUSED):
        raise PermissionError(f"{event} is refused in the sandbox")
    if event == "open":
        path, _, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        inside = isinstance(path, str) and os.path.realpath(path).startswith(os.getcwd() + "/")
        if writes and not inside:
            raise PermissionError(f"writing {path!r} is refused in the sandbox")


def report(mark: str, *words: str) -> None:
    """One line, whatever the program has done to ``sys.stdout``."""
    os.write(1, ("\n" + " ".join((mark, *words)) + "\n").encode())


def run(source: str, name: str, namespace: dict[str, Any]) -> str:
    """``passed``, or the name of the exception."""
    try:
        exec(compile(source, name, "exec"), namespace)
    except BaseException as error:  # SystemExit too: a program that leaves early has passed nothing
        return type(error).__name__
    return "passed"


def main() -> None:
    told = json.load(sys.stdin)
    mark, tests = told["mark"], told["tests"]
    sys.stdin = io.StringIO()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    leader = os.getpid()
    if told["guard"]:
        sys.addaudithook(guard)
    outcome = run(told["program"], "program.py", namespace)
    if os.getpid() != leader:
        os._exit(0)  # a fork of the program's that came back here
    report(mark, "program", outcome)
    if outcome != "passed":
        os._exit(1)
    for number, test in enumerate(tests):
        outcome = run(test, f"test {number}", namespace)
        if os.getpid() != leader:
            os._exit(0)
        report(mark, "test", str(number), outcome)
    os._exit(0)  # no exit handlers, no waiting for threads


if __name__ == "__main__":
    main()
