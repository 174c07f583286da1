from __future__ import annotations

import re

import pytest

from rlcore.environments.base import Split
from rlcore.environments.reasoning_gym_tasks import ReasoningGym
from rlcore.errors import UsageError

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SPLITS: tuple[Split, Split] = ("train", "test")


def test_no_question_is_in_both_splits_though_there_are_few() -> None:
    env = ReasoningGym("reasoning_gym:chain_sum", **ONE_DIGIT)
    asked = {split: {env.task(split, i).data["question"] for i in range(600)} for split in SPLITS}
    assert not asked["train"] & asked["test"]
    distinct = len(asked["train"] | asked["test"])
    assert 180 <= distinct <= 200  # 10 x 10 terms, two operators
    assert 0.15 < len(asked["test"]) / distinct < 0.35


def test_a_task_is_the_same_in_every_instance_and_has_its_own_id() -> None:
    one, other = (ReasoningGym("reasoning_gym:chain_sum", **ONE_DIGIT) for _ in range(2))
    other.task("test", 999)
    tasks = [one.task(split, i) for split in SPLITS for i in range(50)]
    assert tasks == [other.task(split, i) for split in SPLITS for i in range(50)]
    assert len({task.id for task in tasks}) == 100
    assert ReasoningGym("reasoning_gym:chain_sum", seed=1, **ONE_DIGIT).task("train", 0) != tasks[0]


def test_the_last_number_of_the_reply_counts() -> None:
    env = ReasoningGym("reasoning_gym:products", min_digits=1, max_digits=1)
    task = env.task("train", 0)
    a, b = (int(number) for number in re.findall(r"\d+", task.data["question"]))
    for reply, correct in [
        (f"{a} times {b} is {a * b}.", True),
        (f"{a * b:,}", True),
        (f"not {a * b} but {a * b + 1}", False),
        ("", False),
    ]:
        env.reset(task)
        assert env.step(reply).done
        score = env.score()
        assert (score.correct, score.reward) == (correct, float(correct))


def test_other_answers_are_scored_by_the_library() -> None:
    env = ReasoningGym("reasoning_gym:spell_backward")
    task = env.task("test", 3)
    word = task.data["question"].split()[-1]
    env.reset(task)
    env.step(f"Let me see.\n{word[::-1]}")
    assert env.score().correct
    env.reset(task)
    env.step(f"<answer>{word[::-1]}</answer> is what I think.")
    assert env.score().correct
    env.reset(task)
    assert env.score().reward == 0  # an episode without a reply


def test_text_goes_around_the_question() -> None:
    env = ReasoningGym("reasoning_gym:gcd", prefix="Think. ", suffix=" Number only.")
    task = env.task("train", 0)
    (message,) = env.reset(task)
    assert message.content == f"Think. {task.data['question']} Number only."


def test_a_composite_of_tasks_can_be_made() -> None:
    parts = [{"name": "gcd", "weight": 2.0}, {"name": "lcm"}]
    env = ReasoningGym("reasoning_gym:composite", datasets=parts)
    questions = {env.task("train", i).data["question"] for i in range(20)}
    assert any("Divisor" in q for q in questions)
    assert any("Multiple" in q for q in questions)


def test_what_cannot_be_used_says_so() -> None:
    with pytest.raises(UsageError, match=r"no task 'chain_some'.*chain_sum"):
        ReasoningGym("reasoning_gym:chain_some")
    with pytest.raises(UsageError, match="max_terms must be"):
        ReasoningGym("reasoning_gym:chain_sum", min_terms=3, max_terms=2)
    with pytest.raises(UsageError, match="test_share"):
        ReasoningGym("reasoning_gym:chain_sum", test_share=1.0)
    env = ReasoningGym("reasoning_gym:spell_backward", extract="last_number")
    env.reset(env.task("train", 0))
    with pytest.raises(UsageError, match="is no number"):
        env.score()
    single = ReasoningGym("reasoning_gym:count_primes", min_n=1, max_n=1)
    with pytest.raises(UsageError, match="too few distinct"):
        [single.task(split, 0) for split in SPLITS]


@pytest.mark.slow
def test_every_task_of_the_library_can_be_asked_and_scored() -> None:
    from reasoning_gym.factory import DATASETS

    for name in sorted(DATASETS.keys() - {"composite"}):
        env = ReasoningGym(f"reasoning_gym:{name}")
        task = env.task("train", 2)
        for reply in ("", "nonsense <answer>[1</answer>", "7"):
            env.reset(task)
            env.step(reply)
            assert env.score().reward <= 1
