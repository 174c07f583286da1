"""The figures of finished groups."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.rl.tally import Tally
from tests.rlcore.rl.made import a_rollout

ROLLOUTS = st.builds(
    a_rollout,
    sampled=st.lists(st.integers(0, 9), max_size=5),
    logprob=st.floats(-5, 0),
    reward=st.sampled_from([-1.0, 0.0, 1.0]),
    correct=st.booleans(),
    finish=st.sampled_from(["stop", "length", "turns"]),
)
GROUPS = st.lists(st.lists(ROLLOUTS, min_size=2, max_size=4), min_size=1, max_size=5)


def test_without_a_group_there_are_no_figures():
    tally = Tally()
    assert tally.metrics() == {}
    assert all(math.isnan(value) for value in (tally.entropy, tally.accuracy, tally.length))


@given(GROUPS)
def test_the_figures_are_those_of_all_rollouts_and_groups(groups):
    tally = Tally()
    for group in groups:
        tally.add(group)
    tally.failed["deadline"] += 2
    every = [rollout for group in groups for rollout in group]
    figures = tally.metrics()
    assert figures["groups"] == len(groups)
    assert figures["reward"] == pytest.approx(statistics.fmean(r.reward for r in every))
    assert figures["accuracy"] == pytest.approx(statistics.fmean(r.correct for r in every))
    assert figures["length"] == pytest.approx(statistics.fmean(r.sampled for r in every))
    cut = [r.finish_reason == "length" for r in every]
    assert figures["cut_off"] == pytest.approx(statistics.fmean(cut))
    assert figures["failed_episodes"] == 2
    tokens = [p for r in every for p, m in zip(r.logprobs, r.loss_mask, strict=True) if m]
    if tokens:
        assert tally.entropy == pytest.approx(-statistics.fmean(tokens), abs=1e-9)
    else:
        assert math.isnan(tally.entropy)


@given(GROUPS)
def test_all_right_and_all_wrong_groups_are_among_the_equal_ones(groups):
    tally = Tally()
    for group in groups:
        tally.add(group)
    equal = [group for group in groups if len({r.reward for r in group}) == 1]
    assert tally.equal == len(equal)
    assert tally.all_right == sum(all(r.correct for r in group) for group in equal)
    assert tally.all_wrong == sum(not any(r.correct for r in group) for group in equal)
