"""The pace follows gain and cost, slows down on a plateau, idles at its end, wakes on drift."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.pace import (
    DRIFT_LR,
    EARLY_HELDOUT,
    FIRST_COST,
    IDLE_JUDGEMENTS,
    JUDGING_SHARE,
    LARGEST_CHANGE,
    LONGEST_INTERVAL,
    LR_FLOOR,
    PATIENCE,
    PLATEAU_TOKENS,
    SHORTEST_INTERVAL,
    TRAINED_LR,
    WAKE_FACTOR,
    Outcome,
    Pace,
    Traffic,
)


def traffic(served: int, speed: float = 50.0, trained: int | None = None) -> Traffic:
    """All that was served was trained twice, unless said otherwise; a tenth is held out."""
    heldout = served // 10
    trained = 2 * served if trained is None else trained
    return Traffic(served - heldout, heldout, trained, speed)


def gains(gain: float, length: float = 1.7, seconds: float = 0.1) -> Outcome:
    return Outcome(gain, gain - 0.01, length, gain > 0.01, seconds)


NOTHING = Outcome(0.0, -0.02, 1.7, False, 0.1)


def idle(start: Pace) -> int:
    """Judge without a gain until the learner stops; the tokens served by then."""
    served = 0
    while start.pacing(traffic(served)).train:
        served += PLATEAU_TOKENS
        assert served < 500_000
        start.judged(NOTHING, traffic(served))
    return served


def test_an_untrained_drafter_starts_fast_and_a_trained_one_gently():
    fast = Pace(trained=False).pacing(traffic(0))
    assert (fast.lr_scale, fast.publish_interval_s) == (1.0, SHORTEST_INTERVAL)
    assert (fast.train, fast.judge_now, fast.least_gain) == (True, False, 0.0)
    assert Pace(trained=True).pacing(traffic(0)).lr_scale == TRAINED_LR


def test_a_promotion_keeps_the_learning_rate_and_a_plateau_halves_it():
    pace = Pace(trained=False)
    for number in range(1, 10):
        pace.judged(gains(0.1), traffic(5000 * number))
    assert pace.pacing(traffic(50_000)).lr_scale == 1.0
    for number in range(1, PATIENCE + 1):
        assert pace.pacing(traffic(50_000)).lr_scale == 1.0
        pace.judged(NOTHING, traffic(50_000 + PLATEAU_TOKENS * number))
    assert pace.pacing(traffic(60_000)).lr_scale == 0.5


def test_judgements_with_hardly_any_training_in_between_say_nothing_of_the_learning_rate():
    pace = Pace(trained=False)
    for number in range(50):
        pace.judged(NOTHING, traffic(1000, trained=PLATEAU_TOKENS - 1 - number % 2))
    assert pace.pacing(traffic(1000)).lr_scale == 1.0
    for number in range(50):  # the first of these counts, and the others are too close to it
        pace.judged(NOTHING, traffic(1000, trained=PLATEAU_TOKENS + number))
    assert pace.pacing(traffic(1000)).lr_scale == 1.0


def test_at_the_floor_without_a_gain_the_learner_idles_until_there_is_much_new_traffic():
    pace = Pace(trained=True)
    served = idle(pace)
    halvings = math.ceil(math.log2(TRAINED_LR / LR_FLOOR))
    assert served == PLATEAU_TOKENS * (PATIENCE * halvings + IDLE_JUDGEMENTS)
    almost = traffic(int(WAKE_FACTOR * served) - 100)
    assert not pace.pacing(almost).train
    assert pace.pacing(almost).reason.startswith("idle")
    awake = pace.pacing(traffic(int(WAKE_FACTOR * served) + 10))
    assert awake.train
    assert awake.lr_scale == TRAINED_LR


def test_drift_wakes_the_learner_and_has_it_judge_as_soon_as_there_is_new_heldout_traffic():
    pace = Pace(trained=False)
    served = idle(pace)
    assert pace.pacing(traffic(served)).publish_interval_s > 4 * SHORTEST_INTERVAL
    pace.drifted(traffic(served))
    now = pace.pacing(traffic(served + 10 * EARLY_HELDOUT - 10))
    assert (now.train, now.judge_now, now.lr_scale) == (True, False, DRIFT_LR)
    assert now.publish_interval_s == SHORTEST_INTERVAL
    enough = traffic(served + 10 * EARLY_HELDOUT)
    assert pace.pacing(enough).judge_now
    pace.judged(gains(0.1), enough)
    assert not pace.pacing(enough).judge_now
    since = 10 * EARLY_HELDOUT  # gain per token served since the drift, not since the last version
    best = math.sqrt(2 * FIRST_COST * 1.7 * since / 0.1) / 50
    assert pace.pacing(enough).publish_interval_s == pytest.approx(best)


def test_drift_does_not_lower_a_learning_rate():
    pace = Pace(trained=False)
    pace.drifted(traffic(0))
    assert pace.pacing(traffic(0)).lr_scale == 1.0


def test_what_won_is_no_plateau_and_counts_from_when_it_is_live():
    def after(*published: int) -> Pace:
        pace = Pace(trained=False)
        pace.judged(gains(0.1), traffic(5000))
        for served in published:
            pace.published(served)
        pace.judged(gains(0.1), traffic(10_000))
        return pace

    refused, taken = after().pacing(traffic(10_000)), after(5000).pacing(traffic(10_000))
    assert refused.lr_scale == taken.lr_scale == 1.0
    slower = refused.publish_interval_s / taken.publish_interval_s
    assert slower == pytest.approx(math.sqrt(2))  # as much was gained in twice the tokens


def test_without_traffic_a_swap_is_in_nobodys_way():
    pace = Pace(trained=False)
    pace.judged(gains(0.02), traffic(50_000))
    assert pace.pacing(traffic(50_000, speed=0.1)).publish_interval_s == LONGEST_INTERVAL
    assert pace.pacing(traffic(50_000, speed=0.0)).publish_interval_s == SHORTEST_INTERVAL


def test_a_rolled_back_version_slows_learning_and_publishing():
    pace = Pace(trained=False)
    pace.judged(gains(0.1), traffic(5000))
    before = pace.pacing(traffic(5000))
    pace.rolled_back()
    after = pace.pacing(traffic(5000))
    assert after.lr_scale == before.lr_scale / 2
    assert after.publish_interval_s == pytest.approx(LARGEST_CHANGE * before.publish_interval_s)


@given(st.floats(0.02, 1.0), st.floats(1.1, 8), st.floats(20, 2000), st.integers(2000, 10**6))
def test_the_interval_shrinks_with_the_gain_and_grows_with_the_cost(gain, factor, cost, served):
    def interval(gain: float, cost: float) -> float:
        pace = Pace(trained=False)
        pace.swapped(0.0, cost, traffic(0))
        pace.judged(gains(gain), traffic(served))
        return pace.pacing(traffic(served)).publish_interval_s

    plain = interval(gain, cost)
    assert interval(gain * factor, cost) <= plain <= interval(gain, cost * factor)
    if SHORTEST_INTERVAL < plain < LONGEST_INTERVAL - 1e-6:
        assert plain == pytest.approx(math.sqrt(2 * cost * 1.7 * served / gain) / 50)


@given(st.floats(0.02, 1.0), st.integers(2000, 10**6))
def test_a_swap_has_to_gain_its_cost_over_the_interval(gain, served):
    pace = Pace(trained=False)
    pace.judged(gains(gain), traffic(served))
    now = pace.pacing(traffic(served))
    if SHORTEST_INTERVAL < now.publish_interval_s < LONGEST_INTERVAL:
        tokens = now.publish_interval_s * 50
        assert now.least_gain / 1.7 * tokens == pytest.approx(FIRST_COST)


def test_a_real_gain_too_small_for_a_swap_is_no_plateau():
    pace = Pace(trained=False)
    pace.judged(gains(0.3), traffic(3000))
    least = pace.pacing(traffic(3000)).least_gain
    for number in range(1, 2 * PATIENCE):
        small = Outcome(least / 2, least / 4, 1.7, False, 0.1)
        pace.judged(small, traffic(3000 + 2000 * number))
        if pace.pacing(traffic(0)).least_gain < least / 2:
            break
    assert pace.pacing(traffic(0)).lr_scale == 1.0
    assert pace.pacing(traffic(0)).least_gain < least / 2  # so it is published in the end


def test_one_judgement_lengthens_the_interval_by_a_bounded_factor():
    pace = Pace(trained=False)
    pace.judged(gains(0.3), traffic(30_000))
    before = pace.pacing(traffic(30_000)).publish_interval_s
    pace.judged(NOTHING, traffic(300_000))
    after = pace.pacing(traffic(300_000)).publish_interval_s
    assert after == pytest.approx(LARGEST_CHANGE * before)


def test_judging_takes_a_bounded_share_of_the_time():
    pace = Pace(trained=False)
    pace.judged(gains(0.5, seconds=12.0), traffic(2000))
    assert pace.pacing(traffic(2000)).publish_interval_s == pytest.approx(12.0 / JUDGING_SHARE)


def test_measured_costs_replace_the_assumed_one():
    pace = Pace(trained=False)
    for _ in range(3):
        pace.swapped(0.5, 200.0, traffic(0, speed=100.0))
    for wrong in (math.nan, math.inf, 1e308, -1.0):
        pace.swapped(0.0, wrong, traffic(0))
    assert pace.state()["cost"] == pytest.approx(250.0)


@pytest.mark.parametrize("gain", [math.nan, math.inf, -math.inf, 1e308, -1e308])
def test_a_gain_that_cannot_be_counts_as_none(gain):
    pace, other = Pace(trained=False), Pace(trained=False)
    pace.judged(Outcome(gain, gain, 1.7, False, 0.1), traffic(5000))
    other.judged(NOTHING, traffic(5000))
    assert pace.state() == other.state()


events = st.lists(
    st.tuples(
        st.sampled_from(["judged", "published", "swapped", "drifted", "rolled_back", "pacing"]),
        st.floats(allow_nan=True, allow_infinity=True),
        st.floats(0, 100),
        st.booleans(),
        st.integers(0, 20_000),
        st.floats(0, 5000),
    ),
    max_size=60,
)


def apply(pace: Pace, rows: list, served: int = 0) -> int:
    for kind, gain, seconds, won, more, speed in rows:
        served += more
        now = traffic(served, speed)
        if kind == "judged":
            pace.judged(Outcome(gain, gain - 0.01, 1.0 + seconds / 50, won, seconds), now)
        elif kind == "swapped":
            pace.swapped(seconds, gain, now)
        elif kind == "published":
            pace.published(served)
        elif kind == "drifted":
            pace.drifted(now)
        elif kind == "rolled_back":
            pace.rolled_back()
        found = pace.pacing(now)
        assert LR_FLOOR <= found.lr_scale <= 1
        assert SHORTEST_INTERVAL <= found.publish_interval_s <= LONGEST_INTERVAL
        assert 0 <= found.least_gain < math.inf
        assert found.reason
    return served


@given(events, st.integers(0, 60), st.booleans())
def test_whatever_comes_outputs_are_bounded_and_a_restart_goes_on(rows, cut, trained):
    straight, before, after = Pace(trained), Pace(trained), Pace(trained)
    apply(straight, rows)
    served = apply(before, rows[:cut])
    after.load_state(json.loads(json.dumps(before.state())))
    apply(after, rows[cut:], served)
    assert after.state() == straight.state()


def lost_tokens(cost: float, interval: float | None) -> float:
    """Tokens lost while 300,000 are served, against swapping for nothing at all times.

    Acceptance length grows as 1 + 0.9 (1 - exp(-n / 30,000)) with n tokens served, at 50 a second.
    ``interval`` None: as the controller says.
    """
    draw = random.Random(1)
    pace = Pace(trained=False)
    speed, live, lost, served = 50.0, 1.0, 0.0, 0

    def reachable(tokens: int) -> float:
        return 1 + 0.9 * (1 - math.exp(-tokens / 30_000))

    while served < 300_000:
        now = pace.pacing(traffic(served))
        part = int(speed * (interval or now.publish_interval_s))
        lost += part * (1 - live / reachable(served + part // 2))
        served += part
        gain = reachable(served) - live
        measured = gain + draw.gauss(0, 0.005)
        promoted = measured > 0.008 and (interval is not None or measured >= now.least_gain)
        if promoted:
            live = reachable(served)
            lost += cost
            pace.swapped(0.0, cost, traffic(served))
        pace.judged(Outcome(measured, measured - 0.008, live, promoted, 0.1), traffic(served))
        if promoted:
            pace.published(served)
    return lost


@pytest.mark.parametrize("cost", [30.0, 300.0, 1000.0])
def test_the_controller_loses_no_more_than_the_best_fixed_interval(cost):
    """Which is another one for each cost, and known only afterwards; 5 % for the noise of one run."""
    best = min(lost_tokens(cost, interval) for interval in (15, 30, 60, 120, 240, 480))
    assert lost_tokens(cost, None) <= 1.05 * best
