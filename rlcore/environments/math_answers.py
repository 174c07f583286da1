r"""Mathematical problems from JSONL files, judged by ``math-verify``.

A line has ``question``, ``problem`` or ``prompt``, and its answer as the rest of ``answer`` after
``####`` (the way of GSM8K), as ``answer`` itself, or in the last ``\boxed{}`` of ``solution``.
"""

from __future__ import annotations

from typing import ClassVar

from rlcore.environments.base import (
    TEST_SHARE,
    Message,
    Score,
    SingleTurn,
    Split,
    Task,
    check_test_share,
)
from rlcore.environments.jsonl import Row, first_field, split_rows
from rlcore.errors import UsageError

QUESTION = ("question", "problem", "prompt")

MAX_REPLY_CHARACTERS = 20_000
"""Only the end of a longer reply is parsed: the answer stands there, and parsing takes its time."""


class MathAnswers(SingleTurn):
    r"""Options: ``file``, ``test_file`` (else a share ``test_share`` is held out by a hash of the
    question), ``prefix`` and ``suffix`` (text around the question); ``right`` and ``wrong``, the
    rewards; ``unboxed``, the reward of a reply without ``\boxed{}``, which then counts as wrong.

    ``math-verify`` gives up on an expression after 5 s of its own; the host's deadline ends the rest.
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
        right: float = 1.0,
        wrong: float = 0.0,
        unboxed: float | None = None,
    ) -> None:
        super().__init__(spec)
        self._prefix, self._suffix = prefix, suffix
        self._right, self._wrong, self._unboxed = right, wrong, unboxed
        self._rows = split_rows(file, test_file, QUESTION, check_test_share(test_share))

    def size(self, split: Split) -> int | None:
        return len(self._rows[split])

    def task(self, split: Split, index: int) -> Task:
        row = self._rows[split][index]
        data = {"question": first_field(row, QUESTION), "answer": gold_answer(row)}
        return self.make_task(split, index, data)

    def opening(self, task: Task) -> list[Message]:
        return [Message("user", f"{self._prefix}{task.data['question']}{self._suffix}")]

    def judge(self, task: Task, reply: str) -> Score:
        import math_verify

        gold = math_verify.parse(f"${task.data['answer']}$")
        if not gold:
            raise UsageError(f"task {task.id}: math-verify cannot parse {task.data['answer']!r}")
        if self._unboxed is not None and _last_boxed(reply) is None:
            return Score(self._unboxed, {"answer": 0.0, "boxed": 0.0}, False)
        correct = bool(math_verify.verify(gold, math_verify.parse(reply[-MAX_REPLY_CHARACTERS:])))
        return Score(self._right if correct else self._wrong, {"answer": float(correct)}, correct)


def gold_answer(row: Row) -> str:
    """The answer of a line. Raises UsageError where there is none."""
    answer, solution = row.get("answer"), row.get("solution")
    if answer is not None:
        return str(answer).rpartition("####")[2].strip().strip("$")
    if isinstance(solution, str):
        boxed = _last_boxed(solution)
        if boxed is not None:
            return boxed
    raise UsageError(
        f"no answer, and no \\boxed{{}} in the solution, of {first_field(row, QUESTION)!r}"
    )


def _last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{}``; braces in it are matched."""
    start = text.rfind("\\boxed{")
    depth = 0
    for at in range(max(start, 0) + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : at].strip()
    return None
