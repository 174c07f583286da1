"""Keeps rollouts running: admits groups, plays their episodes, sorts what comes of them.

Everything runs in one event loop. Room is made by updates and finished episodes, and whoever makes some
calls ``wake``.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from rlcore.algorithms.recipes import Recipe
from rlcore.algorithms.shaping import overlong_penalty
from rlcore.asynchrony.admission import Admission
from rlcore.asynchrony.priority import GroupProgress, request_priority
from rlcore.asynchrony.role_windows import RoleMeter
from rlcore.asynchrony.task_chances import TaskChances
from rlcore.asynchrony.task_order import TaskOrder, Turn
from rlcore.asynchrony.token_ledger import Fate, TokenLedger
from rlcore.environments.base import Task
from rlcore.environments.host import EnvironmentFailure, EnvironmentHost
from rlcore.generator.base import Completion
from rlcore.log import get_logger
from rlcore.records.trace import Sampling
from rlcore.rl.episode import Limits, PromptTooLong, play
from rlcore.rl.tally import Tally
from rlcore.rollout import Rollout, equal_rewards

log = get_logger("rl")

EPISODE_ATTEMPTS = 3
"""Times that an episode is played whose environment fails, before its group is given up."""

Sample = Callable[[list[int], Sampling, int, int], Awaitable[Completion]]
"""(token ids, sampling, most tokens, priority) -> what was sampled."""


@dataclass
class Books:
    """The state machines that know what was admitted, finished and trained; saved together."""

    admission: Admission
    order: TaskOrder
    ledger: TokenLedger
    chances: TaskChances | None = None
    """None: every turn is taken."""


@dataclass
class Roles:
    generator: RoleMeter
    environment: RoleMeter
    trainer: RoleMeter


class RolloutFloor:
    """Where episodes are played."""

    def __init__(
        self,
        books: Books,
        roles: Roles,
        recipe: Recipe,
        host: EnvironmentHost,
        tokenizer: Any,
        sample: Sample,
        limits: Limits,
        group_size: int,
        concurrency: int,
    ) -> None:
        self._books = books
        self._roles = roles
        self._recipe = recipe
        self._host = host
        self._tokenizer = tokenizer
        self._sample = sample
        self._limits = limits
        self._group_size = group_size
        self.concurrency = concurrency
        self.sampling = Sampling()
        """Of rollouts started from now on."""
        self.finished: dict[str, list[Rollout]] = {}
        """Groups that wait for the trainer."""
        self.tally = Tally()
        self._running = 0
        self._sampling_now = 0
        self._admitted = 0
        self._rewards: dict[str, list[float]] = {}
        self._questions: dict[str, str] = {}
        """What the groups that run are about, where tasks are weighed."""
        self._wake = asyncio.Event()
        self._news = asyncio.Event()
        """The trainer's own: the other one stays set while a task is asked for."""

    def wake(self) -> None:
        """Something has changed: there may be room, or a batch."""
        self._wake.set()
        self._news.set()

    async def changed(self, deadline: float) -> bool:
        """Until something has changed since the last call; False: nothing did for ``deadline`` seconds."""
        try:
            async with asyncio.timeout(deadline):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    async def run(self) -> None:
        """Admit groups for ever; cancel to stop. What an episode raises ends it."""
        async with asyncio.TaskGroup() as groups:
            while True:
                while self._has_room():
                    turn = await self._next_turn()
                    name = str(turn.position)
                    self._books.admission.admit(name)
                    self._running += self._group_size
                    self._admitted += 1
                    groups.create_task(self._play_group(turn, name, self._admitted))
                self._wake.clear()
                await self._wake.wait()

    async def _next_turn(self) -> Turn:
        """The next one that is not passed over."""
        books = self._books
        while True:
            turn = books.order.take()
            if books.chances is None:
                return turn
            try:
                task = await self._host.task("train", turn.task)
            except EnvironmentFailure:
                return turn  # playing it says what is wrong
            question = question_of(task)
            if books.chances.takes(question, turn.position):
                self._questions[str(turn.position)] = question
                return turn
            books.order.passed_over(turn.position)
            self.tally.passed_over += 1

    def _has_room(self) -> bool:
        free = self.concurrency - self._running
        return self._books.admission.capacity > 0 and free >= self._group_size

    async def _play_group(self, turn: Turn, name: str, admitted: int) -> None:
        self._rewards[name] = []
        try:
            async with asyncio.TaskGroup() as tasks:  # an error in one ends the others
                plays = [
                    tasks.create_task(self._play(turn, name, admitted, i))
                    for i in range(self._group_size)
                ]
            group = [rollout for play in plays if (rollout := play.result()) is not None]
            if len(group) == self._group_size:
                self._finish(turn, name, group)
            else:
                self._give_up(turn, name, group)
        finally:
            del self._rewards[name]
            self._questions.pop(name, None)
            self.wake()

    async def _play(self, turn: Turn, group: str, admitted: int, number: int) -> Rollout | None:
        """One rollout of a group; None when it came to nothing."""
        name = f"{group}.{number}"
        sampling = self.sampling

        async def complete(token_ids: list[int], most: int) -> Completion:
            rewards = tuple(self._rewards[group])
            progress = GroupProgress(admitted, self._group_size, rewards)
            self._meter_sampling(+1)
            try:
                done = await self._sample(token_ids, sampling, most, request_priority(progress))
            finally:
                self._meter_sampling(-1)
            self._roles.generator.done(len(done.token_ids), time.monotonic())
            self._books.ledger.sampled(name, len(done.token_ids))
            return done

        try:
            for _ in range(EPISODE_ATTEMPTS):
                try:
                    task = await self._host.task("train", turn.task)
                    rollout = await play(
                        task,
                        name,
                        group,
                        self._host,
                        self._tokenizer,
                        complete,
                        sampling,
                        self._limits,
                    )
                except PromptTooLong:
                    self.tally.failed["prompt_too_long"] += 1
                    return None
                except EnvironmentFailure as failure:
                    self.tally.failed[failure.reason] += 1
                    if name in self._books.ledger.open:
                        self._books.ledger.lost(name)
                    continue
                self._roles.environment.done(1, time.monotonic())
                self._books.ledger.finished(name)
                self._rewards[group].append(rollout.reward)
                return rollout
        finally:
            self._running -= 1
            self.wake()
        return None

    def _meter_sampling(self, change: int) -> None:
        self._sampling_now += change
        now = time.monotonic()
        self._roles.generator.working(1 if self._sampling_now else 0, now)
        self._roles.generator.queued(self._sampling_now, now)

    def _finish(self, turn: Turn, name: str, group: list[Rollout]) -> None:
        books = self._books
        self.tally.add(group)
        if books.chances is not None and name in self._questions:
            books.chances.finished(self._questions[name], *evidence(group))
        books.order.finished(turn.position)
        versions = [rollout.oldest_version for rollout in group if rollout.sampled]
        books.admission.finished(name, versions or [books.admission.published_version])
        if self._recipe.dynamic_sampling and equal_rewards(group):
            tokens = sum(rollout.sampled for rollout in group)
            names = [rollout.rollout_id for rollout in group]
            books.ledger.settled_together(names, {Fate.ZERO_ADVANTAGE: tokens})
            books.admission.dropped(name)
            books.order.trained(turn.position)
            return
        self.finished[name] = self._shaped(group)
        self._roles.trainer.queued(len(self.finished), time.monotonic())

    def _shaped(self, group: list[Rollout]) -> list[Rollout]:
        """With the recipe's penalty for overlong answers in the reward."""
        if self._recipe.overlong_buffer == 0:
            return group
        most = self._limits.sampled_tokens
        buffer = max(1, math.floor(self._recipe.overlong_buffer * most))
        penalties = overlong_penalty(torch.tensor([r.sampled for r in group]), most, buffer)
        return [
            msgspec.structs.replace(
                rollout,
                reward=rollout.reward + penalty,
                reward_parts={**rollout.reward_parts, "overlong": penalty},
            )
            for rollout, penalty in zip(group, penalties.tolist(), strict=True)
        ]

    def _give_up(self, turn: Turn, name: str, group: list[Rollout]) -> None:
        for rollout in group:
            self._books.ledger.lost(rollout.rollout_id)
        self._books.admission.dropped(name)
        self._books.order.given_up(turn.position)
        self.tally.given_up += 1
        log.warning(
            "a group came to nothing and is left out",
            turn=turn.position,
            reasons=dict(self.tally.failed),
        )


def question_of(task: Task) -> str:
    """The same for tasks that ask the same: a list without end may repeat few questions.

    Environments with such a list say under ``question`` what they ask; of others each task is its own.
    """
    asked = task.data.get("question", task.id)
    return hashlib.blake2b(str(asked).encode(), digest_size=8).hexdigest()


def evidence(group: list[Rollout]) -> tuple[int, int]:
    """Right and wrong rollouts, for what a group of the task is likely to teach.

    Rewards decide: with equal ones there was nothing to learn, with others there was, even if all of the
    group are right, or wrong.
    """
    size, right = len(group), sum(rollout.correct for rollout in group)
    if equal_rewards(group):
        return (size, 0) if right else (0, size)
    right = min(size - 1, max(1, right))
    return right, size - right
