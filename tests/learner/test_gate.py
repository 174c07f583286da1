"""The gate promotes what wins, hardly ever what does not, and nothing on too little traffic."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.gate import FEWEST_SPANS, SpanScore, judge

spans = st.lists(
    st.tuples(st.integers(1, 400), st.floats(1.0, 4.0)).map(
        lambda pair: SpanScore(pair[0] * pair[1], pair[0])
    ),
    min_size=FEWEST_SPANS,
    max_size=60,
)


def total(scores: list[SpanScore]) -> int:
    return sum(score.positions for score in scores)


@given(spans)
def test_equal_scores_never_promote(live):
    verdict = judge(live, live, fewest_tokens=1)
    assert not verdict.promote
    assert verdict.gain_lower == 0
    assert verdict.candidate_length == verdict.live_length


@given(spans, st.floats(0.01, 1.0))
def test_the_same_gain_at_every_position_promotes(live, gain):
    better = [SpanScore(s.length_sum + gain * s.positions, s.positions) for s in live]
    verdict = judge(better, live, fewest_tokens=1)
    assert verdict.promote
    assert verdict.gain_lower == pytest.approx(gain, rel=1e-6)
    assert not judge(live, better, fewest_tokens=1).promote


@given(spans, st.data())
def test_a_candidate_that_is_not_better_on_average_is_never_promoted(live, data):
    losses = data.draw(
        st.lists(st.floats(-50, 50), min_size=len(live), max_size=len(live)).filter(
            lambda values: sum(values) <= 0
        )
    )
    worse = [SpanScore(s.length_sum + d, s.positions) for s, d in zip(live, losses, strict=True)]
    assert not judge(worse, live, fewest_tokens=1).promote


@given(spans)
def test_too_few_tokens_or_spans_promote_nothing(live):
    better = [SpanScore(s.length_sum + s.positions, s.positions) for s in live]
    assert not judge(better, live, fewest_tokens=total(live) + 1).promote
    few = FEWEST_SPANS - 1
    assert not judge(better[:few], live[:few], fewest_tokens=1).promote


@given(spans, st.floats(0.01, 1.0))
def test_spans_without_positions_change_nothing(live, gain):
    better = [SpanScore(s.length_sum + gain * (i % 3), s.positions) for i, s in enumerate(live)]
    empty = [SpanScore(0.0, 0)] * 5
    assert judge(better + empty, live + empty, 1) == judge(better, live, 1)


def test_without_a_gain_about_one_judgement_in_twenty_promotes():
    """Spans of very different lengths, whose positions hang together: the hard case."""
    random.seed(4)
    trials, promoted = 3000, 0
    for _ in range(trials):
        live, candidate = [], []
        for _ in range(40):
            positions = random.choice((20, 60, 150, 300))
            shared = random.gauss(0, 0.15)  # one prompt suits one drafter, another the other
            noise = random.gauss(0, 0.5) / math.sqrt(positions)
            live.append(SpanScore(1.8 * positions, positions))
            candidate.append(SpanScore((1.8 + shared + noise) * positions, positions))
        promoted += judge(candidate, live, 5000).promote
    # At 5 % the count's standard deviation is 12; a ratio estimator is a little optimistic.
    assert promoted / trials <= 0.065


def test_a_gain_of_a_twentieth_is_found_in_five_thousand_tokens():
    random.seed(5)
    found = 0
    for _ in range(200):
        live, candidate = [], []
        for _ in range(60):
            positions = random.randint(60, 140)
            live.append(SpanScore(1.8 * positions, positions))
            gain = random.gauss(0.05, 0.1)
            candidate.append(SpanScore((1.8 + gain) * positions, positions))
        found += judge(candidate, live, 5000).promote
    assert found >= 180
