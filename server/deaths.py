"""Whether an engine that died is started again, and after how long: a pure state machine."""

from __future__ import annotations

from collections import deque

WINDOW = 600.0
"""Seconds looked back on."""

MOST = 5
"""Deaths within the window that are forgiven. An engine that dies once a week is an accident, one that dies
at each start does not come back by itself."""

FIRST_DELAY = 0.0
SECOND_DELAY = 1.0
LONGEST_DELAY = 30.0
"""Seconds before a start: none after a first death, then doubling from the second on."""


class Deaths:
    def __init__(self) -> None:
        self._times: deque[float] = deque()

    @property
    def recent(self) -> int:
        """Deaths within the window, as of the last one."""
        return len(self._times)

    def observe(self, now: float) -> float | None:
        """The engine died, or did not start; seconds to wait before the next start, None to give up.

        ``now``: seconds, of a clock that never goes back.
        """
        self._times.append(now)
        while now - self._times[0] > WINDOW:
            self._times.popleft()
        if self.recent > MOST:
            return None
        if self.recent == 1:
            return FIRST_DELAY
        return min(LONGEST_DELAY, SECOND_DELAY * 2.0 ** (self.recent - 2))
