"""Quotas hold whatever comes in whatever order, and give back what was only reserved."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.keys import TenantRules
from server.quotas import IDLE_S, Lease, Quotas, Refusal, retry_after

LIMITS = TenantRules(requests_per_minute=12, tokens_per_minute=600, concurrent_requests=4)


class Traffic(RuleBasedStateMachine):
    """One tenant with all three limits, and an honest record of what it was let have."""

    def __init__(self) -> None:
        super().__init__()
        self.quotas = Quotas()
        self.now = 100.0
        self.running: list[tuple[Lease, int]] = []
        self.admitted: list[float] = []
        self.used = 0
        self.overrun = 0

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(tokens=st.integers(1, 800))
    def a_request_comes(self, tokens: int) -> None:
        answer = self.quotas.admit("a", LIMITS, tokens, self.now)
        if isinstance(answer, Lease):
            self.running.append((answer, tokens))
            self.admitted.append(self.now)
        else:
            assert 0 < answer.retry_after_s < math.inf

    @precondition(lambda self: self.running)
    @rule(data=st.data(), share=st.floats(0, 1.5))
    def one_ends(self, data: st.DataObject, share: float) -> None:
        at = data.draw(st.integers(0, len(self.running) - 1))
        lease, reserved = self.running.pop(at)
        used = int(reserved * share)
        lease.charge(used)
        lease.release()
        self.used += used
        self.overrun += max(0, used - reserved) + max(0, reserved - 600)

    @rule(tokens=st.integers(1, 10_000))
    def another_tenant_is_not_in_the_way(self, tokens: int) -> None:
        free = TenantRules()
        answer = self.quotas.admit("b", free, tokens, self.now)
        assert isinstance(answer, Lease)
        answer.release()

    @invariant()
    def no_more_run_at_once_than_allowed(self) -> None:
        assert len(self.running) <= 4
        assert self.quotas.running("a") == len(self.running)

    @invariant()
    def no_more_requests_than_a_full_bucket_and_its_refill(self) -> None:
        for i, start in enumerate(self.admitted):
            since = len(self.admitted) - i
            assert since <= 12 + 12 * (self.now - start) / 60 + 1e-6

    @invariant()
    def no_more_tokens_than_that_and_what_was_underestimated(self) -> None:
        allowed = 600 + 600 * (self.now - 100.0) / 60
        assert self.used <= allowed + self.overrun + 1e-6


TestTraffic = Traffic.TestCase


@given(st.lists(st.integers(1, 600), max_size=20))
def test_what_was_reserved_and_not_used_comes_back_whole(reservations):
    quotas, rules = Quotas(), TenantRules(tokens_per_minute=600)
    for tokens in reservations:
        lease = quotas.admit("a", rules, tokens, 0.0)
        assert isinstance(lease, Lease)
        lease.release()
        lease.release()
    assert isinstance(quotas.admit("a", rules, 600, 0.0), Lease)
    assert isinstance(quotas.admit("a", rules, 1, 0.0), Refusal)


def test_a_burst_cannot_be_let_in_on_one_balance():
    quotas, rules = Quotas(), TenantRules(tokens_per_minute=1000)
    answers = [quotas.admit("a", rules, 100, 0.0) for _ in range(50)]
    assert sum(isinstance(answer, Lease) for answer in answers) == 10


def test_what_is_used_beyond_the_reservation_delays_what_comes_next():
    quotas, rules = Quotas(), TenantRules(tokens_per_minute=600)
    lease = quotas.admit("a", rules, 100, 0.0)
    assert isinstance(lease, Lease)
    lease.charge(900)
    lease.release()
    refusal = quotas.admit("a", rules, 100, 0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.limit == "tokens_per_minute"
    assert refusal.retry_after_s == 40.0  # 300 in debt and 100 wanted, at 10 a second
    assert isinstance(quotas.admit("a", rules, 100, 39.9), Refusal)
    assert isinstance(quotas.admit("a", rules, 100, 40.0), Lease)


def test_tokens_counted_after_the_end_are_charged_all_the_same():
    quotas, rules = Quotas(), TenantRules(tokens_per_minute=600)
    lease = quotas.admit("a", rules, 100, 0.0)
    assert isinstance(lease, Lease)
    lease.release()
    lease.charge(500)
    assert isinstance(quotas.admit("a", rules, 101, 0.0), Refusal)
    assert isinstance(quotas.admit("a", rules, 100, 0.0), Lease)


def test_a_request_larger_than_a_minutes_worth_waits_for_a_full_bucket():
    quotas, rules = Quotas(), TenantRules(tokens_per_minute=600)
    assert isinstance(quotas.admit("a", rules, 5000, 0.0), Lease)
    assert isinstance(quotas.admit("a", rules, 5000, 30.0), Refusal)


def test_a_refused_request_costs_nothing():
    quotas = Quotas()
    rules = TenantRules(requests_per_minute=2, tokens_per_minute=600, concurrent_requests=1)
    lease = quotas.admit("a", rules, 10, 0.0)
    assert isinstance(lease, Lease)
    for _ in range(20):
        assert isinstance(quotas.admit("a", rules, 10, 0.0), Refusal)
    lease.release()
    assert isinstance(quotas.admit("a", rules, 600, 0.0), Lease)


def test_limits_may_change_at_any_time_and_hold_from_then_on():
    quotas = Quotas()
    for _ in range(5):
        assert isinstance(quotas.admit("a", TenantRules(), 10, 0.0), Lease)
    assert isinstance(quotas.admit("a", TenantRules(concurrent_requests=5), 10, 0.0), Refusal)
    assert isinstance(quotas.admit("a", TenantRules(concurrent_requests=6), 10, 0.0), Lease)


def test_tenants_that_went_away_are_forgotten_and_debtors_are_not():
    quotas, rules = Quotas(), TenantRules(tokens_per_minute=600)
    for i in range(100):
        lease = quotas.admit(f"t{i}", rules, 10, 0.0)
        assert isinstance(lease, Lease)
        if i == 7:
            lease.charge(10_000)
        if i != 8:
            lease.release()
    quotas.admit("new", rules, 10, 3 * IDLE_S)
    assert set(quotas.accounts) == {"t7", "t8", "new"}


@given(st.floats(0, 1e6))
def test_retry_after_is_never_too_early(seconds):
    assert max(1.0, seconds) <= int(retry_after(seconds)) < seconds + 2
