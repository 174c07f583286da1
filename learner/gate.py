"""Whether a candidate may replace the live drafter: a paired test on held-out traffic.

Both are run over the same spans, which neither was trained on. Positions within a span hang together,
so the span is the unit: with d_i the difference of the summed lengths in span i and n_i its positions,
the gain per position is the ratio sum d_i / sum n_i, and its standard error is that of a ratio
estimator (Cochran, Sampling Techniques, section 6.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ONE_SIDED_95 = 1.645
"""Normal quantile of the 95 % lower bound."""

FEWEST_SPANS = 8
"""Below this many spans the normal approximation is not to be trusted."""


@dataclass(frozen=True)
class SpanScore:
    """One drafter on one held-out span: summed acceptance length and number of positions."""

    length_sum: float
    positions: int


@dataclass(frozen=True)
class Judgement:
    promote: bool
    candidate_length: float
    live_length: float
    gain_lower: float
    """95 % lower bound of the gain in acceptance length."""
    tokens: int
    reason: str


def judge(
    candidate: Sequence[SpanScore], live: Sequence[SpanScore], fewest_tokens: int
) -> Judgement:
    """Compare span by span; both sequences name the same spans in the same order."""
    tokens = sum(score.positions for score in live)
    spans = sum(score.positions > 0 for score in live)
    if tokens < fewest_tokens or spans < FEWEST_SPANS:
        return Judgement(False, 0.0, 0.0, 0.0, tokens, "too little held-out traffic")
    gains = [c.length_sum - s.length_sum for c, s in zip(candidate, live, strict=True)]
    gain = sum(gains) / tokens
    spread = sum(
        (d - gain * s.positions) ** 2 for d, s in zip(gains, live, strict=True) if s.positions
    )
    error = math.sqrt(spread * spans / (spans - 1)) / tokens
    lower = gain - ONE_SIDED_95 * error
    promote = lower > 0
    return Judgement(
        promote=promote,
        candidate_length=sum(c.length_sum for c in candidate) / tokens,
        live_length=sum(s.length_sum for s in live) / tokens,
        gain_lower=lower,
        tokens=tokens,
        reason="better than the live version" if promote else "not shown to be better",
    )
