"""In which order spans are trained on: the least visited first, and no tenant more than its part."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from learner.strata import SpanKey, hash_order

Entry = tuple[float, int, SpanKey]

TENANT_FAVOUR = 4
"""No span is visited more often than this many times another's rate for its tenant being small."""

STALE_ENTRIES = 64
"""Entries of removed spans that a queue may hold beside as many as it has spans."""


def fair_shares(
    tokens: Mapping[str, int], most: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The share of drawn tokens of each tenant, given the tokens it holds; the sum is 1.

    In proportion to the tokens, but none more than all others together, so that ten times the
    traffic is not ten times the updates; unless that made the others' spans be visited more than
    TENANT_FAVOUR times as often as its own: one request must not take half of all updates.

    ``most`` bounds single tenants' shares; what that takes from them goes to the others. Where nobody
    is left to give it to, the bounds cannot hold: there is nothing else to draw.
    """
    total = sum(tokens.values())
    weights = {
        name: n if 2 * n <= total else max(total - n, n / TENANT_FAVOUR)
        for name, n in tokens.items()
    }
    whole = sum(weights.values())
    shares = {name: weight / whole for name, weight in weights.items()}
    return shares if not most else _bounded(shares, most)


def _bounded(shares: dict[str, float], most: Mapping[str, float]) -> dict[str, float]:
    bound: dict[str, float] = {}
    free = dict(shares)
    while free:
        left = 1 - sum(bound.values())
        scale = left / sum(free.values())
        over = [name for name, share in free.items() if share * scale > most.get(name, 1.0)]
        if not over:
            return bound | {name: share * scale for name, share in free.items()}
        for name in over:
            del free[name]
            bound[name] = most[name]
    whole = sum(bound.values())
    return {name: share / whole for name, share in bound.items()}


class VisitQueue:
    """Spans by their turn, lowest first; a visit puts the turn off by one.

    Ties go in an order that looks random and is reproducible.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._heap: list[Entry] = []
        self._turn: dict[SpanKey, float] = {}

    def __len__(self) -> int:
        return len(self._turn)

    def items(self) -> list[tuple[SpanKey, float]]:
        """(key, turn)"""
        return list(self._turn.items())

    def push(self, key: SpanKey, turn: float) -> None:
        self._turn[key] = turn
        heappush(self._heap, self._entry(key, turn))

    def join(self, key: SpanKey) -> None:
        """Enter somewhere in the round that is going on, neither before nor behind the others."""
        now = self._turn[self.first()] if self._turn else 0.0
        self.push(key, now + hash_order(self._seed, key) / 2**64)

    def remove(self, key: SpanKey) -> float:
        """Take a span out; its turn."""
        turn = self._turn.pop(key)
        if len(self._heap) > 2 * len(self._turn) + STALE_ENTRIES:
            self._heap = [self._entry(k, t) for k, t in self._turn.items()]
            heapify(self._heap)
        return turn

    def first(self) -> SpanKey:
        """The span whose turn it is; the queue must not be empty."""
        while self._turn.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][2]

    def _entry(self, key: SpanKey, turn: float) -> Entry:
        return (turn, hash_order(self._seed, key, turn), key)
