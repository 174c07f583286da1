"""What an environment is: tasks by number, an exchange of messages, and a score at the end.

An instance serves one episode at a time: ``reset``, then ``step`` with each reply of the policy until
a turn says ``done``, then ``score``. It knows nothing of tokens, of models, or of other episodes.
Nothing heavy is imported here: worker processes import this module.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import msgspec

from rlcore.errors import PacelineError, UsageError

Split = Literal["train", "test"]

TEST_SHARE = 0.25
"""Share of the questions that are held out. A quarter of even a few hundred distinct questions is
enough to measure accuracy on; of larger sets only as many are used as an evaluation asks for."""


class NonFiniteReward(PacelineError):
    """A reward, or a part of it, is NaN or infinite."""


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation. ``role`` is ``system``, ``user``, ``assistant`` or ``tool``."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """The form that chat templates and the OpenAI API take."""
        return {"role": self.role, "content": self.content}


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task. ``data`` is JSON-able and, with the environment's options, all that ``reset`` needs."""

    id: str
    """``environment/split/index``: the same in every run."""
    environment: str
    split: Split
    index: int
    data: dict[str, Any]


class Turn(msgspec.Struct, frozen=True):
    """What the environment says to a reply. ``messages`` is empty when it is ``done``."""

    messages: list[Message]
    done: bool


class Score(msgspec.Struct, frozen=True):
    """How an episode went. Raises NonFiniteReward where a number is NaN or infinite.

    ``correct`` is the plain verdict that accuracy counts; ``reward`` is what is learned from.
    """

    reward: float
    parts: dict[str, float]
    """The numbers that the reward was made of, by name; shown, never added up again."""
    correct: bool

    def __post_init__(self) -> None:
        for name, value in {"reward": self.reward, **self.parts}.items():
            if not math.isfinite(value):
                raise NonFiniteReward(f"the environment made a {name} of {value}")


class Environment(ABC):
    """Base of all environments. The constructor's keyword arguments are its options."""

    replayable: ClassVar[bool] = False
    """Whether the same task and replies always give the same messages and score. An episode of such
    an environment outlives its worker process: the replies so far are played again in a new one."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        """As the user wrote it, for example ``reasoning_gym:chain_sum``; the name in task ids."""

    @abstractmethod
    def size(self, split: Split) -> int | None:
        """Number of tasks; None where they never end."""

    @abstractmethod
    def task(self, split: Split, index: int) -> Task:
        """The same task for the same arguments, always. No task is in both splits."""

    @abstractmethod
    def reset(self, task: Task) -> list[Message]:
        """Starts an episode, whatever became of the one before; the messages that open it."""

    @abstractmethod
    def step(self, reply: str) -> Turn:
        """Takes the policy's reply, which may be empty or nonsense: that is its fault, no error."""

    @abstractmethod
    def score(self) -> Score:
        """How the episode went, also when it was ended before it was ``done``."""

    def make_task(self, split: Split, index: int, data: dict[str, Any]) -> Task:
        return Task(
            id=f"{self.spec}/{split}/{index}",
            environment=self.spec,
            split=split,
            index=index,
            data=data,
        )


class SingleTurn(Environment):
    """An environment with one question and one reply. A subclass says how a task is put and judged."""

    def __init__(self, spec: str) -> None:
        super().__init__(spec)
        self._task: Task | None = None
        self._reply = ""

    @abstractmethod
    def opening(self, task: Task) -> list[Message]:
        """The messages that put the question."""

    @abstractmethod
    def judge(self, task: Task, reply: str) -> Score:
        """The score of a reply. An episode without one is judged by the empty reply."""

    def reset(self, task: Task) -> list[Message]:
        self._task, self._reply = task, ""
        return self.opening(task)

    def step(self, reply: str) -> Turn:
        self._reply = reply
        return Turn([], done=True)

    def score(self) -> Score:
        if self._task is None:
            raise UsageError("score comes after reset")
        return self.judge(self._task, self._reply)


def split_of(text: str, test_share: float = TEST_SHARE) -> Split:
    """The split that a question belongs to, by a hash of its text: equal questions share a split."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") < test_share * 2**64 else "train"


def check_test_share(test_share: float) -> float:
    """Returns it; raises UsageError unless it lies between 0 and 1, both excluded."""
    if not 0 < test_share < 1:
        raise UsageError(f"test_share is {test_share}; it must lie between 0 and 1, both excluded")
    return test_share
