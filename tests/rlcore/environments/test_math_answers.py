from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rlcore.environments.math_answers import MathAnswers, gold_answer
from rlcore.errors import UsageError


def write(path: Path, rows: list[dict]) -> str:
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    return str(path)


@pytest.fixture
def gsm(tmp_path: Path) -> str:
    rows = [
        {"question": f"What is {i} plus 1000?", "answer": f"Add.\n#### {i + 1000:,}"}
        for i in range(60)
    ]
    return write(tmp_path / "gsm.jsonl", rows)


def test_splits_share_no_question_and_cover_the_file(gsm: str) -> None:
    env = MathAnswers("math_answers", file=gsm)
    asked = {
        split: {env.task(split, i).data["question"] for i in range(env.size(split) or 0)}
        for split in ("train", "test")
    }
    assert not asked["train"] & asked["test"]
    assert len(asked["train"]) + len(asked["test"]) == 60
    assert asked["test"]


def test_a_given_test_file_is_held_out_of_the_training_file(gsm: str, tmp_path: Path) -> None:
    rows = [{"question": "What is 3 plus 1000?", "answer": "1003"}]
    env = MathAnswers("math_answers", file=gsm, test_file=write(tmp_path / "test.jsonl", rows))
    assert (env.size("train"), env.size("test")) == (59, 1)


@pytest.mark.parametrize(
    ("row", "reply", "correct"),
    [
        ({"answer": "so\n#### 1,234"}, "The answer is 1234.", True),
        ({"answer": "so\n#### 1,234"}, "#### 1235", False),
        ({"answer": r"\frac{3}{4}"}, r"It is $\boxed{0.75}$.", True),
        ({"answer": "$x+1$"}, r"\boxed{1+x}", True),
        ({"solution": r"Thus \boxed{\frac{1}{2}}."}, "1/2", True),
        ({"answer": 5}, "", False),
        ({"answer": 5}, "no idea", False),
    ],
)
def test_equal_answers_are_equal_however_they_are_written(
    tmp_path: Path, row: dict, reply: str, correct: bool
) -> None:
    train = write(tmp_path / "train.jsonl", [{"problem": "other", "answer": 1}])
    test = write(tmp_path / "test.jsonl", [{"problem": "this", **row}])
    env = MathAnswers("math_answers", file=train, test_file=test, suffix=" Think.")
    assert env.reset(env.task("test", 0))[0].content == "this Think."
    env.step(reply)
    assert env.score().correct is correct


def test_the_last_box_counts_with_the_braces_in_it() -> None:
    solution = r"\boxed{1} or rather \boxed{\frac{a}{b}} it is"
    assert gold_answer({"solution": solution}) == r"\frac{a}{b}"
    for row in ({"solution": "none"}, {"solution": r"\boxed{1"}, {}):
        with pytest.raises(UsageError, match="no answer"):
            gold_answer(row)


def test_a_file_that_cannot_be_used_says_where(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        MathAnswers("math_answers", file=str(tmp_path / "none.jsonl"))
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "a", "answer": "1"}\n{"question": \n')
    with pytest.raises(UsageError, match="line 2"):
        MathAnswers("math_answers", file=str(broken))
    broken.write_text('{"q": "a", "answer": "1"}\n')
    with pytest.raises(UsageError, match="line 1: no text in question or problem"):
        MathAnswers("math_answers", file=str(broken))
    with pytest.raises(UsageError, match="1 training and 0 test"):
        MathAnswers("math_answers", file=write(broken, [{"question": "b", "answer": "1"}]))


def test_rewards_of_right_wrong_and_unboxed_replies_are_the_configured_ones(gsm: str) -> None:
    environment = MathAnswers("math_answers", file=gsm, right=1.0, wrong=-1.0, unboxed=-2.0)
    task = environment.task("train", 0)
    replies = {
        f"So \\boxed{{{task.data['answer']}}}": (1.0, True),
        "So \\boxed{123456789}": (-1.0, False),
        f"So {task.data['answer']}": (-2.0, False),
    }
    for reply, want in replies.items():
        environment.reset(task)
        environment.step(reply)
        score = environment.score()
        assert (score.reward, score.correct) == want
