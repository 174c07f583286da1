"""In which order spans are visited, and what share of the updates a tenant gets."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.visits import STALE_ENTRIES, TENANT_FAVOUR, VisitQueue, fair_shares

holdings = st.dictionaries(st.text(max_size=3), st.integers(1, 10**6), min_size=1, max_size=8)


@given(holdings)
def test_shares_sum_to_one_and_no_tenants_spans_are_favoured_beyond_the_limit(tokens):
    shares = fair_shares(tokens)
    assert sum(shares.values()) == pytest.approx(1)
    rates = {name: shares[name] / tokens[name] for name in tokens}
    assert max(rates.values()) <= TENANT_FAVOUR * min(rates.values()) * (1 + 1e-9)
    # Who holds more never gets less.
    order = sorted(tokens, key=lambda name: tokens[name])
    assert all(shares[a] <= shares[b] + 1e-9 for a, b in pairwise(order))


@given(holdings.filter(lambda tokens: len(tokens) > 1))
def test_more_than_half_is_for_one_that_holds_more_than_so_many_times_the_others(tokens):
    most = max(tokens.values())
    rest = sum(tokens.values()) - most
    assert (max(fair_shares(tokens).values()) > 0.5 + 1e-9) == (most > TENANT_FAVOUR * rest)


def test_of_one_tenant_alone_it_is_everything():
    assert fair_shares({"a": 7}) == {"a": 1.0}
    assert fair_shares({}) == {}


@given(
    st.lists(st.one_of(st.just("join"), st.just("visit"), st.integers(0, 30)), max_size=300),
)
def test_the_queue_gives_the_lowest_turn(what):
    queue, turns = VisitQueue(0), {}
    for number, action in enumerate(what):
        key = (f"r{number}", 0)
        if action == "join":
            queue.join(key)
            (turns[key],) = (turn for k, turn in queue.items() if k == key)
            others = [turn for k, turn in turns.items() if k != key]
            assert 0 <= turns[key] - min(others, default=0) < 1
        elif action == "visit" and turns:
            first = queue.first()
            assert turns[first] == min(turns.values())
            turns[first] = queue.remove(first) + 1
            queue.push(first, turns[first])
        elif isinstance(action, int) and (gone := (f"r{action}", 0)) in turns:
            assert queue.remove(gone) == turns.pop(gone)
        assert dict(queue.items()) == turns


def test_what_was_removed_takes_no_room():
    queue = VisitQueue(0)
    for i in range(2000):
        queue.push((f"r{i}", 0), float(i % 7))
        if i >= 50:
            queue.remove((f"r{i - 50}", 0))
        assert len(queue._heap) <= 2 * len(queue) + STALE_ENTRIES + 1
    assert len(queue) == 50


def test_whoever_joins_is_visited_as_often_as_those_already_there():
    queue = VisitQueue(0)
    for i in range(100):
        queue.join((f"first{i}", 0))
    visits: Counter[str] = Counter()
    for i in range(1000):
        queue.join((f"later{i}", 0))
        for _ in range(2):
            key = queue.first()
            visits[key[0]] += 1
            queue.push(key, queue.remove(key) + 1)
    # Of 2,000 visits, each of the first is due the sum of 2 / (100 + i): about 4.8.
    assert sum(visits[f"first{i}"] for i in range(100)) == pytest.approx(480, rel=0.1)
