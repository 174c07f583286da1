"""Whatever fails and however long it takes: bounds hold, books balance, every task has one fate."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlcore.algorithms.recipes import Recipe, recipe_named
from rlcore.asynchrony.admission import Admission
from rlcore.asynchrony.role_windows import RoleMeter
from rlcore.asynchrony.task_chances import TaskChances
from rlcore.asynchrony.task_order import TaskOrder
from rlcore.asynchrony.token_ledger import Fate, TokenLedger
from rlcore.environments.base import Task
from rlcore.environments.host import EnvironmentHost
from rlcore.generator.base import Completion, GeneratorError
from rlcore.records.trace import Sampling
from rlcore.rl.episode import Limits
from rlcore.rl.rollouts import (
    EPISODE_ATTEMPTS,
    Books,
    Roles,
    RolloutFloor,
    evidence,
    question_of,
)
from rlcore.rollout import Rollout
from tests.rlcore.rl.made import a_rollout
from tests.rlcore.rl.scripted import letters_tokenizer

pytestmark = pytest.mark.slow

ECHO = "tests.rlcore.rl.scripted:Echo"
GROUP_SIZE = 3
DEADLINE = 300.0
LIMITS = Limits(prompt_tokens=60, sampled_tokens=80, turns=3, sequence_tokens=2048)

Script = Callable[[str], str]
"""What the policy says to a conversation."""


@dataclass
class Sampler:
    """The generator: takes its time, and writes down what it gave."""

    script: Script
    books: Books
    draw: random.Random
    hold: int = 0
    """Completions that have to be under way at once before any ends."""
    running: int = 0
    most_running: int = 0
    tokens: int = 0
    priorities: list[int] = field(default_factory=list)
    tokenizer: Any = field(default_factory=letters_tokenizer)

    async def __call__(
        self, token_ids: list[int], sampling: Sampling, most: int, priority: int
    ) -> Completion:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.priorities.append(priority)
        first = self.books.admission.published_version
        try:
            text = self.script(self.tokenizer.decode(token_ids))
            await asyncio.sleep(self.draw.uniform(0, 0.01))
            while self.most_running < self.hold:
                await asyncio.sleep(0.001)
        finally:
            self.running -= 1
        ids = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]
        finish = "stop" if len(ids) <= most else "length"
        ids = ids[:most]
        swap = self.draw.randint(0, len(ids))  # a version that went live meanwhile
        last = self.books.admission.published_version
        self.tokens += len(ids)
        versions = [first] * swap + [last] * (len(ids) - swap)
        return Completion(ids, [-1.0] * len(ids), versions, finish, 0)


@dataclass
class World:
    books: Books
    floor: RolloutFloor
    sampler: Sampler
    trained: dict[str, list[Rollout]] = field(default_factory=dict)
    staleness: list[int] = field(default_factory=list)

    async def train(self, updates: int, draw: random.Random) -> None:
        """The trainer: takes its time too, and publishes later than it trains."""
        books, floor = self.books, self.floor
        for _ in range(updates):
            while not (batch := books.admission.take_batch()):
                assert await floor.changed(60.0), "nothing happens any more"
            groups = {name: floor.finished.pop(name) for name in batch}
            await asyncio.sleep(draw.uniform(0, 0.02))
            for name, group in groups.items():
                assert name not in self.trained
                self.trained[name] = group
                for rollout in group:
                    self.staleness.append(books.admission.version - rollout.oldest_version)
                    books.ledger.settled(rollout.rollout_id, {Fate.TRAINED: rollout.sampled})
                books.order.trained(int(name))
            books.admission.trained(dict.fromkeys(groups, 0), 1)
            await asyncio.sleep(draw.uniform(0, 0.02))
            books.admission.published(books.admission.version)
            floor.wake()

    def check_books(self) -> None:
        """Every position has one fate, and every token too."""
        state = self.books.order.state()
        waiting = {*state["again"], *state["in_flight"], *state["finished"]}
        done = state["cursor"] - len(waiting)
        dropped = self.floor.tally.equal if self.floor._recipe.dynamic_sampling else 0
        tally = self.floor.tally
        assert done == len(self.trained) + dropped + tally.given_up + tally.passed_over
        assert not waiting & {int(name) for name in self.trained}
        assert {int(name) for name in self.floor.finished} == set(state["finished"])
        totals = self.books.ledger.totals()
        assert totals.processed == self.sampler.tokens
        trained = sum(r.sampled for group in self.trained.values() for r in group)
        assert totals.fates[Fate.TRAINED] == trained


def a_recipe(**changed: Any) -> Recipe:
    return dataclasses.replace(recipe_named("dapo"), **{"overlong_buffer": 0.0, **changed})


def with_floor(
    script: Script,
    body: Callable[[World], Coroutine[Any, Any, None]],
    *,
    seed: int = 0,
    steps: int = 1,
    groups: int = 2,
    concurrency: int = 9,
    recipe: Recipe | None = None,
    limits: Limits = LIMITS,
    workers: int = 1,
    hold: int = 0,
    weighs: bool = False,
    tasks: int = 1000,
) -> World:
    """``body`` beside a running floor, which is then ended."""

    async def run() -> World:
        async with (
            asyncio.timeout(DEADLINE),
            EnvironmentHost(ECHO, {"tasks": tasks}, workers, 30.0) as host,
        ):
            books = Books(
                Admission(steps, groups),
                TaskOrder(seed, host.size("train")),
                TokenLedger(),
                TaskChances(seed, GROUP_SIZE) if weighs else None,
            )
            sampler = Sampler(script, books, random.Random(seed), hold)
            now = time.monotonic()
            roles = Roles(RoleMeter(now), RoleMeter(now, workers), RoleMeter(now))
            floor = RolloutFloor(
                books,
                roles,
                a_recipe() if recipe is None else recipe,
                host,
                sampler.tokenizer,
                sampler,
                limits,
                GROUP_SIZE,
                concurrency,
            )
            world = World(books, floor, sampler)
            running = asyncio.create_task(floor.run())
            acting = asyncio.create_task(body(world))
            try:
                done, _ = await asyncio.wait({running, acting}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                running.cancel()
                acting.cancel()
                await asyncio.gather(running, acting, return_exceptions=True)
                left = asyncio.all_tasks() - {asyncio.current_task()}
                assert not [task for task in left if "_play" in repr(task)]
            return world

    return asyncio.run(run())


def at_random(draw: random.Random, faults: float = 0.0) -> Script:
    def script(_: str) -> str:
        if draw.random() < faults:
            return "fault"
        return draw.choice(["stop right", "stop wrong", "go on", "right go on"])

    return script


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("steps", [0, 2])
def test_bounds_hold_and_books_balance(seed, steps):
    draw = random.Random(seed)
    world = with_floor(
        at_random(draw, faults=0.05),
        lambda world: world.train(8, draw),
        seed=seed,
        steps=steps,
        concurrency=7,
        workers=1 + seed % 2,
    )
    assert len(world.trained) == 16
    assert 0 < world.sampler.most_running <= 7
    assert 0 <= min(world.staleness) <= max(world.staleness) <= steps
    assert world.books.admission.version == 8
    world.check_books()


def test_the_trainer_does_not_spin_while_the_floor_looks_for_a_task():
    async def body(world: World) -> None:
        world.books.chances.takes = lambda question, position: False  # it looks for ever
        world.floor.wake()
        assert await world.floor.changed(1.0)
        assert not await world.floor.changed(0.05)
        world.floor.wake()
        assert await world.floor.changed(1.0)

    with_floor(at_random(random.Random(0)), body, weighs=True)


def test_groups_run_beside_each_other_up_to_the_concurrency():
    draw = random.Random(0)
    world = with_floor(at_random(draw), lambda world: world.train(3, draw), hold=9, groups=3)
    assert world.sampler.most_running == 9


def test_groups_with_equal_rewards_are_dropped_under_dynamic_sampling():
    def script(conversation: str) -> str:
        # even tasks are always right, the others by chance
        number = int(conversation.partition("task ")[2].split("<")[0])
        return "stop right" if number % 2 == 0 else draw.choice(["stop right", "stop wrong"])

    draw = random.Random(1)
    world = with_floor(script, lambda world: world.train(5, draw))
    assert all(len({r.reward for r in group}) > 1 for group in world.trained.values())
    assert all(int(group[0].task_id.split("/")[-1]) % 2 for group in world.trained.values())
    assert world.floor.tally.equal > 0
    assert world.floor.tally.all_right > 0
    assert world.books.ledger.totals().fates[Fate.ZERO_ADVANTAGE] > 0
    world.check_books()


def test_groups_with_equal_rewards_are_trained_on_without_dynamic_sampling():
    draw = random.Random(1)
    world = with_floor(
        lambda _: "stop right",
        lambda world: world.train(3, draw),
        recipe=a_recipe(dynamic_sampling=False),
    )
    assert len(world.trained) == 6
    world.check_books()


def test_a_failed_episode_is_counted_and_played_again():
    failed: Counter[str] = Counter()

    def script(conversation: str) -> str:
        # of the rollouts of a task, which all begin alike, the first to reply fail
        failed[conversation] += 1
        if failed[conversation] < EPISODE_ATTEMPTS:
            return "fault"
        return draw.choice(["stop right", "stop wrong"])

    draw = random.Random(2)
    world = with_floor(
        script, lambda world: world.train(2, draw), recipe=a_recipe(dynamic_sampling=False)
    )
    assert world.floor.tally.given_up == 0
    groups = len(world.trained) + len(world.floor.finished)
    assert world.floor.tally.failed["error"] >= groups * (EPISODE_ATTEMPTS - 1)
    assert world.books.ledger.totals().fates[Fate.FAILED] > 0
    world.check_books()


def test_a_group_that_fails_again_and_again_is_given_up_and_the_others_go_on():
    def script(conversation: str) -> str:
        number = int(conversation.partition("task ")[2].split("<")[0])
        return "fault" if number % 3 == 0 else draw.choice(["stop right", "stop wrong"])

    draw = random.Random(3)
    world = with_floor(script, lambda world: world.train(5, draw), seed=3)
    assert world.floor.tally.given_up > 0
    tasks = [int(group[0].task_id.split("/")[-1]) for group in world.trained.values()]
    assert all(task % 3 for task in tasks)
    world.check_books()


def test_a_prompt_that_is_too_long_is_given_up_without_sampling():
    longest = len("user:task 99<\nassistant:")  # tasks of two digits; the end is one token
    draw = random.Random(4)
    seen: list[str] = []

    def script(conversation: str) -> str:
        seen.append(conversation.partition("task ")[2].split("<")[0])
        return draw.choice(["stop right", "stop wrong"])

    world = with_floor(
        script, lambda world: world.train(1, draw), limits=Limits(longest, 80, 1, 2048), seed=4
    )
    assert {len(number) for number in seen} <= {1, 2}
    assert world.floor.tally.failed["prompt_too_long"] > 0
    world.check_books()


def test_an_overlong_reply_costs_reward_only_towards_the_limit():
    draw = random.Random(5)

    def script(_: str) -> str:
        return draw.choice(["stop right", "right " * 30])

    world = with_floor(
        script,
        lambda world: world.train(3, draw),
        recipe=a_recipe(overlong_buffer=0.5, dynamic_sampling=False),
    )
    for group in world.trained.values():
        for rollout in group:
            penalty = rollout.reward_parts["overlong"]
            assert rollout.reward == 1.0 + penalty
            if rollout.sampled <= LIMITS.sampled_tokens / 2:
                assert penalty == 0.0
            if rollout.sampled == LIMITS.sampled_tokens:
                assert penalty == -1.0
    world.check_books()


def test_an_error_of_the_generator_ends_everything():
    calls = Counter[str]()

    def script(_: str) -> str:
        calls["all"] += 1
        if calls["all"] == 12:
            raise GeneratorError("the engine is gone")
        return draw.choice(["stop right", "stop wrong"])

    draw = random.Random(6)
    with pytest.raises(BaseExceptionGroup) as group:
        with_floor(script, lambda world: world.train(50, draw))
    error: BaseException = group.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GeneratorError)


def test_rollouts_started_later_are_sampled_anew_and_those_near_completion_go_first():
    draw = random.Random(7)

    async def body(world: World) -> None:
        await world.train(2, draw)
        world.floor.sampling = Sampling(temperature=0.5)
        await world.train(4, draw)

    world = with_floor(at_random(draw), body)
    temperatures = [group[0].sampling.temperature for group in world.trained.values()]
    assert temperatures[0] == 1.0
    assert temperatures[-1] == 0.5
    assert len(set(world.sampler.priorities)) > 2


def test_tasks_whose_groups_agree_are_passed_over_more_and_every_turn_has_one_fate():
    def script(conversation: str) -> str:
        number = int(conversation.partition("task ")[2].split("<")[0])
        return "stop right" if number % 4 else draw.choice(["stop right", "stop wrong"])

    draw = random.Random(8)
    world = with_floor(script, lambda world: world.train(30, draw), weighs=True, tasks=8, seed=2)
    assert world.books.chances is not None
    assert world.floor.tally.passed_over > 0
    assert len(world.books.chances.state()["tasks"]) == 8
    plain = with_floor(script, lambda world: world.train(30, draw), tasks=8, seed=2)
    assert world.floor.tally.groups < 0.8 * plain.floor.tally.groups
    for one in (world, plain):
        one.check_books()


def test_what_is_known_of_a_task_is_what_its_groups_had_to_teach():
    def group(*rollouts: tuple[float, bool]) -> list[Rollout]:
        return [a_rollout(f"0.{i}", reward=r, correct=c) for i, (r, c) in enumerate(rollouts)]

    assert evidence(group((1.0, True), (1.0, True))) == (2, 0)
    assert evidence(group((0.0, False), (0.0, False))) == (0, 2)
    assert evidence(group((1.0, True), (0.0, False), (0.0, False))) == (1, 2)
    # rewards of parts: all are wrong, and yet there is something to learn
    assert evidence(group((0.1, False), (0.4, False), (0.2, False))) == (1, 2)
    assert evidence(group((0.7, True), (0.9, True), (1.0, True))) == (2, 1)


def test_tasks_that_ask_the_same_are_known_as_the_same():
    def task(index: int, **data: Any) -> Task:
        return Task(id=f"e/train/{index}", environment="e", split="train", index=index, data=data)

    assert question_of(task(0, question="1 + 1?", seed=3)) == question_of(
        task(5, question="1 + 1?", seed=9)
    )
    assert question_of(task(0, question="1 + 1?")) != question_of(task(0, question="1 + 2?"))
    assert question_of(task(0, seed=1)) != question_of(task(1, seed=1))
