"""Counts by name: bounded, whatever names come; nothing is counted twice or lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlcore.engine.shares import NAMED, Served, Shares
from rlcore.records.engine_link import OTHER_SHARES

names = st.integers(0, 3 * NAMED).map(str)


@given(st.lists(names, max_size=400))
def test_the_engine_counts_every_trace_and_few_names(sent):
    shares = Shares()
    for name in sent:
        shares.of(name).traces += 1
    counts = shares.counts()
    assert sum(count.traces for count in counts) == len(sent)
    assert len(counts) <= NAMED + 1
    assert (OTHER_SHARES in [c.name for c in counts]) == (len(set(sent)) > NAMED)


@given(
    ended=st.lists(st.tuples(names, st.integers(0, 100)), max_size=300),
    running=st.lists(st.tuples(names, st.integers(0, 100)), max_size=300),
)
def test_tokens_served_are_those_of_ended_and_running_requests(ended, running):
    served = Served()
    for name, tokens in ended:
        served.end(name, tokens)
    now = served.now(running)
    assert sum(count.tokens for count in now.values()) == sum(t for _, t in ended + running)
    assert sum(count.running for count in now.values()) == len(running)
    assert len(now) <= NAMED + 1
    after = served.now([])
    assert sum(count.tokens for count in after.values()) == sum(t for _, t in ended)


def test_a_request_that_ends_keeps_its_tokens():
    served = Served()
    before = served.now([("a", 7)])["a"].tokens
    served.end("a", 7)
    assert served.now([])["a"].tokens == before
