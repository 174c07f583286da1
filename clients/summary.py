"""Figures made of request records. Pure functions: no clock, no I/O.

Two lengths, never mixed: *acceptance length* is tokens per step in which something was drafted,
bonus token included; *tokens per target step* counts every decode step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from clients.load import RequestRecord
from rlcore.records.acceptance import AcceptanceCount


class Spread(msgspec.Struct, frozen=True):
    """Where a set of values lies; percentiles are interpolated linearly."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float


class LoadSummary(msgspec.Struct, frozen=True):
    requests: int
    failed: int
    restarted: int
    output_tokens: int
    seconds: float
    tokens_per_second: float
    first_token_s: Spread | None
    gap_s: Spread | None
    """Between neighbouring chunks of one stream."""
    stall_s: Spread | None
    """One value a stream: its longest gap less its median gap."""
    acceptance: list[AcceptanceCount]
    acceptance_length: float | None
    tokens_per_step: float | None


def spread(values: Iterable[float]) -> Spread | None:
    """None for no values."""
    array = np.fromiter(values, dtype=float)
    if array.size == 0:
        return None
    p50, p90, p99 = (float(np.percentile(array, q)) for q in (50, 90, 99))
    return Spread(int(array.size), p50, p90, p99, float(array.max()))


def gaps(times: Sequence[float]) -> list[float]:
    """Time between neighbouring chunks."""
    return [after - before for before, after in pairwise(times)]


def excess_gaps(times: Sequence[float]) -> list[float]:
    """Each gap less the stream's median gap, which stands for its step."""
    between = gaps(times)
    if not between:
        return []
    step = float(np.median(between))
    return [gap - step for gap in between]


def longest_stall(times: Sequence[float]) -> float | None:
    """The longest gap less the median one; None for a stream of fewer than two chunks."""
    return max(excess_gaps(times), default=None)


def split_excess(
    times: Sequence[float], intervals: Sequence[tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """A stream's excess gaps that overlap one of the intervals, and the others."""
    around: list[float] = []
    elsewhere: list[float] = []
    for (before, after), excess in zip(pairwise(times), excess_gaps(times), strict=True):
        touched = any(before < end and after > begin for begin, end in intervals)
        (around if touched else elsewhere).append(excess)
    return around, elsewhere


def served(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Those that ended well."""
    return [record for record in records if record.error is None]


def tokens_per_second(records: Iterable[RequestRecord]) -> float:
    """Tokens of requests that ended well, over the time from the first start to the last end."""
    every = list(records)
    if not every:
        return 0.0
    seconds = max(r.ended for r in every) - min(r.started for r in every)
    tokens = sum(r.output_tokens or 0 for r in served(every))
    return tokens / seconds if seconds > 0 else 0.0


def token_rate(records: Iterable[RequestRecord], begin: float, end: float) -> float:
    """Tokens a second in [begin, end); a request's tokens are spread evenly over its chunks."""
    tokens = 0.0
    for record in records:
        inside = sum(begin <= t < end for t in record.chunk_times)
        if inside and record.output_tokens:
            tokens += record.output_tokens * inside / len(record.chunk_times)
    return tokens / (end - begin) if end > begin else 0.0


def add_counts(counts: Iterable[AcceptanceCount], version: int = -1) -> AcceptanceCount:
    """The sum of several counts, under the given version number."""
    total = AcceptanceCount(version)
    for count in counts:
        longer = max(len(total.drafted), len(count.drafted))
        for name in ("drafted", "accepted"):
            mine, theirs = getattr(total, name), getattr(count, name)
            mine.extend([0] * (longer - len(mine)))
            for i, n in enumerate(theirs):
                mine[i] += n
        total.steps += count.steps
        total.plain_steps += count.plain_steps
        total.emitted += count.emitted
    return total


def acceptance_by_version(records: Iterable[RequestRecord]) -> dict[int, AcceptanceCount]:
    """What each draft version did over all requests that ended well, by ``usage.paceline``."""
    groups: dict[int, list[AcceptanceCount]] = {}
    for record in served(records):
        for count in record.versions or ():
            groups.setdefault(count.version, []).append(count)
    return {version: add_counts(groups[version], version) for version in sorted(groups)}


def acceptance(records: Iterable[RequestRecord]) -> AcceptanceCount:
    """All versions together."""
    return add_counts(acceptance_by_version(records).values())


def length_interval(
    records: Iterable[RequestRecord], resamples: int = 2000
) -> tuple[float, float] | None:
    """95 % bootstrap interval of the acceptance length, over requests; None for fewer than two."""
    counts = [add_counts(record.versions or ()) for record in served(records)]
    drafted = np.array([(c.emitted, c.steps) for c in counts if c.steps], dtype=float)
    if len(drafted) < 2:
        return None
    draws = np.random.default_rng(0).integers(len(drafted), size=(resamples, len(drafted)))
    emitted, steps = drafted[draws].sum(axis=1).T
    low, high = np.percentile(emitted / steps, [2.5, 97.5])
    return float(low), float(high)


def tokens_per_step(count: AcceptanceCount) -> float | None:
    """Tokens per target step: plain steps emit one token each."""
    steps = count.steps + count.plain_steps
    return (count.emitted + count.plain_steps) / steps if steps else None


def served_only_by(record: RequestRecord, version: int) -> bool:
    """Was this version live at admission, and did no other take a step of the request?"""
    if record.admitted_version != version or record.versions is None:
        return False
    return all(c.version == version for c in record.versions if c.steps or c.plain_steps)


def summarize(records: Sequence[RequestRecord]) -> LoadSummary:
    good = served(records)
    total = acceptance(records)
    seconds = max(r.ended for r in records) - min(r.started for r in records) if records else 0.0
    stalls = (longest_stall(r.chunk_times) for r in good)
    return LoadSummary(
        requests=len(records),
        failed=len(records) - len(good),
        restarted=sum(r.restarted for r in records),
        output_tokens=sum(r.output_tokens or 0 for r in good),
        seconds=seconds,
        tokens_per_second=tokens_per_second(records),
        first_token_s=spread(r.first_token - r.started for r in good if r.first_token is not None),
        gap_s=spread(gap for r in good for gap in gaps(r.chunk_times)),
        stall_s=spread(stall for stall in stalls if stall is not None),
        acceptance=list(acceptance_by_version(records).values()),
        acceptance_length=total.length,
        tokens_per_step=tokens_per_step(total),
    )
