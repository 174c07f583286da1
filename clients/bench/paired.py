"""How far two things that were measured in turns lie apart. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np


class RatioSpread(msgspec.Struct, frozen=True):
    """Of the ratios of pairs, each measured one right after the other."""

    pairs: int
    median: float
    p25: float
    p75: float
    min: float
    max: float


def ratio_spread(pairs: Iterable[tuple[float | None, float | None]]) -> RatioSpread | None:
    """First over second; a pair in which a value is missing counts for nothing. None without pairs."""
    ratios = np.array([a / b for a, b in pairs if a is not None and b])
    if ratios.size == 0:
        return None
    p25, median, p75 = (float(np.percentile(ratios, q)) for q in (25, 50, 75))
    return RatioSpread(len(ratios), median, p25, p75, float(ratios.min()), float(ratios.max()))
