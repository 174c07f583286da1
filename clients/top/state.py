"""What the feed has told so far. No I/O and no clock of its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from clients.events import FeedEvent
from rlcore.feed import Change, History, Sample

SPAN_S = 600
"""How far back the curves go."""

KEPT_CHANGES = 50

Link = Literal["connecting", "live", "lost"]


@dataclass
class TopState:
    """``link`` and ``reason``: how it stands with the server, and since when it is gone why."""

    url: str
    link: Link = "connecting"
    reason: str = ""
    target: str = ""
    method: str = ""
    window_s: float = 0.0
    samples: deque[Sample] = field(default_factory=deque)
    """Of the last SPAN_S seconds, oldest first."""
    changes: deque[Change] = field(default_factory=lambda: deque(maxlen=KEPT_CHANGES))

    @property
    def sample(self) -> Sample | None:
        return self.samples[-1] if self.samples else None

    def take(self, event: FeedEvent) -> None:
        """A history replaces what was known: the server may be another one by now."""
        self.link, self.reason = "live", ""
        match event:
            case History():
                self.target, self.method = event.target, event.method
                self.window_s = event.window_s
                self.samples = deque(event.samples)
                self.changes = deque(event.changes, maxlen=KEPT_CHANGES)
            case Sample():
                self.samples.append(event)
            case Change():
                self.changes.append(event)
        while self.samples and self.samples[0].time < self.samples[-1].time - SPAN_S:
            self.samples.popleft()

    def lost(self, reason: str) -> None:
        """The last figures stay, as the last ones."""
        self.link, self.reason = "lost", reason
