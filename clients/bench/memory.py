"""Memory of a process and all its descendants."""

from __future__ import annotations

from contextlib import suppress

import psutil


def tree_memory(pid: int) -> int:
    """Bytes; a page that several of them share counts once in all (PSS)."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
    return total
