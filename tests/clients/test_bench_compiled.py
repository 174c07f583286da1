"""How far two servers' answers are apart."""

from __future__ import annotations

import pytest

from clients.bench.compiled import Answer, distance


def test_the_distance_counts_every_token_and_every_answer() -> None:
    reference = [Answer([-1.0, -2.0], "a"), Answer([-3.0], "b")]
    found = distance(reference, [Answer([-1.5, -2.0], "a"), Answer([-2.0], "c")])
    assert (found.tokens, found.same_answers, found.answers) == (3, 1, 2)
    assert found.mean == pytest.approx(0.5)
    assert found.max == pytest.approx(1.0)


def test_equal_servers_are_at_no_distance() -> None:
    answers = [Answer([-1.0], "a")] * 3
    found = distance(answers, answers)
    assert (found.mean, found.p99, found.max, found.same_answers) == (0.0, 0.0, 0.0, 3)


def test_answers_to_different_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        distance([Answer([-1.0], "a")], [])
