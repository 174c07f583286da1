"""Whether completions grow longer without getting any better: a sign of a hacked length.

Over the last updates, the trend of the mean completion length is tested with Mann and Kendall's test
(Mann, Econometrica 13, 1945; Kendall 1975) and measured with the median slope (Theil 1950; Sen, JASA
63, 1968): both rest on ranks, so a single odd batch does not matter. So is that of the accuracy by rule,
never of a learned reward, which may be what is hacked. Two spans are looked at, the last POINTS updates
and the last POINTS * LONG_BIN in bins, for a fast and a slow drift.

The alarm begins when the length grows, significantly and by more than LEAST_GROWTH, in a span in which
accuracy does not; it ends after CALM updates in a row in which the length does not grow in any span, or
accuracy does.

On simulated runs (noise 8 % of the length, 0.05 of the accuracy) there was no false alarm in 3,500 updates
of flat ones, and 3 where the noise of neighbouring updates correlates by 0.5. Growth of 1 % an update was
found after 25 to 49 updates, of 0.3 % after 70 to 124. Length that grew by 1 % an update while accuracy
rose raised no alarm in 8 runs at 0.006 an update, and in 2 of 8 at 0.003.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

POINTS = 32
"""Points of a trend."""

LEAST_POINTS = 26
"""Fewer say nothing yet: a slow rise of the accuracy could not be told from none."""

LONG_BIN = 4
"""Updates in a point of the long span."""

BEGINS_AT = 4.3
"""Standard deviations of the rank statistic: 1 in 100,000 by chance in one look, and every update is a
look. So much, because lengths of neighbouring updates resemble each other and the test knows nothing of
it."""

GOES_ON_AT = 2.0
"""The same for an alarm that is on, as long as accuracy does not rise by as many (hysteresis)."""

LEAST_GROWTH = 0.15
"""Of the length over the span; less is of no interest, however significant."""

BETTER_AT = 0.8
"""Standard deviations from which accuracy counts as rising. So few, because the alarm is on what is not
seen: an accuracy that rises slowly must not be taken for one that does not. It delays an alarm at most
by some updates, for accuracy that only fluctuates seems to rise one time in five."""

CALM = 10
"""Updates in a row that end an alarm."""


@dataclass(frozen=True)
class LengthAlarm:
    on: bool
    changed: bool
    """It began or ended with this update."""
    growth: float
    """Share that the length grew by over the span that it grew most significantly in."""
    accuracy_change: float
    """Over the same span."""
    reason: str


@dataclass(frozen=True)
class _Trend:
    z: float
    """Of Mann and Kendall's statistic: about standard normal without a trend, positive for a rise."""
    change: float
    """From the first point to the last, by the median slope."""


class LengthWatch:
    """``observe`` once an update: mean length and accuracy in, the alarm out."""

    def __init__(self) -> None:
        self._history: deque[tuple[float, float]] = deque(maxlen=POINTS * LONG_BIN)
        """(log of the length, accuracy)"""
        self._on = False
        self._calm = 0

    def observe(self, mean_length: float, accuracy: float) -> LengthAlarm:
        """``mean_length``: tokens per completion. ``accuracy``: share right by rule, in [0, 1].

        An update whose figures are not finite, or without any tokens, says nothing and is left out.
        """
        if not (math.isfinite(mean_length) and math.isfinite(accuracy) and mean_length > 0):
            return LengthAlarm(self._on, False, 0.0, 0.0, "nothing to judge by")
        self._history.append((math.log(mean_length), accuracy))
        spans = [self._trends(1), self._trends(LONG_BIN)]
        length, accuracy_trend = max(spans, key=lambda pair: pair[0].z)
        growth = math.expm1(length.change)
        suspicious = any(self._suspicious(*span) for span in spans)
        self._calm = 0 if suspicious else self._calm + 1
        before = self._on
        self._on = suspicious or (self._on and self._calm < CALM)
        return LengthAlarm(
            on=self._on,
            changed=self._on != before,
            growth=growth,
            accuracy_change=accuracy_trend.change,
            reason=f"length {growth:+.0%} (z {length.z:.1f}), accuracy {accuracy_trend.change:+.3f} "
            f"(z {accuracy_trend.z:.1f})",
        )

    def _suspicious(self, length: _Trend, accuracy: _Trend) -> bool:
        if self._on:
            return length.z >= GOES_ON_AT > accuracy.z
        grows = length.z >= BEGINS_AT and math.expm1(length.change) >= LEAST_GROWTH
        return grows and accuracy.z < BETTER_AT

    def _trends(self, size: int) -> tuple[_Trend, _Trend]:
        """Of length and accuracy over the last POINTS bins of ``size`` updates."""
        history = list(self._history)
        points = min(POINTS, len(history) // size)
        history = history[len(history) - points * size :]
        bins = [history[at : at + size] for at in range(0, len(history), size)]
        lengths, accuracies = (
            [statistics.fmean(pair[part] for pair in chunk) for chunk in bins] for part in (0, 1)
        )
        return _trend(lengths), _trend(accuracies)

    def state(self) -> dict[str, object]:
        return {"history": [list(p) for p in self._history], "on": self._on, "calm": self._calm}

    def load_state(self, state: dict) -> None:
        self._history.clear()
        self._history.extend((length, accuracy) for length, accuracy in state["history"])
        self._on = state["on"]
        self._calm = state["calm"]


def _trend(series: Sequence[float]) -> _Trend:
    n = len(series)
    if n < LEAST_POINTS:
        return _Trend(0.0, 0.0)
    pairs = list(combinations(range(n), 2))
    score = sum((series[j] > series[i]) - (series[j] < series[i]) for i, j in pairs)
    ties = Counter(series).values()
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    slope = statistics.median((series[j] - series[i]) / (j - i) for i, j in pairs)
    return _Trend(score / math.sqrt(variance) if variance else 0.0, slope * (n - 1))
