"""No token goes missing, and none is counted twice."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlcore.asynchrony.errors import EventError
from rlcore.asynchrony.token_ledger import Fate, TokenLedger, effective_rate

NAMES = st.sampled_from([f"r{i}" for i in range(6)])
SAMPLED_FATES = [fate for fate in Fate if fate is not Fate.REPREFILLED]


class AnyEvents(RuleBasedStateMachine):
    """Every event at any time: one that is refused must have changed nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = TokenLedger()
        self.processed = 0
        self.settled = 0
        self.counts: dict[str, int] = {}
        self.done: set[str] = set()

    @rule(name=NAMES, tokens=st.integers(-1, 50))
    def sample(self, name: str, tokens: int) -> None:
        if tokens < 0 or name in self.done:
            with pytest.raises(EventError):
                self.ledger.sampled(name, tokens)
            return
        self.ledger.sampled(name, tokens)
        self.processed += tokens
        self.counts[name] = self.counts.get(name, 0) + tokens

    @rule(tokens=st.integers(0, 50))
    def prefill_again(self, tokens: int) -> None:
        self.ledger.reprefilled(tokens)
        self.processed += tokens
        self.settled += tokens

    @rule(name=NAMES)
    def finish(self, name: str) -> None:
        if name not in self.counts or name in self.done:
            with pytest.raises(EventError):
                self.ledger.finished(name)
            return
        self.ledger.finished(name)
        self.done.add(name)

    @rule(name=NAMES, data=st.data(), extra=st.integers(-1, 1))
    def settle(self, name: str, data: st.DataObject, extra: int) -> None:
        left = self.counts.get(name, 0) + extra
        fates: dict[Fate, int] = {}
        for fate in SAMPLED_FATES[:-1]:
            fates[fate] = data.draw(st.integers(0, max(0, left)))
            left -= fates[fate]
        fates[SAMPLED_FATES[-1]] = left
        if name not in self.counts or extra:
            with pytest.raises(EventError):
                self.ledger.settled(name, fates)
            return
        self.ledger.settled(name, fates)
        self.settled += self.counts.pop(name)
        self.done.discard(name)

    @rule(names=st.lists(NAMES, max_size=4), data=st.data())
    def settle_together(self, names: list[str], data: st.DataObject) -> None:
        left = sum(self.counts.get(name, 0) for name in names)
        fates = dict.fromkeys(SAMPLED_FATES, 0)
        for fate in SAMPLED_FATES[:-1]:
            fates[fate] = data.draw(st.integers(0, left))
            left -= fates[fate]
        fates[SAMPLED_FATES[-1]] = left
        if len(set(names)) < len(names) or not set(names) <= set(self.counts):
            with pytest.raises(EventError):
                self.ledger.settled_together(names, fates)
            return
        self.ledger.settled_together(names, fates)
        for name in names:
            self.settled += self.counts.pop(name)
            self.done.discard(name)

    @rule(name=NAMES)
    def lose(self, name: str) -> None:
        if name in self.counts:
            before = self.ledger.totals().fates[Fate.FAILED]
            self.ledger.lost(name)
            tokens = self.counts.pop(name)
            assert self.ledger.totals().fates[Fate.FAILED] == before + tokens
            self.settled += tokens
            self.done.discard(name)

    @rule()
    def kill(self) -> None:
        saved = json.loads(json.dumps(self.ledger.state()))
        self.ledger = TokenLedger()
        self.ledger.load_state(saved)

    @invariant()
    def the_books_balance(self) -> None:
        totals = self.ledger.totals()
        assert totals.processed == self.processed
        assert sum(totals.fates.values()) == self.settled
        assert totals.waiting == sum(self.counts[name] for name in self.done)
        assert totals.in_flight + totals.waiting == sum(self.counts.values())
        assert set(self.ledger.open) == set(self.counts)


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_effective_tokens_are_those_trained_on_in_the_span():
    ledger = TokenLedger()
    ledger.sampled("a", 100)
    ledger.settled("a", {Fate.TRAINED: 100})
    before = ledger.totals()
    ledger.sampled("b", 80)
    ledger.reprefilled(20)
    ledger.finished("b")
    ledger.settled("b", {Fate.TRAINED: 60, Fate.MASKED: 20})
    span = ledger.totals().since(before)
    assert (span.processed, span.effective_share) == (100, 0.6)
    rate = effective_rate(span, seconds=4.0, cores=2)
    assert (rate.tokens_per_second, rate.tokens_per_core_second) == (15.0, 7.5)


def test_nothing_settled_is_no_share_and_no_time_no_rate():
    totals = TokenLedger().totals()
    assert totals.effective_share == 0.0
    with pytest.raises(EventError, match="above 0"):
        effective_rate(totals, 0.0, 2)


def test_a_sampled_token_is_never_settled_as_computed_anew():
    ledger = TokenLedger()
    ledger.sampled("a", 1)
    with pytest.raises(EventError, match="as reprefilled"):
        ledger.settled("a", {Fate.REPREFILLED: 1})


def test_books_that_do_not_balance_are_not_read():
    state = TokenLedger().state()
    state["processed"] = 1
    ledger = TokenLedger()
    ledger.load_state(state)
    with pytest.raises(EventError, match="1 tokens processed, 0 accounted for"):
        ledger.totals()
