"""The alarm is raised when length grows and accuracy does not, and hardly ever otherwise."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.asynchrony.length_alarm import CALM, LEAST_POINTS, LengthAlarm, LengthWatch


def run(
    seed: int,
    updates: int,
    length: Callable[[int], float],
    accuracy: Callable[[int], float],
    noise: float = 0.08,
) -> list[LengthAlarm]:
    """``noise``: share of the length; that of the accuracy is 0.05."""
    draw = random.Random(seed)
    watch = LengthWatch()
    return [
        watch.observe(
            length(update) * math.exp(draw.gauss(0, noise)),
            min(1.0, max(0.0, accuracy(update) + draw.gauss(0, 0.05))),
        )
        for update in range(updates)
    ]


def begins(alarms: list[LengthAlarm]) -> list[int]:
    return [update for update, alarm in enumerate(alarms) if alarm.on and alarm.changed]


@pytest.mark.parametrize("seed", range(3))
def test_growth_without_better_answers_raises_it(seed):
    fast = begins(run(seed, 60, lambda u: 100 * 1.01**u, lambda u: 0.5))
    assert LEAST_POINTS <= fast[0] + 1 <= 55
    slow = begins(run(seed, 150, lambda u: 100 * 1.003**u, lambda u: 0.5))
    assert slow
    worse = begins(run(seed, 60, lambda u: 100 * 1.01**u, lambda u: 0.8 - 0.005 * u))
    assert worse[0] <= fast[0]


@pytest.mark.parametrize("seed", range(3))
def test_growth_that_makes_answers_better_does_not(seed):
    assert not begins(run(seed, 100, lambda u: 100 * 1.01**u, lambda u: 0.2 + 0.007 * u))


@pytest.mark.parametrize("noise", [0.08, 0.3])
def test_flat_runs_hardly_ever_raise_it(noise):
    for seed in range(2):
        assert not begins(run(seed, 400, lambda u: 100, lambda u: 0.5, noise))


def test_an_alarm_ends_after_calm_updates_in_a_row():
    watch = LengthWatch()
    watch.load_state({"history": [], "on": True, "calm": 0})
    assert [watch.observe(100, 0.5).on for _ in range(CALM)] == [True] * (CALM - 1) + [False]


def test_shrinking_completions_do_not_raise_it():
    assert not begins(run(0, 150, lambda u: 200 * 0.99**u, lambda u: 0.5))


def test_growth_that_pays_no_longer_is_found_after_growth_that_did():
    alarms = run(1, 160, lambda u: 100 * 1.01**u, lambda u: 0.2 + 0.007 * min(u, 80))
    assert 80 < begins(alarms)[0] < 140


def test_a_small_growth_is_of_no_interest_however_certain():
    watch = LengthWatch()
    for update in range(200):
        assert not watch.observe(100 * 1.0008**update, 0.5).on


def test_a_single_odd_batch_does_not_raise_it():
    odd = run(2, 100, lambda u: 1000 if u in (40, 70, 71) else 100, lambda u: 0.5)
    assert not begins(odd)


@pytest.mark.parametrize("seed", range(3))
def test_it_ends_once_the_growth_has_stopped_and_does_not_flutter(seed):
    alarms = run(seed, 400, lambda u: 100 * 1.01 ** max(0, min(u - 100, 70)), lambda u: 0.5)
    changes = [update for update, alarm in enumerate(alarms) if alarm.changed]
    assert len(changes) == 2
    assert 100 < changes[0] < 170 + CALM < changes[1] < 320
    assert not alarms[-1].on


def test_the_reason_has_both_trends():
    alarm = run(0, 60, lambda u: 100 * 1.02**u, lambda u: 0.5)[-1]
    assert alarm.on
    assert alarm.growth == pytest.approx(1.02**31 - 1, rel=0.3)
    assert abs(alarm.accuracy_change) < 0.15
    assert alarm.reason.startswith(f"length +{alarm.growth:.0%} (z ")
    assert f"accuracy {alarm.accuracy_change:+.3f}" in alarm.reason


def test_lengths_all_equal_are_no_trend():
    watch = LengthWatch()
    alarms = [watch.observe(24.0, 0.5) for _ in range(150)]
    assert (alarms[-1].on, alarms[-1].growth) == (False, 0.0)


def test_an_update_that_says_nothing_is_left_out():
    watch = LengthWatch()
    watch.observe(100, 0.5)
    before = watch.state()
    for length, accuracy in ((math.nan, 0.5), (0.0, 0.5), (100, math.inf)):
        assert watch.observe(length, accuracy).reason == "nothing to judge by"
    assert watch.state() == before


@settings(max_examples=5)
@given(st.integers(0, 10**6), st.integers(0, 50))
def test_a_resumed_watch_goes_on_as_it_would_have(seed, killed_at):
    draw = random.Random(seed)
    script = [(100 * 1.01**u * draw.uniform(0.9, 1.1), draw.random()) for u in range(50)]
    straight, killed = LengthWatch(), LengthWatch()
    for update, (length, accuracy) in enumerate(script):
        if update == killed_at:
            saved = json.loads(json.dumps(killed.state()))
            killed = LengthWatch()
            killed.load_state(saved)
        assert straight.observe(length, accuracy) == killed.observe(length, accuracy)
