"""Percentiles of what clients waited for, with bootstrap intervals over blocks. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from clients.bench.figures import BOUNDS, Interval
from clients.load import RequestRecord
from clients.summary import gaps

PERCENTILES = (50, 95, 99)
RESAMPLES = 1000


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of all blocks' values together; ``values`` is how many those are."""

    values: int
    p50: Interval
    p95: Interval
    p99: Interval


def first_token_times(records: Sequence[RequestRecord]) -> list[float]:
    return [r.first_token - r.started for r in records if r.first_token is not None]


def chunk_gaps(records: Sequence[RequestRecord]) -> list[float]:
    """Between neighbouring chunks of one stream, each of one token or more."""
    return [gap for r in records for gap in gaps(r.chunk_times)]


def token_times(records: Sequence[RequestRecord]) -> list[float]:
    """A value a request: the time behind its first chunk, a token of those that came in it."""
    values = []
    for record in records:
        later = sum(len(tokens) for tokens in record.token_ids[1:])
        if later:
            values.append((record.chunk_times[-1] - record.chunk_times[0]) / later)
    return values


def percentiles(blocks: Sequence[Sequence[float]], seed: int = 0) -> Percentiles | None:
    """None for no values. Whole blocks are drawn with replacement, and their values pooled."""
    filled = [np.asarray(block, dtype=float) for block in blocks if block]
    if not filled:
        return None
    pool = np.concatenate(filled)
    found = np.percentile(pool, PERCENTILES)
    low: list[float | None]
    high: list[float | None]
    low, high = [None] * len(PERCENTILES), [None] * len(PERCENTILES)
    count = len(filled)
    if count > 1:
        drawn = np.sort(np.random.default_rng(seed).integers(0, count, (RESAMPLES, count)), axis=1)
        # Few blocks make few different draws.
        kinds, times = np.unique(drawn, axis=0, return_counts=True)
        values = [
            np.percentile(np.concatenate([filled[i] for i in row]), PERCENTILES) for row in kinds
        ]
        low, high = np.percentile(np.repeat(values, times, axis=0), BOUNDS, axis=0).tolist()
    p50, p95, p99 = (
        Interval(float(value), bottom, top, count)
        for value, bottom, top in zip(found, low, high, strict=True)
    )
    return Percentiles(values=len(pool), p50=p50, p95=p95, p99=p99)
