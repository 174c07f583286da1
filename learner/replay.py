"""The bounded memory of recent traffic: what to train on next, and what is held out for judging."""

from __future__ import annotations

import random
from collections import OrderedDict

from learner.batch import Span
from learner.split import HeldoutSplit

SpanKey = tuple[str, int]
"""(request id, first position)"""

HELDOUT_FACTOR = 3
"""Held-out tokens kept, as a multiple of those the gate needs."""

HELDOUT_BYTES = 0.5
"""Bytes that the held-out spans may take beside the training spans, as a share of their budget."""


def span_key(span: Span) -> SpanKey:
    return (span.request_id, span.first_position)


class Replay:
    """Spans within a budget of bytes; the oldest go first.

    Training takes the spans that were visited least, so every span is seen once before any is seen
    twice; ties are broken by a seeded draw.
    """

    def __init__(self, max_bytes: int, split: HeldoutSplit, gate_tokens: int, seed: int) -> None:
        self._max_bytes = max_bytes
        self._split = split
        self._gate_tokens = gate_tokens
        self._training: OrderedDict[SpanKey, Span] = OrderedDict()
        self._heldout: OrderedDict[SpanKey, Span] = OrderedDict()
        self._visits: dict[SpanKey, int] = {}
        self._bytes = 0
        self._heldout_bytes = 0
        self.random = random.Random(seed)
        self.heldout_tokens = 0
        self.training_tokens = 0

    def add(self, span: Span) -> bool:
        """Take a span; False when it has nothing to learn from or is known already."""
        key = span_key(span)
        if span.anchors == 0 or key in self._training or key in self._heldout:
            return False
        if self._split.is_heldout(span.prompt_hash, self.heldout_tokens):
            self._heldout[key] = span
            self.heldout_tokens += span.anchors
            self._heldout_bytes += span.nbytes
            while self._heldout_is_full() and len(self._heldout) > 1:
                _, old = self._heldout.popitem(last=False)
                self.heldout_tokens -= old.anchors
                self._heldout_bytes -= old.nbytes
            return True
        self._training[key] = span
        self._bytes += span.nbytes
        self.training_tokens += span.anchors
        while self._bytes > self._max_bytes and len(self._training) > 1:
            old_key, old = self._training.popitem(last=False)
            self._visits.pop(old_key, None)
            self._bytes -= old.nbytes
            self.training_tokens -= old.anchors
        return True

    def _heldout_is_full(self) -> bool:
        too_many = self.heldout_tokens > HELDOUT_FACTOR * self._gate_tokens
        return too_many or self._heldout_bytes > HELDOUT_BYTES * self._max_bytes

    def draw(self, max_tokens: int) -> list[Span]:
        """Spans for one update, about ``max_tokens`` output positions, each counted as visited."""
        order = sorted(
            self._training, key=lambda key: (self._visits.get(key, 0), self.random.random())
        )
        chosen: list[Span] = []
        tokens = 0
        for key in order:
            span = self._training[key]
            if chosen and tokens + span.anchors > max_tokens:
                break
            chosen.append(span)
            tokens += span.anchors
            self._visits[key] = self._visits.get(key, 0) + 1
        return chosen

    def heldout(self) -> list[Span]:
        return list(self._heldout.values())

    def holds_out(self, span: Span) -> bool:
        """Whether a span that was added is among the held-out ones."""
        return span_key(span) in self._heldout

    def state(self) -> dict[str, object]:
        """The index, not the spans: those are in the journal."""
        return {
            "visits": [[*key, visits] for key, visits in self._visits.items()],
            "split": self._split.state(),
            "random": _pack_random(self.random.getstate()),
        }

    def load_state(self, state: dict) -> None:
        """Call before the journal's spans are added back."""
        self._split.load_state(state["split"])
        self._visits = {(r, i): visits for r, i, visits in state["visits"]}
        version, internal, gauss = state["random"]
        self.random.setstate((version, tuple(internal), gauss))


def _pack_random(state: tuple) -> list:
    version, internal, gauss = state
    return [version, list(internal), gauss]
