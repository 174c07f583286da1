"""The learner: takes traces, trains, judges candidates, publishes the ones that win.

One thread, one loop: messages, traces, an update, perhaps a judgement, perhaps a checkpoint. Every
wait is short, so a server is answered within about one update.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from learner.drafters.base import Drafter
from learner.drafters.registry import DRAFTERS
from learner.inbox import Inbox
from learner.intake import Intake
from learner.publisher import Publisher
from learner.session import TrainingSession
from learner.target import Target
from rlcore.checkpoint import CheckpointError
from rlcore.log import get_logger
from rlcore.records import Announce, DraftFiles, FetchDraft, Hello, LearnerReport, Verdict
from rlcore.settings import LearnSettings
from rlcore.transport import Frame
from rlcore.weights import WeightError, WeightStore

log = get_logger("learner")

START_TOKENS = 1500
"""Output tokens in the replay before the first update: a batch should not be one conversation."""

REPORT_INTERVAL = 1.0
FETCH_INTERVAL = 5.0
"""Seconds between two requests for the live version's files."""

RECENT_UPDATES = 50
"""Updates over which the reported loss and speed are averaged."""


class Learner:
    def __init__(
        self, settings: LearnSettings, folder: Path, target: Target, target_id: str, base: str
    ) -> None:
        self._settings = settings
        self._target = target
        self._target_id = target_id
        self._folder = folder
        self._inbox = Inbox(base)
        self._intake = Intake(settings, folder, target)
        self._publisher = Publisher(settings, WeightStore(folder / "drafts"))
        self._session: TrainingSession | None = None
        self._live: tuple[int, Drafter] | None = None
        self._live_identity: tuple[int, str] | None = None
        self._asked: tuple[bytes, int, str] | None = None
        """(server, version, digest) of the files that are on their way."""
        self._next_fetch = self._next_report = 0.0
        self._next_publish = time.monotonic() + settings.publish_interval_s
        self._next_checkpoint = time.monotonic() + settings.checkpoint_interval_s
        self._recent: deque[tuple[float, int, float]] = deque(maxlen=RECENT_UPDATES)
        self._report = LearnerReport(pid=os.getpid(), phase="waiting for a server")
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
        if self._session is not None:  # until then traces wait in the socket, which is bounded
            worked = self._intake.take(self._inbox, self._session.counts.add)
            worked |= self._train(self._session)
        now = time.monotonic()
        if now >= self._next_publish:
            self._next_publish = now + self._settings.publish_interval_s
            self._consider()
        if now >= self._next_checkpoint:
            self._next_checkpoint = now + self._settings.checkpoint_interval_s
            self._checkpoint()
        if now >= self._next_report:
            self._next_report = now + REPORT_INTERVAL
            self._tell()
        return worked

    # --- the live version ---

    def _take_messages(self) -> None:
        for server, message, frames in self._inbox.messages():
            if isinstance(message, Hello):
                self._greet(server, message)
            elif isinstance(message, FetchDraft):
                self._inbox.give(server, message, self._publisher.store)
            elif isinstance(message, DraftFiles):
                self._receive_live(server, message, frames)
            elif isinstance(message, Verdict):
                _log_verdict(message)
            else:
                self._inbox.reject("unexpected")

    def _greet(self, server: bytes, hello: Hello) -> None:
        if (hello.target_id, hello.method) != (self._target_id, self._settings.method):
            self._inbox.reject("hello_target")
            log.warning(
                "a server of another target or method asks for this learner",
                target=hello.target_id,
                method=hello.method,
            )
            return
        self._intake.target_version = hello.target_version
        self._publisher.last_version = max(self._publisher.last_version, hello.last_version)
        self._inbox.accept(server)
        wanted = (hello.live_version, hello.live_sha256)
        if wanted == self._live_identity:
            return
        if self._publisher.store.holds(*wanted):
            self._set_live(*wanted)
        elif time.monotonic() >= self._next_fetch:
            self._next_fetch = time.monotonic() + FETCH_INTERVAL
            self._asked = (server, *wanted)
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
            self._publisher.store.receive(version, files)
        except (WeightError, ValueError) as error:
            log.warning("the live draft was refused", version=version, reason=str(error))
            return
        if self._publisher.store.holds(version, sha256):
            self._set_live(version, sha256)

    def _set_live(self, version: int, sha256: str) -> None:
        try:
            live = self._load(version)
        except (ValueError, KeyError, RuntimeError, OSError) as error:
            log.error("the live draft cannot be read", version=version, reason=str(error))
            return
        self._live = (version, live.eval().requires_grad_(False))
        self._live_identity = (version, sha256)
        log.info("live draft", version=version)
        if self._session is None:
            self._begin(version)

    def _load(self, version: int) -> Drafter:
        folder = self._publisher.store.folder(version)
        return DRAFTERS[self._settings.method].load(folder, self._target)

    def _begin(self, version: int) -> None:
        """Start training from the live version, or go on where the last checkpoint stopped."""
        session = TrainingSession(self._load(version), self._target, self._settings)
        facts = None
        try:
            facts = session.load(self._folder / "checkpoint")
        except (CheckpointError, KeyError, RuntimeError) as error:
            log.error("the checkpoint cannot be used; the live draft is", reason=str(error))
            session = TrainingSession(self._load(version), self._target, self._settings)
        if facts is not None:
            self._report = msgspec.convert(facts["report"], LearnerReport)
            self._report.pid = os.getpid()
            self._inbox.rejected = self._report.rejected
            self._intake.received = self._report.received
            self._intake.training_tokens = facts["received_tokens"]
            self._intake.replay.load_state(facts["replay"])
            self._publisher.last_version = max(self._publisher.last_version, facts["last_version"])
        self._intake.reload(self._inbox, session.counts.add, count=facts is None)
        self._session = session
        log.info(
            "training begins",
            from_version=version,
            tokens_seen=session.tokens_seen,
            replay_tokens=self._intake.replay.training_tokens,
        )

    # --- training and publishing ---

    def _train(self, session: TrainingSession) -> bool:
        replay = self._intake.replay
        if replay.training_tokens < START_TOKENS:
            self._report.phase = "waiting for traces"
            return False
        if session.tokens_seen >= self._settings.replay_ratio * self._intake.training_tokens:
            self._report.phase = "idle"
            return False
        self._report.phase = "training"
        if session.trainer.updates == 0:
            session.follow_traffic()
        started = time.monotonic()
        spans = replay.draw(self._settings.batch_tokens)
        metrics = session.update(spans)
        if metrics.skipped is not None:
            log.warning("an update was skipped", reason=metrics.skipped)
        else:
            tokens = sum(span.anchors for span in spans)
            self._recent.append((time.monotonic() - started, tokens, metrics.loss))
        return True

    def _consider(self) -> None:
        """Judge the present weights against the live version, and announce them if they win."""
        if self._session is None or self._live is None:
            return
        spans = self._intake.replay.heldout()
        if not self._publisher.due(self._session, spans):
            return
        self._report.phase = "judging"
        self._tell()
        verdict, manifest = self._publisher.consider(self._session, *self._live, spans)
        self._report.judged += 1
        self._report.heldout_length = verdict.candidate_length
        self._report.live_length = verdict.live_length
        if manifest is not None:
            self._report.published += 1
            self._inbox.tell_all(Announce(manifest))

    # --- reports and checkpoints ---

    def _tell(self) -> None:
        report, session = self._report, self._session
        report.received = self._intake.received
        report.rejected = dict(self._inbox.rejected)
        report.replay_tokens = self._intake.replay.training_tokens
        report.heldout_tokens = self._intake.replay.heldout_tokens
        if session is not None:
            report.tokens_seen = session.tokens_seen
            report.updates = session.trainer.updates
        if self._recent:
            report.loss = sum(loss for _, _, loss in self._recent) / len(self._recent)
            seconds = sum(s for s, _, _ in self._recent)
            report.tokens_per_second = sum(n for _, n, _ in self._recent) / seconds
        self._inbox.tell_all(report)

    def _checkpoint(self) -> None:
        if self._session is None:
            return
        self._report.received = self._intake.received
        facts = {
            "report": msgspec.to_builtins(self._report),
            "received_tokens": self._intake.training_tokens,
            "replay": self._intake.replay.state(),
            "last_version": self._publisher.last_version,
        }
        try:
            self._session.save(self._folder / "checkpoint", facts)
        except OSError as error:
            log.error(
                "the checkpoint cannot be written; the one before stays", reason=error.strerror
            )


def _log_verdict(verdict: Verdict) -> None:
    if verdict.live:
        log.info("the server took the version", version=verdict.version)
    else:
        log.warning("the server refused the version", version=verdict.version, reason=verdict.error)
