"""One reading of everything the server knows about its drafter, for routes and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rlcore.engine.shares import ServedCount
from rlcore.log import get_logger
from rlcore.records.acceptance import AcceptanceCount, AdapterAcceptance
from rlcore.records.engine_link import CaptureCounts, EngineReport
from server.access import Gate
from server.collapse import CollapseAlarm
from server.drafts import Drafts
from server.engine_link import EngineLink
from server.learner_link import LearnerLink
from server.model_cores import ModelCores
from server.policy import Policy
from server.quotas import Quotas

log = get_logger("server")


@dataclass
class ServerState:
    """What the routes, the middleware and the metrics share."""

    drafts: Drafts
    engine_link: EngineLink
    learner_link: LearnerLink | None
    policy: Policy
    cores: ModelCores
    target_id: str
    speculative_tokens: int
    started: float
    """Seconds, of a clock that never goes back."""
    gate: Gate = field(default_factory=Gate)
    quotas: Quotas = field(default_factory=Quotas)
    engine_restarts: Callable[[], int] = lambda: 0
    ready: Callable[[], bool] = lambda: True
    refused: dict[str, int] = field(default_factory=dict)
    """Requests that the front answered itself, by code."""
    served: Callable[[], dict[str, ServedCount]] = dict
    """By tenant: what clients were given since the engine started."""
    collapse: CollapseAlarm = field(default_factory=CollapseAlarm)

    def acceptance(self) -> dict[int, AcceptanceCount]:
        report = self.engine_link.report
        return {} if report is None else {a.version: a for a in report.acceptance}

    def look_for_collapse(self, report: EngineReport) -> None:
        """Called with every report of the engine: raise or clear the alarm."""
        drafts = self.drafts
        counts = {count.version: count for count in report.acceptance}
        live = counts.get(drafts.live, AcceptanceCount(drafts.live))
        trained = drafts.manifest().origin != "untrained"
        change = self.collapse.observe(live.version, trained, live.steps, live.emitted)
        if change == "raised":
            log.error(
                "acceptance has collapsed: nothing that the live draft proposes is accepted",
                version=live.version,
                length=self.collapse.length,
            )
        elif change == "cleared":
            log.info("the collapse of acceptance is over", version=live.version)

    def adapters(self) -> list[AdapterAcceptance]:
        report = self.engine_link.report
        return [] if report is None else report.adapters

    def capture(self) -> CaptureCounts:
        report = self.engine_link.report
        return CaptureCounts() if report is None else report.capture


def acceptance_view(count: AcceptanceCount | None) -> dict[str, Any] | None:
    """Plain values of one version's counts, with the two figures made of them."""
    if count is None:
        return None
    return {**msgspec.to_builtins(count), "length": count.length, "rates": count.rates}


def cores_view(state: ServerState) -> dict[str, int]:
    """``threads``: with which the model computed at the engine's last report; all 0 where not ours to set."""
    report = state.engine_link.report
    return {
        "usable": state.cores.usable,
        "allotted": state.cores.allotted,
        "threads": 0 if report is None else report.threads,
    }


def tenant_status(state: ServerState) -> dict[str, Any]:
    """The body of ``GET /v1/paceline/status`` for a tenant: what serves it, and no traffic of others."""
    drafts = state.drafts
    return {
        "target": {"id": state.target_id, "version": state.policy.live},
        "draft": {
            "live": drafts.live,
            "method": drafts.method,
            "speculative_tokens": state.speculative_tokens,
        },
        "uptime_s": time.monotonic() - state.started,
    }


def status(state: ServerState) -> dict[str, Any]:
    """The body of ``GET /v1/paceline/status``."""
    drafts, link = state.drafts, state.learner_link
    acceptance = state.acceptance()
    learner: dict[str, Any] = {"alive": False, "age_s": None}
    if link is not None:
        learner = {"alive": link.alive, "age_s": link.age, "messages_rejected": link.rejected}
        if link.report is not None:
            learner |= msgspec.to_builtins(link.report)
    return {
        "target": {"id": state.target_id, "version": state.policy.live},
        "draft": {
            "live": drafts.live,
            "previous": drafts.previous,
            "origin": drafts.manifest().origin,
            "method": drafts.method,
            "speculative_tokens": state.speculative_tokens,
            "collapsed": state.collapse.active,
        },
        "acceptance": {
            "live": acceptance_view(acceptance.get(drafts.live)),
            "previous": acceptance_view(
                acceptance.get(drafts.previous) if drafts.previous is not None else None
            ),
            "total": {
                name: sum(
                    vars_of[name] for vars_of in map(msgspec.structs.asdict, acceptance.values())
                )
                for name in ("steps", "plain_steps", "emitted")
            },
        },
        "adapters": {
            one.adapter: {
                "total": acceptance_view(one.total),
                "versions": [acceptance_view(count) for count in one.versions],
            }
            for one in state.adapters()
        },
        "cores": cores_view(state),
        "learner": learner,
        "traces": msgspec.to_builtins(state.capture()),
        "swaps": {
            "count": drafts.statistics.count,
            "failed": drafts.statistics.failed,
            "last_seconds": drafts.statistics.last_seconds,
        },
        "policy_swaps": {
            "count": state.policy.count,
            "failed": state.policy.failed,
            "last": msgspec.to_builtins(state.policy.swaps[-1]) if state.policy.swaps else None,
        },
        "rollbacks": {
            "count": len(drafts.history.rollbacks()),
            "last": msgspec.to_builtins(drafts.history.rollbacks()[-1])
            if drafts.history.rollbacks()
            else None,
        },
        "uptime_s": time.monotonic() - state.started,
    }
