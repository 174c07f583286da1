"""Cores really move between engine and trainer, to where they pay, and nothing else is ever said."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.asynchrony.balance import Window
from rlcore.asynchrony.role_windows import RoleWindow
from rlcore.generator.base import GeneratorError
from rlcore.rl.steering import Steering
from rlcore.rl.tally import Tally
from rlcore.rl.threads import CoreSplit
from tests.rlcore.rl.made import make_settings

HALVES = CoreSplit(4, 4, shared=True)


class Plant:
    """Engine and trainer as fast as the cores that they really have; the slower one decides."""

    def __init__(self, sampled: float, trained: float, split: CoreSplit = HALVES) -> None:
        """Tokens a second and core."""
        self.sampled, self.trained = sampled, trained
        self.engine_cores = split.engine
        self.learner: Any = SimpleNamespace(micro_batch_tokens=1024, threads=split.trainer)
        self.floor: Any = SimpleNamespace(concurrency=8, sampling=None)
        self.fault: GeneratorError | None = None
        self.told: list[int] = []

    async def compute_on(self, cores: int) -> None:
        if self.fault is not None:
            raise self.fault
        self.told.append(cores)
        self.engine_cores = cores

    @property
    def rate(self) -> float:
        return min(self.sampled * self.engine_cores, self.trained * self.learner.threads)

    def window(self) -> Window:
        rate = self.rate
        busy = (
            rate / (self.sampled * self.engine_cores), 0.1,
            rate / (self.trained * self.learner.threads),
        )  # fmt: skip
        return Window(*(RoleWindow(60.0, rate, share, 0.0, 0.0) for share in busy))

    def run(self, steering: Steering, windows: int) -> list[dict[str, float]]:
        async def go() -> list[dict[str, float]]:
            return [await steering.observe(Tally(), self.window()) for _ in range(windows)]

        return asyncio.run(go())


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr("rlcore.rl.threads.usable", lambda: 8)
    monkeypatch.setattr("rlcore.rl.threads.computing", lambda: 8)


def a_steering(plant: Plant, split: CoreSplit = HALVES, **changed: Any) -> Steering:
    options = {"micro_batch_tokens": 1024, "device": "cpu"}
    settings = make_settings(Path("out"), concurrency=8, optimiser=options, **changed)
    return Steering(settings, plant.floor, plant.learner, split, plant.compute_on)


@pytest.mark.parametrize(("sampled", "trained", "engine"), [(1.0, 3.0, 6), (3.0, 1.0, 2)])
def test_cores_go_to_the_role_that_is_short_of_them(sampled, trained, engine):
    plant = Plant(sampled, trained)
    figures = plant.run(a_steering(plant), 200)
    assert (plant.engine_cores, plant.learner.threads) == (engine, 8 - engine)
    assert plant.told, "the engine was told"
    for one in figures:
        assert one["generation_cores"] + one["training_cores"] == 8
    assert figures[-1]["generation_cores"] == engine


def test_figures_are_of_the_cores_that_engine_and_trainer_have():
    plant = Plant(1.0, 3.0)
    steering = a_steering(plant)
    for _ in range(60):
        (figures,) = plant.run(steering, 1)
        assert figures["generation_cores"] == plant.engine_cores
        assert figures["training_cores"] == plant.learner.threads


def test_where_the_engine_refuses_cores_stay_where_they_are_and_the_rest_is_balanced_on(caplog):
    plant = Plant(1.0, 3.0)
    steering = a_steering(plant)
    plant.run(steering, 30)
    moved = (plant.engine_cores, plant.learner.threads)
    assert moved != (4, 4)
    plant.sampled, plant.trained = 3.0, 1.0
    plant.fault = GeneratorError("threads are not ours to set")
    figures = plant.run(steering, 400)
    assert (plant.engine_cores, plant.learner.threads) == moved
    setting = steering.state()["balance"]["setting"]
    assert (setting["generation_cores"], setting["training_cores"]) == moved
    assert figures[-1]["generation_cores"] == moved[0]
    plant.fault = None
    before = len(plant.told)
    assert len({one["concurrency"] for one in plant.run(steering, 400)}) > 1
    assert len(plant.told) == before


def test_a_resumed_run_gives_the_engine_the_cores_that_it_had():
    plant = Plant(1.0, 3.0)
    steering = a_steering(plant)
    plant.run(steering, 200)
    saved = json.loads(json.dumps(steering.state()))
    again = Plant(1.0, 3.0)
    resumed = a_steering(again)
    resumed.load_state(saved)
    assert (again.engine_cores, again.learner.threads) == (4, 4), "there is no engine yet"
    asyncio.run(resumed.begin())
    assert (again.engine_cores, again.learner.threads) == (6, 2)


def test_a_run_that_is_no_longer_balanced_begins_with_the_cores_it_was_given():
    plant = Plant(1.0, 3.0)
    steering = a_steering(plant)
    plant.run(steering, 200)
    again = Plant(1.0, 3.0)
    resumed = a_steering(again, balance=False)
    resumed.load_state(json.loads(json.dumps(steering.state())))
    asyncio.run(resumed.begin())
    assert (again.told, again.engine_cores, again.learner.threads) == ([], 4, 4)


@pytest.mark.parametrize("how", ["elsewhere", "unbalanced"])
def test_cores_that_are_not_shared_or_not_to_be_balanced_stay(how):
    split = CoreSplit(4, 4, shared=how != "elsewhere")
    plant = Plant(1.0, 3.0, split)
    steering = a_steering(plant, split, balance=how != "unbalanced")
    figures = plant.run(steering, 200)
    assert (plant.told, plant.learner.threads) == ([], 4)
    tried = steering.state()["balance"]["due"]
    assert not [move for move in tried if move.startswith("core")], "no window is lost to it"
    assert ("generation_cores" in figures[-1]) == split.shared


def test_more_threads_than_cores_stay_possible_and_neither_role_gets_more_than_there_are():
    split = CoreSplit(8, 4, shared=True)
    assert (split.most_engine, split.most_trainer) == (8, 8)
    plant = Plant(3.0, 1.0, split)
    figures = plant.run(a_steering(plant, split), 400)
    assert {one["generation_cores"] + one["training_cores"] for one in figures} == {12}
    assert plant.learner.threads == 8


def test_with_one_core_each_there_is_nothing_to_move():
    split = CoreSplit(1, 1, shared=True)
    plant = Plant(3.0, 1.0, split)
    plant.run(a_steering(plant, split), 200)
    assert plant.told == []
