"""Environments with faults, on the policy's word."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import ClassVar

import msgspec

from rlcore.environments.base import Environment, Message, Score, Split, Task, Turn


class Faulty(Environment):
    """Counts its turns; some replies are faults. ``replayable`` as a subclass says."""

    def __init__(self, spec: str, *, marker: str = "", tasks: int = 10) -> None:
        super().__init__(spec)
        self.marker, self.tasks, self.turns = marker, tasks, 0

    def size(self, split: Split) -> int | None:
        return self.tasks

    def task(self, split: Split, index: int) -> Task:
        return self.make_task(split, index, {"question": f"{split} {index}"})

    def reset(self, task: Task) -> list[Message]:
        self.turns = 0
        return [Message("user", task.data["question"])]

    def step(self, reply: str) -> Turn:
        self.turns += 1
        match reply:
            case "hang":
                time.sleep(1000)
            case "die":
                print("the last words", file=sys.stderr)
                os._exit(3)
            case "hang once" if not Path(self.marker).exists():
                Path(self.marker).touch()
                time.sleep(1000)
            case "raise":
                raise ValueError("nonsense")
            case "print":
                print("to standard output", flush=True)
                os.write(1, b"\0\0\0\5hello")
            case "read":
                return Turn([Message("user", repr(sys.stdin.read()))], done=False)
            case "pid":
                return Turn([Message("user", str(os.getpid()))], done=False)
            case "long":
                return Turn([Message("user", "x" * (17 << 20))], done=False)
            case "nan":
                self.turns = -1
        return Turn([Message("user", f"turn {self.turns}")], done=reply == "end")

    def score(self) -> Score:
        return Score(math.nan if self.turns < 0 else float(self.turns), {}, True)


class Replayed(Faulty):
    replayable: ClassVar[bool] = True


class Unchecked(Faulty):
    """Gets a NaN past the check."""

    def score(self) -> Score:
        score = Score(0.0, {}, False)
        msgspec.structs.force_setattr(score, "reward", math.nan)
        return score


class Refusing(Faulty):
    def __init__(self, spec: str) -> None:
        super().__init__(spec)
        raise ValueError("cannot be made")
