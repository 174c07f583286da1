"""The replay's bounds, its order of visits, its fairness, and its way through a restart."""

import json
from collections import Counter
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

import learner.replay as replay_module
from learner.batch import Span
from learner.replay import (
    HELDOUT_BYTES,
    HELDOUT_RECENT,
    HELDOUT_SPANS,
    HELDOUT_TOKENS,
    MEMORY_SHARE,
    RECENT_TOKENS,
    Replay,
)
from learner.split import HeldoutSplit
from tests.learner.made_spans import ALWAYS, NEVER, span


def replay(max_bytes: int = 10**9, gate_tokens: int = 100, seed: int = 0) -> Replay:
    return Replay(max_bytes, HeldoutSplit(0.15, gate_tokens), gate_tokens, seed)


def everything(memory: Replay) -> list[Span]:
    """All training spans; each counts as visited."""
    return memory.draw(10**9)


lengths = st.lists(st.integers(3, 80), min_size=1, max_size=40)
adds = st.lists(
    st.tuples(st.integers(3, 80), st.sampled_from("abc"), st.sampled_from([NEVER, NEVER, ALWAYS])),
    min_size=1,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(adds, st.integers(500, 40_000), st.integers(30, 400), st.data())
def test_bytes_tokens_and_counters_hold_after_every_add_and_draw(what, budget, gate_tokens, data):
    memory = replay(budget, gate_tokens)
    for i, (rows, tenant, prompt) in enumerate(what):
        one = span(i, rows, prompt, tenant=tenant)
        taken = memory.add(one)
        assert taken == memory.holds((one.request_id, one.first_position))
        heldout = memory.heldout()
        assert memory.heldout_tokens == sum(s.anchors for s in heldout)
        few = len(heldout) <= 2 * HELDOUT_SPANS
        assert memory.heldout_tokens <= HELDOUT_TOKENS * gate_tokens or few
        assert sum(s.nbytes for s in heldout) <= HELDOUT_BYTES * budget or len(heldout) == 1
        assert memory.holds_out(one) == any(one is s for s in heldout)
        if data.draw(st.booleans()):
            memory.draw(data.draw(st.integers(10, 300)))
    training = everything(memory)
    assert len({s.request_id for s in training}) == len(training)
    assert memory.training_tokens == sum(s.anchors for s in training)
    within = sum(s.nbytes for s in training) <= (1 - HELDOUT_BYTES) * budget
    assert within or len(training) == 1
    assert not any(memory.holds_out(s) for s in training)


@settings(max_examples=40)
@given(lengths, st.integers(10, 200), st.integers(1, 30))
def test_no_span_is_visited_twice_more_than_another(rows, batch, draws):
    memory = replay()
    for i, n in enumerate(rows):
        memory.add(span(i, n))
    visits = dict.fromkeys((f"{i}" for i in range(len(rows))), 0)
    for _ in range(draws):
        drawn = memory.draw(batch)
        assert drawn
        assert len(drawn) == 1 or sum(s.anchors for s in drawn) <= batch
        for one in drawn:
            visits[one.request_id] += 1
        assert max(visits.values()) - min(visits.values()) <= 1


def test_a_known_span_or_one_without_an_anchor_is_not_taken():
    memory = replay()
    assert memory.add(span(1, 9))
    assert not memory.add(span(1, 9))
    assert not memory.add(span(2, 9, prompt_length=9))
    assert memory.training_tokens == 7


def in_order(state: dict) -> dict:
    return state | {"turns": sorted(state["turns"])}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(3, 80), min_size=10, max_size=40),
    st.integers(1, 5),
    st.integers(10, 200),
    st.integers(100, 2000),
    st.integers(3000, 20_000),
)
def test_after_a_restart_the_same_spans_are_drawn_and_judged(
    rows, draws, batch, recent_tokens, budget
):
    spans = [
        span(i, n, NEVER if i % 3 else ALWAYS, tenant="ab"[i % 5 == 0]) for i, n in enumerate(rows)
    ]
    half = len(spans) // 2
    with mock.patch.object(replay_module, "RECENT_TOKENS", recent_tokens):
        memory, again = replay(budget), replay(budget)
    for one in spans[:half]:
        memory.add(one)
    for _ in range(draws):
        memory.draw(batch)
    for one in spans[half:]:
        memory.add(one)
    memory.draw(batch)
    again.load_state(json.loads(json.dumps(memory.state())))
    for one in spans:
        if again.saved_clock((one.request_id, one.first_position)) is not None:
            assert again.add(one)
    assert in_order(again.state()) == in_order(memory.state())
    for _ in range(draws):
        assert [s.request_id for s in again.draw(batch)] == [
            s.request_id for s in memory.draw(batch)
        ]
    assert [s.request_id for s in again.heldout()] == [s.request_id for s in memory.heldout()]
    assert [again.heldout_slice(s) for s in again.heldout()] == [
        memory.heldout_slice(s) for s in memory.heldout()
    ]
    assert again.training_tokens == memory.training_tokens


