"""Any ``gymnasium`` environment whose observations and actions are text.

``gymnasium:Name-v0``, or ``gymnasium:module:Name-v0`` to import the module that registers it first.
"""

from __future__ import annotations

from typing import Any

from rlcore.environments.base import Environment, Message, Score, Split, Task, Turn
from rlcore.errors import UsageError


class GymnasiumText(Environment):
    """Options: ``make`` (arguments of the environment itself), ``instruction`` (text before the first
    observation), ``max_turns`` (replies in an episode; the environment's own limit holds as well),
    ``success`` (an episode counts as correct from this summed reward on), ``seed``.

    The reply, without white space around it, is the action; rewards are summed. Tasks are seeds, even
    ones for training and odd ones held out: whether two seeds start alike is up to the environment.
    Its episodes end with their worker process, since seeds need not determine everything.
    """

    def __init__(
        self,
        spec: str,
        *,
        make: dict[str, Any] | None = None,
        instruction: str = "",
        max_turns: int = 20,
        success: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(spec)
        import gymnasium

        if max_turns < 1:
            raise UsageError(f"{spec}: max_turns must be at least 1")
        try:
            self._env = gymnasium.make(spec.partition(":")[2], **(make or {}))
        except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
            raise UsageError(f"{spec}: gymnasium cannot make it: {error}") from None
        self._instruction, self._max_turns = instruction, max_turns
        self._success, self._seed = success, seed
        self._turns, self._rewards, self._truncated = 0, 0.0, False

    def size(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> Task:
        return self.make_task(split, index, {"seed": self._seed + 2 * index + (split == "test")})

    def reset(self, task: Task) -> list[Message]:
        self._turns, self._rewards, self._truncated = 0, 0.0, False
        observation, _ = self._env.reset(seed=task.data["seed"])
        return [Message("user", self._instruction + self._text(observation))]

    def step(self, reply: str) -> Turn:
        observation, reward, terminated, truncated, _ = self._env.step(reply.strip())
        self._turns += 1
        self._rewards += float(reward)
        self._truncated = not terminated and (truncated or self._turns >= self._max_turns)
        if terminated or self._truncated:
            return Turn([], done=True)
        return Turn([Message("user", self._text(observation))], done=False)

    def score(self) -> Score:
        parts = {"turns": float(self._turns), "truncated": float(self._truncated)}
        return Score(self._rewards, parts, self._rewards >= self._success)

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, str):
            raise UsageError(
                f"{self.spec}: an observation is a {type(observation).__name__}; only text can be used"
            )
        return observation
