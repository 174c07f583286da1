"""What was measured: one sample a block and mode, readings of the online server. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from clients.bench.plan import Block
from clients.load import RequestRecord
from clients.summary import served, spread, tokens_per_step
from rlcore.records.acceptance import AcceptanceCount


class Sample(msgspec.Struct, kw_only=True):
    """One mode on one block. Times are seconds since the first request of the run."""

    block: int
    phase: str
    measured: bool
    """In the window at the end of its phase; quoted figures come from these samples."""
    mode: str
    concurrency: int
    started: float
    ended: float
    requests: int
    failed: int
    output_tokens: int
    seconds: float
    """From the first request's start to the last one's end."""
    request_seconds: float
    """Sum of what each request took; with tokens it makes the speed of one stream."""
    first_token_p50_s: float | None
    steps: int
    """Decode steps (of one request) in which something was drafted."""
    emitted: int
    """Tokens of those steps, bonus tokens included."""
    plain_steps: int
    """Decode steps without a draft."""
    drafted: int | None
    """Drafts verified in all steps; None where plain vLLM drafted: its count of them is not read."""
    lead_tokens: int
    """Tokens that online, or else the last mode, had served when the sample ended."""
    others_cpu_share: float
    """Processor time of the servers that were not measured, in cores; a learner's included."""

    @property
    def acceptance_length(self) -> float | None:
        return self.emitted / self.steps if self.steps else None

    @property
    def tokens_per_step(self) -> float | None:
        return tokens_per_step(AcceptanceCount(-1, self.steps, self.plain_steps, self.emitted))

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


class Reading(msgspec.Struct, kw_only=True):
    """``/v1/paceline/status`` of the online server at one moment."""

    time: float
    tokens: int
    """Served by it so far, in requests that had ended."""
    requests: int
    live: int | None = None
    rollbacks: int | None = None
    """None where the server counts none."""
    learner: dict[str, Any] = {}
    traces: dict[str, Any] = {}
    error: str | None = None


class Change(msgspec.Struct, frozen=True):
    """Another draft version is live, seen at this reading. ``rollback``: by the server's own doing."""

    time: float
    tokens: int
    requests: int
    version: int
    rollback: bool


def make_sample(
    block: Block,
    mode: str,
    records: Sequence[RequestRecord],
    count: AcceptanceCount,
    *,
    lead_tokens: int,
    others_cpu_share: float,
) -> Sample:
    """``count`` is what the mode's server says of its drafts in this block."""
    good = served(records)
    started, ended = min(r.started for r in records), max(r.ended for r in records)
    first = spread(r.first_token - r.started for r in good if r.first_token is not None)
    return Sample(
        block=block.number,
        phase=block.phase,
        measured=block.measured,
        mode=mode,
        concurrency=block.concurrency,
        started=started,
        ended=ended,
        requests=len(records),
        failed=len(records) - len(good),
        output_tokens=sum(r.output_tokens or 0 for r in good),
        seconds=ended - started,
        request_seconds=sum(r.ended - r.started for r in good),
        first_token_p50_s=None if first is None else first.p50,
        steps=count.steps,
        emitted=count.emitted,
        plain_steps=count.plain_steps,
        drafted=None if count.steps and not count.drafted else sum(count.drafted),
        lead_tokens=lead_tokens,
        others_cpu_share=others_cpu_share,
    )


def read_status(body: dict[str, Any], time: float, tokens: int, requests: int) -> Reading:
    """Raises KeyError when it is no status."""
    rollbacks = body.get("rollbacks")
    return Reading(
        time=time,
        tokens=tokens,
        requests=requests,
        live=body["draft"]["live"],
        rollbacks=None if rollbacks is None else rollbacks["count"],
        learner=body["learner"],
        traces=body["traces"],
    )


def changes_of(readings: Sequence[Reading]) -> list[Change]:
    """A change is seen at the first reading after it."""
    changes: list[Change] = []
    before: Reading | None = None
    for reading in readings:
        if reading.live is None:
            continue
        if before is not None and reading.live != before.live:
            rollback = (reading.rollbacks or 0) > (before.rollbacks or 0)
            changes.append(
                Change(reading.time, reading.tokens, reading.requests, reading.live, rollback)
            )
        before = reading
    return changes
