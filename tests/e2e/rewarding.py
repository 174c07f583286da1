"""An environment in which even a random policy sometimes does well, so that groups differ."""

from __future__ import annotations

from rlcore.environments.base import Message, Score, SingleTurn, Split, Task


class Parity(SingleTurn):
    """The reply is to have an even number of characters."""

    def size(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> Task:
        return self.make_task(split, index, {"question": f"{split} {index}"})

    def opening(self, task: Task) -> list[Message]:
        return [Message("user", task.data["question"])]

    def judge(self, task: Task, reply: str) -> Score:
        even = len(reply) % 2 == 0
        return Score(float(even), {}, even)
