"""A sample of the feed: the difference between two readings of the server's totals. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlcore.engine.shares import ServedCount
from rlcore.feed import DraftLength, LearnerSample, Sample, ShareSample, TraceSample
from rlcore.records.acceptance import AcceptanceCount
from rlcore.records.engine_link import OTHER_SHARES, ShareCount, SpeculationReport

COMPARED = 0.5
"""Share of the computing time that must be comparable for a speed-up to be told."""

DIGITS = 4
"""Behind the point: a history has thousands of samples."""

NAMED_SHARES = 20
"""Tenants, and adapters, that a sample names."""


@dataclass(frozen=True)
class Reading:
    """Totals since the engine started, as they were at one moment. Clocks are monotonic seconds."""

    at: float
    served: dict[str, ServedCount] = field(default_factory=dict)
    """By tenant."""
    acceptance: AcceptanceCount | None = None
    """Of all versions together."""
    shares: dict[str, ShareCount] = field(default_factory=dict)
    """By tenant."""
    adapters: dict[str, AcceptanceCount] = field(default_factory=dict)
    """By adapter, of all versions together."""
    counted_at: float = 0.0
    """When the engine reported ``acceptance``, ``shares`` and ``adapters``."""
    speculation: SpeculationReport | None = None
    timed_at: float = 0.0
    """When the scheduler reported ``speculation``."""
    engine: tuple[str, str] = ("", "")
    """Whose totals they are: the worker's name and the scheduler's."""


@dataclass(frozen=True)
class Facts:
    """What a sample tells as it is."""

    time: float
    """Seconds since the epoch."""
    most_drafts: int
    draft_version: int
    draft_collapsed: bool
    policy_version: int
    learner: LearnerSample
    traces: TraceSample


def all_versions(counts: list[AcceptanceCount], most: int) -> AcceptanceCount:
    """The sum over draft versions, ``most`` positions long."""
    total = AcceptanceCount(-1, drafted=[0] * most, accepted=[0] * most)
    for count in counts:
        total.steps += count.steps
        total.plain_steps += count.plain_steps
        total.emitted += count.emitted
        for i, (drafted, accepted) in enumerate(
            zip(count.drafted[:most], count.accepted[:most], strict=True)
        ):
            total.drafted[i] += drafted
            total.accepted[i] += accepted
    return total


def make_sample(
    before: Reading, now: Reading, facts: Facts, lengths: dict[tuple[str, str], float]
) -> Sample:
    """The state at ``now``, its rates since ``before``.

    ``lengths`` holds the last acceptance length of each ("tenant" or "adapter", name): it is brought up to
    date, and told where the window has none.
    """
    elapsed = now.at - before.at
    tokens_per_s = _rate(_tokens(now) - _tokens(before), elapsed)
    gain = _gain(before, now)
    most = facts.most_drafts
    old = before.acceptance or all_versions([], most)
    new = now.acceptance or old
    steps, counted = new.steps - old.steps, now.counted_at - before.counted_at
    speculation = now.speculation
    plain = None if gain.speedup is None else _short(tokens_per_s / gain.speedup)
    return Sample(
        time=round(facts.time, 3),
        tokens_per_s=tokens_per_s,
        plain_tokens_per_s=plain,
        speedup=_short(gain.speedup),
        busy=_short(gain.busy),
        drafts=DraftLength(
            mean=_short(gain.mean_drafts),
            now=None if speculation is None else speculation.drafts_now,
            most=most,
        ),
        running=0 if speculation is None else speculation.running,
        waiting=0 if speculation is None else speculation.waiting,
        acceptance_length=_short((new.emitted - old.emitted) / steps) if steps > 0 else None,
        acceptance=tuple(
            _short((new.accepted[i] - old.accepted[i]) / (new.drafted[i] - old.drafted[i]))
            if new.drafted[i] > old.drafted[i]
            else None
            for i in range(most)
        ),
        drafted_steps_per_s=_rate(steps, counted),
        plain_steps_per_s=_rate(new.plain_steps - old.plain_steps, counted),
        draft_version=facts.draft_version,
        draft_collapsed=facts.draft_collapsed,
        policy_version=facts.policy_version,
        learner=facts.learner,
        traces=facts.traces,
        tenants=_tenants(before, now, lengths),
        adapters=_adapters(before, now, lengths),
    )


@dataclass(frozen=True)
class _Gain:
    speedup: float | None = None
    busy: float | None = None
    mean_drafts: float | None = None


def _gain(before: Reading, now: Reading) -> _Gain:
    new, old = now.speculation, before.speculation
    if new is None or old is None or now.timed_at <= before.timed_at:
        return _Gain()
    compared = new.seconds - old.seconds
    computing = compared + new.unknown_seconds - old.unknown_seconds
    plain = new.plain_seconds - old.plain_seconds
    steps = new.decode_steps - old.decode_steps
    known = steps > 0 and plain > 0 and compared > COMPARED * computing
    return _Gain(
        speedup=plain / compared if known else None,
        busy=min(1.0, computing / (now.timed_at - before.timed_at)),
        mean_drafts=(new.drafts - old.drafts) / steps if steps > 0 else None,
    )


def _tenants(
    before: Reading, now: Reading, lengths: dict[tuple[str, str], float]
) -> tuple[ShareSample, ...]:
    elapsed = now.at - before.at
    found = []
    for name in now.served.keys() | now.shares.keys():
        served, was = now.served.get(name, ServedCount()), before.served.get(name, ServedCount())
        share, past = (
            now.shares.get(name, ShareCount(name)),
            before.shares.get(name, ShareCount(name)),
        )
        if share.steps > past.steps:
            length = (share.emitted - past.emitted) / (share.steps - past.steps)
            lengths["tenant", name] = round(length, DIGITS)
        found.append(
            ShareSample(
                name=name,
                tokens_per_s=_rate(served.tokens - was.tokens, elapsed),
                tokens=served.tokens,
                running=served.running,
                acceptance_length=lengths.get(("tenant", name)),
                traces=share.traces,
            )
        )
    return largest(found)


def _adapters(
    before: Reading, now: Reading, lengths: dict[tuple[str, str], float]
) -> tuple[ShareSample, ...]:
    elapsed = now.counted_at - before.counted_at
    found = []
    for name, count in now.adapters.items():
        past = before.adapters.get(name, AcceptanceCount(-1))
        if count.steps > past.steps:
            length = (count.emitted - past.emitted) / (count.steps - past.steps)
            lengths["adapter", name] = round(length, DIGITS)
        tokens = count.emitted + count.plain_steps
        found.append(
            ShareSample(
                name=name,
                tokens_per_s=_rate(tokens - past.emitted - past.plain_steps, elapsed),
                tokens=tokens,
                running=None,
                acceptance_length=lengths.get(("adapter", name)),
                traces=None,
            )
        )
    return largest(found)


def largest(shares: list[ShareSample]) -> tuple[ShareSample, ...]:
    """The NAMED_SHARES with the most tokens; the others summed, without a length."""
    shares = sorted(
        shares, key=lambda share: (share.name == OTHER_SHARES, -share.tokens, share.name)
    )
    named, rest = shares[:NAMED_SHARES], shares[NAMED_SHARES:]
    if rest:
        named.append(
            ShareSample(
                name=OTHER_SHARES,
                tokens_per_s=sum(share.tokens_per_s for share in rest),
                tokens=sum(share.tokens for share in rest),
                running=_sum([share.running for share in rest]),
                acceptance_length=rest[0].acceptance_length if len(rest) == 1 else None,
                traces=_sum([share.traces for share in rest]),
            )
        )
    return tuple(named)


def _tokens(reading: Reading) -> int:
    return sum(count.tokens for count in reading.served.values())


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _rate(count: float, seconds: float) -> float:
    return round(max(0.0, count) / seconds, DIGITS) if seconds > 0 else 0.0


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)
