"""Accuracy is a mean over tasks, and its standard error that of this mean."""

from __future__ import annotations

import math

import pytest

from rlcore.rl.evaluate import summarise
from tests.rlcore.rl.made import a_rollout


def played(right: str) -> list:
    """``1`` a right sample, ``0`` a wrong one, ``-`` one that failed."""
    return [
        None if c == "-" else a_rollout(correct=c == "1", reward=2.0 * (c == "1")) for c in right
    ]


def test_the_standard_error_is_that_of_the_mean_over_tasks():
    result = summarise([played("11"), played("10"), played("00"), played("10")], 2)
    assert result.accuracy == 0.5
    # deviations 0.5, 0, -0.5, 0: variance 0.5 / 3, of the mean a quarter of it
    assert result.standard_error == pytest.approx(math.sqrt(0.5 / 3 / 4))
    assert (result.tasks, result.samples, result.failed) == (4, 2, 0)
    assert (result.reward, result.length) == (1.0, 2.0)


def test_each_task_counts_once_however_many_of_its_samples_failed():
    result = summarise([played("1--"), played("000")], 3)
    assert result.accuracy == 0.5
    assert result.failed == 2
    assert result.reward == 0.5


def test_a_task_without_a_sample_is_left_out():
    result = summarise([played("--"), played("11"), played("01")], 2)
    assert (result.tasks, result.failed, result.accuracy) == (2, 2, 0.75)


@pytest.mark.parametrize("tasks", [[], [played("-")], [played("--"), played("--")]])
def test_without_any_sample_there_is_no_accuracy(tasks):
    result = summarise(tasks, 2)
    assert result.tasks == 0
    assert all(
        math.isnan(value)
        for value in (result.accuracy, result.standard_error, result.reward, result.length)
    )


def test_one_task_has_no_standard_error():
    result = summarise([played("1")], 1)
    assert result.accuracy == 1.0
    assert math.isnan(result.standard_error)
