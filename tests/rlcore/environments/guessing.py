"""A small text game for the gymnasium adapter: guess a number, be told higher or lower."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.spaces import Text


class Guessing(gymnasium.Env[str, str]):
    observation_space = Text(100)
    action_space = Text(100)

    def __init__(self, top: int = 8) -> None:
        self.top = top

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.secret = int(self.np_random.integers(1, self.top + 1))
        return f"Guess a number from 1 to {self.top}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if not action.isdigit():
            return "A number, please.", -0.5, False, False, {}
        guess = int(action)
        if guess == self.secret:
            return "Right.", 1.0, True, False, {}
        return ("Higher." if guess < self.secret else "Lower."), 0.0, False, False, {}


class Numbers(Guessing):
    """Its observations are no text."""

    def reset(self, **_: Any) -> Any:
        return 7, {}


gymnasium.register("Guessing-v0", Guessing, disable_env_checker=True)
gymnasium.register("Numbers-v0", Numbers, disable_env_checker=True)
gymnasium.register("Short-v0", Guessing, max_episode_steps=2, disable_env_checker=True)
