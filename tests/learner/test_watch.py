"""The watch rolls a worse version back soon, an equal one hardly ever, and survives a restart."""

import json
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import watch
from learner.watch import (
    COLLAPSE_REQUESTS,
    LEAD_TOKENS,
    LEAST_STEPS,
    WATCH_STEPS,
    Evidence,
    Watch,
    WatchResult,
    log_mixture,
)
from tests.learner.recorded import Pair, acceptance_length, paired_steps, shorter

RECORDED = [
    ("gsm8k", 11, 9), ("gsm8k", 12, 11), ("gsm8k", 3, 8), ("general", 4, 5), ("general", 3, 4)
]  # fmt: skip
"""Pairs of neighbouring versions."""


def equal_request(draw: random.Random, pairs: list[Pair]) -> Pair:
    """Roles by a coin: two versions of which neither is better, with their real differences."""
    tokens, one, other = draw.choice(pairs)
    return (tokens, one, other) if draw.random() < 0.5 else (tokens, other, one)


def watch_until_decided(draw: random.Random, pairs: list[Pair], drop: float) -> WatchResult:
    """``drop``: how much acceptance length the live version loses; its length, for all of it."""
    length = acceptance_length(pairs)
    observed = Watch(2, 1)
    result = observed.result()
    for number in range(10_000):
        tokens, live, predecessor = equal_request(draw, pairs)
        if drop:
            live = shorter(draw, tokens, live, length, drop)
        result = observed.observe("default", f"r{number}", tokens, live, predecessor)
        if result.decision != "continue":
            break
    return result


@settings(max_examples=40)
@given(st.floats(-8, 8), st.floats(0, 60))
def test_the_mixture_is_the_integral_it_claims_to_be(total, squares):
    width, top = 2e-3, 12.0  # the half-normal's deviation is 0.8
    scale = math.sqrt(watch.MIXING)
    integral = sum(
        math.exp(x * total - x * x * squares / 2 - (x / scale) ** 2 / 2)
        for x in (width * (i + 0.5) for i in range(int(top / width)))
    )
    integral *= 2 * width / (scale * math.sqrt(2 * math.pi))
    assert log_mixture(total, squares) == pytest.approx(math.log(integral), abs=0.01)


@given(st.floats(0, 50), st.floats(0, 5))
def test_evidence_does_not_grow_on_average_against_an_equal_or_better_version(size, better):
    """One loss of +size or -size, as likely, less what the version is better by."""
    first = Evidence(), Evidence()
    first[0].replace(0.0, size - better)
    first[1].replace(0.0, -size - better)
    assert sum(math.exp(evidence.against()) for evidence in first) / 2 <= 1 + 1e-12
    # Ville's inequality needs it at every step, so for every single l of the mixture.
    for weight in (0.01, 0.1, 0.3, 1.0, 3.0):
        grown = weight * (size - better), weight * (-size - better)
        assert sum(math.exp(x - x * x / 2) for x in grown) / 2 <= 1 + 1e-12


@pytest.mark.parametrize(("traffic", "one", "other"), RECORDED)
def test_an_equal_version_is_rolled_back_in_at_most_one_watch_of_a_hundred(
    traffic, one, other, monkeypatch
):
    """Without the tolerance, so that the test's validity does not lean on it."""
    monkeypatch.setattr(watch, "TOLERANCE", 0.0)
    draw = random.Random(1)
    pairs = paired_steps(traffic, one, other)
    results = [watch_until_decided(draw, pairs, 0.0) for _ in range(200)]
    assert sum(r.decision == "roll_back" for r in results) <= 2


@pytest.mark.parametrize(("traffic", "one", "other"), RECORDED)
def test_a_loss_of_three_tenths_is_found_within_about_forty_requests(traffic, one, other):
    draw = random.Random(2)
    pairs = paired_steps(traffic, one, other)
    results = [watch_until_decided(draw, pairs, 0.3) for _ in range(60)]
    assert all(r.decision == "roll_back" for r in results)
    assert all(r.reason.startswith(("worse: ", "worse for", "collapsed: ")) for r in results)
    assert statistics.median(r.requests for r in results) <= 36
    assert statistics.quantiles([r.requests for r in results], n=10)[-1] <= 50


@pytest.mark.parametrize(("traffic", "one", "other"), RECORDED)
def test_a_collapsed_version_is_rolled_back_within_a_handful_of_requests(traffic, one, other):
    draw = random.Random(3)
    pairs = paired_steps(traffic, one, other)
    for _ in range(20):
        result = watch_until_decided(draw, pairs, acceptance_length(pairs) - 1)
        assert result.decision == "roll_back"
        assert result.live_length == 1.0
        assert COLLAPSE_REQUESTS <= result.requests <= 8


