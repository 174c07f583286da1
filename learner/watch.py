"""Whether a version that went live may stay: a paired sequential test on the live traffic.

An engine holds one drafter, so the learner replays the version before on what the live one served:
walking over a request's tokens, each step starting where the one before ended, it counts the steps
the predecessor would have taken. Both counts are for the same tokens. (The predecessor's lengths at
the live version's own anchors would not do: where the live version drafts badly it has more anchors,
and that alone makes it look worse; on recorded pairs of versions by 0.02 to 0.07.)

For request i of T_i tokens, a_i live steps and b_i steps of the predecessor, the loss is
x_i = w_i (a_i - (1 + TOLERANCE) b_i) / sqrt(T_i). Of two versions that are equally good, either could
have been the live one, so x_i at tolerance 0 is symmetric about 0, whatever its distribution; then
exp(l S - l^2 V / 2), with S = sum x_i, V = sum x_i^2, is a supermartingale for every l (de la Pena,
Ann. Probab. 27, 1999), and so is its mixture over a half-normal l, which has a closed form (Robbins,
Ann. Math. Stat. 41, 1970; Howard et al., Ann. Stat. 49, 2021). By Ville's inequality it exceeds
1 / alpha with probability at most alpha, however often one looks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

TOLERANCE = 0.02
"""Steps that the live version may take more than its predecessor, as a share: the replay is an
estimate (on recorded requests its steps were within 0.2 % of the served ones)."""

OVERALL_ALPHA = 0.005
"""Probability of rolling back an equal version because of the traffic as a whole."""

TENANT_ALPHA = 0.005
"""The same because of single tenants, all together: the j-th to appear has 1 / (j (j + 1)) of it."""

KEEP_ALPHA = 0.05
"""Level at which the live version is shown not to be worse, which ends the watch early."""

LEAST_STEPS = 1000
"""Live steps before a watch may end early."""

WATCH_STEPS = 8000
"""Live steps after which a watch is over."""

MIXING = 0.64
"""Variance of the mixing half-normal. Recorded losses in acceptance length of 0.1 to 0.5 have their
best l between 0.3 and 1.2."""

LEAD_TOKENS = 1000
"""A tenant's weight may be ahead of that of all others together by this many tokens, no more."""

COLLAPSED = 1.05
"""Acceptance length below which a version drafts nothing that is accepted."""

SOUND = 1.2
"""Acceptance length from which a predecessor is worth going back to at once."""

COLLAPSE_STEPS = 150
COLLAPSE_REQUESTS = 3
"""What a collapse must be seen on."""

Decision = Literal["continue", "keep", "roll_back"]


@dataclass(frozen=True)
class WatchResult:
    decision: Decision
    reason: str
    live_length: float
    predecessor_length: float
    """Acceptance lengths over the watched requests, tenants weighted as in the test."""
    requests: int
    steps: float
    """Live steps watched."""
    evidence: float
    """How strongly the traffic as a whole speaks against the live version; its threshold is
    1 / OVERALL_ALPHA."""


class Evidence:
    """The mixture for one sequence of losses, as log evidence for and against."""

    def __init__(self) -> None:
        self.total = 0.0
        self.squares = 0.0

    def replace(self, old: float, new: float) -> None:
        """Count a request's loss, in place of what was counted for it before (0 at first)."""
        self.total += new - old
        self.squares = max(0.0, self.squares + new**2 - old**2)

    def against(self) -> float:
        """Log evidence that the mean loss is above 0."""
        return log_mixture(self.total, self.squares)

    def in_favour(self) -> float:
        """Log evidence that the mean loss is below 0."""
        return log_mixture(-self.total, self.squares)


def log_mixture(total: float, squares: float) -> float:
    """log of the integral of exp(l S - l^2 V / 2) over l ~ |N(0, MIXING)|."""
    spread = 1 + MIXING * squares
    z = math.sqrt(MIXING / spread) * total
    twice_phi = math.erfc(-z / math.sqrt(2))
    if twice_phi < 1e-290:
        return -math.inf
    return z * z / 2 + math.log(twice_phi) - math.log(spread) / 2


@dataclass
class _Request:
    tenant: str
    weight: float
    tokens: int = 0
    live_steps: float = 0.0
    predecessor_steps: float = 0.0

    def loss(self) -> float:
        if self.tokens == 0:
            return 0.0
        excess = self.live_steps - (1 + TOLERANCE) * self.predecessor_steps
        return excess / math.sqrt(self.tokens)


@dataclass
class _Tenant:
    alpha: float
    evidence: Evidence
    tokens: float = 0.0
    """Weighted."""


