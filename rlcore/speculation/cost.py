"""The measured cost of a decode step, by batch size and number of drafts."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes told apart; one between two of them counts as the larger."""

WINDOW = 31
"""Steps of a kind that are remembered. Their median is the cost: a stall moves it by one rank."""

ENOUGH = 3
"""Steps of a kind before its cost counts as measured."""

ESTABLISHED = 12
"""Steps of a kind before they say anything of the common factor."""

CHANGED = 8
FAR = math.log(1.3)
"""When so many steps of a kind in a row lie so far off its median, on one side, the kind has changed, and
only they are kept."""

DRIFT_RATE = 0.2
"""How fast the common factor follows: faster than a median turns over, so that it is the factor that
takes up what slows every kind of step, also those that are not being taken at present."""

WIDEST_SURPRISE = math.log(2)
"""What one step may say of the common factor, as a logarithm."""


def bucket(batch: int) -> int:
    """The index of a batch size's bucket."""
    return min(bisect.bisect_left(BUCKETS, batch), len(BUCKETS) - 1)


class StepCost:
    """Seconds of a step with ``batch`` requests and ``drafts`` drafted tokens for each.

    A duration is kept relative to a common factor, an average over the last steps of how they compare
    with their own kind's median. A kind's cost is the median of what is kept times the factor now, so
    that kinds measured at different times can be compared.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], deque[float]] = {}
        self._factor = 0.0
        """Logarithm of the common factor."""

    def observe(self, batch: int, drafts: int, seconds: float) -> None:
        """Take a step's duration. One that is not positive (a clock that stands still) is ignored."""
        if batch < 1 or not 0 < seconds < math.inf:
            return
        kept = self._kept.setdefault((bucket(batch), drafts), deque(maxlen=WINDOW))
        relative = math.log(seconds) - self._factor
        if len(kept) >= ESTABLISHED:
            surprise = relative - statistics.median(kept)
            surprise = max(-WIDEST_SURPRISE, min(WIDEST_SURPRISE, surprise))
            self._factor += DRIFT_RATE * surprise
            relative -= DRIFT_RATE * surprise
        kept.append(relative)
        late = list(kept)[-CHANGED:]
        middle = statistics.median(kept)
        if len(late) == CHANGED < len(kept) and (
            min(late) - middle > FAR or middle - max(late) > FAR
        ):
            kept.clear()
            kept.extend(late)

    def measured(self, batch: int, drafts: int) -> bool:
        return len(self._kept.get((bucket(batch), drafts), ())) >= ENOUGH

    def seconds(self, batch: int, drafts: int) -> float | None:
        """None when it was not measured."""
        kept = self._kept.get((bucket(batch), drafts))
        if kept is None or len(kept) < ENOUGH:
            return None
        return math.exp(statistics.median(kept) + self._factor)
