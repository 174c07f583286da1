"""A Paceline server as a child process: started, waited for, ended, started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from rlcore.generator.base import GeneratorError
from rlcore.log import get_logger

log = get_logger("rl")

START_DEADLINE = 900.0
"""Seconds for the engine to come up; a large model takes minutes."""

STOP_DEADLINE = 60.0

TAIL = 12
"""Lines of the server's log that are shown when it fails."""


class ChildServer:
    """``paceline serve`` with these flags, on a free loopback port, logging into a file."""

    def __init__(self, flags: Sequence[str], log_file: Path, env: Mapping[str, str]) -> None:
        self._flags = list(flags)
        self.log_file = log_file
        self._env = dict(env)
        self._process: asyncio.subprocess.Process | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Until it serves; raises GeneratorError and leaves nothing running."""
        self.port = _free_port()
        command = [
            sys.executable, "-P", "-m", "rlcore.cli", "serve",
            "--port", str(self.port),
            "--parent-pid", str(os.getpid()),
        ]  # fmt: skip
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_file, "ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                *self._flags,
                stdout=output,
                stderr=output,
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self._env},
                process_group=0,
            )
        try:
            async with asyncio.timeout(START_DEADLINE):
                await self._until_it_serves()
        except TimeoutError:
            await self.stop()
            raise GeneratorError(
                f"the server did not come up within {START_DEADLINE:.0f} s; its log: {self.log_file}"
            ) from None
        except BaseException:
            await self.stop()
            raise

    async def _until_it_serves(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0) as client:
            while True:
                if not self.alive:
                    raise GeneratorError(f"the server did not start; its log ends:\n{self._tail()}")
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.3)

    async def stop(self) -> None:
        """End it and everything it started, also when it was killed itself."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None:
                os.kill(process.pid, signal.SIGTERM)  # send_signal would reap one that is dead
        try:
            async with asyncio.timeout(STOP_DEADLINE):
                await process.wait()
        except TimeoutError:
            log.warning("the server did not stop in time and is killed", pid=process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        self._process = None  # its number may be another's from now on

    def _tail(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
