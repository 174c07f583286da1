"""Throughput, busy share and queue depth of Generator, Environment and Trainer, window by window.

The caller gives the time with every event, in seconds of any clock that does not go back. A role is so
many workers, each of which is at work or not; its busy share is the mean share of them at work.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.asynchrony.errors import EventError


@dataclass(frozen=True)
class RoleWindow:
    """What one role did between two calls of ``window``."""

    seconds: float
    throughput: float
    """Units done per second (tokens or rollouts, as the caller counts)."""
    busy: float
    """Mean share of the workers at work, in [0, 1]; what is missing to 1 is idle."""
    queue: float
    """Units waiting for the role, on average over time."""
    longest_queue: float


class RoleMeter:
    """One role's events in, ``window`` out. Raises EventError when time goes back."""

    def __init__(self, now: float, workers: int = 1) -> None:
        if workers < 1:
            raise EventError(f"a role of {workers} workers does nothing; give 1 or more")
        self.workers = workers
        self._start = self._last = now
        self._working = 0
        self._depth = self._longest = 0.0
        self._clear()

    def working(self, workers: int, now: float) -> None:
        """So many of the workers are at work from now on."""
        if not 0 <= workers <= self.workers:
            raise EventError(f"{workers} of {self.workers} workers cannot be at work")
        self._pass(now)
        self._working = workers

    def queued(self, depth: float, now: float) -> None:
        """So many units wait for the role from now on."""
        if depth < 0:
            raise EventError(f"a queue cannot hold {depth}")
        self._pass(now)
        self._depth = depth
        self._longest = max(self._longest, depth)

    def done(self, units: float, now: float) -> None:
        """The role has done so many units more."""
        self._pass(now)
        self._units += units

    def window(self, now: float) -> RoleWindow:
        """What was since the last call, or the start; then the next window begins."""
        self._pass(now)
        seconds = now - self._start
        if seconds <= 0:
            raise EventError("a window needs time to pass; ask for it later")
        result = RoleWindow(
            seconds=seconds,
            throughput=self._units / seconds,
            busy=self._work / (seconds * self.workers),
            queue=self._waiting / seconds,
            longest_queue=self._longest,
        )
        self._start = now
        self._clear()
        return result

    def _clear(self) -> None:
        self._units = 0.0
        self._work = 0.0
        """Worker-seconds at work."""
        self._waiting = 0.0
        """Unit-seconds in the queue."""
        self._longest = self._depth

    def _pass(self, now: float) -> None:
        elapsed = now - self._last
        if not elapsed >= 0:
            raise EventError(f"time went back from {self._last} to {now}")
        self._work += elapsed * self._working
        self._waiting += elapsed * self._depth
        self._last = now
