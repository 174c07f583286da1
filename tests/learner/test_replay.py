"""The replay's bounds, its order of visits, and its way through a restart."""

import json

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.batch import Span
from learner.replay import HELDOUT_FACTOR, Replay
from learner.split import HeldoutSplit
from rlcore.records import Sampling

NEVER, ALWAYS = "f" * 32, "0" * 32
"""Prompt hashes that no share, or every share, holds out."""


def span(number: int, rows: int, prompt: str = NEVER, prompt_length: int = 2) -> Span:
    return Span(
        token_ids=torch.zeros(rows + 1, dtype=torch.long), aux=None, last=torch.zeros(rows, 4),
        lse=torch.zeros(rows), first_position=0, prompt_length=prompt_length, prompt_hash=prompt,
        steps=(), sampling=Sampling(), tenant="t", request_id=f"r{number}",
    )  # fmt: skip


def replay(max_bytes: int = 10**9, gate_tokens: int = 100, seed: int = 0) -> Replay:
    return Replay(max_bytes, HeldoutSplit(0.15, gate_tokens), gate_tokens, seed)


lengths = st.lists(st.integers(3, 80), min_size=1, max_size=40)


@given(lengths, st.integers(500, 20_000))
def test_training_spans_stay_within_the_bytes_and_the_newest_are_kept(rows, budget):
    memory = replay(budget)
    spans = [span(i, n) for i, n in enumerate(rows)]
    for one in spans:
        memory.add(one)
    kept = {s.request_id for s in memory.draw(10**9)}
    assert sum(s.nbytes for s in spans if s.request_id in kept) <= max(budget, spans[-1].nbytes)
    assert kept == {s.request_id for s in spans[-len(kept) :]}
    assert memory.training_tokens == sum(s.anchors for s in spans if s.request_id in kept)


@given(lengths, st.integers(30, 400))
def test_heldout_tokens_stay_within_a_multiple_of_the_gates(rows, gate_tokens):
    memory = replay(gate_tokens=gate_tokens)
    for i, n in enumerate(rows):
        one = span(i, n, ALWAYS)
        assert memory.add(one)
        assert memory.holds_out(one)
    kept = memory.heldout()
    assert memory.heldout_tokens == sum(s.anchors for s in kept)
    assert memory.heldout_tokens <= HELDOUT_FACTOR * gate_tokens or len(kept) == 1
    assert memory.draw(10**9) == []


@settings(max_examples=40)
@given(lengths, st.integers(10, 200), st.integers(1, 30))
def test_no_span_is_visited_twice_more_than_another(rows, batch, draws):
    memory = replay()
    for i, n in enumerate(rows):
        memory.add(span(i, n))
    visits = dict.fromkeys((f"r{i}" for i in range(len(rows))), 0)
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


@settings(max_examples=40)
@given(lengths, st.integers(1, 5), st.integers(10, 200))
def test_after_a_restart_the_same_spans_are_drawn(rows, draws, batch):
    spans = [span(i, n, NEVER if i % 3 else ALWAYS) for i, n in enumerate(rows)]
    memory, again = replay(seed=1), replay(seed=2)
    for one in spans:
        memory.add(one)
    for _ in range(draws):
        memory.draw(batch)
    again.load_state(json.loads(json.dumps(memory.state())))
    for one in spans:
        again.add(one)
    for _ in range(draws):
        assert [s.request_id for s in again.draw(batch)] == [
            s.request_id for s in memory.draw(batch)
        ]
    assert [s.request_id for s in again.heldout()] == [s.request_id for s in memory.heldout()]
    assert again.training_tokens == memory.training_tokens
