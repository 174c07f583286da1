"""The learner: takes traces from servers, drives the course of learning, answers and announces.

One thread, one loop: messages, traces, an update, perhaps a judgement, perhaps a checkpoint. Every
wait is short, so a server is answered within about one update.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from learner.at_rest import AtRest
from learner.course import Course
from learner.inbox import Inbox
from learner.intake import Intake
from learner.moving_target import MovingTarget
from learner.target import Target
from rlcore.curve import CurveServer
from rlcore.log import get_logger
from rlcore.records.learner_link import (
    Announce,
    DraftFiles,
    FetchDraft,
    Hello,
    LearnerReport,
    Purge,
    PurgeCounts,
    Purged,
    TargetTensors,
    Verdict,
)
from rlcore.settings import LearnSettings
from rlcore.transport import Frame
from rlcore.weights import WeightError, WeightStore

log = get_logger("learner")

REPORT_INTERVAL = 1.0
FETCH_INTERVAL = 5.0
"""Seconds between two requests for the live version's files."""

RETREAT_INTERVAL = 5.0
"""Seconds between two orders to go back, until the server has."""

SWEEP_INTERVAL = 600.0
"""Seconds between two looks for what has been kept long enough."""

REMEMBERED_PURGES = 64
"""Answers kept for orders that come again, because the first answer was not heard."""

RETREAT_ORDERS = 5
"""Orders to go back that a server may refuse before it is left with what it has."""


