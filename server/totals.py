"""An engine that is started again counts from nothing; what the ones before it had counted is added.

So totals never go down while the server runs, and a rate over them is never negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from rlcore.engine.shares import ServedCount
from rlcore.records.acceptance import AcceptanceCount, AdapterAcceptance
from rlcore.records.engine_link import EngineReport, ShareCount, SpeculationReport

T = TypeVar("T")

Served = Callable[[], dict[str, ServedCount]]
"""What the present engine's clients were given, by tenant."""


class ServedTotals:
    """The same over all engines since the server started."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        """Tokens by tenant, of engines that died."""
        self._now: Served = dict

    def __call__(self) -> dict[str, ServedCount]:
        found = {name: ServedCount(tokens) for name, tokens in self._before.items()}
        for name, count in self._now().items():
            tokens = self._before.get(name, 0) + count.tokens
            found[name] = ServedCount(tokens, count.running)
        return found

    def connect(self, now: Served) -> None:
        """There is an engine."""
        self._now = now

    def disconnect(self) -> None:
        """It has died: what it gave counts on, and nothing of it runs."""
        self._before = {name: count.tokens for name, count in self().items()}
        self._now = dict


def added(before: EngineReport, now: EngineReport) -> EngineReport:
    """The newer report with the totals of both."""
    return msgspec.structs.replace(
        now,
        acceptance=_acceptance(before.acceptance, now.acceptance),
        capture=before.capture.plus(now.capture),
        adapters=_joined(before.adapters, now.adapters, lambda a: a.adapter, _adapters),
        tenants=_joined(before.tenants, now.tenants, lambda t: t.name, _shares),
    )


def added_speculation(before: SpeculationReport, now: SpeculationReport) -> SpeculationReport:
    """The newer report with the totals of both."""
    return msgspec.structs.replace(
        now,
        decode_steps=before.decode_steps + now.decode_steps,
        drafts=before.drafts + now.drafts,
        tokens=before.tokens + now.tokens,
        seconds=before.seconds + now.seconds,
        plain_seconds=before.plain_seconds + now.plain_seconds,
        unknown_seconds=before.unknown_seconds + now.unknown_seconds,
    )


def _acceptance(
    before: Iterable[AcceptanceCount], now: Iterable[AcceptanceCount]
) -> list[AcceptanceCount]:
    return _joined(before, now, lambda count: count.version, AcceptanceCount.plus)


def _adapters(before: AdapterAcceptance, now: AdapterAcceptance) -> AdapterAcceptance:
    return AdapterAcceptance(
        now.adapter, before.total.plus(now.total), _acceptance(before.versions, now.versions)
    )


def _shares(before: ShareCount, now: ShareCount) -> ShareCount:
    return ShareCount(
        now.name,
        before.steps + now.steps,
        before.emitted + now.emitted,
        before.traces + now.traces,
    )


def _joined(
    before: Iterable[T], now: Iterable[T], name: Callable[[T], object], add: Callable[[T, T], T]
) -> list[T]:
    """Those of one name added, the others as they are; the earlier ones first."""
    found = {name(one): one for one in before}
    for one in now:
        earlier = found.get(name(one))
        found[name(one)] = one if earlier is None else add(earlier, one)
    return list(found.values())
