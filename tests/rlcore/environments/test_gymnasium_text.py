from __future__ import annotations

import pytest

from rlcore.environments.gymnasium_text import GymnasiumText
from rlcore.errors import UsageError

MODULE = "gymnasium:tests.rlcore.environments.guessing"


def play(env: GymnasiumText, index: int = 0) -> list[str]:
    """Bisects; the environment's words."""
    low, high = 1, 8
    said = [env.reset(env.task("train", index))[0].content]
    while True:
        guess = (low + high) // 2
        turn = env.step(f" {guess}\n")
        if turn.done:
            return said
        said.append(turn.messages[0].content)
        low, high = (guess + 1, high) if said[-1] == "Higher." else (low, guess - 1)


def test_an_episode_is_played_to_its_end() -> None:
    env = GymnasiumText(f"{MODULE}:Guessing-v0", instruction="A game.\n")
    said = play(env)
    assert said[0] == "A game.\nGuess a number from 1 to 8."
    score = env.score()
    assert (score.reward, score.correct) == (1.0, True)
    assert score.parts == {"turns": float(len(said)), "truncated": 0.0}


def test_a_seed_makes_the_episode() -> None:
    env = GymnasiumText(f"{MODULE}:Guessing-v0")
    games = [play(env, index) for index in range(12)]
    assert games == [play(GymnasiumText(f"{MODULE}:Guessing-v0"), index) for index in range(12)]
    assert len({tuple(game) for game in games}) > 3


def test_splits_share_no_seed() -> None:
    env = GymnasiumText(f"{MODULE}:Guessing-v0", seed=5)
    train, test = ({env.task(s, i).data["seed"] for i in range(50)} for s in ("train", "test"))  # type: ignore[arg-type]
    assert not train & test


def test_rewards_are_summed_until_the_turns_are_over() -> None:
    env = GymnasiumText(f"{MODULE}:Guessing-v0", max_turns=3)
    env.reset(env.task("test", 0))
    assert [env.step(reply).done for reply in ("", "x", "y")] == [False, False, True]
    score = env.score()
    assert (score.reward, score.correct, score.parts["truncated"]) == (-1.5, False, 1.0)


def test_the_environments_own_limit_truncates() -> None:
    env = GymnasiumText(f"{MODULE}:Short-v0", make={"top": 1000})
    env.reset(env.task("test", 0))
    assert [env.step(reply).done for reply in ("x", "y")] == [False, True]
    assert env.score().parts["truncated"] == 1.0


def test_what_cannot_be_used_says_so() -> None:
    with pytest.raises(UsageError, match="gymnasium cannot make it"):
        GymnasiumText("gymnasium:Nothing-v0")
    with pytest.raises(UsageError, match="gymnasium cannot make it"):
        GymnasiumText("gymnasium:no_such_module:Nothing-v0")
    env = GymnasiumText(f"{MODULE}:Numbers-v0")
    with pytest.raises(UsageError, match="an observation is a int"):
        env.reset(env.task("train", 0))
