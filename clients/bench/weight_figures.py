"""What the learner costs serving, from what clients saw in windows with it and without. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from clients.bench.capture_cost import median_of
from clients.bench.paired import RatioSpread, ratio_spread
from clients.bench.plan import order
from clients.load import RequestRecord
from clients.summary import spread, token_rate

LEAST_SHARE = 0.5
"""Of its rate without load; a learner that trains less than that was starved, not light."""

WITH, WITHOUT = "with", "without"


class Trained(msgspec.Struct, frozen=True):
    """What the learner's last report said, and when it was made."""

    time: float
    positions: int
    """Trained so far, repeats counted."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the load of its concurrency began; the learner runs in ``with``, or is stopped."""

    pair: int
    learner: str
    begin: float
    end: float
    trained: tuple[Trained, Trained] | None
    """The reports at both ends; None for ``without``."""


class WindowFigures(msgspec.Struct, frozen=True, kw_only=True):
    window: Window
    tokens_per_second: float
    gaps: int
    gap_p50_s: float | None
    """Between neighbouring chunks of one stream, each of one token or more."""
    gap_p99_s: float | None


class Weight(msgspec.Struct, frozen=True, kw_only=True):
    """The learner's cost at one concurrency; ratios are with over without, paired."""

    concurrency: int
    tokens_per_second: RatioSpread
    gap_p50: RatioSpread | None
    gap_p99: RatioSpread | None
    with_tokens_per_second: float
    without_tokens_per_second: float
    """Medians over the windows, as are the next four."""
    with_gap_p50_s: float | None
    without_gap_p50_s: float | None
    with_gap_p99_s: float | None
    without_gap_p99_s: float | None
    trained_per_second: float
    """Positions, in the windows with the learner."""
    share_of_idle: float
    """The same over its rate without load."""
    void: str | None
    """Why the ratios say nothing of what learning costs."""


def window_order(pairs: int) -> list[tuple[int, str]]:
    """(pair, learner); who comes first changes from pair to pair."""
    return [(pair, name) for pair in range(pairs) for name in order((WITH, WITHOUT), pair)]


def rate_of(parts: Sequence[tuple[Trained, Trained]]) -> float:
    """Positions a second over all parts; 0 when no report came in any of them."""
    seconds = sum(after.time - before.time for before, after in parts)
    positions = sum(after.positions - before.positions for before, after in parts)
    return positions / seconds if seconds > 0 else 0.0


def gaps_within(records: Sequence[RequestRecord], begin: float, end: float) -> list[float]:
    """Gaps with both ends in [begin, end)."""
    return [
        after - before
        for record in records
        for before, after in pairwise(record.chunk_times)
        if begin <= before and after < end
    ]


def window_figures(records: Sequence[RequestRecord], window: Window) -> WindowFigures:
    gaps = spread(gaps_within(records, window.begin, window.end))
    return WindowFigures(
        window=window,
        tokens_per_second=token_rate(records, window.begin, window.end),
        gaps=0 if gaps is None else gaps.count,
        gap_p50_s=None if gaps is None else gaps.p50,
        gap_p99_s=None if gaps is None else gaps.p99,
    )


def weight_of(concurrency: int, windows: Sequence[WindowFigures], idle_rate: float) -> Weight:
    """Raises ValueError when no window without the learner has a token to compare with."""
    beside = {w.window.pair: w for w in windows if w.window.learner == WITH}
    alone = {w.window.pair: w for w in windows if w.window.learner == WITHOUT}
    pairs = [(beside[pair], alone[pair]) for pair in sorted(beside.keys() & alone.keys())]
    speeds = ratio_spread((a.tokens_per_second, b.tokens_per_second) for a, b in pairs)
    if speeds is None:
        raise ValueError("no pair of windows has tokens without the learner")
    rate = rate_of([w.window.trained for w in beside.values() if w.window.trained is not None])
    share = rate / idle_rate if idle_rate > 0 else 0.0
    void = None
    if share < LEAST_SHARE:
        void = (
            f"the learner trained {rate:.0f} positions/s beside the load, {share:.0%} of the "
            f"{idle_rate:.0f} without; from {LEAST_SHARE:.0%} on the ratios say what it costs"
        )
    return Weight(
        concurrency=concurrency,
        tokens_per_second=speeds,
        gap_p50=ratio_spread((a.gap_p50_s, b.gap_p50_s) for a, b in pairs),
        gap_p99=ratio_spread((a.gap_p99_s, b.gap_p99_s) for a, b in pairs),
        with_tokens_per_second=median_of(a.tokens_per_second for a, _ in pairs) or 0.0,
        without_tokens_per_second=median_of(b.tokens_per_second for _, b in pairs) or 0.0,
        with_gap_p50_s=median_of(a.gap_p50_s for a, _ in pairs),
        without_gap_p50_s=median_of(b.gap_p50_s for _, b in pairs),
        with_gap_p99_s=median_of(a.gap_p99_s for a, _ in pairs),
        without_gap_p99_s=median_of(b.gap_p99_s for _, b in pairs),
        trained_per_second=rate,
        share_of_idle=share,
        void=void,
    )
