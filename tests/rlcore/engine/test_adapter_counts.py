"""Acceptance is counted by adapter and draft version, for a bounded number of both."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from rlcore.engine.adapter_counts import (
    KEPT_VERSIONS,
    MOST_NAMED,
    OTHER,
    POLICY_ID,
    AdapterCounts,
    name_of,
)

STEPS = st.tuples(
    st.sampled_from([f"a{i}" for i in range(MOST_NAMED + 3)]),
    st.integers(0, 7),
    st.integers(0, 3),
).flatmap(lambda s: st.tuples(st.just(s), st.integers(0, s[2])))


@given(st.lists(STEPS, max_size=200))
def test_nothing_is_lost_and_names_and_versions_are_bounded(steps):
    counts = AdapterCounts()
    for (adapter, version, k), accepted in steps:
        counts.observe(adapter, version, k, accepted)
    found = counts.counts()
    assert sum(one.total.steps + one.total.plain_steps for one in found) == len(steps)
    drafted = [accepted + 1 for (_, _, k), accepted in steps if k]
    assert sum(one.total.emitted for one in found) == sum(drafted)
    assert len(found) <= MOST_NAMED + 1
    assert all(len(one.versions) <= KEPT_VERSIONS for one in found)


def test_each_adapter_has_its_own_and_those_beyond_the_bound_share_one():
    counts = AdapterCounts()
    for i in range(MOST_NAMED):
        counts.observe(f"a{i}", 1, 3, 0)
    counts.observe("late", 1, 3, 3)
    counts.observe("a1", 2, 3, 2)
    by_name = {one.adapter: one for one in counts.counts()}
    assert by_name[OTHER].total.emitted == 4
    assert "late" not in by_name
    assert by_name["a1"].total.accepted == [1, 1, 0]
    assert [(c.version, c.emitted) for c in by_name["a1"].versions] == [(1, 1), (2, 3)]


def test_the_policy_is_no_named_adapter():
    def request(number: int | None) -> SimpleNamespace:
        lora = None if number is None else SimpleNamespace(lora_int_id=number, lora_name="x")
        return SimpleNamespace(lora_request=lora)

    assert [name_of(request(n)) for n in (None, 1, POLICY_ID)] == ["", "x", ""]
