"""What may not come back: by tenant, up to when its traffic was purged. Kept on disk, beside the replay."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rlcore.records.wire import RecordError

MOST_TENANTS = 100_000
"""Purges remembered; the oldest is forgotten. One is only needed while a trace may be on its way."""


class Cutoffs:
    """``path`` None keeps them in memory only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._until: dict[str, float] = {}
        if path is not None and path.exists():
            self._until = msgspec.json.decode(path.read_bytes(), type=dict[str, float])

    def add(self, tenant: str, until: float) -> None:
        """Traces of this tenant that ended up to then are refused. Raises OSError."""
        until = max(until, self._until.pop(tenant, 0.0))
        self._until[tenant] = until
        while len(self._until) > MOST_TENANTS:
            del self._until[next(iter(self._until))]
        if self._path is not None:
            write_private(self._path, msgspec.json.encode(self._until))

    def check(self, tenant: str, ended: float) -> None:
        """Raises RecordError for a trace that was purged before it came."""
        if ended <= self._until.get(tenant, -1.0):
            raise RecordError("purged", f"{tenant!r} was purged after this ended")


class Oldest:
    """When the oldest trace of each file ended, so that a file with nothing old in it is not read again."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, int, float]] = {}

    def may_be(self, path: Path, before: float) -> bool:
        """Whether something in the file may have ended before then. Raises OSError."""
        size, changed, oldest = self._known.get(path, (-1, -1, 0.0))
        found = path.stat()
        return (found.st_size, found.st_mtime_ns) != (size, changed) or oldest < before

    def note(self, path: Path, ended: Iterable[float]) -> None:
        """When each of the file's traces ended, as it is now; forgets a file that is gone."""
        try:
            found = path.stat()
        except FileNotFoundError:
            self._known.pop(path, None)
            return
        oldest = min(ended, default=math.inf)
        self._known[path] = (found.st_size, found.st_mtime_ns, oldest)


def write_private(path: Path, content: bytes) -> None:
    """Replace a file whole, for its owner's eyes, and on the disk when this returns. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have what was replaced or removed in a folder survive a power cut. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
