"""Learning from recordings: the live course of things with no server, and the same every time.

Traces arrive in the recordings' order; training keeps pace with their arrival at a fixed ratio, and a
promoted version goes "live" at once. Time is counted in trained positions, so nothing depends on how
fast the machine is. Nothing is written to the result's folder before the end.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from learner.course import Course
from learner.first_draft import ensure_draft
from learner.intake import Intake
from learner.recording import Recording
from learner.target import Target
from rlcore.home import Home
from rlcore.log import get_logger
from rlcore.records.wire import RecordError
from rlcore.settings import ReplaySettings
from rlcore.weights import WeightStore

log = get_logger("learner")

NOMINAL_SPEED = 500.0
"""Trained positions that count as a second."""

LAST_RATE = 0.02
"""Share of the learning rate at the end."""

LOG_INTERVAL = 30.0
"""Nominal seconds between two lines of progress."""


class Rehearsal:
    def __init__(
        self, settings: ReplaySettings, target: Target, target_id: str, home: Home, work: Path
    ) -> None:
        self._settings = settings
        self._store = WeightStore(work / "drafts")
        ensure_draft(
            self._store, target, target_id, settings.method, settings.draft,
            settings.draft_vocab, home,
        )  # fmt: skip
        self._intake = Intake(settings, None, target)
        self._course = Course(settings, target, self._store, self._intake, watched=False)
        self.rejected: dict[str, int] = {}
        first = max(self._store.versions())
        self._go_live(first)
        self._course.begin(first, None)
        self._next_line = 0.0

    @property
    def _now(self) -> float:
        return self._course.tokens_seen / NOMINAL_SPEED

    @property
    def aux_width(self) -> int:
        """Of the auxiliary states that its drafter reads; 0 when it reads none."""
        return self._intake.aux_size

    def run(self, recordings: Sequence[Recording]) -> None:
        for recording in recordings:
            for trace, frames in recording:
                try:
                    span = self._intake.put(trace, frames)
                except RecordError as error:
                    self.rejected[error.reason] = self.rejected.get(error.reason, 0) + 1
                    continue
                self._course.saw(span, self._now)
                self._train(self._settings.play_ratio)
        self._cool()
        if self._course.can_judge():
            self._judge()

    def _cool(self) -> None:
        """The rest, when everything has been played: the learning rate falls in a line to its end."""
        begun, ratio = self._course.tokens_seen, self._settings.replay_ratio
        rest = max(1.0, ratio * self._intake.training_tokens - begun)

        def cool() -> None:
            done = (self._course.tokens_seen - begun) / rest
            self._course.cooling = max(LAST_RATE, 1.0 - done)

        self._train(ratio, cool)

    def _train(self, ratio: float, before_update: Callable[[], None] = lambda: None) -> None:
        """Until so many positions are trained for each that was received, or nothing is gained."""
        before_update()
        while self._course.train(ratio, self._now):
            before_update()
            if self._course.due(self._now):
                self._judge()
            if self._now >= self._next_line:
                self._next_line = self._now + LOG_INTERVAL
                log.info("rehearsal", **self.facts())

    def _judge(self) -> None:
        manifest = self._course.consider(self._now)
        if manifest is not None:
            self._go_live(manifest.version)

    def _go_live(self, version: int) -> None:
        self._course.went_live(version, self._store.manifest(version).sha256)

    def facts(self) -> dict[str, Any]:
        """What was trained, and what came of it."""
        progress, replay = self._course.progress, self._intake.replay
        loss, speed = self._course.recent()
        return {
            "traces": self._intake.received,
            "rejected": self.rejected,
            "training_tokens": self._intake.training_tokens,
            "heldout_tokens": replay.heldout_tokens,
            "trained_tokens": self._course.tokens_seen,
            "updates": self._course.updates,
            "judged": progress.judged,
            "promoted": progress.published,
            "heldout_length": progress.heldout_length,
            "live_length": progress.live_length,
            "loss": loss,
            "tokens_per_second": round(speed, 1),
            "lr_scale": self._course.pacing(self._now).lr_scale,
        }

    def write(self, out: Path, facts: dict[str, Any]) -> None:
        """The version that won last, as a drafter folder, with the facts beside it."""
        live = self._course.live
        assert live is not None
        partial = out.with_name(f".{out.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(self._store.folder(live.version), partial)
        (partial / "rehearsal.json").write_text(json.dumps(facts, indent=1))
        partial.rename(out)


def rehearse(
    settings: ReplaySettings,
    recordings: Sequence[Recording],
    target: Target,
    target_id: str,
    home: Home,
) -> dict[str, Any]:
    """Learn from the recordings, write the best version to ``settings.out``; what came of it.

    Raises RecordingError before anything is trained when a recording does not fit.
    """
    for recording in recordings:
        recording.check(target_id, settings.method)
    with tempfile.TemporaryDirectory(prefix="paceline-rehearsal-") as work:
        rehearsal = Rehearsal(settings, target, target_id, home, Path(work))
        for recording in recordings:
            recording.check_aux(rehearsal.aux_width)
        rehearsal.run(recordings)
        facts = rehearsal.facts()
        rehearsal.write(settings.out, facts)
    return facts
