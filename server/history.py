"""What was live when, and why it changed: one JSON line a change, beside the versions."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Literal

import msgspec

from rlcore.log import get_logger

log = get_logger("server")

FILE = "history.jsonl"
KEPT_CHANGES = 1000
"""Changes kept in memory and, after a restart, in the file."""

Cause = Literal["promoted", "chosen", "rolled_back"]
"""By the learner's gate, by an operator, by the learner's watch over the live version."""


class Change(msgspec.Struct, frozen=True):
    """The live version changed from ``before`` to ``version``."""

    time: float
    """Seconds since the epoch."""
    version: int
    before: int
    cause: Cause
    reason: str = ""


class History:
    """Append-only. A file that cannot be read or written costs the history, never a swap."""

    def __init__(self, root: Path) -> None:
        self._path = root / FILE
        self._torn = False
        """The file may end within a line; the next one must not be glued to it."""
        self.changes: deque[Change] = deque(self._read(), maxlen=KEPT_CHANGES)

    def add(self, version: int, before: int, cause: Cause, reason: str = "") -> None:
        change = Change(time.time(), version, before, cause, reason)
        self.changes.append(change)
        line = msgspec.json.encode(change) + b"\n"
        try:
            with open(self._path, "ab") as file:
                file.write(b"\n" + line if self._torn else line)
            self._torn = False
        except OSError as error:
            self._torn = True
            log.error("the history cannot be written", reason=error.strerror)

    def rollbacks(self) -> list[Change]:
        return [change for change in self.changes if change.cause == "rolled_back"]

    def rolled_back(self) -> dict[int, str]:
        """Versions that the watch took out of service -> why."""
        return {change.before: change.reason for change in self.rollbacks()}

    def _read(self) -> list[Change]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            log.error("the history cannot be read", reason=error.strerror)
            return []
        self._torn = bool(content) and not content.endswith(b"\n")
        changes = []
        damaged = 0
        for line in content.split(b"\n"):
            if not line:
                continue
            try:
                changes.append(msgspec.json.decode(line, type=Change))
            except (msgspec.DecodeError, UnicodeDecodeError):
                damaged += 1
        if damaged:
            log.warning("damaged lines of the history are left out", lines=damaged)
        if len(changes) > KEPT_CHANGES:
            changes = changes[-KEPT_CHANGES:]
            self._rewrite(changes)
        return changes

    def _rewrite(self, changes: list[Change]) -> None:
        """Have the file hold just these changes; it stays as it is when the disk cannot take them."""
        partial = self._path.with_name(f".{FILE}.{os.getpid()}")
        try:
            try:
                partial.write_bytes(b"".join(msgspec.json.encode(c) + b"\n" for c in changes))
                partial.rename(self._path)
            finally:
                partial.unlink(missing_ok=True)
            self._torn = False
        except OSError as error:
            log.error("the history cannot be shortened", reason=error.strerror)