def test_a_version_on_which_nothing_is_accepted_as_before_stays():
    """Nonsense traffic: going back would change nothing."""
    observed = Watch(2, 1)
    for number in range(WATCH_STEPS // 95):
        result = observed.observe("t", f"r{number}", 100, 99 - number % 5, 95 + number % 5)
        assert result.decision != "roll_back"


def test_recorded_versions_are_ordered_as_they_are():
    """Live traffic really served: the later version is the better one by 0.24 and by 0.25."""
    for traffic, worse, better in (("gsm8k", 9, 12), ("general", 4, 5)):
        kept = rolled_back = 0
        for seed in range(30):
            draw = random.Random(seed)
            decided = {"worse live": Watch(2, 1), "better live": Watch(2, 1)}
            for number, (tokens, one, other) in enumerate(
                draw.sample(paired_steps(traffic, worse, better), 140)
            ):
                decided["worse live"].observe("t", f"r{number}", tokens, one, other)
                decided["better live"].observe("t", f"r{number}", tokens, other, one)
            rolled_back += decided["worse live"].result().decision == "roll_back"
            kept += decided["better live"].result().reason.startswith("not worse")
        assert rolled_back >= 28
        assert kept == 30


def test_a_better_version_is_kept_early_and_any_other_when_the_watch_is_over():
    better, same = Watch(2, 1), Watch(2, 1)
    for number in range(WATCH_STEPS // 50):
        early = better.observe("t", f"r{number}", 100, 50, 60 + number % 3)
        late = same.observe("t", f"r{number}", 100, 50, 50 + 30 * (number % 2) - 15)
        assert late.decision == ("keep" if late.steps >= WATCH_STEPS else "continue")
    assert early.decision == "keep"
    assert early.reason.startswith("not worse")
    assert LEAST_STEPS <= early.steps < LEAST_STEPS + 50
    assert late.reason.startswith("watch over")


def test_a_tenant_that_may_be_harmed_keeps_the_watch_open():
    observed = Watch(2, 1)
    observed.observe("b", "r", 100, 60, 50)
    for number in range(40):
        result = observed.observe("a", f"r{number}", 100, 50, 60 + number % 3)
    assert result.steps > LEAST_STEPS
    assert result.decision == "continue"
    for number in range(3):
        result = observed.observe("b", f"more{number}", 100, 50, 60)
    assert result.decision == "keep"


def test_a_decision_is_final():
    observed = Watch(2, 1)
    for number in range(COLLAPSE_REQUESTS):
        decided = observed.observe("t", f"r{number}", 100, 100, 50)
    assert decided.decision == "roll_back"
    assert observed.observe("t", "later", 100, 30, 90) == decided


def test_a_tenant_that_is_harmed_has_the_version_rolled_back_though_the_others_gain():
    draw = random.Random(4)
    observed = Watch(2, 1)
    result = observed.result()
    for number in range(2000):
        tenant = "small" if number % 8 == 0 else "large"
        noise = draw.randint(-4, 4)
        live, predecessor = (75, 50 + noise) if tenant == "small" else (50, 60 + noise)
        result = observed.observe(tenant, f"r{number}", 100, live, predecessor)
        if result.decision != "continue":
            break
    assert result.decision == "roll_back"
    assert result.reason.startswith("worse for tenant small: 1.333 live, ")
    assert result.evidence < 1


@given(st.lists(st.tuples(st.sampled_from("abbbbbbbbb"), st.integers(20, 300)), max_size=60))
def test_no_tenant_weighs_more_than_all_others_and_a_lead(requests):
    observed = Watch(2, 1)
    weighted: dict[str, float] = {}
    for number, (tenant, tokens) in enumerate(requests):
        before = observed.state()
        observed.observe(tenant, f"r{number}", tokens, tokens // 2, tokens // 2)
        if observed.result().decision != "continue":
            break
        alone = {tenant} == {row[1] for row in before["requests"]} | {tenant}
        weighted = {}
        for _, name, weight, size, _, _ in observed.state()["requests"]:
            assert 0 <= weight <= 1
            weighted[name] = weighted.get(name, 0.0) + weight * size
        lead = weighted[tenant] - sum(w for name, w in weighted.items() if name != tenant)
        grew = observed.state()["requests"][-1][2] > 0
        assert alone or not grew or lead <= LEAD_TOKENS + 1e-6


requests = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]), st.integers(0, 30),
        st.integers(2, 2000), st.floats(0, 1), st.floats(0, 1),
    ).map(
        lambda r: (r[0], f"{r[0]}{r[1]}", r[2], 1 + int(r[3] * (r[2] - 1)), 1 + int(r[4] * (r[2] - 1)))
    ),
    max_size=80,
)  # fmt: skip


@settings(max_examples=60)
@given(requests, st.integers(0, 80))
def test_a_restart_goes_on_where_it_was(rows, cut):
    straight, before = Watch(2, 1), Watch(2, 1)
    for row in rows:
        straight.observe(*row)
    for row in rows[:cut]:
        before.observe(*row)
    after = Watch(2, 1)
    after.load_state(json.loads(json.dumps(before.state())))
    assert after.result().evidence == pytest.approx(before.result().evidence)
    for row in rows[cut:]:
        after.observe(*row)
    mine, theirs = after.result(), straight.result()
    assert (mine.decision, mine.reason, mine.requests) == (
        theirs.decision, theirs.reason, theirs.requests,
    )  # fmt: skip
    assert mine.evidence == pytest.approx(theirs.evidence)


@given(st.integers(2, 300), st.integers(2, 300))
def test_spans_of_one_request_count_as_one_loss(first, second):
    whole, parts = Watch(2, 1), Watch(2, 1)
    whole.observe("t", "r", first + second, (first + second) // 2, first // 2 + second // 2)
    parts.observe("t", "r", first, first // 2, first // 2)
    parts.observe("t", "r", second, (first + second) // 2 - first // 2, second // 2)
    assert parts.result().requests == 1
    assert parts.result().evidence == pytest.approx(whole.result().evidence)


@pytest.mark.parametrize("counts", [(10, 11, 5), (10, 5, 11), (10, 0, 5), (10, 5, 0), (0, 0, 0)])
def test_impossible_counts_are_an_error(counts):
    with pytest.raises(ValueError, match="steps for"):
        Watch(2, 1).observe("t", "r", *counts)
