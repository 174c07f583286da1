"""An engine, a learner and their traffic as their reports tell of them, for tests without either."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from rlcore.engine.shares import ServedCount
from rlcore.records.acceptance import AcceptanceCount
from rlcore.records.engine_link import CaptureCounts, EngineReport, ShareCount, SpeculationReport
from rlcore.records.learner_link import LearnerReport

MOST_DRAFTS = 3
PLAIN_SECONDS = 0.021
DRAFT_SECONDS = 0.003
"""That one more draft adds to a step."""

TENANTS = {"acme": 0.6, "globex": 0.3, "initech": 0.1}


@dataclass
class Traffic:
    """``advance`` it; then its reports hold the totals so far."""

    version: int = 3
    streams: int = 2
    drafts: int = MOST_DRAFTS
    rate: float = 0.62
    """Conditional acceptance of a draft."""
    measured: bool = True
    """Whether a plain step's cost is known."""
    learning: bool = True
    counts: dict[int, AcceptanceCount] = field(default_factory=dict)
    speculation: SpeculationReport = field(
        default_factory=lambda: SpeculationReport("s", 0, 0, 0, 0, 0.0, 0.0, 0.0)
    )
    tenants: dict[str, ShareCount] = field(default_factory=dict)
    served_tokens: dict[str, float] = field(default_factory=dict)
    captured: float = 0.0
    learner: LearnerReport = field(
        default_factory=lambda: LearnerReport(1, "training", computing=True)
    )
    draw: random.Random = field(default_factory=lambda: random.Random(7))

    def advance(self, seconds: float) -> None:
        """So many seconds of an engine that is always busy."""
        cost = PLAIN_SECONDS + DRAFT_SECONDS * self.drafts
        steps = max(1, round(seconds / cost)) if self.streams else 0
        count = self.counts.setdefault(self.version, AcceptanceCount(self.version))
        tokens = 0
        for _ in range(steps * self.streams):
            accepted = 0
            while accepted < self.drafts and self.draw.random() < self.rate:
                accepted += 1
            count.observe(self.drafts, accepted)
            tokens += accepted + 1
        report = self.speculation
        report.drafts_now = self.drafts
        report.decode_steps += steps
        report.drafts += steps * self.drafts
        report.tokens += tokens
        if self.measured and steps:
            report.seconds += seconds
            report.plain_seconds += tokens / self.streams * PLAIN_SECONDS
        elif steps:
            report.unknown_seconds += seconds
        report.running, report.waiting = self.streams, max(0, self.streams - 4)
        self._share(tokens, steps * self.streams)
        if self.learning:
            self._learn(seconds, tokens)

    def _share(self, tokens: int, steps: int) -> None:
        for name, part in TENANTS.items():
            share = self.tenants.setdefault(name, ShareCount(name))
            share.steps += math.ceil(steps * part)
            share.emitted += round(tokens * part)
            share.traces += round(tokens * part / 40)
            self.served_tokens[name] = self.served_tokens.get(name, 0) + tokens * part
        self.captured += tokens / 40

    def _learn(self, seconds: float, tokens: int) -> None:
        learner = self.learner
        learner.computing = self.streams < 6
        learner.received = round(self.captured * 0.97)
        learner.rejected = {"stale_target": 3} if self.captured > 100 else {}
        learner.tokens_seen += round(320 * seconds)
        learner.tokens_per_second = 320.0
        learner.updates += 1
        learner.replay_tokens = min(65536, learner.replay_tokens + tokens)
        learner.heldout_tokens = learner.replay_tokens // 30
        learner.loss = 1.2 + 1.4 * math.exp(-learner.updates / 400)
        learner.live_length = 1 + sum(self.rate**i for i in range(1, MOST_DRAFTS + 1))
        learner.heldout_length = learner.live_length + 0.04
        learner.judged, learner.published = learner.updates // 60, learner.updates // 180

    def served(self) -> dict[str, ServedCount]:
        return {
            name: ServedCount(round(tokens), 1 if self.streams else 0)
            for name, tokens in self.served_tokens.items()
        }

    def engine_report(self) -> EngineReport:
        captured = round(self.captured)
        dropped = {"opted_out": captured // 50, "learner_away": captured // 90}
        sent = captured - sum(dropped.values())
        return EngineReport(
            worker="w",
            live_version=self.version,
            speculative_tokens=self.drafts,
            acceptance=list(self.counts.values()),
            capture=CaptureCounts(captured, sent, {r: n for r, n in dropped.items() if n}),
            tenants=list(self.tenants.values()),
        )
