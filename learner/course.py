"""One drafter's learning, from spans to versions: trains, judges, watches, goes back.

No sockets and no clock: ``service`` drives it with live traffic, ``rehearsal`` with recordings. The
time is passed in, so that what happens depends on the traffic, the seed and the given times alone.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from learner.batch import Span
from learner.drift import TenantDrift
from learner.intake import Intake
from learner.live import UNREADABLE, LiveDraft, load_live, load_version
from learner.pace import Outcome, Pace, Pacing, Traffic
from learner.publisher import Publisher
from learner.session import TrainingSession
from learner.shadow import drafted
from learner.speed import SPEED_WINDOW, Speed
from learner.target import Target
from learner.trial import Trial
from rlcore.checkpoint import CheckpointError
from rlcore.log import get_logger
from rlcore.records.learner_link import Retreat
from rlcore.records.versions import DraftManifest
from rlcore.settings import DrafterSettings
from rlcore.weights import WeightStore

log = get_logger("learner")

START_TOKENS = 1500
"""Output tokens in the replay before the first update: a batch should not be one conversation."""

RECENT_UPDATES = 50
"""Updates over which the loss and the speed are averaged."""

COLD_TOKENS = 50.0
"""Tokens that a swap is taken to cost because running requests go on with the old drafter's KV."""


@dataclass
class Progress:
    """What a report says of the training; survives a restart."""

    phase: str = "waiting for a server"
    judged: int = 0
    published: int = 0
    rolled_back: int = 0
    drifts: int = 0
    heldout_length: float | None = None
    live_length: float | None = None


