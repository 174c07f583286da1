"""Workload files of made-up tasks; the generator itself is replaced, it may not be installed."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from clients.bench import gym
from clients.bench.common import BenchError
from clients.workload import read_workload

TASKS = [
    {"question": f" How much is {i % 7} and {i % 7}? ", "answer": str(2 * (i % 7))}
    for i in range(20)
]


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> None:
    package, factory = types.ModuleType("reasoning_gym"), types.ModuleType("reasoning_gym.factory")
    package.create_dataset = lambda name, size, seed: TASKS[:size]  # type: ignore[attr-defined]
    factory.DATASETS = {"sums": None}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


@pytest.mark.usefixtures("generator")
def test_the_file_holds_different_prompts_that_no_avoided_file_has(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    words = ["--task", "sums", "--out"]
    assert gym.main([*words, str(first), "--count", "4"]) == 0
    assert gym.main([*words, str(second), "--count", "3", "--avoid", str(first)]) == 0
    made = read_workload(first) + read_workload(second)
    assert [p.turns[0] for p in made] == [f"How much is {i} and {i}?" for i in range(7)]
    assert [p.answer for p in made] == [str(2 * i) for i in range(7)]
    assert made[0].id == "gym-sums-0-0"
    with pytest.raises(BenchError, match="only 7 different prompts of 8"):
        gym.main([*words, str(first), "--count", "8"])
    assert len(read_workload(first)) == 4  # a failure leaves the file as it was


@pytest.mark.usefixtures("generator")
def test_an_unknown_task_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="there are sums"):
        gym.main(["--task", "chess", "--count", "1", "--out", str(tmp_path / "x.jsonl")])


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(BenchError, match="pip install reasoning-gym"):
        gym.main(["--task", "sums", "--count", "1", "--out", str(tmp_path / "x.jsonl")])
