"""What speculation gains: both sides of the comparison, and when there is none."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.speculation.cost import ENOUGH, StepCost
from rlcore.speculation.gain import Gain, StepFacts, plain_seconds


def step(
    decoding: int = 2,
    others: int = 0,
    proposed: int = 3,
    verified: int | None = None,
    usual: bool | None = None,
    tokens: int = 4,
) -> StepFacts:
    verified = proposed * decoding if verified is None else verified
    usual = others == 0 if usual is None else usual
    return StepFacts(decoding, others, proposed, verified, usual, tokens)


def costs(**seconds: float) -> StepCost:
    """``k0=0.02``: of 2 requests with 0 drafts."""
    cost = StepCost()
    for name, value in seconds.items():
        for _ in range(ENOUGH):
            cost.observe(2, int(name[1:]), value)
    return cost


def test_tokens_that_take_one_and_a_half_times_as_long_plain():
    # 6 tokens for 2 requests: 3 plain steps of 20 ms, against one of 40 ms.
    cost = costs(k0=0.02, k3=0.04)
    assert plain_seconds(step(tokens=6), 0.04, cost) == pytest.approx(0.06)
    gain = Gain()
    for _ in range(10):
        gain.observe(step(tokens=6), 0.04, cost)
    assert gain.plain_seconds / gain.seconds == pytest.approx(1.5)
    assert (gain.decode_steps, gain.drafts, gain.tokens) == (10, 30, 60)
    assert gain.unknown_seconds == 0


def test_a_stall_takes_as_long_on_both_sides():
    cost = costs(k0=0.02, k3=0.04)
    usual = plain_seconds(step(), 0.04, cost)
    assert usual is not None
    assert plain_seconds(step(), 0.54, cost) == pytest.approx(usual + 0.5)


def test_a_prompt_read_beside_takes_as_long_on_both_sides():
    cost = costs(k0=0.02, k3=0.04)
    assert plain_seconds(step(others=1, tokens=6), 0.14, cost) == pytest.approx(0.06 + 0.1)
    assert plain_seconds(step(decoding=0, others=1, tokens=0), 0.3, cost) == 0.3


def test_a_step_without_drafts_is_its_own_estimate_measured_or_not():
    assert plain_seconds(step(proposed=0, tokens=2), 0.021, StepCost()) == 0.021
    assert plain_seconds(step(proposed=0, tokens=2), 0.021, costs(k0=0.02)) == 0.021


def test_without_a_plain_step_measured_nothing_is_claimed():
    gain = Gain()
    gain.observe(step(), 0.04, costs(k3=0.04))
    assert (gain.seconds, gain.plain_seconds, gain.unknown_seconds) == (0, 0, 0.04)


def test_between_two_numbers_of_drafts_only_the_plain_cost_is_asked_for():
    cost = costs(k0=0.02, k3=0.04)
    # 3 are proposed, none verified: no usual step of either kind.
    turning = step(verified=0, usual=False, tokens=2)
    assert plain_seconds(turning, 0.03, cost) == pytest.approx(0.02)


def test_a_prompt_beside_drafts_of_unknown_cost_is_not_compared():
    assert plain_seconds(step(others=1), 0.2, costs(k0=0.02)) is None
    assert plain_seconds(step(), 0.04, costs(k0=0.02)) == pytest.approx(0.04)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_clock_that_stands_still_or_jumps_is_ignored(seconds):
    gain = Gain()
    gain.observe(step(), seconds, costs(k0=0.02, k3=0.04))
    assert dataclasses.astuple(gain) == dataclasses.astuple(Gain())


def test_a_plain_cost_of_slower_days_does_not_make_a_gain_that_cannot_be():
    """As measured once: 9.8 tokens/s without drafts beside 44.6 with 1.5 tokens a step."""
    stale = costs(k0=0.1, k3=0.03)
    found = plain_seconds(step(tokens=3), 0.03, stale)
    assert found is not None
    assert found / 0.03 == pytest.approx(1.5)


durations = st.floats(1e-4, 10)


@given(
    plain=durations,
    drafted=durations,
    seen=st.lists(
        st.tuples(durations, st.integers(0, 3), st.integers(0, 2), st.integers(0, 8)), max_size=30
    ),
)
def test_totals_never_fall_and_hold_every_second_once(plain, drafted, seen):
    gain, cost, before = Gain(), costs(k0=plain, k3=drafted), (0.0,) * 6
    for seconds, proposed, others, tokens in seen:
        gain.observe(step(proposed=proposed, others=others, tokens=tokens), seconds, cost)
        now = dataclasses.astuple(gain)
        assert all(b >= a for a, b in zip(before, now, strict=True))
        before = now
    total = sum(seconds for seconds, *_ in seen)
    assert gain.seconds + gain.unknown_seconds == pytest.approx(total)
