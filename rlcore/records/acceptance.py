"""Drafts verified and accepted, by version, by position and by adapter."""

from __future__ import annotations

from itertools import zip_longest

import msgspec

from rlcore.records.wire import Id


class AcceptanceCount(msgspec.Struct):
    """Verified drafts of one version, counted by draft position (index 0 is the first draft)."""

    version: int
    steps: int = 0
    """Verification steps in which at least one draft was verified."""
    plain_steps: int = 0
    """Decode steps without a draft."""
    emitted: int = 0
    """Tokens emitted by the ``steps`` above, bonus token included."""
    drafted: list[int] = []
    accepted: list[int] = []

    def observe(self, k: int, accepted: int) -> None:
        if k == 0:
            self.plain_steps += 1
            return
        grow = k - len(self.drafted)
        if grow > 0:
            self.drafted.extend([0] * grow)
            self.accepted.extend([0] * grow)
        self.steps += 1
        self.emitted += accepted + 1
        for i in range(k):
            self.drafted[i] += 1
        for i in range(accepted):
            self.accepted[i] += 1

    def plus(self, other: AcceptanceCount) -> AcceptanceCount:
        """Both counts of one version together."""
        return AcceptanceCount(
            self.version,
            self.steps + other.steps,
            self.plain_steps + other.plain_steps,
            self.emitted + other.emitted,
            _sums(self.drafted, other.drafted),
            _sums(self.accepted, other.accepted),
        )

    @property
    def length(self) -> float | None:
        """Acceptance length: tokens per step in which something was drafted, bonus included."""
        return self.emitted / self.steps if self.steps else None

    @property
    def rates(self) -> list[float]:
        """Conditional acceptance by position: accepted at i, given that i was reached."""
        reached = [self.steps, *self.accepted]
        return [a / r if r else 0.0 for a, r in zip(self.accepted, reached, strict=False)]


class AdapterAcceptance(msgspec.Struct):
    """What was accepted of the drafts for one LoRA adapter."""

    adapter: Id
    total: AcceptanceCount
    """Of all draft versions; its version is -1."""
    versions: list[AcceptanceCount] = []
    """Of the last few, oldest first."""


def _sums(first: list[int], second: list[int]) -> list[int]:
    """Element by element; the shorter one is filled up with zeros."""
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]
