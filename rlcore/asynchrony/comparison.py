"""Whether a noisy rate is another after a change than before it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

GAIN = 0.02
"""Least share of a rate that counts as a difference."""

CERTAINTY = 2.0
"""Standard errors of the difference that a rise has to exceed: 1 in 20 by chance. A fall counts from one
on, for a change that may have cost something is better taken back."""


def rose(before: Sequence[float], after: Sequence[float]) -> bool:
    """Of two samples or more each."""
    change, error = _difference(before, after)
    return change > max(GAIN * statistics.fmean(before), CERTAINTY * error)


def fell(before: Sequence[float], after: Sequence[float]) -> bool:
    """Of two samples or more each."""
    change, error = _difference(before, after)
    return change < -max(GAIN * statistics.fmean(before), error)


def _difference(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Of the means, and its standard error."""
    parts = [statistics.variance(series) / len(series) for series in (before, after)]
    return statistics.fmean(after) - statistics.fmean(before), math.sqrt(sum(parts))
