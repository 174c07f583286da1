"""Accuracy on held-out tasks, with its standard error."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.environments.base import Task
from rlcore.environments.host import EnvironmentFailure, EnvironmentHost
from rlcore.records.trace import Sampling
from rlcore.rl.episode import Complete, Limits, PromptTooLong, play
from rlcore.rollout import Rollout

DRAWS = 8
"""Tasks looked at for each one wanted: of a hundred different ones that come up equally often, all but
a few in ten thousand are then found."""


@dataclass(frozen=True)
class Evaluation:
    tasks: int
    samples: int
    """Of each task."""
    accuracy: float
    """Mean over tasks of the share of right samples."""
    standard_error: float
    """Of that mean, over tasks."""
    reward: float
    length: float
    """Mean tokens sampled."""
    failed: int
    """Episodes that the environment failed in; they are left out."""

    def metrics(self) -> dict[str, float]:
        return {
            "eval/accuracy": self.accuracy,
            "eval/standard_error": self.standard_error,
            "eval/reward": self.reward,
            "eval/length": self.length,
            "eval/failed": self.failed,
        }


async def evaluate(
    host: EnvironmentHost,
    tokenizer: Any,
    complete: Complete,
    limits: Limits,
    sampling: Sampling,
    tasks: int,
    samples: int,
    concurrency: int,
) -> tuple[Evaluation, list[Rollout]]:
    """The first ``tasks`` distinct held-out tasks, or all there are, ``samples`` times each."""
    slots = asyncio.Semaphore(concurrency)
    chosen = await distinct_tasks(host, tasks)
    count = len(chosen)

    async def one(index: int, number: int) -> Rollout | None:
        async with slots:
            name = f"eval-{index}.{number}"
            try:
                return await play(
                    chosen[index], name, str(index), host, tokenizer, complete, sampling, limits
                )
            except (EnvironmentFailure, PromptTooLong):
                return None

    played = await asyncio.gather(*(one(i, n) for i in range(count) for n in range(samples)))
    by_task = [played[i * samples : (i + 1) * samples] for i in range(count)]
    return summarise(by_task, samples), [r for r in played if r is not None]


async def distinct_tasks(host: EnvironmentHost, count: int) -> list[Task]:
    """Up to ``count`` held-out tasks with different openings: a list without end may repeat few.

    Tasks that cannot be opened are left out.
    """
    size = host.size("test")
    found: dict[str, Task] = {}
    for index in range(DRAWS * count if size is None else size):
        try:
            task = await host.task("test", index)
            episode, messages = await host.reset(task)
        except EnvironmentFailure:
            continue  # the host has said it
        await host.abandon(episode)
        found.setdefault(repr(messages), task)
        if len(found) == count:
            break
    return list(found.values())


def summarise(by_task: Sequence[Sequence[Rollout | None]], samples: int) -> Evaluation:
    """Tasks without a single sample are left out; with none left the accuracy is NaN."""
    whole = [[r for r in task if r is not None] for task in by_task]
    scored = [task for task in whole if task]
    shares = [sum(r.correct for r in task) / len(task) for task in scored]
    flat = [r for task in scored for r in task]
    error = statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan
    return Evaluation(
        tasks=len(scored),
        samples=samples,
        accuracy=statistics.fmean(shares) if shares else math.nan,
        standard_error=error,
        reward=statistics.fmean(r.reward for r in flat) if flat else math.nan,
        length=statistics.fmean(r.sampled for r in flat) if flat else math.nan,
        failed=sum(len(task) for task in by_task) - len(flat),
    )
