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

from safetensors import SafetensorError

from learner.batch import Span
from learner.drafters.base import Drafter
from learner.drafters.registry import DRAFTERS
from learner.drift import TenantDrift
from learner.intake import Intake
from learner.pace import Outcome, Pace, Pacing, Traffic
from learner.publisher import Publisher
from learner.session import TrainingSession
from learner.shadow import drafted, shadow
from learner.target import Target
from learner.watch import Watch
from rlcore.checkpoint import CheckpointError
from rlcore.log import get_logger
from rlcore.records import DraftManifest, Retreat
from rlcore.settings import DrafterSettings
from rlcore.weights import WeightError, WeightStore

log = get_logger("learner")

START_TOKENS = 1500
"""Output tokens in the replay before the first update: a batch should not be one conversation."""

UNREADABLE = (WeightError, SafetensorError, ValueError, KeyError, RuntimeError, OSError)
"""What a version's files can be wrong with."""

RECENT_UPDATES = 50
"""Updates over which the loss and the speed are averaged."""

SPEED_WINDOW = 60.0
"""Seconds over which the speed of the traffic is averaged."""

COLD_TOKENS = 50.0
"""Tokens that a swap is taken to cost because running requests go on with the old drafter's KV."""


@dataclass(frozen=True)
class LiveDraft:
    """A version in service, as the learner sees it: frozen."""

    version: int
    sha256: str
    drafter: Drafter


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
        self._before: LiveDraft | None = None
        """The predecessor, while the live version is being watched."""
        self._watch: Watch | None = None
        self._retreat: Retreat | None = None
        self._drift = TenantDrift()
        self._pace = Pace(trained=False)
        self._next_judgement = 0.0
        self._arrivals: deque[tuple[float, int]] = deque()
        """(time, output positions) of the last SPEED_WINDOW seconds."""
        self.progress = Progress()
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
            self._resume_watch(facts["watch"])
            self.publisher.last_version = max(self.publisher.last_version, facts["last_version"])
        return facts

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the session."""
        return {
            "progress": asdict(self.progress),
            "pace": self._pace.state(),
            "drift": self._drift.state(),
            "watch": None
            if self._watch is None
            else [self._watch.version, self._watch.predecessor, self._watch.state()],
            "last_version": self.publisher.last_version,
        }

    def _new_session(self, version: int) -> TrainingSession:
        session = TrainingSession(self._load(version), self._target, self._settings)
        if self._is_trained(version):
            session.counts.trust(session.drafter.vocab)
        return session

    def _is_trained(self, version: int) -> bool:
        return self.publisher.store.manifest(version).origin != "untrained"

    def _load(self, version: int) -> Drafter:
        folder = self.publisher.store.folder(version)
        return DRAFTERS[self._settings.method].load(folder, self._target)

    def went_live(self, version: int, sha256: str) -> bool:
        """A version of the store serves from now on; False when it cannot be read."""
        try:
            drafter = self._load(version).eval().requires_grad_(False)
        except UNREADABLE as error:
            log.error("the live draft cannot be read", version=version, reason=str(error))
            return False
        gone = self.live
        self.live = LiveDraft(version, sha256, drafter)
        log.info("live draft", version=version)
        self._begin_watch(gone)
        if self._retreat is not None and self._retreat.to == version:
            self._start_over(version)
        self._retreat = None
        return True

    def _begin_watch(self, gone: LiveDraft | None) -> None:
        """Compare the version with its parent from now on, if it is a learned one."""
        self._watch = self._before = None
        assert self.live is not None
        manifest = self.publisher.store.manifest(self.live.version)
        if not self._watched or manifest.origin != "learned" or manifest.parent is None:
            return
        if gone is not None and gone.version == manifest.parent:
            self._before = gone
        elif manifest.parent in self.publisher.store.versions():
            try:
                drafter = self._load(manifest.parent).eval().requires_grad_(False)
            except UNREADABLE as error:
                log.warning("no watch: the predecessor cannot be read", reason=str(error))
                return
            sha256 = self.publisher.store.manifest(manifest.parent).sha256
            self._before = LiveDraft(manifest.parent, sha256, drafter)
        if self._before is not None:
            self._watch = Watch(self.live.version, self._before.version)

    def _resume_watch(self, saved: list[Any] | None) -> None:
        """Go on with a watch over the same two versions."""
        if saved is not None and self._watch is not None:
            version, predecessor, state = saved
            if (version, predecessor) == (self._watch.version, self._watch.predecessor):
                self._watch.load_state(state)

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
        self._arrivals.append((now, span.anchors))
        while self._arrivals[0][0] < now - SPEED_WINDOW:
            self._arrivals.popleft()
        if not self._watched or self.live is None:
            return
        emitted, steps = drafted(span, self.live.version)
        version = self.live.version
        drift = self._drift.observe(span.tenant, emitted, steps, version) if steps else None
        if drift is not None:
            log.warning("the traffic has shifted", tenant=span.tenant, reason=drift.reason)
            self._pace.drifted(self._traffic())
            self.progress.drifts += 1
        if self._watch is not None:
            self._compare(self._watch, span)

    def _compare(self, watch: Watch, span: Span) -> None:
        """One span's steps, as the live version took them and as its predecessor would have."""
        assert self.live is not None
        assert self._before is not None
        k = self._settings.speculative_tokens
        pair = shadow(self._before.drafter, span, self.live.version, k)
        if pair is None:
            return
        result = watch.observe(span.tenant, span.request_id, pair.tokens, pair.live, pair.other)
        if result.decision == "continue":
            return
        log.info("the watch over the live version ends", **asdict(result))
        if result.decision == "roll_back":
            self._retreat = Retreat(self.live.version, self._before.version, result.reason)
        self._watch = self._before = None

    def retreat(self) -> Retreat | None:
        """The order to go back, until the server has done so."""
        return self._retreat

    def retreat_refused(self) -> None:
        """The server cannot go back: learn on from what is live, whatever it is."""
        self._retreat = None

    # --- training and publishing ---

    @property
    def tokens_seen(self) -> int:
        return 0 if self.session is None else self.session.tokens_seen

    @property
    def updates(self) -> int:
        return 0 if self.session is None else self.session.trainer.updates

    def pacing(self) -> Pacing:
        """How fast to learn at present, and how often to publish."""
        return self._pace.pacing(self._traffic())

    @property
    def publish_interval_s(self) -> float:
        """Between two judgements."""
        return self._settings.publish_interval_s or self.pacing().publish_interval_s

    def _traffic(self) -> Traffic:
        """The speed is that of the last window; before it is full, as if it were."""
        return Traffic(
            received=self.intake.training_tokens,
            heldout=self.intake.heldout_tokens,
            trained=self.tokens_seen,
            tokens_per_second=sum(tokens for _, tokens in self._arrivals) / SPEED_WINDOW,
        )

    def train(self, received_ratio: float) -> bool:
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
        pacing = self.pacing()
        if not pacing.train:
            self.progress.phase = "idle: nothing is to be gained"
            return False
        self.progress.phase = "training"
        if session.trainer.updates == 0:
            session.follow_traffic()
        session.trainer.lr_scale = pacing.lr_scale
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
        if now < self._next_judgement and not self.pacing().judge_now:
            return False
        return self.can_judge()

    def can_judge(self) -> bool:
        """Whether there is something new to judge, and enough held-out traffic."""
        return (
            self.session is not None
            and self.live is not None
            and self._retreat is None
            and self.publisher.due(self.session, self.intake.replay)
        )

    def consider(self, now: float) -> DraftManifest | None:
        """Judge the session's weights against the live version; the version made of them if they won."""
        assert self.session is not None
        assert self.live is not None
        self.progress.phase = "judging"
        started = time.process_time()
        verdict, manifest = self.publisher.consider(
            self.session,
            self.live.version,
            self.live.drafter,
            self.intake.replay,
            self.pacing().least_gain if self._watched else 0.0,  # offline a swap costs nothing
        )
        progress = self.progress
        progress.judged += 1
        if verdict.compared:
            progress.heldout_length = verdict.candidate_length
            progress.live_length = verdict.live_length
        progress.published += manifest is not None
        outcome = Outcome(
            gain=verdict.gain,
            gain_lower=verdict.gain_lower,
            length=verdict.live_length,
            promoted=manifest is not None,
            seconds=time.process_time() - started if self._watched else 0.0,
        )
        if verdict.compared:
            self._pace.judged(outcome, self._traffic())
        self._next_judgement = now + self.publish_interval_s
        return manifest

    def swapped(self, stall_s: float) -> None:
        """The server made a version live; the engine stood still for so long."""
        self._pace.swapped(stall_s, COLD_TOKENS, self._traffic())

    def recent(self) -> tuple[float | None, float]:
        """(loss, positions per second of processor time) over the last updates."""
        if not self._recent:
            return None, 0.0
        seconds = sum(s for s, _, _ in self._recent)
        loss = sum(loss for _, _, loss in self._recent) / len(self._recent)
        return loss, sum(n for _, n, _ in self._recent) / seconds
