"""Programming problems from JSONL files: the reply's Python is run against tests in the sandbox.

A line has ``prompt``, ``text`` or ``question``; its tests, Python statements that raise when they
fail, as the list ``tests`` or ``test_list``; optionally ``setup`` or ``test_setup_code``, which runs
before the program.
"""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

from rlcore.environments.base import (
    TEST_SHARE,
    Message,
    Score,
    SingleTurn,
    Split,
    Task,
    check_test_share,
)
from rlcore.environments.jsonl import first_field, split_rows
from rlcore.environments.sandbox import Limits, Sandbox
from rlcore.errors import UsageError

QUESTION = ("prompt", "text", "question")
TESTS = ("tests", "test_list")
SETUP = ("setup", "test_setup_code")

MAX_PROGRAM = 100_000
"""Characters; no answer to a problem is longer."""

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


class PythonCode(SingleTurn):
    """Options: ``file``, ``test_file`` and ``test_share`` as for ``math_answers``; ``prefix`` and
    ``suffix``; ``partial`` (the reward is the share of tests passed, else 1 for all of them);
    ``limits`` (of the sandbox: wall_s, cpu_s, memory_bytes, processes, ...); ``allow_weak_sandbox``.

    The program is the last block of the reply fenced by three backticks. A failure has its reason among
    the score's parts: that of the sandbox's Outcome, or ``no_code``.
    """

    replayable: ClassVar[bool] = True

    def __init__(
        self,
        spec: str,
        *,
        file: str,
        test_file: str | None = None,
        test_share: float = TEST_SHARE,
        prefix: str = "",
        suffix: str = "",
        partial: bool = False,
        limits: dict[str, float] | None = None,
        allow_weak_sandbox: bool = False,
    ) -> None:
        super().__init__(spec)
        self._prefix, self._suffix, self._partial = prefix, suffix, partial
        self._rows = split_rows(file, test_file, QUESTION, check_test_share(test_share))
        try:
            given = msgspec.convert(limits or {}, type=Limits)
        except msgspec.ValidationError as error:
            raise UsageError(f"{spec}: limits: {error}") from None
        self._sandbox = Sandbox(given, allow_weak=allow_weak_sandbox)

    def size(self, split: Split) -> int | None:
        return len(self._rows[split])

    def task(self, split: Split, index: int) -> Task:
        row = self._rows[split][index]
        question, tests = first_field(row, QUESTION), first_field(row, TESTS)
        if not tests or not isinstance(tests, list):
            raise UsageError(f"no list of tests for {question!r}")
        data = {"question": question, "tests": tests, "setup": first_field(row, SETUP) or ""}
        return self.make_task(split, index, data)

    def opening(self, task: Task) -> list[Message]:
        return [Message("user", f"{self._prefix}{task.data['question']}{self._suffix}")]

    def judge(self, task: Task, reply: str) -> Score:
        program, tests = program_in(reply), task.data["tests"]
        if program is None:
            return Score(0.0, {"tests": 0.0, "no_code": 1.0}, False)
        outcome = self._sandbox.run(f"{task.data['setup']}\n{program}", tests)
        share = outcome.passed / len(tests)
        correct = outcome.reason == "passed"
        reward = share if self._partial else float(correct)
        failure = {} if correct else {outcome.reason: 1.0}
        return Score(reward, {"tests": share, **failure}, correct)


def program_in(reply: str) -> str | None:
    """The last fenced block of a reply; one that the length limit cut off counts too."""
    found = _BLOCK.findall(reply)
    return found[-1] if found and found[-1].strip() and len(found[-1]) <= MAX_PROGRAM else None
