"""Runs a program that a model wrote, with tests, where it can do no harm.

On Linux with user namespaces (or as root) the program is cut off from files, network and processes by
the kernel; see sandbox_launcher.py. Where that cannot be had, for example in a container that
forbids it, nothing is run unless the weak sandbox was asked for by name.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import IO

import msgspec

from rlcore.errors import UsageError
from rlcore.log import get_logger

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
RUNNER = Path(__file__).with_name("sandbox_runner.py")

NO_SANDBOX = 120
"""The launcher's exit status where it cannot build the sandbox."""

SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
"""What an interpreter is linked against, beside its own folder."""

PROBE_SECONDS = 30.0
"""For the empty program that shows whether the sandbox works; a busy machine may take its time."""

KILL_SECONDS = 10.0
"""A killed launcher is waited for this long; the kernel then still holds what it left."""

log = get_logger("sandbox")


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a program may use. Memory is per process: all of them together may take ``processes``
    times as much."""

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    file_bytes: int = 8 << 20
    disk_bytes: int = 16 << 20
    """Of the working folder, which lies in memory."""
    processes: int = 16
    open_files: int = 64
    output_bytes: int = 256 << 10

    def resources(self) -> dict[str, int]:
        return {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }


class Outcome(msgspec.Struct, frozen=True):
    """``reason``: ``passed``; ``tests_failed``; ``exception``, ``memory`` or ``exit`` (the program
    ended before its tests, ``exit`` without saying why); ``timeout``; ``cpu``; ``output`` (more than
    allowed)."""

    reason: str
    passed: int
    detail: str = ""
    """The exception's name, or the signal's."""


class Sandbox:
    """Raises UsageError where the strong sandbox cannot be had and the weak one was not asked for."""

    def __init__(self, limits: Limits | None = None, allow_weak: bool = False) -> None:
        self.limits = limits or Limits()
        problem = problem_with(strong=True)
        self.strong = problem is None
        if problem is None:
            return
        if not allow_weak:
            raise UsageError(
                f"no sandbox for programs that a model writes: {problem}; allow user namespaces, or "
                "set allow_weak_sandbox = true to run them behind limits that can be got around"
            )
        worse = problem_with(strong=False)
        if worse is not None:
            raise UsageError(f"not even the weak sandbox works: {worse}")
        log.warning(
            "weak sandbox: a program that means to can reach files and the network", problem=problem
        )

    def run(self, program: str, tests: list[str]) -> Outcome:
        """Runs the program, then each test in its namespace; returns within ``wall_s`` and a little."""
        mark = secrets.token_hex(16)
        told = {"program": program, "tests": tests, "mark": mark, "guard": not self.strong}
        command = [_python(), "-I", "-S", "-c", RUNNER.read_text()]
        with tempfile.TemporaryFile() as stdin:
            stdin.write(msgspec.json.encode(told))
            stdin.seek(0)
            output, status, stopped = _launch(command, stdin, self.limits, self.strong)
        lines = [
            line.split() for line in output.decode(errors="replace").splitlines() if mark in line
        ]
        results = [words[1:] for words in lines if words[0] == mark]
        return _outcome(results, len(tests), status, stopped)


@cache
def problem_with(strong: bool) -> str | None:
    """Why the strong or the weak sandbox cannot be had, by trying it; None if it can."""
    if sys.platform != "linux":
        return "its means are Linux's"
    command = [_python(), "-I", "-S", "-c", "print(6 * 7)"]
    with open(os.devnull, "rb") as stdin:
        output, status, stopped = _launch(command, stdin, Limits(wall_s=PROBE_SECONDS), strong)
    if status == 0 and output == b"42\n":
        return None
    return stopped or output.decode(errors="replace").strip() or f"exit status {status}"


def _python() -> str:
    """The interpreter itself: a virtual environment's link would lead out of the tree."""
    return os.path.realpath(sys.executable)


def _visible() -> list[str]:
    """The folders an interpreter needs, none inside another."""
    wanted = {os.path.realpath(sys.base_prefix), str(Path(_python()).parent), *SYSTEM_LIBRARIES}
    there = sorted(path for path in wanted if os.path.isdir(path))
    return [path for path in there if not any(path.startswith(f"{o}/") for o in there if o != path)]


def _launch(
    command: list[str], stdin: IO[bytes], limits: Limits, strong: bool
) -> tuple[bytes, int, str]:
    """Output, exit status, and why it was stopped (``timeout``, ``output``) or nothing."""
    with tempfile.TemporaryDirectory(prefix="sandbox-") as root:
        told = {
            "parent": os.getpid(),
            "strong": strong,
            "root": root,
            "visible": _visible(),
            "disk_bytes": limits.disk_bytes,
            "command": command,
            "environment": {
                "LD_LIBRARY_PATH": f"{os.path.realpath(sys.base_prefix)}/lib",
                "LANG": "C.UTF-8",
            },
            "limits": limits.resources(),
        }
        process = subprocess.Popen(
            [_python(), "-I", "-S", str(LAUNCHER), msgspec.json.encode(told).decode()],
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, env={"LANG": "C.UTF-8"},
        )  # fmt: skip
        try:
            output, stopped = _read(process, limits)
        finally:
            _end(process, strong)
        return output, process.returncode, stopped


def _read(process: subprocess.Popen[bytes], limits: Limits) -> tuple[bytes, str]:
    deadline = time.monotonic() + limits.wall_s
    assert process.stdout is not None
    output = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                break
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                try:
                    process.wait(max(deadline - time.monotonic(), 0.0))
                except subprocess.TimeoutExpired:
                    break
                return bytes(output), ""
            output += piece
            if len(output) > limits.output_bytes:
                return bytes(output[: limits.output_bytes]), "output"
    return bytes(output), "timeout"


def _end(process: subprocess.Popen[bytes], strong: bool) -> None:
    """Ends the launcher and all that it started, if they still run."""
    if process.poll() is None and not strong:
        process.terminate()  # it kills what has left the process group
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("a sandboxed program was slow to end", deadline_s=KILL_SECONDS)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(KILL_SECONDS)
    if process.stdout is not None:
        process.stdout.close()


def _outcome(results: list[list[str]], tests: int, status: int, stopped: str) -> Outcome:
    """``results``: the words of the runner's lines, ``program WHAT`` or ``test NUMBER WHAT``."""
    passed = sum(words[0] == "test" and words[2] == "passed" for words in results)
    failed = [words[-1] for words in results if words[-1] != "passed"]
    detail = failed[0] if failed else ""
    if stopped:
        return Outcome(stopped, passed)
    if status == 128 + signal.SIGXCPU:
        return Outcome("cpu", passed)
    if len(results) == tests + 1 and passed == tests:
        return Outcome("passed", passed)
    if detail == "MemoryError":
        return Outcome("memory", passed, detail)
    if len(results) == tests + 1:
        return Outcome("tests_failed", passed, detail)
    if detail not in ("", "SystemExit"):
        return Outcome("exception", passed, detail)
    return Outcome("exit", passed, detail or _signal_name(status))


def _signal_name(status: int) -> str:
    numbers = {128 + number.value: number.name for number in signal.Signals}
    return numbers.get(status, f"exit status {status}")
