"""A sample is made of two readings: rates of the window, shares that add up, nothing that is not known."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.engine.shares import ServedCount
from rlcore.feed import LearnerSample, Sample, ShareSample, TraceSample
from rlcore.records.acceptance import AcceptanceCount
from rlcore.records.engine_link import OTHER_SHARES, ShareCount, SpeculationReport
from server.reading import (
    DIGITS,
    NAMED_SHARES,
    Facts,
    Reading,
    all_versions,
    largest,
    make_sample,
)

FACTS = Facts(
    time=1000.0, most_drafts=2, draft_version=4, draft_collapsed=False, policy_version=1,
    learner=LearnerSample(state="off"), traces=TraceSample(captured=3),
)  # fmt: skip


def count(*observed: tuple[int, int], version: int = 4) -> AcceptanceCount:
    made = AcceptanceCount(version)
    for k, accepted in observed:
        made.observe(k, accepted)
    return made


def speculation(steps: int, drafts: int, seconds: float, plain: float, unknown: float = 0.0):
    return SpeculationReport(
        "s", 2, steps, drafts, 0, seconds, plain, unknown, running=3, waiting=1
    )


def reading(at: float, **changes: object) -> Reading:
    return Reading(at=at, counted_at=at, timed_at=at, **changes)  # type: ignore[arg-type]


def sample(before: Reading, now: Reading, lengths: dict | None = None) -> Sample:
    return make_sample(before, now, FACTS, {} if lengths is None else lengths)


BEFORE = reading(
    0.0,
    served={"a": ServedCount(100, 1)},
    acceptance=all_versions([count((2, 2), (2, 0))], 2),
    shares={"a": ShareCount("a", 2, 4, 1)},
    speculation=speculation(10, 20, 2.0, 2.0),
)
NOW = reading(
    10.0,
    served={"a": ServedCount(500, 1), "b": ServedCount(200, 2)},
    acceptance=all_versions([count((2, 2), (2, 0), (2, 1), (2, 2), (1, 0), (0, 0))], 2),
    shares={"a": ShareCount("a", 12, 29, 3)},
    speculation=speculation(110, 320, 8.0, 11.0, 1.0),
)


def test_rates_are_those_between_the_two_readings():
    found = sample(BEFORE, NOW)
    assert found.tokens_per_s == 60.0
    assert found.speedup == 1.5  # 9 s without speculation for 6 s with it
    assert found.plain_tokens_per_s == 40.0
    assert found.busy == 0.7
    assert (found.drafts.mean, found.drafts.now, found.drafts.most) == (3.0, 2, 2)
    assert (found.running, found.waiting) == (3, 1)
    assert found.acceptance_length == 2.0
    assert found.acceptance == (pytest.approx(2 / 3, abs=1e-4), 0.5)
    assert found.drafted_steps_per_s == 0.3
    assert found.plain_steps_per_s == 0.1


def test_tenants_have_their_own_rates_and_lengths():
    a, b = sample(BEFORE, NOW).tenants
    assert (a.name, a.tokens_per_s, a.tokens, a.running) == ("a", 40.0, 500, 1)
    assert (a.acceptance_length, a.traces) == (2.5, 3)
    assert (b.name, b.tokens_per_s, b.acceptance_length, b.traces) == ("b", 20.0, None, 0)


def test_a_tenants_length_stays_known_when_none_of_its_requests_has_ended():
    lengths: dict = {}
    sample(BEFORE, NOW, lengths)
    later = msgspec.structs.asdict(sample(NOW, NOW, lengths).tenants[0])
    assert later["acceptance_length"] == 2.5
    assert later["tokens_per_s"] == 0.0


def test_of_nothing_nothing_is_claimed():
    found = sample(reading(5.0), reading(6.0))
    assert found.tokens_per_s == 0.0
    assert found.acceptance == (None, None)
    assert [found.speedup, found.plain_tokens_per_s, found.busy, found.acceptance_length] == [
        None
    ] * 4
    assert found.drafts.mean is None
    assert found.drafts.now is None
    assert found.tenants == ()


def test_a_single_reading_has_no_rates():
    found = sample(NOW, NOW)
    assert (found.tokens_per_s, found.drafted_steps_per_s, found.speedup) == (0.0, 0.0, None)


def test_a_speed_up_of_less_than_half_of_the_time_is_not_told():
    mostly_unknown = speculation(110, 320, 8.0, 11.0, 7.0)
    now = reading(10.0, speculation=mostly_unknown, served=NOW.served)
    found = sample(BEFORE, now)
    assert found.speedup is None
    assert found.busy == 1.0


def test_adapters_are_told_of_their_decode_steps():
    before = reading(0.0, adapters={"poet": count((2, 2))})
    now = reading(10.0, adapters={"poet": count((2, 2), (2, 1), (0, 0))})
    (poet,) = sample(before, now).adapters
    assert (poet.name, poet.tokens, poet.tokens_per_s) == ("poet", 6, 0.3)
    assert (poet.acceptance_length, poet.running, poet.traces) == (2.0, None, None)


shares = st.builds(
    ShareSample, name=st.text(max_size=3), tokens_per_s=st.integers(0, 9).map(float),
    tokens=st.integers(0, 1000), running=st.integers(0, 5), acceptance_length=st.none(),
    traces=st.integers(0, 9),
)  # fmt: skip


@given(st.lists(shares, max_size=3 * NAMED_SHARES, unique_by=lambda share: share.name))
def test_few_are_named_and_none_is_lost(every):
    told = largest(every)
    assert len(told) <= NAMED_SHARES + 1
    for field in ("tokens", "running", "traces", "tokens_per_s"):
        assert sum(getattr(s, field) for s in told) == sum(getattr(s, field) for s in every)
    named = [s.tokens for s in told if s.name != OTHER_SHARES]
    assert named == sorted(named, reverse=True)
    assert len({s.name for s in told}) == len(told)


@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=9), max_size=4))
def test_versions_add_up(observed):
    made = [
        count(*((k, min(k, a)) for k, a in pairs), version=i) for i, pairs in enumerate(observed)
    ]
    total = all_versions(made, 4)
    assert total.steps == sum(c.steps for c in made)
    assert total.emitted == sum(c.emitted for c in made)
    assert sum(total.drafted) == sum(sum(c.drafted) for c in made)
    assert len(total.accepted) == 4


numbers = st.integers(0, 10**6)
readings = st.builds(
    Reading,
    at=st.floats(0, 100),
    served=st.dictionaries(st.text(max_size=2), st.builds(ServedCount, numbers, numbers), max_size=3),
    acceptance=st.none()
    | st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6).map(
        lambda pairs: all_versions([count(*((k, min(k, a)) for k, a in pairs))], 2)
    ),
    counted_at=st.floats(0, 100),
    timed_at=st.floats(0, 100),
    speculation=st.none()
    | st.builds(
        SpeculationReport, st.just("s"), numbers, numbers, numbers, numbers,
        st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6),
    ),
)  # fmt: skip


@given(readings, readings)
def test_whatever_the_totals_a_sample_can_be_sent_and_has_no_negative_rate(before, now):
    found = sample(before, now)
    again = msgspec.json.decode(msgspec.json.encode(found), type=Sample)
    assert again == found
    rates = [found.tokens_per_s, found.drafted_steps_per_s, found.plain_steps_per_s]
    assert all(rate >= 0 and math.isfinite(rate) for rate in rates)
    if found.speedup is not None:
        assert found.speedup >= 0
    assert round(found.tokens_per_s, DIGITS) == found.tokens_per_s
