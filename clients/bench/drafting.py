"""When a server's drafting has followed a change of load: from its counters of steps and drafts.

A server reports these counters about once a second, so a change is placed between two reports and no
closer. Steps are those of one request: a step of the engine on 32 requests counts as 32. Pure functions.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

SETTLED_SHARE = 0.5
"""The level of a phase is read from this share of its steps, the last ones."""

REACHED = 0.75
"""Share of the way to the new level that counts as there. Probes, and requests that have fewer drafts
verified than the others, move single intervals by less than the rest of the way."""

LEAST_CHANGE = 0.3
"""Drafts per step; levels closer together than that are the same one, and nothing is looked for."""


class Mark(msgspec.Struct, frozen=True):
    """What had been counted at one report, since the phase began."""

    steps: int
    """Decode steps, with and without drafts."""
    drafts: int
    """Drafts verified in them."""


class Interval(msgspec.Struct, frozen=True):
    """Between two reports: its ends, in steps since the phase began."""

    begin: int
    end: int
    drafts_per_step: float


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """From the level of the phase before to this phase's own, both in drafts per step."""

    old: float
    new: float
    changed: bool
    """Whether the two levels differ enough for a change to be looked for."""
    earliest: int | None
    latest: int | None
    """The new level was reached after more than ``earliest`` steps and at most ``latest``; what lies
    between is the resolution. None if it was not reached, or nothing changed."""


def mark_of(status: dict[str, Any]) -> Mark:
    """The counters of the live version, from ``GET /v1/paceline/status``."""
    live = status["acceptance"]["live"]
    if live is None:
        return Mark(0, 0)
    return Mark(live["steps"] + live["plain_steps"], sum(live["drafted"]))


def intervals(marks: Sequence[Mark]) -> list[Interval]:
    """Readings of one report are one; ``marks`` begins with the reading before the phase."""
    first = marks[0]
    return [
        Interval(
            before.steps - first.steps,
            after.steps - first.steps,
            (after.drafts - before.drafts) / (after.steps - before.steps),
        )
        for before, after in pairwise(marks)
        if after.steps > before.steps
    ]


def level(parts: Sequence[Interval]) -> float:
    """Drafts per step once settled: the median interval of the last ``SETTLED_SHARE`` of the steps."""
    settled = (1 - SETTLED_SHARE) * parts[-1].end
    return statistics.median(part.drafts_per_step for part in parts if part.end > settled)


def change_of(before: Sequence[Interval], phase: Sequence[Interval]) -> Change | None:
    """None when either phase has no interval.

    The level is reached in the first interval that is there and whose next one, if any, is too.
    """
    if not before or not phase:
        return None
    old, new = level(before), level(phase)
    earliest = latest = None
    changed = abs(new - old) >= LEAST_CHANGE
    if changed:
        there = [(part.drafts_per_step - old) / (new - old) >= REACHED for part in phase]
        for part, now, then in zip(phase, there, [*there[1:], True], strict=True):
            if now and then:
                earliest, latest = part.begin, part.end
                break
    return Change(old=old, new=new, changed=changed, earliest=earliest, latest=latest)
