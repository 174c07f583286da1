"""Spans kept within bounds, by tenant and by time: the recent ones, and a sample of all before them.

A span is *recent* until so many tokens were received after it; then it is *old*. Over the bounds, old
spans go, and recent ones become old early when they take more than their share of the room. Either
time the tenant that holds most of that part is the one to lose, so a tenant that holds less than an
equal share of a part loses nothing of it to another; one that is alone may hold everything.

A tenant's old part is a reservoir, and every span leaves through it: what stays is a uniform sample
of all that ever became old, so that each past period is still represented. The sampling priority of a
span is a hash of its key, so the sample does not depend on restarts.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Literal

from learner.batch import Span

SpanKey = tuple[str, int]
"""(request id, first position)"""

Slice = Literal["recent", "old"]


def span_key(span: Span) -> SpanKey:
    return (span.request_id, span.first_position)


def hash_order(seed: int, *what: object) -> int:
    """A number that orders things at random, always the same way."""
    text = repr((seed, *what)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Bounds:
    """What a store may hold, and what counts as recent."""

    max_bytes: int
    max_tokens: float
    recent_tokens: int
    """Tokens received after a span that make it old."""
    recent_share: float
    """Part of the bounds that recent spans may take when the store is full."""
    fewest_recent: int = 0
    """Spans that stay recent, and twice as many that stay, whatever their tokens: a few very long
    ones are no sample of the traffic."""


@dataclass
class Changes:
    """What adding a span did: the part it entered, then which became old, then which left."""

    entered: Slice
    aged: list[Span] = field(default_factory=list)
    gone: list[Span] = field(default_factory=list)


@dataclass
class _Kept:
    span: Span
    nbytes: int
    clock: int
    """Tokens the store had received when the span came, its own included."""
    slice: Slice = "recent"


class _Tenant:
    def __init__(self) -> None:
        self.recent: OrderedDict[SpanKey, None] = OrderedDict()
        self.old: list[tuple[int, SpanKey]] = []
        """A heap by sampling priority: the first goes first."""
        self.nbytes: dict[Slice, int] = {"recent": 0, "old": 0}
        self.tokens: dict[Slice, int] = {"recent": 0, "old": 0}

    def count(self, kept: _Kept, sign: int) -> None:
        self.nbytes[kept.slice] += sign * kept.nbytes
        self.tokens[kept.slice] += sign * kept.span.anchors

    def size(self, part: Slice, in_bytes: bool) -> int:
        return (self.nbytes if in_bytes else self.tokens)[part]


class Strata:
    def __init__(self, bounds: Bounds, seed: int) -> None:
        self._bounds = bounds
        self._seed = seed
        self._kept: dict[SpanKey, _Kept] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._saved: dict[SpanKey, tuple[int, Slice]] = {}
        self.clock = 0
        """Tokens received, in total."""
        self.tokens = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: SpanKey) -> bool:
        return key in self._kept

    def __getitem__(self, key: SpanKey) -> Span:
        return self._kept[key].span

    def spans(self) -> Iterator[Span]:
        """In the order of arrival."""
        return (kept.span for kept in self._kept.values())

    def slice_of(self, key: SpanKey) -> Slice:
        return self._kept[key].slice

    def tenant_tokens(self, part: Slice) -> dict[str, int]:
        """Tokens held by each tenant that holds any, by name."""
        held = ((name, self._tenants[name].tokens[part]) for name in sorted(self._tenants))
        return {name: tokens for name, tokens in held if tokens}

    def add(self, span: Span) -> Changes:
        """Take a span that is not held. It is among the ``gone`` when there is no room for it."""
        key = span_key(span)
        saved = self._saved.pop(key, None)
        if saved is None:
            self.clock += span.anchors
            kept = _Kept(span, span.nbytes, self.clock)
        else:
            kept = _Kept(span, span.nbytes, *saved)
        self._kept[key] = kept
        self.tokens += span.anchors
        self.nbytes += kept.nbytes
        tenant = self._tenants.setdefault(span.tenant, _Tenant())
        tenant.count(kept, 1)
        if kept.slice == "recent":
            tenant.recent[key] = None
        else:
            self._enter_old(tenant, key)
        changes = Changes(kept.slice)
        self._age(changes)
        self._shrink(changes)
        return changes

    def _age(self, changes: Changes) -> None:
        recent = sum(len(tenant.recent) for tenant in self._tenants.values())
        for tenant in self._tenants.values():
            while tenant.recent and recent > self._bounds.fewest_recent:
                key = next(iter(tenant.recent))
                if self.clock - self._kept[key].clock < self._bounds.recent_tokens:
                    break
                self._make_old(tenant, key, changes)
                recent -= 1

    def _make_old(self, tenant: _Tenant, key: SpanKey, changes: Changes) -> None:
        del tenant.recent[key]
        kept = self._kept[key]
        tenant.count(kept, -1)
        kept.slice = "old"
        tenant.count(kept, 1)
        self._enter_old(tenant, key)
        changes.aged.append(kept.span)

    def _enter_old(self, tenant: _Tenant, key: SpanKey) -> None:
        heappush(tenant.old, (hash_order(self._seed, key), key))

    def remove(self, unwanted: Callable[[Span], bool]) -> list[tuple[Span, Slice]]:
        """Take the spans for which this holds out for good; each with the part it was in."""
        gone = {key: kept for key, kept in self._kept.items() if unwanted(kept.span)}
        for key, kept in gone.items():
            del self._kept[key]
            self._tenants[kept.span.tenant].recent.pop(key, None)
            self._discount(kept)
        for name in {kept.span.tenant for kept in gone.values()}:
            tenant = self._tenants[name]
            tenant.old = [entry for entry in tenant.old if entry[1] not in gone]
            heapify(tenant.old)
            self._drop_if_empty(name)
        return [(kept.span, kept.slice) for kept in gone.values()]

    def _discount(self, kept: _Kept) -> None:
        self._tenants[kept.span.tenant].count(kept, -1)
        self.tokens -= kept.span.anchors
        self.nbytes -= kept.nbytes

    def _drop_if_empty(self, name: str) -> None:
        tenant = self._tenants[name]
        if not tenant.recent and not tenant.old:
            del self._tenants[name]

    def _shrink(self, changes: Changes) -> None:
        bounds = self._bounds
        while len(self._kept) > 1:
            if self.nbytes > bounds.max_bytes:
                self._make_room(bounds.recent_share * bounds.max_bytes, True, changes)
            elif self.tokens > bounds.max_tokens and len(self._kept) > 2 * bounds.fewest_recent:
                self._make_room(bounds.recent_share * bounds.max_tokens, False, changes)
            else:
                return

    def _make_room(self, most_recent: float, in_bytes: bool, changes: Changes) -> None:
        """One span becomes old, or goes."""
        tenants = self._tenants.values()
        recent = sum(len(tenant.recent) for tenant in tenants)
        fewest = 0 if in_bytes else self._bounds.fewest_recent
        full = sum(tenant.size("recent", in_bytes) for tenant in tenants) > most_recent
        if full and recent > fewest:
            tenant = max(tenants, key=lambda t: t.size("recent", in_bytes))
            self._make_old(tenant, next(iter(tenant.recent)), changes)
            return
        name = max(self._tenants, key=lambda n: self._tenants[n].size("old", in_bytes))
        tenant = self._tenants[name]
        _, key = heappop(tenant.old)
        kept = self._kept.pop(key)
        self._discount(kept)
        self._drop_if_empty(name)
        changes.gone.append(kept.span)

    # --- through a restart ---

    def saved_clock(self, key: SpanKey) -> int | None:
        """When a span came that was held at the time of the loaded state and is not back yet."""
        return self._saved[key][0] if key in self._saved else None

    def state(self) -> dict[str, Any]:
        """The index, without the spans."""
        kept = [(*key, k.clock, k.slice) for key, k in self._kept.items()]
        return {"clock": self.clock, "kept": kept}

    def load_state(self, state: dict[str, Any]) -> None:
        """Spans of this state that are added from now on, oldest first, take their old places."""
        self.clock = state["clock"]
        self._saved = {(r, i): (clock, part) for r, i, clock, part in state["kept"]}
