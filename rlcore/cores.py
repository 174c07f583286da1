"""How many cores of this machine a model may compute on."""

from __future__ import annotations

import os

import psutil


def usable() -> int:
    """Cores that this process may run on; hyperthreads count as cores."""
    return len(os.sched_getaffinity(0))


def computing() -> int:
    """Of those, as many as are worth a thread in a step: hyperthreads share what computes."""
    physical = psutil.cpu_count(logical=False)
    return max(1, min(physical or usable(), usable()))
