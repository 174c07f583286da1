"""Who computes on this machine's cores: the model, or the learner as well.

While the learner computes, the model leaves it a core. With one or two requests running that costs a fifth
of the tokens, as a step mostly waits for memory; with many it costs nearly a core's whole share, and a
drafter is of little use then. So the learner rests under load and catches up after it; what it is to learn
from waits in its bounded replay.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from server.engine_link import EngineLink
from server.learner_link import LearnerLink
from server.model_cores import ModelCores

BUSY = 6
"""Requests running that make the learner rest: from about here on a step computes more than it waits."""

CALM = 3
"""Requests running at which it may go on; between the two everything stays as it is."""

LONGEST_REST = 600.0
"""Seconds. Load without an end must not end the learning."""

RELIEF = 60.0
"""Seconds that it may then compute."""

MEMORY = 0.3
"""Share of the newest report in the running average."""

LINGER = 3.0
"""Seconds that the model still leaves the core after the learner computed last, unless that rests: between
two bursts of training it would only make steps uneven."""


@dataclass
class CoreShare:
    """``observe`` is called with each report of the engine; then ``resting`` and ``spared`` are set."""

    resting: bool = False
    """Whether the learner is to rest."""
    spared: int = 0
    """Cores that the model is to leave to it."""
    _running: float = 0.0
    _since: float = 0.0
    """When it began to rest, or was relieved."""
    _relieved: bool = False
    _computed: float | None = None
    """When the learner was last known to compute."""

    def observe(self, running: int, computing: bool, now: float) -> None:
        """``running``: requests in the engine; ``computing``: whether the learner is; ``now``: seconds, of
        a clock that never goes back."""
        self._running += MEMORY * (running - self._running)
        self._rest(now)
        if computing:
            self._computed = now
        if self._computed is None or self.resting:
            self.spared = int(computing)
        else:
            self.spared = int(now - self._computed < LINGER)

    def _rest(self, now: float) -> None:
        if self._running <= CALM:
            self.resting = self._relieved = False
        elif self._relieved:
            if now - self._since >= RELIEF:
                self.resting, self._relieved, self._since = True, False, now
        elif self.resting:
            if now - self._since >= LONGEST_REST:
                self.resting, self._relieved, self._since = False, True, now
        elif self._running >= BUSY:
            self.resting, self._since = True, now


def share_cores(engine: EngineLink, learner: LearnerLink, cores: ModelCores) -> None:
    """Between the model and a learner on this machine, anew with each report of either.

    Where the engine's threads are not ours to set (a GPU, or the user has set them), the learner never rests:
    its cores are not the model's. Neither does it while the model is allotted fewer than all.
    """
    share = CoreShare()

    def observe() -> None:
        report = engine.report
        if report is None or report.threads == 0:
            return
        share.observe(report.running, learner.computing, time.monotonic())
        learner.let_rest(share.resting and cores.all)
        engine.spare_cores(share.spared)

    # A learner that is gone says nothing, so the engine's reports count as well.
    learner.on_report.append(observe)
    engine.on_report.append(lambda _: observe())
