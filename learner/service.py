"""The learner: takes traces, trains, judges candidates, publishes the ones that win.

One thread, one loop: messages, traces, an update, perhaps a judgement, perhaps a checkpoint. Every
wait is short, so a server is answered within about one update.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

import msgspec
import torch

from learner.batch import Span
from learner.drafters.base import Drafter
from learner.drafters.registry import DRAFTERS
from learner.gate import Judgement, judge
from learner.inbox import Inbox
from learner.journal import Journal
from learner.judging import LiveScores, conditional_rates, gate_scores, score_spans
from learner.replay import Replay
from learner.session import TrainingSession
from learner.split import HeldoutSplit
from learner.target import Target
from rlcore.checkpoint import CheckpointError
from rlcore.log import get_logger
from rlcore.records import (
    Announce,
    DraftFiles,
    DraftManifest,
    FetchDraft,
    Hello,
    LearnerReport,
    RecordError,
    Verdict,
    VerifyTrace,
)
from rlcore.settings import LearnSettings
from rlcore.weights import WeightError, WeightStore

log = get_logger("learner")

START_TOKENS = 1500
"""Output tokens in the replay before the first update: a batch should not be one conversation."""

HELDOUT_MARGIN = 1.3
"""Held-out tokens gathered early, over those the gate needs: the last of each span are not judged."""

REPORT_INTERVAL = 1.0
FETCH_INTERVAL = 5.0
"""Seconds between two requests for the live version's files."""

KEPT_VERSIONS = 4
"""Published versions kept on the learner's side; the server keeps its own."""


