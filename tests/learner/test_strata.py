"""The stratified store: fair among tenants, uniform over the past."""

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from learner.strata import Bounds, Strata, span_key
from tests.learner.made_spans import span

ROWS = 22
"""20 anchors."""

SPAN_BYTES = span(0, ROWS).nbytes


def store(spans: int, recent_tokens: int = 10**9, seed: int = 0) -> Strata:
    """Room for so many spans of ROWS rows, half of it for recent ones."""
    return Strata(Bounds(spans * SPAN_BYTES, 10**9, recent_tokens, 0.5), seed)


@settings(deadline=None)
@given(st.lists(st.sampled_from("aaaaaabbc"), min_size=1, max_size=150), st.integers(4, 40))
def test_who_holds_less_than_an_equal_share_loses_nothing_to_others(tenants, room):
    strata = store(room, recent_tokens=200)
    for i, name in enumerate(tenants):
        share = len({*tenants[: i + 1]})
        before = Counter((s.tenant, strata.slice_of(span_key(s))) for s in strata.spans())
        changes = strata.add(span(i, ROWS, tenant=name))
        aged = Counter(s.tenant for s in changes.aged)
        for tenant, gone in Counter(s.tenant for s in changes.gone).items():
            # What has just become old counts: a tenant may have crossed its share by it.
            old = before[tenant, "old"] + aged[tenant]
            assert old >= (room / 2 - 1) / share
            assert old - gone >= (room / 2 - 1) / share - 1
        assert strata.nbytes == SPAN_BYTES * len(strata) <= SPAN_BYTES * room
        assert strata.tokens == 20 * len(strata)


@settings(deadline=None)
@given(st.lists(st.sampled_from("aaaaaaab"), min_size=60, max_size=150), st.integers(8, 40))
def test_a_flood_makes_nobody_elses_spans_old_early(tenants, room):
    strata = store(room)
    for i, name in enumerate(tenants):
        recent = Counter(
            s.tenant for s in strata.spans() if strata.slice_of(span_key(s)) == "recent"
        )
        recent[name] += 1
        aged = Counter(s.tenant for s in strata.add(span(i, ROWS, tenant=name)).aged)
        left = recent - aged
        for tenant in aged:
            assert left[tenant] >= max(left.values()) - 1
            assert left[tenant] >= (room // 2) / len(recent) - 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(3, 60), st.sampled_from("ab")), max_size=60), st.data())
def test_changes_tell_all_that_happened(what, data):
    strata = Strata(Bounds(data.draw(st.integers(500, 20_000)), 400, 150, 0.5), 0)
    parts = {}
    for i, (rows, tenant) in enumerate(what):
        one = span(i, rows, tenant=tenant)
        changes = strata.add(one)
        parts[span_key(one)] = changes.entered
        for aged in changes.aged:
            assert parts[span_key(aged)] == "recent"
            parts[span_key(aged)] = "old"
        for gone in changes.gone:
            assert parts.pop(span_key(gone)) == "old"
    assert parts == {span_key(s): strata.slice_of(span_key(s)) for s in strata.spans()}
    for part in ("recent", "old"):
        tokens = defaultdict(int)
        for s in strata.spans():
            if strata.slice_of(span_key(s)) == part:
                tokens[s.tenant] += s.anchors
        assert strata.tenant_tokens(part) == {k: n for k, n in tokens.items() if n}


@given(st.integers(1, 60), st.integers(20, 400))
def test_a_span_is_old_once_so_many_tokens_came_after_it(count, recent_tokens):
    strata = store(1000, recent_tokens)
    for i in range(count):
        strata.add(span(i, ROWS))
    for i, one in enumerate(strata.spans()):
        after = 20 * (count - 1 - i)
        assert strata.slice_of(span_key(one)) == ("old" if after >= recent_tokens else "recent")


def test_the_old_part_is_a_uniform_sample_of_the_whole_past():
    room, count, seeds = 40, 400, 60
    periods: Counter[int] = Counter()
    for seed in range(seeds):
        strata = store(room, recent_tokens=20 * 20, seed=seed)
        for i in range(count):
            strata.add(span(i, ROWS))
        old = [s for s in strata.spans() if strata.slice_of(span_key(s)) == "old"]
        periods.update(int(s.request_id) // 95 for s in old)
    # 1,200 samples in four equal periods: 300 each, standard deviation below 15.
    assert set(periods) == {0, 1, 2, 3}
    assert all(abs(n - 300) < 60 for n in periods.values())


def test_a_tenant_alone_may_hold_everything_and_makes_room_when_another_comes():
    strata = store(40, recent_tokens=100)
    for i in range(100):
        strata.add(span(f"a{i}", ROWS, tenant="a"))
    assert len(strata) == 40
    for i in range(100):
        strata.add(span(f"b{i}", ROWS, tenant="b"))
    held = Counter(s.tenant for s in strata.spans())
    # Five of b's are recent; the old part is shared equally.
    assert abs(held["a"] - (held["b"] - 5)) <= 1
    assert held.total() == 40


@settings(deadline=None)
@given(st.lists(st.integers(3, 400), min_size=10, max_size=60), st.integers(0, 12))
def test_a_few_spans_stay_recent_however_long_they_are(rows, fewest):
    strata = Strata(Bounds(10**9, 300, 100, 0.5, fewest), 0)
    for i, count in enumerate(rows):
        strata.add(span(i, count))
        recent = sum(strata.slice_of(span_key(s)) == "recent" for s in strata.spans())
        assert recent >= min(i + 1, fewest)
        assert strata.tokens <= 300 or len(strata) <= max(1, 2 * fewest)


def test_bytes_are_a_bound_whatever_number_of_spans_is_wanted():
    strata = Strata(Bounds(4 * SPAN_BYTES, 10**9, 100, 0.5, 10), 0)
    for i in range(20):
        strata.add(span(i, ROWS))
        assert strata.nbytes <= 4 * SPAN_BYTES