def drawn_tokens(memory: Replay, updates: int) -> Counter[str]:
    """Tokens drawn, by the first word of the request id."""
    tokens: Counter[str] = Counter()
    for _ in range(updates):
        for one in memory.draw(256):
            tokens[one.request_id.split("-")[0]] += one.anchors
    return tokens


def fill(memory: Replay, name: str, tokens: int, tenant: str = "t") -> None:
    """``tokens`` training tokens of requests called ``name``, in spans of 100."""
    for i in range(tokens // 100):
        assert memory.add(span(f"{name}-{i}", 102, tenant=tenant))


def test_after_a_shift_the_old_traffic_keeps_its_share_of_the_updates():
    memory = replay()
    fill(memory, "A", 3 * RECENT_TOKENS)
    drawn_tokens(memory, 600)
    fill(memory, "B", 2 * RECENT_TOKENS)
    tokens = drawn_tokens(memory, 400)
    # Of the old part three quarters are A's: 60k tokens of A, 20k of B.
    assert abs(tokens["A"] / tokens.total() - 0.75 * MEMORY_SHARE) < 0.02


def test_little_old_traffic_is_not_repeated_more_often_than_the_recent():
    memory = replay()
    fill(memory, "A", 200)
    fill(memory, "B", RECENT_TOKENS)
    tokens = drawn_tokens(memory, 1000)
    assert tokens["A"] / tokens.total() < 1.5 * 200 / (RECENT_TOKENS + 200)


def test_a_span_that_becomes_old_does_not_push_in_before_the_old_ones():
    memory = replay()
    fill(memory, "A", 2 * RECENT_TOKENS)
    drawn_tokens(memory, 1500)
    visits = Counter[str]()
    for i in range(100):
        assert memory.add(span(f"B-{i}", 102))
        for one in memory.draw(1000):
            visits[one.request_id] += 1
    old = [f"A-{i}" for i in range(RECENT_TOKENS // 100)]
    # 100 updates of 10 spans, a quarter of them from 200 to 300 old ones: about one visit each.
    assert sum(visits[name] for name in old) > 0.6 * 250
    assert max(visits[name] for name in old) <= 2


def test_ten_times_the_traffic_is_not_ten_times_the_updates():
    memory = replay()
    for i in range(100):
        assert memory.add(span(f"few-{i}", 32, tenant="few"))
        for j in range(4):
            assert memory.add(span(f"many-{i}-{j}", 77, tenant="many"))
    tokens = drawn_tokens(memory, 400)
    # 3,000 against 30,000 tokens; a quarter of 30,000 is 7,500.
    assert abs(tokens["many"] / tokens.total() - 7.5 / 10.5) < 0.03


def test_a_flooding_tenant_leaves_the_others_their_equal_share_of_memory():
    memory = replay(200_000)
    honest = [span(f"honest-{i}", 30, tenant="honest") for i in range(34)]
    # An equal share of the old part: half of half of the training bytes.
    assert 0.9 * 30_000 < sum(s.nbytes for s in honest) < 30_000
    for one in honest:
        assert memory.add(one)
    for i in range(2000):
        memory.add(span(f"flood-{i}", 80, tenant="flood"))
    held = Counter(s.tenant for s in everything(memory))
    assert held["honest"] == len(honest)
    assert held["flood"] > 20


def test_the_newest_span_is_kept_while_others_can_go():
    memory = replay(20_000)
    for i in range(200):
        assert memory.add(span(i, 30))


def test_old_heldout_traffic_stays_beside_the_recent():
    gate_tokens = 1000
    memory = replay(gate_tokens=gate_tokens)
    for i in range(200):
        assert memory.add(span(f"A-{i}", 52, ALWAYS))
    for i in range(60):
        assert memory.add(span(f"B-{i}", 52, ALWAYS))
    slices = Counter((s.request_id[0], memory.heldout_slice(s)) for s in memory.heldout())
    # The last 1,500 tokens are recent; of the 11,500 before, 1,500 are kept, 1 in 8 of them B's.
    assert slices["B", "recent"] == HELDOUT_RECENT * gate_tokens / 50
    assert slices["A", "recent"] == 0
    assert slices["A", "old"] + slices["B", "old"] == 30
    assert slices["A", "old"] > 2 * slices["B", "old"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abbbbbbb"), st.integers(12, 60)), min_size=30))
def test_whatever_the_tenants_the_recent_heldout_slice_is_enough_for_the_gate(what):
    memory = replay(gate_tokens=200)
    for i, (tenant, rows) in enumerate(what):
        assert memory.add(span(i, rows, ALWAYS, tenant=tenant))
    recent = sum(s.anchors for s in memory.heldout() if memory.heldout_slice(s) == "recent")
    offered = sum(rows - 2 for _, rows in what)
    assert recent >= min(offered, HELDOUT_RECENT * 200 - 60)
