"""Quotas by tenant: requests and tokens a minute, and requests at once.

A pure state machine: the time is passed in. Two token buckets for each tenant (Turner, IEEE
Communications Magazine 24, 1986), each of one minute's worth and refilled evenly.

How many tokens a request costs is known only when it is over, so it is let in on a reservation: the
balance goes down by an estimate at once, so that a burst of parallel requests cannot be let in on the
same balance. What it really uses is charged as it becomes known, first out of its reservation, then
out of the balance, which may fall below zero; what is left of the reservation comes back at the end.
So over any time t a tenant uses at most its balance, t minutes' worth, and by how much the requests
that were running at the end had been underestimated; the debt delays what comes next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from server.keys import TenantRules

MINUTE = 60.0

BUSY_RETRY_S = 1.0
"""Seconds to wait where too many requests run: when one of them ends is not known."""

IDLE_S = 3600.0
"""Seconds after which a tenant that has nothing running is forgotten; its buckets are full by then."""


@dataclass
class _Bucket:
    """Holds at most one minute's worth."""

    balance: float
    updated: float

    def refill(self, per_minute: int, now: float) -> None:
        elapsed = max(0.0, now - self.updated)
        self.balance = min(per_minute, self.balance + per_minute * elapsed / MINUTE)
        self.updated = max(self.updated, now)

    def wait(self, wanted: float, per_minute: int) -> float:
        """Seconds until ``wanted`` is there."""
        return max(0.0, wanted - self.balance) * MINUTE / per_minute


@dataclass
class _Account:
    requests: _Bucket | None = None
    tokens: _Bucket | None = None
    running: int = 0
    refused: int = 0
    seen: float = 0.0


@dataclass
class Lease:
    """One admitted request's hold on its tenant's quota."""

    account: _Account
    reserved: float
    """Tokens of the reservation that are not used yet."""
    open: bool = True

    def charge(self, tokens: int) -> None:
        """Tokens it has really used; also after its end, for what was counted late."""
        covered = min(self.reserved, tokens)
        self.reserved -= covered
        if self.account.tokens is not None:
            self.account.tokens.balance -= tokens - covered

    def release(self) -> None:
        """The request is over, whatever ended it. Once only; later calls do nothing."""
        if not self.open:
            return
        self.open = False
        self.account.running -= 1
        if self.account.tokens is not None:
            self.account.tokens.balance += self.reserved
        self.reserved = 0.0


@dataclass(frozen=True)
class Refusal:
    """Why a request is not let in, and when it is worth asking again."""

    limit: str
    """The rule's name: requests_per_minute, tokens_per_minute or concurrent_requests."""
    allowed: int
    retry_after_s: float

    @property
    def message(self) -> str:
        words = {
            "requests_per_minute": f"more than {self.allowed} requests a minute",
            "tokens_per_minute": f"more than {self.allowed} tokens a minute",
            "concurrent_requests": f"more than {self.allowed} requests at once",
        }
        return f"This tenant's quota is used up: {words[self.limit]}."


@dataclass
class Quotas:
    """The buckets of all tenants that have limits."""

    accounts: dict[str, _Account] = field(default_factory=dict)
    _next_sweep: float = 0.0

    def admit(self, tenant: str, rules: TenantRules, tokens: int, now: float) -> Lease | Refusal:
        """Let a request in, for which ``tokens`` are reserved, or say what stands against it.

        A request that reserves more than a minute's worth is let in on a full bucket: otherwise it
        never could be. ``rules`` may change from call to call. ``now``: seconds of any clock that does
        not go back.
        """
        self._sweep(now)
        account = self.accounts.setdefault(tenant, _Account())
        account.seen = now
        answer = _admit(account, rules, tokens, now)
        account.refused += isinstance(answer, Refusal)
        return answer

    def running(self, tenant: str) -> int:
        """Requests of a tenant that were let in and are not over."""
        return self.accounts[tenant].running if tenant in self.accounts else 0

    def refused(self, tenant: str) -> int:
        """Requests of a tenant that were not let in, since it was last away for an hour."""
        return self.accounts[tenant].refused if tenant in self.accounts else 0

    def _sweep(self, now: float) -> None:
        """Forget who has been away for long: anybody's header can name a tenant at a gateway."""
        if now < self._next_sweep:
            return
        self._next_sweep = now + IDLE_S / 4
        for name, account in list(self.accounts.items()):
            in_debt = account.tokens is not None and account.tokens.balance < 0
            if account.running == 0 and not in_debt and now - account.seen > IDLE_S:
                del self.accounts[name]


def _admit(account: _Account, rules: TenantRules, tokens: int, now: float) -> Lease | Refusal:
    requests = _bucket(account.requests, rules.requests_per_minute, now)
    bucket = _bucket(account.tokens, rules.tokens_per_minute, now)
    account.requests, account.tokens = requests, bucket
    limit = rules.concurrent_requests
    if limit is not None and account.running >= limit:
        return Refusal("concurrent_requests", limit, BUSY_RETRY_S)
    if requests is not None and rules.requests_per_minute is not None:
        wait = requests.wait(1.0, rules.requests_per_minute)
        if wait > 0:
            return Refusal("requests_per_minute", rules.requests_per_minute, wait)
    reserved = 0.0
    if bucket is not None and rules.tokens_per_minute is not None:
        wanted = min(tokens, rules.tokens_per_minute)
        wait = bucket.wait(wanted, rules.tokens_per_minute)
        if wait > 0:
            return Refusal("tokens_per_minute", rules.tokens_per_minute, wait)
        reserved = float(tokens)
        bucket.balance -= reserved
    if requests is not None:
        requests.balance -= 1.0
    account.running += 1
    return Lease(account, reserved)


def _bucket(bucket: _Bucket | None, per_minute: int | None, now: float) -> _Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return _Bucket(float(per_minute), now)
    bucket.refill(per_minute, now)
    return bucket


def retry_after(seconds: float) -> str:
    """The header's value: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))