class Learner:
    def __init__(
        self, settings: LearnSettings, folder: Path, target: Target, target_id: str, base: str
    ) -> None:
        self._settings = settings
        self._target = target
        self._target_id = target_id
        self._folder = folder
        self._store = WeightStore(folder / "drafts")
        self._inbox = Inbox(base)
        budget = int(settings.replay_gib * 2**30)
        self._journal = Journal(folder / "replay", budget)
        split = HeldoutSplit(settings.heldout_share, int(HELDOUT_MARGIN * settings.gate_tokens))
        self._replay = Replay(budget, split, settings.gate_tokens, settings.seed)
        self._session: TrainingSession | None = None
        self._live: tuple[int, Drafter] | None = None
        self._live_scores = LiveScores()
        self._last_version = 0
        self._next_fetch = self._next_report = 0.0
        self._next_publish = time.monotonic() + settings.publish_interval_s
        self._next_checkpoint = time.monotonic() + settings.checkpoint_interval_s
        self._losses: deque[float] = deque(maxlen=50)
        self._recent: deque[tuple[float, int]] = deque(maxlen=50)
        self._received_tokens = 0
        self._report = LearnerReport(pid=os.getpid(), phase="starting")
        self._stopping = False
        self._updates_judged = -1

    def stop(self) -> None:
        """Finish the update at hand, write a checkpoint, and return from ``run``."""
        self._stopping = True

    def run(self) -> None:
        log.info("listening", target=self._target_id, method=self._settings.method)
        try:
            while not self._stopping:
                worked = self.turn()
                if not worked:
                    self._inbox.wait(200)
        finally:
            self._checkpoint()
            self._journal.close()
            self._inbox.close()

    def turn(self) -> bool:
        """One pass of the loop; False when there was nothing to do."""
        self._take_messages()
        took = self._take_traces()
        self._ask_for_live()
        trained = self._train()
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
        return took or trained

    # --- messages and traces ---

    def _take_messages(self) -> None:
        for server, message, frames in self._inbox.messages():
            if isinstance(message, Hello):
                self._greet(message)
            elif isinstance(message, FetchDraft):
                self._inbox.give(server, message, self._store)
            elif isinstance(message, DraftFiles):
                self._receive_live(message, frames)
            elif isinstance(message, Verdict):
                self._hear_verdict(message)
            else:
                self._inbox.reject("unexpected")

    def _greet(self, hello: Hello) -> None:
        if (hello.target_id, hello.method) != (self._target_id, self._settings.method):
            self._inbox.reject("hello_target")
            log.warning(
                "a server of another target or method asks for this learner",
                target=hello.target_id,
                method=hello.method,
            )
            return
        self._last_version = max(self._last_version, hello.last_version)
        if self._live is not None and self._live[0] == hello.live_version:
            return
        if hello.live_version in self._store.versions():
            self._set_live(hello.live_version)
        elif time.monotonic() >= self._next_fetch:
            self._next_fetch = time.monotonic() + FETCH_INTERVAL
            self._inbox.tell_all(FetchDraft(hello.live_version))

    def _ask_for_live(self) -> None:
        if self._live is None:
            self._report.phase = "waiting for a server"

    def _receive_live(self, message: DraftFiles, frames: list) -> None:
        if message.error is not None or [len(f) for f in frames] != message.sizes:
            log.warning(
                "the live draft could not be fetched",
                version=message.version,
                reason=message.error or "sizes differ",
            )
            return
        try:
            self._store.receive(message.version, dict(zip(message.names, frames, strict=True)))
        except WeightError as error:
            log.warning("the live draft was refused", version=message.version, reason=str(error))
            return
        self._set_live(message.version)

    def _set_live(self, version: int) -> None:
        try:
            live = DRAFTERS[self._settings.method].load(self._store.folder(version), self._target)
        except (ValueError, KeyError, RuntimeError, OSError) as error:
            log.error("the live draft cannot be read", version=version, reason=str(error))
            return
        self._live = (version, live.eval().requires_grad_(False))
        log.info("live draft", version=version)
        if self._session is None:
            self._begin(version)

    def _begin(self, version: int) -> None:
        """Start training from the live version, or go on where the last checkpoint stopped."""
        module = DRAFTERS[self._settings.method].load(self._store.folder(version), self._target)
        self._session = TrainingSession(module, self._target, self._settings)
        try:
            facts = self._session.load(self._folder / "checkpoint")
        except (CheckpointError, KeyError) as error:
            log.error(
                "the checkpoint cannot be used; starting from the live draft", reason=str(error)
            )
            self._session = TrainingSession(module, self._target, self._settings)
            facts = None
        if facts is not None:
            counters = {**facts["report"], "pid": os.getpid(), "phase": "resuming"}
            self._report = msgspec.convert(counters, LearnerReport)
            self._inbox.rejected = self._report.rejected
            self._received_tokens = facts["received_tokens"]
            self._replay.load_state(facts["replay"])
            self._last_version = max(self._last_version, facts["last_version"])
        self._reload_replay()
        log.info(
            "training begins",
            from_version=version,
            tokens_seen=self._session.tokens_seen,
            replay_tokens=self._replay.training_tokens,
        )

    def _reload_replay(self) -> None:
        for trace, frames in self._journal.read():
            try:
                self._check(trace)
                self._replay.add(self._span(trace, frames))
            except RecordError as error:
                self._inbox.reject(error.reason)

    def _take_traces(self) -> bool:
        if self._session is None:
            return False  # they wait in the socket, which is bounded
        taken = self._inbox.traces(self._check)
        for trace, frames in taken:
            try:
                span = self._span(trace, frames[1:])
            except RecordError as error:
                self._inbox.reject(error.reason)
                continue
            if not self._replay.add(span):
                self._inbox.reject("nothing_new")
                continue
            self._report.received += 1
            try:
                self._journal.append(frames)
            except OSError as error:
                self._inbox.reject("journal_unwritable")
                log.error(
                    "the replay cannot be written to disk; learning goes on from memory",
                    reason=error.strerror,
                )
            if not self._replay.holds_out(span):
                self._received_tokens += span.anchors
                self._session.counts.add(span)
        if taken:
            self._journal.flush()
        return bool(taken)

    def _check(self, trace: VerifyTrace) -> None:
        """Raises RecordError for a trace of another target version."""
        if trace.target_version != 0:
            raise RecordError("target_version", f"{trace.target_version}, not 0")

    def _span(self, trace: VerifyTrace, frames: list) -> Span:
        span = Span.from_trace(trace, frames)
        needs_aux = DRAFTERS[self._settings.method].needs_aux
        span.check(
            vocab_size=self._target.vocab_size,
            hidden_size=self._target.hidden_size,
            aux_size=3 * self._target.hidden_size if needs_aux else None,
        )
        for tensor in (span.aux, span.last):
            if tensor is not None and not torch.isfinite(tensor.float().abs().sum()):
                raise RecordError("not_finite", "hidden states hold NaN or infinity")
        return span

    # --- training and publishing ---

    def _train(self) -> bool:
        session, settings = self._session, self._settings
        if session is None:
            return False
        if self._replay.training_tokens < START_TOKENS:
            self._report.phase = "waiting for traces"
            return False
        if session.tokens_seen >= settings.replay_ratio * self._received_tokens:
            self._report.phase = "idle"
            return False
        self._report.phase = "training"
        if session.trainer.updates == 0:
            session.follow_traffic()
        started = time.monotonic()
        spans = self._replay.draw(settings.batch_tokens)
        metrics = session.update(spans)
        if metrics.skipped is not None:
            log.warning("an update was skipped", reason=metrics.skipped)
            return True
        self._losses.append(metrics.loss)
        self._recent.append((time.monotonic() - started, sum(s.anchors for s in spans)))
        return True

    def _consider(self) -> None:
        """Judge the present weights against the live version, and publish them if they win."""
        if self._session is None or self._live is None:
            return
        if self._session.trainer.updates == self._updates_judged:
            return
        spans = self._replay.heldout()
        steps = self._settings.speculative_tokens
        # An anchor with fewer than K known tokens behind it cannot be judged.
        judged = sum(max(0, span.anchors - steps + 1) for span in spans)
        if judged < self._settings.gate_tokens:
            return
        self._report.phase = "judging"
        self._tell()
        self._updates_judged = self._session.trainer.updates
        version, live = self._live
        self._session.follow_traffic()
        candidate = self._session.drafter.eval()
        mine = score_spans(candidate, spans, steps)
        theirs = self._live_scores.of(version, live, spans, steps)
        verdict = judge(gate_scores(mine), gate_scores(theirs), self._settings.gate_tokens)
        self._report.judged += 1
        self._report.heldout_length = verdict.candidate_length
        self._report.live_length = verdict.live_length
        log.info(
            "candidate judged",
            length=round(verdict.candidate_length, 3),
            live=round(verdict.live_length, 3),
            gain_at_least=round(verdict.gain_lower, 4),
            heldout_tokens=verdict.tokens,
            result=verdict.reason,
        )
        if verdict.promote:
            self._publish(version, verdict, conditional_rates(mine))

    def _publish(self, parent: int, verdict: Judgement, rates: tuple[float, ...]) -> None:
        assert self._session is not None
        live_tensors = self._store.manifest(parent)
        manifest = DraftManifest(
            version=max([self._last_version, *self._store.versions()]) + 1,
            parent=parent,
            method=self._settings.method,
            sha256="",
            target_id=live_tensors.target_id,
            target_version=live_tensors.target_version,
            origin="learned",
            tokens_seen=self._session.tokens_seen,
            updates=self._session.trainer.updates,
            heldout_tokens=verdict.tokens,
            heldout_length=verdict.candidate_length,
            heldout_rates=rates,
            parent_length=verdict.live_length,
            gain_lower=verdict.gain_lower,
        )
        tensors, config = self._session.drafter.export(self._export_dtype(parent))
        try:
            manifest = self._store.publish(tensors, config, manifest)
        except WeightError as error:
            log.error("a version could not be written", reason=str(error))
            return
        self._last_version = manifest.version
        self._report.published += 1
        self._inbox.tell_all(Announce(manifest))
        for old in self._store.versions()[:-KEPT_VERSIONS]:
            if old != parent:
                self._store.remove(old)

    def _export_dtype(self, version: int) -> torch.dtype:
        """Weights are published in the dtype of the version they follow."""
        from safetensors import safe_open

        with safe_open(self._store.folder(version) / "model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                dtype = file.get_slice(name).get_dtype()
                if dtype in ("F32", "BF16", "F16"):
                    return {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[
                        dtype
                    ]
        raise WeightError("malformed", f"version {version} holds no floating-point tensor")

    def _hear_verdict(self, verdict: Verdict) -> None:
        if verdict.live:
            log.info("the server took the version", version=verdict.version)
        else:
            log.warning(
                "the server refused the version", version=verdict.version, reason=verdict.error
            )

    # --- reports and checkpoints ---

    def _tell(self) -> None:
        report, session = self._report, self._session
        report.rejected = dict(self._inbox.rejected)
        report.replay_tokens = self._replay.training_tokens
        report.heldout_tokens = self._replay.heldout_tokens
        if session is not None:
            report.tokens_seen = session.tokens_seen
            report.updates = session.trainer.updates
        if self._losses:
            report.loss = sum(self._losses) / len(self._losses)
        seconds = sum(s for s, _ in self._recent)
        report.tokens_per_second = sum(n for _, n in self._recent) / seconds if seconds else 0.0
        self._inbox.tell_all(report)

    def _checkpoint(self) -> None:
        if self._session is None:
            return
        facts = {
            "report": msgspec.to_builtins(self._report),
            "received_tokens": self._received_tokens,
            "replay": self._replay.state(),
            "last_version": self._last_version,
        }
        try:
            self._session.save(self._folder / "checkpoint", facts)
        except OSError as error:
            log.error(
                "the checkpoint cannot be written; the one before stays", reason=error.strerror
            )
