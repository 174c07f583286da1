"""Every task of the ``reasoning-gym`` library: ``reasoning_gym:chain_sum`` and a hundred others.

Tasks are made when asked for and never end. Task ``index`` looks at ``CANDIDATES`` seeds of its own
and takes the first question of the wanted split; the split goes by a hash of the question's text, so
that no question is in both splits however few distinct ones there are. Within a split, questions can
repeat: a small configuration has no more of them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

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
from rlcore.environments.extract import (
    answer_tags,
    check_extraction,
    last_line,
    tags_or_rest,
    whole,
)
from rlcore.environments.numbers import as_number, last_number
from rlcore.errors import UsageError

CANDIDATES = 128
"""Seeds that a task index has to itself. With a quarter held out, all of them belong to the other split
with a chance of 1e-16; where that happens, the configuration has but a few distinct questions."""

SEEDS = 2**32
"""Seeds stay below this, the largest that every random generator takes."""

DATA_SETS_KEPT = 4
"""A data set is cheap to make, apart from a few that read a file of up to a few MB."""


class ReasoningGym(SingleTurn):
    """Options: ``extract`` (see below), ``prefix`` and ``suffix`` (text around the question), ``seed``,
    ``test_share``; all others go to the task's own configuration.

    ``extract`` is ``auto``, ``last_number``, ``answer_tags``, ``last_line`` or ``whole``. With
    ``last_number`` the last number of the reply must equal the answer; the others hand what they find
    to the library's own ``score_answer``. ``auto`` is ``last_number`` where the answer is a number;
    else the last ``<answer>`` tags, or without tags the last line (all of it, for answers of several
    lines).
    """

    replayable: ClassVar[bool] = True

    def __init__(
        self,
        spec: str,
        *,
        extract: str = "auto",
        prefix: str = "",
        suffix: str = "",
        seed: int = 0,
        test_share: float = TEST_SHARE,
        **config: Any,
    ) -> None:
        super().__init__(spec)
        self._extract = check_extraction(extract)
        self._prefix, self._suffix = prefix, suffix
        self._test_share = check_test_share(test_share)
        self._name = spec.partition(":")[2]
        self._config = config
        self._seed = seed
        self._data_set = lru_cache(DATA_SETS_KEPT)(self._make_data_set)
        self._data_set(seed)

    def size(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> Task:
        seed = (self._seed + index * CANDIDATES) % SEEDS
        data_set = self._data_set(seed)
        for candidate in range(CANDIDATES):
            entry = data_set[candidate]
            if split_of(entry["question"], self._test_share) == split:
                data = {"seed": seed, "candidate": candidate, "question": entry["question"]}
                return self.make_task(split, index, data)
        raise UsageError(
            f"{self.spec} has no {split} question among {CANDIDATES} seeds: its configuration has too "
            "few distinct questions to hold some out"
        )

    def opening(self, task: Task) -> list[Message]:
        return [Message("user", f"{self._prefix}{task.data['question']}{self._suffix}")]

    def judge(self, task: Task, reply: str) -> Score:
        data_set = self._data_set(task.data["seed"])
        entry = data_set[task.data["candidate"]]
        expected = as_number(str(entry["answer"]))
        if self._extract == "last_number" and expected is None:
            raise UsageError(f"extract=last_number, but an answer of {self.spec} is no number")
        if self._extract == "last_number" or (self._extract == "auto" and expected is not None):
            correct = last_number(reply) == expected
            return Score(float(correct), {"answer": float(correct)}, correct)
        try:
            reward = float(data_set.score_answer(self._answer(reply, str(entry["answer"])), entry))
        except (
            Exception
        ):  # a hundred scorers, each trips over other text: what they cannot read is wrong
            return Score(0.0, {"answer": 0.0, "unreadable": 1.0}, False)
        return Score(reward, {"answer": reward}, reward >= 1.0)

    def _answer(self, reply: str, expected: str) -> str | None:
        if self._extract == "auto":
            return tags_or_rest(reply, lines=len(expected.splitlines()))
        finder = {"answer_tags": answer_tags, "last_line": last_line, "whole": whole}
        return finder[self._extract](reply)

    def _make_data_set(self, seed: int) -> Any:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self._name not in DATASETS:
            raise UsageError(
                f"reasoning-gym has no task {self._name!r}; it has {', '.join(sorted(DATASETS))}"
            )
        config = dict(self._config)
        if self._name == "composite":
            config["datasets"] = _parts(config.get("datasets"))
        try:
            return reasoning_gym.create_dataset(self._name, seed=seed, size=CANDIDATES, **config)
        except (TypeError, AssertionError, ValueError) as error:
            raise UsageError(f"{self.spec}: its configuration cannot be used: {error}") from None


def _parts(listed: Any) -> list[Any]:
    """The ``datasets`` option of the composite task: [{name, weight, config}, ...]."""
    from reasoning_gym.composite import DatasetSpec

    try:
        return [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in listed]
    except TypeError as error:
        raise UsageError(f"datasets must be a list of {{name, weight, config}}: {error}") from None
