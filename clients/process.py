"""Runs ``paceline serve`` as a real process: for end-to-end tests and benchmarks.

The process gets its own session, a free port and its own home folder. Whatever happens, nothing of
it is left when ``stop`` returns.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

TAIL_LINES = 40


class ServerFailed(RuntimeError):
    """The server did not come up, or ended by itself; the message holds the end of its log."""

    def __init__(self, message: str, returncode: int | None, tail: str) -> None:
        super().__init__(f"{message}\n--- end of its log ---\n{tail}")
        self.returncode = returncode
        self.tail = tail


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def console_script() -> Path:
    """The ``paceline`` command of the running interpreter's environment."""
    script = Path(sys.executable).with_name("paceline")
    if not script.exists():
        raise FileNotFoundError(f"{script} is missing; install the project into this environment")
    return script


class ServerProcess:
    """``with ServerProcess(home, ["--learner", "off"]) as server: ... server.url ...``

    ``flags`` go to ``paceline serve`` as they are. The log is ``<home>.log`` beside the home folder
    unless ``log`` names another file; it is appended to, so a restarted server keeps its story.
    """

    ready_path = "/ready"
    """Answers 200 once requests are served."""

    def __init__(
        self,
        home: Path,
        flags: Sequence[str] = (),
        *,
        port: int | None = None,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        api_key: str | None = None,
        command: Sequence[str] | None = None,
        start_deadline_s: float = 600.0,
        stop_deadline_s: float = 60.0,
    ) -> None:
        self.home = home
        self.flags = list(flags)
        self.port = port if port is not None else free_port()
        self.log = log if log is not None else home.with_name(home.name + ".log")
        self.start_seconds: float | None = None
        self._env = dict(env or {})
        self._cwd = cwd
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._command = list(command) if command is not None else None
        self._start_deadline = start_deadline_s
        self._stop_deadline = stop_deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def command(self) -> list[str]:
        """The whole command line."""
        return [*(self._command or [str(console_script()), "serve"]), *self.arguments()]

    def arguments(self) -> list[str]:
        """What follows the command itself; a server of another kind has other ones."""
        return ["--home", str(self.home), "--port", str(self.port), *self.flags]

    def start(self) -> Self:
        """Start it and wait until it serves; raises ServerFailed and leaves nothing running."""
        if self.alive:
            raise RuntimeError("the server is already running")
        self.home.parent.mkdir(parents=True, exist_ok=True)
        command = self.command()
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "PACELINE_HOME": str(self.home), **self._env}
        begun = time.monotonic()
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=self._cwd,
                start_new_session=True,
            )
        try:
            self._wait_healthy(begun + self._start_deadline)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - begun
        return self

    def stop(self) -> int | None:
        """SIGTERM to the server, which stops its children; what is left by the deadline is killed.

        Returns the exit code; None when it was never started.
        """
        process = self._process
        if process is None:
            return None
        self._note_family()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(self._stop_deadline)
            except subprocess.TimeoutExpired:
                self._note_family()
        self._kill_leftovers()
        code = process.wait(10)
        self._process = None
        return code

    def kill(self) -> None:
        """SIGKILL, everything at once: the power cut of the fault tests."""
        self._note_family()
        self._kill_leftovers()
        if self._process is not None:
            self._process.wait(10)
            self._process = None

    def children(self) -> list[psutil.Process]:
        """All processes below the server."""
        return psutil.Process(self.pid).children(recursive=True)

    def cpu_seconds(self) -> float:
        """Processor time that the server and its children have used so far."""
        total = 0.0
        for process in (psutil.Process(self.pid), *self.children()):
            try:
                used = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += used.user + used.system
        return total

    def learner(self) -> psutil.Process | None:
        """The embedded learner; None while there is none (it is restarted when it dies)."""
        for process in self.children():
            with suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                if "rlcore.cli" in words and "learn" in words:
                    return process
        return None

    def get(self, path: str, *, timeout: float = 30.0) -> httpx.Response:
        with self._client(timeout) as client:
            return client.get(path)

    def post(self, path: str, json: Any = None, *, timeout: float = 120.0) -> httpx.Response:
        with self._client(timeout) as client:
            return client.post(path, json=json)

    def status(self) -> dict[str, Any]:
        response = self.get("/v1/paceline/status")
        response.raise_for_status()
        body: dict[str, Any] = response.json()
        return body

    def drafts(self) -> list[dict[str, Any]]:
        """All draft versions that the server has, as ``GET /v1/paceline/drafts`` lists them."""
        response = self.get("/v1/paceline/drafts")
        response.raise_for_status()
        body: list[dict[str, Any]] = response.json()["drafts"]
        return body

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of the log."""
        try:
            text = self.log.read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _client(self, timeout: float) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers=self._headers, timeout=timeout, trust_env=False
        )

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process

    def _wait_healthy(self, deadline: float) -> None:
        process = self._running()
        with self._client(5.0) as client:
            while True:
                code = process.poll()
                if code is not None:
                    raise ServerFailed(f"the server ended with exit code {code}", code, self.tail())
                try:
                    if client.get(self.ready_path).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass  # not listening yet; the deadline below bounds the wait
                if time.monotonic() > deadline:
                    waited = f"not ready on {self.ready_path} within {self._start_deadline:.0f} s"
                    raise ServerFailed(waited, None, self.tail())
                time.sleep(0.2)

    def _note_family(self) -> None:
        """Remember who belongs to the server, before its end makes orphans of them."""
        if self._process is None:
            return
        try:
            leader = psutil.Process(self._process.pid)
            found = [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        self._family = list({*self._family, *found})

    def _kill_leftovers(self) -> None:
        """Everything of the server's process group, and descendants that left the group."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # the whole group has ended already
                os.killpg(self._process.pid, signal.SIGKILL)
        for process in self._family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        leader = None if self._process is None else self._process.pid  # reaped by Popen, not here
        psutil.wait_procs([p for p in self._family if p.pid != leader], timeout=10)
        self._family = []
