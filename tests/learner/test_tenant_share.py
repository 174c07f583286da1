"""What one tenant may bring in: everything when alone, not many times the others' otherwise."""

import json
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from learner.tenant_share import ALWAYS, HORIZON_TOKENS, TIMES_THE_OTHERS, TenantShare

traffic = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2000)), max_size=150)


def taken(rates: dict[str, int], spans: int, share: TenantShare) -> Counter[str]:
    """Spans of 100 tokens taken of each tenant, of ``spans`` sent at these rates."""
    draw = random.Random(0)
    names = draw.choices(list(rates), list(rates.values()), k=spans)
    return Counter(name for name in names if share.observe(name, 100))


@given(st.lists(st.integers(1, 5000), max_size=50))
def test_a_tenant_alone_may_bring_everything(tokens):
    share = TenantShare()
    assert all(share.observe("a", n) for n in tokens)


@given(traffic)
def test_who_sends_no_more_than_the_others_together_is_never_refused(what):
    share, offered = TenantShare(), Counter[str]()
    for tenant, tokens in what:
        offered[tenant] += tokens
        accepted = share.observe(tenant, tokens)
        others = share.state()["offered"]
        mine = others[tenant]
        if mine <= TIMES_THE_OTHERS * (sum(others.values()) - mine):
            assert accepted


@given(traffic)
def test_what_is_taken_stays_within_the_allowance(what):
    share = TenantShare()
    for tenant, tokens in what:
        if share.observe(tenant, tokens):
            state = share.state()
            others = sum(state["offered"].values()) - state["offered"][tenant]
            total = others + state["offered"][tenant]
            if others >= 0.02 * total:
                allowed = max(TIMES_THE_OTHERS * others, ALWAYS * HORIZON_TOKENS)
                assert state["taken"][tenant] <= allowed


def test_of_ten_times_everyones_rate_only_a_part_is_taken():
    counts = taken({"flood": 40, "a": 1, "b": 1, "c": 1, "d": 1}, 20_000, TenantShare())
    honest = sum(counts[name] for name in "abcd")
    assert abs(honest - 20_000 * 4 / 44) < 200
    # A quarter of the horizon is 50 spans against the honest tenants' 18.
    assert 2 < counts["flood"] / honest < 3.2


def test_who_sends_nearly_everything_is_not_starved_by_a_few_other_requests():
    counts = taken({"main": 96, "other": 4}, 20_000, TenantShare())
    assert counts["main"] > 0.2 * 20_000
    assert taken({"main": 199, "other": 1}, 20_000, TenantShare())["main"] > 0.9 * 19_000


def test_a_flood_is_forgotten_once_the_traffic_is_even_again():
    share = TenantShare()
    taken({"flood": 40, "a": 1}, 5000, share)
    counts = taken({"flood": 1, "a": 1}, 5000, share)
    assert counts.total() > 4900


@given(traffic, traffic)
def test_it_goes_on_after_a_restart_as_if_nothing_had_been(before, after):
    share, again = TenantShare(), TenantShare()
    for tenant, tokens in before:
        share.observe(tenant, tokens)
    again.load_state(json.loads(json.dumps(share.state())))
    assert [share.observe(*one) for one in after] == [again.observe(*one) for one in after]


def test_forgotten_tenants_take_no_memory():
    share = TenantShare()
    for i in range(5000):
        share.observe(f"t{i}", 100)
    assert len(share.state()["offered"]) < 1200
