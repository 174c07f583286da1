from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.environments.base import NonFiniteReward, Score, Task, split_of


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_refused_where_it_is_made(bad: float) -> None:
    with pytest.raises(NonFiniteReward, match="reward"):
        Score(bad, {}, False)
    with pytest.raises(NonFiniteReward, match="length"):
        Score(1.0, {"length": bad}, True)


@given(st.text(), st.floats(0.01, 0.98), st.floats(0.001, 0.01))
def test_a_larger_test_share_only_adds_to_the_test_split(
    text: str, share: float, more: float
) -> None:
    if split_of(text, share) == "test":
        assert split_of(text, share + more) == "test"


def test_the_test_split_has_its_share() -> None:
    held_out = sum(split_of(f"question {i}", 0.25) == "test" for i in range(4000))
    assert 900 < held_out < 1100  # 3.6 standard deviations


def test_tasks_cross_a_process_border_unchanged() -> None:
    task = Task(id="a/train/1", environment="a", split="train", index=1, data={"x": [1, "two"]})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Task) == task
