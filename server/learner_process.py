"""The embedded learner: a child process, restarted when it dies, stopped with the server."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import Any

from rlcore.log import get_logger

log = get_logger("server")

FIRST_RESTART = 1.0
LONGEST_RESTART = 30.0
"""Seconds between a learner's death and its restart; doubles with each early death."""

STABLE_AFTER = 60.0
"""A learner that lived this long starts again with the first delay."""

STOP_DEADLINE = 20.0
"""Seconds it is given to write its checkpoint before it is killed."""


class LearnerProcess:
    def __init__(self, arguments: list[str]) -> None:
        self._command = [sys.executable, "-P", "-m", "rlcore.cli", "learn", *arguments]
        self._process: asyncio.subprocess.Process | None = None
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process else None

    async def run(self) -> None:
        """Keep a learner running; cancel to stop it."""
        loop = asyncio.get_running_loop()
        delay = FIRST_RESTART
        try:
            while True:
                started = loop.time()
                why = await self._once()
                if loop.time() - started > STABLE_AFTER:
                    delay = FIRST_RESTART
                log.warning("the learner ended; serving goes on", **why, restart_in_s=delay)
                await asyncio.sleep(delay)
                delay = min(LONGEST_RESTART, delay * 2)
                self.restarts += 1
        finally:
            await self._stop()

    async def _once(self) -> dict[str, Any]:
        """From its start to its end, and why that came."""
        try:
            # A group of its own: Ctrl-C in a terminal is the server's to pass on, when it has drained.
            self._process = await asyncio.create_subprocess_exec(*self._command, process_group=0)
        except OSError as error:  # no memory or no process left for it just now
            return {"reason": f"it could not be started: {error.strerror}"}
        return {"exit_code": await self._process.wait()}

    def kill(self) -> None:
        """At once: nothing is written any more."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_DEADLINE):
                await process.wait()
        except TimeoutError:
            log.warning("the learner did not stop in time and is killed", pid=process.pid)
            self.kill()
            await process.wait()
