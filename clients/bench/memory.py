"""Memory of a process and all its descendants over time."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

import psutil


def tree_memory(pid: int) -> int:
    """Bytes of the process and its descendants; a shared page counts once in all (PSS)."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
    return total


class MemoryWatch:
    """``with MemoryWatch(pid) as watch: ... watch.samples``: (seconds since ``origin``, bytes)."""

    def __init__(self, pid: int, interval_s: float = 2.0, origin: float | None = None) -> None:
        self.samples: list[tuple[float, int]] = []
        self._pid = pid
        self._interval = interval_s
        self._origin = time.time() if origin is None else origin
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(30)

    def _watch(self) -> None:
        while True:
            self.samples.append((time.time() - self._origin, tree_memory(self._pid)))
            if self._stop.wait(self._interval):
                return
