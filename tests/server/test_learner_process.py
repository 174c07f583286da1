"""The embedded learner is there again, whatever kept it from starting."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from server import learner_process as module
from server.learner_process import LearnerProcess


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RESTART", 0.01)


async def until_restarted(learner: LearnerProcess, times: int) -> None:
    async with asyncio.timeout(10):
        while learner.restarts < times or learner.pid is None:
            await asyncio.sleep(0.01)


def kept(learner: LearnerProcess, times: int) -> None:
    """Runs it until it was started again so many times, and stops it."""

    async def run() -> None:
        task = asyncio.ensure_future(learner.run())
        try:
            await until_restarted(learner, times)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert learner.pid is None

    asyncio.run(run())


def test_a_learner_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    spawn, left = asyncio.create_subprocess_exec, [BlockingIOError(11, "no process left")] * 2

    async def sometimes(*command: str, **how: Any) -> asyncio.subprocess.Process:
        if left:
            raise left.pop()
        return await spawn(sys.executable, "-c", "import time; time.sleep(60)", **how)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", sometimes)
    learner = LearnerProcess([])
    kept(learner, times=2)
    assert (learner.restarts, left) == (2, [])


def test_a_learner_that_ends_is_started_again(monkeypatch: pytest.MonkeyPatch):
    spawn, codes = asyncio.create_subprocess_exec, iter(["raise SystemExit(3)"])

    async def short(*command: str, **how: Any) -> asyncio.subprocess.Process:
        return await spawn(sys.executable, "-c", next(codes, "import time; time.sleep(60)"), **how)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", short)
    kept(LearnerProcess([]), times=1)
