"""Alarm when a trained drafter's acceptance collapses: nothing it drafts is accepted any more.

Whatever the cause (broken weights, stale drafter KV, traffic of a new kind), drafting then only costs.
Counters come in as totals, about once a second; the length is that of the last WINDOW_STEPS steps.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

WINDOW_STEPS = 300
"""Drafted steps looked back on; fewer say nothing."""

RAISED_BELOW = 1.02
"""Acceptance length of a collapse."""

CLEARED_ABOVE = 1.06
"""Acceptance length at which the alarm ends."""

Change = Literal["raised", "cleared"]


class CollapseAlarm:
    def __init__(self) -> None:
        self._version: int | None = None
        self._seen = (0, 0)
        """The totals last reported: drafted steps, tokens they emitted."""
        self._window: deque[tuple[int, int]] = deque()
        self._steps = self._emitted = 0
        """Of the window."""
        self.active = False

    @property
    def length(self) -> float | None:
        """Acceptance length of the window; None while it is too short."""
        return self._emitted / self._steps if self._steps >= WINDOW_STEPS else None

    def observe(self, version: int, trained: bool, steps: int, emitted: int) -> Change | None:
        """Totals of the live version; what changed, if anything.

        Totals that went down are those of an engine that was started again. An untrained version
        raises nothing, and a change of version ends an alarm.
        """
        if version != self._version or not trained:
            self._version = version
            self._seen = (steps, emitted)
            self._forget()
            return self._set(False)
        if steps < self._seen[0] or emitted < self._seen[1]:
            self._seen = (0, 0)
            self._forget()
        self._add(steps - self._seen[0], emitted - self._seen[1])
        self._seen = (steps, emitted)
        length = self.length
        if length is None:
            return None
        if self.active:
            return self._set(length <= CLEARED_ABOVE)
        return self._set(length < RAISED_BELOW)

    def _add(self, steps: int, emitted: int) -> None:
        if steps == 0:
            return
        self._window.append((steps, emitted))
        self._steps += steps
        self._emitted += emitted
        while self._steps - self._window[0][0] >= WINDOW_STEPS:
            old_steps, old_emitted = self._window.popleft()
            self._steps -= old_steps
            self._emitted -= old_emitted

    def _forget(self) -> None:
        self._window.clear()
        self._steps = self._emitted = 0

    def _set(self, active: bool) -> Change | None:
        if active == self.active:
            return None
        self.active = active
        return "raised" if active else "cleared"
