"""A shop with a price list and a calculator: questions that are answered over several turns.

The policy calls a tool with one line of JSON in ``<tool>`` tags and ends with ``<answer>`` tags:

    <tool>{"name": "lookup", "input": "pear"}</tool>
    <tool>{"name": "calculator", "input": "3 * 7 + 2 * 4"}</tool>
    <answer>29</answer>

The result of a call comes as the next user message, in ``<result>`` tags (every chat template has
user messages, few have those of tools). Only the first call of a reply is answered. An answer, or a
reply with neither, ends the episode, and so does the last turn.
"""

from __future__ import annotations

import random
import re
from typing import Any, ClassVar

import msgspec

from rlcore.environments.arithmetic import ArithmeticFault, evaluate, show
from rlcore.environments.base import (
    TEST_SHARE,
    Environment,
    Message,
    Score,
    Split,
    Task,
    Turn,
    check_test_share,
    split_of,
)
from rlcore.environments.extract import answer_tags
from rlcore.environments.numbers import last_number
from rlcore.errors import UsageError

GOODS = (
    "apple", "pear", "plum", "lemon", "melon", "bread", "cheese", "butter", "honey", "tea",
    "coffee", "rice", "soup", "salt", "pepper", "candle",
)  # fmt: skip

CANDIDATES = 128
"""Seeds that a task index has to itself; see reasoning_gym_tasks."""

INSTRUCTION = (
    "You work in a shop. You can use two tools, one call in a message, and then wait for the result.\n"
    'The price of one item: <tool>{"name": "lookup", "input": "apple"}</tool>\n'
    'Arithmetic: <tool>{"name": "calculator", "input": "2 * 3 + 4"}</tool>\n'
    "When you know the answer, write it like this: <answer>10</answer>\n\n"
)

_CALL = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)


class Call(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call as the policy writes it."""

    name: str
    input: str


class Tools(Environment):
    """Options: ``max_turns`` (replies in an episode), ``items`` (different goods in a question),
    ``max_count`` (of each), ``max_price``, ``instruction`` (the text before the question), ``seed``,
    ``test_share``. The reward is 1 for the right number in the answer tags, else 0.
    """

    replayable: ClassVar[bool] = True

    def __init__(
        self,
        spec: str,
        *,
        max_turns: int = 6,
        items: int = 2,
        max_count: int = 9,
        max_price: int = 20,
        instruction: str = INSTRUCTION,
        seed: int = 0,
        test_share: float = TEST_SHARE,
    ) -> None:
        super().__init__(spec)
        if max_turns < 1 or max_count < 1 or max_price < 1 or not 1 <= items <= len(GOODS):
            raise UsageError(
                f"{spec}: max_turns, max_count and max_price are at least 1, items 1 to {len(GOODS)}"
            )
        self._max_turns, self._items = max_turns, items
        self._max_count, self._max_price = max_count, max_price
        self._instruction, self._seed = instruction, seed
        self._test_share = check_test_share(test_share)
        self._data: dict[str, Any] = {}
        self._turns = self._calls = self._faults = 0
        self._answer: float | None = None

    def size(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> Task:
        for candidate in range(CANDIDATES):
            data = self._draw(random.Random(self._seed + index * CANDIDATES + candidate))
            if split_of(data["question"], self._test_share) == split:
                return self.make_task(split, index, data)
        raise UsageError(f"{self.spec} has too few distinct questions to hold some out")

    def reset(self, task: Task) -> list[Message]:
        self._data = task.data
        self._turns = self._calls = self._faults = 0
        self._answer = None
        return [Message("user", self._instruction + task.data["question"])]

    def step(self, reply: str) -> Turn:
        self._turns += 1
        answer = answer_tags(reply)
        call = _CALL.search(reply)
        if answer is not None:
            self._answer = last_number(answer)
        if answer is not None or call is None or self._turns == self._max_turns:
            return Turn([], done=True)
        return Turn(
            [Message("user", f"<result>{self._result(call.group(1))}</result>")], done=False
        )

    def score(self) -> Score:
        correct = self._answer == self._data["total"]
        parts = {
            "answer": float(correct),
            "turns": float(self._turns),
            "tool_calls": float(self._calls),
            "tool_faults": float(self._faults),
        }
        return Score(float(correct), parts, correct)

    def _draw(self, rng: random.Random) -> dict[str, Any]:
        """A question and its price list. The question tells no price: two have the same text only if
        they ask for the same goods, so those share a split whatever the prices."""
        prices = {name: rng.randint(1, self._max_price) for name in GOODS}
        basket = {
            name: rng.randint(1, self._max_count) for name in sorted(rng.sample(GOODS, self._items))
        }
        listed = " and ".join(f"{count} x {name}" for name, count in basket.items())
        total = sum(count * prices[name] for name, count in basket.items())
        return {"question": f"What do {listed} cost together?", "prices": prices, "total": total}

    def _result(self, written: str) -> str:
        """A tool's result. Nothing of what the policy wrote is repeated in it: no text of its own may
        come back to it as the environment's."""
        self._calls += 1
        try:
            call = msgspec.json.decode(written, type=Call)
            if call.name == "calculator":
                return show(evaluate(call.input))
            if call.name == "lookup":
                return str(self._data["prices"][call.input.strip().lower()])
            fault = "there is no such tool; there are lookup and calculator"
        except msgspec.MsgspecError:
            fault = 'a call is JSON with "name" and "input", both text'
        except ArithmeticFault as error:
            fault = str(error)
        except KeyError:
            fault = "the shop does not sell that; give one item, in the singular"
        self._faults += 1
        return f"error: {fault}"
