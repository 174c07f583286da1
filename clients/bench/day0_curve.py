"""What a day-0 run's records and status readings say. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from clients.load import RequestRecord as Record
from clients.summary import acceptance, served, served_only_by, token_rate, tokens_per_step

RATE_WINDOW_S = 30.0
"""Tokens/s at a moment is over so many seconds before it."""


class Poll(msgspec.Struct):
    """One reading of the server's status; times are seconds since it began to serve."""

    time: float
    live: int | None = None
    learner: dict[str, Any] = {}
    traces: dict[str, Any] = {}
    swaps: dict[str, Any] = {}
    error: str | None = None


class Point(msgspec.Struct):
    """One moment of the curve; the lengths are over the last requests that had ended by then."""

    time: float
    live: int | None
    requests: int
    tokens_served: int
    learner_tokens: int | None
    acceptance_length: float | None
    tokens_per_step: float | None
    tokens_per_second: float


class Change(msgspec.Struct):
    """The live version changed between the previous poll and this one."""

    time: float
    version: int


class Final(msgspec.Struct):
    """The newest version's acceptance, on requests that no other version had a part in."""

    version: int
    requests: int
    steps: int
    acceptance_length: float | None
    rates: list[float]
    tokens_per_step: float | None
    all_requests: int
    """Requests served by this version alone; the last of them make the figures above."""
    all_acceptance_length: float | None


def version_changes(polls: Sequence[Poll]) -> list[Change]:
    changes: list[Change] = []
    live: int | None = None
    for poll in polls:
        if poll.live is None:
            continue
        if live is not None and poll.live != live:
            changes.append(Change(poll.time, poll.live))
        live = poll.live
    return changes


def curve(records: Sequence[Record], polls: Sequence[Poll], window: int) -> list[Point]:
    """A point a poll; ``records`` in the order in which they ended."""
    points = []
    for poll in polls:
        done = [r for r in served(records) if r.ended <= poll.time]
        count = acceptance(done[-window:])
        points.append(
            Point(
                time=poll.time,
                live=poll.live,
                requests=len(done),
                tokens_served=sum(r.output_tokens or 0 for r in done),
                learner_tokens=poll.learner.get("tokens_seen"),
                acceptance_length=count.length,
                tokens_per_step=tokens_per_step(count),
                tokens_per_second=token_rate(
                    records, max(0.0, poll.time - RATE_WINDOW_S), poll.time
                ),
            )
        )
    return points


def final_window(records: Sequence[Record], changes: Sequence[Change], window: int) -> Final | None:
    """None when nothing was ever promoted."""
    if not changes:
        return None
    last = changes[-1]
    alone = [
        r for r in served(records) if r.started >= last.time and served_only_by(r, last.version)
    ]
    count, every = acceptance(alone[-window:]), acceptance(alone)
    return Final(
        version=last.version,
        requests=len(alone[-window:]),
        steps=count.steps,
        acceptance_length=count.length,
        rates=count.rates,
        tokens_per_step=tokens_per_step(count),
        all_requests=len(alone),
        all_acceptance_length=every.length,
    )
