"""A worker process as its host sees it: calls with a deadline, and a successor when it is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TypeVar

import msgspec

from rlcore.environments import frames
from rlcore.environments.base import NonFiniteReward
from rlcore.errors import PacelineError, UsageError
from rlcore.log import get_logger

START_DEADLINE_S = 120.0
"""Imports and reading a data set, at low priority beside a server that computes."""

KILL_DEADLINE_S = 10.0
"""A killed process is gone at once, unless the kernel itself waits for a device."""

STDERR_BYTES = 2000
"""Of a worker's last words, kept to say why it died."""

log = get_logger("environments")

A = TypeVar("A", bound=msgspec.Struct)


class EnvironmentFailure(PacelineError):
    """An episode that ended without a score. ``reason`` is a metric label:

    ``deadline`` (a call took too long), ``died`` (the process), ``start`` (no new process came up),
    ``lost`` (it was another episode's fault), ``reward`` (not finite), ``error`` (an exception),
    ``usage`` (a task or option it cannot work with), ``size`` (a message too long to send).
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"environment failure ({reason}): {detail}")
        self.reason = reason


class WorkerProcess:
    """One worker process and its successors. Calls go one after the other, under ``lock``."""

    def __init__(self, start: frames.Start) -> None:
        self.lock = asyncio.Lock()
        self.incarnation = 0
        self.episodes = 0
        self._start = start
        self._process: asyncio.subprocess.Process | None = None
        self._stderr = bytearray()
        self._drain: asyncio.Task[None] | None = None
        self._decoder: msgspec.msgpack.Decoder[frames.Answer] = msgspec.msgpack.Decoder(
            frames.Answer
        )

    async def start(self) -> frames.Ready:
        """Starts a process. Raises UsageError if it refuses, EnvironmentFailure if it does not come."""
        self.incarnation += 1
        self._stderr.clear()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "rlcore.environments.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            # sets of words come in one order in all workers, and no library takes all the cores
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._drain = asyncio.create_task(self._read_stderr(self._process))
        answer = await self._exchange(self._start, START_DEADLINE_S, "its worker to start")
        if isinstance(answer, frames.Ready):
            return answer
        await self.stop()
        if isinstance(answer, frames.Fault) and answer.reason == "usage":
            raise UsageError(answer.detail)
        raise EnvironmentFailure("start", str(answer))

    async def call(self, request: frames.Request, kind: type[A], deadline_s: float) -> A:
        """The answer to one request; the caller holds the lock."""
        answer = await self._exchange(request, deadline_s, type(request).__name__.lower())
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, frames.Fault):
            raise EnvironmentFailure(answer.reason, answer.detail)
        raise EnvironmentFailure("error", f"its worker answered {type(answer).__name__}")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def ensure_running(self) -> None:
        """Replaces a process that has ended. Raises EnvironmentFailure if none comes up."""
        if self.running:
            return
        await self.stop()
        try:
            await self.start()
        except (UsageError, EnvironmentFailure) as error:
            raise EnvironmentFailure("start", str(error)) from None

    async def _exchange(
        self, request: frames.Request, deadline_s: float, waits_for: str
    ) -> frames.Answer:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            frame = frames.pack(request)
        except frames.FrameTooLarge as error:
            raise EnvironmentFailure("size", str(error)) from None
        done = False
        try:
            async with asyncio.timeout(deadline_s):
                process.stdin.write(frame)
                await process.stdin.drain()
                prefix = await process.stdout.readexactly(frames.PREFIX.size)
                body = await process.stdout.readexactly(frames.frame_length(prefix))
            answer = self._decoder.decode(body)
            done = True
            return answer
        except TimeoutError:
            raise EnvironmentFailure(
                "deadline", f"waited {deadline_s:g} s for {waits_for}"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EnvironmentFailure("died", await self._last_words()) from None
        except (frames.FrameTooLarge, msgspec.MsgspecError) as error:
            raise EnvironmentFailure("error", f"its worker answered nonsense: {error}") from None
        except NonFiniteReward as error:
            raise EnvironmentFailure("reward", str(error)) from None
        finally:
            if not done:  # a late answer would be taken for the next call's
                await self.stop()

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while piece := await process.stderr.read(1 << 14):
            self._stderr += piece
            del self._stderr[:-STDERR_BYTES]

    async def _last_words(self) -> str:
        """The last line of what the process wrote, once it has ended."""
        assert self._process is not None
        assert self._drain is not None
        await asyncio.wait([self._drain], timeout=1.0)
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        return f"its worker ended: {lines[-1] if lines else 'without a word'}"

    async def stop(self) -> None:
        """Kills the process with its group and waits for it."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("worker was gone already", pid=process.pid)
        try:
            await asyncio.wait_for(process.wait(), KILL_DEADLINE_S)
        except TimeoutError:
            log.warning(
                "a killed worker has not ended", pid=process.pid, deadline_s=KILL_DEADLINE_S
            )
        if self._drain is not None:
            self._drain.cancel()
