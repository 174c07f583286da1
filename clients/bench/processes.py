"""A server's processes: the memory of all of them, and which is the engine."""

from __future__ import annotations

from contextlib import suppress

import psutil

from clients.process import ServerProcess

ENGINE = "EngineCore"
"""In the title of vLLM's engine process."""


def tree_memory(pid: int) -> int:
    """Bytes; a page that several of them share counts once in all (PSS)."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
    return total


def engine_of(server: ServerProcess) -> set[int]:
    """Process ids of the server and its engine."""
    found = {server.pid}
    for process in server.children():
        with suppress(psutil.NoSuchProcess):
            if ENGINE in " ".join(process.cmdline()):
                found.add(process.pid)
    return found
