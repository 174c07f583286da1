"""The figures of each update: what rollouts were like, how fast everything went, what became of tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rlcore.asynchrony.balance import Window
from rlcore.asynchrony.role_windows import RoleWindow
from rlcore.asynchrony.token_ledger import TokenLedger, effective_rate
from rlcore.generator.base import GeneratorStatus
from rlcore.rl.rollouts import Roles
from rlcore.rollout import Rollout

SAMPLES_SHOWN = 4
"""Rollouts of each update that are written out for people."""


class Speedometer:
    """Rates since the update before. ``window`` first, then ``figures``."""

    def __init__(self, roles: Roles, ledger: TokenLedger) -> None:
        self._roles = roles
        self._ledger = ledger
        self._totals = ledger.totals()
        self._since = time.monotonic()
        self._status = GeneratorStatus(0, -1)

    def begin(self, status: GeneratorStatus) -> None:
        """From here on; what was before (a start, a resume) is in no rate."""
        self._status, self._totals = status, self._ledger.totals()
        self._since = time.monotonic()
        self.window(self._since)

    def window(self, now: float) -> Window:
        roles = self._roles
        return Window(
            roles.generator.window(now), roles.environment.window(now), roles.trainer.window(now)
        )

    def figures(self, window: Window, status: GeneratorStatus, now: float) -> dict[str, float]:
        totals = self._ledger.totals()
        span = totals.since(self._totals)
        seconds = now - self._since
        rate = effective_rate(span, seconds, len(os.sched_getaffinity(0)))
        figures = {
            "seconds": seconds,
            "effective_tokens_per_second": rate.tokens_per_second,
            "effective_tokens_per_core_second": rate.tokens_per_core_second,
            "draft_version": float(status.draft_version),
            **{f"tokens/{fate}": float(count) for fate, count in span.fates.items()},
            **_role_figures("generator", window.generator),
            **_role_figures("environment", window.environment),
            **_role_figures("trainer", window.trainer),
            **_acceptance(status, self._status),
        }
        self._totals, self._since, self._status = totals, now, status
        return figures


def _acceptance(status: GeneratorStatus, before: GeneratorStatus) -> dict[str, float]:
    """A restarted engine counts from 0: that update has no such figures."""
    steps = status.draft_steps - before.draft_steps
    plain = status.plain_steps - before.plain_steps
    emitted = status.emitted - before.emitted
    if min(steps, plain, emitted) < 0 or steps + plain == 0:
        return {}
    figures = {"drafted_steps": steps / (steps + plain)}
    if steps:
        figures["acceptance_length"] = emitted / steps
    return figures


def _role_figures(name: str, window: RoleWindow) -> dict[str, float]:
    return {
        f"{name}/throughput": window.throughput,
        f"{name}/idle": 1 - window.busy,
        f"{name}/queue": window.queue,
    }


def staleness(trained: Iterable[tuple[Sequence[Rollout], int]]) -> dict[str, float]:
    """``trained``: groups, and the version of the policy that the update on each was applied to."""
    steps = [
        version - rollout.oldest_version
        for group, version in trained
        for rollout in group
        if rollout.sampled
    ]
    if not steps:
        return {}
    return {"staleness": sum(steps) / len(steps), "staleness_max": float(max(steps))}


def samples(rollouts: Sequence[Rollout], tokenizer: Any) -> list[dict[str, Any]]:
    """A few of them as text."""
    step = max(1, len(rollouts) // SAMPLES_SHOWN)
    return [
        {
            "rollout": r.rollout_id,
            "task": r.task_id,
            "text": tokenizer.decode(r.token_ids),
            "reward": r.reward,
            "versions": [r.oldest_version, r.newest_version],
        }
        for r in rollouts[::step][:SAMPLES_SHOWN]
    ]