class Learner:
    def __init__(
        self,
        settings: LearnSettings,
        folder: Path,
        target: Target,
        target_id: str,
        base: str,
        curve: CurveServer | None = None,
    ) -> None:
        self._settings = settings
        self._target_id = target_id
        self._folder = folder
        self._inbox = Inbox(base, curve)
        self._at_rest = AtRest(folder.parent, folder)
        self._purged: OrderedDict[str, Purged] = OrderedDict()
        self._intake = Intake(settings, folder, target)
        store = WeightStore(folder / "drafts")
        self._course = Course(settings, target, store, self._intake, watched=True)
        self._moving = MovingTarget(target, self._inbox, self._course.retarget)
        self._store = store
        self._asked: tuple[bytes, int, str] | None = None
        """(server, version, digest) of the files that are on their way."""
        self._next_fetch = self._next_report = self._next_retreat = self._next_sweep = 0.0
        self._unusable: tuple[int, str] | None = None
        """(version, digest) that came in whole and cannot be learned from."""
        self._refused_orders = 0
        self._next_checkpoint = time.monotonic() + settings.checkpoint_interval_s
        self._training = False
        self._rest = False
        """The server needs the cores."""
        self._stopping = False

    def stop(self) -> None:
        """Finish the update at hand, write a checkpoint, and return from ``run``."""
        self._stopping = True

    def run(self) -> None:
        log.info("listening", target=self._target_id, method=self._settings.method)
        try:
            while not self._stopping:
                if not self.turn():
                    self._inbox.wait(200)
        finally:
            self._checkpoint()
            self._intake.close()
            self._inbox.close()

    def turn(self) -> bool:
        """One pass of the loop; False when there was nothing to do."""
        self._take_messages()
        worked = False
        if self._course.session is not None:  # until then traces wait in the bounded socket
            now = time.monotonic()
            worked = self._intake.take(self._inbox, lambda span: self._course.saw(span, now))
            worked |= self._train(now)
        now = time.monotonic()
        self._go_back(now)
        if self._course.due(now) and not self._rest:
            self._consider(now)
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_INTERVAL
            self._expire(time.time())
        if now >= self._next_checkpoint:
            self._next_checkpoint = now + self._settings.checkpoint_interval_s
            self._checkpoint()
        if now >= self._next_report:
            self._next_report = now + REPORT_INTERVAL
            self._tell()
        return worked

    def _train(self, now: float) -> bool:
        """One update, unless the server needs the cores; it is told when that begins and ends."""
        before = self._training
        self._training = not self._rest and self._course.train(self._settings.replay_ratio, now)
        if self._training and not before:
            self._tell()
        return self._training

    # --- the live version ---

    def _take_messages(self) -> None:
        for server, message, frames in self._inbox.messages():
            if isinstance(message, Hello):
                self._greet(server, message)
            elif isinstance(message, FetchDraft):
                self._inbox.give(server, message, self._store)
            elif isinstance(message, DraftFiles):
                self._receive_live(server, message, frames)
            elif isinstance(message, Verdict):
                self._hear(message)
            elif isinstance(message, TargetTensors):
                self._moving.receive(server, message, frames)
            elif isinstance(message, Purge):
                self._inbox.tell(server, self._purge(message))
            else:
                self._inbox.reject("unexpected")

    def _greet(self, server: bytes, hello: Hello) -> None:
        settings = self._settings
        theirs = (hello.target_id, hello.method, hello.speculative_tokens)
        if theirs != (self._target_id, settings.method, settings.speculative_tokens):
            self._inbox.reject("hello_target")
            log.warning(
                "a server of another target, method or K asks for this learner",
                target=hello.target_id,
                method=hello.method,
                speculative_tokens=hello.speculative_tokens,
            )
            return
        publisher = self._course.publisher
        publisher.last_version = max(publisher.last_version, hello.last_version)
        self._inbox.accept(server)
        self._rest = hello.rest
        self._intake.limit(hello.replay_shares)
        self._course.serves(hello.live_version)
        if not self._moving.follow(server, hello, time.monotonic()):
            return
        named, live = (hello.live_version, hello.live_sha256), self._course.live
        known = live is not None and named == (live.version, live.sha256)
        if known or named == self._unusable:
            return
        if not self._set_live_from_store(*named) and time.monotonic() >= self._next_fetch:
            self._next_fetch = time.monotonic() + FETCH_INTERVAL
            self._asked = (server, hello.live_version, hello.live_sha256)
            self._inbox.tell(server, FetchDraft(hello.live_version))

    def _receive_live(self, server: bytes, message: DraftFiles, frames: Sequence[Frame]) -> None:
        version = message.version
        if self._asked is None or self._asked[:2] != (server, version):
            self._inbox.reject("unasked")
            return
        sha256 = self._asked[2]
        self._asked = None
        if message.error is not None or [len(f) for f in frames] != message.sizes:
            reason = message.error or "sizes differ"
            log.warning("the live draft could not be fetched", version=version, reason=reason)
            return
        try:
            files = dict(zip(message.names, frames, strict=True))
            self._store.receive(version, files)
        except (WeightError, ValueError) as error:
            log.warning("the live draft was refused", version=version, reason=str(error))
            return
        if self._store.holds(version, sha256) and not self._set_live(version, sha256):
            self._unusable = (version, sha256)

    def _set_live_from_store(self, version: int, sha256: str) -> bool:
        """False when the weights have to be fetched; damaged ones are removed."""
        try:
            if not self._store.holds(version, sha256):
                return False
        except WeightError as error:
            log.error("a version's manifest cannot be read", version=version, reason=str(error))
        else:
            if self._set_live(version, sha256):
                return True
        self._store.remove(version)
        return False

    def _set_live(self, version: int, sha256: str) -> bool:
        before = self._course.session
        if not self._course.went_live(version, sha256):
            return False
        if self._course.session is None:
            self._begin(version)
        elif self._course.session is not before:
            self._checkpoint()  # what a crash would bring back is not trusted any more
        return True

    def _begin(self, version: int) -> None:
        """Start training from the live version, or go on where the last checkpoint stopped."""
        facts = self._course.begin(version, self._folder / "checkpoint")
        if facts is not None:
            self._inbox.rejected = facts["rejected"]
            self._intake.load_state(facts["intake"])
        self._intake.reload(self._inbox, self._course.counted)
        log.info(
            "training begins",
            from_version=version,
            tokens_seen=self._course.tokens_seen,
            replay_tokens=self._intake.replay.training_tokens,
        )

    # --- publishing ---

    def _go_back(self, now: float) -> None:
        """Order the server back to the version before, again and again until it has."""
        retreat = self._course.retreat()
        if retreat is None or now < self._next_retreat:
            return
        self._next_retreat = now + RETREAT_INTERVAL
        log.warning(
            "the live version is worse than the one before",
            version=retreat.version,
            to=retreat.to,
            reason=retreat.reason,
        )
        self._inbox.tell_all(retreat)

    def _consider(self, now: float) -> None:
        """Judge the present weights against the live version, and announce them if they win."""
        self._tell(judging=True)
        manifest = self._course.consider(now)
        if manifest is not None:
            self._inbox.tell_all(Announce(manifest))

    def _hear(self, verdict: Verdict) -> None:
        self._course.serves(verdict.live_version)
        if verdict.live:
            self._course.swapped(verdict.seconds, time.monotonic())
            self._refused_orders = 0
            log.info("the server took the version", version=verdict.version)
            return
        log.warning("the server refused the version", version=verdict.version, reason=verdict.error)
        self._course.refused(verdict.version)
        retreat = self._course.retreat()
        if retreat is not None and retreat.to == verdict.version:
            self._refused_orders += 1
            if self._refused_orders >= RETREAT_ORDERS:
                self._refused_orders = 0
                self._course.retreat_refused()

    # --- what is not to be kept ---

    def _purge(self, order: Purge) -> Purged:
        """Delete, and answer when it is done; an order that comes again is answered again."""
        if order.purge_id in self._purged:
            return self._purged[order.purge_id]
        try:
            deleted = self._intake.purge(order.tenant, order.until)
            replays, recordings = self._at_rest.purge(order.tenant)
        except OSError as error:
            log.error("a purge has failed", reason=error.strerror)
            return Purged(order.purge_id, PurgeCounts(), f"the learner: {error.strerror}")
        self._checkpoint()  # the one before lists the spans that are gone
        deleted = deleted.plus(PurgeCounts(journal_traces=replays, recorded_traces=recordings))
        log.info("a tenant's traces are purged", **msgspec.structs.asdict(deleted))
        answer = self._purged[order.purge_id] = Purged(order.purge_id, deleted)
        while len(self._purged) > REMEMBERED_PURGES:
            self._purged.popitem(last=False)
        return answer

    def _expire(self, now: float) -> None:
        """Delete what has been kept as long as it may be. ``now``: seconds since the epoch."""
        hours = self._settings.retention_hours
        try:
            own = self._intake.expire(now - 3600 * hours)
            replays, recordings = self._at_rest.expire(now, hours)
        except OSError as error:
            log.error("old traces cannot be deleted", reason=error.strerror)
            return
        if own + replays + recordings:
            log.info("old traces are deleted", replay=own + replays, recordings=recordings)

    # --- reports and checkpoints ---

    def _tell(self, judging: bool = False) -> None:
        course, intake = self._course, self._intake
        loss, speed = course.recent()
        now = time.monotonic()
        progress, pacing = course.progress, course.pacing(now)
        self._inbox.tell_all(
            LearnerReport(
                pid=os.getpid(),
                phase=self._phase(judging),
                computing=self._training or judging,
                received=intake.received,
                rejected=dict(self._inbox.rejected),
                replay_tokens=intake.replay.training_tokens,
                heldout_tokens=intake.replay.heldout_tokens,
                tokens_seen=course.tokens_seen,
                updates=course.updates,
                loss=loss,
                tokens_per_second=speed,
                heldout_length=progress.heldout_length,
                live_length=progress.live_length,
                published=progress.published,
                judged=progress.judged,
                rolled_back=progress.rolled_back,
                drifts=progress.drifts,
                lr_scale=pacing.lr_scale,
                publish_interval_s=course.publish_interval_s(now),
                pace=pacing.reason,
            )
        )

    def _phase(self, judging: bool) -> str:
        if judging:
            return "judging"
        return "resting: the server is busy" if self._rest else self._course.progress.phase

    def _checkpoint(self) -> None:
        if self._course.session is None:
            return
        facts = {
            **self._course.facts(),
            "rejected": dict(self._inbox.rejected),
            "intake": self._intake.state(),
        }
        try:
            self._course.session.save(self._folder / "checkpoint", facts)
        except OSError as error:
            log.error(
                "the checkpoint cannot be written; the one before stays", reason=error.strerror
            )
