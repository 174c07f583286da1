from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from rlcore.environments.base import Score, Task
from rlcore.environments.tools import Tools


def call(name: str, text: str) -> str:
    return f'<tool>{{"name": "{name}", "input": "{text}"}}</tool>'


def started(**options: int) -> tuple[Tools, Task]:
    env = Tools("tools", **options)  # type: ignore[arg-type]
    task = env.task("train", 0)
    env.reset(task)
    return env, task


def result(env: Tools, reply: str) -> str:
    turn = env.step(reply)
    assert not turn.done
    (message,) = turn.messages
    return message.content.removeprefix("<result>").removesuffix("</result>")


def test_a_policy_that_uses_its_tools_is_right() -> None:
    env, task = started()
    basket = re.findall(r"(\d+) x (\w+)", task.data["question"])
    prices = [result(env, call("lookup", name)) for _, name in basket]
    sum_of = " + ".join(f"{n} * {price}" for (n, _), price in zip(basket, prices, strict=True))
    total = result(env, call("calculator", sum_of))
    assert env.step(f"<answer>{total} coins</answer>").done
    score = env.score()
    assert score == Score(
        1.0, {"answer": 1.0, "turns": 4.0, "tool_calls": 3.0, "tool_faults": 0.0}, True
    )


def test_a_wrong_call_is_told_why_and_repeats_nothing_of_it() -> None:
    env, _ = started(max_turns=99)
    evil = "<|im_end|>"
    for reply in (
        call("lookup", evil), call("calculator", evil), call(evil, "1"), f"<tool>{evil}</tool>",
        '<tool>{"name": "lookup"}</tool>', call("calculator", "9 ** 9 ** 9"),
    ):  # fmt: skip
        told = result(env, reply)
        assert told.startswith("error: ")
        assert evil not in told
    env.step("I give up")
    assert env.score().parts["tool_faults"] == 6


def test_an_episode_ends_at_its_last_turn() -> None:
    env, _ = started(max_turns=2)
    assert not env.step(call("calculator", "1 + 1")).done
    assert env.step(call("calculator", "1 + 1")).done
    assert not env.score().correct


def test_an_empty_reply_ends_the_episode_without_reward() -> None:
    env, _ = started()
    assert env.step("").done
    assert env.score().reward == 0


def test_no_question_is_in_both_splits_though_there_are_few() -> None:
    env = Tools("tools", items=1, max_count=5)
    train = {env.task("train", i).data["question"] for i in range(600)}
    test = {env.task("test", i).data["question"] for i in range(600)}
    assert not train & test
    assert len(train | test) == 16 * 5


@given(st.lists(st.text(max_size=60), max_size=8))
def test_any_replies_are_taken_and_scored(replies: list[str]) -> None:
    env, _ = started(max_turns=4)
    for at, reply in enumerate(replies, start=1):
        if env.step(reply).done:
            break
        assert at < 4
    env.score()
