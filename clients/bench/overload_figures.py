"""Figures of the overload benchmark. Pure: no clock, no I/O."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

OTHERS = 5
"""Answers that should not have been, kept in full."""


class Event(msgspec.Struct, kw_only=True):
    """One request of the load; times are seconds since the epoch. ``status`` 0: no answer."""

    started: float
    ended: float
    first: float | None = None
    """Its first token."""
    status: int
    complete: bool = False
    """A stream that came to its own end."""
    retry_after: str | None = None
    body: str = ""
    """Of an answer that is no stream, shortened."""


class Reading(msgspec.Struct, kw_only=True):
    """Of the server, while it was under load. ``at``: seconds since the load began."""

    at: float
    parts: dict[str, int]
    """Bytes of its processes (``memory_by_part``)."""
    health: int | None
    """Status of GET /health; None for no answer."""
    health_s: float

    @property
    def memory(self) -> int:
        """Bytes of them all."""
        return sum(self.parts.values())


class Quantiles(msgspec.Struct, frozen=True):
    """Seconds."""

    count: int
    p50: float
    p95: float
    max: float


class Memory(msgspec.Struct, frozen=True):
    """Bytes. ``late_growth``: the peak of the load's last quarter less that of its second."""

    start: int
    peak: int
    end: int
    late_growth: int
    late_growth_by_part: dict[str, int]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    offered_per_s: float
    offered_over_capacity: float
    busiest_second: int
    """Requests that were offered in it: many times the mean, and the load came in waves."""
    served_per_s: float
    """Complete answers that ended while the load lasted, over its length."""
    served_over_capacity: float
    statuses: dict[str, int]
    served: int
    refused_rightly: int
    """429 with a Retry-After of whole seconds above 0 and an error as OpenAI's clients read it."""
    refused_wrongly: int
    broken: int
    """Streams that began and did not come to their end."""
    others: list[Event]
    """Some of the answers that are neither complete nor 429."""
    first_token_s: Quantiles | None
    latency_s: Quantiles | None
    refusal_s: Quantiles | None
    retry_after_s: Quantiles | None
    memory: Memory | None
    health_failures: int
    health_slowest_s: float


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """None for no values."""
    if not values:
        return None
    p50, p95 = (float(np.percentile(values, q)) for q in (50, 95))
    return Quantiles(len(values), p50, p95, float(max(values)))


def refusal_is_right(event: Event) -> bool:
    if event.retry_after is None or not event.retry_after.isdigit() or int(event.retry_after) < 1:
        return False
    try:
        error = json.loads(event.body)["error"]
        return bool(error["message"] and error["type"])
    except (ValueError, KeyError, TypeError):
        return False


def memory_of(readings: Sequence[Reading], seconds: float) -> Memory | None:
    """None without readings. A growth needs readings in both quarters; without them it is 0."""
    if not readings:
        return None
    middle = [r for r in readings if seconds / 4 <= r.at < seconds / 2]
    late = [r for r in readings if 3 * seconds / 4 <= r.at < seconds]
    second, last = [r.memory for r in middle], [r.memory for r in late]
    parts = sorted({part for r in late for part in r.parts}) if middle else []
    by_part = {
        part: max(r.parts.get(part, 0) for r in late) - max(r.parts.get(part, 0) for r in middle)
        for part in parts
    }
    growth = max(last) - max(second) if second and last else 0
    every = [r.memory for r in readings]
    return Memory(every[0], max(every), every[-1], growth, by_part)


def figures(
    events: Sequence[Event],
    readings: Sequence[Reading],
    begun: float,
    seconds: float,
    capacity: float,
) -> Figures:
    """``capacity`` in requests a second; the load lasted from ``begun`` for so many seconds."""
    end = begun + seconds
    served = [e for e in events if e.status == 200 and e.complete]
    refused = [e for e in events if e.status == 429]
    right = [e for e in refused if refusal_is_right(e)]
    others = [e for e in events if e.status != 429 and not (e.status == 200 and e.complete)]
    offered = sum(e.started < end for e in events) / seconds
    rate = sum(e.ended < end for e in served) / seconds
    by_second = Counter(int(e.started - begun) for e in events)
    statuses: Counter[str] = Counter(str(e.status or "no answer") for e in events)
    return Figures(
        offered_per_s=offered,
        offered_over_capacity=offered / capacity,
        busiest_second=max(by_second.values(), default=0),
        served_per_s=rate,
        served_over_capacity=rate / capacity,
        statuses=dict(sorted(statuses.items())),
        served=len(served),
        refused_rightly=len(right),
        refused_wrongly=len(refused) - len(right),
        broken=sum(e.status == 200 for e in others),
        others=others[:OTHERS],
        first_token_s=quantiles([e.first - e.started for e in served if e.first is not None]),
        latency_s=quantiles([e.ended - e.started for e in served]),
        refusal_s=quantiles([e.ended - e.started for e in refused]),
        retry_after_s=quantiles([float(e.retry_after or 0) for e in right]),
        memory=memory_of(readings, seconds),
        health_failures=sum(r.health != 200 for r in readings),
        health_slowest_s=max((r.health_s for r in readings), default=0.0),
    )