class Watch:
    """From a version's promotion to the decision; after it, nothing changes any more."""

    def __init__(self, version: int, predecessor: int) -> None:
        self.version = version
        self.predecessor = predecessor
        self._requests: dict[str, _Request] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._overall = Evidence()
        self._decision: Decision = "continue"
        self._reason = "watching"

    def observe(
        self, tenant: str, request_id: str, tokens: int, live_steps: float, predecessor_steps: float
    ) -> WatchResult:
        """Count a request, or a further span of one.

        ``tokens`` take ``live_steps`` steps of the live version, and would have taken
        ``predecessor_steps`` of the one before. Only requests that the live version served from their
        start on: before that it attends to its predecessor's KV.
        """
        if not 0 < live_steps <= tokens or not 0 < predecessor_steps <= tokens:
            raise ValueError(f"{live_steps} and {predecessor_steps} steps for {tokens} tokens")
        if self._decision == "continue":
            self._count(tenant, request_id, tokens, live_steps, predecessor_steps)
            self._decision, self._reason = self._decide()
        return self.result()

    def result(self) -> WatchResult:
        tokens, live, predecessor = self._weighted()
        return WatchResult(
            decision=self._decision,
            reason=self._reason,
            live_length=tokens / live if live else 0.0,
            predecessor_length=tokens / predecessor if predecessor else 0.0,
            requests=len(self._requests),
            steps=self._steps(),
            evidence=math.exp(min(self._overall.against(), 700.0)),
        )

    def _count(
        self, tenant: str, request_id: str, tokens: int, live_steps: float, predecessor_steps: float
    ) -> None:
        request = self._requests.get(request_id)
        if request is None:
            self._meet(tenant)
            request = self._requests[request_id] = _Request(tenant, self._weight(tenant, tokens))
        before = request.loss()
        request.tokens += tokens
        request.live_steps += live_steps
        request.predecessor_steps += predecessor_steps
        after = request.loss()
        known = self._tenants[request.tenant]
        known.tokens += request.weight * tokens
        known.evidence.replace(before, after)
        self._overall.replace(request.weight * before, request.weight * after)

    def _meet(self, tenant: str) -> None:
        if tenant not in self._tenants:
            rank = len(self._tenants) + 1
            self._tenants[tenant] = _Tenant(TENANT_ALPHA / (rank * (rank + 1)), Evidence())

    def _weight(self, tenant: str, tokens: int) -> float:
        """In the evidence as a whole. It depends on the past only, as the test's validity asks."""
        if len(self._tenants) == 1:
            return 1.0
        others = sum(t.tokens for name, t in self._tenants.items() if name != tenant)
        room = others + LEAD_TOKENS - self._tenants[tenant].tokens
        return min(1.0, max(0.0, room / tokens))

    def _decide(self) -> tuple[Decision, str]:
        tokens, live, predecessor = self._weighted()
        figures = (
            f"{tokens / live:.3f} live, {tokens / predecessor:.3f} the version before, "
            f"over {len(self._requests)} requests"
        )
        seen = self._steps() >= COLLAPSE_STEPS and len(self._requests) >= COLLAPSE_REQUESTS
        if seen and tokens < COLLAPSED * live and tokens >= SOUND * predecessor:
            return "roll_back", f"collapsed: {figures}"
        if self._overall.against() >= -math.log(OVERALL_ALPHA):
            return "roll_back", f"worse: {figures}"
        for name, tenant in self._tenants.items():
            if tenant.evidence.against() >= -math.log(tenant.alpha):
                return "roll_back", f"worse for tenant {name}: {self._figures_of(name)}"
        if self._steps() >= WATCH_STEPS:
            return "keep", f"watch over: {figures}"
        shown = self._overall.in_favour() >= -math.log(KEEP_ALPHA)
        suspicious = any(t.evidence.total > 0 for t in self._tenants.values())
        if shown and not suspicious and self._steps() >= LEAST_STEPS:
            return "keep", f"not worse: {figures}"
        return "continue", f"watching: {figures}"

    def _weighted(self) -> tuple[float, float, float]:
        """Tokens, live steps, predecessor's steps."""
        requests = self._requests.values()
        return (
            sum(r.weight * r.tokens for r in requests),
            sum(r.weight * r.live_steps for r in requests),
            sum(r.weight * r.predecessor_steps for r in requests),
        )

    def _figures_of(self, tenant: str) -> str:
        own = [r for r in self._requests.values() if r.tenant == tenant]
        tokens = sum(r.tokens for r in own)
        live = tokens / sum(r.live_steps for r in own)
        predecessor = tokens / sum(r.predecessor_steps for r in own)
        return f"{live:.3f} live, {predecessor:.3f} the version before, over {len(own)} of its requests"

    def _steps(self) -> float:
        return sum(r.live_steps for r in self._requests.values())

    def state(self) -> dict[str, object]:
        return {
            "decision": self._decision,
            "reason": self._reason,
            "requests": [
                [name, r.tenant, r.weight, r.tokens, r.live_steps, r.predecessor_steps]
                for name, r in self._requests.items()
            ],
        }

    def load_state(self, state: dict) -> None:
        """Into a new watch of the same two versions."""
        for name, tenant, weight, *counts in state["requests"]:
            self._requests[name] = _Request(tenant, weight)
            self._meet(tenant)
            self._count(tenant, name, *counts)
        self._decision, self._reason = state["decision"], state["reason"]