class Course:
    """``watched``: whether the spans come from the live version's own service, so that its outcomes
    say how it fares. Recordings were served by other versions."""

    def __init__(
        self,
        settings: DrafterSettings,
        target: Target,
        store: WeightStore,
        intake: Intake,
        *,
        watched: bool,
    ) -> None:
        self._settings = settings
        self._target = target
        self._watched = watched
        self.intake = intake
        self.publisher = Publisher(settings, store)
        self.session: TrainingSession | None = None
        self.live: LiveDraft | None = None
        self._trial: Trial | None = None
        """The live version's."""
        self._announced: set[int] = set()
        """Versions that a server has neither taken nor refused."""
        self._drift = TenantDrift()
        self._pace = Pace(trained=False)
        self._next_judgement = 0.0
        self._speed = Speed()
        self.progress = Progress()
        self.cooling = 1.0
        """Factor on the learning rate, for a course whose end is known."""
        self._recent: deque[tuple[float, int, float]] = deque(maxlen=RECENT_UPDATES)

    # --- the live version ---

    def begin(self, version: int, checkpoint: Path | None) -> dict[str, Any] | None:
        """Start training from a version, or go on where a checkpoint stopped; its facts, if so."""
        self.session = self._new_session(version)
        self._pace = Pace(trained=self._is_trained(version))
        if checkpoint is None:
            return None
        try:
            facts = self.session.load(checkpoint)
        except (CheckpointError, KeyError, RuntimeError) as error:
            log.error("the checkpoint cannot be used; the live draft is", reason=str(error))
            self.session = self._new_session(version)
            return None
        if facts is not None:
            self.progress = Progress(**facts["progress"])
            self._pace.load_state(facts["pace"])
            self._drift.load_state(facts["drift"])
            if self._trial is not None:
                self._trial.resume(facts["watch"])
            self.publisher.last_version = max(self.publisher.last_version, facts["last_version"])
        return facts

    def retarget(self, target: Target, version: int) -> None:
        """The target has new weights. The drafter learns on from where it is, from new traffic."""
        self._target = target
        self.intake.retarget(target, version)
        self.publisher.target_version = version
        if self.session is not None:
            self.session.retarget(target)
        if self._trial is not None:
            self._trial.retarget(target)

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the session."""
        return {
            "progress": asdict(self.progress),
            "pace": self._pace.state(),
            "drift": self._drift.state(),
            "watch": None if self._trial is None else self._trial.state(),
            "last_version": self.publisher.last_version,
        }

    def _new_session(self, version: int) -> TrainingSession:
        store, method = self.publisher.store, self._settings.method
        drafter = load_version(store, version, method, self._target)
        session = TrainingSession(drafter, self._target, self._settings)
        if self._is_trained(version):
            session.counts.trust(session.drafter.vocab)
        return session

    def _is_trained(self, version: int) -> bool:
        return self.publisher.store.manifest(version).origin != "untrained"

    def _load_live(self, version: int) -> LiveDraft:
        """Raises one of UNREADABLE, also for a draft that cannot follow the one in training."""
        live = load_live(self.publisher.store, version, self._settings.method, self._target)
        if self.session is not None and live.drafter.aux_count != self.session.drafter.aux_count:
            raise ValueError(
                f"it reads {live.drafter.aux_count} auxiliary layers, the traffic so far has "
                f"{self.session.drafter.aux_count}; restart the learner"
            )
        return live

    def went_live(self, version: int, sha256: str) -> bool:
        """A version of the store serves from now on; False when it cannot be read."""
        if self.live is not None and (version, sha256) == (self.live.version, self.live.sha256):
            return True
        try:
            live = self._load_live(version)
        except UNREADABLE as error:
            log.error("the live draft cannot be read", version=version, reason=str(error))
            return False
        assert live.sha256 == sha256
        gone, self.live = self.live, live
        self.intake.aux_count = live.drafter.aux_count
        log.info("live draft", version=version)
        went_back = self._trial is not None and self._trial.leads_to(live)
        before = None if went_back else self._predecessor(live, gone)
        self._trial = Trial(live, before, self._settings.speculative_tokens)
        if went_back:
            self._start_over(version)
        if version in self._announced:
            self.progress.published += 1
            self._pace.published(self.intake.training_tokens + self.intake.heldout_tokens)
        self._announced.clear()  # the others were judged against a version that is gone
        return True

    def _predecessor(self, live: LiveDraft, gone: LiveDraft | None) -> LiveDraft | None:
        """The version to compare with from now on, if the live one is a learned one."""
        store = self.publisher.store
        manifest = store.manifest(live.version)
        if not self._watched or manifest.origin != "learned" or manifest.parent is None:
            return None
        if gone is not None and gone.version == manifest.parent:
            return gone
        if manifest.parent not in store.versions():
            return None
        try:
            return self._load_live(manifest.parent)
        except UNREADABLE as error:
            log.warning("no watch: the predecessor cannot be read", reason=str(error))
            return None

    def _start_over(self, version: int) -> None:
        """Train on from the version that was gone back to: what came after it is not trusted."""
        assert self.session is not None
        old, self.session = self.session, self._new_session(version)
        self.session.take_counters(old)
        self._pace.rolled_back()
        self.progress.rolled_back += 1

    # --- traffic ---

    def counted(self, span: Span) -> None:
        """Count a span's tokens for the draft vocabulary, if it may be trained on."""
        if self.session is not None and not self.intake.replay.holds_out(span):
            self.session.counts.add(span)

    def saw(self, span: Span, now: float) -> None:
        """A span that just came in."""
        self.counted(span)
        if self._speed.at(now) == 0.0 and self._settings.publish_interval_s is None:
            # An interval that was set while the traffic faded is far too long for what comes now.
            self._next_judgement = min(self._next_judgement, now + SPEED_WINDOW)
        self._speed.add(span.anchors, now)
        if not self._watched or self.live is None:
            return
        version = self.live.version
        emitted, steps = drafted(span, version)
        drift = self._drift.observe(span.stream, emitted, steps, version) if steps else None
        if drift is not None:
            log.warning("the traffic has shifted", tenant=span.stream, reason=drift.reason)
            self._pace.drifted(self._traffic(now))
            self.progress.drifts += 1
        if self._trial is not None:
            self._trial.observe(span)

    def retreat(self) -> Retreat | None:
        """The order to go back, until the server has left the version."""
        return None if self._trial is None else self._trial.order()

    def retreat_refused(self) -> None:
        """The server cannot go back: learn on from what is live, whatever it is."""
        if self._trial is not None:
            self._trial.refused()

    def serves(self, version: int) -> None:
        """What a server says is live; its weights may not be here yet."""
        if self._trial is not None:
            self._trial.serves(version)

    # --- training and publishing ---

    @property
    def tokens_seen(self) -> int:
        return 0 if self.session is None else self.session.tokens_seen

    @property
    def updates(self) -> int:
        return 0 if self.session is None else self.session.trainer.updates

    def pacing(self, now: float) -> Pacing:
        """How fast to learn at present, and how often to publish."""
        return self._pace.pacing(self._traffic(now))

    def publish_interval_s(self, now: float) -> float:
        """Between two judgements."""
        return self._settings.publish_interval_s or self.pacing(now).publish_interval_s

    def _traffic(self, now: float) -> Traffic:
        return Traffic(
            received=self.intake.training_tokens,
            heldout=self.intake.heldout_tokens,
            trained=self.tokens_seen,
            tokens_per_second=self._speed.at(now),
        )

    def train(self, received_ratio: float, now: float) -> bool:
        """One update; False when there is nothing to train on, or nothing to be gained.

        ``received_ratio``: positions trained for each one received, at most.
        """
        session, replay = self.session, self.intake.replay
        if session is None:
            return False
        if replay.training_tokens < START_TOKENS:
            self.progress.phase = "waiting for traces"
            return False
        if session.tokens_seen >= received_ratio * self.intake.training_tokens:
            self.progress.phase = "idle"
            return False
        pacing = self.pacing(now)
        if not pacing.train:
            self.progress.phase = "idle: nothing is to be gained"
            return False
        self.progress.phase = "training"
        if session.trainer.updates == 0:
            session.follow_traffic()
        session.trainer.lr_scale = pacing.lr_scale * self.cooling
        started = time.process_time()
        spans = replay.draw(self._settings.batch_tokens)
        metrics = session.update(spans)
        if metrics.skipped is not None:
            log.warning("an update was skipped", reason=metrics.skipped)
        else:
            tokens = sum(span.anchors for span in spans)
            self._recent.append((time.process_time() - started, tokens, metrics.loss))
        return True

    def due(self, now: float) -> bool:
        """Whether the session's weights are to be judged."""
        if now < self._next_judgement and not self.pacing(now).judge_now:
            return False
        return self.can_judge()

    def can_judge(self) -> bool:
        """Whether there is something new to judge, and enough held-out traffic."""
        return (
            self.session is not None
            and self.live is not None
            and not (self._trial is not None and self._trial.failed)
            and self.publisher.due(self.session, self.intake.replay)
        )

    def consider(self, now: float) -> DraftManifest | None:
        """Judge the session's weights against the live version; the version made of them if they won.

        It counts as published once it is live.
        """
        assert self.session is not None
        assert self.live is not None
        self.progress.phase = "judging"
        started = time.process_time()
        verdict, manifest = self.publisher.consider(
            self.session,
            self.live,
            self.intake.replay,
            self.pacing(now).least_gain if self._watched else 0.0,  # offline a swap costs nothing
        )
        progress = self.progress
        progress.judged += 1
        if verdict.compared:
            progress.heldout_length = verdict.candidate_length
            progress.live_length = verdict.live_length
        if manifest is not None:
            self._announced.add(manifest.version)
        outcome = Outcome(
            gain=verdict.gain,
            gain_lower=verdict.gain_lower,
            length=verdict.live_length,
            won=manifest is not None,
            seconds=time.process_time() - started if self._watched else 0.0,
        )
        if verdict.compared:
            self._pace.judged(outcome, self._traffic(now))
        self._next_judgement = now + self.publish_interval_s(now)
        return manifest

    def refused(self, version: int) -> None:
        """The server did not take an announced version."""
        self._announced.discard(version)

    def swapped(self, stall_s: float, now: float) -> None:
        """The server made a version live; the engine stood still for so long."""
        self._pace.swapped(stall_s, COLD_TOKENS, self._traffic(now))

    def recent(self) -> tuple[float | None, float]:
        """(loss, positions per second of processor time) over the last updates."""
        if not self._recent:
            return None, 0.0
        seconds = sum(s for s, _, _ in self._recent)
        loss = sum(loss for _, _, loss in self._recent) / len(self._recent)
        return loss, sum(n for _, n, _ in self._recent) / seconds
