"""What happens at the server, second by second: kept for a while, and told to whoever listens."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import msgspec

from rlcore.feed import Change, History, LearnerSample, LearnerState, Sample, TraceSample
from rlcore.log import get_logger
from server.history import Change as DraftChange
from server.reading import Facts, Reading, all_versions, make_sample
from server.status import ServerState

log = get_logger("server")

INTERVAL_S = 1.0
WINDOW_S = 10.0
"""Rates and acceptances are over so many seconds: some hundred steps of a small server."""

MINUTE_S = 60.0
KEPT_SECONDS = 3600
KEPT_MINUTES = 24 * 60
KEPT_CHANGES = 1000

MOST_SUBSCRIBERS = 32
QUEUED_EVENTS = 60
"""A subscriber that is a minute behind is not waited for."""


class TooManySubscribers(RuntimeError):
    """No further feed is opened."""


class Subscriber:
    """Events for one client, encoded once for all of them."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUED_EVENTS)
        self.dropped = False

    def offer(self, event: bytes) -> None:
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            self.end()
            self.dropped = True

    def end(self) -> None:
        """What it has not taken yet is lost."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def events(self, patience_s: float) -> AsyncIterator[bytes]:
        """Until ``end``; a comment line, as a heartbeat, after so many seconds without an event."""
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    event = await self._queue.get()
            except TimeoutError:
                event = HEARTBEAT
            if event is None:
                return
            yield event


HEARTBEAT = b": still here\n\n"


def event(name: str, value: History | Sample | Change) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


class Feed:
    """Reads the server's state every second while ``run`` runs."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._readings: deque[Reading] = deque(maxlen=round(MINUTE_S / INTERVAL_S) + 1)
        self._seconds: deque[Sample] = deque(maxlen=KEPT_SECONDS)
        self._minutes: deque[Sample] = deque(maxlen=KEPT_MINUTES)
        self._next_minute = time.monotonic() + MINUTE_S
        self._lengths: dict[tuple[str, str], float] = {}
        self._subscribers: set[Subscriber] = set()
        self._drifts: int | None = None
        changes = state.drafts.history.changes
        self._changes = deque(map(_draft_change, changes), KEPT_CHANGES)
        self._told = changes[-1] if changes else None
        self.last: Sample | None = None
        self.dropped = 0
        """Subscribers that were too slow."""
        state.drafts.on_change.append(self._draft_changed)
        state.policy.on_change.append(self._policy_changed)

    @property
    def subscribers(self) -> int:
        return len(self._subscribers)

    async def run(self) -> None:
        """A sample every second; cancel to stop, which ends every subscriber's feed."""
        try:
            while True:
                self.tick(time.monotonic(), time.time())
                await asyncio.sleep(INTERVAL_S)
        finally:
            for subscriber in list(self._subscribers):
                subscriber.end()

    @contextmanager
    def subscribed(self) -> Iterator[Subscriber]:
        """Raises TooManySubscribers."""
        if len(self._subscribers) >= MOST_SUBSCRIBERS:
            raise TooManySubscribers(f"{MOST_SUBSCRIBERS} feeds are open already")
        subscriber = Subscriber()
        self._subscribers.add(subscriber)
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)

    def history(self, seconds: float) -> History:
        """The last so many seconds, for a new subscriber."""
        since = time.time() - seconds
        oldest = self._seconds[0].time if self._seconds else float("inf")
        samples = [s for s in self._minutes if since <= s.time < oldest]
        samples += [s for s in self._seconds if since <= s.time]
        return History(
            samples=tuple(samples),
            changes=tuple(change for change in self._changes if since <= change.time),
            window_s=WINDOW_S,
            target=self._state.target_id,
            method=self._state.drafts.method,
        )

    def tick(self, now: float, wall: float) -> None:
        """Take a reading at ``now`` (monotonic), ``wall`` (seconds since the epoch); tell of it."""
        self._look_for_drift(wall)
        reading = self._read(now)
        if self._readings and self._readings[-1].engine != reading.engine:
            self._readings.clear()  # another engine's totals
        self._readings.append(reading)
        facts = self._facts(wall)
        sample = make_sample(self._back(now - WINDOW_S), reading, facts, self._lengths)
        self.last = sample
        self._seconds.append(_slim(sample))
        if now >= self._next_minute:
            self._next_minute = now + MINUTE_S
            minute = make_sample(self._back(now - MINUTE_S), reading, facts, dict(self._lengths))
            self._minutes.append(_slim(minute))
        self._tell(event("sample", sample))

    def _back(self, at: float) -> Reading:
        """The newest reading that is not after ``at``; the oldest one when all are."""
        for reading in reversed(self._readings):
            if reading.at <= at:
                return reading
        return self._readings[0]

    def _read(self, now: float) -> Reading:
        state, link = self._state, self._state.engine_link
        report, speculation = link.report, link.speculation
        counts = [] if report is None else report.acceptance
        return Reading(
            at=now,
            served=state.served(),
            acceptance=all_versions(counts, state.speculative_tokens),
            shares={} if report is None else {share.name: share for share in report.tenants},
            adapters={} if report is None else {a.adapter: a.total for a in report.adapters},
            counted_at=link.reported_at,
            speculation=speculation,
            timed_at=link.speculation_at,
            engine=(
                "" if report is None else report.worker,
                "" if speculation is None else speculation.scheduler,
            ),
        )

    def _facts(self, wall: float) -> Facts:
        state, learner = self._state, self._state.learner_link
        capture = state.capture()
        report = None if learner is None else learner.report
        return Facts(
            time=wall,
            most_drafts=state.speculative_tokens,
            draft_version=state.drafts.live,
            draft_collapsed=state.collapse.active,
            policy_version=state.policy.live,
            learner=learner_sample(state),
            traces=TraceSample(
                captured=capture.captured,
                sent=capture.sent,
                dropped=capture.dropped,
                received=0 if report is None else report.received,
                refused={} if report is None else report.rejected,
            ),
        )

    def _look_for_drift(self, wall: float) -> None:
        link = self._state.learner_link
        if link is None or link.report is None:
            return
        drifts = link.report.drifts
        if self._drifts is not None and drifts > self._drifts:
            self._changed(Change(time=wall, kind="drift", reason=link.report.pace))
        self._drifts = drifts

    def _draft_changed(self) -> None:
        """Swaps that follow at once upon another are heard of only when both are done."""
        fresh = []
        for change in reversed(self._state.drafts.history.changes):
            if change is self._told:
                break
            fresh.append(change)
        for change in reversed(fresh):
            self._told = change
            self._changed(_draft_change(change))

    def _policy_changed(self) -> None:
        swaps = self._state.policy.swaps
        if not swaps:
            return
        before = swaps[-2].version if len(swaps) > 1 else None
        self._changed(
            Change(time=swaps[-1].at, kind="policy", version=swaps[-1].version, before=before)
        )

    def _changed(self, change: Change) -> None:
        self._changes.append(change)
        self._tell(event("change", change))

    def _tell(self, encoded: bytes) -> None:
        for subscriber in list(self._subscribers):
            subscriber.offer(encoded)
            if subscriber.dropped:
                self._subscribers.discard(subscriber)
                self.dropped += 1
                log.warning("a feed was read too slowly and is closed", open=self.subscribers)


def learner_sample(state: ServerState) -> LearnerSample:
    link = state.learner_link
    if link is None:
        return LearnerSample(state="off")
    report = link.report
    if report is None:
        return LearnerSample(state="away")
    now: LearnerState = "away"
    if link.alive:
        now = "training" if report.computing else "resting"
    return LearnerSample(
        state=now,
        phase=report.phase,
        trained_positions=report.tokens_seen,
        trained_per_s=report.tokens_per_second if now == "training" else 0.0,
        updates=report.updates,
        loss=report.loss,
        candidate_length=report.heldout_length,
        live_length=report.live_length,
        replay_tokens=report.replay_tokens,
        heldout_tokens=report.heldout_tokens,
        published=report.published,
        judged=report.judged,
    )


def _draft_change(change: DraftChange) -> Change:
    return Change(
        time=change.time,
        kind="rollback" if change.cause == "rolled_back" else "swap",
        version=change.version,
        before=change.before,
        cause=change.cause,
        reason=change.reason,
    )


def _slim(sample: Sample) -> Sample:
    """As it is kept."""
    return msgspec.structs.replace(sample, tenants=(), adapters=())
