"""Counts by tenant, or by adapter, for a bounded number of names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlcore.records.engine_link import OTHER_SHARES, ShareCount

NAMED = 64
"""Names counted each by itself, in the order in which they come; all that come later are one."""


def _bounded(known: dict, name: str) -> str:
    return OTHER_SHARES if name not in known and len(known) >= NAMED else name


class Shares:
    """What the engine counts for each name; at most NAMED + 1 of them."""

    def __init__(self) -> None:
        self._counts: dict[str, ShareCount] = {}

    def of(self, name: str) -> ShareCount:
        """The count of a name, to add to."""
        name = _bounded(self._counts, name)
        return self._counts.setdefault(name, ShareCount(name))

    def counts(self) -> list[ShareCount]:
        return list(self._counts.values())


@dataclass
class ServedCount:
    """Output tokens that a name's responses have returned so far, and its requests under way."""

    tokens: int = 0
    running: int = 0


class Served:
    """What clients were given, for each name; at most NAMED + 1 of them."""

    def __init__(self) -> None:
        self._ended: dict[str, int] = {}

    def end(self, name: str, tokens: int) -> None:
        """A request of this name has ended with so many output tokens."""
        name = _bounded(self._ended, name)
        self._ended[name] = self._ended.get(name, 0) + tokens

    def now(self, under_way: Iterable[tuple[str, int]]) -> dict[str, ServedCount]:
        """With the requests that have not ended: (name, output tokens so far) each."""
        found = {name: ServedCount(tokens) for name, tokens in self._ended.items()}
        for name, tokens in under_way:
            count = found.setdefault(_bounded(found, name), ServedCount())
            count.tokens += tokens
            count.running += 1
        return found
