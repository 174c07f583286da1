"""The events of ``GET /v1/paceline/feed``, as a server sends them and a client may decode them.

``event: history`` carries a History, ``event: sample`` a Sample, ``event: change`` a Change. A figure
that is not known is null. All rates and acceptances are of the last ``window_s`` seconds, not since the
start; counters are totals.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ChangeKind = Literal["swap", "rollback", "drift", "policy"]

LearnerState = Literal["off", "away", "resting", "training"]
"""No learner was asked for; it does not report; it is there but waits; it trains or judges."""


class DraftLength(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens are drafted in a step (K)."""

    mean: float | None
    """Over the window's decode steps."""
    now: int | None
    """In the newest step."""
    most: int
    """The largest that may be chosen: ``--speculative-tokens``."""


class LearnerSample(msgspec.Struct, frozen=True, kw_only=True):
    """What the learner last reported; totals survive its restart."""

    state: LearnerState
    phase: str = ""
    trained_positions: int = 0
    """Repeats counted."""
    trained_per_s: float = 0.0
    updates: int = 0
    loss: float | None = None
    candidate_length: float | None = None
    """Estimated acceptance length of the newest candidate on held-out traffic."""
    live_length: float | None = None
    """The same of the live version, on the same traffic."""
    replay_tokens: int = 0
    heldout_tokens: int = 0
    published: int = 0
    judged: int = 0


class TraceSample(msgspec.Struct, frozen=True, kw_only=True):
    """Spans, in total since the engine (``captured``, ``sent``, ``dropped``) or the learner started."""

    captured: int = 0
    sent: int = 0
    dropped: dict[str, int] = {}
    """By reason: not sent."""
    received: int = 0
    refused: dict[str, int] = {}
    """By reason: messages that the learner would not take."""


class ShareSample(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant, or one adapter of the target, has of it all."""

    name: str
    tokens_per_s: float
    tokens: int
    """Served since the start."""
    running: int | None
    """Requests that have been taken and not ended; not counted by adapter."""
    acceptance_length: float | None
    """In the window, the last known when it holds nothing. A tenant's counts when its requests end."""
    traces: int | None
    """Spans sent to the learner since the start; not counted by adapter."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the server at ``time``."""

    time: float
    """Seconds since the epoch."""
    tokens_per_s: float
    """Output tokens served, by wall clock."""
    plain_tokens_per_s: float | None
    """Estimate: ``tokens_per_s`` had nothing been drafted; null until a plain step was measured."""
    speedup: float | None
    """``tokens_per_s`` / ``plain_tokens_per_s``."""
    busy: float | None
    """Share of the window in which the engine computed."""
    drafts: DraftLength
    running: int
    waiting: int
    acceptance_length: float | None
    """Tokens emitted per step in which something was drafted, bonus token included."""
    acceptance: tuple[float | None, ...]
    """By position: accepted / drafted there. A draft counts only with all before it."""
    drafted_steps_per_s: float
    """Decode steps, counted for each request, in which drafts were verified."""
    plain_steps_per_s: float
    """Those in which none were."""
    draft_version: int
    draft_collapsed: bool
    """Nothing that the live version drafts is accepted."""
    policy_version: int
    learner: LearnerSample
    traces: TraceSample
    tenants: tuple[ShareSample, ...] = ()
    """Empty in a History. The largest by tokens; the others together are ``(other)``."""
    adapters: tuple[ShareSample, ...] = ()


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a chart marks."""

    time: float
    kind: ChangeKind
    version: int | None = None
    """Live from now on: a draft version, or of the policy for ``policy``."""
    before: int | None = None
    cause: str = ""
    """Of a swap: ``promoted`` by the learner's gate, ``chosen`` by an operator."""
    reason: str = ""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The first event of every feed."""

    samples: tuple[Sample, ...]
    """Oldest first: one a minute for what is older than an hour, then one a second."""
    changes: tuple[Change, ...]
    """Oldest first."""
    window_s: float
    target: str
    method: str
