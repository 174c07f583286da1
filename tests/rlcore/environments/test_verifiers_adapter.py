"""With a stand-in for the library: what it does itself is not tested here."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from rlcore.environments.verifiers_adapter import Verifiers
from rlcore.errors import UsageError


class Record(SimpleNamespace):
    """Any of the library's records: what it was made with."""


class Addition:
    NEEDS_CONTAINER: ClassVar[bool] = False
    config = None
    key = "key"

    def __init__(self, number: int) -> None:
        self.data = Record(prompt_text=f"{number} + 1 =", system_prompt="Add.", number=number)

    @classmethod
    def toolsets(cls, config: None) -> list[Any]:
        return []

    async def score(self, trace: Any, runtime: None) -> None:
        await asyncio.sleep(0)
        roles = [type(node.message).__name__ for node in trace.nodes]
        assert roles == ["SystemMessage", "UserMessage", "AssistantMessage"]
        assert [node.parent for node in trace.nodes] == [None, 0, 1]
        right = float(trace.nodes[-1].message.content == str(self.data.number + 1))
        trace.rewards = {"exact": Record(value=right), "skipped": None}
        trace.reward = right


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    vf, graph, trace = (ModuleType(f"verifiers.v1{rest}") for rest in ("", ".graph", ".trace"))
    for name in ("SystemMessage", "UserMessage", "AssistantMessage", "TraceTask", "AgentInfo"):
        setattr(vf, name, type(name, (Record,), {}))
    vf.AgentConfig = Record  # type: ignore[attr-defined]
    vf.taskset_config_type = lambda name: Record  # type: ignore[attr-defined]
    tasks = [Addition(number) for number in range(40)]
    vf.load_taskset = lambda config: Record(take=lambda n: tasks[:n])  # type: ignore[attr-defined]
    graph.MessageNode = Record  # type: ignore[attr-defined]
    trace.Trace = Record  # type: ignore[attr-defined]
    for module in (ModuleType("verifiers"), vf, graph, trace):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return vf


def test_a_missing_library_is_told_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UsageError, match=r"pip install 'verifiers"):
        Verifiers("verifiers:gsm8k")


def test_a_taskset_is_split_put_and_scored(library: ModuleType) -> None:
    env = Verifiers("verifiers:addition")
    assert (env.size("train") or 0) + (env.size("test") or 0) == 40
    assert env.size("test")
    task = env.task("train", 0)
    number = int(task.data["question"].split()[0])
    for reply, reward in ((str(number + 1), 1.0), ("", 0.0)):
        assert [message.role for message in env.reset(task)] == ["system", "user"]
        assert env.step(reply).done
        score = env.score()
        assert (score.reward, score.parts, score.correct) == (
            reward,
            {"exact": reward},
            reward == 1,
        )


def test_tasks_that_need_more_than_a_reply_are_refused(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Addition, "NEEDS_CONTAINER", True)
    with pytest.raises(UsageError, match="container"):
        Verifiers("verifiers:addition")
