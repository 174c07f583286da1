"""A server's processes: the memory of all of them, and which is the engine."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import psutil

from clients.process import ServerProcess

ENGINE = "EngineCore"
"""In the title of vLLM's engine process."""

LEARNER = "learn"
"""An argument of the learner's."""


def memory_by_part(pid: int) -> dict[str, int]:
    """Bytes of ``server``, ``engine`` and ``learner``, each with its children; a page that several
    processes share counts once in all (PSS)."""
    parts: Counter[str] = Counter()
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                part = "engine" if ENGINE in " ".join(words) else "server"
                parts["learner" if LEARNER in words else part] += process.memory_full_info().pss
    return dict(parts)


def tree_memory(pid: int) -> int:
    """Bytes of all of them."""
    return sum(memory_by_part(pid).values())


def engine_of(server: ServerProcess) -> set[int]:
    """Process ids of the server and its engine."""
    found = {server.pid}
    for process in server.children():
        with suppress(psutil.NoSuchProcess):
            if ENGINE in " ".join(process.cmdline()):
                found.add(process.pid)
    return found
