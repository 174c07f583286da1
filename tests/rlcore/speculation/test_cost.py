"""Step costs: robust to noise, comparable across time, harmless with a broken clock."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.speculation.cost import BUCKETS, ENOUGH, StepCost, bucket


def test_a_cost_is_known_after_enough_steps_and_not_before():
    cost = StepCost()
    for count in range(ENOUGH):
        assert cost.seconds(4, 2) is None
        assert not cost.measured(4, 2)
        cost.observe(4, 2, 0.03 + count * 1e-6)
    assert cost.seconds(4, 2) == pytest.approx(0.03, rel=0.01)
    assert cost.seconds(4, 1) is None


def test_stalls_do_not_move_a_cost():
    cost, draw = StepCost(), random.Random(1)
    for step in range(300):
        stalled = step % 7 == 0
        cost.observe(1, 3, draw.gauss(0.030, 0.001) * (20 if stalled else 1))
    assert cost.seconds(1, 3) == pytest.approx(0.030, rel=0.25)


def test_a_machine_that_slows_down_slows_also_what_is_not_being_done():
    cost = StepCost()
    for _ in range(20):
        cost.observe(1, 0, 0.020)
        cost.observe(1, 3, 0.028)
    for _ in range(100):
        cost.observe(1, 3, 0.056)
    assert cost.seconds(1, 3) == pytest.approx(0.056, rel=0.02)
    assert cost.seconds(1, 0) == pytest.approx(0.040, rel=0.15)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_clock_that_stands_still_or_jumps_is_ignored(seconds):
    cost = StepCost()
    for _ in range(10):
        cost.observe(2, 1, seconds)
    assert cost.seconds(2, 1) is None
    for _ in range(10):
        cost.observe(2, 1, 0.01)
        cost.observe(2, 1, seconds)
    assert cost.seconds(2, 1) == pytest.approx(0.01)


@given(st.lists(st.floats(1e-5, 10.0), min_size=ENOUGH, max_size=200))
def test_a_cost_lies_within_what_was_seen(durations):
    cost = StepCost()
    for seconds in durations:
        cost.observe(1, 0, seconds)
    found = cost.seconds(1, 0)
    assert found is not None
    # The common factor lags behind, so the bound is loose by what it may move.
    assert min(durations) / 2 <= found <= max(durations) * 2


@given(st.integers(1, 100_000))
def test_every_batch_size_has_a_bucket_that_holds_it(batch):
    at = bucket(batch)
    assert batch <= BUCKETS[at] or at == len(BUCKETS) - 1
    assert at == 0 or batch > BUCKETS[at - 1]
