"""How fast traffic comes in at present."""

from __future__ import annotations

from collections import deque

SPEED_WINDOW = 60.0
"""Seconds over which the speed is averaged."""


class Speed:
    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, int]] = deque()
        """(time, tokens) of the window that ends at the last call's time."""

    def add(self, tokens: int, now: float) -> None:
        self._arrivals.append((now, tokens))

    def at(self, now: float) -> float:
        """Tokens per second over the window that ends now; before it is full, as if it were."""
        while self._arrivals and self._arrivals[0][0] < now - SPEED_WINDOW:
            self._arrivals.popleft()
        return sum(tokens for _, tokens in self._arrivals) / SPEED_WINDOW
