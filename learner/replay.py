"""The bounded memory of traffic: what to train on next, and what is held out for judging.

Both are kept by tenant and by time (``learner.strata``), so that old traffic stays alive beside the
recent and no tenant crowds out another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from learner.batch import Span
from learner.split import HeldoutSplit
from learner.strata import Bounds, Slice, SpanKey, Strata, span_key
from learner.visits import VisitQueue, fair_shares

HELDOUT_TOKENS = 3.0
"""Held-out tokens kept, as a multiple of those the gate needs."""

HELDOUT_RECENT = 1.5
"""Held-out tokens that are recent, likewise: more than the gate needs, as the last of a span are not
judged."""

HELDOUT_BYTES = 0.4
"""Share of the budget that the held-out spans may take: with long prompts, much for few tokens."""

HELDOUT_RECENT_SHARE = 0.75
"""Part of the held-out room for recent spans, when long prompts fill it."""

HELDOUT_SPANS = 24
"""Held-out spans that stay recent however long they are: the gate wants several prompts."""

RECENT_TOKENS = 20_000
"""A training span is old once so many training tokens were received after it."""

RECENT_SHARE = 0.5
"""Part of the training room for recent spans, when it is full."""

MEMORY_SHARE = 0.25
"""Share of an update's tokens that comes from old traffic, once there is that much of it."""

QueueName = tuple[str, Slice]
"""(tenant, part)"""


class Replay:
    """Spans within a budget of bytes.

    Of the drawn tokens MEMORY_SHARE are old and the rest recent, each shared among the tenants by
    ``fair_shares``: the next span comes from the queue that is furthest behind its share. Of a
    tenant's recent spans the least visited is next. Its old spans are visited in turn, and one that
    becomes old takes a random place in the round, so that they wait no longer however many come in.
    """

    def __init__(self, max_bytes: int, split: HeldoutSplit, gate_tokens: int, seed: int) -> None:
        heldout = int(HELDOUT_BYTES * max_bytes)
        self._split = split
        self._seed = seed
        self._training = Strata(
            Bounds(max_bytes - heldout, math.inf, RECENT_TOKENS, RECENT_SHARE), seed
        )
        self._heldout = Strata(
            Bounds(
                heldout,
                HELDOUT_TOKENS * gate_tokens,
                int(HELDOUT_RECENT * gate_tokens),
                HELDOUT_RECENT_SHARE,
                HELDOUT_SPANS,
            ),
            seed,
        )
        self._queues: dict[QueueName, VisitQueue] = {}
        self._due: dict[QueueName, float] = {}
        """Tokens that a queue is behind its share (above zero) or ahead of it."""
        self._saved_turns: dict[SpanKey, float] = {}
        self.most_shares: Mapping[str, float] = {}
        """Of the drawn tokens, the most that single tenants may be, where that is less than all."""

    @property
    def training_tokens(self) -> int:
        return self._training.tokens

    @property
    def heldout_tokens(self) -> int:
        return self._heldout.tokens

    def holds(self, key: SpanKey) -> bool:
        return key in self._training or key in self._heldout

    def add(self, span: Span) -> bool:
        """Take a span; False when it has nothing to learn from, is known, or finds no room."""
        key = span_key(span)
        if span.anchors == 0 or self.holds(key):
            return False
        if self._split.is_heldout(span.prompt_hash, self.heldout_tokens):
            self._heldout.add(span)
            return key in self._heldout
        changes = self._training.add(span)
        self._queue(span.tenant, changes.entered).push(key, self._saved_turns.pop(key, 0.0))
        for aged in changes.aged:
            self._queue(aged.tenant, "recent").remove(span_key(aged))
            self._queue(aged.tenant, "old").join(span_key(aged))
        for gone in changes.gone:
            self._queue(gone.tenant, "old").remove(span_key(gone))
        return key in self._training

    def remove(self, unwanted: Callable[[Span], bool]) -> tuple[int, int]:
        """Take spans out for good, with what is remembered of their prompts: (training, held-out) spans."""
        training, heldout = self._training.remove(unwanted), self._heldout.remove(unwanted)
        for span, part in training:
            self._queue(span.tenant, part).remove(span_key(span))
        for span, _ in (*training, *heldout):
            self._split.forget(span.prompt_hash)
        return len(training), len(heldout)

    def draw(self, max_tokens: int) -> list[Span]:
        """Spans for one update, about ``max_tokens`` output positions, each counted as visited."""
        shares = self._shares()
        self._due = {name: self._due.get(name, 0.0) for name in shares}
        chosen: list[Span] = []
        visited: list[tuple[VisitQueue, SpanKey, float]] = []
        tokens = 0
        while shares:
            name = max(shares, key=lambda n: self._due[n])
            queue = self._queues[name]
            key = queue.first()
            span = self._training[key]
            if chosen and tokens + span.anchors > max_tokens:
                break
            chosen.append(span)
            tokens += span.anchors
            whole = sum(shares.values())
            for other, share in shares.items():
                self._due[other] += share / whole * span.anchors
            self._due[name] -= span.anchors
            visited.append((queue, key, queue.remove(key)))
            if not queue:
                del shares[name]
        for queue, key, turn in visited:
            queue.push(key, turn + 1)
        return chosen

    def _shares(self) -> dict[QueueName, float]:
        """The share of an update's tokens that each queue should get."""
        recent, old = (self._training.tenant_tokens(part) for part in ("recent", "old"))
        # Few old spans are not repeated more often than the others.
        memory = min(MEMORY_SHARE, sum(old.values()) / max(1, self.training_tokens))
        shares: dict[QueueName, float] = {}
        for tenant, share in fair_shares(recent, self.most_shares).items():
            shares[tenant, "recent"] = (1 - memory) * share
        for tenant, share in fair_shares(old, self.most_shares).items():
            shares[tenant, "old"] = memory * share
        return shares

    def heldout(self) -> list[Span]:
        """In the order of arrival."""
        return list(self._heldout.spans())

    def holds_out(self, span: Span) -> bool:
        """Whether a span that was added is among the held-out ones."""
        return span_key(span) in self._heldout

    def heldout_slice(self, span: Span) -> Slice:
        """Whether a held-out span is of the recent traffic or of the old."""
        return self._heldout.slice_of(span_key(span))

    def _queue(self, tenant: str, part: Slice) -> VisitQueue:
        return self._queues.setdefault((tenant, part), VisitQueue(self._seed))

    # --- through a restart ---

    def saved_clock(self, key: SpanKey) -> int | None:
        """Orders the spans of a loaded state that are not back yet; None for any other span."""
        training = self._training.saved_clock(key)
        return self._heldout.saved_clock(key) if training is None else training

    def state(self) -> dict[str, Any]:
        """The index, not the spans: those are in the journal."""
        turns = [(*key, turn) for queue in self._queues.values() for key, turn in queue.items()]
        return {
            "training": self._training.state(),
            "heldout": self._heldout.state(),
            "turns": turns,
            "due": [(*name, due) for name, due in self._due.items()],
            "split": self._split.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Call before the journal's spans are added back, those of the state in their order."""
        self._split.load_state(state["split"])
        self._training.load_state(state["training"])
        self._heldout.load_state(state["heldout"])
        self._saved_turns = {(r, i): turn for r, i, turn in state["turns"]}
        self._due = {(tenant, part): due for tenant, part, due in state["due"]}
