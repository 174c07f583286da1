"""Tasksets of the ``verifiers`` library (read against 0.4.0): ``verifiers:taskset-id``.

That library is not installed with Paceline; its newer releases want newer versions of what a server
runs on, so try it in an environment of its own first. Only what needs neither a harness nor a runtime
of the library can be used: a task whose prompt is text, answered in one reply, whose rewards read the
reply. Tasks that start tool servers, containers or judges belong into the library's own runner.
"""

from __future__ import annotations

import asyncio
import importlib
from types import ModuleType
from typing import Any

from rlcore.environments.base import (
    TEST_SHARE,
    Message,
    Score,
    SingleTurn,
    Split,
    Task,
    check_test_share,
    split_of,
)
from rlcore.errors import UsageError

MAX_TASKS = 100_000
"""Read of a taskset, which need not end; all are kept in memory."""


def _import(name: str) -> ModuleType:
    """Raises UsageError that says how to install the library."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"verifiers environments need the verifiers library ({error.name} is missing): install it "
            "with pip install 'verifiers>=0.4,<0.5', and the package of the taskset"
        ) from None


class Verifiers(SingleTurn):
    """Options: ``taskset`` (the taskset's own configuration), ``success`` (correct from this reward
    on), ``test_share``. The split goes by a hash of the prompt."""

    def __init__(
        self,
        spec: str,
        *,
        taskset: dict[str, Any] | None = None,
        success: float = 1.0,
        test_share: float = TEST_SHARE,
    ) -> None:
        super().__init__(spec)
        check_test_share(test_share)
        self._vf = _import("verifiers.v1")
        self._graph = _import("verifiers.v1.graph")
        self._trace = _import("verifiers.v1.trace")
        self._success = success
        name = spec.partition(":")[2]
        config = self._vf.taskset_config_type(name)(id=name, **(taskset or {}))
        tasks = list(self._vf.load_taskset(config).take(MAX_TASKS))
        self._tasks: dict[Split, list[Any]] = {"train": [], "test": []}
        for task in tasks:
            if (
                not task.data.prompt_text
                or task.NEEDS_CONTAINER
                or type(task).toolsets(task.config)
            ):
                raise UsageError(
                    f"{spec}: a task has no prompt, or needs a container or tool servers"
                )
            self._tasks[split_of(task.data.prompt_text, test_share)].append(task)

    def size(self, split: Split) -> int | None:
        return len(self._tasks[split])

    def task(self, split: Split, index: int) -> Task:
        return self.make_task(
            split, index, {"question": self._tasks[split][index].data.prompt_text}
        )

    def opening(self, task: Task) -> list[Message]:
        data = self._tasks[task.split][task.index].data
        system = [Message("system", data.system_prompt)] if data.system_prompt else []
        return [*system, Message("user", data.prompt_text)]

    def judge(self, task: Task, reply: str) -> Score:
        """The library's own rewards and metrics of a trace made of the opening and the reply."""
        vf, source = self._vf, self._tasks[task.split][task.index]
        kinds = {"system": vf.SystemMessage, "user": vf.UserMessage}
        messages = [kinds[message.role](content=message.content) for message in self.opening(task)]
        nodes = [
            self._graph.MessageNode(parent=at - 1 if at else None, message=message)
            for at, message in enumerate(messages)
        ]
        answer = vf.AssistantMessage(content=reply)
        nodes.append(self._graph.MessageNode(parent=len(nodes) - 1, message=answer, sampled=True))
        trace = self._trace.Trace(
            task=vf.TraceTask(type=type(source).__name__, data=source.data, key=source.key),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=nodes,
        )
        asyncio.run(source.score(trace, runtime=None))
        parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return Score(trace.reward, parts, trace.reward >= self._success)
