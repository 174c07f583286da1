"""Scores drafters on held-out spans, and remembers the live one's scores."""

from __future__ import annotations

from collections.abc import Sequence

from learner.batch import Span
from learner.drafters.base import Drafter
from learner.estimate import SpanLengths, chain_lengths
from learner.gate import Age, SpanScore
from learner.live import LiveDraft
from learner.replay import SpanKey, span_key
from rlcore.precision import mixed_precision

BATCH_ROWS = 2048
"""Rows scored at once, padding not counted."""


def score_spans(drafter: Drafter, spans: Sequence[Span], steps: int) -> list[SpanLengths]:
    """One entry per span, in their order."""
    order = sorted(range(len(spans)), key=lambda i: spans[i].rows)
    scored: dict[int, SpanLengths] = {}
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * spans[i].rows > BATCH_ROWS:
            scored |= _score(drafter, spans, batch, steps)
            batch = []
        batch.append(i)
    if batch:
        scored |= _score(drafter, spans, batch, steps)
    return [scored[i] for i in range(len(spans))]


def _score(
    drafter: Drafter, spans: Sequence[Span], batch: list[int], steps: int
) -> dict[int, SpanLengths]:
    with mixed_precision():
        lengths = chain_lengths(drafter, [spans[i] for i in batch], steps)
    return dict(zip(batch, lengths, strict=True))


def gate_scores(
    lengths: Sequence[SpanLengths], spans: Sequence[Span], ages: Sequence[Age]
) -> list[SpanScore]:
    return [
        SpanScore(score.length_sum, score.anchors, span.stream, age, span.prompt_hash)
        for score, span, age in zip(lengths, spans, ages, strict=True)
    ]


def conditional_rates(lengths: Sequence[SpanLengths]) -> tuple[float, ...]:
    """Accepted at a position given that it was reached, over all spans."""
    steps = max((len(s.accepted) for s in lengths), default=0)
    accepted = [sum(s.accepted[k] for s in lengths) for k in range(steps)]
    reached = [sum(s.reached[k] for s in lengths) for k in range(steps)]
    return tuple(a / r if r else 0.0 for a, r in zip(accepted, reached, strict=True))


class LiveScores:
    """The live version's scores by span, so that each span is scored once for each version."""

    def __init__(self) -> None:
        self._key: tuple[int, str] | None = None
        """The version's number and digest: another home's has the same number."""
        self._scores: dict[SpanKey, SpanLengths] = {}

    def of(self, live: LiveDraft, spans: Sequence[Span], steps: int) -> list[SpanLengths]:
        key = (live.version, live.sha256)
        if key != self._key:
            self._key, self._scores = key, {}
        missing = [span for span in spans if span_key(span) not in self._scores]
        for span, score in zip(missing, score_spans(live.drafter, missing, steps), strict=True):
            self._scores[span_key(span)] = score
        result = [self._scores[span_key(span)] for span in spans]
        self._scores = {span_key(s): r for s, r in zip(spans, result, strict=True)}
        return result
