"""Environments in processes of their own: what hangs, dies or eats memory there harms nothing else.

Every call has a deadline, counted from when its worker takes it up; a worker that misses one, or dies,
is replaced. The episode whose call it was ends as an EnvironmentFailure; the worker's other episodes
go on in the new process where the environment is replayable, else they end the same way.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rlcore.environments import frames
from rlcore.environments.base import Message, Score, Split, Task, Turn
from rlcore.environments.worker_process import A, EnvironmentFailure, WorkerProcess
from rlcore.errors import UsageError
from rlcore.log import get_logger

log = get_logger("environments")


@dataclass
class _Episode:
    slot: WorkerProcess
    incarnation: int
    task: Task
    replies: list[str] = field(default_factory=list)


class EnvironmentHost:
    """Runs episodes of one environment on ``workers`` processes; an async context manager.

    ``deadline_s`` holds for each call. Its waiting time for other episodes' calls on the same worker
    does not count, and is bounded by their deadlines.
    """

    def __init__(
        self, spec: str, options: Mapping[str, Any], workers: int = 1, deadline_s: float = 30.0
    ) -> None:
        if workers < 1 or deadline_s <= 0:
            raise UsageError("an environment needs at least one worker and a deadline above 0 s")
        self.spec = spec
        self.failures: Counter[str] = Counter()
        """Episodes that ended without a score, by reason."""
        self._deadline_s = deadline_s
        start = frames.Start(spec, dict(options), os.getpid())
        self._slots = [WorkerProcess(start) for _ in range(workers)]
        self._episodes: dict[int, _Episode] = {}
        self._next = 0
        self._ready = frames.Ready(None, None, False)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts all workers. Raises UsageError for a spec or options that cannot be used."""
        starts = [slot.start() for slot in self._slots]
        results = await asyncio.gather(*starts, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                await self.close()
                raise result
            self._ready = result

    async def close(self) -> None:
        for slot in self._slots:
            await slot.stop()
        self._episodes.clear()

    def size(self, split: Split) -> int | None:
        """Number of tasks of a split, None where they never end."""
        return self._ready.train if split == "train" else self._ready.test

    @property
    def running(self) -> int:
        """Episodes that have been opened and not ended."""
        return len(self._episodes)

    async def task(self, split: Split, index: int) -> Task:
        """Raises UsageError where there is no such task, EnvironmentFailure if none could be had."""
        slot = self._least_busy()
        async with slot.lock:
            await slot.ensure_running()
            try:
                request = frames.GetTask(split, index)
                return (await slot.call(request, frames.TaskIs, self._deadline_s)).task
            except EnvironmentFailure as failure:
                if failure.reason == "usage":
                    raise UsageError(str(failure)) from None
                raise

    async def reset(self, task: Task) -> tuple[int, list[Message]]:
        """Opens an episode: its number, and the messages that open it."""
        slot = self._least_busy()
        number, self._next = self._next, self._next + 1
        slot.episodes += 1
        self._episodes[number] = episode = _Episode(slot, 0, task)
        async with slot.lock:
            try:
                await slot.ensure_running()
                request = frames.Reset(number, task)
                opened = await slot.call(request, frames.Opened, self._deadline_s)
            except EnvironmentFailure as failure:
                raise self._failed(number, failure) from None
            except asyncio.CancelledError:
                self._forget(number)
                raise
            episode.incarnation = slot.incarnation
        return number, opened.messages

    async def step(self, number: int, reply: str) -> Turn:
        """What the environment says to a reply. Raises EnvironmentFailure, which ends the episode."""
        took = await self._call(number, frames.Step(number, reply), frames.Took)
        self._episodes[number].replies.append(reply)
        return took.turn

    async def score(self, number: int) -> Score:
        """Ends the episode with its score, or with an EnvironmentFailure."""
        scored = await self._call(number, frames.GetScore(number), frames.Scored)
        self._forget(number)
        return scored.score

    async def abandon(self, number: int) -> None:
        """Ends an episode without a score, and without counting it; one that ended already stays so."""
        episode = self._episodes.get(number)
        if episode is None:
            return
        self._forget(number)
        slot = episode.slot
        async with slot.lock:
            if not slot.running or slot.incarnation != episode.incarnation:
                return  # it went with its process
            try:
                await slot.call(frames.Close(number), frames.Closed, self._deadline_s)
            except EnvironmentFailure as failure:
                log.warning("an abandoned episode did not close", detail=str(failure))

    async def _call(self, number: int, request: frames.Request, kind: type[A]) -> A:
        episode = self._episodes.get(number)
        if episode is None:
            raise UsageError(f"environment {self.spec!r} has no episode {number}, or it has ended")
        slot = episode.slot
        async with slot.lock:
            try:
                await slot.ensure_running()
                if slot.incarnation != episode.incarnation:
                    await self._revive(number, episode)
                return await slot.call(request, kind, self._deadline_s)
            except EnvironmentFailure as failure:
                raise self._failed(number, failure) from None

    async def _revive(self, number: int, episode: _Episode) -> None:
        """Plays an episode again in the process that took its worker's place."""
        if not self._ready.replayable:
            raise EnvironmentFailure("lost", "its worker was replaced because of another episode")
        slot = episode.slot
        await slot.call(frames.Reset(number, episode.task), frames.Opened, self._deadline_s)
        for reply in episode.replies:
            await slot.call(frames.Step(number, reply), frames.Took, self._deadline_s)
        episode.incarnation = slot.incarnation

    def _failed(self, number: int, failure: EnvironmentFailure) -> EnvironmentFailure:
        self.failures[failure.reason] += 1
        task = self._episodes[number].task.id
        self._forget(number)
        log.warning("episode failed", task=task, reason=failure.reason, detail=str(failure))
        return failure

    def _forget(self, number: int) -> None:
        self._episodes.pop(number).slot.episodes -= 1

    def _least_busy(self) -> WorkerProcess:
        return min(self._slots, key=lambda slot: slot.episodes)
